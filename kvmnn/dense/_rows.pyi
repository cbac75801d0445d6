from collections.abc import Callable
from typing import Any

import numpy as np

from ._stream import Buffer, TableSet

class RowsPayload:
    def __init__(self, stream: Buffer, dtype: int, heads: int, dim: int, rows: int, flags: int) -> None: ...
    @property
    def history(self) -> int: ...
    @property
    def table_set(self) -> int | None: ...
    def sections(self) -> dict[str, int]: ...
    def decode(self, history: Buffer | None, tables: TableSet | None, words: Buffer) -> None: ...

def decode_short_block(
    stream: bytes,
    tables: TableSet | None,
    max_bytes: int,
    allocate: Callable[[tuple[int, ...], np.dtype[Any]], Any],
    numpy_types: tuple[np.dtype[Any], ...],
) -> Any: ...

class RowDestination:
    def __init__(self, dtype: int, heads: int, dim: int, words: Buffer) -> None: ...
    def decode(
        self, stream: Buffer, checksum: int, tables: TableSet | None, begin: int, tokens: int, history: int
    ) -> bool: ...
