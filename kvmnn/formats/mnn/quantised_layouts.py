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
from ...packed.evidence import choose_sampled_layers
from ...packed.fitting import LayoutMatch, PackedGeometry, describe_layout, find_matches
from ...packed.inference import CLEAR_CONTRAST_RATIO
from ...packed.layout import PackLayout
from .packed_files import PackedFiles

_INT8_KINDS: Final[tuple[Literal["keys", "both"], ...]] = ("keys", "both")
_ATTENTION_MODE_BY_INT8_KIND: Final = {"keys": 9, "both": 10}
_MAX_MEASURED_ROWS: Final = 512
_MAX_KEY_SCALE: Final = 1e4  # of int8 K: its range over 255
_TQ_BLOCK_DIMS: Final = 32
_TQ_BLOCK_BYTES: Final = {"TQ3": 14, "TQ4": 18}
_ATTENTION_MODE_BY_TQ_KIND: Final = {("TQ3", False): 11, ("TQ3", True): 12, ("TQ4", False): 13, ("TQ4", True): 14}


def find_int8_matches(
    files: PackedFiles, geometry: PackedGeometry, likely_backends: Sequence[str]
) -> list[LayoutMatch]:
    """Return the int8 layouts that sizes and scales agree with, the likeliest first; one alone where it stands out.

    Parameters
    ----------
    files, geometry
        Of known kv heads and head_dim, which fit no layout of floats.
    likely_backends
        Backends, of several with the same layout the first of which is taken.
    """
    names = (
        [geometry.backend]
        if geometry.backend
        else [*likely_backends, *(name for name in BACKENDS if name not in likely_backends)]
    )
    match_by_placement: dict[tuple[object, ...], LayoutMatch] = {}
    for name in filter(None, names):
        if BACKENDS[name].hP8 is None:
            continue
        for int8_kind in _INT8_KINDS[
            : 1 if geometry.flash_block == "none" else 2
        ]:  # V is int8 with flash attention alone
            trial_geometry = PackedGeometry(
                kv_heads=geometry.kv_heads,
                head_dim=geometry.head_dim,
                backend=name,
                flash_block=geometry.flash_block or FLASH_BLOCK,
                int8=int8_kind,
            )
            for match in find_matches(trial_geometry, files.sizes):
                layout = match.layout
                placement_key = (
                    layout.lP8,
                    layout.hP8,
                    int8_kind,
                    *((layout.hP, layout.dtype) if int8_kind == "keys" else ()),
                )
                if placement_key not in match_by_placement and _count_scaled_rows(files, match):
                    match_by_placement[placement_key] = match
    ranking = sorted(match_by_placement.values(), key=lambda match: -_measure_match(files, match))
    if len(ranking) > 1 and _measure_match(files, ranking[0]) >= CLEAR_CONTRAST_RATIO * _measure_match(
        files, ranking[1]
    ):
        return ranking[:1]
    return ranking


def describe_int8(match: LayoutMatch) -> str:
    """Return what was inferred, as a note."""
    int8_kind = "both" if match.layout.int8_values else "keys"
    parts_text = "K and V" if int8_kind == "both" else "K"
    return (
        f"int8 {parts_text} inferred (--int8 {int8_kind}, attention_mode {_ATTENTION_MODE_BY_INT8_KIND[int8_kind]}): "
        f"no layout of floats fits the sizes, "
        f"and scales are where those of {describe_layout(match.layout)} are"
    )


def _measure_match(files: PackedFiles, match: LayoutMatch) -> float:
    """How far the first rows of some layers speak for a layout, by the means of dimensions of K, and of V of floats.

    V of int8 has a scale and a bias for each dimension, and so means of its own in any layout.
    """
    num_rows = min(_count_scaled_rows(files, match), _MAX_MEASURED_ROWS)
    contrasts = []
    for layer_index in choose_sampled_layers(len(files.layers)):
        buffers = [MappedFile(path) for path in (files.layers[layer_index].key, files.layers[layer_index].value)]
        keys, values = (buffer.view(0, buffer.size) for buffer in buffers)
        row_pair = match.layout.gather(
            keys, values, 0, num_rows, past_length=num_rows, capacity=match.capacities[layer_index]
        )
        with np.errstate(all="ignore"):
            measured_parts = row_pair[:1] if match.layout.int8_values else row_pair
            contrasts.append(float(np.prod([_measure_contrast(part) for part in measured_parts])))
    min_contrast = min(contrasts)
    return float(np.exp(np.mean(np.log(contrasts)))) if min_contrast > 0 and np.isfinite(contrasts).all() else 0.0


def _measure_contrast(rows: np.ndarray[Any, np.dtype[Any]]) -> float:
    values = rows.astype(np.float64)
    total_variance = float(values.var())
    return float(values.mean(axis=1).var()) / total_variance if total_variance > 0 else 0.0


def _count_scaled_rows(files: PackedFiles, match: LayoutMatch) -> int:
    """Rows of the first head of K up to the last that has a scale; 0 where some scale is no positive number."""
    keys = MappedFile(files.layers[0].key)
    head_bytes = match.layout.key_head_bytes(match.capacities[0])
    row_counts = {
        _count_scales(_read_scales(keys.view(head * head_bytes, head_bytes), match.layout))
        for head in range(match.layout.kv_heads)
    }
    return min(*row_counts, match.capacities[0])


def _read_scales(head_data: Bytes, layout: PackLayout) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    assert layout.lP8 is not None and layout.hP8 is not None
    code_bytes = -(-layout.head_dim // layout.lP8) * layout.lP8 * layout.hP8
    groups = head_data.reshape(-1, code_bytes + 8 * layout.hP8)
    return np.ascontiguousarray(groups[:, code_bytes : code_bytes + 4 * layout.hP8]).view("<f4").reshape(-1)


def _count_scales(scales: np.ndarray[tuple[int], np.dtype[np.float32]]) -> int:
    nonzero_indices = np.flatnonzero(scales)
    used_scales = scales[: int(nonzero_indices[-1]) + 1] if nonzero_indices.size else scales[:0]
    return (
        used_scales.size
        if bool(np.isfinite(used_scales).all() and (used_scales > 0).all() and (used_scales < _MAX_KEY_SCALE).all())
        else 0
    )


def refuse_rotated_codes(files: PackedFiles, geometry: PackedGeometry) -> None:
    """Raise `SourceError` where sizes are those of TQ3 or TQ4 rows, which kvmnn does not read."""
    assert geometry.kv_heads is not None and geometry.head_dim is not None
    num_blocks, num_heads = geometry.head_dim // _TQ_BLOCK_DIMS, geometry.kv_heads
    float_geometry = replace(geometry, int8=None, flash_block=geometry.flash_block or FLASH_BLOCK)
    for name, block_bytes in _TQ_BLOCK_BYTES.items():
        row_bytes = num_blocks * block_bytes
        capacities = [_divide_exactly(key_bytes, num_heads * row_bytes) for key_bytes, _ in files.sizes]
        if not row_bytes or None in capacities or any(capacity <= EXPAND_CHUNK for capacity in capacities if capacity):
            continue
        for is_both in (True, False):
            if all(
                _matches_value_sizes(float_geometry, capacity or 0, key_bytes, value_bytes, is_both=is_both)
                for capacity, (key_bytes, value_bytes) in zip(capacities, files.sizes, strict=True)
            ):
                parts_text = "K and V are" if is_both else "K is"
                raise SourceError(
                    f"{files.path}: {parts_text} of {name} rows ({row_bytes} bytes for {geometry.head_dim} dims, "
                    f"attention_mode "
                    f"{_ATTENTION_MODE_BY_TQ_KIND[name, is_both]}), which kvmnn does not read: run the engine with "
                    f"attention_mode 8, or 9 "
                    "or 10 for int8"
                )


def _divide_exactly(number: int, divisor: int) -> int | None:
    return number // divisor if divisor and number % divisor == 0 else None


def _matches_value_sizes(
    geometry: PackedGeometry, capacity: int, key_bytes: int, value_bytes: int, *, is_both: bool
) -> bool:
    if is_both:
        return value_bytes == key_bytes
    return any(layout.value_bytes(capacity) == value_bytes for _, layout in geometry.list_candidates())
