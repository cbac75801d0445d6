"""Descriptions of other engines' caches as JSON."""

from __future__ import annotations

import pytest

from kvmnn.arrays.engine_cache import EngineCacheInfo
from kvmnn.arrays.engine_metadata import build_engine_document, parse_engine_cache
from kvmnn.errors import KvmnnError
from kvmnn.files.schema import JsonReader

CACHE = EngineCacheInfo(
    engine="llama.cpp",
    kind="session",
    layers=1,
    kv_heads=2,
    head_dim=64,
    tokens=3,
    types=("q8_0", "f16"),
    dequantised=("q8_0",),
    type_bits={"q8_0": 8.5},
)


def test_parse_engine_cache_has_the_bits_of_quantised_types() -> None:
    document = build_engine_document(CACHE)
    assert parse_engine_cache(JsonReader(document, "a", "")).type_bits == {"q8_0": 8.5}
    del document["type_bits"]  # as earlier versions wrote it
    assert parse_engine_cache(JsonReader(document, "a", "")).type_bits == {}


@pytest.mark.parametrize("bits", [[8.5], {"q8_0": "8"}, {"q8_0": 0}, {"q8_0": float("nan")}, {"q8_0": 65}])
def test_parse_engine_cache_refuses_impossible_bits(bits: object) -> None:
    document = build_engine_document(CACHE) | {"type_bits": bits}
    with pytest.raises(KvmnnError, match=r"a: type_bits: found .*, expected (an object of )?numbers"):
        parse_engine_cache(JsonReader(document, "a", ""))
