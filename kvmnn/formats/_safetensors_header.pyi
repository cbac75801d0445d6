import numpy as np
import numpy.typing as npt

SHORTEST_ENTRY: int
MAX_METADATA: int
MAX_METADATA_ENTRIES: int
MAX_NAME: int

def scan(
    header: bytes,
    where: str,
    sizes: dict[str, int],
    places: npt.NDArray[np.uint32],
    kinds: npt.NDArray[np.uint8],
    numbers: npt.NDArray[np.int64],
) -> tuple[int, list[str], dict[str, str]]: ...
def shape_at(header: bytes, begin: int) -> tuple[int, ...]: ...
def strings_at(header: bytes, begins: npt.NDArray[np.uint32], lengths: npt.NDArray[np.uint32]) -> list[str]: ...
