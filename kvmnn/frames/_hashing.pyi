from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

SEED: int

def fnv1a64(data: Buffer, seed: int) -> int: ...
def checksum(data: Buffer, seed: int) -> int: ...
def checksum_rows(rows: npt.NDArray[np.uint8], block_bytes: int) -> list[int]: ...
