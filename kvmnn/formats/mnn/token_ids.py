"""Lists of token ids in files."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import Indices
from ...errors import KvmnnError, SourceError
from ...files.json_document import loads
from ...files.mapped import STDIN, MappedFile
from ...packed.cache_info import MAX_TOKEN_ID, TokenIds, check_ids
from .. import npy

MAX_BYTES = 1 << 30
"""Of a file of token ids."""


def read_token_ids(path: str) -> TokenIds:
    """Count and hash of the ids in a file; errors as `load_token_ids`."""
    return TokenIds.of(load_token_ids(path), where="standard input" if path == STDIN else path)


def load_token_ids(path: str, most: int = MAX_TOKEN_ID) -> Indices:
    """The ids in a file: a JSON list, numbers between spaces or commas, or a ``.npy`` array; ``"-"`` is standard input.

    Parameters
    ----------
    most
        The highest that an id may be.

    Raises
    ------
    SourceError
        For a file that holds no list of ids.
    """
    file = MappedFile(path)
    if file.size > MAX_BYTES:
        raise SourceError(f"{file.label}: {file.size} bytes are too many for a list of token ids")
    return parsed_token_ids(file.head(file.size), file.label, most)


def parsed_token_ids(data: bytes, where: str, most: int = MAX_TOKEN_ID) -> Indices:
    """The ids in the bytes of such a file, and its errors; `where` begins their messages."""
    try:
        return check_ids(_ids(data), most).astype(np.int64)
    except KvmnnError as exc:
        raise SourceError(f"{where}: {exc}") from None
    except (ValueError, OverflowError, RecursionError):
        raise SourceError(f"{where}: holds no list of token ids") from None


def _one_text(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Ids ``[token]``; ``[1, token]`` is a batch of one text."""
    if ids.ndim != 1 and ids.shape[:-1] != (1,):
        raise KvmnnError(f"token ids: expected those of one text, [token], found an array of shape {list(ids.shape)}")
    return ids.reshape(-1)


def _ids(data: bytes) -> Any:
    if data.startswith(npy.MAGIC):
        header = npy.Header(data[: npy.MAX_HEADER], "token ids")
        ids = np.frombuffer(data, header.dtype, offset=header.size)
        return _one_text(ids.reshape(header.shape, order=header.order))
    text = data.decode("utf-8-sig")
    if text.lstrip().startswith("["):
        found = loads(text)
        for place, each in enumerate(found):
            if isinstance(each, bool):  # numpy would take it for a number
                raise KvmnnError(f"token ids: number {place + 1} is {str(each).lower()}: expected a whole number")
        return found
    return [int(word) for word in re.split(r"[\s,]+", text.strip())]
