"""Which pairs of a plan the engine would apply."""

from __future__ import annotations

import pytest

from kvmnn.policies.h2o.planner import PendingPlan, are_valid_pairs

INT32_MAX = 2**31 - 1


@pytest.mark.parametrize(
    ("pairs", "remove", "valid"),
    [
        ((), 0, True),
        (((0, 8),), 8, True),
        (((0, 9),), 8, False),
        (((8, 1),), 8, False),
        (((7, 1),), 8, True),
        (((0, 4), (4, 4)), 8, True),
        (((0, 4), (4, 5)), 8, False),
        (((0, 4), (3, 2)), 8, False),
        (((0, 0),), 8, False),
        (((-1, 2),), 8, False),
        (((0, INT32_MAX),), 2**40, True),
        (((1, INT32_MAX),), 2**40, False),
    ],
)
def test_are_valid_pairs_within_removed_window(pairs: tuple[tuple[int, int], ...], remove: int, valid: bool) -> None:
    assert are_valid_pairs(pairs, remove) is valid


def test_pending_plan_pair_beyond_window_is_not_applicable() -> None:
    good, beyond = (PendingPlan(remove=8, flat_pairs=(0, 2, 6, size)) for size in (2, 3))
    assert good.is_applicable(8) and not beyond.is_applicable(8)
