"""Arrays sorted into layers: which array is K and which V of which layer, whatever its source calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..dtypes import PARTS, Part
from ..errors import KvmnnError, MissingOptionError, SourceError
from ..text import count, span
from .halves import check_one_half
from .named_array import NamedArray, Piece, rechunked
from .names import conventional, is_numbered, layer_of, part_of
from .source import FILE_KEY, Source
from .strided import in_c_order

MOST_HEADS = 256
"""More kv heads than any decoder has: twice those of the largest that are published (128)."""


USUAL_HEADS = 16
"""Kv heads that are nothing unusual, however few tokens there are."""

_MOST_SAID = 4
"""Kinds of layers, and runs of them, that an error names."""


class AxesError(MissingOptionError):
    """Nothing says which axis is the tokens; the message has what to say."""


@dataclass(frozen=True)
class LayerArray:
    """K or V of one layer.

    Parameters
    ----------
    layer, part
        Which.
    array
        ``[kv_head, token, head_dim]``, or ``[token, kv_head, head_dim]`` where `token_major`.
    token_major
        The order of its axes.
    """

    layer: int
    part: Part
    array: NamedArray
    token_major: bool = False

    @property
    def geometry(self) -> tuple[int, int, int]:
        """``(kv_heads, tokens, head_dim)``."""
        a, b, dims = self.array.shape
        return (b, a, dims) if self.token_major else (a, b, dims)


def sort(arrays: Sequence[NamedArray], *, token_major: bool = False, keys_alone: bool = False) -> list[LayerArray]:
    """K and V of every layer, in order, each with its words in C order.

    Names may be those of `CONVENTIONS`, such as ``layer_3.key`` or ``past_key_values.3.value``; the pieces of a KV dump
    (``run/layer_3/k_t0_16``) are joined along the tokens. Others say K or V by a word and the layer by a number. Arrays
    called ``k`` and ``v`` or the like, without a number, are one layer, or with four axes ``[layer, ...]`` all of them.
    Of ``3.0`` and ``3.1`` nothing says the axes: more than `MOST_HEADS` are tokens; fewer on both axes are asked about.

    Parameters
    ----------
    token_major
        Whether arrays are ``[token, kv_head, head_dim]``; those of a KV dump say so by their names.
    keys_alone
        Whether there may be no V at all: latent attention stores K alone.

    Raises
    ------
    SourceError
        When a name says no place, two arrays have the same place, a layer has only one of the two, or layers differ in
        geometry or type.
    AxesError
        When there are more than `MOST_HEADS` heads and no more tokens than that, or more axes than three.
    """
    check_one_half([array.name for array in arrays], "")
    found: dict[tuple[int, Part], list[tuple[int, LayerArray]]] = {}
    for array in arrays:
        for start, entry in _places(array, token_major):
            found.setdefault((entry.layer, entry.part), []).append((start, entry))
    if not found:
        raise SourceError("there is no K and no V among the arrays")
    for entry in (entry for several in found.values() for _, entry in several):
        heads, tokens, _ = entry.geometry
        if heads > MOST_HEADS >= tokens and not entry.token_major:
            raise AxesError(
                f"array {entry.array.name!r} {list(entry.array.shape)}: read as [kv_head, token, head_dim] it has "
                f"{heads:,} heads, more than {MOST_HEADS}: where tokens come first, say so (--token-major)"
            )
    layers = sorted({layer for layer, _ in found})
    parts = PARTS[:1] if keys_alone and not any(part == "value" for _, part in found) else PARTS
    for layer in layers:
        for part in parts:
            if (layer, part) not in found:
                raise SourceError(f"layer {layer} has no array of its {part}s")
    return [_joined(found[layer, part]) for layer in layers for part in parts]


def _places(array: NamedArray, token_major: bool) -> Iterator[tuple[int, LayerArray]]:
    """Which tokens of which layers an array holds: ``(first token, array)``."""
    part, layer, start, token_major = place_of(array, token_major)
    if array.itemsize != array.word_bytes:
        raise SourceError(
            f"array {array.name!r}: holds bytes, not the numbers of K or V: blocks that stay blocks (--blocks) are for "
            "encode, unpack and diff; without it they are read as numbers"
        )
    if len(array.shape) == 4 and (layer is None or array.shape[0] == 1):
        for index in range(array.shape[0]):
            yield 0, LayerArray(index if layer is None else layer, part, _row_of(array, index), token_major)
    elif len(array.shape) == 3:
        yield start, LayerArray(layer or 0, part, in_c_order(array) if array.order == "F" else array, token_major)
    else:
        error = AxesError if len(array.shape) > 3 else SourceError
        raise error(
            f"array {array.name!r}: has shape {list(array.shape)}: expected [kv_head, token, head_dim]"
            + (" or [layer, kv_head, token, head_dim]" if layer is None else "")
            + _advice(array)
        )


def _advice(array: NamedArray) -> str:
    """What to say of arrays with more axes."""
    own = conventional(array.name)
    if len(array.shape) == 4 and own is not None and array.name == array_name(own.layer, own.part):
        return f", and it is a batch of {array.shape[0]}: --batch N takes one text of it, from 0"
    if len(array.shape) == 4 and own is not None and not own.is_dump:
        return f": if it is a batch of {array.shape[0]}, --axes bhtd --batch N takes one text of it, from 0"
    return " (--axes says how arrays lie)"


def place_of(array: NamedArray, token_major: bool) -> tuple[Part, int | None, int, bool]:
    """Part, layer (None if its name does not say it), first token, and whether tokens come before heads.

    Raises
    ------
    MissingOptionError
        For a name that does not say whether it is K or V, and where nothing says which axis is the tokens.
    """
    found = conventional(array.name)
    if found is not None:
        return found.part, found.layer, found.start, found.order == "thd" if found.is_dump else token_major
    try:
        part, rest = part_of("", array.name)
    except SourceError:
        raise MissingOptionError(
            f"array {array.name!r}: its name does not say whether it is K or V of which layer: expected e.g. "
            f"'{array_name(0, 'key')}', 'k' with --axes that have l for an axis of layers, or 2 in them for one of K "
            "and V (an array of a .npy file is called as the file)" + _advice_on_latents(array)
        ) from None
    layer = layer_of(rest)
    return part, layer, 0, token_major or (is_numbered(array.name) and _tokens_first(array))


def _advice_on_latents(array: NamedArray) -> str:
    """What to say of arrays with two axes, as latent attention has them."""
    return "; --axes td takes it as the one tensor of latent attention" if len(array.shape) == 2 else ""


def _tokens_first(array: NamedArray) -> bool:
    """Whether tokens come before heads, where only the lengths of the axes can tell.

    Raises
    ------
    SourceError
        Where either may be the number of heads.
    """
    if len(array.shape) not in (3, 4):
        return False
    first, second = array.shape[-3:-1]
    if first <= MOST_HEADS and second <= MOST_HEADS:
        letters = "bhtd"[-len(array.shape) :]
        raise AxesError(
            f"array {array.name!r} {list(array.shape)}: nothing says whether {first} or {second} is the number of "
            f"tokens: say --axes {letters} ({second} tokens) or --axes {letters.replace('ht', 'th')} ({first} tokens)"
        )
    return second <= MOST_HEADS


def heads_hint(source: Source, axes: str | None = None) -> str | None:
    """What to say where arrays are read as of many heads and few tokens; None where that is nothing odd.

    Parameters
    ----------
    source
        Only its first array is looked at. One that says its axes itself is believed.
    axes
        What the caller said of them.
    """
    if source.cache or source.engine_cache or source.token_major or FILE_KEY in source.metadata:
        return None
    if source.axes and axes is None:
        return None
    array = next(iter(source.arrays), None)
    if array is None or not 3 <= len(array.shape) <= 5:
        return None
    try:
        _, layer, _, token_major = place_of(array, token_major=False)
    except SourceError:
        return None
    heads, tokens = array.shape[-3:-1]
    if token_major or heads <= max(tokens, USUAL_HEADS) or (axes is None and heads > MOST_HEADS >= tokens):
        return None  # of the last an error is going to say it
    lie = axes or ("lbhtd"[-len(array.shape) :] if len(array.shape) != 4 else "lhtd" if layer is None else "bhtd")
    turned = lie.translate(str.maketrans("ht", "th"))
    return (
        f"array {array.name!r} {list(array.shape)} is read as {count(heads, 'kv head')} of {count(tokens, 'token')}: "
        f"where tokens come first, --axes {turned} says so"
    )


def _row_of(array: NamedArray, index: int) -> NamedArray:
    """One row of the first axis, as an array of its own."""
    if array.order == "F":
        return in_c_order(array, (index,))
    nbytes = array.nbytes // array.shape[0]
    return replace(array, shape=array.shape[1:], reader=partial(_slice, array, index * nbytes, nbytes))


def _slice(array: NamedArray, begin: int, nbytes: int, step: int) -> Iterator[Piece]:
    """Bytes of an array from `begin` on; what is before them is passed over, which costs nothing in a mapped file.

    An array is read to its end where the bytes are its last: what is checked behind them is checked.
    """
    position = 0
    for piece in array.reader(step):
        low, high = max(begin - position, 0), min(begin + nbytes - position, piece.size)
        position += piece.size
        if low < high:
            yield piece[low:high]
        if begin + nbytes <= position < array.nbytes:
            return


def _joined(pieces: list[tuple[int, LayerArray]]) -> LayerArray:
    pieces.sort(key=lambda entry: entry[0])
    first = pieces[0][1]
    if len(pieces) == 1:
        return first
    names = " and ".join(repr(entry.array.name) for _, entry in pieces[:2])
    tokens, (heads, _, dims) = 0, first.geometry
    for start, entry in pieces:
        if not entry.token_major or start != tokens:
            raise SourceError(f"layer {first.layer}: {names} are both its {first.part}s, and do not follow each other")
        if (heads, dims, first.array.dtype) != (entry.geometry[0], entry.geometry[2], entry.array.dtype):
            raise SourceError(f"layer {first.layer}: {names} differ in geometry or type")
        tokens += entry.geometry[1]
    joined = replace(
        first.array,
        name=f"{first.array.name.rpartition('_t')[0]}_t0_{tokens}",
        shape=(tokens, heads, dims),
        array_dtype=first.array.array_dtype.replace(">", "<"),
        reader=partial(_chain, [entry.array for _, entry in pieces]),
    )
    return replace(first, array=joined)


def _chain(arrays: list[NamedArray], step: int) -> Iterator[Piece]:
    runs = (run for array in arrays for run in array.pieces(step))
    yield from rechunked(runs, step, sum(array.nbytes for array in arrays))


def with_whole_dumps(arrays: Sequence[NamedArray]) -> list[NamedArray]:
    """The same arrays; where all are of KV dumps, and some are pieces of one layer, those joined along the tokens.

    Raises
    ------
    SourceError
        As for `sort`.
    """
    places = [conventional(array.name) for array in arrays]
    dumps = [(place.layer, place.part) for place in places if place and place.is_dump]
    if len(dumps) < len(arrays) or len(set(dumps)) == len(dumps):
        return list(arrays)
    return [entry.array for entry in sort(arrays)]


def sorted_layers(source: Source, *, token_major: bool = False, keys_alone: bool = False) -> list[LayerArray]:
    """`sort` of the arrays of a source, which errors name; `token_major` where its arrays are so without saying it."""
    try:
        return sort(source.arrays, token_major=source.token_major or token_major, keys_alone=keys_alone)
    except SourceError as error:
        raise type(error)(f"{place_said(source)}{error}") from None


def sorted_with_latents(source: Source, *, token_major: bool = False) -> list[LayerArray]:
    """`sorted_layers` where K alone may be all that a model keeps: an engine says so, or each layer has one head.

    Latent attention stores one tensor for K and V, without heads. K of several heads lacks its V.
    """
    arrays = sorted_layers(source, token_major=token_major, keys_alone=True)
    heads = arrays[0].geometry[0]
    has_values = any(entry.part == "value" for entry in arrays)
    if not has_values and source.engine_cache is None and heads != 1:
        raise SourceError(
            f"{place_said(source)}layer {arrays[0].layer} has no array of its values: K alone is all that latent "
            f"attention keeps, of one kv head, and these have {heads}"
        )
    return arrays


def place_said(source: Source) -> str:
    """What errors about the arrays of a source begin with."""
    return f"{' '.join(source.inputs)}: " if source.inputs else ""


def check_pairs(layers: Sequence[LayerArray], where: str = "", *, one_size: bool = True) -> None:
    """Raise `KvmnnError` where K and V of a layer differ in shape, without `one_size` in heads or tokens.

    `where` begins the error: `place_said`.
    """
    for key, value in zip(layers[::2], layers[1::2], strict=True):
        same = key.geometry[:2] == value.geometry[:2] and (not one_size or key.geometry[2] == value.geometry[2])
        if not same:
            raise KvmnnError(
                f"{where}layer {key.layer}: keys are {list(key.array.shape)} and values {list(value.array.shape)}: "
                f"expected {'the same' if one_size else 'the same heads and tokens'}"
            )


def common_geometry(layers: Sequence[LayerArray], where: str = "") -> tuple[int, int, str]:
    """``(kv_heads, head_dim, dtype)`` that all layers share.

    Parameters
    ----------
    where
        What errors begin with: `place_said`.

    Raises
    ------
    KvmnnError
        When they do not, or K and V of a layer differ in shape.
    """
    check_pairs(layers, where)
    found: dict[tuple[int, int, str], list[int]] = {}
    for entry in layers:
        numbers = found.setdefault((entry.geometry[0], entry.geometry[2], entry.array.dtype), [])
        if entry.layer not in numbers:
            numbers.append(entry.layer)
    types = sorted({dtype for _, _, dtype in found})
    if len({kind[:2] for kind in found}) == 1 < len(types):
        raise KvmnnError(f"{where}the arrays are {' and '.join(types)}: expected one type")
    if len(found) > 1:
        kinds = [
            f"{_layers_said(numbers)} {count(heads, 'kv head')} x {dims} dims of {dtype}"
            for (heads, dims, dtype), numbers in list(found.items())[:_MOST_SAID]
        ]
        more = f" and {len(found) - _MOST_SAID} more" if len(found) > _MOST_SAID else ""
        raise KvmnnError(
            f"{where}{', '.join(kinds)}{more}: expected one geometry (encode, measure, unpack, diff and store put take "
            "layers that differ)"
        )
    return next(iter(found))


def _layers_said(numbers: Sequence[int]) -> str:
    """``layer 3 has``, ``layers 0 to 2, 5 have``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said = ", ".join(map(span, runs[:_MOST_SAID])) + (" ..." if len(runs) > _MOST_SAID else "")
    return f"layer {said} has" if len(numbers) == 1 else f"layers {said} have"


def array_name(layer: int, part: Part) -> str:
    """What the array of a layer's K or V is called everywhere."""
    return f"layer_{layer}.{part}"
