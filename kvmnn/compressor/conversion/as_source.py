"""A weight file as arrays with names, so that what compares arrays compares weight files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from ...arrays.named_array import NamedArray, Piece
from ...arrays.source import Source
from ...dtypes import Words
from ..kvcm.weight_file import read
from .export import names, noted
from .noted import noted_in


def as_source(path: str | os.PathLike[str]) -> Source:
    """Every weight and bias under the name that `export` gives it; header and metadata as `export` notes them.

    Raises
    ------
    WeightsError
        For a file that is not well-formed.
    """
    file = read(path)
    arrays = [
        NamedArray(
            name=name,
            dtype=file.header.dtype.name,
            shape=words.shape,
            array_dtype=words.dtype.str,
            reader=partial(_whole, words),
        )
        for name, words in names(file)
    ]
    return Source(arrays, noted(file), inputs=(os.fspath(path),))


def header_differences(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    """How header fields and metadata differ, in words, where both are noted as `export` notes them."""
    one, two = noted_in(first), noted_in(second)
    if one is None or two is None:
        return
    for name, value in one.header.to_dict().items():
        if (other := getattr(two.header, name)) != value:
            yield f"header field {name}: {value} and {other}"
    if one.metadata != two.metadata:
        yield "metadata: other bytes"


def _whole(words: Words, _: int) -> Iterator[Piece]:
    yield np.ascontiguousarray(words).reshape(-1).view(np.uint8)
