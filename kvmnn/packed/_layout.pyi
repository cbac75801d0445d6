import numpy as np
import numpy.typing as npt

from ..dtypes import Bytes, Floats

class NativeLayout:
    def __init__(
        self,
        is_keys: bool,
        word_bytes: int,
        dims: int,
        lP: int,
        hP: int,
        block_tokens: int,
        head_bytes: int,
        tile_bytes: int,
    ) -> None: ...

def gather(layout: NativeLayout, packed: Bytes, rows: Bytes, first: int, last: int, start: int) -> None: ...
def scatter(layout: NativeLayout, packed: Bytes, rows: Bytes, first: int, last: int, start: int) -> None: ...
def zero(layout: NativeLayout, packed: Bytes, first: int, last: int, start: int, count: int) -> None: ...
def pad(layout: NativeLayout, packed: Bytes, first: int, last: int, num_valid: int) -> None: ...
def shift(layout: NativeLayout, packed: Bytes, first: int, last: int, moves: npt.NDArray[np.uintp]) -> None: ...
def quantize_keys(
    layout: NativeLayout,
    packed: Bytes,
    sums: Floats,
    running_max: Floats,
    rows: Bytes,
    first: int,
    last: int,
    num_past: int,
) -> None: ...
def quantize_values(
    layout: NativeLayout, packed: Bytes, sums: Floats, rows: Bytes, first: int, last: int, num_past: int
) -> None: ...
def dequantize(layout: NativeLayout, packed: Bytes, rows: Bytes, first: int, last: int, start: int) -> None: ...
def simd_level() -> str: ...
