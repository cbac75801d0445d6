"""What the engine loses and a sound runtime does not (docs/runtime.md), on the same history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plain_cache import new_rows
from store_options import store_options

import kvmnn
from kvmnn import KvmnnError
from kvmnn.runtime import LosslessRuntime, RuntimeConfig
from kvmnn.runtime.strict import StrictCallResult

LAYERS, HEADS, HEAD_DIM = 3, 2, 8
STORE = store_options(front_n=LAYERS, store_bootstrap_tokens=16, decode_cache_blocks=64)


class Pair:
    """Both behaviours on the same rows; `equal` says whether attention read the same in all layers of the last step."""

    def __init__(self, config: RuntimeConfig = STORE) -> None:
        self.rng = np.random.default_rng(0)
        behaviours: Any = ("sound", "engine")
        self.runtimes = [
            LosslessRuntime(config, layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp16", behaviour=behaviour)
            for behaviour in behaviours
        ]

    def step(self, tokens: int) -> bool:
        equal = True
        for layer in range(LAYERS):
            new = new_rows(self.rng, HEADS, tokens, HEAD_DIM, "<f2", "smooth")
            read = [runtime.begin_call(layer, new[0], new[1]) for runtime in self.runtimes]
            equal &= all(one.tobytes() == other.tobytes() for one, other in zip(*read, strict=True))
            for runtime in self.runtimes:
                runtime.end_call()
        for runtime in self.runtimes:
            runtime.end_step()
        return equal

    def both(self, name: str, *arguments: Any, **options: Any) -> None:
        for runtime in self.runtimes:
            getattr(runtime, name)(*arguments, **options)

    def lengths(self) -> list[list[int]]:
        return [[runtime.get_live_rows(layer)[0].shape[1] for layer in range(LAYERS)] for runtime in self.runtimes]


def test_strict_and_emulation_plain_request_agree() -> None:
    pair = Pair()
    assert pair.step(120)
    assert all(pair.step(1) for _ in range(60))
    sound, engine = (runtime.collect_metrics() for runtime in pair.runtimes)
    assert sound.layers[0].stored_raw_bytes > 4 * engine.layers[0].stored_raw_bytes


@pytest.mark.parametrize("effort", ["exact", "fast"])
def test_blocks_are_frames_of_the_configured_effort(effort: str) -> None:
    config = replace(STORE, effort=effort)
    runtime = LosslessRuntime(config, layers=1, kv_heads=2, head_dim=64, dtype="fp16")
    keys, values = (np.cumsum(rows, 1).astype("<f2") for rows in np.random.default_rng(0).normal(size=(2, 2, 400, 64)))
    runtime.begin_call(0, keys, values)
    runtime.end_call()
    runtime.end_step()
    runtime.flush()
    inner: Any = runtime._runtime
    stored = [(start, piece) for start, piece in inner._layers[0].rows.iter_segments() if piece.frames is not None]
    made = [frame for _, piece in stored for frame in (piece.frames.key_frame, piece.frames.value_frame)]
    cuts = [rows[:, start : start + piece.count] for start, piece in stored for rows in (keys, values)]
    assert made == [kvmnn.encode(cut, effort=effort) for cut in cuts]
    assert made != [kvmnn.encode(cut, effort="exact" if effort == "fast" else "fast") for cut in cuts]


def test_emulation_second_prefill_reads_zeros() -> None:
    pair = Pair()
    pair.step(120)
    pair.step(1)
    pair.both("start_request", keep_cache=True)
    assert not pair.step(5)
    assert pair.runtimes[1].collect_metrics().h2o_lossless_fallback_count == 0
    assert pair.step(1)


def test_emulation_erase_leaves_stale_blocks() -> None:
    pair = Pair()
    pair.step(120)
    pair.step(1)
    pair.both("erase", 90)
    pair.both("start_request", keep_cache=True)
    pair.step(40)
    assert not pair.step(1)
    assert pair.lengths()[0] == [131] * LAYERS


def test_emulation_reset_keeps_old_rows() -> None:
    pair = Pair()
    pair.step(120)
    pair.step(1)
    pair.both("reset")
    pair.step(50)
    assert pair.lengths() == [[50, 50, 50], [50, 171, 171]]


@pytest.mark.parametrize("behaviour", ["sound", "engine"])
def test_runtime_wrong_number_of_layers_is_refused(behaviour: Any) -> None:
    config = RuntimeConfig.from_engine({"layer_nums": 32})
    with pytest.raises(KvmnnError, match="layer_nums is 32, the model has 3 layers"):
        LosslessRuntime(config, layers=3, kv_heads=1, head_dim=8, dtype="fp16", behaviour=behaviour)


def test_runtime_unknown_options_are_refused() -> None:
    def made(**options: Any) -> LosslessRuntime:
        return LosslessRuntime(STORE, **{"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "fp16", **options})

    for options, message in (
        ({"behaviour": "safe"}, "expected 'sound' or 'engine'"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"layers": 0}, "layers is 0"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"behaviour": "engine", "timing": "late"}, "expected one of eager, lazy"),
        ({"behaviour": "engine", "on_invalid": "ignore"}, "expected 'raise' or 'engine'"),
    ):
        with pytest.raises(KvmnnError, match=message):
            made(**options)
    engine = made(behaviour="engine")
    for call in (engine.flush, engine.wait, lambda: engine.read_layer(0)):
        with pytest.raises(KvmnnError, match="only with behaviour 'sound'"):
            call()
    engine.close()


def test_append_call_reports_its_events() -> None:
    pair = Pair()
    pair.step(120)
    new = new_rows(pair.rng, HEADS, 1, HEAD_DIM, "<f2", "smooth")
    for runtime in pair.runtimes:
        runtime.begin_call(0, new[0], new[1])
    sound, engine = (runtime.end_call() for runtime in pair.runtimes)
    assert isinstance(sound, StrictCallResult)
    assert sound.to_dict() == {
        "layer": 0, "tokens": 121, "evicted": 0, "planned": 0, "submitted": 6, "finished": 6, "waiting": 0
    }  # fmt: skip
    assert str(sound) == "layer 0: 121 tokens, 0 evicted, 6 blocks handed in, 0 waiting"
    assert engine.to_dict()["block"]["how"] == "sync"


@pytest.mark.parametrize("behaviour", ["sound", "engine"])
def test_append_call_other_shape_is_refused(behaviour: Any) -> None:
    runtime = LosslessRuntime(STORE, layers=2, kv_heads=2, head_dim=8, dtype="fp16", behaviour=behaviour)
    rows = np.ones((2, 3, 8), np.float16)
    for layer, keys, values in ((2, rows, rows), (0, rows[:1], rows[:1]), (0, rows, rows[:, :2]), (0, rows[0], rows)):
        with pytest.raises(KvmnnError):
            runtime.begin_call(layer, keys, values)
    for values in (rows.astype(np.float32), rows.tolist(), rows.astype(">f2")):
        with pytest.raises(TypeError):
            runtime.begin_call(0, rows, values)  # type: ignore[arg-type]
    runtime.begin_call(0, rows, rows)
    with pytest.raises(KvmnnError, match="the call of layer 0 was not ended"):
        runtime.begin_call(1, rows, rows)
    runtime.end_call()
    with pytest.raises(KvmnnError, match="no call was begun"):
        runtime.end_call()
