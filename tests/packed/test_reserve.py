"""What upstream's realloc does with a plan, worked out by hand."""

from __future__ import annotations

import pytest

from kvmnn import KvmnnError
from kvmnn.packed.compaction import CompactionOutcome, simulate_upstream_realloc


def outcome(pairs: tuple[tuple[int, int], ...], past: int = 10, remove: int = 4) -> CompactionOutcome:
    return simulate_upstream_realloc(past, remove, pairs, 0, False, 10, 16)


def test_plan_compaction_empty_pair_copies_nothing() -> None:
    assert outcome(((0, 2), (3, 0), (5, 1))) == CompactionOutcome(5, ((6, 6, 2), (11, 8, 1)), 9)
    assert outcome(((0, 1), (-100, 0))) == CompactionOutcome(5, ((6, 6, 1),), 7)


def test_plan_compaction_copy_beyond_buffer_is_refused() -> None:
    assert outcome(((8, 2),)).moves == ((14, 6, 2),)
    with pytest.raises(KvmnnError, match=r"pair \(9, 2\)"):
        outcome(((9, 2),))
    assert outcome(((-6, 1),)).moves == ((0, 6, 1),)
    with pytest.raises(KvmnnError, match=r"pair \(-7, 1\)"):
        outcome(((-7, 1),))


def test_plan_compaction_negative_counts_are_refused() -> None:
    assert outcome(((0, 1),), past=4).moves == ((0, 0, 1),)
    with pytest.raises(KvmnnError, match="remove is 4 with 3 tokens"):
        outcome(((0, 1),), past=3)
