"""Caches of other engines: `python tools/bench/engines.py [--quick | --ratios]` writes benchmarks/other_engines.*

Ratios: K and V of the shipped model in every form that an engine gives them, and every file of fixtures/llama and
fixtures/mlx, which the engines wrote. Speed: files of the same formats and of a usual size, made here, read piece by
piece as every verb reads them, next to a copy of as many bytes. CPU time, ways that take turns, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import BENCHMARKS, ROOT, interleaved, ratio, synthetic, table, write_results
from engine_caches import BLOCKS, MLX_BITS, Pair, caches, generator

import kvmnn
from kvmnn.arrays.source import FILE_KEY
from kvmnn.bundle import EncodeOptions, encode_source, inspect_frame_set, manifest, open_frames
from kvmnn.formats import EngineOptions, PackedOptions, ReadOptions
from kvmnn.lm import dump_kv
from kvmnn.packed.inference import PackedGeometry

sys.path.append(str(ROOT / "tools"))
from conformance import unpack

HEADS, DIMS = 8, 128
LIMIT = 0.5
"""Of the speed of a copy of what comes out: reading may not fall below it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds; nothing is written")
    parser.add_argument(
        "--ratios", action="store_true", help="ratios alone, which no load changes; speeds stay as they were written"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    with tempfile.TemporaryDirectory() as name:
        trained = trained_ratios(Path(name), tokens=256 if quick else 1024)
        written = written_ratios(Path(name))
        if arguments.ratios:
            speeds = json.loads((BENCHMARKS / "other_engines.json").read_text(encoding="utf-8"))["reading"]
        else:
            speeds = measure_speeds(Path(name), tokens=512 if quick else 4096, rounds=3 if quick else 15)
    sections = [*ratio_sections(trained, written), "", *speed_section(speeds)]
    if quick:
        print("\n".join(sections))
    else:
        data = {"trained": trained, "written": written, "reading": speeds}
        print(write_results("other_engines", "Caches of other engines", sections, data))
    slow = [row["file"] for row in speeds if row["of_copy"] < LIMIT]
    sys.exit(f"below {LIMIT} of a copy: {', '.join(slow)}" if slow else 0)


def ratio_sections(trained: list[dict[str, Any]], written: list[dict[str, Any]]) -> list[str]:
    def cells(row: dict[str, Any]) -> list[str]:
        whole = "-" if row["whole"] is None else f"{row['whole']:.3f}"
        return [f"{row['bytes']:,}", f"{row['ratio']:.3f}", f"{row['limit']:.3f}", whole]

    return [
        "## Ratios: a trained model",
        "",
        "K and V that the shipped model (fixtures/lm: 6 layers, 4 heads of 64) computes in fp32 for 1,024 tokens of a "
        "held-out text, rounded or quantised as each engine does it. Ratio: K and V as they lie there over their "
        "frames. Byte entropy: the ratio at the order-0 entropy of the byte lanes, a bound of coders of single bytes "
        "that predictors and matches pass. Whole: bytes of the file over those of frames and manifest, where decode "
        "writes the same file. A quantised cache is smaller to begin with: "
        "last, its frames and manifest as a share of the cache in 16 bits.",
        "",
        table(
            ["engine", "type", "bytes", "ratio", "byte entropy", "whole", "of 16 bits"],
            [[row["engine"], row["type"], *cells(row), f"{row['of_half']:.3f}"] for row in trained],
        ),
        "",
        "## Ratios: files that engines wrote",
        "",
        "With random weights: the least that is to be expected. MLX's files have room for 256 tokens and hold 20.",
        "",
        table(
            ["engine", "type", "file", "bytes", "ratio", "byte entropy", "whole"],
            [[row["engine"], row["type"], row["file"], *cells(row)] for row in written],
        ),
    ]


def speed_section(speeds: list[dict[str, Any]]) -> list[str]:
    return [
        "## Reading",
        "",
        f"K and V of {HEADS} heads of {DIMS} in pieces of 1 MiB, one thread; a copy is numpy.copyto of as many bytes "
        f"into memory that is there: none may fall below {LIMIT} of it. Transposed V is turned round; blocks become "
        "four bytes for each code, which are computed. MLX's groups, here of 64, become float16 numbers that are "
        "rounded twice.",
        "",
        table(
            ["file", "MB made", "MB/s", "of a copy"],
            [[row["file"], f"{row['mb']:.1f}", f"{row['rate']:,.0f}", f"{row['of_copy']:.2f}"] for row in speeds],
        ),
    ]


def trained_ratios(scratch: Path, tokens: int) -> list[dict[str, Any]]:
    pairs = trained_pairs(scratch, tokens)
    folder = scratch / "trained"
    folder.mkdir()
    half = sum(part.size for pair in pairs for part in pair) * 2
    rows = []
    for made in caches(folder, pairs):
        source = kvmnn.open(made.path, ReadOptions(engine=EngineOptions(passthrough=True)), **made.options)
        files = [made.path] if made.path.is_file() else list(made.path.iterdir())
        rows.append(ratios_of(source, made.engine, made.type, sum(file.stat().st_size for file in files), scratch))
    source = kvmnn.open(generator(pairs))
    rows.append(ratios_of(source, "ONNX Runtime GenAI", "float16", source.nbytes, scratch))
    return [{**row, "of_half": row.pop("stored") / half} for row in rows]


def trained_pairs(scratch: Path, tokens: int) -> list[Pair]:
    """K and V of the shipped model on its longest text."""
    model = ROOT / "fixtures" / "lm"
    text = max((model / "texts").glob("*.txt"), key=lambda path: path.stat().st_size)
    dump_kv(model, text, scratch / "kv", tokens=tokens, dtype="fp32")
    arrays = kvmnn.open(scratch / "kv")
    layers = len(arrays) // 2
    return [
        (arrays[f"layer_{layer}.key"].to_numpy(), arrays[f"layer_{layer}.value"].to_numpy()) for layer in range(layers)
    ]


def written_ratios(scratch: Path) -> list[dict[str, Any]]:
    rows = []
    for engine, pattern in (("llama.cpp", "*/*.session.bin"), ("MLX", "*.safetensors")):
        folder = scratch / engine
        name = "llama" if engine == "llama.cpp" else "mlx"
        unpack(ROOT / "fixtures" / name / "vectors.tar.xz", folder)
        for path in sorted(folder.glob(pattern)):
            said = kvmnn.open(path, ReadOptions(engine=EngineOptions(allow_unknown_heads=True))).engine_cache
            assert said is not None
            whole = kvmnn.open(path, ReadOptions(engine=EngineOptions(passthrough=True)))
            row = ratios_of(whole, engine, " / ".join(dict.fromkeys(said.types)), path.stat().st_size, scratch)
            rows.append({**row, "file": path.relative_to(folder).as_posix()})
    return rows


def ratios_of(source: kvmnn.arrays.Source, engine: str, kind: str, nbytes: int, scratch: Path) -> dict[str, Any]:
    """A row; `nbytes` are those of the file."""
    with tempfile.TemporaryDirectory(dir=scratch) as out:
        made = encode_source(source, f"{out}/f/", EncodeOptions(threads=1))
        limit = inspect_frame_set(open_frames(f"{out}/f")).to_dict()["entropy_ratio"]
    stored = made.stored_bytes + len(manifest.dump_manifest(made.manifest))
    whole = nbytes / stored if FILE_KEY in source.metadata else None
    return {
        "engine": engine,
        "type": kind,
        "bytes": nbytes,
        "stored": stored,
        "ratio": made.ratio,
        "limit": limit,
        "whole": whole,
    }


def measure_speeds(scratch: Path, tokens: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    options = ReadOptions(packed=PackedOptions(geometry=PackedGeometry(kv_heads=HEADS)))
    for name, make in files(tokens):
        path = scratch / name
        path.write_bytes(make())
        source = kvmnn.open(path, options)
        jobs: dict[str, Callable[[], Any]] = {"read": lambda source=source: read(source)}
        data = np.ones(source.nbytes, np.uint8)
        into = np.zeros_like(data)
        jobs["copy"] = lambda data=data, into=into: np.copyto(into, data)
        times = interleaved(jobs, rounds, time.process_time)
        seconds = statistics.median(times["read"])
        rows.append(
            {
                "file": name,
                "mb": source.nbytes / 1e6,
                "rate": source.nbytes / seconds / 1e6,
                "of_copy": ratio(times, "copy", "read"),
            }
        )
        path.unlink()
    return rows


def read(source: kvmnn.arrays.Source) -> None:
    """All pieces, each of which is there when it is yielded; a byte of each page of a view is looked at."""
    for array in source.arrays:
        for piece in array.iter_chunks(1 << 20):
            piece[::4096].max()
            del piece


def files(tokens: int) -> list[tuple[str, Callable[[], bytes]]]:
    """Names and contents."""
    return [
        ("llama f16", lambda: session(tokens, 1, 2)),
        ("llama f16, V transposed", lambda: session(tokens, 1, 2, transposed=True)),
        ("llama f32", lambda: session(tokens, 0, 4)),
        *(
            (f"llama {name}", lambda number=number, nbytes=nbytes: session(tokens, number, nbytes / 32))
            for name, (number, nbytes) in BLOCKS.items()
        ),
        ("mlx.safetensors", lambda: prompt_cache(tokens)),
        *((f"mlx, {bits} bits.safetensors", lambda bits=bits: quantized_cache(tokens, bits)) for bits in MLX_BITS),
    ]


def session(tokens: int, kind: int, size: float, *, transposed: bool = False) -> bytes:
    """One layer; what the words are does not matter for reading."""
    row = HEADS * DIMS
    nbytes = int(row * size)
    words = synthetic("k", 1, tokens, nbytes // 4).tobytes()
    head = struct.pack("<II", 0x6767736E, 10) + struct.pack(f"<I{tokens}i", tokens, *range(tokens))
    head += struct.pack("<I", 5) + b"llama" + struct.pack("<II", 1, tokens)
    cells = np.zeros((tokens, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(tokens), 1
    keys = struct.pack("<iQ", kind, nbytes) + words
    values = struct.pack("<iII", kind, int(size), row) + words if transposed else keys
    return head + cells.tobytes() + struct.pack("<II", transposed, 1) + keys + values


def prompt_cache(tokens: int) -> bytes:
    capacity = tokens + 100
    words = synthetic("k", 1, capacity, HEADS * DIMS // 2).tobytes()
    shape = [1, HEADS, capacity, DIMS]
    header = '{"__metadata__":{"1.0":"KVCache"},'
    header += f'"0.0":{{"dtype":"F16","shape":{shape},"data_offsets":[0,{len(words)}]}},'
    header += f'"0.1":{{"dtype":"F16","shape":{shape},"data_offsets":[{len(words)},{2 * len(words)}]}},'
    header += f'"0.2":{{"dtype":"I32","shape":[],"data_offsets":[{2 * len(words)},{2 * len(words) + 4}]}}}}'
    return struct.pack("<Q", len(header)) + header.encode() + 2 * words + struct.pack("<i", tokens)


def quantized_cache(tokens: int, bits: int, group: int = 64) -> bytes:
    """One layer in groups; what the codes are does not matter for reading."""
    rows = HEADS * tokens
    parts = (
        ("U32", DIMS * bits // 32, np.random.default_rng(1).bytes(rows * DIMS * bits // 8)),
        *(("F16", DIMS // group, np.full(rows * DIMS // group, 0.01, "<f2").tobytes()) for _ in range(2)),
    )
    header: dict[str, Any] = {"__metadata__": {"1.0": "QuantizedKVCache"}}
    data = b""
    for name, kind, last, words in [(f"0.{side}.{n}", *part) for side in range(2) for n, part in enumerate(parts)]:
        shape = [1, HEADS, tokens, last]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(words)]}
        data += words
    for number, state in enumerate((tokens, group, bits)):
        header[f"0.{2 + number}"] = {"dtype": "I32", "shape": [], "data_offsets": [len(data), len(data) + 4]}
        data += struct.pack("<i", state)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


if __name__ == "__main__":
    main()
