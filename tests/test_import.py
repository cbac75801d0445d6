"""What a plain `import kvmnn` loads and offers."""

import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import kvmnn


def loaded_by(code: str) -> set[str]:
    """The modules that some code loads, next to those of numpy."""
    code = f"import sys, numpy; a = set(sys.modules); {code}; print(*sorted(set(sys.modules) - a))"
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_frames_loads_no_heavy_modules() -> None:
    loaded = loaded_by("import kvmnn.frames; kvmnn.frames.decode")
    assert "kvmnn.frames._decoder" in loaded
    heavy = {"torch", "onnxruntime", "tqdm", "pandas", "scipy", "matplotlib", "asyncio", "multiprocessing", "unittest"}
    assert {name.split(".")[0] for name in loaded} & heavy == set()
    assert len(loaded) < 120


def test_import_kvmnn_loads_no_numpy() -> None:
    """An interrupt in the first tenths of a second of the command finds `main` there, not half of numpy."""
    loaded = {name for name in loaded_by("import kvmnn") if name.startswith("kvmnn.")}
    assert loaded == {"kvmnn._interrupt", "kvmnn.errors"}
    assert loaded_by("import kvmnn; kvmnn.encode") >= {"kvmnn.frames._encoder"}


@pytest.mark.parametrize(
    "code",
    ["import kvmnn", "import kvmnn.frames.zstd", "from kvmnn.packed import PackLayout", "import kvmnn.lm.cache"],
)
def test_import_unbuilt_checkout_error_names_the_command(code: str, tmp_path: Path) -> None:
    package = Path(kvmnn.__file__).parent
    shutil.copytree(package, tmp_path / "kvmnn", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: kvmnn has no compiled modules in {tmp_path / 'kvmnn'}: run `pip install -e .` in the checkout, "
        "or leave it, to import the kvmnn that is installed"
    )
    assert (done.stderr.count("Traceback"), "circular" in done.stderr) == (1, False)


def test_import_public_names_exist() -> None:
    assert all(hasattr(kvmnn, name) for name in kvmnn.__all__)
    assert {"encode", "decode", "inspect", "fnv1a64", "encode_many", "decode_many", "encode_block"} <= set(
        kvmnn.__all__
    )


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="has no stable API")
def test_import_compiled_modules_are_abi3() -> None:
    suffixes = tuple(EXTENSION_SUFFIXES)
    names = [path.name for path in Path(kvmnn.__file__).parent.rglob("*") if path.name.endswith(suffixes)]
    assert len(names) > 10
    assert [name for name in names if sys.platform != "win32" and not name.endswith(".abi3.so")] == []
    assert len({name.partition(".")[0] for name in names}) == len(names)


@pytest.mark.parametrize(("old", "new"), [("Rotary", "RopeConfig"), ("Planner", "H2OPlanner"), ("plan", "plan_blocks")])
def test_import_old_public_name_error_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{old}': it is {new} now"):
        getattr(kvmnn, old)
    assert hasattr(kvmnn, new)
