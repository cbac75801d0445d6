import numpy as np
import numpy.typing as npt

def get_level() -> str: ...
def dequantize(
    kind: int,
    bits: int,
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    biases: npt.NDArray[np.uint8],
    out: npt.NDArray[np.uint8],
) -> None: ...
