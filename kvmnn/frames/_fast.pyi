from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

def encode(data: Buffer, stride: int) -> bytes: ...
def payloads(data: Buffer, stride: int) -> list[bytes | int]: ...
def write_raw(frame: bytes, at: int, data: Buffer, stride: int, lane: int) -> None: ...
