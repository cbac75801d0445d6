from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

def move_range(
    keys: Buffer,
    values: Buffer,
    plain_keys: Buffer | None,
    plain_values: Buffer | None,
    itemsize: int,
    heads: int,
    dims: int,
    start: int,
    count: int,
    lP: int,
    hP: int,
    block: int,
    key_head: int,
    value_head: int,
    what: int,
) -> None: ...
