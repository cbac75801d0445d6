"""The engine's restores and what its calls tell."""

from __future__ import annotations

import numpy as np
from store_options import store_options

from kvmnn.dtypes import FP16
from kvmnn.frames import encode_block
from kvmnn.runtime import LosslessRuntime
from kvmnn.runtime.emulation.decoder import BlockDecoder, restore_blocks
from kvmnn.runtime.emulation.events import CallEvent, ScatterEvent
from kvmnn.runtime.emulation.layer_state import EmulatedLayerState, EngineRowBuffer, StoredBlock
from kvmnn.runtime.metrics import LatencyHistogram


def test_emulation_restores_blocks_in_order_and_merges_neighbours() -> None:
    rows, state, event = EngineRowBuffer(1, 64, FP16), EmulatedLayerState(), CallEvent(call=0, layer=0)
    new = np.arange(2 * 30 * 64).reshape(2, 1, 30, 64).astype(np.float16)
    rows.clear(30)
    rows.append(new[0], new[1], 0)
    for start, count in ((14, 4), (2, 12), (20, 2)):
        block = encode_block(*rows.gather(start, count), dtype="fp16")  # type: ignore[misc]
        state.blocks.append(StoredBlock(start, count, block, is_decoded=True, is_dropped=rows.zero(start, count)))
    assert not rows.live_rows[0][:, 2:18].any()
    restore_blocks(state, rows, BlockDecoder(0, False), event, LatencyHistogram())
    assert event.scatters == [ScatterEvent(2, 16, 16 * 256, True), ScatterEvent(20, 2, 2 * 256, True)]
    assert rows.live_rows[0].tobytes() == new[0].tobytes() and rows.live_rows[1].tobytes() == new[1].tobytes()


def test_emulation_numbers_calls_and_counts_decode_steps() -> None:
    runtime = LosslessRuntime(store_options(), layers=2, kv_heads=1, head_dim=8, dtype="fp16", behaviour="engine")
    events = []
    for tokens in (5, 1, 1):
        for layer in range(2):
            new = np.ones((1, tokens, 8), np.float16)
            runtime.begin_call(layer, new, new)
            events.append(runtime.end_call())
        runtime.end_step()
    assert [(one.call, one.layer, one.token_step) for one in events if isinstance(one, CallEvent)] == [
        (0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (4, 0, 2), (5, 1, 2)
    ]  # fmt: skip
