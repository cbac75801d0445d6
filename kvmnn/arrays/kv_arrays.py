"""Find K and V among the arrays of a source, convert them to one axis order, and back.

Names state layer and part of each array; the number of axes or the caller defines the axes. docs/compressor-forward.md
lists the rules; anything else is rejected, never guessed. A name does not prove its axes: some runtimes write
``past_key_values.0.key`` with tokens before heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import dtypes
from .._util.dataclass import dataclass
from ..dtypes import PARTS, Elements, KVPair, Part
from ..errors import MissingOptionError, OptionError, SourceError
from .array import ArrayInfo, LazyArray
from .layers import MAX_KV_HEADS, AmbiguousAxesError, locate_array, merge_dump_segments
from .naming import is_indexed_name, parse_conventional_name, parse_layer, parse_part

_REQUIRED_AXES, _ALLOWED_AXES = set("htd"), set("lbhtd")
_FULL_AXES, _LAYER_AXES_BY_RANK = "lbhtd", {4: "bhtd", 3: "htd"}
_AXIS_NAMES = {"l": "layer", "b": "batch", "h": "kv_head", "t": "token", "d": "dimension"}


@dataclass(frozen=True)
class KVArrays:
    """K and V by layer, and their arrangement in the source."""

    #: ``[batch, kv_heads, tokens, head_dim]`` views by layer number.
    layers: dict[int, KVPair]
    #: The underlying arrays (K, V): one pair with all layers, or a pair for each layer.
    pairs: tuple[tuple[LazyArray, LazyArray], ...]
    #: Letters for the axes of each array: l layer, b batch, h kv_head, t token, d dimension.
    axes: str
    #: What defines the axes, as text.
    axes_source: str

    @property
    def description(self) -> str:
        """Return every axis of the arrays with its length, and what defines it."""
        shape = self.pairs[0][0].shape
        axis_lengths = (f"{_AXIS_NAMES[letter]} {length:,}" for letter, length in zip(self.axes, shape, strict=True))
        return f"axes {self.axes} ({self.axes_source}): {', '.join(axis_lengths)}"

    def restore(self, new_layers: dict[int, KVPair]) -> tuple[list[ArrayInfo], list[Elements]]:
        """Return new K and V of the same layers in the names and axes of the source."""
        infos: list[ArrayInfo] = []
        arrays: list[Elements] = []
        layers = iter(new_layers.values())
        for pair in self.pairs:
            entries = list(new_layers.values()) if "l" in self.axes else [next(layers)]
            for array, layer_elements in zip(pair, zip(*entries, strict=True), strict=True):
                elements = _from_canonical_axes(np.stack(layer_elements), self.axes)
                dtype = array.dtype if array.coded_itemsize == elements.itemsize else dtypes.infer_dtype(elements).name
                infos.append(
                    ArrayInfo(name=array.name, dtype=dtype, shape=elements.shape, array_dtype=elements.dtype.str)
                )
                arrays.append(elements)
        return infos, arrays


@dataclass(frozen=True)
class AxisHints:
    """Known facts about the axes of arrays."""

    #: Axes of all arrays, such as ``"lthd"``: h, t and d, and l or b for layers or batches; None if unspecified.
    axes: str | None = None
    #: What defines `axes`, as text.
    axes_source: str = "said"
    #: `Source.token_major`: three axes are ``thd``.
    token_major: bool = False
    #: Minimum number of tokens.
    min_tokens: int = 0


def read_kv(where: str, arrays: Sequence[LazyArray], hints: AxisHints | None = None) -> KVArrays:
    """Find K and V among `arrays`."""
    hints = hints or AxisHints()
    if hints.axes is not None:
        letters = set(hints.axes)
        if len(letters) != len(hints.axes) or not _REQUIRED_AXES <= letters <= _ALLOWED_AXES:
            raise OptionError(
                f"{where}: axes {hints.axes!r}: expected h (kv_head), t (token), d (dimension), each once, and where "
                "there are such l (layer) and b (batch)"
            )
    pairs = _pair_keys_values(where, merge_dump_segments(arrays))
    axes, axes_source = _resolve_axes(where, [array for pair in pairs for array in pair], hints)
    for array in (array for pair in pairs for array in pair):
        if len(array.shape) != len(axes):
            raise SourceError(
                f"{where}: array {array.name!r} has {len(array.shape)} axes {list(array.shape)}, expected "
                f"{len(axes)} ({axes})"
            )
    if "l" in axes:
        if len(pairs) > 1:
            raise MissingOptionError(
                f"{where}: holds {len(pairs)} pairs of K and V, each with all layers; --tensor chooses (in Python "
                "tensors=)"
            )
        keys, values = (_to_canonical_axes(_load_elements(array), axes) for array in pairs[0])
        if len(keys) != len(values):
            raise SourceError(f"{where}: K has {len(keys)} layers, V {len(values)}")
        return KVArrays(dict(enumerate(zip(keys, values, strict=True))), tuple(pairs), axes, axes_source)
    pairs_by_layer = _group_by_layer(where, pairs)
    layers: dict[int, KVPair] = {}
    for number in sorted(pairs_by_layer):
        keys, values = (_to_canonical_axes(_load_elements(array), axes)[0] for array in pairs_by_layer[number])
        layers[number] = keys, values
    return KVArrays(layers, tuple(pairs_by_layer[number] for number in sorted(pairs_by_layer)), axes, axes_source)


def infer_conventional_axes(arrays: Sequence[LazyArray], *, token_major: bool = False) -> str | None:
    """Return the axes by the names of arrays; None if names do not state them or there are too many heads."""
    candidates = {_infer_array_axes(array) for array in arrays}
    letters = candidates.pop() if len(candidates) == 1 else None
    return letters.replace("ht", "th") if letters and token_major else letters


def _infer_array_axes(array: LazyArray) -> str | None:
    parsed_name = parse_conventional_name(array.name)
    if parsed_name is not None and parsed_name.is_dump:
        return None
    axes_by_rank = {4: "lhtd"} if _parse_layer_number(array.name) is None else _LAYER_AXES_BY_RANK
    axes = axes_by_rank.get(len(array.shape))
    if axes and is_indexed_name(array.name):
        try:
            axes = axes.replace("ht", "th") if locate_array(array, token_major=False)[3] else axes
        except AmbiguousAxesError:
            return None
    return axes if axes and array.shape[axes.index("h")] <= MAX_KV_HEADS else None


def _group_by_layer(where: str, pairs: list[tuple[LazyArray, LazyArray]]) -> dict[int, tuple[LazyArray, LazyArray]]:
    pairs_by_layer: dict[int, tuple[LazyArray, LazyArray]] = {}
    for pair in pairs:
        number = _parse_layer_number(pair[0].name)
        if number is None:
            raise SourceError(
                f"{where}: array {pair[0].name!r} does not say which layer it is: expected a name such as "
                "'layers.3.key', or an axis for the layers (--axes lbhtd, lhtd ..., in Python axes=)"
            )
        if number in pairs_by_layer:
            raise SourceError(
                f"{where}: arrays {pairs_by_layer[number][0].name!r} and {pair[0].name!r} are both K of layer {number}"
            )
        pairs_by_layer[number] = pair
    return pairs_by_layer


def _parse_layer_number(name: str) -> int | None:
    parsed_name = parse_conventional_name(name)
    return parse_layer(name) if parsed_name is None else parsed_name.layer


def _resolve_axes(where: str, arrays: Sequence[LazyArray], hints: AxisHints) -> tuple[str, str]:
    """Return the axes of all arrays, and what defines them."""
    if hints.axes is not None:
        return hints.axes, hints.axes_source
    if hints.token_major and all(len(array.shape) == 3 for array in arrays):
        return "thd", "as in every KV dump"
    example = arrays[0]
    dump_axes = {_infer_dump_axes(array) for array in arrays}
    if len(dump_axes) == 1 and (axes := dump_axes.pop()) is not None:
        return axes, f"{example.name!r} holds the number of tokens"
    letters = _default_axes(where, example, _parse_layer_number(example.name))
    heads, tokens = (example.shape[letters.index(letter)] for letter in "ht")
    is_plausible, is_swap_plausible = (
        num_heads <= MAX_KV_HEADS and num_tokens >= hints.min_tokens
        for num_heads, num_tokens in ((heads, tokens), (tokens, heads))
    )
    if is_plausible and not is_swap_plausible:
        return letters, "the shape has no other reading"
    if max(heads, tokens) < hints.min_tokens:
        raise SourceError(f"{where}: array {example.name!r} {list(example.shape)} has no {hints.min_tokens} tokens")
    raise AmbiguousAxesError(
        f"{where}: array {example.name!r} {list(example.shape)}: nothing says whether {heads} or {tokens} is the "
        f"number of tokens: say --axes {letters} ({tokens} tokens) or --axes {letters.replace('ht', 'th')} "
        f"({heads} tokens), in Python axes="
    )


def _infer_dump_axes(array: LazyArray) -> str | None:
    """Return the axes by a name of KV dumps, if the array has as many tokens as the name states."""
    parsed_name = parse_conventional_name(array.name)
    if parsed_name is None or parsed_name.end is None or len(array.shape) != 3:
        return None
    order = parsed_name.order
    return order if array.shape[order.index("t")] == parsed_name.end - parsed_name.start else None


def _default_axes(where: str, array: LazyArray, layer: int | None) -> str:
    num_axes = len(array.shape)
    if num_axes == len(_FULL_AXES):
        return _FULL_AXES
    if layer is not None and num_axes in _LAYER_AXES_BY_RANK:
        return _LAYER_AXES_BY_RANK[num_axes]
    error = AmbiguousAxesError if num_axes > 2 else SourceError
    raise error(
        f"{where}: array {array.name!r} has shape {list(array.shape)}: expected five axes (layer, batch, kv_head, "
        "token, dimension), or a layer number in its name and four or three axes (batch, kv_head, token, dimension); "
        "--axes, in Python axes=, says otherwise, e.g. --axes lthd"
    )


def _pair_keys_values(where: str, arrays: Sequence[LazyArray]) -> list[tuple[LazyArray, LazyArray]]:
    arrays_by_part: dict[Part, dict[str, LazyArray]] = {part: {} for part in PARTS}
    for array in arrays:
        part, role = parse_part(where, array.name)
        if role in arrays_by_part[part]:
            raise SourceError(
                f"{where}: arrays {arrays_by_part[part][role].name!r} and {array.name!r} have the same role"
            )
        arrays_by_part[part][role] = array
    keys, values = arrays_by_part["key"], arrays_by_part["value"]
    for role in keys.keys() ^ values.keys():
        has, lacks = ("K", "V") if role in keys else ("V", "K")
        name = (keys.get(role) or values[role]).name
        raise SourceError(f"{where}: array {name!r} is {has} and there is no {lacks} to it")
    return [(array, values[role]) for role, array in keys.items()]


def _load_elements(array: LazyArray) -> Elements:
    """Return all words of an array; a view of the file where possible."""
    (chunk,) = array.iter_chunks()
    dtype = dtypes.parse_dtype(array.dtype).numpy_dtype
    if array.itemsize != array.coded_itemsize:
        raise SourceError(f"array {array.name!r} holds raw bytes, which have no axes")
    return chunk.view(dtype).reshape(array.shape, order=array.order)


def _to_canonical_axes(elements: Elements, axes: str) -> Elements:
    """Return ``[layer, batch, kv_head, token, dimension]``, with lengths of 1 for missing axes."""
    order = [axes.index(letter) for letter in _FULL_AXES if letter in axes]
    missing_axes = tuple(position for position, letter in enumerate(_FULL_AXES) if letter not in axes)
    return np.expand_dims(elements.transpose(order), missing_axes)


def _from_canonical_axes(elements: Elements, axes: str) -> Elements:
    missing_axes = tuple(position for position, letter in enumerate(_FULL_AXES) if letter not in axes)
    axis_order = [letter for letter in _FULL_AXES if letter in axes]
    return np.ascontiguousarray(elements.squeeze(missing_axes).transpose([axis_order.index(letter) for letter in axes]))
