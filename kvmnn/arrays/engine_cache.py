"""What a cache of another engine says of itself, as found: geometry, types, positions, token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..dtypes import Indices, Positions
from ..packed.cache_info import Ranges
from ..packed.cache_info import joined as joined_runs
from ..text import count, span
from .names import conventional
from .undoing import Undo


@dataclass(frozen=True, eq=False)
class BatchText:
    """One text of a batch whose arrays have padding.

    Parameters
    ----------
    positions
        int64, ascending: where in the padded text its tokens stand, as `EngineCache.positions` counts; the others are
        padding.
    token_ids
        Those of its tokens; None where there are none.
    """

    positions: Positions
    token_ids: Indices | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineCache:
    """A cache that another engine wrote, or that lives in it.

    Parameters
    ----------
    engine
        What people call it: ``"llama.cpp"``, ``"MLX"`` ...
    kind
        What the engine calls such a cache: ``"session"``, ``"prompt_cache"`` ...
    layers
        How many the arrays are of.
    kv_heads, head_dim
        Of a layer; None where nothing says them, and where layers differ.
    layer_kv_heads, layer_head_dims
        Of each layer, where they differ.
    tokens
        Stored in each layer; the most, where layers hold different ones.
    types
        Of the elements as they are stored, by the engine's own names: K of all layers, then V of all layers.
    batch
        Texts side by side; 1 where arrays have no such axis.
    positions
        int64: where each stored token stands in its text, in the order of the arrays; None where nothing says it, and
        where layers hold different tokens.
    layer_positions
        The same for each layer, where they hold different tokens: some of them all, others those in a sliding window.
    positions_unknown
        Whether tokens of the text are missing, and nothing tells which.
    token_ids
        Those that are stored beside K and V; None where there are none.
    texts
        Of a batch with padding, or with token ids: its texts. Empty where all arrays are tokens, and no ids are there.
    dequantised
        Names of types whose blocks the arrays hold as the numbers that these stand for.
    room_bytes
        Bytes of K and V in the file that are room behind the valid tokens.
    altered
        What the engine surely did to K and V, and other engines do not: names of `UNDOABLE` (`kvmnn.arrays.undo`).
    perhaps_altered
        What it may have done, and nothing says.
    details
        What only this engine has, as JSON values.
    """

    engine: str
    kind: str
    layers: int
    kv_heads: int | None
    head_dim: int | None
    tokens: int
    types: tuple[str, ...]
    layer_kv_heads: tuple[int, ...] = ()
    layer_head_dims: tuple[int, ...] = ()
    batch: int = 1
    positions: Positions | None = None
    layer_positions: tuple[Positions, ...] | None = None
    positions_unknown: bool = False
    token_ids: Indices | None = None
    texts: tuple[BatchText, ...] = ()
    dequantised: tuple[str, ...] = ()
    room_bytes: int = 0
    altered: tuple[Undo, ...] = ()
    perhaps_altered: tuple[Undo, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> Ranges | None:
        """The positions as ``(begin, size)`` runs, in the order of the arrays."""
        return None if self.positions is None else runs_of(self.positions)

    @property
    def layer_runs(self) -> tuple[Ranges, ...] | None:
        """The runs of each layer; None where nothing says them."""
        if self.layer_positions is not None:
            return tuple(map(runs_of, self.layer_positions))
        return None if self.runs is None else (self.runs,) * self.layers

    @property
    def is_whole(self) -> bool:
        """Whether the arrays hold the first tokens of one text, in order and all: nothing was erased."""
        if self.positions_unknown or self.has_padding:
            return False
        return self.layer_runs is None or set(self.layer_runs) == {((0, self.tokens),)}

    @property
    def has_padding(self) -> bool:
        """Whether texts of the batch have rows that are no tokens."""
        return any(text.positions.size < self.tokens for text in self.texts)

    @property
    def ascends(self) -> bool:
        """Whether every token stands behind the one before it, so that the arrays may be of one text."""
        said = (self.positions,) if self.layer_positions is None else self.layer_positions
        return all(each is None or bool((np.diff(each) > 0).all()) for each in said)

    def to_dict(self) -> dict[str, Any]:
        """The description as JSON values; positions as runs."""
        return {
            "engine": self.engine,
            "kind": self.kind,
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            **({"layer_kv_heads": list(self.layer_kv_heads)} if self.layer_kv_heads else {}),
            "head_dim": self.head_dim,
            **({"layer_head_dims": list(self.layer_head_dims)} if self.layer_head_dims else {}),
            "tokens": self.tokens,
            "batch": self.batch,
            "types": list(self.types),
            "dequantised": list(self.dequantised),
            "altered": list(self.altered),
            "perhaps_altered": list(self.perhaps_altered),
            "positions": None if self.runs is None else [list(run) for run in self.runs],
            **({"layer_positions": self._by_layer()} if self.layer_positions is not None else {}),
            **({"positions_unknown": True} if self.positions_unknown else {}),
            "token_ids": None if self.token_ids is None else np.asarray(self.token_ids).tolist(),
            **({"texts": [text_document(text) for text in self.texts]} if self.texts else {}),
            **self.details,
        }

    def __str__(self) -> str:
        heads = "kv heads unknown" if self.kv_heads is None else count(self.kv_heads, "kv head")
        heads = f"{span(sorted(set(self.layer_kv_heads)))} kv heads" if self.layer_kv_heads else heads
        dims = span(sorted(set(self.layer_head_dims))) if self.layer_head_dims else self.head_dim
        shape = heads if dims is None else f"{heads} of {dims}"
        batch = f", batch of {self.batch}" if self.batch != 1 else ""
        if self.has_padding:
            batch += f" ({span(sorted({text.positions.size for text in self.texts}))} tokens and padding)"
        said = (
            f"{self.engine} {self.kind}: {count(self.layers, 'layer')}, {shape}, {count(self.tokens, 'token')}{batch}"
        )
        return f"{said}, {self._types()}{self._gaps()}"

    def _by_layer(self) -> list[list[list[int]]]:
        return [[list(run) for run in runs] for runs in self.layer_runs or ()]

    def _types(self) -> str:
        keys, values = sorted(set(self.types[: self.layers])), sorted(set(self.types[self.layers :]))
        return "/".join(keys) if keys == values or not values else f"K {'/'.join(keys)}, V {'/'.join(values)}"

    def _gaps(self) -> str:
        if self.positions_unknown:
            return ", positions unknown"
        if self.layer_positions is not None:
            held = sorted({each.size for each in self.layer_positions})
            return f", of which layers hold {span(held)}"
        if self.is_whole or self.positions is None:
            return ""
        least, most = int(self.positions.min()), int(self.positions.max())
        return f", positions {span([least, most])} in {count(len(self.runs or ()), 'run')}"


def of_part(cache: EngineCache, names: Iterable[str], chosen: Iterable[str]) -> EngineCache | None:
    """What is said of some of the arrays of a cache, by the names of all and of these; None where that is not known."""
    layers, kept = layers_of(names), layers_of(chosen)
    if len(layers) != cache.layers:
        return cache if cache.layer_positions is None else None
    places = [layers.index(layer) for layer in kept]
    by_layer = cache.layer_positions and tuple(cache.layer_positions[place] for place in places)
    types = [cache.types[place + begin] for begin in range(0, len(cache.types), cache.layers) for place in places]
    return replace(
        cache,
        layers=len(kept),
        layer_kv_heads=tuple(cache.layer_kv_heads[place] for place in places if cache.layer_kv_heads),
        layer_head_dims=tuple(cache.layer_head_dims[place] for place in places if cache.layer_head_dims),
        types=tuple(types) if len(cache.types) % cache.layers == 0 else cache.types,
        tokens=max(map(len, by_layer)) if by_layer else cache.tokens,
        layer_positions=by_layer,
    )


def layers_of(names: Iterable[str]) -> list[int]:
    """The layers that arrays are of by their names, ascending."""
    return sorted({said.layer for said in map(conventional, names) if said is not None})


def text_document(text: BatchText) -> dict[str, Any]:
    """Return a text of a batch as JSON values; positions as runs."""
    ids = None if text.token_ids is None else np.asarray(text.token_ids).tolist()
    return {"positions": [list(run) for run in runs_of(text.positions)], "token_ids": ids}


def runs_of(positions: Positions) -> Ranges:
    """Positions as ``(begin, size)`` runs, in their order."""
    ends = np.flatnonzero(np.diff(positions) != 1) + 1
    begins = np.concatenate([[0], ends]) if positions.size else ends
    sizes = np.diff(np.append(begins, positions.size))
    return joined_runs((int(positions[b]), int(n)) for b, n in zip(begins, sizes, strict=True))
