"""Where two caches differ: the first place, and how many in all. Words are compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import Part
from ..errors import SourceError
from ..text import count
from .completeness import Completeness, pair_document, report_pair
from .engine_cache import layers_of
from .held_tokens import Held, held_tokens, other_tokens, said
from .layers import AxesError, LayerArray, sorted_layers
from .named_array import NamedArray, Piece
from .source import Source

_STEP = 4 << 20
_Layers = dict[tuple[int, Part], LayerArray]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The first word that differs.

    Parameters
    ----------
    layer, part, head, token, dim
        Where it is; None for arrays that are not known to be K or V of a layer.
    array
        What the array is called in the first input.
    index
        Its index in that array.
    first, second
        Its values.
    """

    array: str
    index: tuple[int, ...]
    first: float
    second: float
    layer: int | None = None
    part: Part | None = None
    head: int | None = None
    token: int | None = None
    dim: int | None = None

    def __str__(self) -> str:
        if self.part is None:
            where = f"array {self.array!r}, index {list(self.index)}"
        else:
            letter = self.part[0].upper()
            where = f"layer {self.layer}, {letter}, head {self.head}, token {self.token}, dim {self.dim}"
        return f"{where}: {self.first!r} and {self.second!r}"


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The result of a comparison.

    Parameters
    ----------
    words
        Words compared.
    differing
        How many of them differ.
    first
        The first that does.
    unlike
        Why arrays could not be compared: missing ones, other shapes or types.
    hints
        What would have to be said of the axes of an input, where arrays were compared by their names for want of it.
    first_input, second_input
        What was compared.
    completeness
        The state of the model that the arrays of each input contain, where that is known.
    """

    words: int = 0
    differing: int = 0
    first: Place | None = None
    unlike: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    first_input: str = ""
    second_input: str = ""
    completeness: tuple[Completeness | None, Completeness | None] = (None, None)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differing and not self.unlike

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "first_input": self.first_input,
            "second_input": self.second_input,
            "equal": self.equal,
            "words": self.words,
            "differing": self.differing,
            "first": None if self.first is None else asdict(self.first),
            "unlike": list(self.unlike),
            "hints": list(self.hints),
            **pair_document(self.completeness),
        }

    def __str__(self) -> str:
        lines = [f"{line} (first input, second input)" for line in self.unlike]
        if self.first is not None:
            lines.append(f"first difference: {self.first}")
            lines.append(f"{self.differing:,} of {self.words:,} words differ")
        elif self.words and lines:
            lines.append(f"equal otherwise: {count(self.words, 'word')}, bit by bit")
        lines += self.hints
        lines = lines or [f"equal: {count(self.words, 'word')}, bit by bit"]
        return "\n".join([*lines, *report_pair(self.completeness)])


def compare(first: Source, second: Source, held: tuple[Held, Held] | None = None) -> Differences:
    """Compare layer by layer where both inputs are K and V of layers, else array by array of the same name.

    The order of axes does not matter where it is known: a dump's ``[token, kv_head, head_dim]`` is compared with the
    ``[kv_head, token, head_dim]`` of everything else. Layers of which both say that they hold other tokens of the text
    are unlike, whatever their words are. `held` says which each holds; by default it is what `held_tokens` says.
    """
    one, two = layers_by_place(first), layers_by_place(second)
    if one is not None and two is not None:
        found = _compare_layers(one, two)
    else:
        found = _compare_arrays(first.arrays, second.arrays)
        found = replace(found, hints=tuple(_hints(first, second)) if found.unlike else ())
    other = other_tokens(*(held or (held_tokens(first), held_tokens(second))))
    return replace(
        found,
        unlike=(*said(other, layers_of([*first, *second])), *found.unlike),
        first_input=" ".join(first.inputs),
        second_input=" ".join(second.inputs),
        completeness=(first.completeness, second.completeness),
    )


def layers_by_place(source: Source) -> _Layers | None:
    """K and V of every layer of a source; None where its arrays are no such."""
    try:
        return {(entry.layer, entry.part): entry for entry in sorted_layers(source, keys_alone=True)}
    except SourceError:
        return None


def _hints(first: Source, second: Source) -> Iterator[str]:
    """What would have to be said of the axes, so that layers are compared rather than names."""
    for source in (first, second):
        try:
            sorted_layers(source, keys_alone=True)
        except AxesError as error:
            yield str(error)
        except SourceError:
            pass


def _compare_layers(first: _Layers, second: _Layers) -> Differences:
    total = Differences()
    unlike: list[str] = []
    for layer, part in sorted(first.keys() | second.keys()):  # "key" comes before "value"
        name = f"layer {layer}, {part[0].upper()}"
        one, two = first.get((layer, part)), second.get((layer, part))
        if one is None or two is None:
            unlike.append(f"{name}: only in the {'second' if one is None else 'first'}")
        elif one.array.dtype != two.array.dtype:
            unlike.append(f"{name}: {one.array.dtype} and {two.array.dtype}")
        elif one.geometry[::2] == two.geometry[::2] and one.geometry != two.geometry:
            tokens = min(one.geometry[1], two.geometry[1])
            unlike.append(f"{name}: {one.geometry[1]} and {two.geometry[1]} tokens; the first {tokens} are compared")
            one, two = first_tokens(one, tokens), first_tokens(two, tokens)
            total = _added(total, _compare_words(ordered_words(one, False), ordered_words(two, False)), one, False)
        elif one.geometry != two.geometry:
            unlike.append(f"{name}: [kv_head, token, head_dim] is {list(one.geometry)} and {list(two.geometry)}")
        else:
            token_major = one.token_major and two.token_major
            found = _compare_words(ordered_words(one, token_major), ordered_words(two, token_major))
            total = _added(total, found, one, token_major)
    return Differences(words=total.words, differing=total.differing, first=total.first, unlike=tuple(unlike))


def first_tokens(entry: LayerArray, tokens: int) -> LayerArray:
    """The first tokens of an array."""
    words = entry.array.to_numpy()
    words = np.ascontiguousarray(words[:tokens] if entry.token_major else words[:, :tokens])
    array = replace(
        entry.array,
        shape=words.shape,
        array_dtype=words.dtype.str,
        reader=lambda _: iter([words.reshape(-1).view(np.uint8)]),
    )
    return replace(entry, array=array)


def _added(total: Differences, found: _Found, entry: LayerArray, token_major: bool) -> Differences:
    place = total.first
    if found.differing and place is None:
        heads, tokens, dims = entry.geometry
        shape = (tokens, heads, dims) if token_major else (heads, tokens, dims)
        index = tuple(int(i) for i in np.unravel_index(found.position, shape))
        token, head = index[:2] if token_major else index[1::-1]
        place = Place(
            array=entry.array.name,
            index=(token, head, index[2]) if entry.token_major else (head, token, index[2]),
            first=found.first,
            second=found.second,
            layer=entry.layer,
            part=entry.part,
            head=head,
            token=token,
            dim=index[2],
        )
    return Differences(words=total.words + found.words, differing=total.differing + found.differing, first=place)


def _compare_arrays(first: Sequence[NamedArray], second: Sequence[NamedArray]) -> Differences:
    words = differing = 0
    place: Place | None = None
    unlike: list[str] = []
    for name, one, two in _pairs(first, second):
        if one is None or two is None:
            unlike.append(f"array {name!r}: only in the {'second' if one is None else 'first'}")
        elif one.dtype != two.dtype:
            unlike.append(f"array {name!r}: {one.dtype} and {two.dtype}")
        elif (one.shape, one.order) != (two.shape, two.order) and 1 not in (len(one.shape), len(two.shape)):
            unlike.append(f"array {name!r}: {list(one.shape)} {one.order} and {list(two.shape)} {two.order}")
        elif one.nbytes != two.nbytes:
            unlike.append(f"array {name!r}: {one.nbytes} and {two.nbytes} bytes")
        else:
            found = _compare_words((one.dtype, one.pieces(_STEP)), (two.dtype, two.pieces(_STEP)))
            words, differing = words + found.words, differing + found.differing
            if found.differing and place is None:
                index = one.index_of(found.position * one.word_bytes)
                place = Place(array=name, index=index, first=found.first, second=found.second)
    return Differences(words=words, differing=differing, first=place, unlike=tuple(unlike))


def _pairs(
    first: Sequence[NamedArray], second: Sequence[NamedArray]
) -> Iterator[tuple[str, NamedArray | None, NamedArray | None]]:
    """Arrays of the same name; one array is compared with one array whatever they are called."""
    if len(first) == len(second) == 1:
        yield first[0].name, first[0], second[0]
        return
    others = {array.name: array for array in second}
    for array in first:
        yield array.name, array, others.pop(array.name, None)
    for name, array in others.items():
        yield name, None, array


_Words = tuple[str, Iterator[Piece]]


@dataclass
class _Found:
    words: int = 0
    differing: int = 0
    position: int = 0
    first: float = 0.0
    second: float = 0.0


def ordered_words(entry: LayerArray, token_major: bool) -> _Words:
    """The array's words, with the head running slowest unless `token_major`."""
    pieces = entry.array.pieces(_STEP)
    if entry.token_major == token_major:
        return entry.array.dtype, pieces
    heads, tokens, dims = entry.geometry
    words = np.concatenate(list(pieces)).view(f"<u{entry.array.word_bytes}").reshape(tokens, heads, dims)
    return entry.array.dtype, (np.ascontiguousarray(words[:, head]).reshape(-1).view(np.uint8) for head in range(heads))


def _compare_words(one: _Words, two: _Words) -> _Found:
    dtype = dtypes.by_name(one[0])
    found = _Found()
    rests: list[Piece] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
    while True:
        rests = [rest if rest.size else next(run[1], rest) for rest, run in zip(rests, (one, two), strict=True)]
        nbytes = min(rests[0].size, rests[1].size) // dtype.itemsize * dtype.itemsize
        if not nbytes:
            return found
        words = [rest[:nbytes].view(f"<u{dtype.itemsize}") for rest in rests]
        differs = np.flatnonzero(words[0] != words[1])
        if differs.size and not found.differing:
            at = int(differs[0])
            found.position = found.words + at
            found.first, found.second = (_value(run[at:], dtype.name) for run in words)
        found.words += nbytes // dtype.itemsize
        found.differing += differs.size
        rests = [rest[nbytes:] for rest in rests]


def _value(word: npt.NDArray[Any], dtype: str) -> float:
    if dtype == "bf16":
        return float((word.astype("<u4") << np.uint32(16)).view("<f4")[0])
    return float(word.view(dtypes.by_name(dtype).numpy)[0])
