import numpy as np
import numpy.typing as npt

MIN_ENTRY_BYTES: int
MAX_METADATA_BYTES: int
MAX_METADATA_ENTRIES: int
MAX_NAME_BYTES: int

def scan(
    header: bytes,
    label: str,
    sizes: dict[str, int],
    positions: npt.NDArray[np.uint32],
    dtype_codes: npt.NDArray[np.uint8],
    offsets_and_hashes: npt.NDArray[np.int64],
) -> tuple[int, list[str], dict[str, str]]: ...
def read_shape_at(header: bytes, begin: int) -> tuple[int, ...]: ...
def read_strings_at(header: bytes, begins: npt.NDArray[np.uint32], lengths: npt.NDArray[np.uint32]) -> list[str]: ...
