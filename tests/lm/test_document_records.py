"""Texts from JSON lines, Parquet files and folders, all of them or sampled."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from repository import FIXTURES

from kvmnn.errors import KvmnnError, MissingDependencyError, SourceError
from kvmnn.lm import documents
from kvmnn.lm.documents import TextOptions, iter_records, read_document, read_documents


class Letters:
    """A tokenizer of one token a character."""

    bos = 0

    def encode(self, text: str) -> Any:
        return np.array([ord(letter) for letter in text], np.int64)

    def decode(self, ids: Any) -> str:
        return "".join(chr(token) for token in ids)


def lines(path: Path, *texts: object, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def said(documents: list[documents.Document]) -> dict[str, str]:
    return {found.name: Letters().decode(found.own_ids) for found in documents}


def test_read_documents_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "first"}\r\n\n  \n{"x": 1, "text": "se\\u00e7ond\\nline"}\n{"text": "last"}'
    )
    found = read_documents([path], Letters(), 100)
    assert said(found) == {"a.jsonl:1": "first", "a.jsonl:4": "seçond\nline", "a.jsonl:5": "last"}
    assert found[1].nbytes == len("seçond\nline".encode())
    assert found[1].sha256 == hashlib.sha256("seçond\nline".encode()).hexdigest()
    assert [one.num_scored for one in read_documents([path], Letters(), 3)] == [3, 3, 3]
    body = lines(tmp_path / "b.ndjson", "x y", field="body")
    assert said(read_documents([body], Letters(), 9, TextOptions(field="body"))) == {"b.ndjson:1": "x y"}


def test_read_documents_records_without_text_are_noted(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", "one", "", None, " \n ", "two")
    notes: list[str] = []
    assert list(said(read_documents([path], Letters(), 9, notes=notes))) == ["a.jsonl:1", "a.jsonl:5"]
    assert notes == ["a.jsonl: 3 records without text left out."]
    with pytest.raises(SourceError, match="has no text in 'text'"):
        read_documents([lines(tmp_path / "b.jsonl", "", None)], Letters(), 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'"text"', "found a str, expected a JSON object"),
        (
            b'{"content": "x", "id": 3}',
            r"has no key 'text'; it has 'content', 'id': name the key of the texts \(--field\)",
        ),
        (b"{}", "has no key 'text'; it has none at all"),
        (b'{"text": ["x"]}', "'text' is a list: expected text"),
        (b'{"text": "a\xff"}', "is not UTF-8: byte 11 is 0xff"),
        (b'{"text": "a\\ud800"}', "character 1 is half of a surrogate pair"),
        (b'{"text": "%s"}' % (b"x" * 100), "has more than 64 bytes"),
    ],
)
def test_read_documents_bad_line_is_named(
    tmp_path: Path, line: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "more than" in message:
        monkeypatch.setattr("kvmnn.lm.documents.MAX_RECORD_BYTES", 64)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    for options in (TextOptions(), TextOptions(samples=1)):
        with pytest.raises(SourceError, match=f"a.jsonl, line 2: {message}"):
            read_documents([path], Letters(), 9, options)


def test_read_documents_samples_are_drawn_from_all_texts(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("x.txt", "y.txt"):
        (folder / name).write_text(name)
    lines(folder / "z.jsonl", *(f"text {i}" for i in range(38)))
    (folder / "other.md").write_text("no")

    def drawn(samples: int, seed: int) -> list[str]:
        return list(said(read_documents([folder], Letters(), 50, TextOptions(samples=samples, seed=seed))))

    everything = list(said(read_documents([folder], Letters(), 50)))
    assert everything == ["x.txt", "y.txt", *(f"z.jsonl:{i + 1}" for i in range(38))]
    assert drawn(5, 1) == drawn(5, 1) != drawn(5, 2)
    times = dict.fromkeys(everything, 0)
    for seed in range(200):
        found = drawn(10, seed)
        assert len(set(found)) == 10 and found == [name for name in everything if name in found]
        for name in found:
            times[name] += 1
    assert min(times.values()) > 20 and max(times.values()) < 85  # 50 are expected of each
    notes: list[str] = []
    few = read_documents([folder / "x.txt"], Letters(), 50, TextOptions(samples=3), notes=notes)
    assert len(few) == 1 and notes == ["3 texts were asked for, there are 1: all of them were taken."]


def test_read_documents_too_many_texts_need_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "a.jsonl", *map(str, range(30)))
    monkeypatch.setattr(documents, "MAX_DOCUMENTS", 20)
    with pytest.raises(SourceError, match="more than 20 texts: expected --samples N"):
        read_documents([path], Letters(), 9)
    assert len(read_documents([path], Letters(), 9, TextOptions(samples=20))) == 20
    for wrong in ({"samples": 0}, {"samples": 21}, {"seed": -1}):
        with pytest.raises(KvmnnError):
            TextOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=r"a.jsonl: holds many texts: expected a UTF-8 text"):
        read_document(path, Letters(), 9)
    with pytest.raises(SourceError, match=r"nowhere.jsonl: cannot be read: No such file"):
        read_documents([tmp_path / "nowhere.jsonl"], Letters(), 9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"has no \*\.txt, \*\.jsonl or \*\.parquet files"):
        read_documents([tmp_path / "empty"], Letters(), 9)


def test_iter_records_reads_lazily(tmp_path: Path) -> None:
    """A file is read a line at a time: of a large one the first lines come at once."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' * 3 + "broken\n")
    found = iter_records(path, "text")
    assert [next(found).number for _ in range(3)] == [1, 2, 3]
    with pytest.raises(SourceError, match="line 4"):
        next(found)


def test_read_documents_parquet_without_pyarrow_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingDependencyError, match="pyarrow"):
        read_documents([tmp_path / "a.parquet"], Letters(), 9)
    asked = ["eval", FIXTURES / "lm", "--text", tmp_path / "a.parquet", "--policy", "streaming"]
    said = run(*asked, code=3)
    assert "pip install pyarrow" in said.err and said.err.count("\n") == 1


@pytest.mark.usefixtures("without_workers")
@pytest.mark.slow
def test_eval_command_draws_samples(run: Any, tmp_path: Path) -> None:
    texts = [(FIXTURES / "lm" / "texts" / f"{name}.py.txt").read_text()[:400] for name in ("enum", "trace", "pprint")]
    path = lines(tmp_path / "a.jsonl", *texts, "", field="code")
    asked = [
        "eval",
        FIXTURES / "lm",
        "--text",
        path,
        "--field",
        "code",
        "--samples",
        2,
        "--seed",
        3,
        "--max-tokens",
        16,
    ]
    found = json.loads(run(*asked, "--policy", "streaming:budget=8", "--no-timing", "--json", "-q").out)
    names = [text["name"] for text in found["documents"]]
    assert len(names) == 2 and set(names) <= {f"a.jsonl:{line}" for line in (1, 2, 3)}
    assert "a.jsonl: 1 record without text left out." in found["notes"]
    assert "'0' is not a whole number above zero" in run(*asked, "--samples", 0, code=2).err


# -- with pyarrow ------------------------------------------------------------------------------------------------------


@pytest.fixture
def parquet(tmp_path: Path) -> SimpleNamespace:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")

    def write(name: str, columns: dict[str, Any], **options: Any) -> Path:
        path = tmp_path / name
        parquet.write_table(arrow.table(columns), path, **options)
        return path

    return SimpleNamespace(write=write, arrow=arrow)


def test_read_documents_parquet_columns(parquet: SimpleNamespace) -> None:
    texts = [f"text {i}" if i % 7 else None for i in range(1, 300)]
    kinds = {"plain": texts, "large": parquet.arrow.array(texts, parquet.arrow.large_string())}
    kinds["coded"] = parquet.arrow.array(texts).dictionary_encode()
    path = parquet.write("a.parquet", {"id": list(range(299)), **kinds}, row_group_size=40, compression="zstd")
    expected = {f"a.parquet:{i}": f"text {i}" for i in range(1, 300) if i % 7}
    for field in kinds:
        notes: list[str] = []
        assert said(read_documents([path], Letters(), 50, TextOptions(field=field), notes=notes)) == expected
        assert notes == ["a.parquet: 42 records without text left out."]
    some = said(read_documents([path], Letters(), 50, TextOptions(field="plain", samples=4, seed=9)))
    assert len(some) == 4 and some.items() <= expected.items()
    with pytest.raises(SourceError, match="has no column 'text'; it has 'id', 'plain', 'large', 'coded'"):
        read_documents([path], Letters(), 50)
    with pytest.raises(SourceError, match="column 'id' holds int64: expected text"):
        read_documents([path], Letters(), 50, TextOptions(field="id"))


def test_read_documents_damaged_parquet_is_refused(parquet: SimpleNamespace, tmp_path: Path) -> None:
    whole = parquet.write("a.parquet", {"text": [f"some text {i}" for i in range(500)]}).read_bytes()
    path = tmp_path / "b.parquet"
    rng = np.random.default_rng(1)
    for case in range(60):
        data = bytearray(whole[: int(rng.integers(len(whole)))] if case % 2 else whole)
        if data and case % 2 == 0:
            data[int(rng.integers(len(data)))] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        try:
            found = read_documents([path], Letters(), 50)
        except SourceError as exc:
            assert str(path) in str(exc) and "\n" not in str(exc)
        else:
            assert case % 2 == 0 and len(found) <= 500
    with pytest.raises(SourceError, match=r"nowhere.parquet: (cannot be read|is not a Parquet file)"):
        read_documents([tmp_path / "nowhere.parquet"], Letters(), 9)
