"""RuntimeConfig: the engine's keys, defaults and clamps."""

from __future__ import annotations

from typing import Any

import pytest

from kvmnn import KvmnnError
from kvmnn.runtime import RuntimeConfig
from kvmnn.runtime.config import check_num_layers

DEFAULTS = {
    "kv_lossless_enable": ("enable", False),
    "kv_lossless_scope": ("scope", "front_n"),
    "kv_lossless_front_n": ("front_n", 2),
    "kv_lossless_codec": ("codec", "none"),
    "kv_lossless_runtime_enable": ("runtime_enable", False),
    "kv_lossless_runtime_mode": ("mode", "probe"),
    "kv_lossless_block_tokens": ("block_tokens", 128),
    "kv_lossless_hot_recent_tokens": ("hot_recent_tokens", 256),
    "kv_lossless_hot_sink_tokens": ("hot_sink_tokens", 16),
    "kv_lossless_kept_sample_layers": ("kept_sample_layers", 1),
    "kv_lossless_kept_sample_token_interval": ("kept_sample_token_interval", 1),
    "kv_lossless_front_sample_token_interval": ("front_sample_token_interval", 1),
    "kv_lossless_store_disable_front": ("store_disable_front", False),
    "kv_lossless_store_bootstrap_tokens": ("store_bootstrap_tokens", 32),
    "kv_lossless_store_grouped_step_tokens": ("store_grouped_step_tokens", 256),
    "kv_lossless_codec_runtime": ("codec_runtime", "fp16_gear_predictive_v3"),
    "kv_lossless_predictors_k": ("predictors_k", "raw,delta_seq,xor_seq,pair_delta"),
    "kv_lossless_predictors_v": ("predictors_v", "raw,delta_seq,xor_seq"),
    "kv_lossless_async_threads": ("async_threads", 1),
    "kv_lossless_max_queue": ("max_queue", 256),
    "kv_lossless_decode_cache_blocks": ("decode_cache_blocks", 64),
    "kv_lossless_strict_roundtrip_check": ("strict_roundtrip_check", False),
}


@pytest.mark.parametrize(("key", "name", "default"), [(key, *value) for key, value in DEFAULTS.items()])
def test_from_engine_each_key_reaches_its_field(key: str, name: str, default: Any) -> None:
    assert getattr(RuntimeConfig.from_engine({}), name) == default
    given: Any = {bool: True, int: 7}.get(type(default), default)
    if name in ("scope", "mode", "codec"):
        given = {"scope": "h2o_kept", "mode": "store", "codec": "gear_delta"}[name]
    assert getattr(RuntimeConfig.from_engine({key: given}), name) == given


def test_from_engine_h2o_defaults_are_those_of_the_engine() -> None:
    h2o = RuntimeConfig.from_engine({}).h2o
    found = (h2o.enable, h2o.layer_start, h2o.layer_end, h2o.block_tokens, h2o.sink_tokens, h2o.recent_tokens)
    assert found == (False, 2, -1, 64, 32, 256)
    assert (h2o.target_lossy_ratio, h2o.update_interval, h2o.trigger_min_tokens) == (3.0, 16, 512)
    assert RuntimeConfig.from_engine({"kv_h2o_update_interval": 0}).h2o.effective_interval == 1


@pytest.mark.parametrize(
    ("key", "value", "name", "used"),
    [
        ("kv_lossless_front_n", -1, "front_n", 0),
        ("kv_lossless_block_tokens", 0, "block_tokens", 1),
        ("kv_lossless_block_tokens", -5, "block_tokens", 1),
        ("kv_lossless_hot_recent_tokens", -1, "hot_recent_tokens", 0),
        ("kv_lossless_hot_sink_tokens", -1, "hot_sink_tokens", 0),
        ("kv_lossless_max_queue", 0, "max_queue", 1),
        ("kv_lossless_async_threads", -3, "async_threads", 0),
        ("kv_lossless_decode_cache_blocks", -3, "decode_cache_blocks", 0),
        ("kv_lossless_scope", "front_n+h2o_kept", "scope", "front_n_and_h2o_kept"),
        ("kv_lossless_scope", "none", "scope", "none"),
        ("attention_mode", 0, "flash_attention", False),
        ("attention_mode", 8, "flash_attention", True),
        ("layer_nums", 24, "layer_nums", 24),
    ],
)
def test_from_engine_values_are_clamped_like_the_engine(key: str, value: Any, name: str, used: Any) -> None:
    assert getattr(RuntimeConfig.from_engine({key: value}), name) == used


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"kv_lossless_blocktokens": 3}, "kv_lossless_blocktokens: no option of the runtime"),
        ({"kv_losless_enable": True, "kv_foo": 1}, "kv_foo, kv_losless_enable: no option"),
        ({"kv_h2o_blocks": 3}, "kv_h2o_blocks"),
        ({"attention_mode": 10}, "attention_mode 10 quantises"),
        ({"attention_mode": 1}, "quantises"),
        ({"kv_lossless_enable": 1}, "kv_lossless_enable is 1: expected true or false"),
        ({"kv_lossless_front_n": "2"}, "kv_lossless_front_n is '2': expected an integer"),
        ({"kv_lossless_front_n": True}, "expected an integer"),
        ({"kv_lossless_front_n": 1 << 40}, "kv_lossless_front_n is 1099511627776"),
        ({"kv_lossless_scope": 3}, "expected a string"),
        ({"layer_nums": 0}, "layer_nums is 0"),
        ({"kv_lossless_async_threads": 100000}, "kv_lossless_async_threads is 100000: expected at most 256"),
        ({"kv_lossless_frontn": 3}, r"no option of the runtime \(did you mean 'kv_lossless_front_n'\?\)$"),
        ({"kv_xyz": 3}, "kv_xyz: no option of the runtime; expected names out of kv_lossless_async_threads, "),
        ({"layer_nums": "6"}, "layer_nums must be an integer, not str"),
        ({"kv_h2o_trigger_min_tokens": 1 << 40}, "kv_h2o_trigger_min_tokens is 1099511627776"),
        ({"kv_h2o_blok_tokens": 8}, r"no option of the planner \(did you mean 'kv_h2o_block_tokens'\?\)$"),
    ],
)
def test_from_engine_ambiguous_values_are_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(KvmnnError, match=message):
        RuntimeConfig.from_engine(document)


@pytest.mark.parametrize(
    ("key", "value", "message", "name", "read"),
    [
        (
            "kv_lossless_runtime_mode",
            "stoer",
            r"'stoer': expected one of probe, full, store \(did you mean 'store'",
            "mode",
            "probe",
        ),
        ("kv_lossless_runtime_mode", "Store", r"'Store': expected .*did you mean 'store'", "mode", "probe"),
        ("kv_lossless_runtime_mode", "", "'': expected one of probe, full, store$", "mode", "probe"),
        ("kv_lossless_scope", "front", "'front': expected one of none, front_n, h2o_kept", "scope", "front_n"),
        ("kv_lossless_scope", "h2o_kep", "did you mean 'h2o_kept'", "scope", "front_n"),
        (
            "kv_lossless_codec",
            "gear-delta",
            r"expected one of none, gear_delta, profile, transform \(did you mean 'gear_delta'",
            "codec",
            "gear-delta",
        ),
        (
            "kv_lossless_predictors_k",
            "raw,delta_sq",
            r"'delta_sq': .*did you mean 'delta_seq'",
            "predictors_k",
            "raw,delta_sq",
        ),
        (
            "kv_lossless_predictors_v",
            "bogus",
            "'bogus': expected one of raw, delta_seq, xor_seq, pair_delta",
            "predictors_v",
            "bogus",
        ),
    ],
)
def test_from_engine_unknown_names_are_refused_by_default(
    key: str, value: str, message: str, name: str, read: str
) -> None:
    with pytest.raises(KvmnnError, match=rf"^{key} is .*{message}"):
        RuntimeConfig.from_engine({key: value})
    assert getattr(RuntimeConfig.from_engine({key: value}, lenient=True), name) == read


def test_from_engine_unknown_target_mode_is_refused_by_default() -> None:
    for value in ("ststic", "Static", "", 3, None):
        with pytest.raises(KvmnnError, match=r"^kv_h2o_target_mode is .*: expected one of adaptive, static"):
            RuntimeConfig.from_engine({"kv_h2o_target_mode": value})
        assert RuntimeConfig.from_engine({"kv_h2o_target_mode": value}, lenient=True).h2o.target_mode == "adaptive"


@pytest.mark.parametrize("spec", ["", "raw", "xor_seq ,\traw", "raw,delta_seq,xor_seq,pair_delta"])
def test_from_engine_predictor_lists_are_accepted(spec: str) -> None:
    assert RuntimeConfig.from_engine({"kv_lossless_predictors_k": spec}).predictors_k == spec


@pytest.mark.parametrize("document", [None, "x", ["kv_lossless_enable"], {1: 2}])
def test_from_engine_document_must_be_a_mapping(document: Any) -> None:
    with pytest.raises(TypeError, match="document must be a mapping of names, not "):
        RuntimeConfig.from_engine(document)


def test_from_engine_ignores_unrelated_keys() -> None:
    assert RuntimeConfig.from_engine({"reuse_kv": True, "llm_model": "x", "kvcache_mmap": True}) == RuntimeConfig()


def test_check_num_layers_mismatch_is_refused() -> None:
    with pytest.raises(KvmnnError, match="layer_nums is 32, the model has 24 layers"):
        check_num_layers(RuntimeConfig.from_engine({"layer_nums": 32}), 24)
    assert check_num_layers(RuntimeConfig.from_engine({}), 24) == 24


@pytest.mark.parametrize(
    "changes", [{"mode": "off"}, {"scope": "all"}, {"front_n": -1}, {"max_queue": 0}, {"effort": "slow"}]
)
def test_runtime_config_invalid_values_are_refused_not_clamped(changes: dict[str, Any]) -> None:
    with pytest.raises(KvmnnError):
        RuntimeConfig(**changes)
    with pytest.raises(TypeError):
        RuntimeConfig(enable=1)  # type: ignore[arg-type]


def test_bootstrap_tokens_are_sink_recent_and_one_block() -> None:
    """Sink, recent and one block, unless eviction begins later."""
    keys = {"kv_lossless_hot_sink_tokens": 4, "kv_lossless_hot_recent_tokens": 8, "kv_lossless_block_tokens": 16}
    for trigger, tokens in ((1, 28), (28, 28), (29, 29)):
        config = RuntimeConfig.from_engine(keys | {"kv_h2o_trigger_min_tokens": trigger})
        assert config.min_first_block_tokens == tokens


def test_codec_runtime_selects_frames_of_the_sound_runtime_only():
    key = "kv_lossless_codec_runtime"
    assert RuntimeConfig.from_engine({}).sound_codecs == ("rle", "zstd")
    assert RuntimeConfig.from_engine({key: "zstd"}).sound_codecs == ("zstd",)
    config = RuntimeConfig.from_engine({key: "max"})
    assert (config.sound_effort, config.effort, config.codecs) == ("max", "fast", ("rle", "zstd"))
    with pytest.raises(KvmnnError, match="codec_runtime is 'lz4': expected one of fp16_gear_predictive_v3, rle"):
        RuntimeConfig.from_engine({key: "lz4"})
    assert RuntimeConfig.from_engine({key: "lz4"}, lenient=True) == RuntimeConfig()
