"""Find the rows of a transformers cache that contain tokens, their positions, and other state of layers.

Static caches have rows for later tokens; a window contains the last tokens. A cache that counts more tokens than it
contains was cut, and does not record which remain. ``attention_mask`` and token ids saved with a cache show which
tokens of a batch are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

import numpy as np
import numpy.typing as npt

from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ...arrays.completeness import Completeness, LayerStateInfo
from ...arrays.engine_cache import BatchText
from ...dtypes import Indices, Positions
from ...errors import SourceError
from .cache_finder import AnyTensor, KVLayer, TransformersCache

_SCAN_ROWS = 256  # rows that are looked at together: of a buffer that is nearly full only the end is read


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of one layer that contain tokens."""

    #: Indices of the rows in the tensors, int64, ascending.
    row_indices: Indices
    #: Position of each token, int64; None if unknown.
    positions: Positions | None

    def select_columns(self, columns: Positions) -> TokenRows:
        """Return the rows of the tokens at these positions, renumbered from 0."""
        if self.positions is None:
            return self
        is_selected = np.isin(self.positions, columns)
        return TokenRows(self.row_indices[is_selected], np.searchsorted(columns, self.positions[is_selected]))


@dataclass(frozen=True, eq=False)
class CacheRows:
    """Rows of all layers that contain tokens."""

    #: In the order of `TransformersCache.layers`.
    layer_rows: tuple[TokenRows, ...]
    #: Number of tokens that the cache has seen, if it records it.
    num_tokens: int
    #: A sentence about why the tokens of some layers are unknown; empty if they are known.
    eviction_reason: str = ""


def find_token_rows(cache: TransformersCache) -> CacheRows:
    """Find the rows of every layer that contain tokens, with their positions."""
    used_counts = [_count_used_rows(layer) for layer in cache.layers]
    layers = list(zip(cache.layers, used_counts, strict=True))
    declared_counts = [layer.num_seen or 0 for layer in cache.layers]
    full_counts = [num_used for layer, num_used in layers if not layer.is_window]
    num_tokens = max([*full_counts, *declared_counts, cache.num_seen or 0])
    empty_row = _find_empty_row(cache, num_tokens)
    rows = []
    for layer, num_used in layers:
        indices = _select_token_rows(layer, num_used, num_tokens, empty_row)
        rows.append(
            _place_rows(layer, indices, num_tokens)
            if cache.num_sinks is None
            else _place_sink_rows(indices, cache.num_sinks, num_tokens, is_rerotated=cache.is_rerotated)
        )
    return CacheRows(tuple(rows), max(num_tokens, *used_counts), _describe_eviction(cache, rows, num_tokens))


def _count_used_rows(layer: KVLayer) -> int:
    """Count the rows that certainly contain tokens.

    A buffer without a recorded length ends with the last row that is not all zeros.
    """
    num_rows = int(layer.keys.shape[2])
    if not layer.is_buffer:
        return num_rows
    return count_used_rows(layer.keys) if layer.num_seen is None else min(layer.num_seen, num_rows)


def _select_token_rows(layer: KVLayer, num_used: int, num_tokens: int, empty_row: int | None) -> Indices:
    """Select the rows of a layer that contain tokens after the model has seen this many."""
    if not layer.is_buffer or layer.num_seen is not None or num_used == 0 or num_tokens == 0:
        return np.arange(num_used)
    # K of a token may be all zeros in some layers, as padding's embedding is: rows of other layers count here too.
    row_indices = np.arange(min(num_tokens, int(layer.keys.shape[2])))
    return row_indices[row_indices != empty_row] if layer.is_window and empty_row is not None else row_indices


def _find_empty_row(cache: TransformersCache, num_tokens: int) -> int | None:
    """Find the row of zeros that transformers before 4.52 leaves in windows that became full token by token.

    A window of W rows is turned round one token too early, so an empty row goes through it from W - 2 to 0.
    """
    window_layers = [layer for layer in cache.layers if layer.is_window and layer.is_buffer and layer.num_seen is None]
    sizes = {int(layer.keys.shape[2]) for layer in window_layers}
    if len(sizes) != 1:
        return None
    num_rows = sizes.pop()
    empty_row = 2 * num_rows - 2 - num_tokens
    if not 0 <= empty_row < num_rows - 1:
        return None
    for tensor in (tensor for layer in window_layers for tensor in (layer.keys, layer.values)):
        row = np.ascontiguousarray(tensor.read_elements_unbounded()[:, :, empty_row])
        if row.view(f"u{row.dtype.itemsize}").any():
            return None
    return empty_row


def _place_rows(layer: KVLayer, row_indices: Indices, num_tokens: int) -> TokenRows:
    """Return the rows of a layer and their positions after `num_tokens` were seen."""
    if not layer.is_window:
        return TokenRows(row_indices, None if row_indices.size < num_tokens else np.arange(row_indices.size))
    num_seen = layer.num_seen if layer.num_seen is not None else num_tokens
    if num_seen == 0 and _is_full_window(layer, row_indices):  # no layer has all tokens: it may have slid
        return TokenRows(row_indices, None)
    num_seen = max(num_seen, row_indices.size)
    return TokenRows(row_indices, np.arange(num_seen - row_indices.size, num_seen))


def _is_full_window(layer: KVLayer, row_indices: Indices) -> bool:
    if layer.is_buffer:
        return row_indices.size == layer.keys.shape[2]
    return layer.window is not None and row_indices.size >= layer.window - 1


def _place_sink_rows(row_indices: Indices, num_sinks: int, num_tokens: int, *, is_rerotated: bool) -> TokenRows:
    """Return the rows of a ``SinkCache`` and their positions: the first tokens and the last ones.

    Positions are left out when K was rotated to others, as after an eviction.
    """
    if is_rerotated and row_indices.size < num_tokens:
        return TokenRows(row_indices, None)
    num_sinks = min(num_sinks, row_indices.size)
    num_tail = row_indices.size - num_sinks
    tail_start = max(num_tokens - num_tail, num_sinks)
    return TokenRows(row_indices, np.concatenate([np.arange(num_sinks), np.arange(tail_start, tail_start + num_tail)]))


def _describe_eviction(cache: TransformersCache, layer_rows: list[TokenRows], num_tokens: int) -> str:
    if cache.num_sinks is not None:
        num_stored = layer_rows[0].row_indices.size
        if num_stored >= num_tokens:
            return ""
        rotation_text = ", with K rotated to their places in the cache" if cache.is_rerotated else ""
        return (
            f"a {cache.class_name} holds the first {cache.num_sinks:,} and the last {num_stored - cache.num_sinks:,} "
            f"of {pluralize(num_tokens, 'token')}{rotation_text}"
        )
    unplaced_layers = [
        (layer, token_rows)
        for layer, token_rows in zip(cache.layers, layer_rows, strict=True)
        if token_rows.positions is None
    ]
    if not unplaced_layers:
        return ""
    layer, token_rows = unplaced_layers[0]
    if layer.is_window:
        return (
            f"windows of {pluralize(token_rows.row_indices.size, 'token')} are full, and nothing tells how many tokens "
            "the model has seen"
        )
    row_counts = sorted({layer_rows.row_indices.size for _, layer_rows in unplaced_layers})
    counts_text = f"{row_counts[0]:,}" if len(row_counts) == 1 else f"{row_counts[0]:,} to {row_counts[-1]:,}"
    layers_text = f"in {len(unplaced_layers)} of {pluralize(len(cache.layers), 'layer')} "
    layers_text = "" if len(unplaced_layers) == len(cache.layers) else layers_text
    return (
        f"{layers_text}{counts_text} of {pluralize(num_tokens, 'token')} that the model has seen are stored, and "
        f"nothing tells which"
    )


def count_used_rows(tensor: AnyTensor) -> int:
    """Count the tokens of a ``[batch, kv_head, token, head_dim]`` buffer up to the last one that is not all zeros."""
    elements = tensor.read_elements_unbounded()
    elements = elements.view(f"u{elements.dtype.itemsize}")
    low, high = 0, int(elements.shape[2])
    while high > low:
        begin = max(low, high - _SCAN_ROWS)
        used_offsets = np.flatnonzero(elements[:, :, begin:high].any(axis=(0, 1, 3)))
        if used_offsets.size:
            return begin + int(used_offsets[-1]) + 1
        high = begin
    return 0


def mark_evicted(rows: CacheRows, eviction_reason: str) -> CacheRows:
    """Return the rows, marked as lacking unknown tokens, with `eviction_reason` as the reason."""
    layers = tuple(TokenRows(token_rows.row_indices, None) for token_rows in rows.layer_rows)
    return replace(rows, layer_rows=layers, eviction_reason=eviction_reason)


_MAX_NAMED_STATES = 4


def describe_states(cache: TransformersCache, rows: CacheRows) -> Completeness:
    """Describe the state of every layer of a cache."""
    states: dict[int, LayerStateInfo] = {}
    for layer in cache.layers:
        states[layer.number] = LayerStateInfo(
            layer=layer.number,
            kind="window" if layer.is_window else "full",
            window=layer.window if layer.is_window else None,
        )
    for other_layer in cache.other_layers:
        location = f"kept in {_join_names(other_layer.state_names)}, not as K and V" if other_layer.state_names else ""
        states[other_layer.number] = LayerStateInfo(
            layer=other_layer.number, kind=other_layer.kind, included=False, location=location
        )
    return Completeness(
        layers=tuple(
            states.get(number) or LayerStateInfo(layer=number, kind="unknown", included=False)
            for number in range(max(states) + 1)  # a dict by layer number may have holes
        ),
        evicted=rows.eviction_reason,
        other_missing=tuple(_list_further_states(cache, len(states))),
    )


def _list_further_states(cache: TransformersCache, num_layers: int) -> list[str]:
    """Return a sentence for each kind of state that layers contain in addition to K and V."""
    layer_count_by_names: dict[tuple[str, ...], int] = {}
    for layer in cache.layers:
        if layer.state_names:
            layer_count_by_names[layer.state_names] = layer_count_by_names.get(layer.state_names, 0) + 1
    return [
        f"{num_group_layers:,} of {pluralize(num_layers, 'layer')} {'has' if num_group_layers == 1 else 'have'} "
        f"{_join_names(names)} in addition to K and V, not included"
        for names, num_group_layers in layer_count_by_names.items()
    ]


def _join_names(names: Sequence[str]) -> str:
    if len(names) > _MAX_NAMED_STATES:
        return f"{', '.join(names[:_MAX_NAMED_STATES])} and {len(names) - _MAX_NAMED_STATES} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


_MASK_NAMES = ("attention_mask", "decoder_attention_mask")
_TOKEN_ID_NAMES = (("input_ids", "sequences", "token_ids"), ("decoder_input_ids", "sequences"))
_INTEGER_TYPES = ("int64", "int32", "int16", "uint8", "bool")
_MAX_MISSING_TOKENS = 1  # a model's last token has an id, and no K and V until the model goes on


@dataclass(frozen=True, eq=False)
class BatchTexts:
    """The texts of a batch."""

    #: Each text of the batch; empty if the file has neither mask nor ids.
    entries: tuple[BatchText, ...] = ()
    #: Sentences about the omitted parts.
    notes: list[str] = field(default_factory=list)
    #: Sentence about tokens that the cache lacks; empty if there are none.
    eviction_reason: str = ""


def find_batch_texts(
    label: str, cache: TransformersCache, num_tokens: int, batch: int, *, has_halves: bool, is_exact: bool
) -> BatchTexts:
    """Find the texts of a batch by the masks and ids saved with a cache."""
    batch_texts = BatchTexts()
    mask = _read_batch_matrix(cache, _MASK_NAMES[has_halves : has_halves + 1], batch, batch_texts.notes)
    ids = _read_batch_matrix(cache, _TOKEN_ID_NAMES[has_halves], batch, batch_texts.notes)
    max_columns = max((matrix.shape[1] for matrix in (mask, ids) if matrix is not None), default=0)
    if max_columns > num_tokens + _MAX_MISSING_TOKENS and not is_exact:
        source_name = "mask" if mask is not None and mask.shape[1] == max_columns else "ids"
        eviction_reason = (
            f"{pluralize(num_tokens, 'token')} are stored and {source_name} of {max_columns:,} were saved with them; "
            "nothing tells which tokens these are"
        )
        return BatchTexts(notes=batch_texts.notes, eviction_reason=eviction_reason)
    is_token = np.ones((batch, num_tokens), bool)
    if mask is not None:
        num_masked_columns = min(mask.shape[1], num_tokens)
        is_token[:, :num_masked_columns] = mask[:, :num_masked_columns] != 0
        if num_masked_columns < num_tokens:
            batch_texts.notes.append(
                f"attention_mask has {num_masked_columns:,} of {pluralize(num_tokens, 'token')}: the others count as "
                f"text"
            )
    if not is_token.any(axis=1).all():
        raise SourceError(f"{label}: attention_mask leaves no token of text {int(np.argmin(is_token.any(axis=1)))}")
    if ids is not None and ids.shape[1] < num_tokens:
        batch_texts.notes.append(
            f"{pluralize(ids.shape[1], 'token id')} for {pluralize(num_tokens, 'token')}: they are left out"
        )
        ids = None
    elif ids is not None and ids.shape[1] > num_tokens:
        num_extra = ids.shape[1] - num_tokens
        batch_texts.notes.append(
            f"the last {pluralize(num_extra, 'token id')} of {ids.shape[1]:,} "
            f"{'has' if num_extra == 1 else 'have'} no K and V yet"
        )
        ids = ids[:, :num_tokens]
    if ids is None and is_token.all():
        return batch_texts
    entries = [
        BatchText(np.flatnonzero(is_token[text]), None if ids is None else ids[text, is_token[text]].astype(np.int64))
        for text in range(batch)
    ]
    return BatchTexts(tuple(entries), batch_texts.notes)


def _read_batch_matrix(
    cache: TransformersCache, names: Sequence[str], batch: int, notes: list[str]
) -> npt.NDArray[np.int64] | None:
    """Read a tensor of integers for every text of the batch, stored by one of these names."""
    for name in names:
        tensor = cache.sidecar_tensors.get(name)
        if tensor is None:
            continue
        shape = tuple(tensor.shape)
        if shape[0:1] == shape and batch == 1:
            shape = (1, *shape)
        if len(shape) != 2 or shape[0] != batch:
            notes.append(f"{name} {list(tensor.shape)} is not used: expected [{batch}, token]")
            continue
        elements = _read_int64_elements(tensor)
        if elements is None:
            notes.append(f"{name} of type {tensor.type_name} is not used")
            continue
        return elements.reshape(shape)
    return None


def _read_int64_elements(tensor: AnyTensor) -> npt.NDArray[np.int64] | None:
    type_name = tensor.type_name
    if type_name not in (*_INTEGER_TYPES, "float32", "float16"):
        return None
    elements = np.array(tensor.read_elements_unbounded())  # of memory the bits, of files numbers
    if type_name.startswith("float"):
        return np.asarray(elements.view("f4" if type_name == "float32" else "f2") != 0, np.int64)
    values: npt.NDArray[np.int64] = elements.view({"bool": "u1"}.get(type_name, type_name)).astype(np.int64)
    return values
