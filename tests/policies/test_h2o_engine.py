"""The engine's planner as a policy: options from its configuration, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvmnn import KvmnnError
from kvmnn.policies import H2OEngine, create_policy
from kvmnn.policies.specs import build_policy, expand_spec

CONFIG = {
    "kv_h2o_enable": True,
    "kv_h2o_block_tokens": 16,
    "kv_h2o_target_mode": "static",
    "kv_h2o_target_keep_ratio": 0.3,
    "kv_h2o_log_stats": False,
    "kv_lossless_enable": True,
    "layer_nums": 6,
    "llm_model": "x.mnn",
}


def test_h2o_engine_options_come_from_engine_keys() -> None:
    expected = {"block_tokens": 16, "target_mode": "static", "target_keep_ratio": 0.3, "layer_nums": 6}
    assert H2OEngine.parse_engine_options(CONFIG) == expected
    assert H2OEngine.from_engine(CONFIG, cadence="tokens") == H2OEngine(cadence="tokens", **expected)  # type: ignore[arg-type]
    assert H2OEngine.from_engine({}) == H2OEngine() == create_policy("h2o_engine")
    planner = H2OEngine.from_engine(CONFIG).create_planner(6, 1024)
    assert (planner.cadence, planner.config.layers, planner.config.bytes_per_token) == ("layer-calls", 6, 1024)
    assert (planner.config.block_tokens, planner.config.enable) == (16, True)


def test_h2o_engine_spec_overrides_configuration() -> None:
    defaults = {"h2o_engine": H2OEngine.parse_engine_options(CONFIG)}
    ((name, options),) = expand_spec("h2o_engine:block_tokens=8,cadence=tokens", (64, 128), (0,), defaults)
    made = build_policy(name, options)
    assert isinstance(made, H2OEngine) and (made.block_tokens, made.cadence, made.layer_nums) == (8, "tokens", 6)
    assert list(expand_spec("streaming", (64,), None, defaults)) == [("streaming", {"budget": 64})]


def test_resolve_skip_layers_of_layer_ranges() -> None:
    assert H2OEngine().resolve_skip_layers(4) == {0, 1}
    assert H2OEngine(layer_start=9).resolve_skip_layers(4) == {0, 1, 2}  # the engine cuts the start to the last layer
    assert H2OEngine(layer_start=0, layer_end=1).resolve_skip_layers(4) == {2, 3}
    assert create_policy("streaming", skip_layers=(1, 7)).resolve_skip_layers(4) == {1}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"kv_h2o_enable": False}, "kv_h2o_enable is not true"),
        ({"attention_mode": 10}, "attention_mode 10 quantises"),
        ({"kv_h2o_blok_tokens": 3}, "kv_h2o_blok_tokens: is no option"),
        ({"kv_h2o_block_tokens": "3"}, "kv_h2o_block_tokens must be an integer, not str"),
    ],
)
def test_h2o_engine_unusable_configuration_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(KvmnnError, match=message):
        H2OEngine.from_engine(document)


def test_h2o_engine_invalid_options_are_refused() -> None:
    for wrong in ({"cadence": "steps"}, {"target_mode": "half"}, {"target_lossy_ratio": float("nan")}):
        with pytest.raises(KvmnnError):
            create_policy("h2o_engine", **wrong)
    with pytest.raises(KvmnnError, match="h2o_engine has no option 'skip_layers'"):
        create_policy("h2o_engine", skip_layers=(0,))
