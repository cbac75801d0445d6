"""Dense streams next to frames and blosc2: `python tools/bench/dense.py` writes benchmarks/dense.md and .json.

K and V of a trained model (fixtures/kv_real; fp32 and bf16 from its two layers of fp32), layer by layer: ratio
over all layers, and CPU time of encoding and decoding on one thread, all codecs in turn. `dense, together` is
`encode_many` of the layers; `dense, K unturned` knows nothing of the rotation. The second table has blocks of 64
tokens of the second half: each with tables of its own, with tables made of the first half, with the 256 rows before
the block as history, and with both.

Other arrays: `--keys FILE.npy --values FILE.npy`, `[layer, token, kv_head, head_dim]` of float16, float32 or uint16
(bf16), with `--heads-first` `[layer, kv_head, token, head_dim]`; `--theta` and `--dims` say how their K is rotated.
They are printed and not written to benchmarks/.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, interleaved, ratio, table, write_results

from kvmnn import dense
from kvmnn._util.parallel import parallel_map
from kvmnn.frames import decode as decode_frame
from kvmnn.frames import encode as encode_frame

try:
    import blosc2
except ImportError:
    blosc2 = None

BLOCK, HISTORY = 64, 256
Coder = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each codec (default: 9)")
    parser.add_argument("--keys", type=Path, metavar="FILE.npy")
    parser.add_argument("--values", type=Path, metavar="FILE.npy")
    parser.add_argument("--heads-first", action="store_true")
    parser.add_argument("--theta", type=float, default=10000.0)
    parser.add_argument("--dims", type=int, help="rotated words of a head (default: all)")
    options = parser.parse_args()
    own = options.keys or options.values
    whole: dict[str, dict[str, Any]] = {}
    blocks: dict[str, dict[str, Any]] = {}
    threads: dict[str, dict[str, dict[str, float]]] = {}
    for name, layers, rotary in given(options) if own else shipped():
        whole[name] = of_layers(layers, rotary, options.rounds)
        blocks[name] = of_blocks(layers, rotary, max(3, options.rounds // 3))
        threads[name] = of_threads(layers, rotary, 3 * options.rounds)
        print(name, whole[name], blocks[name], threads[name], flush=True)
    text = [
        f"MB of raw data a second of CPU time, one thread, medians of {options.rounds} rounds (blocks: of a third), "
        "all codecs in turn.\nOther work next to slows all of them: compare, do not add up.\n",
        section("Whole layers", whole),
        section(f"Blocks of {BLOCK} tokens", blocks),
        "## Two threads\n\nMany blocks of so many tokens, with tables of their own: times one thread by the clock; "
        "in brackets two processes that share nothing, which is what this machine gives; medians.\n\n"
        + table(
            ["array", *next(iter(threads.values()))],
            [
                [name, *(f"{gain['threads']:.2f} ({gain['processes']:.2f})" for gain in found.values())]
                for name, found in threads.items()
            ],
        ),
    ]
    if own:
        print("\n".join(text))
    else:
        print(write_results("dense", "Dense streams", text, {"layers": whole, "blocks": blocks, "threads": threads}))


def shipped() -> Iterator[tuple[str, list[Any], dense.RopeConfig | None]]:
    """Name, layers as [kv_head, token, head_dim], rotation."""
    folder = ROOT / "fixtures" / "kv_real"
    rotary = dense.RopeConfig(theta=10000.0, dims=64)
    yield "K fp16", layers_of(np.load(folder / "k_fp16.npy"), False), rotary
    yield "V fp16", layers_of(np.load(folder / "v_fp16.npy"), False), None
    for side, how in (("k", rotary), ("v", None)):
        words = np.load(folder / f"{side}_fp32.npy")
        bits = words.view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        yield f"{side.upper()} bf16, two layers", layers_of(rounded, False), how
        yield f"{side.upper()} fp32, two layers", layers_of(words, False), how


def given(options: argparse.Namespace) -> Iterator[tuple[str, list[Any], dense.RopeConfig | None]]:
    for path, rotated in ((options.keys, True), (options.values, False)):
        if path is not None:
            array = np.load(path)
            if array.ndim != 4:
                raise SystemExit(f"{path}: has {array.ndim} axes: expected [layer, token, kv_head, head_dim]")
            layers = layers_of(array, options.heads_first)
            heads, tokens, _ = layers[0].shape
            if heads > tokens:
                way = "leave --heads-first out" if options.heads_first else "say --heads-first"
                raise SystemExit(
                    f"{path}: read as {heads} heads of {tokens} tokens: {way} where it is the other way round"
                )
            dims = options.dims or layers[0].shape[2]
            yield path.name, layers, dense.RopeConfig(options.theta, dims) if rotated else None


def layers_of(array: Any, heads_first: bool) -> list[Any]:
    """As a token-major cache has them, whatever the file's order."""
    rows = array.transpose(0, 2, 1, 3) if heads_first else array
    return [np.ascontiguousarray(layer).transpose(1, 0, 2) for layer in rows]


def of_layers(layers: list[Any], rotary: dense.RopeConfig | None, rounds: int) -> dict[str, Any]:
    raw = sum(layer.nbytes for layer in layers)
    rows = [layer.transpose(1, 0, 2) for layer in layers]
    dtype = {2: "bf16" if layers[0].dtype == np.uint16 else "fp16", 4: "fp32"}[layers[0].itemsize]

    def each(encode: Callable[[Any], Any], decode: Callable[[Any], Any], source: list[Any]) -> Any:
        return lambda: [encode(one) for one in source], lambda made: [decode(one) for one in made]

    coders: dict[str, Any] = {
        "dense": each(lambda one: dense.encode(one, rotary=rotary), dense.decode, layers),
        "dense, together": (
            lambda: dense.encode_many(layers, rotary=rotary),
            lambda made: [dense.decode(one) for one in made],
        ),
    }
    if rotary:
        coders["dense, K unturned"] = each(dense.encode, dense.decode, layers)
    for effort in ("exact", "fast"):
        coders[f"frame {effort}"] = each(
            lambda one, effort=effort: encode_frame(one, dtype=dtype, effort=effort, threads=1),
            lambda made: decode_frame(made, dtype=dtype, threads=1),
            rows,
        )
    if blosc2 is not None:
        blosc2.set_nthreads(1)
        filters = {"filters": [blosc2.Filter.SHUFFLE], "codec": blosc2.Codec.ZSTD, "clevel": 1}
        coders["blosc2 shuffle+zstd1"] = each(
            lambda one: blosc2.compress2(one.tobytes(), typesize=one.itemsize, nthreads=1, **filters),
            lambda made: blosc2.decompress2(made, nthreads=1),
            rows,
        )
    return timed(coders, raw, [row.tobytes() for row in rows], rounds)


def of_blocks(layers: list[Any], rotary: dense.RopeConfig | None, rounds: int) -> dict[str, Any]:
    tokens = layers[0].shape[1]
    begins = range(tokens // 2, tokens - BLOCK + 1, BLOCK)
    sets = [dense.SharedTables.from_arrays([layer[:, : tokens // 2]], rotary=rotary) for layer in layers]
    cut = [(n, at, layer[:, at : at + BLOCK]) for n, layer in enumerate(layers) for at in begins]
    raw = sum(block.nbytes for _, _, block in cut)

    def options(number: int, at: int, shared: bool, history: bool) -> dict[str, Any]:
        return {
            **({"tables": sets[number]} if shared else {}),
            **({"history": layers[number][:, max(at - HISTORY, 0) : at]} if history else {}),
        }

    def coder(shared: bool, history: bool) -> Any:
        turned = {} if shared else {"rotary": rotary}
        wanted = [options(n, at, shared, history) for n, at, _ in cut]
        places = [np.arange(at, at + BLOCK) if rotary else None for _, at, _ in cut]

        def encode() -> list[bytes]:
            return [
                dense.encode(block, positions=place, **turned, **more)
                for (_, _, block), place, more in zip(cut, places, wanted, strict=True)
            ]

        return encode, lambda made: [dense.decode(one, **more) for one, more in zip(made, wanted, strict=True)]

    coders = {
        "own tables": coder(False, False),
        "shared tables": coder(True, False),
        "history": coder(False, True),
        "shared tables, history": coder(True, True),
    }
    return timed(coders, raw, [block.transpose(1, 0, 2).tobytes() for _, _, block in cut], rounds)


def of_threads(layers: list[Any], rotary: dense.RopeConfig | None, rounds: int) -> dict[str, dict[str, float]]:
    """How many times as fast as one thread two threads are, and two processes that share nothing, by the clock, for
    blocks of 64 and of 256 tokens.
    """
    tokens = layers[0].shape[1]
    gains: dict[str, dict[str, float]] = {}
    for size in (BLOCK, 4 * BLOCK):
        blocks = [layer[:, at : at + size] for layer in layers for at in range(0, tokens - size + 1, size)] * 8
        streams = [dense.encode(block, rotary=rotary) for block in blocks] * 2
        for way, work, items in (
            ("encode", lambda b: dense.encode(b, rotary=rotary), blocks),
            ("decode", dense.decode, streams),
        ):
            with two_processes(work, items) as apart:
                jobs: dict[str, Callable[[], Any]] = {
                    "one": lambda work=work, items=items: parallel_map(work, items, 1),
                    "threads": lambda work=work, items=items: parallel_map(work, items, 2),
                    "processes": apart,
                }
                times = interleaved(jobs, rounds, time.perf_counter)
            gains[f"{way}, {size}"] = {name: ratio(times, "one", name) for name in ("threads", "processes")}
    return gains


@contextmanager
def two_processes(work: Callable[[Any], Any], items: list[Any]) -> Iterator[Callable[[], None]]:
    """A call that has two processes, which know of each other nothing, do half of the work each."""
    fork = multiprocessing.get_context("fork")  # what is measured is not started in the time that is taken
    places = [fork.Pipe() for _ in range(2)]
    for number, (_, theirs) in enumerate(places):
        fork.Process(target=_work, args=(theirs, work, items[number::2]), daemon=True).start()

    def call() -> None:
        for ours, _ in places:
            ours.send(True)
        for ours, _ in places:
            ours.recv()

    yield call
    for ours, _ in places:
        ours.send(False)


def _work(told: Connection, work: Callable[[Any], Any], items: list[Any]) -> None:
    while told.recv():
        parallel_map(work, items, 1)
        told.send(True)


def timed(coders: dict[str, Any], raw: int, expected: list[bytes], rounds: int) -> dict[str, Any]:
    """Every codec's ratio and median CPU time each way; what it decodes is compared with the words first."""
    made = {name: encode() for name, (encode, _) in coders.items()}
    for name, (_, decode) in coders.items():
        for one, words in zip(decode(made[name]), expected, strict=True):
            found = one if isinstance(one, bytes) else np.ascontiguousarray(rows_first(one)).tobytes()
            if found != words:
                raise SystemExit(f"{name}: other words came back")
    jobs: dict[str, Callable[[], Any]] = {f"{name} encode": encode for name, (encode, _) in coders.items()}
    jobs |= {f"{name} decode": lambda d=decode, m=made[name]: d(m) for name, (_, decode) in coders.items()}
    times = interleaved(jobs, rounds, time.thread_time)
    return {
        name: {
            "ratio": raw / sum(map(len, made[name])),
            **{f"{way}_mb_s": raw / statistics.median(times[f"{name} {way}"]) / 1e6 for way in ("encode", "decode")},
        }
        for name in coders
    }


def rows_first(array: Any) -> Any:
    """Decoded words in the order of a token's row, as frames have them."""
    return array.transpose(1, 0, 2) if array.ndim == 3 else array


def section(title: str, results: dict[str, dict[str, Any]]) -> str:
    rows = [
        [name, codec, f"{found['ratio']:.3f}", f"{found['encode_mb_s']:,.0f}", f"{found['decode_mb_s']:,.0f}"]
        for name, codecs in results.items()
        for codec, found in codecs.items()
    ]
    return f"## {title}\n\n" + table(["array", "codec", "ratio", "encode MB/s", "decode MB/s"], rows) + "\n"


if __name__ == "__main__":
    main()
