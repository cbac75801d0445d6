"""Models with the lossless runtime around their cache: equal logits bit for bit, and the runtime's statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from slow_cases import mark_most_slow
from tiny_decoders import Tiny

from kvmnn.errors import KvmnnError
from kvmnn.lm import DecoderSession, Runner
from kvmnn.lm.kv_store import LosslessStore
from kvmnn.lm.onnx.interface import DecoderInterface
from kvmnn.policies import POLICIES, FullCache, Policy, ProfiledPolicy, create_policy
from kvmnn.policies.registry import MODEL_POLICIES
from kvmnn.reports.records import RuntimeStats, merge_runtime_stats
from kvmnn.runtime import LosslessRuntime, RuntimeConfig

FORMS = {
    "half": Tiny(layers=3, half=True, head_dim=32, queries=True),
    "float": Tiny(layers=3, groups=1, head_dim=32, queries=True),
}
STEPS = [70, *[1] * 15, 4, *[1] * 10, 7, *[1] * 5]


def config(mode: str = "store", **keys: Any) -> RuntimeConfig:
    known = {
        "enable": True, "runtime_enable": True, "codec": "gear_delta", "runtime_mode": mode, "async_threads": 0,
        "scope": "front_n", "front_n": 3, "block_tokens": 16, "hot_sink_tokens": 2, "hot_recent_tokens": 6,
    }  # fmt: skip
    document = {f"kv_lossless_{key}": value for key, value in (known | keys).items()}
    return RuntimeConfig.from_engine(document | {"kv_h2o_trigger_min_tokens": 16, "kv_h2o_update_interval": 1})


SIZED: dict[str, dict[str, Any]] = {
    "l2_ratio": {"keep_ratio": 0.7, "prune_after": 55},
    "h2o_tokens": {"budget": 50, "sink": 2, "recent": 12, "buffer": 7},
    "h2o_blocks": {"keep_ratio": 0.5, "sink": 2, "recent": 6, "block_tokens": 4, "trigger_min_tokens": 16},
    "h2o_heads": {"budget": 50, "recent": 10},
    "h2o_engine": {"block_tokens": 4, "sink_tokens": 2, "recent_tokens": 8, "trigger_min_tokens": 24},
    "composed": {"budget": 50, "policies": "keydiff+lagkv@lag=8"},
}


def policies() -> list[Policy]:
    found = [
        create_policy(name, **SIZED.get(name, {"budget": 50}))
        for name in (*POLICIES, *MODEL_POLICIES)
        if name not in ("oracle", "think", "duo_attention")
        and not issubclass(MODEL_POLICIES.get(name, FullCache), ProfiledPolicy)
    ]
    return [
        FullCache(),
        *found,
        create_policy("recent_only", budget=50, skip_layers=()),
        create_policy("streaming", budget=50, buffer=9),
    ]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DecoderSession]:
    paths = {name: form.save(tmp_path_factory.mktemp("tiny") / "model.onnx") for name, form in FORMS.items()}
    return {name: DecoderSession.open(path, attentions=True, cache=False) for name, path in paths.items()}


def fed(runner: Runner) -> np.ndarray:
    rng = np.random.default_rng(2)
    return np.concatenate([runner.step(rng.integers(0, 48, count), end_chunk=count > 1) for count in STEPS])


CASES = [("store", policy) for policy in policies()]
CASES += [(mode, create_policy("streaming", budget=50)) for mode in ("full", "probe")]  # which leave the rows alone


FORM_CASES = [*(("half", *case) for case in CASES), *(("float", *case) for case in CASES[::2])]


@pytest.mark.parametrize(
    ("form", "mode", "policy"), mark_most_slow(FORM_CASES, 3), ids=lambda value: getattr(value, "name", value)
)
def test_lossless_store_logits_equal_plain(
    sessions: dict[str, DecoderSession], form: str, policy: Policy, mode: str
) -> None:
    session = sessions[form]
    plain, stored = Runner(session, policy), Runner(session, policy, lossless=config(mode))
    expected, found = fed(plain), fed(stored)
    assert found.tobytes() == expected.tobytes()
    assert stored.cache.tokens == plain.cache.tokens
    for ours, theirs in zip(stored.cache.copy_layers(), plain.cache.copy_layers(), strict=True):
        assert ours.keys.tobytes() == theirs.keys.tobytes() and ours.values.tobytes() == theirs.values.tobytes()
    figures = stored.collect_runtime_stats()
    assert figures is not None and plain.collect_runtime_stats() is None
    plain.cache.compact_all()
    assert figures.live_bytes == plain.cache.nbytes and figures.lossy_ratio is not None
    assert figures.appended_bytes == plain.cache.nbytes * sum(STEPS) * 3 // sum(plain.cache.tokens)
    assert figures.h2o_lossless_fallback_count == 0 and figures.h2o_lossless_raw_bytes > 0
    blocks = sum(layer.blocks for layer in figures.layers)
    assert [layer.tokens for layer in figures.layers] == plain.cache.tokens
    assert (blocks > 0) is (mode == "store")
    assert RuntimeStats.from_dict(figures.to_dict()) == figures


def test_lossless_store_frees_rows() -> None:
    """On keys that compress well the cache takes less between the steps than its rows."""
    for by_head in (False, True):
        store = LosslessStore(interface_of(2), config(front_n=1, block_tokens=64), per_head=by_head)
        present: list[Any] = [(np.zeros((1, 2, 0, 16), np.float16),) * 2] * 2
        for count in (1000, 1, 1, 1):
            new = np.broadcast_to(np.arange(count, dtype=np.float16)[None, None, :, None] // 50, (1, 2, count, 16))
            present = [tuple(np.concatenate([part, new], axis=2) for part in pair) for pair in store.get_past()]
            store.set_present(present, count)
        figures = store.to_stats()
        first, other = figures.layers
        raw = 1003 * 2 * 2 * 16 * 2
        assert first.held_bytes < raw // 3 and other.held_bytes >= raw and other.blocks == 0
        assert store.nbytes == figures.held_bytes == first.held_bytes + other.held_bytes
        assert (figures.lossy_ratio, figures.appended_bytes) == (1.0, 2 * raw)
        both = merge_runtime_stats([figures, figures])
        assert both is not None and both.held_bytes == 2 * figures.held_bytes and both.layers[0].tokens == 2006
        assert both.total_ratio == figures.total_ratio and merge_runtime_stats([]) is None
        for restored, computed in zip(store.get_past(), present, strict=True):
            assert all(a.tobytes() == b.tobytes() for a, b in zip(restored, computed, strict=True))


def interface_of(layers: int) -> Any:
    """Of a model that is not there: all that a store asks for."""
    fields: dict[str, Any] = dict.fromkeys(DecoderInterface.__dataclass_fields__)
    fields |= {"layers": layers, "kv_heads": 2, "head_dim": 16, "dtype": np.float16, "label": "flat"}
    return DecoderInterface(**fields)


RANGES = [{"h2o_layer_start": 2}, {"h2o_layer_start": 1, "h2o_layer_end": 3}, {"h2o_layer_start": 9}]
SCOPES = [
    {"scope": scope, "front_n": front_n, "kept_sample_layers": sampled, "store_disable_front": raw_front}
    for scope in ("none", "front_n", "h2o_kept", "front_n_and_h2o_kept")
    for front_n, sampled, raw_front in ((0, 1, False), (2, 0, False), (2, 2, True), (9, 1, False))
]


@pytest.mark.parametrize("mode", mark_most_slow(["store", "probe", "full"], 3))
@pytest.mark.parametrize("evicting", RANGES, ids=str)
def test_lossless_store_scope_equals_full_runtime(mode: str, evicting: dict[str, int]) -> None:
    """Layers out of the scope are kept next to the runtime: their buffers are the model's own, not copied."""
    layers, kinds = 5, np.random.default_rng(3).integers(0, 9, (150, 16)).astype(np.float16)
    keys_of = {f"kv_{name}": value for name, value in evicting.items()}
    shared = {"kv_h2o_trigger_min_tokens": 16, "kv_h2o_update_interval": 1, "kv_lossless_runtime_mode": mode}
    options: dict[str, Any] = {"enable": True, "runtime_enable": True, "codec": "gear_delta", "async_threads": 0}
    options |= {"block_tokens": 16, "hot_sink_tokens": 2, "hot_recent_tokens": 6}
    for scope in SCOPES:
        known = {f"kv_lossless_{name}": value for name, value in (options | scope).items()}
        config = RuntimeConfig.from_engine(known | shared | keys_of)
        store = LosslessStore(interface_of(layers), config, per_head=False)
        whole = LosslessRuntime(config, layers=layers, kv_heads=2, head_dim=16, dtype="fp16")
        end = 0
        for count in (140, 1, 1, 1):
            end += count
            both = np.broadcast_to(kinds[None, None, :end], (1, 2, end, 16))
            present = [(both.copy(), both.copy()) for _ in range(layers)]
            store.set_present(present, count)
            for layer in range(layers):
                whole.append_call(layer, both[0, :, end - count :], both[0, :, end - count :])
                whole.end_call()
            whole.end_step()
        figures, metrics = store.to_stats(), whole.collect_metrics()
        names = ("tokens", "raw_bytes", "compressed_bytes", "blocks", "stored_bytes")
        for one, other in zip(figures.layers, metrics.layers, strict=True):
            assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names], scope
        for restored, computed in zip(store.get_past(), present, strict=True):
            assert all(a.tobytes() == b.tobytes() for a, b in zip(restored, computed, strict=True))
        kept = [restored[0] is computed[0] for restored, computed in zip(store.get_past(), present, strict=True)]
        assert sum(kept) >= layers - max(1, sum(layer.updates > 0 for layer in metrics.layers))


def test_lossless_store_invalid_configuration_is_refused(sessions: dict[str, DecoderSession]) -> None:
    session = sessions["half"]
    with pytest.raises(KvmnnError, match="layer_nums is 9, the model has 3 layers"):
        Runner(session, lossless=RuntimeConfig.from_engine({"layer_nums": 9}))
    with pytest.raises(KvmnnError, match="packed or in the lossless runtime"):
        Runner(session, packed="x86-avx2", lossless=config())
