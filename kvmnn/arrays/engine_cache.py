"""The description of another engine's cache: geometry, types, positions, token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import format_range, pluralize
from ..dtypes import Indices, Positions
from ..files.schema import Record, json_key
from ..packed.cache_info import PositionRuns
from ..packed.cache_info import merge_runs as joined_runs
from .llama_transforms import Transform
from .naming import parse_conventional_name


def positions_to_runs(positions: Positions) -> PositionRuns:
    """Return positions as ``(begin, size)`` runs, in their order."""
    ends = np.flatnonzero(np.diff(positions) != 1) + 1
    begins = np.concatenate([[0], ends]) if positions.size else ends
    sizes = np.diff(np.append(begins, positions.size))
    return joined_runs((int(positions[b]), int(n)) for b, n in zip(begins, sizes, strict=True))


def _list_ids(token_ids: Indices | None) -> list[int] | None:
    ids: list[int] | None = None if token_ids is None else np.asarray(token_ids).tolist()
    return ids


@dataclass(frozen=True, eq=False)
class BatchText(Record):
    """One text of a batch whose arrays have padding."""

    #: int64, ascending: positions of its tokens in the padded text, counted as in `EngineCacheInfo.positions`; all
    #: other positions are padding.
    positions: Positions = field(metadata={"convert": positions_to_runs})
    #: Token ids of the text; None without ids.
    token_ids: Indices | None = field(default=None, metadata={"convert": _list_ids})


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineCacheInfo(Record):
    """Description of a cache that another engine wrote to a file, or keeps in memory."""

    #: Name of the engine: ``"llama.cpp"``, ``"MLX"`` ...
    engine: str
    #: The engine's name for this kind of cache: ``"session"``, ``"prompt_cache"`` ...
    kind: str
    #: Number of layers in the arrays.
    layers: int
    #: kv heads of each layer; None if unknown, or if layers differ.
    kv_heads: int | None
    #: kv heads of each layer, if layers differ.
    layer_kv_heads: tuple[int, ...] = field(default=(), metadata={"omit": True})
    head_dim: int | None
    layer_head_dims: tuple[int, ...] = field(default=(), metadata={"omit": True})
    #: Number of tokens in each layer; the maximum, if layers differ.
    tokens: int
    #: Number of texts in the batch; 1 if arrays have no batch axis.
    batch: int = 1
    #: Stored element types under the engine's own names: K of all layers, then V of all layers.
    types: tuple[str, ...]
    #: Names of the quantised types from which the arrays were dequantised.
    dequantised: tuple[str, ...] = ()
    #: Bits that a number takes in the file in each of those types, scales included.
    type_bits: Mapping[str, float] = field(default_factory=dict, metadata={"json": False})
    #: Transforms that only this engine applied to K and V: names in `llama_transforms.TRANSFORMS`.
    altered: tuple[Transform, ...] = ()
    #: Transforms that the engine may have applied; the file does not record them.
    perhaps_altered: tuple[Transform, ...] = ()
    #: int64: position of each stored token in its text, in the order of the arrays; None if unknown, or if layers
    #: contain different tokens.
    positions: Positions | None = field(default=None, metadata={"json": False})
    #: Positions of each layer, if layers contain different tokens: some all of them, others those in a sliding window.
    layer_positions: tuple[Positions, ...] | None = field(default=None, metadata={"json": False})
    #: Whether tokens of the text are missing but unknown.
    positions_unknown: bool = field(default=False, metadata={"omit": True})
    #: Token ids that are stored next to K and V; None without ids.
    token_ids: Indices | None = field(default=None, metadata={"convert": _list_ids})
    #: Texts of a batch with padding or with token ids; empty if there is neither.
    texts: tuple[BatchText, ...] = field(default=(), metadata={"omit": True})
    #: Properties that only this engine has, as JSON values.
    details: Mapping[str, Any] = field(default_factory=dict, metadata={"inline": True})
    #: Bytes of unused capacity for K and V in the file, after the valid tokens.
    unused_bytes: int = field(default=0, metadata={"json": False})

    @property
    @json_key("positions", after="perhaps_altered")
    def position_runs(self) -> PositionRuns | None:
        """Return the positions as ``(begin, size)`` runs, in the order of the arrays."""
        return None if self.positions is None else positions_to_runs(self.positions)

    @property
    def layer_position_runs(self) -> tuple[PositionRuns, ...] | None:
        """Return the positions of each layer as ``(begin, size)`` runs; None if unknown."""
        if self.layer_positions is not None:
            return tuple(map(positions_to_runs, self.layer_positions))
        return None if self.position_runs is None else (self.position_runs,) * self.layers

    @property
    @json_key("layer_positions", after="position_runs", omit=True)
    def _own_layer_runs(self) -> tuple[PositionRuns, ...] | None:
        return None if self.layer_positions is None else self.layer_position_runs

    @property
    def is_contiguous_prefix(self) -> bool:
        """Return whether the arrays contain all of the first tokens of one text, in order."""
        if self.positions_unknown or self.has_padding:
            return False
        return self.layer_position_runs is None or set(self.layer_position_runs) == {((0, self.tokens),)}

    @property
    def has_padding(self) -> bool:
        """Return whether any text of the batch is shorter than the arrays, so that some of its rows are padding."""
        return any(text.positions.size < self.tokens for text in self.texts)

    @property
    def is_ascending(self) -> bool:
        """Return whether positions increase from token to token, so that the arrays may belong to one text."""
        all_positions = (self.positions,) if self.layer_positions is None else self.layer_positions
        return all(positions is None or bool((np.diff(positions) > 0).all()) for positions in all_positions)

    def __str__(self) -> str:
        heads = "kv heads unknown" if self.kv_heads is None else pluralize(self.kv_heads, "kv head")
        heads = f"{format_range(sorted(set(self.layer_kv_heads)))} kv heads" if self.layer_kv_heads else heads
        dims = format_range(sorted(set(self.layer_head_dims))) if self.layer_head_dims else self.head_dim
        shape = heads if dims is None else f"{heads} of {dims}"
        batch = f", batch of {self.batch}" if self.batch != 1 else ""
        if self.has_padding:
            batch += f" ({format_range(sorted({text.positions.size for text in self.texts}))} tokens and padding)"
        keys, values = (
            "/".join(sorted(set(types))) for types in (self.types[: self.layers], self.types[self.layers :])
        )
        types_text = keys if keys == values or not values else f"K {keys}, V {values}"
        return (
            f"{self.engine} {self.kind}: {pluralize(self.layers, 'layer')}, {shape}, "
            f"{pluralize(self.tokens, 'token')}{batch}, {types_text}{self._describe_gaps()}"
        )

    def _describe_gaps(self) -> str:
        if self.positions_unknown:
            return ", positions unknown"
        if self.layer_positions is not None:
            sizes = sorted({positions.size for positions in self.layer_positions})
            return f", of which layers hold {format_range(sizes)}"
        if self.is_contiguous_prefix or self.positions is None:
            return ""
        first_position, last_position = int(self.positions.min()), int(self.positions.max())
        return (
            f", positions {format_range([first_position, last_position])} in "
            f"{pluralize(len(self.position_runs or ()), 'run')}"
        )


def select_engine_layers(
    cache: EngineCacheInfo, names: Iterable[str], selected_names: Iterable[str]
) -> EngineCacheInfo | None:
    """Return a cache's description for the arrays `selected_names` among `names`; None if unknown."""
    layers, selected_layers = parse_layers(names), parse_layers(selected_names)
    if len(layers) != cache.layers:
        return cache if cache.layer_positions is None else None
    indices = [layers.index(layer) for layer in selected_layers]
    positions = cache.layer_positions and tuple(cache.layer_positions[index] for index in indices)
    types = [cache.types[index + begin] for begin in range(0, len(cache.types), cache.layers) for index in indices]
    return replace(
        cache,
        layers=len(selected_layers),
        layer_kv_heads=tuple(cache.layer_kv_heads[index] for index in indices if cache.layer_kv_heads),
        layer_head_dims=tuple(cache.layer_head_dims[index] for index in indices if cache.layer_head_dims),
        types=tuple(types) if len(cache.types) % cache.layers == 0 else cache.types,
        tokens=max(map(len, positions)) if positions else cache.tokens,
        layer_positions=positions,
    )


def parse_layers(names: Iterable[str]) -> list[int]:
    """Return the layers of arrays by their names, ascending."""
    return sorted({parsed_name.layer for parsed_name in map(parse_conventional_name, names) if parsed_name is not None})
