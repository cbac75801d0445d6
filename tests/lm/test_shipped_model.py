"""fixtures/lm has what its README documents: unchanged texts, a matching tokenizer, expected numbers."""

from __future__ import annotations

import hashlib
import json
import re

import numpy as np
import onnxruntime
import pytest
from repository import FIXTURES
from tokenizers import Tokenizer

FIXTURE = FIXTURES / "lm"
SPLIT = json.loads((FIXTURE / "split.json").read_text(encoding="utf-8"))
EXPECTED = json.loads((FIXTURE / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", SPLIT["heldout"], ids=lambda entry: entry["file"])
def test_shipped_model_held_out_texts_are_unchanged(entry):
    raw = (FIXTURE / "texts" / (entry["file"].replace("/", "__") + ".txt")).read_bytes()
    assert (len(raw), hashlib.sha256(raw).hexdigest()) == (entry["bytes"], entry["sha256"])
    tokenizer = Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
    ids = tokenizer.encode(raw.decode("utf-8")).ids
    assert len(ids) + 1 == entry["tokens"]  # the token that begins a text is counted
    assert tokenizer.decode(ids) == raw.decode("utf-8")


def test_shipped_model_files_of_readme_exist():
    readme = (FIXTURE / "README.md").read_text(encoding="utf-8")
    table = [line for line in readme.splitlines() if line.startswith("| `")]
    named = re.findall(r"`([^`]+)`", " ".join(line.split("|")[1] for line in table))
    assert {"model.onnx", "config.json", "tokenizer.json", "LICENSE.CPython.txt", "texts/"} <= set(named)
    assert all((FIXTURE / name).exists() for name in named)
    assert len(list((FIXTURE / "texts").iterdir())) == len(SPLIT["heldout"]) == 20


@pytest.mark.parametrize(("table", "rows"), [("chunks_of_4", 58), ("token_by_token", 14), ("peer_check", 8)])
def test_shipped_model_expected_tables_are_complete(table, rows):
    found = EXPECTED[table]["rows"]
    assert len(found) == rows
    assert len({row.get("name", row.get("policy")) for row in found}) == rows


@pytest.mark.parametrize("table", ["chunks_of_4", "token_by_token"])
def test_shipped_model_expected_rows_sum_to_their_texts(table):
    """Every row scores the same tokens of the same texts, and its parts add up."""
    files, tokens = EXPECTED[table]["files"], EXPECTED[table]["tokens_per_file"]
    assert {row["tokens"] for row in EXPECTED[table]["rows"]} == {len(files) * tokens}
    for row in EXPECTED[table]["rows"]:
        assert row["nll"] == pytest.approx(sum(row["per_file_nll"]) / len(files), abs=1e-5)
    assert set(files) <= {path.name for path in (FIXTURE / "texts").iterdir()}


@pytest.mark.slow
def test_shipped_model_expected_nll_equals_onnxruntime():
    """One pass of the shipped graph over the shipped text with the shipped tokenizer, without kvmnn."""
    table = EXPECTED["chunks_of_4"]
    name, tokens = table["files"][0], table["tokens_per_file"]
    text = (FIXTURE / "texts" / name).read_text(encoding="utf-8")
    bos = json.loads((FIXTURE / "config.json").read_text(encoding="utf-8"))["bos_token_id"]
    ids = np.array([bos, *Tokenizer.from_file(str(FIXTURE / "tokenizer.json")).encode(text).ids][: tokens + 1])
    session = onnxruntime.InferenceSession(str(FIXTURE / "model.onnx"), providers=["CPUExecutionProvider"])
    feed = {"input_ids": ids[None, :-1], "attention_mask": np.ones((1, tokens), np.int64)}
    feed["position_ids"] = np.arange(tokens)[None]
    for value in session.get_inputs():
        if value.name not in feed:
            feed[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    logits = session.run(["logits"], feed)[0][0].astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    nll = np.log(np.exp(shifted).sum(axis=-1)) - shifted[np.arange(tokens), ids[1:]]
    (full,) = (row for row in table["rows"] if row["name"] == "full")
    assert full["per_file_nll"][0] == pytest.approx(nll.mean(), abs=2e-5)
