"""Speed of packed layouts: `python tools/bench/layout.py [--rounds N] [--backends NAME ...]`.

Packing and unpacking of K and of V, and compaction, of 32 heads x 4096 tokens x 128 dims, on one core, each next to a
memcpy of the same bytes in the same rounds, and next to the engine's own way (tools/bench/layout_engine.c, compiled
here); and what a second thread gains, next to what it gains for memcpy. Results go to benchmarks/layout.{md,json}.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, interleaved, ratio, table, write_results

from kvmnn import PackedCache, PackLayout
from kvmnn.dtypes import parse_dtype
from kvmnn.packed import _layout
from kvmnn.packed.backends import BACKENDS
from kvmnn.packed.layout import make_native_params, split_kv

HEADS, TOKENS, DIMS, BLOCK = 32, 4096, 128, 64
ALIGNED = [(block * BLOCK, BLOCK) for block in range(0, TOKENS // BLOCK, 3)]
SHIFTED = [(begin + 1, BLOCK) for begin, _ in ALIGNED[:-1]]
GOALS = {
    "pack K": 0.4,
    "unpack K": 0.4,
    "pack V": 0.4,
    "unpack V": 0.4,
    "tiles": 0.6,
    "off tiles": 0.25,
    "threads": 0.9,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backends", nargs="*", choices=list(BACKENDS), default=list(BACKENDS))
    options = parser.parse_args()
    groups: dict[tuple[str, int, int], list[str]] = {}
    for name in options.backends:
        row = BACKENDS[name]
        groups.setdefault((row.dtype, row.lP, row.hP), []).append(name)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        results = [measure(engine, names, *key, options.rounds) for key, names in groups.items()]
    report(results, options.rounds)


class Engine:
    """The engine's loops."""

    def __init__(self, folder: Path) -> None:
        library = folder / "engine.so"
        source = ROOT / "tools" / "bench" / "layout_engine.c"
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def call(self, name: str, layout: PackLayout, heads: list[tuple[int, ...]], *numbers: int) -> None:
        function = getattr(self._library, f"{name}_uint{8 * layout.itemsize}")
        block = layout.value_block(TOKENS)
        geometry = (ctypes.c_size_t * 4)(layout.head_dim, layout.lP, layout.hP, block)
        for addresses in heads:
            function(geometry, *map(ctypes.c_void_p, addresses), *map(ctypes.c_size_t, numbers))


def measure(engine: Engine, names: list[str], dtype: str, lP: int, hP: int, rounds: int) -> dict[str, Any]:
    layout = PackLayout(HEADS, DIMS, dtype, lP, hP)
    words = parse_dtype(layout.dtype).numpy_dtype
    rng = np.random.default_rng(0)
    shape = (HEADS, TOKENS, DIMS)
    plain = rng.integers(0, 60000, shape, np.uint32).astype(f"<u{layout.itemsize}").view(words)
    back = np.empty_like(plain)
    back.view(np.uint8).fill(1)
    buffers = layout.pack(plain, plain, capacity=TOKENS)
    rows, out = plain.view(np.uint8), back.view(np.uint8)
    jobs: dict[str, Callable[[], Any]] = {"memcpy": lambda: np.copyto(back, plain)}
    for part, buffer in split_kv(buffers).items():
        name, numbers = part[0].upper(), make_native_params(layout, part, TOKENS)
        jobs[f"pack {name}"] = bind(_layout.scatter, numbers, buffer, rows, 0, HEADS, 0)
        jobs[f"unpack {name}"] = bind(_layout.gather, numbers, buffer, out, 0, HEADS, 0)
    times = interleaved(jobs, rounds, time.thread_time)
    result: dict[str, Any] = {"backends": names, "dtype": dtype, "lP": lP, "hP": hP}
    result["memcpy GB/s"] = plain.nbytes / statistics.median(times["memcpy"]) / 1e9
    result["GB/s"] = {name: plain.nbytes / statistics.median(times[name]) / 1e9 for name in jobs}
    result["share of memcpy"] = {name: ratio(times, "memcpy", name) for name in jobs if name != "memcpy"}
    result["engine GB/s"] = engine_rates(engine, layout, plain, back, buffers)
    result |= compaction(engine, layout, buffers, rounds)
    result |= two_threads(layout, plain, back, buffers, rounds)
    return result


def bind(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def engine_rates(engine: Engine, layout: PackLayout, plain: Any, back: Any, buffers: Any) -> dict[str, float]:
    """The engine's loops, once each: they are slow enough."""
    rates = {}
    for part, buffer in split_kv(buffers).items():
        step = buffer.size // HEADS
        for verb, array in (("pack", plain), ("unpack", back)):
            heads = [(buffer.ctypes.data + h * step, array[h].ctypes.data) for h in range(HEADS)]
            start = time.thread_time()
            engine.call(f"{verb}_{part}s", layout, heads, TOKENS)
            rates[f"{verb} {part[0].upper()}"] = plain.nbytes / (time.thread_time() - start) / 1e9
    return rates


def compaction(engine: Engine, layout: PackLayout, buffers: Any, rounds: int) -> dict[str, Any]:
    """Keep a third of the blocks; K and V together, next to a memcpy of what moves."""
    result: dict[str, Any] = {}
    for name, plan in (("tiles", ALIGNED), ("off tiles", SHIFTED)):
        moved = sum(size for begin, size in plan if begin) * HEADS * DIMS * layout.itemsize * 2
        source, target = np.ones(moved, np.uint8), np.zeros(moved, np.uint8)

        def compact(plan: list[tuple[int, int]] = plan) -> None:
            cache = PackedCache.from_buffers(layout, *buffers, TOKENS, capacity=TOKENS, copy=False)
            cache.realloc(TOKENS, plan)

        times = interleaved({"memcpy": bind(np.copyto, target, source), "realloc": compact}, rounds, time.thread_time)
        step = [buffer.size // HEADS for buffer in buffers]
        heads = [tuple(b.ctypes.data + h * s for b, s in zip(buffers, step, strict=True)) for h in range(HEADS)]
        start, at = time.thread_time(), 0
        for begin, size in plan:
            if begin != at:
                engine.call("move", layout, heads, begin, at, size)
            at += size
        engine_rate = moved / (time.thread_time() - start) / 1e9
        result[f"realloc, {name}"] = {
            "moved bytes": moved,
            "memcpy GB/s": moved / statistics.median(times["memcpy"]) / 1e9,
            "GB/s": moved / statistics.median(times["realloc"]) / 1e9,
            "share of memcpy": ratio(times, "memcpy", "realloc"),
            "engine GB/s": engine_rate,
        }
    return result


def two_threads(layout: PackLayout, plain: Any, back: Any, buffers: Any, rounds: int) -> dict[str, Any]:
    """By wall clock: pack and unpack of K and V with two threads against one, and memcpy of halves likewise."""
    half = HEADS // 2
    outs = back, np.empty_like(back)
    with ThreadPoolExecutor(1) as pool:

        def both() -> None:
            other = pool.submit(np.copyto, back[half:], plain[half:])
            np.copyto(back[:half], plain[:half])
            other.result()

        options: dict[str, Any] = {"capacity": TOKENS}
        jobs: dict[str, Callable[[], Any]] = {
            "memcpy 1": lambda: np.copyto(back, plain),
            "memcpy 2": both,
            "pack 1": lambda: layout.pack(plain, plain, out=buffers, **options),
            "pack 2": lambda: layout.pack(plain, plain, out=buffers, threads=2, **options),
            "unpack 1": lambda: layout.unpack(*buffers, TOKENS, out=outs, **options),
            "unpack 2": lambda: layout.unpack(*buffers, TOKENS, out=outs, threads=2, **options),
        }
        times = interleaved(jobs, rounds, time.perf_counter)
    gains = {name: ratio(times, f"{name} 1", f"{name} 2") for name in ("memcpy", "pack", "unpack")}
    return {"two threads": gains}


def report(results: list[dict[str, Any]], rounds: int) -> None:
    level = _layout.simd_level()
    verbs = ["pack K", "unpack K", "pack V", "unpack V"]
    rows, moves, gains = [], [], []
    for result in results:
        label = ", ".join(result["backends"])
        numbers = f"{result['dtype']} lP {result['lP']} hP {result['hP']}"
        share, rate, engine = result["share of memcpy"], result["GB/s"], result["engine GB/s"]
        cells = [f"{rate[v]:.1f} = {share[v]:.0%} ({engine[v]:.2f})" for v in verbs]
        rows.append([label, numbers, f"{result['memcpy GB/s']:.1f}", *cells])
        cells = []
        for name in ("tiles", "off tiles"):
            part = result[f"realloc, {name}"]
            cells += [f"{part['memcpy GB/s']:.1f}", f"{part['GB/s']:.1f} = {part['share of memcpy']:.0%}"]
            cells.append(f"{part['engine GB/s']:.2f}")
        moves.append([label, numbers, *cells])
        gain = result["two threads"]
        cells = [f"{gain[v]:.2f} = {gain[v] / gain['memcpy']:.2f} x" for v in ("pack", "unpack")]
        gains.append([label, numbers, f"{gain['memcpy']:.2f}", *cells])
    sections = [
        f"{HEADS} heads x {TOKENS} tokens x {DIMS} dims; median of {rounds} interleaved rounds. The packing loops have "
        f"one level, `{level}`, which every processor of the architecture runs.",
        "",
        "## Packing and unpacking, one core",
        "",
        "GB/s of K or V, its share of memcpy of the same bytes, and in brackets the engine's loop (one run). "
        f"Goal: {GOALS['pack K']:.0%} of memcpy.",
        "",
        table(["backend", "layout", "memcpy", *verbs], rows),
        "",
        "## Compaction, one core: one of three blocks of 64 tokens stays",
        "",
        "GB/s of the bytes moved, K and V. Tile-aligned plans keep blocks from multiples of 64 on; the others from one "
        f"token later. Goals: {GOALS['tiles']:.0%} and {GOALS['off tiles']:.0%} of memcpy.",
        "",
        table(
            ["backend", "layout", "memcpy", "aligned", "engine", "memcpy", "one token off", "engine"],
            moves,
        ),
        "",
        "## Two threads over heads, wall clock",
        "",
        f"How much faster than one thread; and that over memcpy's own gain. Goal: {GOALS['threads']:.1f} x.",
        "",
        table(["backend", "layout", "memcpy", "pack K and V", "unpack K and V"], gains),
    ]
    path = write_results("layout", "Packed layouts", sections, {"level": level, "goals": GOALS, "results": results})
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
