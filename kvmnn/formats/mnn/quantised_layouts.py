"""Packed files that fit no layout of floats: int8 layouts tried by their scales, and TQ3 and TQ4 rows named.

``attention_mode`` 9 and 10 keep K, or K and V, in int8; 11 to 14 keep 3 or 4 bits for a number and a scale for 32 of
them, so that a row of 64 dimensions has 28 or 36 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from ...dtypes import Bytes
from ...errors import SourceError
from ...files.mapped import MappedFile
from ...packed.addressing import EXPAND_CHUNK, FLASH_BLOCK
from ...packed.backends import BACKENDS
from ...packed.evidence import sample_layers
from ...packed.fitting import Fit, Geometry, describe, fits
from ...packed.inference import CLEAR_RATIO
from ...packed.layout import PackLayout
from .packed_files import PackedFiles

_INT8_KINDS: Final[tuple[Literal["keys", "both"], ...]] = ("keys", "both")
_MODES: Final = {"keys": 9, "both": 10}
_MAX_ROWS: Final = 512
_MAX_SCALE: Final = 1e4  # of int8 K: its range over 255
_BLOCK_DIMS: Final = 32
_BLOCK_BYTES: Final = {"TQ3": 14, "TQ4": 18}
_TQ_MODES: Final = {("TQ3", False): 11, ("TQ3", True): 12, ("TQ4", False): 13, ("TQ4", True): 14}


def try_int8(files: PackedFiles, geometry: Geometry, likely: Sequence[str]) -> list[Fit]:
    """Return the int8 layouts that sizes and scales agree with, the likeliest first; one alone where it stands out.

    Parameters
    ----------
    files, geometry
        Of known kv heads and head_dim, which fit no layout of floats.
    likely
        Backends, of several with the same layout the first of which is taken.
    """
    names = [geometry.backend] if geometry.backend else [*likely, *(name for name in BACKENDS if name not in likely)]
    found: dict[tuple[object, ...], Fit] = {}
    for name in filter(None, names):
        if BACKENDS[name].hP8 is None:
            continue
        for kind in _INT8_KINDS[: 1 if geometry.flash_block == "none" else 2]:  # V is int8 with flash attention alone
            asked = Geometry(
                kv_heads=geometry.kv_heads,
                head_dim=geometry.head_dim,
                backend=name,
                flash_block=geometry.flash_block or FLASH_BLOCK,
                int8=kind,
            )
            for fit in fits(asked, files.sizes):
                layout = fit.layout
                places = (layout.lP8, layout.hP8, kind, *((layout.hP, layout.dtype) if kind == "keys" else ()))
                if places not in found and _count_rows(files, fit):
                    found[places] = fit
    ranking = sorted(found.values(), key=lambda fit: -_measure(files, fit))
    if len(ranking) > 1 and _measure(files, ranking[0]) >= CLEAR_RATIO * _measure(files, ranking[1]):
        return ranking[:1]
    return ranking


def describe_int8(fit: Fit) -> str:
    """Return what was inferred, as a note."""
    kind = "both" if fit.layout.int8_values else "keys"
    parts = "K and V" if kind == "both" else "K"
    return (
        f"int8 {parts} inferred (--int8 {kind}, attention_mode {_MODES[kind]}): no layout of floats fits the sizes, "
        f"and scales are where those of {describe(fit.layout)} are"
    )


def _measure(files: PackedFiles, fit: Fit) -> float:
    """How far the first rows of some layers speak for a layout, by the means of dimensions of K, and of V of floats.

    V of int8 has a scale and a bias for each dimension, and so means of its own in any layout.
    """
    rows = min(_count_rows(files, fit), _MAX_ROWS)
    found = []
    for number in sample_layers(len(files.layers)):
        buffers = [MappedFile(path) for path in (files.layers[number].key, files.layers[number].value)]
        keys, values = (buffer.view(0, buffer.size) for buffer in buffers)
        pair = fit.layout.gather(keys, values, 0, rows, past=rows, capacity=fit.capacities[number])
        with np.errstate(all="ignore"):
            parts = pair[:1] if fit.layout.int8_values else pair
            found.append(float(np.prod([_measure_contrast(part) for part in parts])))
    least = min(found)
    return float(np.exp(np.mean(np.log(found)))) if least > 0 and np.isfinite(found).all() else 0.0


def _measure_contrast(rows: np.ndarray[Any, np.dtype[Any]]) -> float:
    numbers = rows.astype(np.float64)
    total = float(numbers.var())
    return float(numbers.mean(axis=1).var()) / total if total > 0 else 0.0


def _count_rows(files: PackedFiles, fit: Fit) -> int:
    """Rows of the first head of K up to the last that has a scale; 0 where some scale is no positive number."""
    keys = MappedFile(files.layers[0].key)
    size = fit.layout.key_head_bytes(fit.capacities[0])
    rows = {
        _count_scales(_read_scales(keys.view(head * size, size), fit.layout)) for head in range(fit.layout.kv_heads)
    }
    return min(*rows, fit.capacities[0])


def _read_scales(head: Bytes, layout: PackLayout) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    assert layout.lP8 is not None and layout.hP8 is not None
    codes = -(-layout.head_dim // layout.lP8) * layout.lP8 * layout.hP8
    groups = head.reshape(-1, codes + 8 * layout.hP8)
    return np.ascontiguousarray(groups[:, codes : codes + 4 * layout.hP8]).view("<f4").reshape(-1)


def _count_scales(scales: np.ndarray[tuple[int], np.dtype[np.float32]]) -> int:
    used = np.flatnonzero(scales)
    live = scales[: int(used[-1]) + 1] if used.size else scales[:0]
    return live.size if bool(np.isfinite(live).all() and (live > 0).all() and (live < _MAX_SCALE).all()) else 0


def refuse_rotated_codes(files: PackedFiles, geometry: Geometry) -> None:
    """Raise `SourceError` where sizes are those of TQ3 or TQ4 rows, which kvmnn does not read."""
    assert geometry.kv_heads is not None and geometry.head_dim is not None
    blocks, heads = geometry.head_dim // _BLOCK_DIMS, geometry.kv_heads
    plain = replace(geometry, int8=None, flash_block=geometry.flash_block or FLASH_BLOCK)
    for name, block_bytes in _BLOCK_BYTES.items():
        row = blocks * block_bytes
        capacities = [_divide(key_bytes, heads * row) for key_bytes, _ in files.sizes]
        if not row or None in capacities or any(capacity <= EXPAND_CHUNK for capacity in capacities if capacity):
            continue
        for both in (True, False):
            if all(
                _fits_values(plain, capacity or 0, key_bytes, value_bytes, both=both)
                for capacity, (key_bytes, value_bytes) in zip(capacities, files.sizes, strict=True)
            ):
                parts = "K and V are" if both else "K is"
                raise SourceError(
                    f"{files.path}: {parts} of {name} rows ({row} bytes for {geometry.head_dim} dims, attention_mode "
                    f"{_TQ_MODES[name, both]}), which kvmnn does not read: run the engine with attention_mode 8, or 9 "
                    "or 10 for int8"
                )


def _divide(number: int, unit: int) -> int | None:
    return number // unit if unit and number % unit == 0 else None


def _fits_values(geometry: Geometry, capacity: int, key_bytes: int, value_bytes: int, *, both: bool) -> bool:
    if both:
        return value_bytes == key_bytes
    return any(layout.value_bytes(capacity) == value_bytes for _, layout in geometry.candidates())
