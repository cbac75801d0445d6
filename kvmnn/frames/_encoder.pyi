from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ._room import Track

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

def encode(data: Buffer, stride: int, modes: Sequence[int], allow: int, level: int) -> bytes: ...
def encode_stream(data: Buffer, modes: int, allow: int, level: int = 3) -> bytes: ...
def candidate(
    data: Buffer, stride: int, lane: int, mode: int, allow: int, level: int, sized: bool, limit: int
) -> tuple[int, int, int, bytes] | None: ...
def bound(n: int) -> int: ...
def write_payload(
    track: Track,
    piece: int,
    most: int,
    data: Buffer,
    stride: int,
    begin: int,
    end: int,
    lane: int,
    mode: int,
    level: int,
) -> int: ...
def likely_modes(data: Buffer, stride: int, modes: Sequence[int]) -> list[int]: ...
