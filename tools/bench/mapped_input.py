"""What reading inputs safely costs: `python tools/bench/mapped_input.py [--quick]` writes benchmarks/mapped_input.*

256 MiB of fp16 as a `.npy` file and as an MNN dump of 16 layers are encoded, decoded and verified in three ways that
take turns: mapped with the guard that kvmnn has (pyx/kvmnn/files/fault_guard.h), mapped bare, and read with
`pread`. CPU time of one thread.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import interleaved, ratio, synthetic, table, write_results

import kvmnn
from kvmnn.bundle import EncodeOptions, decode_frames, encode_source, open_frames, verify_frame_set
from kvmnn.dtypes import Bytes
from kvmnn.files.mapped_file import MappedFile

LIMIT = 1.03
ONE = EncodeOptions(threads=1)
GUARDED = {name: vars(MappedFile)[name] for name in ("__init__", "view", "release_pages")}


class _Bare(MappedFile):
    """Mapped, without guard and without a look at what the file is afterwards."""

    def __init__(self, path: str | os.PathLike[str], **_: Any) -> None:
        self.path = self.label = os.fspath(path)
        self._state = None
        with open(path, "rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._memory)
        self._mapping = self._memory  # type: ignore[assignment]

    def view(self, offset: int, nbytes: int) -> Bytes:
        return np.frombuffer(self._memory, np.uint8, nbytes, offset)

    def release_pages(self, offset: int, nbytes: int) -> None:
        if nbytes >= 1 << 20:
            first = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, first, offset + nbytes - first)


class _Read(MappedFile):
    """Read with pread into memory of its own."""

    def __init__(self, path: str | os.PathLike[str], **_: Any) -> None:
        self.path = self.label = os.fspath(path)
        self._state = None
        self._file = open(path, "rb")  # noqa: SIM115
        self.size = os.fstat(self._file.fileno()).st_size
        self._mapping = self._file  # type: ignore[assignment]

    def view(self, offset: int, nbytes: int) -> Bytes:
        data = np.empty(nbytes, np.uint8)
        os.preadv(self._file.fileno(), [data.data], offset)
        return data

    def release_pages(self, offset: int, nbytes: int) -> None:
        pass


WAYS: dict[str, dict[str, Any]] = {
    "guarded": GUARDED,
    "bare": {name: vars(_Bare)[name] for name in GUARDED},
    "pread": {name: vars(_Read)[name] for name in GUARDED},
}


def inputs(folder: Path, layers: int) -> None:
    """The `.npy` file, the dump and their frames."""
    tokens, heads, dims = 4096, 8, 128
    row = synthetic("k", heads, tokens, dims).astype(np.float16).transpose(1, 0, 2)
    np.save(folder / "k.npy", np.concatenate([row] * layers))
    for layer in range(layers // 2):
        inside = folder / "dump" / f"layer_{layer}"
        inside.mkdir(parents=True)
        meta = {"layer_id": layer, "stage": "prefill", "token_begin": 0, "token_end": tokens, "seq_len": tokens}
        meta |= {"kv_heads": heads, "head_dim": dims, "bytes_per_elem": 2, "dtype": "fp16"}
        meta |= {f"{part}_file": f"{part}_t0_{tokens}.bin" for part in "kv"}
        (inside / f"meta_t0_{tokens}.json").write_text(json.dumps(meta))
        for part in "kv":
            (inside / f"{part}_t0_{tokens}.bin").write_bytes(row.tobytes())
    encode_source(kvmnn.open(folder / "k.npy"), folder / "k.frame", ONE)
    encode_source(kvmnn.open(folder / "dump"), f"{folder}/frames/", ONE)


def jobs(folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed; nothing but frames is written."""
    made = {"k.npy": folder / "k.frame", "dump": folder / "frames"}

    def encoding(name: str) -> Callable[[], object]:
        target = "/dev/null" if name == "k.npy" else f"{folder}/again/"
        return lambda: encode_source(kvmnn.open(folder / name), target, ONE, force=True)

    def decoding(name: str) -> Callable[[], object]:
        return lambda: deque(decode_frames(open_frames(str(made[name]))), maxlen=0)

    def verifying(name: str) -> Callable[[], object]:
        return lambda: verify_frame_set(open_frames(str(made[name])), kvmnn.open(folder / name))

    verbs = {"encode": encoding, "decode": decoding, "verify --against": verifying}
    return {f"{verb} {name}": make(name) for name in made for verb, make in verbs.items()}


def in_way(way: str, job: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        for name, value in WAYS[way].items():
            setattr(MappedFile, name, value)
        try:
            return job()
        finally:
            for name, value in GUARDED.items():
                setattr(MappedFile, name, value)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 MiB, two rounds, nothing written")
    arguments = parser.parse_args()
    layers, rounds = (4, 2) if arguments.quick else (32, 3)
    rows, data = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs(folder, layers)
        for label, job in jobs(folder).items():
            times = interleaved({way: in_way(way, job) for way in WAYS}, rounds, time.process_time)
            seconds = {way: min(times[way]) for way in WAYS}
            over = {way: ratio(times, way, "bare") for way in ("guarded", "pread")}
            ratios = (f"{over[way]:.3f}" for way in over)
            rows.append([label, *(f"{seconds[way]:.3f} s" for way in ("bare", "guarded", "pread")), *ratios])
            data.append({"job": label, "seconds": seconds, "over_bare": over})
            print(*rows[-1], sep="  ", flush=True)
    worst = statistics.median(entry["over_bare"]["guarded"] for entry in data)
    print(f"guarded over bare, median of all: {worst:.3f} (limit {LIMIT})")
    if arguments.quick:
        return
    text = (
        "256 MiB of fp16, one thread, CPU time: the least of 3 rounds in which the ways take turns, and the median of "
        "the rounds' ratios. kvmnn/files/change_detection.py has what was decided by this, "
        "docs/reliability.md what it is for.\n"
    )
    header = ["job", "mapped bare", "with the guard", "pread", "guard / bare", "pread / bare"]
    write_results("mapped_input", "Reading inputs that may change", [text, table(header, rows)], {"jobs": data})


if __name__ == "__main__":
    main()
