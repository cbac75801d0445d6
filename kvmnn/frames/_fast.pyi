from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

def payloads(data: Buffer, stride: int, search: bool) -> list[bytes]: ...
