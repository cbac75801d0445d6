"""Which rows of a layer's tensors hold tokens, and where these stand in the text.

Buffers of static caches have rows for tokens that may still come; a window holds the last tokens; a cache that counts
more tokens than it holds was cut, and nothing tells which of them are left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...dtypes import Indices, Positions
from ...text import count
from .objects import AnyTensor, Cache, Layer

_STEP = 256  # rows that are looked at together: of a buffer that is nearly full only the end is read


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of one layer that hold tokens.

    Parameters
    ----------
    index
        Which rows of the tensors, int64, ascending.
    positions
        Where each token stands, int64; None where nothing tells.
    """

    index: Indices
    positions: Positions | None

    def select(self, columns: Positions) -> TokenRows:
        """Return the rows of the tokens at these positions, which are numbered from 0 then."""
        if self.positions is None:
            return self
        chosen = np.isin(self.positions, columns)
        return TokenRows(self.index[chosen], np.searchsorted(columns, self.positions[chosen]))


@dataclass(frozen=True, eq=False)
class CacheRows:
    """Rows of all layers.

    Parameters
    ----------
    layers
        In the order of `Cache.layers`.
    tokens
        That the cache has seen, as far as it says so.
    evicted
        Why nothing tells which tokens some layers hold, as a sentence; empty where it is known.
    """

    layers: tuple[TokenRows, ...]
    tokens: int
    evicted: str = ""


def find_rows(cache: Cache) -> CacheRows:
    """Find the rows of every layer that hold tokens, with their positions."""
    used = [_count_used(layer) for layer in cache.layers]
    full = [size for layer, size in zip(cache.layers, used, strict=True) if not layer.is_window]
    said = [layer.seen or 0 for layer in cache.layers]
    tokens = max([*full, *said, cache.seen or 0])
    hole = _find_hole(cache, tokens)
    indexes = [_index(layer, size, tokens, hole) for layer, size in zip(cache.layers, used, strict=True)]
    if cache.sinks is not None:
        rows = [_of_sinks(index, cache.sinks, tokens, is_rerotated=cache.is_rerotated) for index in indexes]
    else:
        rows = [_placed(layer, index, tokens) for layer, index in zip(cache.layers, indexes, strict=True)]
    return CacheRows(tuple(rows), max(tokens, *used), _evicted(cache, rows, tokens))


def _count_used(layer: Layer) -> int:
    """Rows that surely hold tokens: of a buffer that says no length up to the last that is not all zeros."""
    rows = int(layer.keys.shape[2])
    if not layer.is_buffer:
        return rows
    return used_rows(layer.keys) if layer.seen is None else min(layer.seen, rows)


def _index(layer: Layer, used: int, tokens: int, hole: int | None) -> Indices:
    """The rows of a layer that hold tokens, where the model has seen this many."""
    if not layer.is_buffer or layer.seen is not None or used == 0 or tokens == 0:
        return np.arange(used)
    # K of a token may be all zeros in some layers, as padding's embedding is: what other layers hold counts here too.
    index = np.arange(min(tokens, int(layer.keys.shape[2])))
    return index[index != hole] if layer.is_window and hole is not None else index


def _find_hole(cache: Cache, tokens: int) -> int | None:
    """The row of zeros that transformers before 4.52 leaves in windows that became full token by token.

    A window of W rows is turned round one token too early, so an empty row goes through it from W - 2 to 0.
    """
    windows = [layer for layer in cache.layers if layer.is_window and layer.is_buffer and layer.seen is None]
    sizes = {int(layer.keys.shape[2]) for layer in windows}
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    hole = 2 * size - 2 - tokens
    if not 0 <= hole < size - 1:
        return None
    rows = (tensor.view()[:, :, hole] for layer in windows for tensor in (layer.keys, layer.values))
    return (
        None if any(words.view(f"u{words.dtype.itemsize}").any() for words in map(np.ascontiguousarray, rows)) else hole
    )


def _placed(layer: Layer, index: Indices, tokens: int) -> TokenRows:
    """The rows of a layer where `tokens` were seen."""
    if not layer.is_window:
        return TokenRows(index, None if index.size < tokens else np.arange(index.size))
    seen = layer.seen if layer.seen is not None else tokens
    if seen == 0 and _is_full(layer, index):  # no layer holds all tokens: a window that is full may have slid
        return TokenRows(index, None)
    seen = max(seen, index.size)
    return TokenRows(index, np.arange(seen - index.size, seen))


def _is_full(layer: Layer, index: Indices) -> bool:
    if layer.is_buffer:
        return index.size == layer.keys.shape[2]
    return layer.window is not None and index.size >= layer.window - 1


def _of_sinks(index: Indices, sinks: int, tokens: int, *, is_rerotated: bool) -> TokenRows:
    """The rows of a ``SinkCache``: the first tokens, and the last; without positions where K has others."""
    if is_rerotated and index.size < tokens:
        return TokenRows(index, None)
    sinks = min(sinks, index.size)
    tail = index.size - sinks
    begin = max(tokens - tail, sinks)
    return TokenRows(index, np.concatenate([np.arange(sinks), np.arange(begin, begin + tail)]))


def _evicted(cache: Cache, rows: list[TokenRows], tokens: int) -> str:
    if cache.sinks is not None:
        stored = rows[0].index.size
        if stored >= tokens:
            return ""
        rotated = ", with K rotated to their places in the cache" if cache.is_rerotated else ""
        return (
            f"a {cache.kind} holds the first {cache.sinks:,} and the last {stored - cache.sinks:,} of "
            f"{count(tokens, 'token')}{rotated}"
        )
    unplaced = [(layer, each) for layer, each in zip(cache.layers, rows, strict=True) if each.positions is None]
    if not unplaced:
        return ""
    layer, each = unplaced[0]
    if layer.is_window:
        return (
            f"windows of {count(each.index.size, 'token')} are full, and nothing tells how many tokens the model has "
            "seen"
        )
    sizes = sorted({rows.index.size for _, rows in unplaced})
    size = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    which = "" if len(unplaced) == len(cache.layers) else f"in {len(unplaced)} of {count(len(cache.layers), 'layer')} "
    return f"{which}{size} of {count(tokens, 'token')} that the model has seen are stored, and nothing tells which"


def used_rows(tensor: AnyTensor) -> int:
    """Tokens of a ``[batch, kv_head, token, head_dim]`` buffer up to the last one that is not all zeros."""
    words = tensor.view()
    words = words.view(f"u{words.dtype.itemsize}")
    low, high = 0, int(words.shape[2])
    while high > low:
        begin = max(low, high - _STEP)
        used = np.flatnonzero(words[:, :, begin:high].any(axis=(0, 1, 3)))
        if used.size:
            return begin + int(used[-1]) + 1
        high = begin
    return 0


def without_evicted(rows: CacheRows, evicted: str) -> CacheRows:
    """Return the rows where something next to the cache tells that tokens are missing, and not which."""
    layers = tuple(TokenRows(each.index, None) for each in rows.layers)
    return replace(rows, layers=layers, evicted=evicted)
