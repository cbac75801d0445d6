"""Zarr stores: `python tools/bench/zarr_stores.py [--quick]` writes benchmarks/zarr_stores.*

Ratio by the length of a chunk, raw bytes over those of all chunks, for K and V of a trained model (fixtures/kv_real)
and for synthetic ones; and how long zarr takes to write and read with this codec and with its own. CPU time, medians of
ways that take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zarr
import zarr.registry
from common import ROOT, interleaved, synthetic, table, write_results

import kvmnn
from kvmnn.integrations.chunk_codec import CODEC_NAME
from kvmnn.integrations.zarr import ZarrFrameCodec

TOKENS = (16, 64, 256, 512)
CODECS: dict[str, dict[str, Any]] = {
    "kvmnn.frame, exact": {"serializer": {"name": CODEC_NAME}, "compressors": None},
    "kvmnn.frame, fast": {"serializer": {"name": CODEC_NAME, "configuration": {"effort": "fast"}}, "compressors": None},
    "bytes, zstd 3": {"compressors": {"name": "zstd", "configuration": {"level": 3, "checksum": False}}},
    "bytes, blosc lz4 shuffle": {
        "compressors": {
            "name": "blosc",
            "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 2, "blocksize": 0},
        }
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds; nothing is written")
    quick = parser.parse_args().quick
    zarr.registry.register_codec(CODEC_NAME, ZarrFrameCodec)
    zarr.config.set({"async.concurrency": 1, "threading.max_workers": 1})
    ratios, sizes = by_length()
    speeds = by_codec(tokens=1024 if quick else 8192, rounds=2 if quick else 7)
    sections = [
        "## Ratio by the length of a chunk",
        "",
        "Chunks of one head and as many tokens of 64 (trained model) or 128 dimensions (synthetic), effort exact; the "
        "last column is one frame of the whole array. A frame has 24 bytes of headers (fp16) or 44 (fp32), and tables "
        "of its own.",
        "",
        table(
            ["array", *(f"{n} tokens" for n in TOKENS), "one chunk"],
            [[name, *(f"{value:.3f}" for value in row)] for name, row in ratios.items()],
        ),
        "",
        f"Raw bytes of a chunk of {TOKENS[-1]} tokens: {', '.join(f'{n:,} ({name})' for name, n in sizes.items())}.",
        "",
        "## zarr with this codec and with its own",
        "",
        f"zarr {zarr.__version__}, a store on disk, synthetic K in fp16, chunks of one head and {TOKENS[-1]} tokens "
        "(128 KiB), CPU time of the process.",
        "",
        table(
            ["codec", "ratio", "write MB/s", "read MB/s"],
            [[r["codec"], f"{r['ratio']:.3f}", f"{r['write']:.0f}", f"{r['read']:.0f}"] for r in speeds],
        ),
    ]
    if quick:
        print("\n".join(sections))
    else:
        data = {"ratios": ratios, "speeds": speeds}
        print(write_results("zarr_stores", "Zarr stores", sections, data))
    sys.exit(0)


def by_length() -> tuple[dict[str, list[float]], dict[str, int]]:
    """Ratios, and raw bytes of the longest chunk, by array."""
    real = {name: np.load(ROOT / f"fixtures/kv_real/{name}.npy") for name in ("k_fp16", "v_fp16", "k_fp32", "v_fp32")}
    arrays = {f"trained {name}, layer 1": np.moveaxis(array[1], 0, 1) for name, array in real.items()}
    arrays["synthetic K, fp16"] = np.moveaxis(
        synthetic("k", 1, 512, 8 * 128).astype(np.float16).reshape(512, 8, 128), 0, 1
    )
    ratios: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        ratios[name] = []
        for tokens in TOKENS:
            parts = [head[t : t + tokens] for head in array for t in range(0, array.shape[1], tokens)]
            ratios[name].append(array.nbytes / sum(len(kvmnn.encode(part)) for part in parts))
            sizes[name] = parts[0].nbytes
        ratios[name].append(array.nbytes / len(kvmnn.encode(array)))
    return ratios, sizes


def by_codec(tokens: int, rounds: int) -> list[dict[str, Any]]:
    words = np.moveaxis(synthetic("k", 1, tokens, 8 * 128).astype(np.float16).reshape(tokens, 8, 128), 0, 1).copy()
    rows = []
    with tempfile.TemporaryDirectory() as name:

        def create(codec: str) -> Any:
            return zarr.create_array(
                Path(name, codec),
                shape=words.shape,
                chunks=(1, TOKENS[-1], words.shape[2]),
                dtype=words.dtype,
                overwrite=True,
                **CODECS[codec],
            )

        def write(codec: str) -> None:
            create(codec)[:] = words

        def read(codec: str) -> None:
            zarr.open_array(Path(name, codec), mode="r")[:]

        writes = interleaved({c: lambda c=c: write(c) for c in CODECS}, rounds, time.process_time)
        reads = interleaved({c: lambda c=c: read(c) for c in CODECS}, rounds, time.process_time)
        for codec in CODECS:
            array = zarr.open_array(Path(name, codec), mode="r")
            assert (array[:] == words).all(), codec
            stored = sum(path.stat().st_size for path in Path(name, codec, "c").rglob("*") if path.is_file())
            rates = {
                "write": words.nbytes / statistics.median(writes[codec]) / 1e6,
                "read": words.nbytes / statistics.median(reads[codec]) / 1e6,
            }
            rows.append({"codec": codec, "ratio": words.nbytes / stored, **rates})
    return rows


if __name__ == "__main__":
    main()
