"""KVMeta: the engine's counts of a step."""

from __future__ import annotations

import pytest

from kvmnn import KVMeta, KvmnnError


def test_kv_meta_set_info_counts_a_step() -> None:
    meta = KVMeta(100)
    meta.set_info(3, 500, [(0, 10), (20, 5)])
    assert (meta.add, meta.remove, meta.compute_reserve_size()) == (3, 100, 15)
    assert meta.sync() == 100 - 100 + 3 + 15
    assert (meta.add, meta.remove, meta.reserve) == (0, 0, ())


@pytest.mark.parametrize(
    ("dialect", "remove", "pairs", "expected"),
    [
        ("fork", 24, [(0, 5), (4, 3)], 11),
        ("fork", 24, [(10, 3), (0, 4)], 10),
        ("fork", 20, [(18, 4)], 7),
        ("fork", 24, [(-1, 4)], 3),
        ("fork", 24, [(0, 0), (5, 3)], 3),
        ("fork", 35, [(0, 5)], 0),
        ("fork", 27, [(0, 5)], 5),
        ("fork", 20, [(16, 4)], 11),
        ("upstream", 24, [(30, 9)], 12),
        ("upstream", 24, [(0, 0), (5, 3)], 2),
    ],
)
def test_kv_meta_sync_gives_expected_length(
    dialect: str, remove: int, pairs: list[tuple[int, int]], expected: int
) -> None:
    assert KVMeta(26, 1, remove, tuple(pairs), dialect).sync() == expected


def test_kv_meta_erase_plans_like_the_engine() -> None:
    meta = KVMeta(100)
    meta.erase(21, 70)
    assert (meta.remove, meta.reserve) == (79, ((49, 30),))
    meta.erase(21)
    assert (meta.remove, meta.reserve) == (79, ())
    with pytest.raises(KvmnnError, match="cannot erase"):
        meta.erase(100)
    with pytest.raises(KvmnnError, match="previous is -1"):
        KVMeta(-1)
    with pytest.raises(KvmnnError, match="unknown dialect"):
        KVMeta(dialect="mine")
