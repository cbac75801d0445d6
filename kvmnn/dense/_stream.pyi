from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
Rotation: TypeAlias = tuple[int, int, npt.NDArray[np.uint64]]

def xxh64(data: Buffer, seed: int = 0) -> int: ...
def build_verbatim_stream(method: int, dtype: int, heads: int, dim: int, words: Buffer, payload: Buffer) -> bytes: ...
def compute_verbatim_checksum(stream: Buffer, words: Buffer) -> int: ...

class EncoderRows:
    def __init__(
        self,
        dtype: int,
        heads: int,
        dim: int,
        own_rows: Buffer,
        history: Buffer | None,
        rotary: Rotation | None,
        positions: npt.NDArray[np.uint32] | None,
        reference_hints: npt.NDArray[np.int32] | None,
    ) -> None: ...
    @property
    def base(self) -> int: ...
    def count_predicted(self, rotary: Rotation | None) -> int: ...
    def encode(
        self,
        tables: TableSet | None,
        references: npt.NDArray[np.int32] | None = None,
        frame_trial_min_bytes: float = 0,
        repeats: bool = False,
    ) -> tuple[bytes | None, bool]: ...

class TableSet:
    def __init__(self, data: Buffer) -> None: ...
    @property
    def id(self) -> int: ...
    @property
    def dtype(self) -> int: ...
    @property
    def rotary(self) -> tuple[int, int, list[int]] | None: ...

class SymbolCounts:
    def add(self, rows: EncoderRows, base: int) -> None: ...
    def table_set(self, template: EncoderRows, base: int) -> bytes: ...
