from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

MAX_INT_BYTES: int
MAX_PROTOCOL: int

def scan(data: Buffer, begin: int, max_opcodes: int) -> tuple[int, int]: ...
def format_opcode(code: int) -> str: ...
