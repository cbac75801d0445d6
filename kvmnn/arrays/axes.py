"""Arrays whose axes are said, as K and V of layers: any order of axes, with layers, batches or K and V along one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy.typing as npt

from .. import dtypes
from ..dtypes import PARTS, Part
from ..errors import MissingOptionError, OptionError, SourceError
from ..text import count
from .halves import Half, has_halves, select_half
from .layers import array_name
from .named_array import ArrayInfo, NamedArray
from .names import conventional, layer_of, part_of
from .padding import select_text
from .source import BESIDE_KEY, DUMP_KEY, ENGINE_KEY, FILE_KEY, Source, metadata_of_part
from .strided import View, strided, strided_pages, words_of

LETTERS = {"2": "K and V", "l": "layer", "b": "batch", "h": "kv_head", "t": "token", "d": "dimension"}
_ORDER = "2lbhtd"
_MOST_LAYERS = 1 << 16


@dataclass(frozen=True)
class Laid:
    """What the caller says of how arrays lie.

    Parameters
    ----------
    axes
        A letter of `LETTERS` for each axis, in either case: h, t and d are needed; h may be left out, without 2, for
        latent attention, which has one tensor for K and V. None leaves the axes as they are.
    shape
        What every array is taken as first; -1 stands for what is left. None for its own.
    batch
        Which text of a batch, from 0; None for all.
    pages
        Several arrays of K, or of V, of a layer are runs of tokens of one text, in their order, and are joined.
    half
        ``"decoder"`` or ``"encoder"`` of a cache that has both; None where it has one.
    where_needed
        Leave alone what says its axes itself or has no batch, instead of refusing it: for one of several inputs.

    Raises
    ------
    OptionError
        For letters that are no axes, and a shape that is none.
    """

    axes: str | None = None
    shape: tuple[int, ...] | None = None
    batch: int | None = None
    where_needed: bool = False
    pages: bool = False
    half: Half | None = None

    def __post_init__(self) -> None:
        if self.axes is not None:
            object.__setattr__(self, "axes", self.axes.lower())
            letters = set(self.axes)
            needed = set("htd") if "2" in letters else set("td")
            if len(letters) != len(self.axes) or not needed <= letters <= set(LETTERS):
                raise OptionError(
                    f"axes {self.axes!r}: expected h (kv_head), t (token) and d (dimension), each once, and where "
                    "there are such l (layer), b (batch) and 2 (K and V)"
                )
        if self.shape is not None:
            if self.shape.count(-1) > 1 or any(length < 1 and length != -1 for length in self.shape):
                raise OptionError(f"shape {list(self.shape)}: expected lengths from 1 on, and at most one -1")
            if self.axes is not None and len(self.shape) != len(self.axes):
                raise OptionError(
                    f"shape {list(self.shape)} has {_axes(len(self.shape))}, {self.axes!r} {len(self.axes)}"
                )


def laid_out(source: Source, laid: Laid, where: str) -> Source:
    """A source with its arrays as the caller says they lie.

    Arrays whose names say neither K nor V are the one tensor of latent attention where they have one head: K alone.

    With `Laid.axes` all arrays become K and V of layers, ``layer_<n>.key`` and ``layer_<n>.value``: ``[kv_head, token,
    head_dim]``, with a batch in front where there is such an axis. Nothing is read before it is asked for.

    Raises
    ------
    OptionError
        For a source that says its axes itself, a batch that there is not.
    SourceError
        For arrays that do not have these axes, and names that do not say K or V of a layer where no axis does.
    """
    if laid.half is not None and not (laid.where_needed and not has_halves(source)):
        source = select_half(source, laid.half, where)
    if laid.axes and _says_itself(source) and ENGINE_KEY not in source.metadata and own_axes(source) == laid.axes:
        laid = replace(laid, axes=None)
    if ENGINE_KEY in source.metadata and (laid.axes or laid.shape):
        if _lies_so(source, laid):
            source = replace(source, axes=laid.axes)
            laid = Laid(batch=laid.batch, where_needed=laid.where_needed)
        else:
            source = _unsaid(replace(source, engine_cache=None, axes=None), laid, where)
    if (laid.axes or laid.shape) and not (laid.where_needed and not _may_lie_so(source, laid)):
        if _says_itself(source):
            own = own_axes(source)
            said = "" if own is None else f" ({own})"
            raise OptionError(f"{where}: says itself how its arrays lie{said}: leave --axes and --shape out")
        source = source if _lies_so(source, laid) else _unsaid(source, laid, where)
        arrays = [_shaped(array, laid.shape, where) for array in source.arrays]
        source = replace(source, arrays=arrays, metadata=metadata_of_part(source.metadata))
        if laid.axes:
            arrays, axes = _with_heads(arrays, laid.axes)
            is_latent = "2" not in axes and _are_latent(arrays, axes)
            source.arrays = _sorted(where, arrays, axes, pages=laid.pages, is_latent=is_latent)
            if is_latent:
                note = f"{where}: its arrays are taken as K alone, as latent attention has one tensor for K and V"
                source.notes = [*source.notes, note]
            source.axes = "bhtd" if "b" in laid.axes else "htd"
    if laid.batch is not None and not (laid.where_needed and not _may_have_batch(source)):
        source = _one_of_batch(source, laid.batch, where)
    return source


def is_laid(source: Source, laid: Laid) -> bool:
    """Whether the arrays may be those that `laid_out` makes of what is said of axes and shape."""
    if laid.axes:
        plain = source.cache is None and (source.engine_cache is None or ENGINE_KEY in source.metadata)
        return plain and source.axes == ("bhtd" if "b" in laid.axes else "htd")
    return any(_has_shape(array.shape, laid.shape or ()) for array in source.arrays)


def _has_shape(found: tuple[int, ...], said: tuple[int, ...]) -> bool:
    return len(found) == len(said) and all(one in (-1, other) for one, other in zip(said, found, strict=True))


def _lies_so(source: Source, laid: Laid) -> bool:
    """Whether what is said of axes is what would be taken anyway: the tokens are those that they were."""
    if laid.shape or laid.pages:
        return False
    is_dump = any((said := conventional(array.name)) is not None and said.is_dump for array in source.arrays)
    return own_axes(source) == laid.axes and not (is_dump and source.axes is None)


def own_axes(source: Source) -> str | None:
    """The axes that all arrays have, as a source or their names say."""
    if source.axes is not None:
        return source.axes
    found = set()
    for array in source.arrays:
        said = conventional(array.name)
        order = "thd" if source.token_major else said.order if said is not None else None
        found.add({3: order, 4: order and f"b{order}"}.get(len(array.shape)))
    return found.pop() if len(found) == 1 else None


def _unsaid(source: Source, laid: Laid, where: str) -> Source:
    """The source without what is said of the tokens of its arrays as they lay, and a note if that is anything.

    What lies beside arrays that do not say how they lie is of the layers and tokens that their axes say.
    """
    other = laid.shape or laid.pages or own_axes(source)
    keys = (ENGINE_KEY, BESIDE_KEY) if other else (ENGINE_KEY,)
    said = [key for key in keys if key in source.metadata]
    if not said:
        return source
    metadata = {key: text for key, text in source.metadata.items() if key not in said}
    note = f"what {where} says of its tokens is left out: --axes and --shape make other arrays of it"
    return replace(source, metadata=metadata, notes=[*source.notes, note])


def _axes(number: int) -> str:
    return "1 axis" if number == 1 else f"{number} axes"


def _may_lie_so(source: Source, laid: Laid) -> bool:
    """Whether what is said of one input or another may be about this one."""
    if _says_itself(source):
        return False
    if laid.shape:  # of raw words, which have no layers yet
        return not all(_LAYER_NAME.fullmatch(array.name) for array in source.arrays)
    return any(len(array.shape) == len(laid.axes or "") for array in source.arrays)


_LAYER_NAME = re.compile(r"layer_[0-9]+\.(key|value)")


def _says_itself(source: Source) -> bool:
    known = (source.cache, source.engine_cache, source.axes)
    return source.token_major or FILE_KEY in source.metadata or any(said is not None for said in known)


def _shaped(array: NamedArray, shape: tuple[int, ...] | None, where: str) -> NamedArray:
    """The array with another shape for the same words; raw bytes become words of their dtype."""
    words = math.prod(array.shape) * array.itemsize // (array.itemsize if array.has_axes else array.word_bytes)
    if not array.has_axes and shape is not None:
        array = replace(array, array_dtype=dtypes.by_name(array.dtype).numpy.str, shape=(words,))
    if shape is None:
        return array
    known = math.prod(length for length in shape if length != -1)
    if array.order != "C":
        raise OptionError(f"{where}: array {array.name!r} is in Fortran order, which --shape cannot take: use --axes")
    if words % known or (-1 not in shape and words != known):
        raise SourceError(f"{where}: array {array.name!r} has {words:,} words: expected {_product(shape)}")
    return replace(array, shape=tuple(words // known if length == -1 else length for length in shape))


def _product(shape: Sequence[int]) -> str:
    if -1 in shape:
        return f"a multiple of {math.prod(length for length in shape if length != -1):,} ({list(shape)})"
    return f"{math.prod(shape):,} ({list(shape)})"


def _with_heads(arrays: list[NamedArray], axes: str) -> tuple[list[NamedArray], str]:
    """Return the arrays with an axis of one head in front of the tokens, where their axes have none."""
    if "h" in axes or any(len(array.shape) != len(axes) for array in arrays):
        return arrays, axes
    place = axes.index("t")
    arrays = [replace(array, shape=(*array.shape[:place], 1, *array.shape[place:])) for array in arrays]
    return arrays, axes.replace("t", "ht")


def _are_latent(arrays: Sequence[NamedArray], axes: str) -> bool:
    """Whether arrays of one head have names that say neither K nor V."""
    return all(
        len(array.shape) == len(axes) and array.shape[axes.index("h")] == 1 and not _names_part(array.name)
        for array in arrays
    )


def _names_part(name: str) -> bool:
    try:
        part_of("", name)
    except SourceError:
        return conventional(name) is not None
    return True


def _sorted(where: str, arrays: Sequence[NamedArray], axes: str, *, pages: bool, is_latent: bool) -> list[NamedArray]:
    found: dict[tuple[int, Part], list[Seen]] = {}
    for array in arrays:
        if len(array.shape) != len(axes):
            raise SourceError(
                f"{where}: array {array.name!r} has {_axes(len(array.shape))} {list(array.shape)}, expected "
                f"{len(axes)} ({axes})"
            )
        if not array.has_axes:
            raise MissingOptionError(f"{where}: array {array.name!r} holds raw bytes: say their --shape")
        words = _Words(array)
        for layer, part, place in _parts(where, array, axes, alone=len(arrays) == 1, is_latent=is_latent):
            if (layer, part) in found and not pages:
                raise MissingOptionError(
                    f"{where}: there are several {part}s of layer {layer}: {array.name!r} is one of them (--pages: "
                    "they are pages of one text)"
                )
            found.setdefault((layer, part), []).append(_part(words, axes, place, array_name(layer, part)))
    parts = {part for _, part in found}
    for layer in sorted({layer for layer, _ in found}):
        for part in PARTS:
            if part in parts and (layer, part) not in found:
                raise SourceError(f"{where}: layer {layer} has no array of its {part}s")
    return [_joined(where, found[key]) for key in sorted(found)]  # "key" comes before "value"


def _joined(where: str, pages: Sequence[Seen]) -> NamedArray:
    """Runs of tokens of one text as one array."""
    first, _ = pages[0]
    if len(pages) == 1:
        return strided(*pages[0])
    for info, _ in pages[1:]:
        if (*info.shape[:-2], info.shape[-1], info.dtype) != (*first.shape[:-2], first.shape[-1], first.dtype):
            raise SourceError(
                f"{where}: pages of {first.name}: {info.dtype} {list(info.shape)} and {first.dtype} "
                f"{list(first.shape)}: expected the same but for their tokens"
            )
    tokens = sum(info.shape[-2] for info, _ in pages)
    whole = replace(first, shape=(*first.shape[:-2], tokens, first.shape[-1]))
    return strided_pages(whole, [view for _, view in pages])


def _parts(
    where: str, array: NamedArray, axes: str, *, alone: bool, is_latent: bool
) -> Iterator[tuple[int, Part, dict[str, int]]]:
    """Layer, part, and where along the axes of layers and of K and V it lies."""
    lengths = dict(zip(axes, array.shape, strict=True))
    if lengths.get("2", 2) != 2:
        raise SourceError(f"{where}: array {array.name!r}: the axis of K and V has length {lengths['2']}: expected 2")
    if lengths.get("l", 1) > _MOST_LAYERS:
        raise SourceError(f"{where}: array {array.name!r}: {lengths['l']:,} layers along an axis")
    parts = PARTS if "2" in axes else PARTS[:1] if is_latent else (_part_of(where, array),)
    for number, part in enumerate(parts):
        along = {"2": number} if "2" in axes else {}
        if "l" in axes:
            for layer in range(lengths["l"]):
                yield layer, part, {**along, "l": layer}
        else:
            yield _layer(where, array, alone=alone or "2" not in axes), part, along


def _part_of(where: str, array: NamedArray) -> Part:
    """K or V by the name; `MissingOptionError` where it does not say."""
    try:
        return part_of(where, array.name)[0]
    except SourceError as error:
        raise MissingOptionError(
            f"{error}, or 2 in --axes for an axis of K and V, or no h where one tensor is both, as in latent attention "
            "(an array of a .npy file is called as the file)"
        ) from None


def _layer(where: str, array: NamedArray, *, alone: bool) -> int:
    """The layer by the name; one pair without a number is layer 0."""
    said = conventional(array.name)
    layer = layer_of(array.name) if said is None else said.layer
    if layer is None and not alone:
        raise SourceError(
            f"{where}: array {array.name!r} does not say which layer it is: expected a number in its name"
        )
    return layer or 0


class _Words:
    """The words of an array that many are made of: of an array that must be decoded, the one that was asked for last.

    Parameters
    ----------
    array
        In words of its dtype.
    """

    def __init__(self, array: NamedArray) -> None:
        self.array = array
        self._last: npt.NDArray[Any] | None = None

    def view(self, index: tuple[Any, ...], order: list[int]) -> npt.NDArray[Any]:
        """A part of the words, with its axes in another order; a view of the file where they lie there as they are."""
        if self._last is None:
            self._last = words_of(self.array)
        found: npt.NDArray[Any] = self._last[index]
        return found.transpose(order)


Seen = tuple[ArrayInfo, View]
"""What an array is, and a view of its words."""


def _part(words: _Words, axes: str, place: dict[str, int], name: str) -> Seen:
    array = words.array
    lengths = dict(zip(axes, array.shape, strict=True))
    left = [letter for letter in _ORDER if letter in axes and letter not in place]
    info = ArrayInfo(
        name=name,
        dtype=array.dtype,
        shape=tuple(lengths[letter] for letter in left),
        array_dtype=array.array_dtype.replace(">", "<"),
        element=array.element,
    )
    index = tuple(place.get(letter, slice(None)) for letter in axes)
    kept = [letter for letter in axes if letter not in place]
    return info, partial(words.view, index, [kept.index(letter) for letter in left])


def _has_batch(source: Source) -> bool:
    return all(len(array.shape) == 4 for array in source.arrays) and (
        source.axes == "bhtd" or (source.axes is None and all(map(_is_own, source.arrays)))
    )


def _may_have_batch(source: Source) -> bool:
    """Whether all arrays have an axis more than heads, tokens and dimensions."""
    return bool(source.arrays) and all(len(array.shape) == 4 for array in source.arrays)


def _one_of_batch(source: Source, batch: int, where: str) -> Source:
    """The arrays with one text of those along the axis of the batch, which is the first."""
    if not _has_batch(source):
        if source.axes is None and _may_have_batch(source):
            first = source.arrays[0]
            raise OptionError(
                f"{where}: nothing says which axis of array {first.name!r} {list(first.shape)} is the batch: say "
                f"--axes bhtd --batch {batch} (in Python axes='bhtd', batch={batch}) where the first one is"
            )
        raise OptionError(f"{where}: its arrays have no axis for a batch: leave --batch out")
    for array in source.arrays:
        if batch >= array.shape[0] == 1:
            raise OptionError(f"{where}: has no text {batch} in its batch, which is of one text: leave --batch out")
        if batch >= array.shape[0]:
            raise OptionError(f"{where}: has a batch of {array.shape[0]}: expected --batch 0 to {array.shape[0] - 1}")
    arrays = [strided(*_part(_Words(array), "bhtd", {"b": batch}, array.name)) for array in source.arrays]
    arrays, described = select_text(arrays, source.engine_cache, batch)
    # one text of a file is not the file
    metadata = {key: text for key, text in source.metadata.items() if key not in (FILE_KEY, DUMP_KEY)}
    texts = max(array.shape[0] for array in source.arrays)
    padding = source.engine_cache.tokens - described.tokens if source.engine_cache and described else 0
    rows = f", and {count(padding, 'row')} of padding" if padding else ""
    notes = [f"{where}: text {batch} of a batch of {texts}; the others are left out{rows}"] if texts > 1 else []
    return replace(
        source,
        arrays=arrays,
        metadata=metadata,
        axes="htd",
        engine_cache=described,
        notes=[*source.notes, *notes],
    )


def _is_own(array: NamedArray) -> bool:
    said = conventional(array.name)
    return said is not None and array.name == array_name(said.layer, said.part)
