"""What a plain `import kvmnn` loads and offers."""

import subprocess
import sys

import kvmnn


def test_import_is_light() -> None:
    code = "import sys; import numpy; a = set(sys.modules); import kvmnn; print(*sorted(set(sys.modules) - a))"
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "kvmnn.frames._decoder" in loaded
    heavy = {"torch", "onnxruntime", "tqdm", "pandas", "scipy", "matplotlib", "asyncio", "multiprocessing", "unittest"}
    assert {name.split(".")[0] for name in loaded} & heavy == set()
    assert len(loaded) < 120


def test_public_names() -> None:
    assert all(hasattr(kvmnn, name) for name in kvmnn.__all__)
    assert {"encode", "decode", "inspect", "fnv1a64", "encode_many", "decode_many", "encode_block"} <= set(
        kvmnn.__all__
    )
