"""How far two caches are apart, layer by layer, in numbers: what different engines compute from one text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import Floats, Part
from ..errors import SourceError
from ..text import count
from .casting import floats
from .completeness import Completeness, pair_document, report_pair
from .differences import first_tokens, ordered_words
from .held_tokens import Held, held_tokens, other_tokens, said
from .layers import LayerArray, sorted_layers
from .source import Source

MIN_UNROUNDED = 0.5
"""Four bits leave a relative error below 0.15, and numbers that have nothing to do with each other one of 1.4."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far K or V of a layer are apart.

    Parameters
    ----------
    layer, part
        Which.
    words
        Numbers compared.
    above
        How many of them are further apart than the tolerance; numbers beside what is no number always are.
    largest
        The largest absolute difference: infinite beside an infinity that the other has not; NaN where one of two is
        NaN, which comes before all else.
    not_finite
        How many differences are infinite or NaN.
    head, token, dim
        Where the first of the largest is.
    relative
        The root mean square of the differences over that of the numbers of both inputs: what rounding leaves is 0.0002
        of fp16 and 0.002 of bf16, what another order leaves is about 1.4. Of finite numbers; None where there are none,
        or all are zero and differ from nothing.
    """

    layer: int
    part: Part
    words: int
    above: int
    largest: float
    not_finite: int
    head: int
    token: int
    dim: int
    relative: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity and no NaN: `largest` is null there."""
        return asdict(self) | {"largest": None if self.not_finite else self.largest}


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """The result of a comparison with a tolerance.

    Parameters
    ----------
    atol
        The absolute tolerance.
    distances
        By layer, K before V.
    unlike
        Why layers could not be compared, or not all of them: missing ones, other shapes.
    first_input, second_input
        What was compared.
    completeness
        The state of the model that the arrays of each input contain, where that is known.
    """

    atol: float
    distances: tuple[Distance, ...]
    unlike: tuple[str, ...] = ()
    first_input: str = ""
    second_input: str = ""
    completeness: tuple[Completeness | None, Completeness | None] = (None, None)

    @property
    def words(self) -> int:
        """Numbers compared."""
        return sum(each.words for each in self.distances)

    @property
    def above(self) -> int:
        """How many are further apart than the tolerance."""
        return sum(each.above for each in self.distances)

    @property
    def relative(self) -> float | None:
        """The largest relative error of a layer's K or V; None where none is known."""
        return max((each.relative for each in self.distances if each.relative is not None), default=None)

    @property
    def equal(self) -> bool:
        """Whether all is there and within the tolerance."""
        return not self.above and not self.unlike and bool(self.distances)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "first_input": self.first_input,
            "second_input": self.second_input,
            "atol": self.atol,
            "equal": self.equal,
            "words": self.words,
            "above": self.above,
            "relative": self.relative,
            "layers": [each.to_dict() for each in self.distances],
            "unlike": list(self.unlike),
            **pair_document(self.completeness),
        }

    def __str__(self) -> str:
        lines = [f"{line} (first input, second input)" for line in self.unlike]
        if self.distances:
            lines.append("layer  part       numbers  relative  above atol     largest  at head, token, dim")
        lines += [
            f"{each.layer:5}  {each.part:5}  {each.words:11,}  {_shown(each.relative):>8}  {each.above:10,}  "
            f"{each.largest:10.4g}  {each.head}, {each.token}, {each.dim}"
            for each in self.distances
        ]
        words = f"{self.above:,} of {count(self.words, 'number')}" if self.above else count(self.words, "number")
        verdict = f"{words} {'are further apart than' if self.above else 'within'} {self.atol:g}"
        if not self.distances:
            verdict = "no numbers were compared: nothing has its like in the other input"
        return "\n".join([*lines, verdict, *self._explain_relative(), *report_pair(self.completeness)])

    def _explain_relative(self) -> list[str]:
        if not self.relative:
            return []
        line = f"relative error (rms of differences over rms of numbers): at most {self.relative:.2g} of a layer"
        if self.relative >= MIN_UNROUNDED:
            line += ", which is no rounding: another order of axes, heads or pairs, other positions, or other tokens"
        return [line]


def compare_close(first: Source, second: Source, atol: float, held: tuple[Held, Held] | None = None) -> Closeness:
    """Compare K and V of every layer in numbers, whatever types they are stored in.

    Layers of which both say that they hold other tokens of the text are not compared.

    Parameters
    ----------
    first, second
        Arrays whose names say which layer's K or V they are.
    atol
        The largest absolute difference that is none.
    held
        Which tokens of the text each holds; by default what `held_tokens` says.

    Raises
    ------
    SourceError
        When one of the sources is no K and V of layers.
    """
    one, two = (_layers(source) for source in (first, second))
    other = other_tokens(*(held or (held_tokens(first), held_tokens(second))))
    unlike = said(other, {layer for layer, _ in one.keys() | two.keys()}, ": not compared")
    distances: list[Distance] = []
    for layer, part in sorted(one.keys() | two.keys()):
        if layer in other:
            continue
        pair = one.get((layer, part)), two.get((layer, part))
        name = f"layer {layer}, {part[0].upper()}"
        if pair[0] is None or pair[1] is None:
            unlike.append(f"{name}: only in the {'second' if pair[0] is None else 'first'}")
            continue
        shapes = [entry.geometry for entry in pair if entry]
        if shapes[0][::2] != shapes[1][::2]:
            unlike.append(f"{name}: [kv_head, token, head_dim] is {list(shapes[0])} and {list(shapes[1])}")
            continue
        tokens = min(shapes[0][1], shapes[1][1])
        if shapes[0] != shapes[1]:
            unlike.append(f"{name}: {shapes[0][1]} and {shapes[1][1]} tokens; the first {tokens} are compared")
        distances.append(_distance(layer, part, pair[0], pair[1], tokens, atol))
    return Closeness(
        atol=atol,
        distances=tuple(distances),
        unlike=tuple(unlike),
        first_input=" ".join(first.inputs),
        second_input=" ".join(second.inputs),
        completeness=(first.completeness, second.completeness),
    )


def _shown(relative: float | None) -> str:
    return "-" if relative is None else f"{relative:.2g}"


def _layers(source: Source) -> dict[tuple[int, Part], LayerArray]:
    try:
        entries = sorted_layers(source, keys_alone=True)
    except SourceError as error:
        raise type(error)(f"{error}; a tolerance is about K and V of layers") from None
    return {(entry.layer, entry.part): entry for entry in entries}


class _Pair(NamedTuple):
    """Numbers of two arrays from one place on."""

    start: int
    first: Floats
    second: Floats


def _distance(layer: int, part: Part, one: LayerArray, two: LayerArray, tokens: int, atol: float) -> Distance:
    heads, _, dims = one.geometry
    entries = [entry if entry.geometry[1] == tokens else first_tokens(entry, tokens) for entry in (one, two)]
    words = above = not_finite = place = 0
    largest = differences = numbers = 0.0
    for pair in _pairs(*entries):
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(pair.first.astype(np.float64) - pair.second)
        same = (pair.first == pair.second) | (np.isnan(pair.first) & np.isnan(pair.second))
        apart[same] = 0.0
        at = int(apart.argmax())  # the first NaN, where there is one
        if apart[at] > largest or (np.isnan(apart[at]) and not np.isnan(largest)):
            largest, place = float(apart[at]), pair.start + at
        not_finite += int(np.count_nonzero(~np.isfinite(apart)))
        above += int(np.count_nonzero(~(apart <= atol)))
        words += apart.size
        finite = np.isfinite(pair.first) & np.isfinite(pair.second)
        differences += float(np.square(apart[finite]).sum())
        squares = (np.square(each[finite].astype(np.float64)).sum() for each in (pair.first, pair.second))
        numbers += float(sum(squares)) / 2
    head, token, dim = (int(i) for i in np.unravel_index(place, (heads, tokens, dims)))
    return Distance(
        layer=layer,
        part=part,
        words=words,
        above=above,
        largest=largest,
        not_finite=not_finite,
        head=head,
        token=token,
        dim=dim,
        relative=math.sqrt(differences / numbers) if numbers else None,
    )


def _pairs(one: LayerArray, two: LayerArray) -> Iterator[_Pair]:
    """Both arrays in one order, ``[kv_head, token, head_dim]``, in runs."""
    runs = [_numbers(one), _numbers(two)]
    rests: list[Floats] = [np.empty(0, np.float32), np.empty(0, np.float32)]
    start = 0
    while True:
        rests = [rest if rest.size else next(run, rest) for rest, run in zip(rests, runs, strict=True)]
        size = min(rest.size for rest in rests)
        if not size:
            return
        yield _Pair(start, rests[0][:size], rests[1][:size])
        rests, start = [rest[size:] for rest in rests], start + size


def _numbers(entry: LayerArray) -> Iterator[Floats]:
    dtype, pieces = ordered_words(entry, False)
    for piece in pieces:
        yield floats(piece, dtype)
