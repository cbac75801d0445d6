from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ._output_buffer import OrderedWriter

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

def encode(data: Buffer, itemsize: int, modes: Sequence[int], allowed_codecs: int, level: int) -> bytes: ...
def encode_stream(data: Buffer, modes: int, allowed_codecs: int, level: int = 3) -> bytes: ...
def encode_candidate(
    data: Buffer,
    itemsize: int,
    lane: int,
    mode: int,
    allowed_codecs: int,
    level: int,
    has_content_size: bool,
    limit: int,
) -> tuple[int, int, int, bytes] | None: ...
def max_zstd_bytes(n: int) -> int: ...
def write_payload(
    writer: OrderedWriter,
    segment: int,
    capacity: int,
    data: Buffer,
    itemsize: int,
    begin: int,
    end: int,
    lane: int,
    mode: int,
    level: int,
) -> int: ...
def select_modes(data: Buffer, itemsize: int, modes: Sequence[int]) -> list[int]: ...
