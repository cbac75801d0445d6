"""Sizes and rotation of a model's layers, and the rows that profiles speak of (docs/format-profile.md, "Rows")."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from .._util.dataclass import dataclass
from ..arrays.cast import to_float32
from ..arrays.layer_cache import LayerCache
from ..dense.rope import RopeConfig, RopeFrequencies
from ..dtypes import Elements, Indices, Part, Positions
from ..errors import KvmnnError
from ..files.schema import JsonReader, Record

Rows = npt.NDArray[np.float64]
"""``[token, n]``: all heads of a token one after another, the words of a pair next to each other."""

MAX_ROW_ELEMENTS = 1 << 16
_RADIANS_PER_TURN_UNIT = 2 * np.pi / 2.0**64


def _describe_rope(rope: RopeFrequencies | None) -> dict[str, Any] | None:
    if rope is None:
        return None
    turns = [f"{turn:016x}" for turn in rope.turns.tolist()]
    return {"label": rope.label, "dims": rope.dims, "pairing": rope.pairing, "turns": turns}


@dataclass(frozen=True, kw_only=True)
class LayerGeometry(Record):
    """Sizes of a layer, and how its K is rotated."""

    kv_heads: int
    #: Elements of K, and of V, of a token in one head.
    head_dim: int
    value_dim: int
    #: Rotation of K; None where K is not rotated.
    rope: RopeFrequencies | None = field(metadata={"convert": _describe_rope})
    #: Tokens that a token attends to, itself included; None for all.
    window: int | None = None

    def __post_init__(self) -> None:
        if (
            min(self.kv_heads, self.head_dim, self.value_dim) < 1
            or self.kv_heads * max(self.head_dim, self.value_dim) > MAX_ROW_ELEMENTS
        ):
            raise KvmnnError(
                f"{self.kv_heads} heads of {self.head_dim} and {self.value_dim} elements: expected at least 1 of each "
                f"and at most {MAX_ROW_ELEMENTS:,} in a row"
            )
        if self.rope is not None and self.rope.dims > self.head_dim:
            raise KvmnnError(f"{self.rope.dims} elements of a head are rotated, and it has {self.head_dim}")

    @classmethod
    def from_json(cls, reader: JsonReader) -> LayerGeometry:
        """Read what `to_dict` returns; `ManifestError` for anything else."""
        rope = reader.get("rope")
        window = reader.get("window")
        try:
            return cls(
                kv_heads=reader.get("kv_heads").read_int(1),
                head_dim=reader.get("head_dim").read_int(1),
                value_dim=reader.get("value_dim").read_int(1),
                rope=None if rope.value is None else _read_rope(rope),
                window=None if window.value is None else window.read_int(1),
            )
        except KvmnnError as error:
            if str(error).startswith(reader.label):
                raise
            raise reader.error(f"a layer of sizes that fit ({error})") from None

    @classmethod
    def from_cache(
        cls, cache: LayerCache, rope: RopeConfig | RopeFrequencies | None, window: int | None = None
    ) -> LayerGeometry:
        """Return the geometry of a layer of a cache."""
        return cls(
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            value_dim=cache.value_dim,
            rope=RopeFrequencies.from_config(rope) if isinstance(rope, RopeConfig) else rope,
            window=window,
        )

    def get_dim(self, part: Part) -> int:
        """Return the elements of K or V of a token in one head."""
        return self.head_dim if part == "key" else self.value_dim

    def get_row_elements(self, part: Part) -> int:
        """Return the elements of a row of K or V."""
        return self.kv_heads * self.get_dim(part)

    @cached_property
    def pair_order(self) -> Indices:
        """Return, for each place of a head in a row, the element of K there: int64 ``[head_dim]``."""
        order = np.arange(self.head_dim, dtype=np.int64)
        if self.rope is not None and self.rope.pairing == "half":
            half = self.rope.dims // 2
            order[: self.rope.dims] = np.arange(self.rope.dims).reshape(2, half).T.reshape(-1)
        return order

    def get_order(self, part: Part) -> Indices:
        """Return the element at each place of a head in a row: `pair_order`, for V as well if its heads are as wide."""
        if self.get_dim(part) == self.head_dim:
            return self.pair_order
        return np.arange(self.value_dim, dtype=np.int64)

    def is_equivalent(self, geometry: LayerGeometry) -> bool:
        """Return whether sizes and rotation are the same."""
        sizes = [(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in (self, geometry)]
        if sizes[0] != sizes[1] or (self.rope is None) != (geometry.rope is None):
            return False
        return self.rope is None or geometry.rope is None or self.rope.is_equivalent(geometry.rope)

    def check_cache(self, cache: LayerCache) -> None:
        """Raise `KvmnnError` unless the layer of a cache has these sizes."""
        sizes, expected = ((layer.kv_heads, layer.head_dim, layer.value_dim) for layer in (cache, self))
        if sizes != expected:
            raise KvmnnError(
                f"layer {cache.layer}: has {sizes[0]} heads of {sizes[1]} (K) and {sizes[2]} (V) elements, the profile "
                f"{expected[0]} of {expected[1]} and {expected[2]}"
            )


def _read_rope(reader: JsonReader) -> RopeFrequencies:
    turns = []
    for entry in reader.get("turns").read_list(1, MAX_ROW_ELEMENTS // 2):
        text = entry.read_str()
        if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
            raise entry.error("16 hexadecimal digits")
        turns.append(int(text, 16))
    return RopeFrequencies(
        reader.get("dims").read_int(2),
        reader.get("pairing").read_str(),
        np.array(turns, np.uint64),
        reader.get("label").read_str(),
    )


def to_float_heads(elements: Elements) -> npt.NDArray[np.float64]:
    """Return K or V of any element type as float64, of the same shape."""
    dtype = dtypes.infer_dtype(elements).name
    words = np.ascontiguousarray(elements)
    values: npt.NDArray[np.float64] = (
        to_float32(words.view(np.uint8).reshape(-1), dtype).reshape(words.shape).astype(np.float64)
    )
    return values


def rotate_heads(
    values: npt.NDArray[np.float64], positions: Positions, rope: RopeFrequencies, sign: int
) -> npt.NDArray[np.float64]:
    """Rotate heads to their positions (`sign` 1) or back (-1).

    Parameters
    ----------
    values
        ``[head, token, head_dim]``, or with further axes in front of the head.
    positions
        int64 ``[token]``, or ``[head, token]``.
    """
    unique_positions, inverse = np.unique(positions, return_inverse=True)
    # 64-bit integers wrap around as angles do, and as signed ones they are the nearest angle to 0.
    units = (unique_positions.astype(np.uint64)[:, None] * rope.turns).view(np.int64)
    angles = units * _RADIANS_PER_TURN_UNIT
    table = np.exp(sign * 1j * angles)[inverse.reshape(positions.shape)]
    half, result = rope.dims // 2, values.copy()
    first, second = (
        (slice(0, half), slice(half, rope.dims))
        if rope.pairing == "half"
        else (slice(0, rope.dims, 2), slice(1, rope.dims, 2))
    )
    x, y = values[..., first], values[..., second]
    result[..., first] = x * table.real - y * table.imag
    result[..., second] = y * table.real + x * table.imag
    return result


def build_rows(cache: LayerCache, geometry: LayerGeometry) -> tuple[Rows, Rows]:
    """Return the rows of K, un-rotated, and of V: float64 ``[token, n]``.

    Raises
    ------
    KvmnnError
        For a layer of other sizes.
    """
    geometry.check_cache(cache)
    keys, values = to_float_heads(cache.keys), to_float_heads(cache.values)
    if geometry.rope is not None:
        with np.errstate(invalid="ignore"):
            keys = rotate_heads(keys, cache.positions, geometry.rope, -1)
    rows = [
        heads[..., geometry.get_order(part)].transpose(1, 0, 2).reshape(cache.tokens, -1)
        for part, heads in zip(dtypes.PARTS, (keys, values), strict=True)
    ]
    return rows[0], rows[1]


def restore_heads(rows: Rows, geometry: LayerGeometry, part: Part, positions: Positions) -> Rows:
    """Return rows of K or V as heads ``[kv_head, token, dim]``, K rotated to its positions: undo `build_rows`."""
    order = geometry.get_order(part)
    heads = np.empty((geometry.kv_heads, len(rows), len(order)))
    heads[..., order] = rows.reshape(len(rows), geometry.kv_heads, -1).transpose(1, 0, 2)
    return rotate_heads(heads, positions, geometry.rope, 1) if part == "key" and geometry.rope is not None else heads
