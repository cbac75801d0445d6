"""The token that begins a text: at most one, none if the files say so, and a note of what was added."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from repository import FIXTURES

from kvmnn.evaluation import EvaluationSettings, evaluate
from kvmnn.lm import RunOptions, Tokenizer, dump_kv, generate
from kvmnn.lm.documents import read_document, read_documents
from kvmnn.lm.tokenizer import encode_prompt

LM = FIXTURES / "lm"
BOS, TEXT = "<|endoftext|>", "import os"


def template(*tokens: str, last: str | None = None) -> dict[str, Any]:
    """A post-processor that puts these before a text, and `last` at its end."""
    pieces = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    end = [{"SpecialToken": {"id": last, "type_id": 0}}] * (last is not None)
    ids = {BOS: 0, "!": 1}
    special = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in ids}
    body = [*pieces, {"Sequence": {"id": "A", "type_id": 0}}, *end]
    return {"type": "TemplateProcessing", "single": body, "pair": body, "special_tokens": special}


LLAMA_3 = {"type": "Sequence", "processors": [
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}, template(BOS),
]}  # fmt: skip
ROBERTA = {"type": "RobertaProcessing", "sep": ["!", 1], "cls": [BOS, 0], "trim_offsets": True,
           "add_prefix_space": False}  # fmt: skip
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}

CASES: dict[str, tuple[Any, dict[str, dict[str, Any]], int | None, str]] = {
    "Llama 2": (template(BOS), {"tokenizer_config.json": {"add_bos_token": True, "bos_token": BOS}}, 0,
                "add_bos_token of"),
    "Llama 3": (LLAMA_3, {"tokenizer_config.json": {"bos_token": BOS}}, 0, "post-processor of tokenizer.json"),
    "Llama 3 alone": (LLAMA_3, {}, 0, "post-processor"),
    "Gemma": (template(BOS), {"tokenizer_config.json": {"add_bos_token": True, "bos_token": {"content": BOS}},
                              "config.json": {"bos_token_id": 0}}, 0, "add_bos_token"),
    "with an end": (template(BOS, last=BOS), {}, 0, "post-processor"),
    "an end alone": (template(last=BOS), {}, None, ""),
    "another first": (template("!"), {"tokenizer_config.json": {"bos_token": BOS}}, 1, "post-processor"),
    "two first": (template("!", BOS), {}, 0, "post-processor"),
    "two first, one named": (template("!", BOS), {"tokenizer_config.json": {"bos_token": "!"}}, 1, "post-processor"),
    "RoBERTa": (ROBERTA, {}, 0, "post-processor"),
    "Qwen": (BYTES, {"tokenizer_config.json": {"add_bos_token": False, "bos_token": None},
                     "config.json": {"bos_token_id": 7}}, None, "add_bos_token false"),
    "null": (None, {"tokenizer_config.json": {"bos_token": None}, "config.json": {"bos_token_id": 7}}, None, "null"),
    "null over a template": (template(BOS), {"tokenizer_config.json": {"bos_token": None}}, None, "null"),
    "false over a template": (template(BOS), {"tokenizer_config.json": {"add_bos_token": False, "bos_token": BOS}},
                              None, "add_bos_token false"),
    "DeepSeek": (template(BOS), {"tokenizer_config.json": {"add_bos_token": False, "bos_token": {"content": BOS}},
                                 "generation_config.json": {"bos_token_id": 0}}, None, "add_bos_token false"),
    "special tokens": (None, {"special_tokens_map.json": {"bos_token": BOS}}, 0, "bos_token of special_tokens_map"),
    "null of special tokens": (None, {"special_tokens_map.json": {"bos_token": None},
                                      "config.json": {"bos_token_id": 7}}, None, "special_tokens_map.json has bos"),
    "named alone": (None, {"tokenizer_config.json": {"bos_token": BOS}}, 0, '"add_bos_token": false there leaves'),
    "asked, but not named": (None, {"tokenizer_config.json": {"add_bos_token": True},
                                    "config.json": {"bos_token_id": 7}}, 7, "bos_token_id of config.json"),
    "nothing": (BYTES, {}, None, ""),
}  # fmt: skip


def folder_of(path: Path, processor: Any, files: dict[str, dict[str, Any]]) -> Path:
    """A folder of the shipped tokenizer with this post-processor and these neighbours."""
    document = json.loads((LM / "tokenizer.json").read_text())
    document["post_processor"] = processor
    (path / "tokenizer.json").write_text(json.dumps(document))
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The shipped model; a test says what its tokenizer does."""
    (tmp_path / "model.onnx").symlink_to(LM / "model.onnx")
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_tokenizer_adds_at_most_one_bos(name: str, tmp_path: Path) -> None:
    processor, files, expected, reason = CASES[name]
    tokenizer = Tokenizer.open_for_model(folder_of(tmp_path, processor, files))
    assert tokenizer.bos == expected == tokenizer.bos_info.token
    assert reason in tokenizer.bos_info.reason and bool(reason) == bool(tokenizer.bos_info.reason)
    own = Tokenizer.open_for_model(LM).encode(TEXT).tolist()
    assert tokenizer.encode(TEXT).tolist() == own
    assert encode_prompt(tokenizer, TEXT) == ([] if expected is None else [expected]) + own
    if expected == 0:
        assert encode_prompt(tokenizer, BOS + TEXT) == [0, *own]
    text = tmp_path / "a.txt"
    text.write_text(TEXT)
    assert read_document(text, tokenizer, 50).ids.tolist() == encode_prompt(tokenizer, TEXT)


def test_read_documents_explicit_bos_equals_added_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open_for_model(LM)
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(BOS + TEXT)
    plain, spelt = read_documents([tmp_path], tokenizer, 50)
    assert plain.ids.tolist() == spelt.ids.tolist() and plain.nbytes == spelt.nbytes == len(TEXT)
    assert plain.own_ids.tolist() == spelt.own_ids.tolist()
    assert (plain.has_own_bos, spelt.has_own_bos) == (False, True)
    first = [read_document(tmp_path / name, tokenizer, 2).ids.tolist() for name in ("a.txt", "b.txt")]
    assert first[0] == first[1] and len(first[0]) == 3


def test_format_note_names_added_token_and_number_of_texts(tmp_path: Path) -> None:
    start = Tokenizer.open_for_model(LM).bos_info
    named = "token 0 ('<|endoftext|>')"
    assert (start.format_note(1) or "").startswith(
        f"The text begins with {named}, which was added (bos_token of tokenizer_c"
    )
    assert (start.format_note(3, 1) or "").startswith(
        f"Each text begins with {named}, which was added; 1 text had it already ("
    )
    assert start.format_note(1, 1, noun="prompt") == f"The prompt begins with {named} already: none was added."
    assert start.format_note(2, 2) == f"All 2 texts begin with {named} already: none was added."
    none = Tokenizer.open_for_model(folder_of(tmp_path, *CASES["null"][:2])).bos_info
    assert none.format_note(1) == "No token was added before the text: tokenizer_config.json has bos_token null."
    assert (
        Tokenizer.open_for_model(
            folder_of(tmp_path, None, {"tokenizer_config.json": {}, "config.json": {}})
        ).bos_info.format_note(1)
        is None
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama 2", "Qwen"])
def test_commands_add_at_most_one_bos_and_note_it(name: str, model: Path, tmp_path: Path) -> None:
    processor, files, expected, _ = CASES[name]
    folder_of(model, processor, files)
    begin = [] if expected is None else [expected]
    own = Tokenizer.open_for_model(LM).encode(TEXT).tolist()
    (tmp_path / "a.txt").write_text(TEXT)
    said = "No token was added before the" if expected is None else "which was added ("
    generated = generate(model, TEXT, max_tokens=1)
    assert generated.prompt_tokens == len(begin + own) and said in generated.notes[0]
    dump = dump_kv(model, tmp_path / "a.txt", tmp_path / "kv", tokens=50)
    assert json.loads((tmp_path / "kv" / "token_ids.json").read_text()) == begin + own
    assert said in dump.notes[0] and said in " ".join(str(dump).split()) and dump.to_dict()["notes"] == list(dump.notes)
    result = evaluate(model, tmp_path / "a.txt", settings=EvaluationSettings(timing=False), jobs=0)
    assert result.rows[0].tokens == len(begin + own) - 1 and any(said in note for note in result.notes)


def test_generate_prompt_with_bos_equals_prompt_without() -> None:
    plain, spelt = (generate(LM, text, max_tokens=4, options=RunOptions()) for text in (TEXT, BOS + TEXT))
    assert plain.full.generation.ids == spelt.full.generation.ids and plain.prompt_tokens == spelt.prompt_tokens
    assert spelt.notes == ("The prompt begins with token 0 ('<|endoftext|>') already: none was added.",)


def test_open_for_model_damaged_special_tokens_is_refused(tmp_path: Path) -> None:
    shutil.copy(LM / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text("[")
    with pytest.raises(Exception, match=r"special_tokens_map\.json: is not "):
        Tokenizer.open_for_model(tmp_path)
