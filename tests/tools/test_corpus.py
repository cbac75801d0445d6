"""How the training corpus is read, split and tokenized."""

from __future__ import annotations

import hashlib
import json

import corpus
import pytest
from corpus import Document
from repository import FIXTURES

from kvmnn.errors import SourceError

FIXTURE = FIXTURES / "lm"


def documents():
    """Small ones, moderate ones and long ones, tests among them."""
    for number in range(300):
        size = (500, 8_000, 30_000, 95_000)[number % 4]
        folder = ("", "test/", "json/", "idlelib/")[number // 4 % 4]
        yield Document(f"{folder}m{number}.py", "x" * size)


def test_split_documents_follows_the_path_hash():
    split = corpus.split_documents(documents())
    parts = [*split.held_out, *split.validation, *split.training]
    assert sorted(document.path for document in parts) == sorted(document.path for document in documents())
    assert corpus.split_documents(reversed(list(documents()))) == split
    assert (len(split.held_out), len(split.validation)) == (20, 40)
    assert {document.size for document in split.held_out} == {30_000}
    assert not [document for document in split.held_out if document.path.startswith(("test", "idlelib"))]
    assert {document.size for document in split.validation} == {8_000, 30_000}

    def key(document):
        return hashlib.sha256(document.path.encode()).hexdigest()

    for part in (split.held_out, split.validation, split.training):
        assert list(map(key, part)) == sorted(map(key, part))
    rest = [document for document in split.training if document.size == 30_000 and document.path.startswith("json")]
    assert all(key(document) > key(split.held_out[-1]) for document in rest)


def test_shipped_split_is_sorted_by_path_hash():
    entries = json.loads((FIXTURE / "split.json").read_text(encoding="utf-8"))
    assert entries["rule"] == corpus.RULE
    for names in ([entry["file"] for entry in entries["heldout"]], entries["validation"]["files"]):
        assert names == sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def test_shipped_texts_are_held_out_by_split_documents():
    texts = {path.name: path.read_text(encoding="utf-8") for path in (FIXTURE / "texts").iterdir()}
    again = [Document(name.removesuffix(".txt").replace("__", "/"), text) for name, text in texts.items()]
    assert len(corpus.split_documents(again).held_out) == len(texts) == 20


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a" * 199, None),
        (b"a" * 200, "a" * 200),
        (b"a\r\nb\rc\n" * 40, "a\nb\nc\n" * 40),
        (b"a" * 200 + b"\xff", None),
        (("a" * 95 + "\u00e9" * 5).encode() * 3, ("a" * 95 + "\u00e9" * 5) * 3),
        (("a" * 94 + "\u00e9" * 6).encode() * 3, None),
    ],
)
def test_usable_text_needs_length_and_normalizes_newlines(raw, text):
    assert corpus.usable_text(raw) == text


def test_stdlib_documents_are_sorted_and_filtered(tmp_path):
    for name in ("b.py", "a/z.py", "a/_sysconfigdata_x.py", "a.txt", "encodings/x.py", "a/site-packages/y.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n" * 50)
    assert [document.path for document in corpus.stdlib_documents(tmp_path)] == ["b.py", "a/z.py"]


def test_with_topics_unpacks_pydoc_topics():
    text = f"# generated\ntopics = {{'b': 'short', 'c': {'line' * 60!r}, 'a': {'text' * 60!r}}}\n"
    found = list(corpus.with_topics([Document("x.py", "x"), Document("pydoc_data/topics.py", text)]))
    assert [document.path for document in found] == ["x.py", "pydoc_data/topics.py#a", "pydoc_data/topics.py#c"]
    assert found[1].text == "text" * 60


def test_tokenizer_round_trips_any_text():
    tokenizer = corpus.learn_tokenizer(["def f(x):\n    return x\n"] * 20, 270)
    assert tokenizer.token_to_id(corpus.END_OF_TEXT) == 0
    assert tokenizer.get_vocab_size() == 270
    text = "def g(\u00e9):\n\treturn '\u6c34'\n"
    (ids,) = corpus.encode(tokenizer, [Document("x.py", text)])
    assert ids[0] == 0
    assert tokenizer.decode(ids[1:].tolist()) == text


def test_prepare_incomplete_library_is_refused(tmp_path):
    (tmp_path / "x.py").write_text("pass\n" * 50)
    with pytest.raises(SourceError, match="is not a complete standard library: 1 files"):
        corpus.prepare(tmp_path, tmp_path / "out", 300)
    assert not (tmp_path / "out").exists()
