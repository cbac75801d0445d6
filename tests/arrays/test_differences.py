"""Differences of two inputs: how many words, which is the first, and what cannot be compared."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvmnn.arrays.array import LazyArray, from_numpy
from kvmnn.arrays.compare import DiffReport, compare_bitwise
from kvmnn.arrays.source import Source

WORDS = np.arange(2 * 5 * 4, dtype=np.float32).reshape(2, 5, 4)


def in_pieces(array: LazyArray, size: int) -> LazyArray:
    """The same array, which comes in pieces of `size` bytes."""
    data = np.concatenate(list(array.reader(1 << 20)))

    def run(data: np.ndarray, step: int):
        return (data[begin : begin + size] for begin in range(0, data.size, size))

    return replace(array, reader=partial(run, data))


@pytest.mark.parametrize("name", ["x", "layer_3.key"])
@pytest.mark.parametrize(("one", "two"), [(160, 160), (8, 160), (12, 20), (160, 4)])
def test_compare_bitwise_counts_every_element_for_any_chunks(name: str, one: int, two: int) -> None:
    other = WORDS.copy()
    other[0, 3, 2], other[1, 1, 0], other[1, 4, 3] = -1, -2, -3
    first, second = (in_pieces(from_numpy(name, words), size) for words, size in ((WORDS, one), (other, two)))
    arrays = [first], [second]
    if name != "x":
        for some in arrays:
            some.append(from_numpy("layer_3.value", WORDS))
    found = compare_bitwise(Source(arrays[0]), Source(arrays[1]))
    assert (found.words, found.differing, found.equal) == (40 if name == "x" else 80, 3, False)
    place = found.first
    assert place is not None and (place.first, place.second) == (14.0, -1.0)
    if name == "x":
        assert (place.index, place.layer) == ((0, 3, 2), None)
    else:
        assert (place.layer, place.part, place.head, place.token, place.dim) == (3, "key", 0, 3, 2)


def test_compare_bitwise_equal_elements_are_equal() -> None:
    found = compare_bitwise(Source([in_pieces(from_numpy("x", WORDS), 12)]), Source([from_numpy("y", WORDS)]))
    assert found.equal and (found.words, found.differing, found.first) == (40, 0, None)
    assert str(found) == "equal: 40 words, bit by bit"


def test_compare_bitwise_undeclared_axes_are_reported() -> None:
    """``0.0`` is K of layer 0, of which heads and tokens cannot be told apart; said only where names do not match."""
    short = WORDS.astype(np.float16)
    numbered, named = (
        Source([from_numpy(names[0], short), from_numpy(names[1], short)], inputs=(f"{names[0]}.npz",))
        for names in (("0.0", "0.1"), ("layer_0.key", "layer_0.value"))
    )
    hint = (
        "0.0.npz: array '0.0' [2, 5, 4]: nothing says whether 2 or 5 is the number of tokens: say --axes htd (5 "
        "tokens) or --axes thd (2 tokens), in Python axes="
    )
    for one, two in ((numbered, named), (named, numbered)):
        found = compare_bitwise(one, two)
        assert not found.equal
        assert found.hints == (hint,)
        assert str(found).splitlines()[-1] == hint
        assert found.to_dict()["hints"] == [hint]
    assert compare_bitwise(numbered, numbered).equal and compare_bitwise(numbered, numbered).hints == ()


def test_diff_report_has_one_line_for_many_arrays_that_differ_alike() -> None:
    keys = [f"layer {layer}, K: fp32 and fp16" for layer in range(30)]
    report = DiffReport(unlike=(*keys, "layer 3, V: only in the first"))
    assert str(report).splitlines() == [
        "layer 0, K ... layer 29, K (30 arrays): fp32 and fp16 (first input, second input)",
        "layer 3, V: only in the first (first input, second input)",
    ]
    assert str(DiffReport(unlike=tuple(keys[:4]))).count("fp32 and fp16") == 4
    assert report.to_dict()["unlike"] == [*keys, "layer 3, V: only in the first"]
