"""Arrays in pieces: cut along their leading axes; and in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sources import WORDS, only

from kvmnn.arrays.array import ArrayInfo, LazyArray, rechunk
from kvmnn.errors import SourceError


@given(
    shape=st.lists(st.integers(1, 7), max_size=4).map(tuple),
    kind=st.sampled_from(["<f2", "<f4", "<u2"]),
    order=st.sampled_from(["C", "F"]),
    limit=st.integers(4, 400),
)
def test_compute_chunk_bytes_gives_whole_leading_rows(shape, kind, order, limit):
    info = ArrayInfo(name="a", dtype={"<f2": "fp16", "<f4": "fp32", "<u2": "bf16"}[kind], shape=shape,
                     array_dtype=kind, order=order)  # fmt: skip
    step = info.compute_chunk_bytes(limit)
    assert info.itemsize <= step <= max(limit, info.nbytes)
    assert step <= limit
    assert step % info.itemsize == 0
    assert info.count_chunks(limit) == -(-info.nbytes // step)
    rows = {info.nbytes}
    for axis in shape if order == "C" else shape[::-1]:
        rows.add(min(rows) // axis)
    largest = max(row for row in rows if row <= limit)
    assert step % largest == 0
    assert step + largest > limit or step == info.nbytes


def test_count_chunks_zero_bytes_gives_one_chunk():
    info = ArrayInfo(name="a", dtype="fp32", shape=(1 << 20, 1 << 10), array_dtype="<f4")
    assert info.count_chunks(0) == 1


def test_compute_chunk_bytes_cuts_raw_bytes_between_elements():
    info = ArrayInfo(name="a", dtype="fp32", shape=(3, 20), array_dtype="|u1")
    assert info.compute_chunk_bytes(23) == 20


@pytest.mark.parametrize("order", ["C", "F"])
def test_array_info_index_of_byte_follows_order(order):
    info = ArrayInfo(name="a", dtype="fp32", shape=(2, 3, 4), array_dtype="<f4", order=order)
    flat = np.arange(24).reshape(2, 3, 4).ravel(order=order)
    for position in range(24):
        assert np.arange(24).reshape(2, 3, 4)[info.index_at_offset(4 * position + 3)] == flat[position]


@pytest.mark.parametrize("kind", ["<f2", ">f2", "<f4", ">f4", "<u2", "<i4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_lazy_array_to_numpy_gives_stored_values(tmp_path, kind, order):
    values = np.asarray((WORDS * 3).astype(kind), order=order)
    np.save(tmp_path / "a.npy", values)
    found = only(tmp_path / "a.npy", dtype="fp16" if kind[2] == "2" else "fp32").to_numpy()
    np.testing.assert_array_equal(found, values)
    assert found.dtype == values.dtype.newbyteorder("<")
    assert found.flags.writeable
    assert found.flags.f_contiguous == values.flags.f_contiguous


@pytest.mark.parametrize("found", [0, 2, 46, 48, 96])
def test_lazy_array_to_numpy_unexpected_size_is_refused(found):
    array = LazyArray(
        name="a",
        dtype="fp16",
        shape=(24,),
        array_dtype="<f2",
        reader=lambda step: iter([np.zeros(found, np.uint8), np.zeros(1, np.uint8)]),
    )
    with pytest.raises(SourceError, match=f"array 'a': {found + 1} bytes came where 48 were announced"):
        array.to_numpy()


@pytest.mark.parametrize(("step", "total"), [(4, 8), (3, 8), (8, 8), (100, 8)])
def test_lazy_array_checks_after_last_byte_run(step, total):
    def blocks():
        yield np.zeros(5, np.uint8)
        yield np.zeros(3, np.uint8)
        raise SourceError("the data does not match its checksum")

    with pytest.raises(SourceError, match="does not match its checksum"):
        list(rechunk(blocks(), step, total))
