"""Compare two caches: the first different word and the number of them, or the numerical distance of each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.text import pluralize
from ..dtypes import Floats, Part
from ..errors import SourceError
from ..files.schema import Record, json_key
from .array import Chunk, LazyArray
from .cast import to_float32
from .completeness import Completeness, build_pair_document, format_missing_of_pair
from .engine_cache import parse_layers
from .layers import AmbiguousAxesError, LayerArray, collect_layers
from .positions import PositionMap, describe_conflicts, find_position_conflicts, read_token_positions
from .source import LOSSY_KEY, Source

_COMPARE_CHUNK_BYTES = 4 << 20
_LayerIndex = dict[tuple[int, Part], LayerArray]


@dataclass(frozen=True, kw_only=True)
class Mismatch(Record):
    """The first word that differs."""

    #: Name of the array in the first input.
    array: str
    #: Its index in that array.
    index: tuple[int, ...]
    #: Its values.
    first: float
    second: float
    #: Location in the layer; None for arrays that are not known to be K or V.
    layer: int | None = None
    part: Part | None = None
    head: int | None = None
    token: int | None = None
    dim: int | None = None

    def __str__(self) -> str:
        if self.part is None:
            location = f"array {self.array!r}, index {list(self.index)}"
        else:
            letter = self.part[0].upper()
            location = f"layer {self.layer}, {letter}, head {self.head}, token {self.token}, dim {self.dim}"
        return f"{location}: {self.first!r} and {self.second!r}"


@dataclass(frozen=True, kw_only=True)
class DiffReport(Record):
    """The result of a comparison."""

    #: Paths of the inputs.
    first_input: str = ""
    second_input: str = ""
    #: Words compared.
    words: int = 0
    #: How many of them differ.
    differing: int = 0
    #: The first difference, or None.
    first: Mismatch | None = None
    #: Why arrays could not be compared: missing ones, other shapes or types.
    unlike: tuple[str, ...] = ()
    #: Advice on how to specify the axes of an input, if arrays were compared by name because the axes are unknown.
    hints: tuple[str, ...] = ()
    #: How much of the model's state the arrays of each input contain; None if unknown.
    completeness: tuple[Completeness | None, Completeness | None] = field(
        default=(None, None), metadata={"inline": True, "convert": build_pair_document}
    )

    @property
    @json_key(after="second_input")
    def equal(self) -> bool:
        """Return whether nothing differs."""
        return not self.differing and not self.unlike

    def __str__(self) -> str:
        lines = _format_unlike(self.unlike)
        if self.first is not None:
            lines.append(f"first difference: {self.first}")
            lines.append(f"{self.differing:,} of {self.words:,} words differ")
        elif self.words and lines:
            lines.append(f"equal otherwise: {pluralize(self.words, 'word')}, bit by bit")
        lines += self.hints
        lines = lines or [f"equal: {pluralize(self.words, 'word')}, bit by bit"]
        return "\n".join([*lines, *format_missing_of_pair(self.completeness)])


_MAX_EQUAL_LINES = 4
"""Number of arrays that have a line each, if all lines are equal but for the name."""


def _format_unlike(unlike: Sequence[str]) -> list[str]:
    lines_by_reason: dict[str, list[str]] = {}
    for line in unlike:
        lines_by_reason.setdefault(line.partition(": ")[2] or line, []).append(line)
    lines: list[str] = []
    for reason, equal_lines in lines_by_reason.items():
        if len(equal_lines) > _MAX_EQUAL_LINES:
            first_name, last_name = (equal_lines[index].partition(": ")[0] for index in (0, -1))
            equal_lines = [f"{first_name} ... {last_name} ({len(equal_lines)} arrays): {reason}"]
        lines += equal_lines
    return [f"{line} (first input, second input)" for line in lines]


def compare_bitwise(
    first: Source, second: Source, positions: tuple[PositionMap, PositionMap] | None = None
) -> DiffReport:
    """Compare layer by layer if both inputs are K and V of layers, else arrays of the same name.

    Known axis orders do not matter: a dump's ``[token, kv_head, head_dim]`` is compared with the ``[kv_head, token,
    head_dim]`` of all other inputs. Layers with different token positions are unlike, whatever their words; `positions`
    defaults to the result of `read_token_positions`.
    """
    first_layers, second_layers = index_layers(first), index_layers(second)
    if first_layers is not None and second_layers is not None:
        report = _compare_layers(first_layers, second_layers)
    else:
        report = _compare_arrays(first.arrays, second.arrays)
        if report.unlike:  # axes that, once specified, would let layers be compared rather than names
            report = replace(report, hints=tuple(_iter_axis_hints(first, second)))
    conflicts = find_position_conflicts(*(positions or (read_token_positions(first), read_token_positions(second))))
    return replace(
        report,
        unlike=(*describe_conflicts(conflicts, parse_layers([*first, *second])), *report.unlike),
        first_input=" ".join(first.inputs),
        second_input=" ".join(second.inputs),
        completeness=(first.completeness, second.completeness),
    )


def index_layers(source: Source) -> _LayerIndex | None:
    """Return K and V of every layer of a source; None for other arrays."""
    try:
        return {(entry.layer, entry.part): entry for entry in collect_layers(source, allow_keys_only=True)}
    except SourceError:
        return None


def _iter_axis_hints(first: Source, second: Source) -> Iterator[str]:
    for source in (first, second):
        try:
            collect_layers(source, allow_keys_only=True)
        except AmbiguousAxesError as error:
            yield str(error)
        except SourceError:
            pass


def _compare_layers(first: _LayerIndex, second: _LayerIndex) -> DiffReport:
    diff = _BitwiseDiff()
    for layer, part in sorted(first.keys() | second.keys()):  # "key" comes before "value"
        name = f"layer {layer}, {part[0].upper()}"
        first_entry, second_entry = first.get((layer, part)), second.get((layer, part))
        if first_entry is None or second_entry is None:
            diff.unlike.append(f"{name}: only in the {'second' if first_entry is None else 'first'}")
            continue
        geometries = [entry.geometry for entry in (first_entry, second_entry)]
        token_major = first_entry.token_major and second_entry.token_major
        if first_entry.array.dtype != second_entry.array.dtype:
            diff.unlike.append(f"{name}: {first_entry.array.dtype} and {second_entry.array.dtype}")
            continue
        if geometries[0][::2] != geometries[1][::2]:
            shapes_text = " and ".join(str(list(geometry)) for geometry in geometries)
            diff.unlike.append(f"{name}: [kv_head, token, head_dim] is {shapes_text}")
            continue
        if geometries[0] != geometries[1]:
            diff.unlike.append(_describe_token_counts(name, first_entry, second_entry))
            tokens, token_major = min(geometry[1] for geometry in geometries), False
            first_entry, second_entry = take_first_tokens(first_entry, tokens), take_first_tokens(second_entry, tokens)
        streams = [read_ordered_elements(entry, token_major) for entry in (first_entry, second_entry)]
        diff.compare(streams[0], streams[1], partial(_locate_in_layer, first_entry, token_major))
    return diff.to_report()


def _describe_token_counts(name: str, first: LayerArray, second: LayerArray) -> str:
    counts = first.geometry[1], second.geometry[1]
    return f"{name}: {counts[0]} and {counts[1]} tokens; the first {min(counts)} are compared"


def take_first_tokens(entry: LayerArray, tokens: int) -> LayerArray:
    """Return the first tokens of an array."""
    elements = entry.array.to_numpy()
    elements = np.ascontiguousarray(elements[:tokens] if entry.token_major else elements[:, :tokens])
    array = replace(
        entry.array,
        shape=elements.shape,
        array_dtype=elements.dtype.str,
        reader=lambda _: iter([elements.reshape(-1).view(np.uint8)]),
    )
    return replace(entry, array=array)


def _locate_in_layer(entry: LayerArray, token_major: bool, position: int, first: float, second: float) -> Mismatch:
    heads, tokens, dims = entry.geometry
    shape = (tokens, heads, dims) if token_major else (heads, tokens, dims)
    index = tuple(int(i) for i in np.unravel_index(position, shape))
    token, head = index[:2] if token_major else index[1::-1]
    return Mismatch(
        array=entry.array.name,
        index=(token, head, index[2]) if entry.token_major else (head, token, index[2]),
        first=first,
        second=second,
        layer=entry.layer,
        part=entry.part,
        head=head,
        token=token,
        dim=index[2],
    )


def _locate_in_array(name: str, array: LazyArray, position: int, first: float, second: float) -> Mismatch:
    index = array.index_at_offset(position * array.coded_itemsize)
    return Mismatch(array=name, index=index, first=first, second=second)


def _compare_arrays(first: Sequence[LazyArray], second: Sequence[LazyArray]) -> DiffReport:
    diff = _BitwiseDiff()
    for name, first_array, second_array in _pair_by_name(first, second):
        if first_array is None or second_array is None:
            diff.unlike.append(f"array {name!r}: only in the {'second' if first_array is None else 'first'}")
            continue
        arrays = first_array, second_array
        is_flat = any(len(array.shape) == 1 for array in arrays)
        layouts = [f"{list(array.shape)} {array.order}" for array in arrays]
        if first_array.dtype != second_array.dtype:
            diff.unlike.append(f"array {name!r}: {first_array.dtype} and {second_array.dtype}")
        elif layouts[0] != layouts[1] and not is_flat:
            diff.unlike.append(f"array {name!r}: {' and '.join(layouts)}")
        elif first_array.nbytes != second_array.nbytes:
            diff.unlike.append(f"array {name!r}: {first_array.nbytes} and {second_array.nbytes} bytes")
        else:
            streams = [(array.dtype, array.iter_chunks(_COMPARE_CHUNK_BYTES)) for array in arrays]
            diff.compare(streams[0], streams[1], partial(_locate_in_array, name, first_array))
    return diff.to_report()


def _pair_by_name(
    first: Sequence[LazyArray], second: Sequence[LazyArray]
) -> Iterator[tuple[str, LazyArray | None, LazyArray | None]]:
    """Pair arrays of the same name; if each input has one array, pair these even if their names differ."""
    if len(first) == len(second) == 1:
        yield first[0].name, first[0], second[0]
        return
    second_by_name = {array.name: array for array in second}
    for array in first:
        yield array.name, array, second_by_name.pop(array.name, None)
    for name, array in second_by_name.items():
        yield name, None, array


_ElementStream = tuple[str, Iterator[Chunk]]


@dataclass
class _BitwiseDiff:
    """Accumulates a bitwise comparison; the first mismatch is that of the first pair of streams with one."""

    words: int = 0
    differing: int = 0
    first: Mismatch | None = None
    unlike: list[str] = field(default_factory=list)

    def compare(
        self, first: _ElementStream, second: _ElementStream, locate: Callable[[int, float, float], Mismatch]
    ) -> None:
        """Compare two streams of words; `locate` returns the mismatch at a position, given both values."""
        dtype, begin = dtypes.parse_dtype(first[0]), self.words
        for chunks in _align_chunks(first[1], second[1], dtype.itemsize):
            elements = [chunk.view(f"<u{dtype.itemsize}") for chunk in chunks]
            differs = np.flatnonzero(elements[0] != elements[1])
            if differs.size and self.first is None:
                index = int(differs[0])
                values = [to_float32(part[index : index + 1].view(np.uint8), dtype.name)[0] for part in elements]
                self.first = locate(self.words - begin + index, float(values[0]), float(values[1]))
            self.words += elements[0].size
            self.differing += differs.size

    def to_report(self) -> DiffReport:
        """Return the report, without the paths of the inputs."""
        return DiffReport(words=self.words, differing=self.differing, first=self.first, unlike=tuple(self.unlike))


def read_ordered_elements(entry: LayerArray, token_major: bool) -> _ElementStream:
    """Return the array's dtype and words, with the head running slowest unless `token_major`."""
    chunks = entry.array.iter_chunks(_COMPARE_CHUNK_BYTES)
    if entry.token_major == token_major:
        return entry.array.dtype, chunks
    heads, tokens, dims = entry.geometry
    elements = np.concatenate(list(chunks)).view(f"<u{entry.array.coded_itemsize}").reshape(tokens, heads, dims)
    return entry.array.dtype, (
        np.ascontiguousarray(elements[:, head]).reshape(-1).view(np.uint8) for head in range(heads)
    )


def _align_chunks(
    first: Iterator[npt.NDArray[Any]], second: Iterator[npt.NDArray[Any]], step: int = 1
) -> Iterator[list[npt.NDArray[Any]]]:
    """Cut two streams of chunks into pairs of equal lengths, multiples of `step`."""
    remainders: list[npt.NDArray[Any]] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
    while True:
        remainders = [
            remainder if remainder.size else next(stream, remainder)
            for remainder, stream in zip(remainders, (first, second), strict=True)
        ]
        size = min(remainder.size for remainder in remainders) // step * step
        if not size:
            return
        yield [remainder[:size] for remainder in remainders]
        remainders = [remainder[size:] for remainder in remainders]


#: Four bits leave a relative error below 0.15, and unrelated numbers one of 1.4.
MIN_NON_ROUNDING_ERROR = 0.5
#: Lossy codecs lose less than the numbers themselves, a relative error of 1; unrelated numbers have one of 1.4.
_MIN_REORDERING_ERROR = 1.2


@dataclass(frozen=True, kw_only=True)
class ErrorStats(Record):
    """Error statistics of K or V of one layer."""

    json_keys = "layer part words above largest=_finite_largest not_finite head token dim relative"

    layer: int
    part: Part
    #: Number of compared elements.
    words: int
    #: How many of them differ by more than the tolerance; a number and a NaN always do.
    above: int
    #: The largest absolute difference: infinite if only one of two elements is infinite. NaN takes precedence, if only
    #: one of two is NaN.
    largest: float
    #: Number of differences that are infinite or NaN.
    not_finite: int
    #: Location of the first of the largest differences.
    head: int
    token: int
    dim: int
    #: Root mean square of the differences, relative to that of the elements of both inputs. Rounding gives about 0.0002
    #: for fp16 and 0.002 for bf16; a different order of elements gives about 1.4. Only finite elements count; None if
    #: there are none, or all are zero.
    relative: float | None = None

    @property
    def _finite_largest(self) -> float | None:
        return None if self.not_finite else self.largest


@dataclass(frozen=True, kw_only=True)
class ToleranceReport(Record):
    """The result of a comparison with a tolerance."""

    #: Paths of the inputs.
    first_input: str = ""
    second_input: str = ""
    #: The absolute tolerance.
    atol: float
    #: By layer, K before V.
    errors: tuple[ErrorStats, ...] = field(metadata={"key": "layers"})
    #: Why layers could not be compared, or not all of them: missing ones, other shapes.
    unlike: tuple[str, ...] = ()
    #: Whether an input records that a lossy codec has rounded it.
    is_lossy: bool = field(default=False, metadata={"omit": True})
    #: How much of the model's state the arrays of each input contain; None if unknown.
    completeness: tuple[Completeness | None, Completeness | None] = field(
        default=(None, None), metadata={"inline": True, "convert": build_pair_document}
    )

    @property
    @json_key(before="errors")
    def words(self) -> int:
        """Return how many elements were compared."""
        return sum(entry.words for entry in self.errors)

    @property
    @json_key(before="errors")
    def above(self) -> int:
        """Return how many elements differ by more than the tolerance."""
        return sum(entry.above for entry in self.errors)

    @property
    @json_key(before="errors")
    def relative(self) -> float | None:
        """Return the largest relative error of K or V of any layer; None if no layer has one."""
        return max((entry.relative for entry in self.errors if entry.relative is not None), default=None)

    @property
    @json_key(before="words")
    def equal(self) -> bool:
        """Return whether all layers are present in both inputs and agree within the tolerance."""
        return not self.above and not self.unlike and bool(self.errors)

    def __str__(self) -> str:
        lines = _format_unlike(self.unlike)
        if self.errors:
            lines.append("layer  part       numbers  relative  above atol     largest  at head, token, dim")
        lines += [
            f"{entry.layer:5}  {entry.part:5}  {entry.words:11,}  "
            f"{'-' if entry.relative is None else f'{entry.relative:.2g}':>8}  "
            f"{entry.above:10,}  {entry.largest:10.4g}  {entry.head}, {entry.token}, {entry.dim}"
            for entry in self.errors
        ]
        words_text = pluralize(self.words, "number")
        if not self.errors:
            lines.append("no numbers were compared: nothing has its like in the other input")
        elif self.above:
            lines.append(f"{self.above:,} of {words_text} are further apart than {self.atol:g}")
        else:
            lines.append(f"{words_text} within {self.atol:g}")
        if self.relative:
            line = f"relative error (rms of differences over rms of numbers): at most {self.relative:.2g} of a layer"
            if self.is_lossy and self.relative < _MIN_REORDERING_ERROR:
                line += ": an input is LOSSY"
            elif self.relative >= MIN_NON_ROUNDING_ERROR:
                codec_text = "a lossy codec, " if self.relative < _MIN_REORDERING_ERROR else ""
                line += (
                    f", which is no rounding of numbers: {codec_text}another order of axes, heads or pairs, other "
                    "positions, or other tokens"
                )
            lines.append(line)
        return "\n".join([*lines, *format_missing_of_pair(self.completeness)])


def compare_allclose(
    first: Source, second: Source, atol: float, positions: tuple[PositionMap, PositionMap] | None = None
) -> ToleranceReport:
    """Compare the values of K and V of every layer, across types.

    Layers with different token positions are not compared.

    Parameters
    ----------
    first, second
        Arrays whose names state the layer and K or V.
    atol
        The largest absolute difference that counts as equal.
    positions
        Token positions of each source; by default the result of `read_token_positions`.

    Raises
    ------
    SourceError
        If one of the sources is no K and V of layers.
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
            incompatible.append(_describe_token_counts(name, pair[0], pair[1]))
        errors.append(_measure_error(layer, part, pair[0], pair[1], tokens, atol))
    return ToleranceReport(
        atol=atol,
        errors=tuple(errors),
        unlike=tuple(incompatible),
        first_input=" ".join(first.inputs),
        second_input=" ".join(second.inputs),
        is_lossy=any(LOSSY_KEY in source.metadata for source in (first, second)),
        completeness=(first.completeness, second.completeness),
    )


def _require_layers(source: Source) -> dict[tuple[int, Part], LayerArray]:
    try:
        entries = collect_layers(source, allow_keys_only=True)
    except SourceError as error:
        raise type(error)(f"{error}; a tolerance is about K and V of layers") from None
    return {(entry.layer, entry.part): entry for entry in entries}


def _measure_error(
    layer: int, part: Part, first: LayerArray, second: LayerArray, tokens: int, atol: float
) -> ErrorStats:
    heads, _, dims = first.geometry
    entries = [entry if entry.geometry[1] == tokens else take_first_tokens(entry, tokens) for entry in (first, second)]
    num_elements = num_above = num_not_finite = largest_position = 0
    largest_error = sum_squared_errors = sum_squared_values = 0.0
    for first_values, second_values in _align_chunks(_iter_floats(entries[0]), _iter_floats(entries[1])):
        with np.errstate(invalid="ignore", over="ignore"):
            errors = np.abs(first_values.astype(np.float64) - second_values)
        is_equal = (first_values == second_values) | (np.isnan(first_values) & np.isnan(second_values))
        errors[is_equal] = 0.0
        index = int(errors.argmax())  # the first NaN, where there is one
        if errors[index] > largest_error or (np.isnan(errors[index]) and not np.isnan(largest_error)):
            largest_error, largest_position = float(errors[index]), num_elements + index
        num_not_finite += int(np.count_nonzero(~np.isfinite(errors)))
        num_above += int(np.count_nonzero(~(errors <= atol)))
        num_elements += errors.size
        is_finite = np.isfinite(first_values) & np.isfinite(second_values)
        sum_squared_errors += float(np.square(errors[is_finite]).sum())
        squared_sums = (
            np.square(values[is_finite].astype(np.float64)).sum() for values in (first_values, second_values)
        )
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


def _iter_floats(entry: LayerArray) -> Iterator[Floats]:
    dtype, chunks = read_ordered_elements(entry, False)
    return (to_float32(chunk, dtype) for chunk in chunks)
