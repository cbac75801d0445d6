"""K and V among the arrays of a source, brought into one axis order and back.

Which array is K and which V, and of what layer, is in the names; which axis is which is in the number of axes or said
by the caller. docs/compressor-forward.md lists the rules; what does not follow them is refused, never guessed.
A name is no proof of its axes: runtimes write ``past_key_values.0.key`` with tokens before heads as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import dtypes
from ..dtypes import PARTS, KVPair, Part, Words
from ..errors import MissingOptionError, OptionError, SourceError
from .layers import MOST_HEADS, AxesError, place_of, with_whole_dumps
from .named_array import ArrayInfo, NamedArray
from .names import conventional, is_numbered, layer_of, part_of

_NEEDED, _ALLOWED = set("htd"), set("lbhtd")
_WHOLE, _BY_LAYER = "lbhtd", {4: "bhtd", 3: "htd"}
_LETTERS = {"l": "layer", "b": "batch", "h": "kv_head", "t": "token", "d": "dimension"}


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
    axes_by
        What says so, for people.
    """

    layers: dict[int, KVPair]
    pairs: tuple[tuple[NamedArray, NamedArray], ...]
    axes: str
    axes_by: str

    @property
    def described(self) -> str:
        """Every axis of the arrays with its length, and what says so."""
        shape = self.pairs[0][0].shape
        named = (f"{_LETTERS[letter]} {length:,}" for letter, length in zip(self.axes, shape, strict=True))
        return f"axes {self.axes} ({self.axes_by}): {', '.join(named)}"

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


@dataclass(frozen=True)
class SaidAxes:
    """What is known of the axes of arrays.

    Parameters
    ----------
    letters
        Of all arrays, such as ``"lthd"``: h, t and d, and l or b for layers or batches; None where nothing says them.
    by
        Who says so.
    token_major
        `Source.token_major`: three axes are ``thd``.
    least_tokens
        Tokens that there are at least.
    """

    letters: str | None = None
    by: str = "said"
    token_major: bool = False
    least_tokens: int = 0


def read_kv(where: str, arrays: Sequence[NamedArray], said: SaidAxes | None = None) -> KVArrays:
    """Find K and V among `arrays`.

    Parameters
    ----------
    where
        What messages call the source.
    arrays
        All of them must be K or V.
    said
        What is known of their axes. Where that does not say, names of KV dumps do, which hold the number of tokens.
        Other arrays with five axes are ``lbhtd``; with a layer number in their names those with four are ``bhtd`` and
        with three ``htd``, but only where heads and tokens the other way round would be more than `MOST_HEADS` heads,
        or fewer tokens than there are.

    Raises
    ------
    SourceError
        For names that are neither K nor V, a K without its V or the other way round, layers without number or twice,
        shapes that do not agree with the axes.
    MissingOptionError
        For arrays whose heads could be tokens and whose axes nothing says, and several pairs to choose from.
    """
    said = said or SaidAxes()
    _check_axes(where, said.letters)
    pairs = _pair_up(where, with_whole_dumps(arrays))
    found, by = _axes(where, [array for pair in pairs for array in pair], said)
    for array in (array for pair in pairs for array in pair):
        if len(array.shape) != len(found):
            raise SourceError(
                f"{where}: array {array.name!r} has {len(array.shape)} axes {list(array.shape)}, expected "
                f"{len(found)} ({found})"
            )
    if "l" in found:
        if len(pairs) > 1:
            raise MissingOptionError(
                f"{where}: holds {len(pairs)} pairs of K and V, each with all layers; --tensor chooses"
            )
        keys, values = (_from_axes(_words(array), found) for array in pairs[0])
        if len(keys) != len(values):
            raise SourceError(f"{where}: K has {len(keys)} layers, V {len(values)}")
        return KVArrays(dict(enumerate(zip(keys, values, strict=True))), tuple(pairs), found, by)
    by_layer = _by_layer(where, pairs)
    layers: dict[int, KVPair] = {}
    for number in sorted(by_layer):
        keys, values = (_from_axes(_words(array), found)[0] for array in by_layer[number])
        layers[number] = keys, values
    return KVArrays(layers, tuple(by_layer[number] for number in sorted(by_layer)), found, by)


def usual_axes(arrays: Sequence[NamedArray], *, token_major: bool = False) -> str | None:
    """The axes that go with the names of arrays (`names.CONVENTIONS`, and words for K or V), as `layers.sort` has them.

    None where names do not say them, or the arrays have too many heads for it.
    """
    said = {_usual_axes(array) for array in arrays}
    letters = said.pop() if len(said) == 1 else None
    return letters.replace("ht", "th") if letters and token_major else letters


def _usual_axes(array: NamedArray) -> str | None:
    name = conventional(array.name)
    if name is not None and name.is_dump:
        return None
    letters = {4: "lhtd"} if _layer(array.name) is None else _BY_LAYER
    found = letters.get(len(array.shape))
    if found and is_numbered(array.name):
        try:
            found = found.replace("ht", "th") if place_of(array, token_major=False)[3] else found
        except AxesError:
            return None
    return found if found and array.shape[found.index("h")] <= MOST_HEADS else None


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
        raise OptionError(
            f"{where}: axes {axes!r}: expected h (kv_head), t (token), d (dimension), each once, and where there are "
            "such l (layer) and b (batch)"
        )


def _axes(where: str, arrays: Sequence[NamedArray], said: SaidAxes) -> tuple[str, str]:
    """The axes of all arrays, and what says so."""
    if said.letters is not None:
        return said.letters, said.by
    if said.token_major and all(len(array.shape) == 3 for array in arrays):
        return "thd", "as in every KV dump"
    first = arrays[0]
    found = {_axes_of_dump(array) for array in arrays}
    if len(found) == 1 and (named := found.pop()) is not None:
        return named, f"{first.name!r} holds the number of tokens"
    letters = _default_axes(where, first, _layer(first.name))
    readings = [each for each in (letters, letters.replace("ht", "th")) if _is_possible(first, each, said.least_tokens)]
    if readings == [letters]:
        return letters, "the shape has no other reading"
    heads, tokens = (first.shape[letters.index(letter)] for letter in "ht")
    if max(heads, tokens) < said.least_tokens:
        raise SourceError(f"{where}: array {first.name!r} {list(first.shape)} has no {said.least_tokens} tokens")
    raise AxesError(
        f"{where}: array {first.name!r} {list(first.shape)}: nothing says whether {heads} or {tokens} is the number of "
        f"tokens: say --axes {letters} ({tokens} tokens) or --axes {letters.replace('ht', 'th')} ({heads} tokens)"
    )


def _axes_of_dump(array: NamedArray) -> str | None:
    """The axes by a name of KV dumps, where the tokens that it names are the array's."""
    name = conventional(array.name)
    if name is None or name.end is None or len(array.shape) != 3:
        return None
    return name.order if array.shape[name.order.index("t")] == name.end - name.start else None


def _is_possible(array: NamedArray, axes: str, least_tokens: int) -> bool:
    heads, tokens = (array.shape[axes.index(letter)] for letter in "ht")
    return heads <= MOST_HEADS and tokens >= least_tokens


def _default_axes(where: str, array: NamedArray, layer: int | None) -> str:
    count = len(array.shape)
    if count == len(_WHOLE):
        return _WHOLE
    if layer is not None and count in _BY_LAYER:
        return _BY_LAYER[count]
    error = AxesError if count > 2 else SourceError
    raise error(
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
