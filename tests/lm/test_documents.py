"""Texts to token ids: scored tokens, byte counts, and refused texts."""

from __future__ import annotations

import codecs
import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository import FIXTURES

from kvmnn.errors import KvmnnError, SourceError
from kvmnn.lm import documents
from kvmnn.lm.documents import read_document, read_documents
from kvmnn.lm.tokenizer import Tokenizer

FIXTURE = FIXTURES / "lm"
TEXT = FIXTURE / "texts" / "calendar.py.txt"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open_for_model(FIXTURE / "model.onnx")


class Letters:
    """A tokenizer of one token a character; without bos unless it gets one."""

    def __init__(self, bos=None):
        self.bos = bos

    def encode(self, text):
        return np.array([ord(letter) for letter in text], np.int64)

    def decode(self, ids):
        return "".join(chr(token) for token in ids)


def test_read_document_begins_with_bos(tokenizer):
    found = read_document(TEXT, tokenizer, 100)
    own = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    assert found.ids.tolist() == [0, *own[:100].tolist()]
    assert (found.num_scored, found.requested_tokens, found.name) == (100, 100, "calendar.py.txt")
    assert found.own_ids.tolist() == own[:100].tolist()
    assert TEXT.read_text(encoding="utf-8").startswith(tokenizer.decode(found.ids[1:]))
    assert found.nbytes == len(tokenizer.decode(found.ids[1:]).encode())
    assert found.sha256 == hashlib.sha256(TEXT.read_bytes()).hexdigest()
    assert found.to_dict() == {"name": found.name, "tokens": 100, "bytes": found.nbytes, "sha256": found.sha256}


def test_read_document_short_text_is_scored_whole(tokenizer, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("naïve — ünïcödé\n", encoding="utf-8")
    found = read_document(path, tokenizer, 5000)
    assert found.num_scored == len(tokenizer.encode(path.read_text(encoding="utf-8")))
    assert found.nbytes == path.stat().st_size
    assert found.requested_tokens == 5000


def test_read_document_without_bos_does_not_score_first_token(tmp_path):
    path = tmp_path / "text"
    path.write_text("abcdé", encoding="utf-8")
    found = read_document(path, Letters(), 10)
    assert found.ids.tolist() == [97, 98, 99, 100, 233]
    assert (found.num_scored, found.nbytes, found.begins_with_bos) == (4, 5, False)
    assert found.own_ids.tolist() == found.ids.tolist()
    assert read_document(path, Letters(), 2).ids.tolist() == [97, 98, 99]
    path.write_text("a")
    with pytest.raises(SourceError, match=r"text: has 1 token: expected at least 2$"):
        read_document(path, Letters(), 2)


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_read_document_blocks_may_split_characters(monkeypatch, tmp_path, block):
    monkeypatch.setattr(documents, "_READ_BLOCK_BYTES", block)
    path = tmp_path / "text"
    path.write_text("aé€😀z" * 3, encoding="utf-8")
    found = read_document(path, Letters(1), 100)
    assert "".join(chr(token) for token in found.own_ids) == "aé€😀z" * 3
    assert found.nbytes == path.stat().st_size


@given(st.binary(min_size=1, max_size=40))
def test_read_document_invalid_utf8_names_the_byte(data):
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as exc:
        where = exc.start
    else:
        where = None
    blocks = [data[i : i + 3] for i in range(0, len(data), 3)] + [b""]
    try:
        before = 0
        for piece in blocks:
            documents._decode_block(Path("text"), decoder, piece, before)
            before += len(piece)
    except SourceError as exc:
        assert where is not None
        assert f"byte {where} is 0x{data[where]:02x}" in str(exc)
    else:
        assert where is None


def test_read_document_tokenizes_only_the_beginning(monkeypatch, tokenizer, tmp_path):
    whole = read_document(TEXT, tokenizer, 50)
    monkeypatch.setattr(documents, "_MIN_PREFIX_CHARACTERS", 10)
    part = read_document(TEXT, tokenizer, 50)
    assert part.ids.tolist() == whole.ids.tolist()
    assert (part.nbytes, part.sha256) == (whole.nbytes, whole.sha256)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: expected text"),
        (b"ab\xff", "is not UTF-8: byte 2 is 0xff"),
        (b"ab\xc3", "is not UTF-8: byte 2 is 0xc3"),
        ("text".encode("utf-16"), "is not UTF-8: byte 0 is 0xff"),
    ],
)
def test_read_document_without_text_is_refused(tokenizer, tmp_path, data, message):
    path = tmp_path / "x.txt"
    path.write_bytes(data)
    with pytest.raises(SourceError) as caught:
        read_document(path, tokenizer, 10)
    assert str(caught.value) == f"{path}: {message}"


def test_read_document_missing_file_is_refused(tokenizer, tmp_path):
    with pytest.raises(SourceError, match="nowhere: cannot be read: No such file"):
        read_document(tmp_path / "nowhere", tokenizer, 10)
    with pytest.raises(KvmnnError, match="tokens is 0"):
        read_document(TEXT, tokenizer, 0)


def test_read_documents_folders_and_duplicate_names(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in ("two.txt", "one.txt", "other.md"):
            (tmp_path / folder / name).write_text("xyz")
    found = read_documents([tmp_path / "a", tmp_path / "b" / "one.txt"], Letters(0), 2)
    assert [document.name for document in found] == ["one.txt", "two.txt", "one.txt~2"]
    (tmp_path / "c").mkdir()
    with pytest.raises(SourceError, match=r"c: has no \*\.txt, \*\.jsonl or"):
        read_documents([tmp_path / "c"], Letters(0), 2)
