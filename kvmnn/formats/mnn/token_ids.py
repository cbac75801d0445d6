"""Read lists of token ids from files."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import Indices
from ...errors import KvmnnError, SourceError
from ...files.mapped_file import STDIN, MappedFile
from ...files.schema import loads_strict
from ...packed.cache_info import MAX_TOKEN_ID, TokenIdsFingerprint, validate_token_ids
from .. import npy

MAX_TOKEN_ID_FILE_BYTES = 1 << 30
"""Maximum size of a file of token ids."""


def fingerprint_token_ids(path: str) -> TokenIdsFingerprint:
    """Return the count and hash of the ids in a file; errors as `load_token_ids`."""
    return TokenIdsFingerprint.from_ids(load_token_ids(path), where="standard input" if path == STDIN else path)


def load_token_ids(path: str, max_id: int = MAX_TOKEN_ID) -> Indices:
    """Load ids from a file (``"-"``: standard input): JSON list, blank- or comma-separated numbers, or ``.npy``.

    Parameters
    ----------
    max_id
        The highest that an id may be.

    Raises
    ------
    SourceError
        For a file that contains no list of ids.
    """
    file = MappedFile(path)
    if file.size > MAX_TOKEN_ID_FILE_BYTES:
        raise SourceError(f"{file.label}: {file.size} bytes are too many for a list of token ids")
    return parse_token_ids(file.read_head(file.size), file.label, max_id)


def parse_token_ids(data: bytes, label: str, max_id: int = MAX_TOKEN_ID) -> Indices:
    """Parse the ids in the bytes of a file; `label` begins the messages of errors, as in `load_token_ids`."""
    try:
        return validate_token_ids(_parse_ids(data), max_id).astype(np.int64)
    except KvmnnError as exc:
        raise SourceError(f"{label}: {exc}") from None
    except (ValueError, OverflowError, RecursionError):
        raise SourceError(f"{label}: holds no list of token ids") from None


def _flatten_single_text(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ids as ``[token]``; ``[1, token]`` is a batch of one text."""
    if ids.ndim != 1 and ids.shape[:-1] != (1,):
        raise KvmnnError(f"token ids: expected those of one text, [token], found an array of shape {list(ids.shape)}")
    return ids.reshape(-1)


def _parse_ids(data: bytes) -> Any:
    if data.startswith(npy.MAGIC):
        header = npy.NpyHeader(data[: npy.MAX_NPY_HEADER_BYTES], "token ids")
        ids = np.frombuffer(data, header.dtype, offset=header.header_bytes)
        return _flatten_single_text(ids.reshape(header.shape, order=header.order))
    text = data.decode("utf-8-sig")
    if text.lstrip().startswith("["):
        values = loads_strict(text)
        for index, value in enumerate(values):
            if isinstance(value, bool):  # numpy would take it for a number
                raise KvmnnError(f"token ids: number {index + 1} is {str(value).lower()}: expected a whole number")
        return values
    return [int(word) for word in re.split(r"[\s,]+", text.strip())]
