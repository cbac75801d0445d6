"""Measure the prefix store: `python tools/bench/store.py` writes benchmarks/store.md and .json.

K and V of SmolLM2-135M (fp32, as onnxruntime computes them; pulled where it is not there) on texts that ship, the
sources of Python's library:

* 20 texts that share a beginning of 512 tokens, each put whole: bytes put, bytes stored, tokens that were found;
* the ratio by tokens in a frame or dense stream, and by effort: why units hold several blocks;
* `put` and `get` against the codec's own calls on the same bytes, all processors, taking turns;
* an index of 100,000 blocks: `match`, `put` of what is known, bytes a block;
* a text that leaves a unit half-way: the whole unit decoded, against frames of 64 tokens;
* the time to the first token of prompts with all but one token stored, and with nothing stored: onnxruntime, and with
  `--mnn DIR` the same model on MNN 3.6.1 (store_engine.py), as its exporter writes it; from what length, and from what
  speed of a link on, a stored prefix is faster than computing it; what `store stat --speed` predicts of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, interleaved, ratio, table, write_results
from store_first_tokens import computed, first_sections, with_mnn, with_onnxruntime

import kvmnn
from kvmnn import LayerCache, dense
from kvmnn._util.parallel import parallel_map
from kvmnn.lm import DecoderSession, Tokenizer, pull_model
from kvmnn.store import PrefixStore
from kvmnn.store.backend import NewUnit
from kvmnn.store.directory import index_updates
from kvmnn.store.namespace import LayerShape, Namespace, TokenSequence, compute_block_keys, to_token_ids
from kvmnn.store.unit import MAX_HISTORY_ROWS, MAX_TABLE_TOKENS

MODEL = "smollm2-135m"
SHAPE = 3, 64
"""Its K/V heads and their dims."""

TEXTS = ROOT / "fixtures" / "lm" / "texts"
SHARED, OWN, LONG = 512, 512, 2048
EFFORTS = ("fast", "exact")
RATIO_TOKENS = 64, 256, 512, LONG
BLOCKS, BLOCK = 100_000, 64
PUT_SHARE, GET_SHARE, MATCH_MS, KNOWN_MS, INDEX_BYTES = 0.9, 0.85, 1.0, 2.0, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and texts; for trying the script out")
    parser.add_argument(
        "--mnn", metavar="DIR", help="the model as MNN's exporter writes it; without it MNN is left out"
    )
    parser.add_argument(
        "--profile", metavar="FILE", help="the model's (kvmnn profile make): MNN from stores by it as well"
    )
    parser.add_argument(
        "--only-mnn", action="store_true", help="measure MNN alone, and keep the other results of benchmarks/store.json"
    )
    arguments = parser.parse_args()
    if arguments.only_mnn:
        write_with_mnn(arguments.mnn, 1 if arguments.quick else 9, arguments.profile)
        return
    quick = arguments.quick
    rounds = 3 if quick else 9
    texts = sorted(TEXTS.glob("*.txt"))[: 3 if quick else None]
    pull_model(MODEL)
    session, tokenizer = DecoderSession.open(MODEL), Tokenizer.open_for_model(MODEL)
    ids = [tokenizer.encode(path.read_text(encoding="utf-8"))[: LONG + 1] for path in texts]
    with tempfile.TemporaryDirectory() as folder:
        shared = sharing(Path(folder, "shared"), session, ids)
        layers = computed(session, ids[0][:LONG])
        frames = frame_rows(layers)
        first_text = ids[1][:OWN], computed(session, ids[1][:OWN])
        speeds = speed_rows(Path(folder), first_text, ids[0][:LONG], layers, rounds)
        index = index_row(Path(folder, "index"), BLOCKS // 10 if quick else BLOCKS)
        halves = half_way_rows(Path(folder, "half"), ids[0][:LONG], layers, rounds)
        first = {"onnxruntime": with_onnxruntime(Path(folder, "first"), session, ids[0], 3 if quick else 5)}
        if arguments.mnn:
            first["MNN"] = with_mnn(
                Path(folder, "mnn"), arguments.mnn, SHAPE, ids[0], 1 if quick else 9, arguments.profile
            )
    data = {"sharing": shared, "frames": frames, "speeds": speeds, "index": index, "half_way": halves, "first": first}
    path = write_results("store", "The prefix store", sections(data), data)
    print(path.read_text(encoding="utf-8"))


def write_with_mnn(model: str, rounds: int, profile: str | None) -> None:
    """Replace the results with MNN in those that are there."""
    data = json.loads((ROOT / "benchmarks" / "store.json").read_text(encoding="utf-8"))
    data.pop("machine")
    tokenizer = Tokenizer.open_for_model(MODEL)
    ids = tokenizer.encode(min(TEXTS.glob("*.txt")).read_text(encoding="utf-8"))[: LONG + 1]
    with tempfile.TemporaryDirectory() as folder:
        data["first"]["MNN"] = with_mnn(Path(folder, "mnn"), model, SHAPE, ids, rounds, profile)
    print(write_results("store", "The prefix store", sections(data), data).read_text(encoding="utf-8"))


def sharing(folder: Path, session: DecoderSession, ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Texts that begin with the same tokens, each asked for and then put."""
    put = stored = found = asked = frames = 0
    with PrefixStore(folder) as store, PrefixStore(folder.with_name("frames"), codec="frames") as other:
        for own in ids:
            text = [*ids[0][:SHARED], *own[SHARED : SHARED + OWN]]
            asked += len(text)
            found += store.match(text, model="m")
            layers = computed(session, text)
            put += sum(cache.nbytes for cache in layers)
            stored += store.put(text, layers, model="m").stored_bytes
            frames += other.put(text, layers, model="m").stored_bytes
        stats = store.stats()
    return {
        "texts": len(ids),
        "tokens": asked,
        "found": found,
        "bytes_put": put,
        "bytes_stored": stored,
        "raw_bytes_stored": stats.raw_bytes,
        "bytes_frames": frames,
        "index_bytes": stats.index_bytes,
    }


def frame_rows(layers: Sequence[LayerCache]) -> list[dict[str, Any]]:
    """The ratio of frames, and of dense streams, of so many tokens."""
    rows = []
    arrays = [words for cache in layers for words in (cache.keys, cache.values)]
    for dtype, effort in itertools.product((np.float32, np.float16), EFFORTS):
        for tokens in RATIO_TOKENS:
            pieces = [a[:, at : at + tokens].astype(dtype) for a in arrays for at in range(0, LONG, tokens)]
            frames = kvmnn.encode_many(pieces, effort=effort)
            found = sum(piece.nbytes for piece in pieces) / sum(map(len, frames))
            rows.append({"dtype": dtype.__name__, "effort": effort, "tokens": tokens, "ratio": found})
    for dtype in (np.float32, np.float16):
        caches = [_as(cache, dtype) for cache in layers]
        for tokens in RATIO_TOKENS:
            found = dense_ratio(caches, tokens)
            rows.append({"dtype": dtype.__name__, "effort": "dense", "tokens": tokens, "ratio": found})
    return rows


def dense_ratio(layers: Sequence[LayerCache], tokens: int) -> float:
    """Streams of so many tokens, with what the store gives them: rows before them, and tables that all share. The text
    as one stream has tables of its own.
    """
    arrays = [words for cache in layers for words in (cache.keys, cache.values)]
    rotary = dense.search_rope(arrays[0])
    rotaries = [None if number % 2 else rotary for number in range(len(arrays))]
    sets = [
        dense.SharedTables.from_arrays([words[:, :MAX_TABLE_TOKENS]], rotary=each)
        for words, each in zip(arrays, rotaries, strict=True)
    ]
    size = 0
    for at in range(0, LONG, tokens):
        before = max(0, at - MAX_HISTORY_ROWS)
        streams = dense.encode_many(
            [words[:, at : at + tokens] for words in arrays],
            rotary=rotaries if tokens == LONG else None,
            tables=None if tokens == LONG else sets,
            history=[words[:, before:at] for words in arrays] if at else None,
        )
        size += sum(map(len, streams))
    return sum(words.nbytes for words in arrays) / size


def _as(cache: LayerCache, dtype: Any) -> LayerCache:
    return LayerCache(layer=cache.layer, keys=cache.keys.astype(dtype), values=cache.values.astype(dtype))


def speed_rows(
    folder: Path,
    first: tuple[Sequence[int], Sequence[LayerCache]],
    ids: Sequence[int],
    layers: Sequence[LayerCache],
    rounds: int,
) -> list[dict[str, Any]]:
    """`put` and `get` against the codec calls on the whole arrays."""
    rows = []
    for dtype, how in itertools.product((np.float32, np.float16), ("fast", "balanced", "dense")):
        codec, effort = ("dense", "fast") if how == "dense" else ("frames", how)
        caches = [_as(cache, dtype) for cache in layers]
        arrays = [words for cache in caches for words in (cache.keys, cache.values)]
        nbytes = sum(words.nbytes for words in arrays)
        encode, decode = calls(arrays, how)
        kept = PrefixStore(folder / f"{dtype.__name__}-{how}", codec=codec, effort=effort)
        kept.put(ids, caches, model="m")
        made = PrefixStore(folder / f"put-{dtype.__name__}-{how}", codec=codec, effort=effort)
        made.put(first[0], [_as(cache, dtype) for cache in first[1]], model="m")  # rotation and tables: once a model
        puts: list[tuple[float, float]] = []

        def put(caches: Any = caches, made: Any = made, puts: Any = puts) -> None:
            started = time.perf_counter(), time.process_time()
            made.put(ids, caches, model="m")
            puts.append((time.perf_counter() - started[0], time.process_time() - started[1]))
            made.delete(ids, model="m")  # or the system would write it to the disk while others are measured

        jobs = {
            "put": put,
            "encode_many": encode,
            "get": lambda kept=kept: kept.get(ids, model="m"),
            "decode_many": decode,
        }
        for clock, place in ((time.perf_counter, 0), (time.process_time, 1)):
            puts.clear()
            times = interleaved(jobs, rounds, clock)
            times["put"] = [each[place] for each in puts[1:]]  # without removing it
            rows.append(
                {
                    "dtype": dtype.__name__,
                    "effort": how,
                    "clock": clock.__name__,
                    **{f"{name}_mb_s": nbytes / 1e6 / statistics.median(times[name]) for name in jobs},
                    "put_share": ratio(times, "encode_many", "put"),
                    "get_share": ratio(times, "decode_many", "get"),
                }
            )
        kept.close()
        made.close()
    return rows


def calls(arrays: Sequence[Any], how: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Encoding and decoding without a store: frames by `kvmnn.encode_many`, dense streams by that of `kvmnn.dense`."""
    if how != "dense":
        frames = kvmnn.encode_many(arrays, effort=how)
        return lambda: kvmnn.encode_many(arrays, effort=how), lambda: kvmnn.decode_many(frames)
    rotary = dense.search_rope(arrays[0])
    halves = [arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]]

    def encode(some: Sequence[Any]) -> list[bytes]:
        return dense.encode_many(some, rotary=[None if n % 2 else rotary for n in range(len(some))])

    streams = [stream for half in halves for stream in encode(half)]
    return lambda: parallel_map(encode, halves, 2), lambda: parallel_map(dense.decode, streams, 2)


def index_row(folder: Path, blocks: int) -> dict[str, Any]:
    """Texts of 2,048 tokens that share 512, noted down without their files."""
    space = Namespace("m", "fp16", (LayerShape(0, 1, 4, 4),))
    rng = np.random.default_rng(1)
    begin = rng.integers(0, 50_000, SHARED)
    texts = []
    with PrefixStore(folder) as store:
        units: Any = store._backend
        count = 0
        while count < blocks:
            ids = to_token_ids(np.concatenate([begin, rng.integers(0, 50_000, LONG - SHARED)]))
            texts.append(ids)
            text = TokenSequence(space.key, ids, compute_block_keys(space.key, ids, BLOCK), BLOCK)
            with units.index.begin_writing() as cursor:
                number = index_updates.ensure_namespace_id(cursor, space)
                index_updates.advance_clock(cursor)
                for at in range(0 if count == 0 else SHARED, LONG, 512):
                    keys = text.keys[at // BLOCK : (at + 512) // BLOCK]
                    new = NewUnit(text.get_parent_key(at // BLOCK), at, ids[at : at + 512], keys, 1000, Path("none"))
                    index_updates.insert_unit(cursor, number, new, text, lambda: False)
                    count += len(keys)
        units.index.vacuum()
        index_bytes = units.index.nbytes
        words = np.zeros((1, LONG, 4), np.float16)
        caches = [LayerCache(layer=0, keys=words, values=words)]
        chosen = [texts[number] for number in rng.integers(0, len(texts), 300)]
        match = [_milliseconds(lambda ids=ids: store.match(ids, model="m")) for ids in chosen]
        known = [_milliseconds(lambda ids=ids: store.put(ids, caches, model="m")) for ids in chosen]
    return {
        "blocks": count,
        "bytes_a_block": index_bytes / count,
        "match_ms": statistics.median(match),
        "match_ms_95": sorted(match)[len(match) * 95 // 100],
        "known_put_ms": statistics.median(known),
        "known_put_ms_95": sorted(known)[len(known) * 95 // 100],
    }


def half_way_rows(folder: Path, ids: Sequence[int], layers: Sequence[LayerCache], rounds: int) -> list[dict[str, Any]]:
    """CPU seconds for the first tokens of a unit: the unit decoded, or only the frames needed if all had 64 tokens."""
    rows = []
    with PrefixStore(folder, threads=1, codec="frames") as store:
        put = store.put(ids[:512], [_beginning(cache, 512) for cache in layers], model="m")
        arrays = [words for cache in layers for words in (cache.keys, cache.values)]
        for tokens in (64, 128, 256, 512):
            pieces = [words[:, at : at + BLOCK] for at in range(0, tokens, BLOCK) for words in arrays]
            frames = kvmnn.encode_many(pieces, effort="fast")
            jobs = {
                "unit": lambda tokens=tokens: store.get(ids[:tokens], model="m"),
                "frames": lambda frames=frames: kvmnn.decode_many(frames, threads=1),
            }
            times = interleaved(jobs, rounds, time.process_time)
            sizes = {"unit_bytes": put.stored_bytes, "frames_bytes": sum(map(len, frames))}
            found = {name: statistics.median(each) for name, each in times.items()}
            rows.append({"tokens": tokens, **found, **sizes})
    return rows


def _beginning(cache: LayerCache, tokens: int) -> LayerCache:
    return LayerCache(layer=cache.layer, keys=cache.keys[:, :tokens], values=cache.values[:, :tokens])


def _milliseconds(call: Any) -> float:
    started = time.process_time()
    call()
    return (time.process_time() - started) * 1e3


def sections(data: dict[str, Any]) -> list[str]:
    shared, index = data["sharing"], data["index"]
    by_kind: dict[tuple[str, str], list[float]] = {}
    for row in data["frames"]:
        by_kind.setdefault((row["dtype"], row["effort"]), []).append(row["ratio"])
    frame_table = table(
        ["dtype, effort", *(f"{tokens:,}" for tokens in RATIO_TOKENS)],
        [[f"{dtype}, {effort}", *(f"{value:.4f}" for value in found)] for (dtype, effort), found in by_kind.items()],
    )
    speed_table = table(
        ["dtype", "codec", "clock", "put", "encode_many", "share", "get", "decode_many", "share"],
        [
            [
                *(row["dtype"], row["effort"], row["clock"]),
                *(f"{row['put_mb_s']:.0f}", f"{row['encode_many_mb_s']:.0f}", f"{row['put_share']:.2f}"),
                *(f"{row['get_mb_s']:.0f}", f"{row['decode_many_mb_s']:.0f}", f"{row['get_share']:.2f}"),
            ]
            for row in data["speeds"]
        ],
    )
    half_table = table(
        ["tokens", "unit, ms", "unit, bytes", f"frames of {BLOCK}, ms", f"frames of {BLOCK}, bytes"],
        [
            [
                *(f"{row['tokens']}", f"{row['unit'] * 1e3:.1f}", f"{row['unit_bytes']:,}"),
                *(f"{row['frames'] * 1e3:.1f}", f"{row['frames_bytes']:,}"),
            ]
            for row in data["half_way"]
        ],
    )
    return [
        f"## {shared['texts']} texts that share their first {SHARED} tokens\n",
        f"K and V of SmolLM2-135M, fp32, each text {SHARED + OWN:,} tokens, asked for and then put. Of "
        f"{shared['tokens']:,} tokens {shared['found']:,} were found ({shared['found'] / shared['tokens']:.1%}). "
        f"{shared['bytes_put']:,} bytes were put, {shared['bytes_stored']:,} stored: "
        f"{shared['bytes_put'] / shared['bytes_stored']:.2f} to 1, of which the codec gives "
        f"{shared['raw_bytes_stored'] / shared['bytes_stored']:.4f} and sharing the rest. As frames "
        f"{shared['bytes_frames']:,} bytes are stored. The index has {shared['index_bytes']:,} bytes.\n",
        "## Ratio by tokens in a frame or stream\n",
        f"{LONG:,} tokens of one text; units hold up to 512 tokens, blocks 64. Dense streams refer to 256 rows before "
        f"them and share tables made of the first {MAX_TABLE_TOKENS} tokens, as in a store; the text as one has its "
        f"own.\n",
        frame_table + "\n",
        "## Speed\n",
        f"MB/s of raw bytes, {LONG:,} tokens, all processors; share: the codec call's time, of the same codec, over "
        f"the store's, median over rounds in which all take turns (goals: put {PUT_SHARE}, get {GET_SHARE}). `put` "
        "writes the files and the index of a store that has another text of the model, `get` reads and checks them.\n",
        speed_table + "\n",
        f"## An index of {index['blocks']:,} blocks\n",
        f"Texts of {LONG:,} tokens that share {SHARED}, CPU time, median (95 of 100): `match` {index['match_ms']:.2f} "
        f"({index['match_ms_95']:.2f}) ms (goal {MATCH_MS:g}), `put` of what is known {index['known_put_ms']:.2f} "
        f"({index['known_put_ms_95']:.2f}) ms (goal {KNOWN_MS:g}), {index['bytes_a_block']:.0f} bytes a block (goal "
        f"{INDEX_BYTES}).\n",
        "## A text that leaves a unit half-way\n",
        "CPU time of one thread, fp32, and bytes that are read, for the first tokens of a unit of 512: the unit "
        f"decoded whole, or, if frames had {BLOCK} tokens, only those that are needed.\n",
        half_table + "\n",
        *first_sections(data["first"]),
    ]


if __name__ == "__main__":
    main()
