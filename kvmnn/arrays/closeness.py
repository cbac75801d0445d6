"""How far two caches are apart, layer by layer, in numbers: what different engines compute from one text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import Floats, Part
from ..errors import SourceError
from ..text import pluralize
from .casting import to_float32
from .completeness import Completeness, build_pair_document, format_missing_of_pair
from .differences import read_ordered_elements, take_first_tokens
from .held_tokens import PositionMap, describe_conflicts, find_position_conflicts, read_token_positions
from .layers import LayerArray, collect_layers
from .source import Source

MIN_NON_ROUNDING_ERROR = 0.5
"""Four bits leave a relative error below 0.15, and numbers that have nothing to do with each other one of 1.4."""


@dataclass(frozen=True, kw_only=True)
class ErrorStats:
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
class ToleranceReport:
    """The result of a comparison with a tolerance.

    Parameters
    ----------
    atol
        The absolute tolerance.
    errors
        By layer, K before V.
    unlike
        Why layers could not be compared, or not all of them: missing ones, other shapes.
    first_input, second_input
        What was compared.
    completeness
        The state of the model that the arrays of each input contain, where that is known.
    """

    atol: float
    errors: tuple[ErrorStats, ...]
    unlike: tuple[str, ...] = ()
    first_input: str = ""
    second_input: str = ""
    completeness: tuple[Completeness | None, Completeness | None] = (None, None)

    @property
    def words(self) -> int:
        """Numbers compared."""
        return sum(entry.words for entry in self.errors)

    @property
    def above(self) -> int:
        """How many are further apart than the tolerance."""
        return sum(entry.above for entry in self.errors)

    @property
    def relative(self) -> float | None:
        """The largest relative error of a layer's K or V; None where none is known."""
        return max((entry.relative for entry in self.errors if entry.relative is not None), default=None)

    @property
    def equal(self) -> bool:
        """Whether all is there and within the tolerance."""
        return not self.above and not self.unlike and bool(self.errors)

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
            "layers": [entry.to_dict() for entry in self.errors],
            "unlike": list(self.unlike),
            **build_pair_document(self.completeness),
        }

    def __str__(self) -> str:
        lines = [f"{line} (first input, second input)" for line in self.unlike]
        if self.errors:
            lines.append("layer  part       numbers  relative  above atol     largest  at head, token, dim")
        lines += [
            f"{entry.layer:5}  {entry.part:5}  {entry.words:11,}  {_format_relative_error(entry.relative):>8}  "
            f"{entry.above:10,}  "
            f"{entry.largest:10.4g}  {entry.head}, {entry.token}, {entry.dim}"
            for entry in self.errors
        ]
        count_text = (
            f"{self.above:,} of {pluralize(self.words, 'number')}" if self.above else pluralize(self.words, "number")
        )
        verdict = f"{count_text} {'are further apart than' if self.above else 'within'} {self.atol:g}"
        if not self.errors:
            verdict = "no numbers were compared: nothing has its like in the other input"
        return "\n".join([*lines, verdict, *self._explain_relative(), *format_missing_of_pair(self.completeness)])

    def _explain_relative(self) -> list[str]:
        if not self.relative:
            return []
        line = f"relative error (rms of differences over rms of numbers): at most {self.relative:.2g} of a layer"
        if self.relative >= MIN_NON_ROUNDING_ERROR:
            line += ", which is no rounding: another order of axes, heads or pairs, other positions, or other tokens"
        return [line]


def compare_allclose(
    first: Source, second: Source, atol: float, positions: tuple[PositionMap, PositionMap] | None = None
) -> ToleranceReport:
    """Compare K and V of every layer in numbers, whatever types they are stored in.

    Layers of which both say that they hold other tokens of the text are not compared.

    Parameters
    ----------
    first, second
        Arrays whose names say which layer's K or V they are.
    atol
        The largest absolute difference that is none.
    positions
        Which tokens of the text each holds; by default what `read_token_positions` says.

    Raises
    ------
    SourceError
        When one of the sources is no K and V of layers.
    """
    first_layers, second_layers = (_require_layers(source) for source in (first, second))
    conflicts = find_position_conflicts(*(positions or (read_token_positions(first), read_token_positions(second))))
    incompatible = describe_conflicts(
        conflicts, {layer for layer, _ in first_layers.keys() | second_layers.keys()}, ": not compared"
    )
    errors: list[ErrorStats] = []
    for layer, part in sorted(first_layers.keys() | second_layers.keys()):
        if layer in conflicts:
            continue
        pair = first_layers.get((layer, part)), second_layers.get((layer, part))
        name = f"layer {layer}, {part[0].upper()}"
        if pair[0] is None or pair[1] is None:
            incompatible.append(f"{name}: only in the {'second' if pair[0] is None else 'first'}")
            continue
        shapes = [entry.geometry for entry in pair if entry]
        if shapes[0][::2] != shapes[1][::2]:
            incompatible.append(f"{name}: [kv_head, token, head_dim] is {list(shapes[0])} and {list(shapes[1])}")
            continue
        tokens = min(shapes[0][1], shapes[1][1])
        if shapes[0] != shapes[1]:
            incompatible.append(f"{name}: {shapes[0][1]} and {shapes[1][1]} tokens; the first {tokens} are compared")
        errors.append(_measure_error(layer, part, pair[0], pair[1], tokens, atol))
    return ToleranceReport(
        atol=atol,
        errors=tuple(errors),
        unlike=tuple(incompatible),
        first_input=" ".join(first.inputs),
        second_input=" ".join(second.inputs),
        completeness=(first.completeness, second.completeness),
    )


def _format_relative_error(relative: float | None) -> str:
    return "-" if relative is None else f"{relative:.2g}"


def _require_layers(source: Source) -> dict[tuple[int, Part], LayerArray]:
    try:
        entries = collect_layers(source, allow_keys_only=True)
    except SourceError as error:
        raise type(error)(f"{error}; a tolerance is about K and V of layers") from None
    return {(entry.layer, entry.part): entry for entry in entries}


class _ValuePair(NamedTuple):
    """Numbers of two arrays from one place on."""

    start: int
    first: Floats
    second: Floats


def _measure_error(
    layer: int, part: Part, first: LayerArray, second: LayerArray, tokens: int, atol: float
) -> ErrorStats:
    heads, _, dims = first.geometry
    entries = [entry if entry.geometry[1] == tokens else take_first_tokens(entry, tokens) for entry in (first, second)]
    num_elements = num_above = num_not_finite = largest_position = 0
    largest_error = sum_squared_errors = sum_squared_values = 0.0
    for pair in _iter_value_pairs(*entries):
        with np.errstate(invalid="ignore", over="ignore"):
            errors = np.abs(pair.first.astype(np.float64) - pair.second)
        is_equal = (pair.first == pair.second) | (np.isnan(pair.first) & np.isnan(pair.second))
        errors[is_equal] = 0.0
        index = int(errors.argmax())  # the first NaN, where there is one
        if errors[index] > largest_error or (np.isnan(errors[index]) and not np.isnan(largest_error)):
            largest_error, largest_position = float(errors[index]), pair.start + index
        num_not_finite += int(np.count_nonzero(~np.isfinite(errors)))
        num_above += int(np.count_nonzero(~(errors <= atol)))
        num_elements += errors.size
        is_finite = np.isfinite(pair.first) & np.isfinite(pair.second)
        sum_squared_errors += float(np.square(errors[is_finite]).sum())
        squared_sums = (np.square(values[is_finite].astype(np.float64)).sum() for values in (pair.first, pair.second))
        sum_squared_values += float(sum(squared_sums)) / 2
    head, token, dim = (int(i) for i in np.unravel_index(largest_position, (heads, tokens, dims)))
    return ErrorStats(
        layer=layer,
        part=part,
        words=num_elements,
        above=num_above,
        largest=largest_error,
        not_finite=num_not_finite,
        head=head,
        token=token,
        dim=dim,
        relative=math.sqrt(sum_squared_errors / sum_squared_values) if sum_squared_values else None,
    )


def _iter_value_pairs(first: LayerArray, second: LayerArray) -> Iterator[_ValuePair]:
    """Both arrays in one order, ``[kv_head, token, head_dim]``, in runs."""
    streams = [_iter_floats(first), _iter_floats(second)]
    remainders: list[Floats] = [np.empty(0, np.float32), np.empty(0, np.float32)]
    start = 0
    while True:
        remainders = [
            remainder if remainder.size else next(stream, remainder)
            for remainder, stream in zip(remainders, streams, strict=True)
        ]
        size = min(remainder.size for remainder in remainders)
        if not size:
            return
        yield _ValuePair(start, remainders[0][:size], remainders[1][:size])
        remainders, start = [remainder[size:] for remainder in remainders], start + size


def _iter_floats(entry: LayerArray) -> Iterator[Floats]:
    dtype, chunks = read_ordered_elements(entry, False)
    for chunk in chunks:
        yield to_float32(chunk, dtype)
