"""Prompts of the cases with real prompts: lists, order, and number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvmnn.errors import KvmnnError, OptionError, SourceError
from kvmnn.gates.suite.settings import RunSettings
from kvmnn.gates.suite.workloads import PROMPT_FILE_KEYS, build_prompt_workloads, read_prompt_manifest
from kvmnn.lm.documents import Document


def text(name: str, tokens: int) -> Document:
    first = sum(map(ord, name))
    return Document(name=name, ids=np.arange(tokens) + first, nbytes=tokens, sha256="0" * 64)


def named(*names: str) -> list[Document]:
    return [text(name, 40 + place) for place, name in enumerate(names)]


def chosen(documents: list[Document], limit: int | None = None, **settings: object) -> list[str]:
    made = RunSettings(**{"buckets": (8, 32), "demo_generate": 4, **settings})  # type: ignore[arg-type]
    return [work.name.partition(":")[0] for work in build_prompt_workloads(documents, made, limit, [])]


FILES = ("prompt_512_1.txt", "prompt_128_1.txt", "prompt_512_2.txt", "prompt_128_2.txt", "prompt_512_3.txt")


def test_select_prompts_stratified_alternates_buckets() -> None:
    assert chosen(named(*FILES)) == [FILES[1], FILES[0], FILES[3], FILES[2]]


def test_select_prompts_sequential_keeps_text_order() -> None:
    assert chosen(named(*FILES), prompt_order="sequential") == list(FILES[:4])
    plain = [text("a", 40), text("b", 40), text("c", 40), text("d", 40)]
    assert chosen(plain, prompt_order="sequential") == ["a", "b", "c", "d"]


def test_select_prompts_max_prompts_is_enforced() -> None:
    assert chosen(named(*FILES), max_prompts=3) == [FILES[1], FILES[0], FILES[3]]
    assert chosen(named(*FILES), max_prompts=1, prompt_order="sequential") == [FILES[0]]
    with pytest.raises(OptionError, match="max_prompts: found -1"):
        RunSettings(max_prompts=-1)


def test_select_prompts_too_long_texts_are_excluded() -> None:
    assert chosen(named(*FILES), limit=45, max_prompts=2) == [FILES[1], FILES[0]]
    with pytest.raises(KvmnnError, match="no prompt of 8, 32 tokens"):
        chosen(named(*FILES), limit=10)


def test_read_prompt_manifest_names_each_file_once(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    (folder / "more").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "more/c.txt"):
        (folder / name).write_text("words")
    lines = [json.dumps({key: "b.txt"}) for key in PROMPT_FILE_KEYS]
    lines += ["", "more/c.txt", '"a.txt"', json.dumps({"name": "nothing", "prompt_file": "a.txt"}), "a.txt"]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    found = read_prompt_manifest(str(tmp_path / "list.jsonl"), [str(tmp_path / "x"), str(folder)])
    assert found == [str(folder / name) for name in ("b.txt", "more/c.txt", "a.txt")]
    (folder / "own.txt").write_text("a.txt\n")
    assert read_prompt_manifest(str(folder / "own.txt"), []) == [str(folder / "a.txt")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "names 0 prompts: expected 1 to 10,000"),
        (b'{"prompt_file": ', "line 1: is not JSON, and begins like it"),
        (b'a.txt\n{"text": "b"}', "line 2: names no file: expected one of prompt_file"),
        (b'{"file": 3}', "line 1: names no file"),
        (b"c.txt", "line 1: .*c.txt: is no file"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_read_prompt_manifest_damaged_list_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "list").write_bytes(content)
    with pytest.raises(SourceError, match=said):
        read_prompt_manifest(str(tmp_path / "list"), [str(tmp_path)])
    with pytest.raises(SourceError, match="does not exist"):
        read_prompt_manifest(str(tmp_path / "none"), [])
