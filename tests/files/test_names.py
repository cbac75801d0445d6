"""File names for arrays: plain, distinct, recognisable."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmnn.files.file_names import make_file_names


@given(st.lists(st.text(max_size=200), max_size=6))
def test_make_file_names_are_plain_and_distinct(names):
    found = make_file_names(names, ".frame")
    assert len({name.lower() for name in found}) == len(names)
    for name in found:
        assert name.endswith(".frame")
        assert not set(name) & set("/\\:\0\n ")
        assert not name.startswith(".")
        assert len(name) < 140


def test_make_file_names_keep_valid_characters():
    assert make_file_names(["run/layer_0/k_t0_16", "K", "k", "..", ""], ".npy") == [
        "run_layer_0_k_t0_16.npy", "K.npy", "k~2.npy", "array.npy", "array~2.npy",
    ]  # fmt: skip
