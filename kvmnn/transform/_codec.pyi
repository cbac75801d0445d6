import numpy as np
import numpy.typing as npt

from ..dense._stream import Rotation as RotationParameters

LANES: int
NUM_SYMBOLS: int
NUM_TABLES: int

Coefficients = npt.NDArray[np.int16]
Sums = npt.NDArray[np.int32]

def get_level() -> str: ...
def are_tables_valid(frequencies: npt.NDArray[np.uint16]) -> bool: ...

class Rotation:
    def __init__(self, rotation: RotationParameters | None) -> None: ...

def load_rows(
    words: npt.NDArray[np.uint8],
    dtype: int,
    heads: int,
    dim: int,
    rotation: Rotation,
    positions: npt.NDArray[np.int64],
    rows: npt.NDArray[np.float32],
) -> None: ...
def load_normalized(
    words: npt.NDArray[np.uint8],
    dtype: int,
    heads: int,
    dim: int,
    rotation: Rotation,
    positions: npt.NDArray[np.int64],
    mean: npt.NDArray[np.float32],
    reciprocal: npt.NDArray[np.float32],
    normalized: Coefficients,
) -> None: ...
def multiply(rows: Coefficients, packed: npt.NDArray[np.int16], sums: Sums) -> None: ...
def reconstruct(
    coefficients: Coefficients,
    blocks: int,
    basis: npt.NDArray[np.int16] | None,
    diagonal: npt.NDArray[np.int16] | None,
    mean: npt.NDArray[np.float32],
    prediction: Sums | None,
    gain: npt.NDArray[np.float32] | None,
    steps: npt.NDArray[np.float32],
    dtype: int,
    heads: int,
    dim: int,
    rotation: Rotation,
    positions: npt.NDArray[np.int64],
    words: npt.NDArray[np.uint8],
) -> None: ...
def compare_words(
    words: npt.NDArray[np.uint8], others: npt.NDArray[np.uint8], dtype: int
) -> tuple[float, float, float]: ...
def encode_coefficients(
    coefficients: Coefficients,
    places: npt.NDArray[np.int64],
    levels: npt.NDArray[np.int32],
    exponents: npt.NDArray[np.int8] | None,
    frequencies: npt.NDArray[np.uint16],
) -> tuple[bytes, bytes]: ...
def decode_coefficients(
    units: npt.NDArray[np.uint8] | bytes | memoryview,
    bits: npt.NDArray[np.uint8] | bytes | memoryview,
    places: npt.NDArray[np.int64],
    levels: npt.NDArray[np.int32],
    exponents: npt.NDArray[np.int8] | None,
    frequencies: npt.NDArray[np.uint16],
    coefficients: Coefficients,
) -> bool: ...
