"""Text to tokens and back."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from repository import FIXTURES

from kvmnn.errors import MissingDependencyError, SourceError
from kvmnn.lm.tokenizer import Tokenizer

LM = FIXTURES / "lm"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(LM / "tokenizer.json", tmp_path)
    return tmp_path


def test_tokenizer_encode_and_decode_round_trip() -> None:
    tokenizer = Tokenizer.open_for_model(LM)
    text = 'def f(x):\n    return "Zażółć 🙂"  # \t\r\n'
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and ids.ndim == 1 and 0 < len(ids) < tokenizer.count_bytes(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([]) == "" and tokenizer.encode("").shape == (0,)
    assert (tokenizer.vocab_size, tokenizer.bos) == (2048, 0)


def test_tokenizer_ignores_truncation_and_padding(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document))
    text = "import os, sys, json, re"
    np.testing.assert_array_equal(
        Tokenizer.open_for_model(folder).encode(text), Tokenizer.open_for_model(LM).encode(text)
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"bos_token": "<|endoftext|>"}}, 0),
        ({"tokenizer_config.json": {"bos_token": {"content": "<|endoftext|>"}}}, 0),
        ({"tokenizer_config.json": {"bos_token": None}, "config.json": {"bos_token_id": 7}}, None),
        ({"tokenizer_config.json": {"bos_token": "<absent>"}, "generation_config.json": {"bos_token_id": 5}}, 5),
        ({"config.json": {"bos_token_id": 2048}}, None),
        ({"config.json": {"bos_token_id": None}}, None),
        ({"config.json": {"bos_token_id": True}}, None),
    ],
)
def test_tokenizer_bos_of_configurations(files: dict[str, object], expected: int | None, folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert Tokenizer.open_for_model(folder / "tokenizer.json").bos == expected


@pytest.mark.parametrize("model", ["model.onnx", "onnx/model.onnx", ".", "onnx"])
def test_open_for_model_finds_file_near_model(model: str, folder: Path) -> None:
    (folder / "onnx").mkdir()
    assert Tokenizer.open_for_model(folder / model).vocab_size == 2048


def test_open_for_model_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    with pytest.raises(SourceError, match=r"model\.onnx: does not exist"):
        Tokenizer.open_for_model(inner / "model.onnx")
    (inner / "model.onnx").touch()
    with pytest.raises(SourceError, match=r"model\.onnx: no tokenizer\.json next to the model or one folder up; save"):
        Tokenizer.open_for_model(inner / "model.onnx")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "X"}}'])
def test_open_for_model_invalid_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(SourceError, match=r"tokenizer\.json: is not a tokenizer\.json: ") as caught:
        Tokenizer.open_for_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_open_for_model_invalid_config_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(SourceError, match=r"tokenizer_config\.json: is not "):
        Tokenizer.open_for_model(folder)


def test_open_for_model_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match="package tokenizers: pip install onnxruntime onnx tokenizers"):
        Tokenizer.open_for_model(LM)


def test_tokenizer_panic_is_an_error(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"Regex": "(?:a|a|a|aa)+$b"}  # exponential: the search is given up
    document["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer.open_for_model(folder)
    with pytest.raises(SourceError, match=r"tokenizer\.json: fails on a text of 40 characters: .*retry-limit"):
        tokenizer.encode("a" * 40)
    with pytest.raises(SourceError, match="fails on 1 tokens"):
        tokenizer.decode([1 << 40])
    assert capfd.readouterr().err == ""
    print("heard", file=sys.stderr)
    assert capfd.readouterr().err == "heard\n"
