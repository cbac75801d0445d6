import numpy as np
import numpy.typing as npt

from ..dtypes import Bytes, Positions
from .regressors import BlockRows

def get_level() -> str: ...

class Side:
    elements: int
    regressors: int
    def __init__(
        self,
        head_dim: int,
        order: npt.NDArray[np.int32],
        frequencies: npt.NDArray[np.uint64],
        exponents: npt.NDArray[np.int16],
        means: npt.NDArray[np.int32],
        deviations: npt.NDArray[np.int32],
        sigmas: npt.NDArray[np.int32],
        correlations: npt.NDArray[np.int16],
        base: npt.NDArray[np.int8],
        base_factors: npt.NDArray[np.int32],
        chain: npt.NDArray[np.int8],
        chain_factors: npt.NDArray[np.int32],
    ) -> None: ...
    def compute_regressors(
        self, dtype: int, words: Bytes, positions: Positions, out: npt.NDArray[np.int16]
    ) -> None: ...
    def encode(
        self, dtype: int, words: Bytes, positions: Positions, blocks: list[BlockRows], is_constant: Bytes | None
    ) -> bytes: ...
    def decode(
        self,
        dtype: int,
        data: Bytes,
        positions: Positions,
        blocks: list[BlockRows],
        is_constant: Bytes | None,
        words: Bytes,
    ) -> bool: ...
