"""The document beside a compressed cache: what was done to it, and the true positions that its tokens stand for."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...bundle.beside import POSITIONS_NAME
from ...dtypes import Positions
from ...errors import KvmnnError, ManifestError, SourceError
from ...files.json_document import JsonReader, parse_document, read_bounded
from ...formats.noted_positions import PositionsSidecar
from ...packed.cache_info import CacheInfo
from ...packed.summary import format_runs

SCHEMA = "kvmnn-compressed-kv"
SCHEMA_VERSION = 1
SIDECAR_SUFFIX = ".json"
_MAX_SIDECAR_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class PositionSpans:
    """True positions of the tokens of a cache: each stands for those from `positions` up to before `ends`.

    Parameters
    ----------
    positions, ends
        ``[tokens]``.
    next_position
        True position of the next token.
    """

    positions: Positions
    ends: Positions
    next_position: int

    @classmethod
    def from_token_count(cls, tokens: int) -> PositionSpans:
        """A cache in which every token is still there."""
        positions = np.arange(tokens, dtype=np.int64)
        return cls(positions, positions + 1, tokens)

    def take_first(self, tokens: int) -> PositionSpans:
        """Those of the first `tokens` tokens."""
        if tokens >= self.positions.size:
            return self
        ends = self.ends[:tokens]
        return PositionSpans(self.positions[:tokens], ends, int(ends.max(initial=0)))

    def to_list(self) -> list[list[int]]:
        """``[first, end]`` for each token."""
        return np.stack([self.positions, self.ends], axis=-1).tolist()  # type: ignore[no-any-return]


def render_sidecar(fields: dict[str, Any], spans: PositionSpans) -> bytes:
    """The document: `fields`, which include ``next_position``, and the spans on one line behind them."""
    header_text = json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **fields}, indent=2)
    spans_text = json.dumps(spans.to_list(), separators=(",", ":"))
    return f'{header_text[:-2]},\n  "positions": {spans_text}\n}}\n'.encode()


def read_spans(path: str, tokens: int) -> PositionSpans | None:
    """The spans of the cache file `path`, from the document beside it; None if there is none of this kind.

    Raises
    ------
    KvmnnError
        For a document that is damaged or belongs to a cache of another length.
    """
    root = _read_sidecar(path)
    if root is None:
        return None
    sidecar = path + SIDECAR_SUFFIX
    version = root.get("schema_version").read_int(1)
    if version != SCHEMA_VERSION:
        raise KvmnnError(f"{sidecar}: schema_version is {version}, this kvmnn reads {SCHEMA_VERSION}")
    next_position = root.get("next_position").read_int(0)
    pairs = [entry.read_list(2, 2) for entry in root.get("positions").read_list()]
    if len(pairs) != tokens:
        raise KvmnnError(f"{sidecar}: has positions for {len(pairs)} tokens, {path} has {tokens}")
    spans = np.array([[number.read_int(0) for number in pair] for pair in pairs], np.int64).reshape(tokens, 2)
    positions, ends = spans[:, 0], spans[:, 1]
    if (ends <= positions).any() or int(ends.max(initial=0)) > next_position:
        raise KvmnnError(f"{sidecar}: positions are not spans within the {next_position} tokens seen")
    return PositionSpans(positions, ends, next_position)


def get_cache_spans(path: str, cache: CacheInfo) -> PositionSpans:
    """The positions that the tokens of a packed cache have; they are one list for all layers.

    Where the last tokens of the text were dropped, only its ids (`CacheInfo.token_ids`) say how many they were.

    Raises
    ------
    SourceError
        For layers that hold different tokens.
    """
    first_layer, *other_layers = cache.layers
    for layer in other_layers:
        if layer.positions != first_layer.positions:
            raise SourceError(
                f"{path}: layers {first_layer.layer} and {layer.layer} hold different tokens "
                f"({format_runs(first_layer.positions)}; {format_runs(layer.positions)}): a compressed cache "
                "has the same in all layers"
            )
    positions = np.concatenate(
        [np.arange(begin, begin + size, dtype=np.int64) for begin, size in first_layer.positions]
    )
    num_seen = int(positions.max()) + 1
    return PositionSpans(positions, positions + 1, max(num_seen, cache.token_ids.count if cache.token_ids else 0))


def get_sidecar_spans(path: str, sidecar_positions: PositionsSidecar) -> PositionSpans:
    """Return the positions that ``positions.json`` states of the tokens of a folder, one list for all layers.

    Raises
    ------
    SourceError
        For layers or heads that hold different tokens.
    """
    first_positions = sidecar_positions.positions[0]
    if any(
        layer_positions.ndim > 1 or not np.array_equal(layer_positions, first_positions)
        for layer_positions in sidecar_positions.positions
    ):
        raise SourceError(
            f"{path}: layers or heads hold different tokens ({POSITIONS_NAME}): a compressed cache has the same in all"
        )
    next_position = int(first_positions[-1]) + 1 if first_positions.size else 0
    if not sidecar_positions.is_rerotated:
        next_position = max(next_position, sidecar_positions.tokens_seen or 0)
    return PositionSpans(first_positions, first_positions + 1, next_position)


def read_axes(path: str) -> str | None:
    """The letters of the axes of the arrays in the cache file `path`, from the document beside it; None without it."""
    root = _read_sidecar(path)
    axes = root.value.get("axes") if root is not None else None
    return axes if isinstance(axes, str) else None


def _read_sidecar(path: str) -> JsonReader | None:
    """The document beside the cache file `path`; None if there is none of this kind."""
    sidecar = path + SIDECAR_SUFFIX
    if not os.path.isfile(sidecar):
        return None
    try:
        root = parse_document(read_bounded(Path(sidecar), _MAX_SIDECAR_BYTES), sidecar, _MAX_SIDECAR_BYTES)
    except (OSError, ManifestError, SourceError):
        return None
    return root if isinstance(root.value, dict) and root.value.get("schema") == SCHEMA else None
