from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

PREDICTOR_NAMES: tuple[str, ...]

def predict(data: Buffer, heads: int, dims: int, predictor: int) -> bytes: ...
def unpredict(data: Buffer, heads: int, dims: int, predictor: int) -> bytes: ...
def bitshuffle(data: Buffer) -> bytes: ...

class StreamMeter:
    def configure(
        self,
        lane: int,
        heads: int,
        dims: int,
        block_tokens: int,
        predictors: Iterable[int],
        level: int,
        use_bitshuffle: bool,
        count_bytes: bool,
    ) -> None: ...
    def start(self, tokens: int) -> None: ...
    def feed(self, words: Buffer) -> None: ...
    def finish(self) -> tuple[int, int, tuple[int, ...], float]: ...
    def free_buffers(self) -> None: ...
    def count_buffer_bytes(self) -> int: ...
