"""Axes of plain arrays: a specification for K and V in any order of axes, and padding of batches removed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.patterns import declare_pattern
from .._util.text import pluralize
from ..dtypes import PARTS, Indices, Part, Positions
from ..errors import MissingOptionError, OptionError, SourceError, UnsuitableOptionError
from .array import ArrayInfo, LazyArray, ViewFactory, from_strided_pages, from_strided_view, read_elements
from .engine_cache import EngineCacheInfo, parse_layers
from .layers import ModelHalf, format_array_name, has_halves, select_half
from .naming import parse_conventional_name, parse_layer, parse_part
from .source import DUMP_KEY, ENGINE_KEY, FILE_KEY, SIDECAR_KEY, Source, select_subset_metadata

TOKEN_AXIS = -2  # of [batch, kv_head, token, head_dim], with or without the batch


def list_padding(cache: EngineCacheInfo | None) -> list[str]:
    """Return a note about rows of padding in the arrays of a batch; empty if there are none."""
    if cache is None or not cache.has_padding:
        return []
    rows = [(number, cache.tokens - text.positions.size) for number, text in enumerate(cache.texts)]
    padded = [f"{number} of text {text}" for text, number in rows if number]
    listing = ", ".join(padded[:8]) + (f" and so on for {len(padded)} texts" if len(padded) > 8 else "")
    return [
        f"the arrays contain rows of padding: {listing} (--part batch=N takes one text without them, in Python batch=)"
    ]


def select_token_rows(elements: npt.NDArray[Any], rows: Indices) -> npt.NDArray[Any]:
    """Return rows of the token axis; a view if they are consecutive."""
    if rows.size == elements.shape[TOKEN_AXIS]:
        return elements
    if rows.size and rows[-1] - rows[0] + 1 == rows.size:
        return elements[..., int(rows[0]) : int(rows[-1]) + 1, :]
    return np.take(elements, rows, TOKEN_AXIS)


def select_batch_text(
    arrays: Sequence[LazyArray], cache: EngineCacheInfo | None, text_index: int
) -> tuple[list[LazyArray], EngineCacheInfo | None]:
    """Select the tokens of one text from arrays ``[kv_head, token, head_dim]``, padding included, of a batch."""
    if cache is None:
        return list(arrays), None
    if text_index >= len(cache.texts):
        return list(arrays), replace(cache, batch=1, texts=())
    batch_text = cache.texts[text_index]
    text_info = replace(cache, batch=1, texts=(), token_ids=batch_text.token_ids)
    if not cache.has_padding:
        return list(arrays), text_info
    layers = parse_layers(array.name for array in arrays)
    positions_by_layer: dict[int, Positions] = {}
    if cache.layer_positions is not None and len(layers) == cache.layers:
        positions_by_layer = dict(zip(layers, cache.layer_positions, strict=True))
    rows: dict[int, Positions] = {}
    selected_arrays = []
    for array in arrays:
        parsed_name = parse_conventional_name(array.name)
        layer = -1 if parsed_name is None else parsed_name.layer
        array_positions = positions_by_layer.get(layer, cache.positions)
        array_positions = np.arange(array.shape[TOKEN_AXIS]) if array_positions is None else array_positions
        index = np.flatnonzero(np.isin(array_positions, batch_text.positions))
        rows[layer] = np.searchsorted(batch_text.positions, array_positions[index])
        shape = (*array.shape[:TOKEN_AXIS], index.size, array.shape[-1])
        info = ArrayInfo(name=array.name, dtype=array.dtype, shape=shape, array_dtype=array.array_dtype)
        view = partial(lambda array, index: select_token_rows(read_elements(array), index), array, index)
        selected_arrays.append(from_strided_view(info, view))
    row_positions = [rows[layer] for layer in sorted(rows)]
    is_uniform = len({tuple(positions.tolist()) for positions in row_positions}) == 1
    is_unpadded = all(positions.size == batch_text.positions.size for positions in row_positions)
    return selected_arrays, replace(
        text_info,
        tokens=max(positions.size for positions in row_positions),
        positions=row_positions[0] if is_uniform and not is_unpadded else None,
        layer_positions=None if is_uniform else tuple(row_positions),
    )


AXIS_NAMES = {"2": "K and V", "l": "layer", "b": "batch", "h": "kv_head", "t": "token", "d": "dimension"}
_AXIS_ORDER = "2lbhtd"
_MAX_LAYERS = 1 << 16


@dataclass(frozen=True)
class AxisSpec:
    """Specification of the axes of arrays.

    Parameters
    ----------
    axes
        A letter of `AXIS_NAMES` for each axis, in either case: h, t and d are needed; h may be left out, without 2, for
        latent attention, which has one tensor for K and V. None leaves the axes as they are.
    shape
        Reshape every array to this shape first; -1 stands for the remaining axis. None keeps its own shape.
    batch
        Index of the text in a batch; None for all.
    join_pages
        Concatenate several arrays of K, or of V, of a layer along the tokens, in their order.
    half
        ``"decoder"`` or ``"encoder"`` of a cache that has both; None if it has one.
    skip_inapplicable
        Skip inputs that define their axes themselves or have no batch, instead of rejecting them.

    Raises
    ------
    OptionError
        For letters that are no axes, and an invalid shape.
    """

    axes: str | None = None
    shape: tuple[int, ...] | None = None
    batch: int | None = None
    skip_inapplicable: bool = False
    join_pages: bool = False
    half: ModelHalf | None = None

    def __post_init__(self) -> None:
        if self.axes is not None:
            object.__setattr__(self, "axes", self.axes.lower())
            letters = set(self.axes)
            required_letters = set("htd") if "2" in letters else set("td")
            if len(letters) != len(self.axes) or not required_letters <= letters <= set(AXIS_NAMES):
                raise OptionError(
                    f"axes {self.axes!r}: expected h (kv_head), t (token) and d (dimension), each once, and where "
                    "there are such l (layer), b (batch) and 2 (K and V)"
                )
        if self.shape is not None:
            if self.shape.count(-1) > 1 or any(length < 1 and length != -1 for length in self.shape):
                raise OptionError(f"shape {list(self.shape)}: expected lengths from 1 on, and at most one -1")
            if self.axes is not None and len(self.shape) != len(self.axes):
                counts = f"{_format_axis_count(len(self.shape))}, {self.axes!r} {len(self.axes)}"
                raise OptionError(f"shape {list(self.shape)} has {counts}")


AXES_AS_STORED: Final = AxisSpec()


def apply_axis_spec(source: Source, spec: AxisSpec, where: str) -> Source:
    """Return a source with its arrays laid out as the caller specifies; nothing is read before it is needed."""
    # With `AxisSpec.axes` all arrays become K and V of layers, ``layer_<n>.key`` and ``layer_<n>.value``: ``[kv_head,
    # token, head_dim]``, with a batch in front where there is such an axis. Arrays of one head whose names state
    # neither K nor V are the one tensor of latent attention: K alone.
    if spec.half is not None and not (spec.skip_inapplicable and not has_halves(source)):
        source = select_half(source, spec.half, where)
    is_declared = _declares_axes(source) and ENGINE_KEY not in source.metadata
    if spec.axes and is_declared and declared_axes(source) == spec.axes:
        spec = replace(spec, axes=None)
    if ENGINE_KEY in source.metadata and (spec.axes or spec.shape):
        if _matches_declared_axes(source, spec):
            source = replace(source, axes=spec.axes)
            spec = AxisSpec(batch=spec.batch, skip_inapplicable=spec.skip_inapplicable)
        else:
            source = _drop_position_metadata(replace(source, engine_cache=None, axes=None), spec, where)
    if (spec.axes or spec.shape) and not (spec.skip_inapplicable and not _can_apply_axis_spec(source, spec)):
        if _declares_axes(source):
            declared = declared_axes(source)
            shown_axes = "" if declared is None else f" ({declared})"
            raise OptionError(f"{where}: says itself how its arrays lie{shown_axes}: leave --axes and --shape out")
        source = source if _matches_declared_axes(source, spec) else _drop_position_metadata(source, spec, where)
        arrays = [_reshape_array(array, spec.shape, where) for array in source.arrays]
        source = replace(source, arrays=arrays, metadata=select_subset_metadata(source.metadata))
        if spec.axes:
            arrays, axes = _add_head_axis(arrays, spec.axes)
            is_latent = "2" not in axes and _are_latent_arrays(arrays, axes)
            source.arrays = _split_into_layers(where, arrays, axes, pages=spec.join_pages, is_latent=is_latent)
            if is_latent:
                note = f"{where}: its arrays are taken as K alone, as latent attention has one tensor for K and V"
                source.notes = [*source.notes, note]
            source.axes = "bhtd" if "b" in spec.axes else "htd"
    if spec.batch is not None and not (spec.skip_inapplicable and not _may_have_batch_axis(source)):
        source = _select_batch_text(source, spec.batch, where)
    return source


def matches_axis_spec(source: Source, spec: AxisSpec) -> bool:
    """Return whether the arrays can be a result of `apply_axis_spec` with these axes and shape."""
    if spec.axes:
        has_free_axes = source.cache is None and (source.engine_cache is None or ENGINE_KEY in source.metadata)
        return has_free_axes and source.axes == ("bhtd" if "b" in spec.axes else "htd")
    expected = spec.shape or ()
    return any(
        len(array.shape) == len(expected) and all(e in (-1, n) for e, n in zip(expected, array.shape, strict=True))
        for array in source.arrays
    )


def _matches_declared_axes(source: Source, spec: AxisSpec) -> bool:
    """Return whether the specified axes equal the declared ones, so that the tokens stay the same."""
    if spec.shape or spec.join_pages:
        return False
    is_dump = any(
        (parsed_name := parse_conventional_name(array.name)) is not None and parsed_name.is_dump
        for array in source.arrays
    )
    return declared_axes(source) == spec.axes and not (is_dump and source.axes is None)


def declared_axes(source: Source) -> str | None:
    """Return the axes that all arrays have, by their source or their names."""
    if source.axes is not None:
        return source.axes
    orders = set()
    for array in source.arrays:
        parsed_name = parse_conventional_name(array.name)
        order = "thd" if source.token_major else parsed_name.order if parsed_name is not None else None
        orders.add({3: order, 4: order and f"b{order}"}.get(len(array.shape)))
    return orders.pop() if len(orders) == 1 else None


def _drop_position_metadata(source: Source, spec: AxisSpec, where: str) -> Source:
    """Return the source without metadata about the tokens of its former layout, and with a note if there was any."""
    # A sidecar of arrays whose axes are unknown is about the layers and tokens of the specified axes.
    is_relaid = spec.shape or spec.join_pages or declared_axes(source)
    keys = (ENGINE_KEY, SIDECAR_KEY) if is_relaid else (ENGINE_KEY,)
    dropped_keys = [key for key in keys if key in source.metadata]
    if not dropped_keys:
        return source
    metadata = {key: text for key, text in source.metadata.items() if key not in dropped_keys}
    note = f"what {where} says of its tokens is left out: --axes and --shape make other arrays of it"
    return replace(source, metadata=metadata, notes=[*source.notes, note])


def _format_axis_count(count: int) -> str:
    return "1 axis" if count == 1 else f"{count} axes"


def _can_apply_axis_spec(source: Source, spec: AxisSpec) -> bool:
    """Return whether a specification for one of several inputs can apply to this one."""
    if _declares_axes(source):
        return False
    if spec.shape:  # of raw words, which have no layers yet
        return not all(_LAYER_NAME_REGEX.fullmatch(array.name) for array in source.arrays)
    return any(len(array.shape) == len(spec.axes or "") for array in source.arrays)


_LAYER_NAME_REGEX = declare_pattern(r"layer_[0-9]+\.(key|value)")


def _declares_axes(source: Source) -> bool:
    is_described = any(entry is not None for entry in (source.cache, source.engine_cache, source.axes))
    return is_described or source.token_major or FILE_KEY in source.metadata


def _reshape_array(array: LazyArray, shape: tuple[int, ...] | None, where: str) -> LazyArray:
    """Return the array with another shape for the same words; raw bytes become words of their dtype."""
    num_elements = array.nbytes // (array.itemsize if array.has_axes else array.coded_itemsize)
    if not array.has_axes and shape is not None:
        array = replace(array, array_dtype=dtypes.parse_dtype(array.dtype).numpy_dtype.str, shape=(num_elements,))
    if shape is None:
        return array
    shape_elements = math.prod(length for length in shape if length != -1)
    if array.order != "C":
        raise OptionError(f"{where}: array {array.name!r} is in Fortran order, which --shape cannot take: use --axes")
    if num_elements % shape_elements or (-1 not in shape and num_elements != shape_elements):
        expected = f"{'a multiple of ' if -1 in shape else ''}{shape_elements:,} ({list(shape)})"
        raise UnsuitableOptionError(f"{where}: array {array.name!r} has {num_elements:,} words: expected {expected}")
    return replace(array, shape=tuple(num_elements // shape_elements if length == -1 else length for length in shape))


def _add_head_axis(arrays: list[LazyArray], axes: str) -> tuple[list[LazyArray], str]:
    """Return the arrays with an axis of one head in front of the tokens, if they have no head axis."""
    if "h" in axes or any(len(array.shape) != len(axes) for array in arrays):
        return arrays, axes
    axis = axes.index("t")
    arrays = [replace(array, shape=(*array.shape[:axis], 1, *array.shape[axis:])) for array in arrays]
    return arrays, axes.replace("t", "ht")


def _are_latent_arrays(arrays: Sequence[LazyArray], axes: str) -> bool:
    """Return whether arrays of one head have names that state neither K nor V."""
    return all(
        len(array.shape) == len(axes) and array.shape[axes.index("h")] == 1 and not _has_part_name(array.name)
        for array in arrays
    )


def _has_part_name(name: str) -> bool:
    try:
        parse_part("", name)
    except SourceError:
        return parse_conventional_name(name) is not None
    return True


def _split_into_layers(
    where: str, arrays: Sequence[LazyArray], axes: str, *, pages: bool, is_latent: bool
) -> list[LazyArray]:
    views_by_layer: dict[tuple[int, Part], list[InfoAndView]] = {}
    for array in arrays:
        if len(array.shape) != len(axes):
            raise SourceError(
                f"{where}: array {array.name!r} has {_format_axis_count(len(array.shape))} {list(array.shape)}, "
                f"expected {len(axes)} ({axes})"
            )
        if not array.has_axes:
            raise MissingOptionError(
                f"{where}: array {array.name!r} holds raw bytes: say their --shape (in Python shape=)"
            )
        cached_elements = _CachedElements(array)
        for layer, part, selection in _iter_layer_parts(
            where, array, axes, is_single=len(arrays) == 1, is_latent=is_latent
        ):
            if (layer, part) in views_by_layer and not pages:
                raise MissingOptionError(
                    f"{where}: there are several {part}s of layer {layer}: {array.name!r} is one of them (--pages: "
                    "they are pages of one text)"
                )
            views_by_layer.setdefault((layer, part), []).append(
                _make_view(cached_elements, axes, selection, format_array_name(layer, part))
            )
    parts = {part for _, part in views_by_layer}
    for layer in sorted({layer for layer, _ in views_by_layer}):
        for part in PARTS:
            if part in parts and (layer, part) not in views_by_layer:
                raise SourceError(f"{where}: layer {layer} has no array of its {part}s")
    return [_join_pages(where, views_by_layer[key]) for key in sorted(views_by_layer)]  # "key" comes before "value"


def _join_pages(where: str, pages: Sequence[InfoAndView]) -> LazyArray:
    """Join runs of tokens of one text to one array."""
    first, _ = pages[0]
    if len(pages) == 1:
        return from_strided_view(*pages[0])
    for info, _ in pages[1:]:
        if (*info.shape[:-2], info.shape[-1], info.dtype) != (*first.shape[:-2], first.shape[-1], first.dtype):
            raise SourceError(
                f"{where}: pages of {first.name}: {info.dtype} {list(info.shape)} and {first.dtype} "
                f"{list(first.shape)}: expected the same but for their tokens"
            )
    tokens = sum(info.shape[-2] for info, _ in pages)
    joined_info = replace(first, shape=(*first.shape[:-2], tokens, first.shape[-1]))
    return from_strided_pages(joined_info, [view for _, view in pages])


def _iter_layer_parts(
    where: str, array: LazyArray, axes: str, *, is_single: bool, is_latent: bool
) -> Iterator[tuple[int, Part, dict[str, int]]]:
    """Iterate over layer, part, and the index along the axes of layers and of K and V."""
    lengths = dict(zip(axes, array.shape, strict=True))
    if lengths.get("2", 2) != 2:
        raise SourceError(f"{where}: array {array.name!r}: the axis of K and V has length {lengths['2']}: expected 2")
    if lengths.get("l", 1) > _MAX_LAYERS:
        raise SourceError(f"{where}: array {array.name!r}: {lengths['l']:,} layers along an axis")
    parts: tuple[Part, ...] = PARTS if "2" in axes else PARTS[:1]
    if "2" not in axes and not is_latent:
        try:
            parts = (parse_part(where, array.name)[0],)
        except SourceError as error:
            raise MissingOptionError(
                f"{error}, or 2 in --axes (in Python axes=) for an axis of K and V, or no h where one tensor is both, "
                "as in latent attention (an array of a .npy file is called as the file)"
            ) from None
    for number, part in enumerate(parts):
        selection = {"2": number} if "2" in axes else {}
        if "l" in axes:
            for layer in range(lengths["l"]):
                yield layer, part, {**selection, "l": layer}
        else:
            yield _parse_layer_or_zero(where, array, is_single=is_single or "2" not in axes), part, selection


def _parse_layer_or_zero(where: str, array: LazyArray, *, is_single: bool) -> int:
    """Return the layer by the name; one pair without a number is layer 0."""
    parsed_name = parse_conventional_name(array.name)
    layer = parse_layer(array.name) if parsed_name is None else parsed_name.layer
    if layer is None and not is_single:
        raise SourceError(
            f"{where}: array {array.name!r} does not say which layer it is: expected a number in its name"
        )
    return layer or 0


class _CachedElements:
    """The words of an array, read once for the many arrays that are views of it."""

    def __init__(self, array: LazyArray) -> None:
        self.array = array
        self._elements: npt.NDArray[Any] | None = None

    def view(self, index: tuple[Any, ...], order: list[int]) -> npt.NDArray[Any]:
        """Return a part of the words with its axes in another order; a view of the file where possible."""
        if self._elements is None:
            self._elements = read_elements(self.array)
        selected: npt.NDArray[Any] = self._elements[index]
        return selected.transpose(order)


InfoAndView = tuple[ArrayInfo, ViewFactory]


def _make_view(cached_elements: _CachedElements, axes: str, selection: dict[str, int], name: str) -> InfoAndView:
    array = cached_elements.array
    lengths = dict(zip(axes, array.shape, strict=True))
    output_axes = [letter for letter in _AXIS_ORDER if letter in axes and letter not in selection]
    info = ArrayInfo(
        name=name,
        dtype=array.dtype,
        shape=tuple(lengths[letter] for letter in output_axes),
        array_dtype=array.array_dtype.replace(">", "<"),
        element=array.element,
    )
    index = tuple(selection.get(letter, slice(None)) for letter in axes)
    remaining_axes = [letter for letter in axes if letter not in selection]
    return info, partial(cached_elements.view, index, [remaining_axes.index(letter) for letter in output_axes])


def _has_batch_axis(source: Source) -> bool:
    return all(len(array.shape) == 4 for array in source.arrays) and (
        source.axes == "bhtd" or (source.axes is None and all(map(_has_own_name, source.arrays)))
    )


def _may_have_batch_axis(source: Source) -> bool:
    """Return whether all arrays have an axis besides heads, tokens and dimensions."""
    return bool(source.arrays) and all(len(array.shape) == 4 for array in source.arrays)


def _select_batch_text(source: Source, batch: int, where: str) -> Source:
    """Return the source with one text of those along the first axis, the batch."""
    if not _has_batch_axis(source):
        if source.axes is None and _may_have_batch_axis(source):
            example = source.arrays[0]
            raise OptionError(
                f"{where}: nothing says which axis of array {example.name!r} {list(example.shape)} is the batch: say "
                f"--axes bhtd --part batch={batch} (in Python axes='bhtd', batch={batch}) where the first one is"
            )
        raise OptionError(f"{where}: its arrays have no axis for a batch: leave --part batch (batch=) out")
    for array in source.arrays:
        if batch >= array.shape[0] == 1:
            raise OptionError(
                f"{where}: has no text {batch} in its batch, which is of one text: leave --part batch (batch=) out"
            )
        if batch >= array.shape[0]:
            raise OptionError(
                f"{where}: has a batch of {array.shape[0]}: expected --part batch=0 to {array.shape[0] - 1} (batch=)"
            )
    arrays = [
        from_strided_view(*_make_view(_CachedElements(array), "bhtd", {"b": batch}, array.name))
        for array in source.arrays
    ]
    arrays, engine_cache = select_batch_text(arrays, source.engine_cache, batch)
    # one text of a file is not the file
    metadata = {key: text for key, text in source.metadata.items() if key not in (FILE_KEY, DUMP_KEY)}
    texts = max(array.shape[0] for array in source.arrays)
    padding = source.engine_cache.tokens - engine_cache.tokens if source.engine_cache and engine_cache else 0
    rows = f", and {pluralize(padding, 'row')} of padding" if padding else ""
    notes = [f"{where}: text {batch} of a batch of {texts}; the others are left out{rows}"] if texts > 1 else []
    return replace(
        source,
        arrays=arrays,
        metadata=metadata,
        axes="htd",
        engine_cache=engine_cache,
        notes=[*source.notes, *notes],
    )


def _has_own_name(array: LazyArray) -> bool:
    parsed_name = parse_conventional_name(array.name)
    return parsed_name is not None and array.name == format_array_name(parsed_name.layer, parsed_name.part)
