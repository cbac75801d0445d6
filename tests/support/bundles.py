"""Bundles for tests: arrays in memory, written and read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from kvmnn.arrays.array import LazyArray
from kvmnn.bundle import DecodeOptions, EncodeOptions, FrameSet, decode_frames
from kvmnn.bundle.encoder import encode_to_directory, encode_to_file
from kvmnn.files.atomic import DirectoryOutput, FileOutput

KEYS = np.random.default_rng(1).standard_normal((8, 50, 64)).astype(np.float16)
CUT = EncodeOptions(frame_bytes=4096)


def named(values: np.ndarray, name: str = "k", dtype: str = "fp16") -> LazyArray:
    data = values.ravel(order="K").view(np.uint8)

    def read(step: int):
        for start in range(0, data.size, step):
            yield data[start : start + step]

    return LazyArray(name=name, dtype=dtype, shape=values.shape, array_dtype=values.dtype.str, reader=read)


def bundle(folder: Path, *arrays: LazyArray, options: EncodeOptions = CUT) -> Path:
    with DirectoryOutput(folder) as output:
        encode_to_directory(arrays, output, options)
        output.commit()
    return folder


def frame_file(path: Path, array: LazyArray, options: EncodeOptions = CUT) -> Path:
    with FileOutput(path) as output:
        encode_to_file([array], output, options)
        output.commit()
    return path


def joined(frames: FrameSet, **options: object) -> list[bytes]:
    parts: list[list[bytes]] = [[] for _ in frames.arrays]
    for index, data in decode_frames(frames, DecodeOptions(**options)):  # type: ignore[arg-type]
        parts[index].append(bytes(data))
    return [b"".join(part) for part in parts]


def edit(path: Path, change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
