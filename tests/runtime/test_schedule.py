"""When the engine compresses which layers and tokens."""

from __future__ import annotations

from typing import Any

import pytest
from store_options import store_options

from kvmnn.policies.h2o import H2OConfig
from kvmnn.runtime.schedule import CompressionScope, get_bootstrap_tokens

KEPT: dict[str, Any] = {
    "mode": "full",
    "scope": "h2o_kept",
    "front_n": 2,
    "h2o": H2OConfig(layers=6, layer_start=2, trigger_min_tokens=1, update_interval=1),
}


def steps_of(layer: int, **options: Any) -> list[int]:
    """The first decode steps at which a layer is compressed."""
    scope = CompressionScope(store_options(**options))
    return [step for step in range(1, 9) if scope.compute_budget(layer, step, 100, 60) is not None]


def test_schedule_samples_begin_with_the_first_step() -> None:
    assert steps_of(0, front_sample_token_interval=3) == [1, 4, 7]
    assert steps_of(2, **KEPT, kept_sample_token_interval=3) == [1, 4, 7]
    assert steps_of(0, front_sample_token_interval=1) == [*range(1, 9)]


@pytest.mark.parametrize(("scope", "layers"), [("h2o_kept", [2, 3]), ("front_n_and_h2o_kept", [0, 1, 2, 3])])
def test_schedule_full_mode_samples_first_layers(scope: Any, layers: list[int]) -> None:
    options = KEPT | {"scope": scope, "kept_sample_layers": 2}
    assert [layer for layer in range(6) if steps_of(layer, **options)] == layers


@pytest.mark.parametrize(
    ("mode", "given", "tokens"),
    [("probe", 24, 32), ("full", 24, 80), ("store", 24, 24), ("store", 0, 40)],
)
def test_get_bootstrap_tokens_covers_first_block(mode: Any, given: int, tokens: int) -> None:
    assert get_bootstrap_tokens(store_options(mode=mode, block_tokens=80, store_bootstrap_tokens=given)) == tokens
