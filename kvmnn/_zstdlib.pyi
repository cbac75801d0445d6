from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

NAMES: tuple[str, ...]

def use_library(addresses: Sequence[int]) -> None: ...
def use_callables(
    compress: Callable[[int, bool, memoryview], bytes], decompress: Callable[[memoryview, int], bytes]
) -> None: ...
def extent(payload: Buffer, at: int) -> int: ...
def compress(data: Buffer, level: int = 3) -> bytes: ...
def decompress(payload: Buffer, expected: int) -> bytes: ...
