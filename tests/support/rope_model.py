"""Rotary positions as complex numbers in float64, written from the paper and without kvmnn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def plain_frequencies(theta: float, dims: int) -> Floats:
    """Radians a position of each pair."""
    return np.asarray(theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims))


def rotate(
    keys: npt.NDArray[np.floating],
    positions: Sequence[int] | npt.NDArray[np.int64],
    frequencies: Floats,
    *,
    interleaved: bool = False,
) -> Floats:
    """Rotate ``[head, token, head_dim]`` by positions; elements beyond the pairs stay as they are."""
    result = keys.astype(np.float64)
    dims = 2 * len(frequencies)
    first = slice(0, dims, 2) if interleaved else slice(0, dims // 2)
    second = slice(1, dims, 2) if interleaved else slice(dims // 2, dims)
    numbers = result[..., first] + 1j * result[..., second]
    numbers = numbers * np.exp(1j * np.asarray(positions, np.float64)[:, None] * frequencies)
    result[..., first], result[..., second] = numbers.real, numbers.imag
    return result
