"""Results of `kvmnn.compressor` equal the command's output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressor_files import checkpoint, weights
from compressor_model import weight_file

import kvmnn
from kvmnn.cli.entry_point import main
from kvmnn.compressor import (
    ForwardOptions,
    compress_cache,
    compress_file,
    convert_checkpoint,
    export_weights,
    inspect_weights,
    kvcm,
    verify_weights,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "c.pth", weights())
    return tmp_path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*argv: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert main(list(argv)) == code
        return capsys.readouterr()

    return call


def told(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    return {**document, "seconds": 0}


def as_json(verb: str, result: Any) -> dict[str, Any]:
    return told(json.dumps({"verb": verb, **result.to_dict()}))


def test_compressor_package_exports_all_names() -> None:
    for name in kvmnn.compressor.__all__:
        assert getattr(kvmnn.compressor, name) is not None
        assert name in dir(kvmnn.compressor)
    with pytest.raises(AttributeError, match="no attribute 'decompress'"):
        kvmnn.compressor.decompress  # type: ignore[attr-defined]  # noqa: B018


def test_compressor_package_import_is_lazy() -> None:
    code = (
        "import sys, kvmnn; kvmnn.compressor; print(sum(name.startswith('kvmnn.compressor') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


def test_convert_and_export_results_equal_command_output(here: Path, shell: Any) -> None:
    made = convert_checkpoint("c.pth", "w.bin")
    assert shell("compressor", "convert", "c.pth", "w.bin", "-f")[0] == f"{made}\n"
    assert told(shell("compressor", "convert", "c.pth", "w.bin", "-f", "--json")[0]) == as_json("convert", made)
    assert made.label == "LOSSY"
    exported = export_weights("w.bin", "w.npz")
    assert shell("compressor", "export", "w.bin", "-o", "w.npz", "-f")[0] == f"{exported}\n"
    assert told(shell("compressor", "export", "w.bin", "-o", "w.npz", "-f", "--json")[0]) == as_json("export", exported)
    assert export_weights(kvcm.read_weight_file("w.bin"), "v.npz").num_tensors == exported.num_tensors


def test_inspect_and_verify_results_equal_command_output(here: Path, shell: Any) -> None:
    convert_checkpoint("c.pth", "w.bin")
    for path in ("w.bin", "c.pth"):
        account = inspect_weights(path)
        assert shell("compressor", "inspect", path)[0] == f"{account}\n"
        assert json.loads(shell("compressor", "inspect", path, "--json")[0])["inputs"] == [
            json.loads(json.dumps(account.to_dict()))
        ]
    verdict = verify_weights("w.bin", against="c.pth")
    assert shell("compressor", "verify", "w.bin", "--against", "c.pth")[0] == f"{verdict}\n"
    assert told(shell("compressor", "verify", "w.bin", "--against", "c.pth", "--json")[0]) == as_json("verify", verdict)
    checkpoint(here / "d.pth", weights(seed=3))
    verdict = verify_weights("w.bin", against="d.pth")
    err = shell("compressor", "verify", "w.bin", "--against", "d.pth", code=1)[1]
    assert err == "".join(f"kvmnn: error: {line}\n" for line in str(verdict).splitlines())
    assert f"in {len(verdict.differences) - 5} more places" in str(verdict)


def test_compress_file_result_equals_command_output(here: Path, shell: Any) -> None:
    random = np.random.default_rng(2)
    made = weight_file(random, layers=2, factor=5, dtype="fp16")
    with open("w.bin", "wb") as file:
        kvcm.write_weight_file(file, made.header, ((block.weight, block.bias) for block in made.iter_blocks()))
    keys, values = (random.standard_normal((2, 1, 3, 21, 4)).astype(np.float32) for _ in range(2))
    np.savez("c.npz", k=keys, v=values)
    result = compress_file("w.bin", "c.npz", "o.npz", ForwardOptions(image_len=11), axes="lbhtd")
    argv = ["compressor", "run", "w.bin", "c.npz", "-o", "o.npz", "-f", "--image-tokens", "11", "--axes", "lbhtd"]
    assert shell(*argv)[0] == f"{result}\n"
    assert told(shell(*argv, "--json")[0]) == as_json("compress-kv", result)
    assert (
        result.plan == compress_cache(kvcm.read_weight_file("w.bin"), keys, values, ForwardOptions(image_len=11)).plan
    )
    for name in ("o.npy", "o.txt"):
        with pytest.raises(kvmnn.KvmnnError, match=r"expected a \.npz or \.safetensors file"):
            compress_file("w.bin", "c.npz", name)
