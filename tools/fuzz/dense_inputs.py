"""What fuzzing of dense streams begins with: streams of all kinds, table sets, words (tools/fuzz/dense.c).

A folder for each target. Eight bytes of options come first: the SIMD level, shape, dtype, and what it is encoded with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from dense_samples import DTYPES, sample

from kvmnn import dense
from kvmnn.dense.inputs import EncoderInput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    for number, (target, data) in enumerate(inputs()):
        (folder / target).mkdir(parents=True, exist_ok=True)
        (folder / target / f"input{number:03}").write_bytes(data)


def inputs() -> Iterator[tuple[str, bytes]]:
    """The target of an input, and the input."""
    shapes = ((2, 24, 8), (1, 20, 33), (3, 60, 5), (2, 90, 9))
    for dtype, kind, (heads, tokens, dim), rotated in product(
        DTYPES, ("cache", "spikes", "few"), shapes, (False, True)
    ):
        rotary = dense.RopeConfig(dims=dim // 2 * 2) if rotated else None
        given = EncoderInput(sample(kind, dtype, heads, tokens, dim, 1), dtype, rotary, None, None, None)
        stream = given.compiled_input.encode(None)[0]
        if stream is not None:
            options = bytes([0, (heads - 1) | given.dtype_code << 2 | stream[7] << 4, dim - 1, tokens - 1, 0, 0, 0, 0])
            yield "streams", options + stream
    for dtype in DTYPES:
        tables = dense.SharedTables.from_arrays(
            [sample("cache", dtype, 2, 300, 16, 2)], rotary=dense.RopeConfig(dims=8)
        )
        yield "sets", bytes(8) + tables.data
    for number in range(12):
        noise = np.random.default_rng(number).integers(0, 256, 300, np.uint8).tobytes()
        yield "words", bytes([0, number * 5, 16 + number, 40, number, number, number & 1, 0]) + noise


if __name__ == "__main__":
    main()
