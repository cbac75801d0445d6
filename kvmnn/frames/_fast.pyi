from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ._room import Track

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

def encode(data: Buffer, stride: int, modes: Sequence[int]) -> bytes: ...
def likely_modes(data: Buffer, stride: int, modes: Sequence[int]) -> tuple[list[int], list[int]]: ...
def most_payload(words: int) -> int: ...
def write_payloads(
    tracks: list[Track],
    piece: int,
    most: tuple[int, ...],
    data: Buffer,
    stride: int,
    begin: int,
    end: int,
    modes: Sequence[int],
) -> None: ...
def raw_payload(words: int) -> int: ...
