"""The scanner of headers against Python's JSON parser: the same verdicts, and the same values."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors_model import Found

from kvmnn.errors import SourceError
from kvmnn.formats import _safetensors_header as scanner
from kvmnn.formats import safetensors
from kvmnn.formats.safetensors import TensorIndex


def scanned(text: bytes) -> Found | None:
    try:
        tensors = TensorIndex(text, "x")
    except SourceError as error:
        assert str(error).startswith("x: ") and "\n" not in str(error) and len(str(error)) < 400
        return None
    for number, tensor in enumerate(tensors):
        assert tensors.find_id(tensor.name) == number
    assert tensors.find_id("no such name") is None
    return [tuple(tensor) for tensor in tensors], tensors.metadata  # type: ignore[misc]


def check(text: bytes) -> Found | None:
    found = scanned(text)
    if b"-0" not in text:  # which JSON has for 0 and the format does not need
        assert found == safetensors_model.header(text), text
    return found


SIZES = {kind: safetensors_model.SIZES[kind] for kind in ("F16", "BF16", "F32", "U8", "I64", "BOOL")}
NAMES = st.text('kv.\x00\x7f"\\/\b\u00e9\u952e\U0001f600', max_size=4)
SHAPES = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    header: dict[str, Any] = {}
    position = 0
    for name in draw(st.lists(NAMES, unique=True, max_size=6)):
        kind, shape = draw(st.sampled_from([*SIZES, "F4", "\u00e9"])), draw(SHAPES)
        nbytes = math.prod(shape) * SIZES.get(kind, 3)
        entry = [("dtype", kind), ("shape", shape), ("data_offsets", [position, position + nbytes])]
        header[name] = dict(draw(st.permutations(entry)))
        position += nbytes
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(NAMES, NAMES, max_size=4))
    mixed = dict(draw(st.permutations(list(header.items()))))
    separators = draw(st.sampled_from([(",", ":"), (" ,\n", "\t: \r")]))
    text = json.dumps(mixed, ensure_ascii=draw(st.booleans()), separators=separators)
    return text.encode() + b" " * draw(st.integers(0, 9))


@given(headers())
def test_tensor_index_valid_headers_equal_json(text: bytes) -> None:
    assert check(text) is not None


PIECES = (
    b'" \\ { } [ ] , : \0 \x1f \v 0 9 - .5 e3 /**/ null true NaN {} [] "k" "dtype" "dtyp\\u0065" "__metadata__"'.split(
        b" "
    )
)
PIECES += [
    b" ",
    b"\\u0061",
    b"\\ud800",
    b"\\u12",
    b"\xff",
    b"\xc3\xa9",
    b"\xed\xa0\x80",
    b"%d" % (2**63 - 1),
    b"%d" % 2**63,
]


@given(headers(), st.integers(0, 1 << 32), st.sampled_from(PIECES), st.integers(0, 12))
def test_tensor_index_damaged_headers_equal_json(text: bytes, place: int, piece: bytes, gone: int) -> None:
    at = place % (len(text) + 1)
    check(text[:at] + piece + text[at + gone :])


def test_tensor_index_every_cut_and_flip_equals_json() -> None:
    header = {
        "__metadata__": {"format": "pt", "\u00e9\n": ""},
        "b": {"dtype": "F32", "shape": [2, 1], "data_offsets": [8, 16]},
        "a\u00e9": {"shape": [], "data_offsets": [16, 18], "dtype": "F16"},
        "c": {"data_offsets": [0, 8], "dtype": "BF16", "shape": [4]},
    }
    for ascii_only in (True, False):
        text = json.dumps(header, ensure_ascii=ascii_only).encode()
        assert check(text) is not None
        rng = random.Random(1)
        for at in range(len(text)):
            assert check(text[:at]) is None
            for value in (*(1 << bit for bit in range(8)), rng.randrange(1, 256)):
                check(text[:at] + bytes([text[at] ^ value]) + text[at + 1 :])


ENTRY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":%b,"\\u0061":%b}' % (ENTRY, ENTRY), "the name 'a' appears twice"),
        (b'{"__metadata__":{},"__metadata\\u005f_":{}}', "'__metadata__' appears twice"),
        (b'{"__metadata__":{"k":"","\\u006b":""}}', "the name 'k' appears twice"),
        (b'{"a":%b}' % ENTRY.replace(b'"shape":', b'"shape":[1],"\\u0073hape":'), "'shape' appears twice"),
        (b'{"a":%b}' % ENTRY.replace(b"[0]", b"[%b]" % b",".join([b"0"] * 65)), "shape is not a list"),
        (b'{"a":%b}' % ENTRY.replace(b"[0]", b"[00]"), "shape is not a list"),
        (b'{"a":%b}' % ENTRY.replace(b"[0]", b"[-0]"), "shape is not a list"),
        (b'{"a":%b}' % ENTRY.replace(b"[0]", b"[%b]" % (b"[" * 100_000)), "shape is not a list"),
        (b'{"a":%b}' % ENTRY.replace(b"[0]", b"[%b]" % (b"9" * 100_000)), "shape is not a list"),
        (b'{"a":%b}\0' % ENTRY, "expected the end of the header"),
        (b'{"a":%b}{}' % ENTRY, "expected the end of the header"),
        (b"{\0}", "offset 1: expected '\"'"),
        (b'{"a', "a string without its end"),
        (b'{"a\\', "a string without its end"),
        (b'{"a\n":', "offset 3: a control character"),
        (b'{"\xff":%b}' % ENTRY, "offset 2: a string that is none"),
        (
            b'{"%b":%b}' % (b"n" * (scanner.MAX_NAME_BYTES + 1), ENTRY),
            "offset 2: a string of 1048577 bytes is above the limit",
        ),
        (b'{"a":%b}' % ENTRY.replace(b"U8", b"U" * 65), "a string of 65 bytes is above the limit of 64"),
        (
            b"{%b}" % b",".join(b'"%d":%b' % (n, ENTRY.replace(b"U8", b"X%d" % n)) for n in range(256)),
            "more than 255 dtypes",
        ),
        (
            b'{"__metadata__":{%b}}' % b",".join(b'"%d":""' % n for n in range(scanner.MAX_METADATA_ENTRIES + 1)),
            "__metadata__ is above the limit",
        ),
        (
            b'{"__metadata__":{"a":"%b","b":"%b"}}' % (b"x" * (9 << 20), b"x" * (9 << 20)),
            "__metadata__ is above the limit of 16777216 bytes",
        ),
    ],
    ids=lambda value: str(value[:30]),
)
def test_tensor_index_error_names_cause(text: bytes, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        TensorIndex(text, "x")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


class SameHashes(TensorIndex):
    """As an attacker would have it who knows the seed of the hashes."""

    def _sort(self, hashes: npt.NDArray[np.int64]) -> None:
        super()._sort(hashes * 0)


def test_tensor_index_hash_collisions_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [b'"%c":%b' % (name, ENTRY) for name in b"abcda"]
    monkeypatch.setattr(safetensors, "hash", lambda name: 0, raising=False)
    tensors = SameHashes(b"{%b}" % b",".join(entries[:4]), "x")
    assert [tensors.find_id(name) for name in "abcde"] == [0, 1, 2, 3, None]
    with pytest.raises(SourceError, match="'a' appears twice"):
        SameHashes(b"{%b}" % b",".join(entries), "x")
