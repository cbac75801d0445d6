"""Measure the lossless runtime: `python tools/bench/runtime.py` writes benchmarks/runtime.md and .json.

K and V (fp16) of the shipped model on a text that ships, 2,048 tokens, most of them as the prompt; store mode, one
thread and no workers, CPU time, rounds in which all jobs take turns:

* a replay against the codec calls that it makes, made once more in a loop: every encoding with its check, every
  decoding of every step, to the same places of arrays that are there;
* what a call of a layer costs besides: scheduling, taking in results, counting;
* the lossless ratio of the run, of the front two layers and of all;
* time per token of a decoder of 24 layers, the store on and off (runtime_decoder.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the layers in numpy; read when numpy is loaded

import numpy as np
import runtime_decoder
from common import ROOT, interleaved, ratio, table, write_results

import kvmnn
from kvmnn.frames.decoder import FrameDecoder
from kvmnn.lm import dump_kv
from kvmnn.runtime import LosslessRuntime, RuntimeConfig
from kvmnn.runtime.strict import codec
from kvmnn.runtime.trace import KVTrace, read_trace

TOKENS, STEPS, PLAIN_STEPS, PLAIN_BLOCK = 2048, 32, 500, 700
CODEC_LIMIT, CALL_LIMIT_US, RATIO_LIMIT = 1.15, 20.0, 1.3
BLOCKS = (32, 64, 128)
DECODER_STEPS = 64

Job = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; for trying the script out")
    quick = parser.parse_args().quick
    rounds = 3 if quick else 7
    loads = [os.getloadavg()[0]]
    history = real_history()
    replays = [replay_row(history, layers, block, rounds) for layers in (2, len(history.layers)) for block in BLOCKS]
    call_us = layer_call_us(history, rounds)
    steps = 16 if quick else DECODER_STEPS
    with tempfile.TemporaryDirectory() as folder:
        decoder = runtime_decoder.measured(Path(folder), steps)
    loads.append(os.getloadavg()[0])
    sections = [replay_section(replays), call_section(call_us), runtime_decoder.section(decoder, steps)]
    sections.insert(0, load_section(loads))
    data = {
        "replays": replays,
        "layer_call_us": call_us,
        "decoder": decoder,
        "load_average": loads,
        "limits": {
            "codec": CODEC_LIMIT,
            "layer_call_us": CALL_LIMIT_US,
            "lossless_ratio": RATIO_LIMIT,
            "decoder": runtime_decoder.LIMIT,
        },
    }
    print(write_results("runtime", "The lossless runtime", sections, data).read_text(encoding="utf-8"))


def load_section(loads: list[float]) -> str:
    busy = max(loads) > 1.5 * (os.cpu_count() or 1)
    more = ": other work ran next to it, ratios hold better than times, and times are too long" if busy else ""
    return f"Load average {loads[0]:.1f} when it began and {loads[-1]:.1f} at the end, its own work included{more}.\n"


def real_history() -> KVTrace:
    """K and V of the shipped model on the longest text, as fp16."""
    model = ROOT / "fixtures" / "lm"
    text = max((model / "texts").glob("*.txt"), key=lambda path: path.stat().st_size)
    with tempfile.TemporaryDirectory() as folder:
        dump_kv(model, text, Path(folder) / "kv", tokens=TOKENS, dtype="fp16", format="mnn")
        return read_trace(kvmnn.open(Path(folder) / "kv"))


def config(layers: int, block: int, mode: str = "store") -> RuntimeConfig:
    return RuntimeConfig.from_engine(
        {
            "kv_lossless_enable": True,
            "kv_lossless_runtime_enable": True,
            "kv_lossless_codec": "gear_delta",
            "kv_lossless_runtime_mode": mode,
            "kv_lossless_scope": "front_n",
            "kv_lossless_front_n": layers,
            "kv_lossless_block_tokens": block,
            "kv_lossless_hot_recent_tokens": 64,
            "kv_lossless_async_threads": 0,
            "kv_h2o_trigger_min_tokens": 64,
            "kv_h2o_update_interval": 1,
        }
    )


# -- a replay and its codec calls --------------------------------------------------------------------------------------


def replay_row(history: KVTrace, layers: int, block: int, rounds: int) -> dict[str, Any]:
    """A replay of layers that are all stored, over the same codec calls made alone."""
    part = KVTrace(history.layers[:layers], history.dtype)
    settings = config(layers, block)

    def run() -> LosslessRuntime:
        runtime = runtime_of(part, settings)
        for begin, end in spans(STEPS):
            step(runtime, part, begin, end)
        return runtime

    calls = recorded(run)
    jobs: dict[str, Job] = {"replay": run, "codec": lambda: [call() for call in calls]}
    times = interleaved(jobs, rounds, time.process_time)
    metrics = run().collect_metrics()
    return {
        "layers": layers,
        "block": block,
        "codec_calls": len(calls),
        "codec_ms": 1e3 * statistics.median(times["codec"]),
        "replay_ms": 1e3 * statistics.median(times["replay"]),
        "replay_over_codec": ratio(times, "replay", "codec"),
        "encoded_ratio": metrics.h2o_lossless_ratio,
        "held_ratio": metrics.lossless_ratio,
    }


def spans(steps: int) -> list[tuple[int, int]]:
    first = TOKENS - steps
    return [(0, first), *((at, at + 1) for at in range(first, TOKENS))]


def runtime_of(history: KVTrace, settings: RuntimeConfig) -> LosslessRuntime:
    return LosslessRuntime(
        settings,
        layers=len(history.layers),
        kv_heads=history.kv_heads,
        head_dim=history.head_dim,
        dtype=history.dtype,
    )


def step(runtime: LosslessRuntime, history: KVTrace, begin: int, end: int) -> None:
    for number, (keys, values) in enumerate(history.layers):
        runtime.begin_call(number, keys[:, begin:end], values[:, begin:end])
        runtime.end_call()
    runtime.end_step()


def recorded(run: Job) -> list[Job]:
    """The codec calls of `run`, to be made again with the public functions and to the same places."""
    found: list[Job] = []
    rooms: dict[tuple[int, ...], Any] = {}

    def encoding(name: str) -> Any:
        function = getattr(codec, name)

        def call(*values: Any, **options: Any) -> Any:
            kept = tuple(np.array(value) if isinstance(value, np.ndarray) else value for value in values)
            found.append(lambda: function(*kept, **options))
            return function(*values, **options)

        return mock.patch.object(codec, name, call)

    into = FrameDecoder.decode_into

    def decoding(self: FrameDecoder, frames: tuple[bytes, ...], out: Any, frames_sum: int | None = None) -> None:
        room, first = place_of(out)
        if room not in rooms:
            rooms[room] = np.empty(room, out.dtype)
        there = rooms[room][:, :, first : first + out.shape[2]]
        for frame, part in zip(frames, there, strict=True):
            found.append(partial(kvmnn.decode, frame, dtype="fp16", out=part, threads=1))
        into(self, frames, out, frames_sum)

    with encoding("encode_block"), encoding("matches"), mock.patch.object(FrameDecoder, "decode_into", decoding):
        run()
    return found


def place_of(out: Any) -> tuple[tuple[int, ...], int]:
    """The shape of the array ``[2, kv_head, token, head_dim]`` that `out` lies in, and its first token there."""
    owner = out
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    offset = out.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return (2, out.shape[1], out.strides[1] // out.strides[2], out.shape[3]), offset // out.strides[2]


def replay_section(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            "front 2" if row["layers"] == 2 else f"all {row['layers']}",
            str(row["block"]),
            f"{row['codec_calls']:,}",
            f"{row['codec_ms']:.1f}",
            f"{row['replay_ms']:.1f}",
            f"**{row['replay_over_codec']:.2f}**",
            f"{row['encoded_ratio']:.3f}",
            f"{row['held_ratio']:.3f}",
        ]
        for row in rows
    ]
    header = ["layers", "block", "codec calls", "codec, ms", "replay, ms", "replay / codec", "ratio encoded", "held"]
    return (
        f"## A replay and its codec calls\n\n{TOKENS - STEPS:,} tokens of prompt and {STEPS} steps; each step reads "
        f"all tokens of all layers. The codec calls are made once more in a loop, with kvmnn's public functions and to "
        f"the same places. Aims: replay / codec at most {CODEC_LIMIT:g}; a lossless ratio of at least "
        f"{RATIO_LIMIT:g} in the front two layers. *Encoded* counts what was encoded, as the engine does; *held* is "
        f"all raw bytes over all bytes held, hot tokens and room to grow included.\n\n{table(header, cells)}\n"
    )


# -- a call without codec ----------------------------------------------------------------------------------------------


CALLS: dict[str, tuple[str, int, bool]] = {
    "stored": ("store", 1, False),
    "probe": ("probe", 1, False),
    "out_of_scope": ("store", 0, True),
}
"""Mode, layers in the scope, and whether rows are read, which needs no codec where nothing is stored."""


def layer_call_us(history: KVTrace, rounds: int) -> dict[str, float]:
    """Microseconds of a layer call that appends one token, nothing being due and nothing restored."""
    part = KVTrace(history.layers[:1], history.dtype)
    keys, values = part.layers[0]
    first, steps = TOKENS - PLAIN_STEPS, PLAIN_STEPS // 2

    def run(mode: str, layers: int, read: bool) -> float:
        runtime = runtime_of(part, config(layers, PLAIN_BLOCK, mode))
        step(runtime, part, 0, first)
        step(runtime, part, first, first + 1)
        runtime.flush()
        before = runtime.collect_metrics().layers[0].updates
        call = runtime.begin_call if read else runtime.append_call
        began = time.process_time()
        for at in range(first + 1, first + 1 + steps):
            call(0, keys[:, at : at + 1], values[:, at : at + 1])
            runtime.end_call()
            runtime.end_step()
        elapsed = time.process_time() - began
        assert runtime.collect_metrics().layers[0].updates == before, "a block was due"
        return 1e6 * elapsed / steps

    found: dict[str, list[float]] = {name: [] for name in CALLS}
    for _ in range(5 * rounds):
        for name, options in CALLS.items():
            found[name].append(run(*options))
    return {name: statistics.median(times) for name, times in found.items()}


def call_section(found: dict[str, float]) -> str:
    return (
        f"## A call of a layer, besides the codec\n\nOne token appended and scheduled, nothing restored and nothing "
        f"due, growth of the arrays included: {found['stored']:.1f} us in a layer with stored blocks, "
        f"{found['probe']:.1f} us in mode probe, {found['out_of_scope']:.1f} us in a layer out of the scope, its rows "
        f"handed out. Aim: less than {CALL_LIMIT_US:g} us.\n"
    )


if __name__ == "__main__":
    main()
