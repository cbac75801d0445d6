"""Which layer an array is of, and whether it is K or V, by its name."""

from __future__ import annotations

import pytest

from kvmnn import SourceError
from kvmnn.arrays.naming import parse_conventional_name, parse_layer, parse_part


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
def test_parse_part_conventional_name_gives_part_and_layer(name, part, rest, layer):
    assert parse_part("a file", name) == (part, rest)
    assert parse_layer(name) == layer


@pytest.mark.parametrize("name", ["", "weights", "kv", "monkey", "valued"])
def test_parse_part_unknown_name_is_refused(name):
    with pytest.raises(SourceError, match=r"a file: array .* is neither K nor V"):
        parse_part("a file", name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layer_3.key", ("key", 3, "htd", 0, None)),
        ("past_key_values.12.value", ("value", 12, "htd", 0, None)),
        ("present.0.key", ("key", 0, "htd", 0, None)),
        ("layer_1/k_t0_16", ("key", 1, "thd", 0, 16)),
        ("2026/run/layer_1/v_t16_17", ("value", 1, "thd", 16, 17)),
        ("2026_run_layer_1_v_t16_17", ("value", 1, "thd", 16, 17)),  # the file that decode -o DIR/ makes of it
        ("run/layer_7/packed_k_packed_t0_9", ("key", 7, "htd", 0, 9)),
    ],
)
def test_parse_conventional_name_table_entries_are_recognized(name, said):
    assert parse_conventional_name(name) == said


@pytest.mark.parametrize(
    "name", ["k", "k_0", "layers.0.key", "layer_0.keys", "xlayer_0.key", "layer_0.key~2", "present.0"]
)
def test_parse_conventional_name_other_name_gives_none(name):
    assert parse_conventional_name(name) is None
