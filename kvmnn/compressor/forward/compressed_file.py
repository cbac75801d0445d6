"""The document beside a compressed cache: what was done to it, and the true positions that its tokens stand for."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...bundle.beside import POSITIONS
from ...dtypes import Positions
from ...errors import KvmnnError, ManifestError, SourceError
from ...files.json_document import Node, parse, read_bounded
from ...formats.noted_positions import Noted
from ...packed.cache_info import CacheInfo
from ...packed.summary import runs_text

SCHEMA = "kvmnn-compressed-kv"
SCHEMA_VERSION = 1
SUFFIX = ".json"
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Spans:
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
    def of_plain(cls, tokens: int) -> Spans:
        """A cache in which every token is still there."""
        positions = np.arange(tokens, dtype=np.int64)
        return cls(positions, positions + 1, tokens)

    def first(self, tokens: int) -> Spans:
        """Those of the first `tokens` tokens."""
        if tokens >= self.positions.size:
            return self
        ends = self.ends[:tokens]
        return Spans(self.positions[:tokens], ends, int(ends.max(initial=0)))

    def to_list(self) -> list[list[int]]:
        """``[first, end]`` for each token."""
        return np.stack([self.positions, self.ends], axis=-1).tolist()  # type: ignore[no-any-return]


def render(fields: dict[str, Any], spans: Spans) -> bytes:
    """The document: `fields`, which include ``next_position``, and the spans on one line behind them."""
    head = json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **fields}, indent=2)
    tail = json.dumps(spans.to_list(), separators=(",", ":"))
    return f'{head[:-2]},\n  "positions": {tail}\n}}\n'.encode()


def read_spans(path: str, tokens: int) -> Spans | None:
    """The spans of the cache file `path`, from the document beside it; None if there is none of this kind.

    Raises
    ------
    KvmnnError
        For a document that is damaged or belongs to a cache of another length.
    """
    root = _document(path)
    if root is None:
        return None
    beside = path + SUFFIX
    version = root.at("schema_version").integer(1)
    if version != SCHEMA_VERSION:
        raise KvmnnError(f"{beside}: schema_version is {version}, this kvmnn reads {SCHEMA_VERSION}")
    following = root.at("next_position").integer(0)
    pairs = [entry.items(2, 2) for entry in root.at("positions").items()]
    if len(pairs) != tokens:
        raise KvmnnError(f"{beside}: has positions for {len(pairs)} tokens, {path} has {tokens}")
    spans = np.array([[number.integer(0) for number in pair] for pair in pairs], np.int64).reshape(tokens, 2)
    positions, ends = spans[:, 0], spans[:, 1]
    if (ends <= positions).any() or int(ends.max(initial=0)) > following:
        raise KvmnnError(f"{beside}: positions are not spans within the {following} tokens seen")
    return Spans(positions, ends, following)


def spans_of_cache(path: str, cache: CacheInfo) -> Spans:
    """The positions that the tokens of a packed cache have; they are one list for all layers.

    Where the last tokens of the text were dropped, only its ids (`CacheInfo.token_ids`) say how many they were.

    Raises
    ------
    SourceError
        For layers that hold different tokens.
    """
    first, *others = cache.layers
    for layer in others:
        if layer.positions != first.positions:
            raise SourceError(
                f"{path}: layers {first.layer} and {layer.layer} hold different tokens "
                f"({runs_text(first.positions)}; {runs_text(layer.positions)}): a compressed cache "
                "has the same in all layers"
            )
    positions = np.concatenate([np.arange(begin, begin + size, dtype=np.int64) for begin, size in first.positions])
    seen = int(positions.max()) + 1
    return Spans(positions, positions + 1, max(seen, cache.token_ids.count if cache.token_ids else 0))


def spans_of_notes(path: str, noted: Noted) -> Spans:
    """Return the positions that ``positions.json`` states of the tokens of a folder, one list for all layers.

    Raises
    ------
    SourceError
        For layers or heads that hold different tokens.
    """
    first = noted.positions[0]
    if any(places.ndim > 1 or not np.array_equal(places, first) for places in noted.positions):
        raise SourceError(
            f"{path}: layers or heads hold different tokens ({POSITIONS}): a compressed cache has the same in all"
        )
    following = int(first[-1]) + 1 if first.size else 0
    if not noted.is_rerotated:
        following = max(following, noted.tokens_seen or 0)
    return Spans(first, first + 1, following)


def read_axes(path: str) -> str | None:
    """The letters of the axes of the arrays in the cache file `path`, from the document beside it; None without it."""
    root = _document(path)
    axes = root.value.get("axes") if root is not None else None
    return axes if isinstance(axes, str) else None


def _document(path: str) -> Node | None:
    """The document beside the cache file `path`; None if there is none of this kind."""
    beside = path + SUFFIX
    if not os.path.isfile(beside):
        return None
    try:
        root = parse(read_bounded(Path(beside), _MAX_BYTES), beside, _MAX_BYTES)
    except (OSError, ManifestError, SourceError):
        return None
    return root if isinstance(root.value, dict) and root.value.get("schema") == SCHEMA else None
