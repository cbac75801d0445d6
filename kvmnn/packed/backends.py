"""Pack numbers of MNN's CPU backends, for `PackLayout.from_backend`.

The numbers depend on how the engine was built and on the processor it runs on, and no file records them. eP, lP, hP
come from the matrix kernels (`MNNGetMatMulPackMode`), eP8, lP8, hP8 from the int8 ones (`MNNGetGemmUnit`), both read in
the sources of the fork Livia-Tassel/MNN (3e0f511) and of alibaba/MNN (4d40bdb).
"""

from __future__ import annotations

from .._util.dataclass import dataclass
from .._util.text import suggest
from ..errors import KvmnnError

_SOURCE_RUNNING = "checked on a running engine"
_COMPILED_CPP_NOTE = "checked on vectors"
_SOURCE_READ = "unchecked"


@dataclass(frozen=True)
class Backend:
    """Pack numbers of one backend."""

    #: Element type of K and V, fixed by the backend: x86 has no 16-bit core, so its caches are fp32 at any precision
    #: setting.
    dtype: str
    #: Packing of query tiles. They never enter an index or a size of K or V.
    eP: int
    #: Pack numbers of a float cache.
    lP: int
    hP: int
    eP8: int | None
    #: Pack numbers of an int8 cache; None if the backend has none.
    lP8: int | None
    hP8: int | None
    #: Processor or build, and how the numbers were verified: on bytes of a running engine; on vectors that the fork's
    #: own C++ wrote, compiled with them; or only read in the sources (unchecked).
    source: str


BACKENDS: dict[str, Backend] = {
    "generic": Backend("fp32", 16, 1, 4, 4, 16, 4, f"portable C, eP8 is 2 on ARM32; {_COMPILED_CPP_NOTE}"),
    "x86-sse": Backend("fp32", 12, 1, 4, 4, 16, 4, f"SSSE3 without AVX2; {_COMPILED_CPP_NOTE}"),
    "x86-avx2": Backend("fp32", 24, 1, 4, 4, 4, 8, f"AVX2, and the PyPI wheels on every processor; {_SOURCE_RUNNING}"),
    "x86-avx512": Backend(
        "fp32", 48, 1, 8, 4, 4, 64, f"built with MNN_AVX512, and VNNI, VL, BW and VBMI; {_SOURCE_RUNNING}"
    ),
    "arm32-fp32": Backend("fp32", 12, 1, 4, 2, 16, 4, f"ARM32 NEON; {_COMPILED_CPP_NOTE}"),
    "arm64-fp32": Backend("fp32", 12, 1, 8, 4, 16, 4, f"ARM64 NEON without dot products; {_COMPILED_CPP_NOTE}"),
    "arm64-fp32-sdot": Backend("fp32", 12, 1, 8, 12, 4, 8, f"ARM64 NEON with sdot; {_SOURCE_READ}"),
    "arm64-fp32-i8mm": Backend("fp32", 12, 1, 8, 10, 8, 8, f"ARM64 NEON with i8mm; {_SOURCE_READ}"),
    "arm64-fp16": Backend(
        "fp16", 12, 1, 16, 12, 4, 8, f"ARMv8.2 with fp16, precision low (int8: sdot); {_COMPILED_CPP_NOTE}"
    ),
    "arm64-fp16-i8mm": Backend(
        "fp16", 12, 1, 16, 10, 8, 8, f"ARMv8.2 with fp16, precision low (int8: i8mm); {_COMPILED_CPP_NOTE}"
    ),
    "arm32-fp16": Backend("fp16", 12, 1, 8, None, None, None, f"ARMv8.2 in 32 bits; {_COMPILED_CPP_NOTE}"),
    "arm64-sme2-fp32": Backend("fp32", 16, 1, 64, 16, 4, 32, f"SME2; {_COMPILED_CPP_NOTE}"),
    "arm64-sme2-fp16": Backend("fp16", 16, 2, 64, 16, 4, 32, f"SME2, precision low; {_COMPILED_CPP_NOTE}"),
    "arm64-bf16": Backend(
        "fp32", 12, 1, 8, 4, 16, 4, f"NEON, Precision_Low_BF16 (elements stay 4 bytes); {_SOURCE_READ}"
    ),
    "arm64-bf16-v86": Backend(
        "fp32", 12, 4, 8, 10, 8, 8, f"ARMv8.6, Precision_Low_BF16 (4-byte elements); {_SOURCE_READ}"
    ),
    "arm32-bf16": Backend("fp32", 12, 1, 4, 2, 16, 4, f"ARM32, Precision_Low_BF16 (4-byte elements); {_SOURCE_READ}"),
    "riscv-rvv": Backend("fp32", 16, 1, 4, 8, 16, 4, f"RISC-V vectors, upstream only; {_SOURCE_READ}"),
}


def get_backend(name: str) -> Backend:
    """Return the backend called `name`; `KvmnnError` for any other name."""
    if not isinstance(name, str):
        raise TypeError(f"backend must be a string, not {type(name).__name__}")
    try:
        return BACKENDS[name]
    except KeyError:
        suggestion = suggest(name, BACKENDS)
        raise KvmnnError(f"unknown backend {name!r}: expected one of {', '.join(BACKENDS)}{suggestion}") from None
