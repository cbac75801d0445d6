from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._opcodes import scan as scan

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

MAX_INT_KEY: int
MAX_STRING_BYTES: int

class OpaqueValue: ...

class AllowedGlobal:
    name: str
    constructor: Callable[[tuple[Any, ...]], object] | None
    def __init__(self, name: str, constructor: Callable[[tuple[Any, ...]], object] | None = None) -> None: ...

def load(
    data: Buffer,
    begin: int,
    end: int,
    resolve: Callable[[str, str], AllowedGlobal],
    resolve_persistent: Callable[[object], object],
    set_state: Callable[[object, object], bool] | None = None,
) -> object: ...
