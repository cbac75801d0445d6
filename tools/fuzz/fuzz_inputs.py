"""The inputs that guided fuzzing starts from: kept in tools/fuzz/corpus, one a line, in hexadecimal digits.

    python tools/fuzz/fuzz_inputs.py unpack TARGET DIR     write them, and a few that are made here, as files into DIR
    python tools/fuzz/fuzz_inputs.py pack TARGET DIR       keep the files of DIR (after fuzz -merge=1, docs/fuzzing.md)

Targets are the functions of tools/fuzz/guided.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

TARGETS = ("frames", "streams", "writer", "pickles", "headers")
CORPUS = Path(__file__).parent / "corpus"
MOST = 600  # bytes of an input that is kept


def kept(target: str) -> list[bytes]:
    path = CORPUS / f"{target}.txt"
    return [bytes.fromhex(line) for line in path.read_text().splitlines()] if path.exists() else []


def made(target: str) -> Iterator[bytes]:
    """Valid inputs to begin with."""
    import kvmnn

    if target == "pickles":
        state = OrderedDict((f"compress_tk.0.{slot}.weight", [slot, 1.5, None, b"x", (1, 2)]) for slot in range(3))
        yield from (pickle.dumps({"model_state_dict": state, "epoch": 2**70}, protocol) for protocol in range(6))
        return
    if target == "headers":
        entry = {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}
        escaped = {"\u00e9\n\U0001f600": {"data_offsets": [12, 12], "dtype": "F8_E4M3", "shape": [0]}}
        named = {"__metadata__": {"format": "pt", "\u00e9": ""}, "k": entry, "v": {**entry, "data_offsets": [12, 24]}}
        yield from (json.dumps(header).encode() for header in ({}, {"": entry}, {"k": entry, **escaped}, named))
        yield json.dumps({**escaped, "k": entry}, ensure_ascii=False, indent=1).encode() + b"  "
        return
    rng = np.random.default_rng(1)
    if target == "writer":  # an option, and steps that make words (guided.expanded)
        step = struct.Struct("<BBBH")
        for option in range(16):
            for kind in range(8):
                end = 0x2000 << option % 3 | 0x0F00 * (option & 1)
                steps = [step.pack(1, 0b1110, 90, 0x2080), step.pack(kind, 0b1110, 3, end)]
                yield bytes([option]) + b"".join(steps * 3)
            yield bytes([option | 16]) + rng.bytes(64) * 4
        return
    for dtype in ("fp16", "fp32"):
        for words in (1, 7, 40, 300):
            steps = rng.normal(size=words)
            for array in (np.zeros(words), np.cumsum(steps), np.repeat(steps, 9)[:words]):
                frame = kvmnn.encode(array.astype(np.float16 if dtype == "fp16" else np.float32))
                yield frame if target == "frames" else frame[4:]
            noise = rng.bytes(words // 2 * 4 or 4)
            frame = kvmnn.encode(noise, dtype=dtype, effort="fast")  # raw blocks, which are read in place
            yield frame if target == "frames" else frame[4:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["unpack", "pack"])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "unpack":
        for data in (*kept(arguments.target), *made(arguments.target)):
            (arguments.folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        return
    inputs = [path.read_bytes() for path in sorted(arguments.folder.iterdir())]
    lines = sorted((data.hex() for data in inputs if len(data) <= MOST), key=lambda line: (len(line), line))
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{arguments.target}.txt").write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} of {len(inputs)} inputs kept: those of at most {MOST} bytes")


if __name__ == "__main__":
    main()
