"""Input that once ended in a traceback: one line of error each, and never the exit code of a defect."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

WORDS = np.random.default_rng(5).standard_normal((2, 6, 8)).astype(np.float32)


@pytest.fixture
def here(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    np.save("k.npy", WORDS)
    np.savez("kv.npz", **{"layer_0.key": WORDS, "layer_0.value": WORDS})
    run("encode", "k.npy", "-o", "k.frame", "-q")
    return tmp_path


def refused(run, *argv: str) -> None:
    said = run(*argv, code=1)
    assert said.out == ""
    assert said.err.startswith("kvmnn: error: ")
    assert said.err.count("\n") == 1
    assert len(said.err) < 1100


@pytest.mark.parametrize("depth", [2, 33, 65, 900, 990, 1100, 100_000])
@pytest.mark.parametrize("form", ["[", '{"a":', '[{"a":'])
def test_token_ids_deeply_nested_are_one_line_error(here, run, depth, form) -> None:
    closing = "".join({"[": "]", "{": "}"}[letter] for letter in reversed(form) if letter in "[{")
    for number, text in enumerate((form * depth, form * depth + "1" + closing * depth)):
        Path("ids.json").write_text(text)
        output = f"p{number}/"
        refused(run, "mnn pack", "kv.npz", "-o", output, "--backend", "x86-avx2", "--token-ids", "ids.json")
        assert not Path(output).exists()


@pytest.mark.parametrize(
    "name", ["\ud800x", "x\udcff", "n" * 100_000, "n" * 300, "a\0b", "a\nb\x1b[31m", "../../x", ""]
)
@pytest.mark.parametrize("output", ["o.npz", "o.safetensors", "o/", "o.npy"])
def test_manifest_array_names_are_one_line_error(here, run, capsys, name, output) -> None:
    from kvmnn.cli import main

    beside = Path("k.frame.json")
    document = json.loads(beside.read_text())
    document["arrays"][0]["name"] = name
    beside.write_text(json.dumps(document))
    for argv in (["decode", "k.frame", "-o", output], ["inspect", "k.frame"], ["verify", "k.frame"]):
        capsys.readouterr()
        code = main(argv)
        said = capsys.readouterr()
        assert code in (0, 1)
        assert said.err.count("\n") == code
        assert "\x1b" not in said.out + said.err
        assert code or argv[0] != "decode" or Path(output).exists()
    assert not [path for path in here.parent.iterdir() if path.name.startswith("x")]


@pytest.mark.parametrize("verb", ["encode", "decode", "inspect", "verify", "mnn unpack", "measure", "bench"])
@pytest.mark.parametrize("suffix", [".frame", ".npy", ".npz", ".safetensors", ".bin", ".pth", ".onnx", ""])
def test_input_symlink_loop_is_one_line_error(here, run, verb, suffix) -> None:
    name = f"loop{suffix}"
    os.symlink(name, name)
    refused(run, verb, name, *(["-o", "x/"] if verb in ("encode", "decode", "mnn unpack") else []))
