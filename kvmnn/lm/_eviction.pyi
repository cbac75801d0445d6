from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def compact_tables(
    kept_indices: npt.NDArray[np.int64],
    num_live: int,
    slots: npt.NDArray[np.int64],
    bias: npt.NDArray[np.float32],
    masked_bias: float,
    tables: Sequence[npt.NDArray[Any]],
) -> bool: ...
def add_columns(
    attention: npt.NDArray[np.float32],
    slots: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
    num_live: int,
    decay: float,
) -> None: ...
def gather(rows: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64], num_live: int) -> None: ...
