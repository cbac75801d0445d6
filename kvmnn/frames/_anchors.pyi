import numpy as np
import numpy.typing as npt

def anchors(
    data: npt.NDArray[np.uint8],
    stride: int,
    begins: npt.NDArray[np.int64],
    window: int,
    numbers: npt.NDArray[np.uint64],
    places: npt.NDArray[np.int64],
) -> int: ...
def again(numbers: npt.NDArray[np.uint64]) -> int: ...
