"""Weights of a model as `.safetensors`, without torch and without the safetensors package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmnn.arrays.array import ArrayInfo
from kvmnn.errors import SourceError
from kvmnn.files.atomic import FileOutput
from kvmnn.files.mapped_file import MappedFile
from kvmnn.formats.safetensors import build_header, read_header

Weights = dict[str, npt.NDArray[Any]]

_NUMPY = {"F16": "<f2", "F32": "<f4"}
_DTYPES = {"<f2": "fp16", "<f4": "fp32"}


def read_weights(path: Path) -> Weights:
    """Every tensor of a file, as it is stored: float16 or float32.

    Raises
    ------
    SourceError
        For damaged files and for tensors of another type.
    """
    file = MappedFile(path)
    header = read_header(file)
    weights: Weights = {}
    for tensor in header.tensors:
        if tensor.kind not in _NUMPY:
            raise SourceError(f"{path}: tensor {tensor.name!r} is {tensor.kind}: expected F16 or F32")
        data = file.view(header.data_start + tensor.begin, tensor.end - tensor.begin)
        weights[tensor.name] = data.view(_NUMPY[tensor.kind]).reshape(tensor.shape)
    return weights


def write_weights(path: Path, weights: Mapping[str, npt.NDArray[Any]], *, force: bool = False) -> None:
    """Write float16 and float32 tensors in the order of their names, as torch's users do.

    Raises
    ------
    OutputError
        Where the file exists (without `force`) or cannot be written.
    """
    arrays = {name: np.ascontiguousarray(weights[name]) for name in sorted(weights)}
    infos = [
        ArrayInfo(name=name, dtype=_DTYPES[array.dtype.str], shape=array.shape, array_dtype=array.dtype.str)
        for name, array in arrays.items()
    ]
    header, begins = build_header(infos, {"format": "pt"})
    with FileOutput(path, force=force) as output:
        output.file.write(header)
        for name in sorted(begins, key=begins.__getitem__):
            output.file.write(arrays[name].tobytes())
        output.commit()
