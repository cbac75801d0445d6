"""Which layer an array is of, and whether it is K or V, by its name."""

from __future__ import annotations

import pytest

from kvmnn import SourceError
from kvmnn.arrays.names import layer_of, part_of


@pytest.mark.parametrize(
    ("name", "part", "rest", "layer"),
    [
        ("layer_3.key", "key", "layer_3.*", 3),
        ("layer_3.value", "value", "layer_3.*", 3),
        ("past_key_values.12.value", "value", "past_key_values.12.*", 12),
        ("k", "key", "*", None),
        ("V7", "value", "*7", 7),
        ("run/layer_0/keys", "key", "run/layer_0/*", 0),
        ("value_of_k", "key", "value_of_*", None),
    ],
)
def test_names_that_say_it(name, part, rest, layer):
    assert part_of("a file", name) == (part, rest)
    assert layer_of(name) == layer


@pytest.mark.parametrize("name", ["", "weights", "kv", "monkey", "valued"])
def test_names_that_do_not(name):
    with pytest.raises(SourceError, match=r"a file: array .* is neither K nor V"):
        part_of("a file", name)
