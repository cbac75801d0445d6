"""A weight file as arrays with names, so that what compares arrays compares weight files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from ...arrays.named_array import Chunk, LazyArray
from ...arrays.source import Source
from ...dtypes import Elements
from ..kvcm.weight_file import read_weight_file
from .export import export_metadata, iter_named_tensors
from .noted import read_exported_metadata


def to_source(path: str | os.PathLike[str]) -> Source:
    """Every weight and bias under the name that `export` gives it; header and metadata as `export` notes them.

    Raises
    ------
    WeightsError
        For a file that is not well-formed.
    """
    file = read_weight_file(path)
    arrays = [
        LazyArray(
            name=name,
            dtype=file.header.dtype.name,
            shape=words.shape,
            array_dtype=words.dtype.str,
            reader=partial(_read_elements, words),
        )
        for name, words in iter_named_tensors(file)
    ]
    return Source(arrays, export_metadata(file), inputs=(os.fspath(path),))


def describe_header_differences(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    """How header fields and metadata differ, in words, where both are noted as `export` notes them."""
    first_metadata, second_metadata = read_exported_metadata(first), read_exported_metadata(second)
    if first_metadata is None or second_metadata is None:
        return
    for name, value in first_metadata.header.to_dict().items():
        if (second_value := getattr(second_metadata.header, name)) != value:
            yield f"header field {name}: {value} and {second_value}"
    if first_metadata.metadata != second_metadata.metadata:
        yield "metadata: other bytes"


def _read_elements(elements: Elements, _: int) -> Iterator[Chunk]:
    yield np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
