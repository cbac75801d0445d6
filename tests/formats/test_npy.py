"""``.npy`` files: types, shapes, orders, versions; and damaged ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import WORDS, content, only, saved

from kvmnn import formats
from kvmnn.errors import SourceError


@pytest.mark.parametrize(
    ("kind", "dtype", "named"),
    [
        ("<f2", None, "fp16"),
        (">f2", None, "fp16"),
        ("<f4", None, "fp32"),
        (">f4", None, "fp32"),
        ("<u2", None, "bf16"),
        ("<u2", "fp16", "fp16"),
        (">i2", "fp16", "fp16"),
        ("<i4", "fp32", "fp32"),
        ("<f2", "bf16", "bf16"),
        ("|V2", None, "bf16"),
        ("|u1", "fp32", "fp32"),
    ],
)
def test_npy_types(tmp_path, kind, dtype, named):
    values = np.arange(24, dtype="<u4").view(np.uint8).view("u" + kind[2])[:24].reshape(2, 3, 4)
    np.save(tmp_path / "keys.npy", values.astype(kind[0].replace("|", "<") + "u" + kind[2]).view(kind))
    array = only(tmp_path / "keys.npy", dtype=dtype)
    assert (array.name, array.dtype, array.shape, array.array_dtype) == ("keys", named, (2, 3, 4), kind)
    assert content(array) == content(array, 8) == values.tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4)])
def test_npy_shapes(tmp_path, shape):
    values = np.ones(shape, np.float16)
    np.save(tmp_path / "a.npy", values)
    assert only(tmp_path / "a.npy").shape == shape
    assert content(only(tmp_path / "a.npy")) == values.tobytes()


def test_npy_fortran_order_is_read_in_memory_order(tmp_path):
    np.save(tmp_path / "a.npy", np.asfortranarray(WORDS))
    array = only(tmp_path / "a.npy")
    assert (array.order, array.shape) == ("F", (2, 3, 4))
    assert content(array, 32) == WORDS.tobytes("F")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_format_versions(tmp_path, version):
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, WORDS, version=version)
    assert content(only(tmp_path / "a.npy")) == WORDS.tobytes()


def test_npy_chunks_are_views_of_the_mapped_file(tmp_path):
    np.save(tmp_path / "a.npy", WORDS)
    for piece in only(tmp_path / "a.npy").iter_chunks(16):
        assert not piece.flags.owndata
        assert not piece.flags.writeable


def header(text: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a valid .npy header"),
        (b"not numpy at all", "not a valid .npy header"),
        (saved(WORDS)[:40], "not a valid .npy header"),
        (saved(WORDS)[:-1], "is truncated: the header promises 96 bytes"),
        (saved(WORDS) + b"\0", "has trailing bytes"),
        (saved(WORDS) + saved(WORDS), "has trailing bytes"),
        (saved(np.array([{}, []], object), allow_pickle=True), "pickles"),
        (saved(np.zeros(3, [("a", "<f2")])), "structured type"),
        (saved(np.zeros(3)), "float64"),
        (saved(np.zeros(3, bool)), "bool"),
        (saved(np.zeros(3, "<i2")), "--dtype fp16 or bf16 takes them as they are"),
        (saved(np.zeros(3, np.uint8)), "raw bytes need a dtype"),
        (saved(np.zeros((3, 0), np.float16)), "is empty"),
        (header("{'descr': '<f2', 'fortran_order': False, 'shape': (-1,)}\n"), "impossible shape"),
        (header(f"{{'descr': '<f2', 'fortran_order': False, 'shape': ({2**70}, 4)}}\n"), "is truncated"),
        (
            header("{'descr': '<f2', 'fortran_order': False, 'shape': (2,)" + " " * 20000 + "}"),
            "not a valid .npy header",
        ),
        (header("__import__('os').system('true')\n"), "not a valid .npy header"),
        (header("{" * 5000), "not a valid .npy header"),
        (header("{'descr': '<f2', ['shape']: (2,)}"), "not a valid .npy header"),
        (b"\x93NUMPY\x09\x00\x10\x00" + b" " * 16, "version 9.0"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 16, "not a valid .npy header"),
    ],
)
def test_npy_malformed_file_is_refused(tmp_path, data, message):
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(SourceError, match=r"a.npy") as caught:
        formats.open(str(tmp_path / "a.npy"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 223))
def test_npy_damaged_file_is_refused_or_read(tmp_path_factory, noise, at):
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    whole = saved(WORDS)
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    try:
        array = only(path)
    except SourceError:
        return
    assert len(content(array, 16)) == array.nbytes
