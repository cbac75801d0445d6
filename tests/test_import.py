"""What a plain `import kvmnn` loads and offers."""

import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import kvmnn


def loaded_by(code: str) -> set[str]:
    """The modules that some code loads, beside those of numpy."""
    code = f"import sys, numpy; a = set(sys.modules); {code}; print(*sorted(set(sys.modules) - a))"
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_is_light() -> None:
    loaded = loaded_by("import kvmnn.frames")
    assert "kvmnn.frames._decoder" in loaded
    heavy = {"torch", "onnxruntime", "tqdm", "pandas", "scipy", "matplotlib", "asyncio", "multiprocessing", "unittest"}
    assert {name.split(".")[0] for name in loaded} & heavy == set()
    assert len(loaded) < 120


def test_import_of_the_face_loads_nothing() -> None:
    """An interrupt in the first tenths of a second of the command finds `main` there, not half of numpy."""
    assert {name for name in loaded_by("import kvmnn") if name.startswith("kvmnn.")} == {"kvmnn.errors"}
    assert loaded_by("import kvmnn; kvmnn.encode") >= {"kvmnn.frames._decoder"}


def test_public_names() -> None:
    assert all(hasattr(kvmnn, name) for name in kvmnn.__all__)
    assert {"encode", "decode", "inspect", "fnv1a64", "encode_many", "decode_many", "encode_block"} <= set(
        kvmnn.__all__
    )


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="has no stable API")
def test_one_build_of_each_compiled_module_for_every_python() -> None:
    suffixes = tuple(EXTENSION_SUFFIXES)
    names = [path.name for path in Path(kvmnn.__file__).parent.rglob("*") if path.name.endswith(suffixes)]
    assert len(names) > 10
    assert [name for name in names if sys.platform != "win32" and not name.endswith(".abi3.so")] == []
    assert len({name.partition(".")[0] for name in names}) == len(names)
