from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

MAX_INT: int
MAX_PROTOCOL: int

def scan(data: Buffer, begin: int, opcodes_most: int) -> tuple[int, int]: ...
def opcode_name(code: int) -> str: ...
