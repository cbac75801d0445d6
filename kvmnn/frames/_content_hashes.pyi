import numpy as np
import numpy.typing as npt

def sample_hashes(
    data: npt.NDArray[np.uint8],
    itemsize: int,
    window_starts: npt.NDArray[np.int64],
    window_elements: int,
    hashes: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
) -> int: ...
def count_duplicates(hashes: npt.NDArray[np.uint64]) -> int: ...
