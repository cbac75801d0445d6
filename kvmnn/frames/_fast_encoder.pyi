from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ._output_buffer import OrderedWriter

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

def encode(data: Buffer, itemsize: int, modes: Sequence[int]) -> bytes: ...
def select_modes(data: Buffer, itemsize: int, modes: Sequence[int]) -> tuple[list[int], list[int]]: ...
def max_payload_bytes(num_elements: int) -> int: ...
def write_payloads(
    writers: list[OrderedWriter],
    segment: int,
    capacities: tuple[int, ...],
    data: Buffer,
    itemsize: int,
    begin: int,
    end: int,
    modes: Sequence[int],
) -> None: ...
def raw_payload_bytes(num_elements: int) -> int: ...
