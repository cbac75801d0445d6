"""The SIMD level of all leaf kernels (simd.h): the fastest that this processor runs, or what KVMNN_SIMD names."""

import os

from .errors import KvmnnError

LEVEL_NAMES = ("baseline", "avx2", "avx512")
"""Names by level: the target's baseline (SSE2, NEON); AVX2 with F16C, BMI and BMI2; AVX-512 of Ice Lake and Zen 4."""


def simd_level() -> str:
    """Return the name of the level in use."""
    return LEVEL_NAMES[active_level]


def simd_levels() -> list:
    """Return the names of the levels that this build and this processor support, the fastest last."""
    return [name for i, name in enumerate(LEVEL_NAMES) if kvmnn_simd_is_supported(i)]


def set_simd_level(name: str) -> None:
    """Use the level called `name` from now on; for tests and measurements. `KvmnnError` if it is not available."""
    global active_level
    if name not in simd_levels():
        raise KvmnnError(f"SIMD level {name!r} is not available here: expected one of {', '.join(simd_levels())}")
    active_level = LEVEL_NAMES.index(name)


set_simd_level(os.environ.get("KVMNN_SIMD") or simd_levels().pop())
