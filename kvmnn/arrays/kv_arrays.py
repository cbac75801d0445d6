"""K and V among the arrays of a source, brought into one axis order and back.

Which array is K and which V, and of what layer, is in the names; which axis is which is in the number of axes or said
by the caller. docs/compressor-forward.md lists the rules; what does not follow them is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import dtypes
from ..dtypes import PARTS, KVPair, Part, Words
from ..errors import SourceError
from .layers import with_whole_dumps
from .named_array import ArrayInfo, NamedArray
from .names import conventional, known_axes, layer_of, part_of

_NEEDED, _ALLOWED = set("htd"), set("lbhtd")
_WHOLE, _BY_LAYER = "lbhtd", {4: "bhtd", 3: "htd"}


@dataclass(frozen=True)
class KVArrays:
    """K and V by layer, and how they lay in their source.

    Parameters
    ----------
    layers
        ``[batch, kv_heads, tokens, head_dim]`` views by layer number.
    pairs
        The arrays that they are views of: K, V; one pair with all layers, or a pair for each layer.
    axes
        Letters for the axes of each of them: l layer, b batch, h kv_head, t token, d dimension.
    """

    layers: dict[int, KVPair]
    pairs: tuple[tuple[NamedArray, NamedArray], ...]
    axes: str

    def restore(self, new: dict[int, KVPair]) -> tuple[list[ArrayInfo], list[Words]]:
        """Other tokens for the same layers, with the names and axes that the source had.

        Returns
        -------
        What each array is, and its words, C-contiguous, in the order of `pairs`.
        """
        infos: list[ArrayInfo] = []
        arrays: list[Words] = []
        layers = iter(new.values())
        for pair in self.pairs:
            entries = list(new.values()) if "l" in self.axes else [next(layers)]
            for array, stacked in zip(pair, zip(*entries, strict=True), strict=True):
                words = _to_axes(np.stack(stacked), self.axes)
                dtype = array.dtype if array.word_bytes == words.itemsize else dtypes.of_array(words).name
                infos.append(ArrayInfo(name=array.name, dtype=dtype, shape=words.shape, array_dtype=words.dtype.str))
                arrays.append(words)
        return infos, arrays


def read_kv(
    where: str,
    arrays: Sequence[NamedArray],
    axes: str | None = None,
    *,
    token_major: bool = False,
    least_tokens: int = 0,
) -> KVArrays:
    """Find K and V among `arrays`.

    Parameters
    ----------
    where
        What messages call the source.
    arrays
        All of them must be K or V.
    axes
        Letters for the axes of each array, such as ``"lthd"``: h, t and d, and l or b for layers or batches. Without
        it, names in `CONVENTIONS` say it, and `token_major` for three axes. Other arrays with five axes are ``lbhtd``;
        with a layer number in their names those with four are ``bhtd`` and with three ``htd``, as far as their shapes
        have no second reading.
    token_major
        `Source.token_major`: three axes are ``thd``.
    least_tokens
        Fewest tokens that a cache is expected to have: heads that are as many or more could be tokens as well. 0: none
        could.

    Raises
    ------
    SourceError
        For names that are neither K nor V, a K without its V or the other way round, layers without number or twice,
        shapes that do not agree with the axes, and arrays whose heads could be tokens and whose axes nothing says.
    """
    _check_axes(where, axes)
    pairs = _pair_up(where, with_whole_dumps(arrays))
    first = pairs[0][0]
    found = axes or _said_axes([array for pair in pairs for array in pair], token_major)
    if found is None:
        found = _default_axes(where, first, _layer(first.name))
        _check_only_reading(where, first, found, least_tokens)
    for array in (array for pair in pairs for array in pair):
        if len(array.shape) != len(found):
            raise SourceError(
                f"{where}: array {array.name!r} has {len(array.shape)} axes {list(array.shape)}, expected "
                f"{len(found)} ({found})"
            )
    if "l" in found:
        if len(pairs) > 1:
            raise SourceError(f"{where}: holds {len(pairs)} pairs of K and V, each with all layers; --tensor chooses")
        keys, values = (_from_axes(_words(array), found) for array in pairs[0])
        if len(keys) != len(values):
            raise SourceError(f"{where}: K has {len(keys)} layers, V {len(values)}")
        return KVArrays(dict(enumerate(zip(keys, values, strict=True))), tuple(pairs), found)
    by_layer = _by_layer(where, pairs)
    layers: dict[int, KVPair] = {}
    for number in sorted(by_layer):
        keys, values = (_from_axes(_words(array), found)[0] for array in by_layer[number])
        layers[number] = keys, values
    return KVArrays(layers, tuple(by_layer[number] for number in sorted(by_layer)), found)


def _by_layer(where: str, pairs: list[tuple[NamedArray, NamedArray]]) -> dict[int, tuple[NamedArray, NamedArray]]:
    found: dict[int, tuple[NamedArray, NamedArray]] = {}
    for pair in pairs:
        number = _layer(pair[0].name)
        if number is None:
            raise SourceError(
                f"{where}: array {pair[0].name!r} does not say which layer it is: expected a name such as "
                "'layers.3.key', or an axis for the layers (--axes lbhtd, lhtd ...)"
            )
        if number in found:
            raise SourceError(
                f"{where}: arrays {found[number][0].name!r} and {pair[0].name!r} are both K of layer {number}"
            )
        found[number] = pair
    return found


def _layer(name: str) -> int | None:
    said = conventional(name)
    return layer_of(name) if said is None else said.layer


def _check_axes(where: str, axes: str | None) -> None:
    if axes is None:
        return
    letters = set(axes)
    if len(letters) != len(axes) or not _NEEDED <= letters <= _ALLOWED:
        raise SourceError(
            f"{where}: axes {axes!r}: expected h (kv_head), t (token), d (dimension), each once, and where there are "
            "such l (layer) and b (batch)"
        )


def _said_axes(arrays: Sequence[NamedArray], token_major: bool) -> str | None:
    """The axes that names or the source give to all arrays; None where one has none, or they differ."""
    (count, *others) = {len(array.shape) for array in arrays}
    if others:
        return None
    unnamed = "thd" if token_major and count == 3 else None
    found = {known_axes(array.name, count) or unnamed for array in arrays}
    return found.pop() if len(found) == 1 else None


def _check_only_reading(where: str, array: NamedArray, axes: str, least_tokens: int) -> None:
    """Refuse an array whose kv_heads could be its tokens."""
    heads = array.shape[axes.index("h")]
    if not least_tokens or heads < least_tokens:
        return
    other = axes.replace("ht", "th")
    raise SourceError(
        f"{where}: array {array.name!r} {list(array.shape)}: nothing says whether {heads} or "
        f"{array.shape[axes.index('t')]} is the number of tokens: say --axes {axes} (heads first) or --axes {other} "
        "(tokens first)"
    )


def _default_axes(where: str, array: NamedArray, layer: int | None) -> str:
    count = len(array.shape)
    if count == len(_WHOLE):
        return _WHOLE
    if layer is not None and count in _BY_LAYER:
        return _BY_LAYER[count]
    raise SourceError(
        f"{where}: array {array.name!r} has shape {list(array.shape)}: expected five axes (layer, batch, kv_head, "
        "token, dimension), or a layer number in its name and four or three axes (batch, kv_head, token, dimension); "
        "--axes says otherwise, e.g. --axes lthd"
    )


def _pair_up(where: str, arrays: Sequence[NamedArray]) -> list[tuple[NamedArray, NamedArray]]:
    found: dict[Part, dict[str, NamedArray]] = {part: {} for part in PARTS}
    for array in arrays:
        part, rest = part_of(where, array.name)
        if rest in found[part]:
            raise SourceError(f"{where}: arrays {found[part][rest].name!r} and {array.name!r} have the same role")
        found[part][rest] = array
    keys, values = found["key"], found["value"]
    for rest in keys.keys() ^ values.keys():
        has, lacks = ("K", "V") if rest in keys else ("V", "K")
        name = (keys.get(rest) or values[rest]).name
        raise SourceError(f"{where}: array {name!r} is {has} and there is no {lacks} to it")
    return [(array, values[rest]) for rest, array in keys.items()]


def _words(array: NamedArray) -> Words:
    """All words of an array; a view of the file where its bytes lie there as they are."""
    (piece,) = array.pieces()
    dtype = dtypes.by_name(array.dtype).numpy
    if array.itemsize != array.word_bytes:
        raise SourceError(f"array {array.name!r} holds raw bytes, which have no axes")
    return piece.view(dtype).reshape(array.shape, order=array.order)


def _from_axes(words: Words, axes: str) -> Words:
    """As ``[layer, batch, kv_head, token, dimension]``, with one layer and one batch where there was no such axis."""
    order = [axes.index(letter) for letter in _WHOLE if letter in axes]
    missing = tuple(position for position, letter in enumerate(_WHOLE) if letter not in axes)
    return np.expand_dims(words.transpose(order), missing)


def _to_axes(words: Words, axes: str) -> Words:
    missing = tuple(position for position, letter in enumerate(_WHOLE) if letter not in axes)
    kept = [letter for letter in _WHOLE if letter in axes]
    return np.ascontiguousarray(words.squeeze(missing).transpose([kept.index(letter) for letter in axes]))
