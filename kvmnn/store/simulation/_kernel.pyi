from typing import Final

import numpy as np
import numpy.typing as npt

POLICY_NUMBERS: Final[dict[str, int]]

def number_prefixes(symbols: npt.NDArray[np.uint32], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...
def find_next_uses(
    keys: npt.NDArray[np.int64], begins: npt.NDArray[np.int64], num_keys: int
) -> npt.NDArray[np.int64]: ...

class SimulatedStore:
    total_bytes: int
    put_bytes: int
    evicted_bytes: int
    evicted_units: int

    def __new__(
        cls,
        keys: npt.NDArray[np.int64],
        begins: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        chunks: list[bytes],
        next_uses: npt.NDArray[np.int64],
        unit_bytes: npt.NDArray[np.int64],
        unit_benefits: npt.NDArray[np.int64],
        *,
        num_keys: int,
        block_tokens: int,
        symbol_tokens: int,
        unit_blocks: int,
        max_bytes: int,
        policy: int,
    ) -> SimulatedStore: ...
    def run(self) -> npt.NDArray[np.int64]: ...
