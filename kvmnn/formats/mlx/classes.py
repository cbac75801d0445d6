"""The classes of caches of mlx-lm: which rows of a layer hold tokens, and where these stand in the text.

Newer files have every attribute of a cache as a state of its own; older ones have tensors as states, and numbers as
settings in the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ...arrays.completeness import Completeness, LayerState, StateKind
from ...dtypes import Positions
from ...errors import SourceError
from ...text import count
from ..safetensors_header import Tensor
from .groups import BITS
from .states import WORD_TYPES, States

_MAX_POSITION: Final = 1 << 31

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Layer:
    """The cache of one layer.

    Parameters
    ----------
    number
        From 0.
    keys, values
        The tensors of K and of V: one, or codes, scales and biases.
    tokens
        Valid ones of each head.
    spans
        Where they lie among the rows of a head, ``(begin, end)`` in the order of the text.
    positions
        Where they stand in it.
    bits, group_size
        Of quantised groups; 0 without.
    window
        Tokens that the layer attends to; None for all.
    lengths
        Tokens of each text of a batch, whose last ones are the last of the rows; empty where nothing tells them.
    end_unknown
        Whether the file does not say how many of the rows hold tokens, and all are taken.
    """

    number: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tokens: int
    spans: Spans
    positions: Positions
    bits: int = 0
    group_size: int = 0
    window: int | None = None
    lengths: tuple[int, ...] = ()
    end_unknown: bool = False

    @property
    def end(self) -> int:
        """The position after that of the last token."""
        return int(self.positions[-1]) + 1


def read_layers(states: States) -> list[Layer]:
    """Return the layers that have K and V, checked.

    Raises
    ------
    SourceError
        For states that do not fit their class, and where no layer has K and V.
    """
    where = states.file.label
    if not states.classes:
        raise SourceError(f"{where}: names no class of a cache")
    layers = [_READERS[kind](states, number) for number, kind in enumerate(states.classes) if kind in _READERS]
    if not layers:
        names = ", ".join(f"{name:.40}" for name in dict.fromkeys(states.classes[:8]))
        raise SourceError(
            f"{where}: the cache of every layer is a {names}: K and V are read of {', '.join(_READERS)} (encode keeps "
            "any of them whole)"
        )
    layers = _with_known_ends(layers)
    ends = {layer.end for layer in layers}
    if len(ends) > 1:
        raise SourceError(f"{where}: its layers have seen {min(ends):,} to {count(max(ends), 'token')}")
    if len({layer.lengths for layer in layers}) > 1:
        raise SourceError(f"{where}: its layers have seen texts of different lengths")
    return layers


def has_keys_and_values(states: States, number: int) -> bool:
    """Return whether the states of a layer are K and V by its class."""
    return number < len(states.classes) and states.classes[number] in _READERS


def describe_states(states: States, layers: Sequence[Layer]) -> Completeness:
    """Return what the model keeps for each layer, and which of it `layers` have."""
    found: dict[int, LayerState] = {
        layer.number: LayerState(
            layer=layer.number, kind="full" if layer.window is None else "window", window=layer.window
        )
        for layer in layers
    }
    for number, name in enumerate(states.classes):
        if number not in found:
            found[number] = LayerState(
                layer=number,
                kind=_OTHER_KINDS.get(name, "unknown"),
                included=False,
                location=f"in the file as {name:.40}",
            )
    return Completeness(layers=tuple(found[number] for number in sorted(found)))


def _with_known_ends(layers: list[Layer]) -> list[Layer]:
    """Leave out rows after the last token where only other layers tell how many tokens were seen."""
    ends = {layer.end for layer in layers if not layer.end_unknown}
    if len(ends) != 1:
        return layers
    end = ends.pop()
    return [_cut(layer, end) if layer.end_unknown and layer.end > end else layer for layer in layers]


def _cut(layer: Layer, end: int) -> Layer:
    """Return a layer of consecutive rows without those from position `end` on."""
    tokens = end - int(layer.positions[0])
    if tokens < 1:
        return layer
    return replace(layer, tokens=tokens, spans=((0, tokens),), positions=layer.positions[:tokens])


def _read_plain(states: States, number: int) -> Layer:
    keys, values = _read_pair(states, number)
    rows = keys.shape[2]
    tokens = states.read_scalar(f"{number}.2") if states.is_new else rows  # older files have no row without a token
    _check_tokens(states, number, tokens, rows)
    return _first_tokens(number, (keys,), (values,), tokens)


def _read_concatenated(states: States, number: int) -> Layer:
    keys, values = _read_pair(states, number)
    return _first_tokens(number, (keys,), (values,), keys.shape[2])


def _read_quantised(states: States, number: int) -> Layer:
    if states.is_new:
        tokens, group, bits = (states.read_scalar(f"{number}.{state}") for state in (2, 3, 4))
    else:
        tokens, group, bits = states.read_settings(number, (3, 4))[-3:]  # four: the rows that a buffer grows by first
    if bits not in BITS or group < 1:
        raise SourceError(
            f"{states.file.label}: layer {number}: groups of {group:,} codes of {bits:,} bits: expected groups of at "
            f"least 1 of {', '.join(map(str, BITS))} bits"
        )
    keys, values = (_read_groups(states, number, side, group, bits) for side in (0, 1))
    if keys[0].shape[:3] != values[0].shape[:3]:
        raise SourceError(f"{states.file.label}: layer {number}: K and V differ in shape")
    _check_tokens(states, number, tokens, keys[0].shape[2])
    return replace(_first_tokens(number, keys, values, tokens), bits=bits, group_size=group)


def _read_groups(states: States, number: int, side: int, group: int, bits: int) -> tuple[Tensor, ...]:
    """Return codes, scales and biases of K or V."""
    codes, scales, biases = (states.find(f"{number}.{side}.{place}") for place in range(3))
    states.check(codes, ("U32",), 4)
    for tensor in (scales, biases):
        states.check(tensor, WORD_TYPES, 4)
    expected = (*codes.shape[:3], codes.shape[3] * 32 // bits // group)
    fits = codes.shape[3] * 32 == expected[3] * group * bits
    if (scales.shape, biases.shape) != (expected, expected) or not fits:
        raise SourceError(
            f"{states.file.label}: layer {number}: codes {list(codes.shape)} of {bits} bits in groups of {group:,} "
            f"do not fit scales {list(scales.shape)}"
        )
    if scales.kind != biases.kind:
        raise SourceError(f"{states.file.label}: layer {number}: scales are {scales.kind}, biases {biases.kind}")
    return codes, scales, biases


def _read_rotating(states: States, number: int) -> Layer:
    """The first `keep` tokens stay, the others are overwritten in turns: `index` is where the oldest is."""
    keys, values = _read_pair(states, number)
    rows = keys.shape[2]
    if states.is_new:
        seen, keep, most, index = (states.read_scalar(f"{number}.{state}") for state in (2, 3, 4, 5))
    else:
        settings = states.read_settings(number, (4, 5))  # five: the rows that a buffer grows by are the third
        (keep, most), (seen, index) = settings[:2], settings[-2:]
    turned = index < min(rows, seen)
    if not (0 <= keep <= most and 0 <= index <= rows and seen >= 1 and (not turned or keep <= rows)):
        raise SourceError(
            f"{states.file.label}: layer {number}: {seen:,} tokens, the first {keep:,} kept, in a window of {most:,}, "
            f"the next at {index:,}: do not fit {rows:,} rows"
        )
    if index == rows:
        spans = [(0, rows)]
    elif turned:
        spans = [(0, keep), (max(index, keep), rows), (keep, index)]
    else:
        spans = [(0, seen)]
    spans = [(begin, end) for begin, end in spans if begin < end]
    tokens = sum(end - begin for begin, end in spans)
    if not 1 <= tokens <= seen:
        raise SourceError(f"{states.file.label}: layer {number}: {tokens:,} rows hold tokens, and {seen:,} were seen")
    kept = min(keep, tokens) if seen > tokens else 0
    positions = np.concatenate([np.arange(kept), np.arange(seen - tokens + kept, seen)])
    return Layer(number, (keys,), (values,), tokens, tuple(spans), positions, window=most)


def _read_chunked(states: States, number: int) -> Layer:
    """The tokens from `start` on; what is before them was left behind."""
    keys, values = _read_pair(states, number)
    rows = keys.shape[2]
    if states.is_new:
        end, chunk, start = (states.read_scalar(f"{number}.{state}") for state in (2, 3, 4))
    else:
        chunk, start = states.read_settings(number, (2,))
        end = start + rows
    if not 0 <= start < end < _MAX_POSITION or end - start > rows or chunk < 1:
        raise SourceError(
            f"{states.file.label}: layer {number}: tokens {start:,} to {end:,} in chunks of {chunk:,} do not fit "
            f"{rows:,} rows"
        )
    tokens = end - start
    spans, positions = ((0, tokens),), np.arange(start, end)
    end_unknown = not states.is_new and start > 0  # such files may have empty rows after the tokens
    return Layer(number, (keys,), (values,), tokens, spans, positions, window=chunk, end_unknown=end_unknown)


def _read_batch(states: States, number: int) -> Layer:
    keys, values = _read_pair(states, number)
    rows = keys.shape[2]
    held = states.read_scalar(f"{number}.4") if states.is_new else rows
    _check_tokens(states, number, held, rows)
    return _right_aligned(states, number, (keys, values), ((0, held),))


def _read_rotating_batch(states: States, number: int) -> Layer:
    """A window of a batch: once it has turned, the oldest token is at `index`."""
    keys, values = _read_pair(states, number)
    rows = keys.shape[2]
    if states.is_new:
        most, index = (states.read_scalar(f"{number}.{state}") for state in (4, 6))
        rotated = states.read_flag(f"{number}.7")
    else:
        texts = states.list_settings(number, (4,))
        most, index = (states.read_whole(number, text) for text in (texts[0], texts[2]))
        rotated = texts[3] == "True"
    if not 1 <= index <= rows or most < 1:
        raise SourceError(
            f"{states.file.label}: layer {number}: the next token at {index:,} in a window of {most:,} does not fit "
            f"{rows:,} rows"
        )
    spans = ((index, rows), (0, index)) if rotated and index < rows else ((0, index),)
    return replace(_right_aligned(states, number, (keys, values), spans), window=most)


def _right_aligned(states: States, number: int, pair: tuple[Tensor, Tensor], spans: Spans) -> Layer:
    """A batch of texts of different lengths that end together: padding is before them.

    Rows that are padding in every text are left out.
    """
    lengths = states.read_numbers(f"{number}.2", pair[0].shape[0])
    held = sum(end - begin for begin, end in spans)
    longest = max(lengths)
    if min(lengths) < 1:
        raise SourceError(
            f"{states.file.label}: layer {number}: texts of {min(lengths):,} to {count(longest, 'token')}: expected at "
            "least 1 in each"
        )
    tokens = min(held, longest)
    return Layer(
        number,
        (pair[0],),
        (pair[1],),
        tokens,
        _without_first(spans, held - tokens),
        np.arange(longest - tokens, longest),
        lengths=tuple(lengths) if len(lengths) > 1 else (),
    )


def _without_first(spans: Spans, rows: int) -> Spans:
    """Return spans without their first `rows` rows."""
    kept: list[tuple[int, int]] = []
    for begin, end in spans:
        skipped = min(rows, end - begin)
        rows -= skipped
        if begin + skipped < end:
            kept.append((begin + skipped, end))
    return tuple(kept)


def _first_tokens(number: int, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], tokens: int) -> Layer:
    return Layer(number, keys, values, tokens, ((0, tokens),), np.arange(tokens))


def _read_pair(states: States, number: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a layer without groups."""
    keys, values = states.find(f"{number}.0"), states.find(f"{number}.1")
    for tensor in (keys, values):
        states.check(tensor, WORD_TYPES, 4)
    if keys.shape[:3] != values.shape[:3] or keys.kind != values.kind:
        raise SourceError(f"{states.file.label}: layer {number}: K is {list(keys.shape)}, V is {list(values.shape)}")
    return keys, values


def _check_tokens(states: States, number: int, tokens: int, capacity: int) -> None:
    if not 1 <= tokens <= capacity:
        raise SourceError(
            f"{states.file.label}: layer {number}: {tokens:,} tokens: expected at least 1 and at most {capacity:,}, "
            "for which there is room"
        )


_READERS: Final[dict[str, Callable[[States, int], Layer]]] = {
    "KVCache": _read_plain,
    "QuantizedKVCache": _read_quantised,
    "RotatingKVCache": _read_rotating,
    "ChunkedKVCache": _read_chunked,
    "ConcatenateKVCache": _read_concatenated,
    "BatchKVCache": _read_batch,
    "BatchRotatingKVCache": _read_rotating_batch,
}
_OTHER_KINDS: Final[dict[str, StateKind]] = {"ArraysCache": "recurrent", "MambaCache": "recurrent"}
