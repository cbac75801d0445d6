"""What the readers of all formats share: which arrays are taken, and as which dtype."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np

from .. import dtypes
from ..arrays.completeness_notes import select_arrays
from ..arrays.engine_cache import of_part
from ..arrays.float8 import decode_array
from ..arrays.held_tokens import held_tokens
from ..arrays.layers import array_name
from ..arrays.named_array import NamedArray, UnsupportedArrayError, UntypedArrayError
from ..arrays.source import BESIDE_KEY, ENGINE_KEY, Source, described_by, metadata_of_part
from ..bundle.beside import POSITIONS, to_json
from ..dtypes import FLOAT8_NAMES, PARTS
from ..errors import KvmnnError, SourceError
from ..packed.cache_info import CacheInfo, Ranges
from .options import ReadOptions


def dequantised_note(types: Iterable[str], dtype: str, blocks: int, numbers: int) -> str:
    """What is said of numbers that were made of quantised blocks: of which types, and the bytes of both."""
    return (
        f"dequantised from {', '.join(types)} to {dtype}: {blocks:,} bytes in the file became {numbers:,}, and sizes "
        "and ratios are of these"
    )


def select(
    where: str, entries: Sequence[tuple[str, Callable[[], NamedArray]]], options: ReadOptions
) -> tuple[list[NamedArray], list[str]]:
    """Take the arrays that `options` ask for out of a file's `entries` (name, maker).

    Returns
    -------
    The arrays in file order, and one line per array that was left out.

    Raises
    ------
    SourceError
        For a name the file does not have, an array no frame holds, or a file with nothing to take.
    """
    known = Counter(name for name, _ in entries)
    for name, count in known.items():
        if count > 1:
            raise SourceError(f"{where}: has {count} arrays named {name!r}")
    for name in options.tensors:
        if name not in known:
            raise SourceError(f"{where}: no array named {name!r}; it has {some(known)}")
    arrays: list[NamedArray] = []
    skipped: list[str] = []
    for name, make in entries:
        if options.tensors and name not in options.tensors:
            continue
        try:
            arrays.append(make())
        except UnsupportedArrayError as exc:
            if options.tensors or not options.skip_unsupported:
                raise
            skipped.append(str(exc))
    if not arrays:
        raise nothing_taken(where, skipped)
    return arrays, skipped


def nothing_taken(where: str, skipped: Sequence[str]) -> SourceError:
    """The error for an input without arrays that can be taken; `skipped` says why, of each."""
    why = f": {skipped[0].removeprefix(f'{where}: ')}" if skipped else ""
    return SourceError(f"{where}: holds no array that can be encoded{why}")


def some(names: Iterable[str], most: int = 8) -> str:
    """The first of an input's names for a message, and how many more there are."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:most])
    return (shown or "none") + (f" and {len(names) - most} more" if len(names) > most else "")


def dtype_name(array_dtype: np.dtype[np.generic], options: ReadOptions, where: str) -> str:
    """The dtype name under which an array of numpy type `array_dtype` is encoded.

    Raises
    ------
    UnsupportedArrayError
        For object and structured types, and word sizes other than 2 and 4; `UntypedArrayError` for types that need a
        dtype and have none.
    """
    if array_dtype.hasobject:
        raise UnsupportedArrayError(f"{where}: holds Python objects (pickles), which are never loaded")
    if array_dtype.fields is not None or array_dtype.subdtype is not None:
        raise UnsupportedArrayError(f"{where}: structured type {array_dtype} is not supported")
    try:
        if options.dtype is not None:
            return _taken_as(options.dtype, array_dtype, options.as_numbers)
        return dtypes.of_array(np.empty(0, array_dtype)).name
    except (TypeError, KvmnnError) as exc:
        for fallback in options.fallbacks if options.dtype is None else ():
            with suppress(TypeError):
                return _taken_as(fallback, array_dtype)
        if options.dtype is not None:
            raise UnsupportedArrayError(f"{where}: {exc}") from None
        raise _without_dtype(array_dtype, where) from None


def _without_dtype(array_dtype: np.dtype[np.generic], where: str) -> UnsupportedArrayError:
    """Why a numpy type says no dtype, and what to do."""
    names = [dtype.name for dtype in dtypes.BY_NAME.values() if dtype.itemsize == array_dtype.itemsize]
    if array_dtype == np.uint8:
        return UntypedArrayError(
            f"{where}: raw bytes need a dtype (--dtype {', '.join(dtypes.BY_NAME)}); codes of one byte have "
            f"{', '.join(FLOAT8_NAMES)}"
        )
    found = f"{where}: numpy type {array_dtype}"
    if names and array_dtype.kind in "iuV":
        return UntypedArrayError(
            f"{found} does not say what its words are: --dtype {' or '.join(names)} takes them as they are"
        )
    return UnsupportedArrayError(
        f"{found} is none that frames hold: expected float16, float32 or uint16 (bf16); convert it first"
    )


def _taken_as(name: str, array_dtype: np.dtype[np.generic], as_numbers: bool = False) -> str:
    if name in FLOAT8_NAMES:
        if array_dtype != np.uint8:
            raise KvmnnError(f"numpy type {array_dtype} holds no codes of {name}: expected uint8")
        return FLOAT8_WORDS
    dtype = dtypes.by_name(name)
    if array_dtype != np.uint8:
        dtypes.check_array(np.empty(0, array_dtype), dtype)
    if as_numbers and array_dtype.kind == "f" and dtype.numpy.kind != "f":
        raise other_numbers(dtypes.of_array(np.empty(0, array_dtype)).name, name)
    return name


def check_own_type(own: str | None, options: ReadOptions, where: str) -> None:
    """`UnsupportedArrayError` for another dtype than the one that a format with names for all dtypes says."""
    if own is not None and options.dtype not in (None, own):
        raise UnsupportedArrayError(f"{where}: {other_numbers(own, options.dtype)}")


def other_numbers(own: str, name: str | None) -> KvmnnError:
    """The error for numbers of the type `own` that are said to be of another type."""
    return KvmnnError(f"holds {own} numbers, and {name} (--dtype) would make others of them: leave --dtype out")


def with_bytes(options: ReadOptions, metadata: Mapping[str, str]) -> ReadOptions:
    """The options for bytes in a file: of an engine's cache these are blocks that stayed blocks (``--blocks``)."""
    if options.dtype is None and ENGINE_KEY in metadata:
        return replace(options, fallbacks=(*options.fallbacks, "fp16"))
    return options


FLOAT8_WORDS: Final = "fp16"
"""The dtype under which frames hold float8 codes: two of them are a word."""


def checked(array: NamedArray, where: str, options: ReadOptions) -> NamedArray:
    """`array` as it is wanted, unless it is one that no frame holds: empty, or no multiple of the word size.

    Bytes are codes where the options say a float8 type; codes become numbers unless they are wanted themselves.
    """
    if options.dtype in FLOAT8_NAMES and array.array_dtype == "|u1":
        array = replace(array, element=options.dtype)
    if array.element and not options.codes:
        array = decode_array(array)
    if array.nbytes == 0:
        raise UnsupportedArrayError(f"{where}: is empty (shape {list(array.shape)}), there is nothing to encode")
    if array.nbytes % array.word_bytes:
        raise UnsupportedArrayError(
            f"{where}: {array.nbytes} bytes are not a whole number of {array.word_bytes}-byte {array.dtype} words"
        )
    return array


def chosen(source: Source, path: str, options: ReadOptions) -> Source:
    """The source with just the arrays that `options` name, and what is said of these.

    Raises
    ------
    SourceError
        For a name that it does not have.
    """
    if not options.tensors:
        return source
    check_names(path, source, options)
    arrays = [array for array in source.arrays if array.name in options.tensors]
    if len(arrays) == len(source.arrays):
        return source
    names = [array.name for array in arrays]
    cache = source.engine_cache and of_part(source.engine_cache, source, names)
    completeness = source.completeness and select_arrays(source.completeness, source, names)
    metadata = said_of_part(source.metadata, source.cache or described_by(source.metadata, path))
    return replace(source, arrays=arrays, metadata=metadata, cache=None, engine_cache=cache, completeness=completeness)


def drop_description(source: Source, path: str) -> None:
    """Keep of what is said of a packed cache what holds of its arrays, where not all of them were chosen."""
    cache = described_by(source.metadata, path)
    if cache is not None and any(
        array_name(layer.layer, part) not in source for layer in cache.layers for part in PARTS
    ):
        source.metadata = said_of_part(source.metadata, cache)


def said_of_part(metadata: dict[str, str], cache: CacheInfo | None) -> dict[str, str]:
    """The metadata of some arrays of an input; of packed files that were cut with the positions of their tokens."""
    return metadata_of_part(metadata) | positions_beside(cache)


def positions_beside(cache: CacheInfo | None) -> dict[str, str]:
    """Return the positions of a packed cache that was cut, as files beside its arrays have them; else nothing."""
    if cache is None or all(layer.text_runs == ((0, layer.tokens),) for layer in cache.layers):
        return {}
    layers = [
        {
            "layer": layer.layer,
            "positions": _places(layer.positions),
            **({} if layer.text_positions is None else {"text_positions": _places(layer.text_positions)}),
        }
        for layer in cache.layers
    ]
    is_rotated = any(layer.text_positions is not None for layer in cache.layers)  # then it is no length of the text
    seen = {} if cache.next_position is None or is_rotated else {"tokens_seen": cache.next_position}
    return {BESIDE_KEY: to_json({POSITIONS: json.dumps({**seen, "layers": layers}).encode()})}


_MAX_POSITIONS = 1 << 20  # of a folder: the document must stay below what is read of one


def positions_of_engine(source: Source) -> dict[str, str]:
    """Return the positions of another engine's cache that lacks tokens, as files beside its arrays have them.

    Empty where nothing is missing, where tokens are not in the order of their text, and above 2^20 positions.
    """
    cache = source.engine_cache
    if cache is None or BESIDE_KEY in source.metadata or cache.is_whole or cache.has_padding or not cache.ascends:
        return {}
    held = held_tokens(source)
    if not held or sum(positions.size for positions in held.values()) > _MAX_POSITIONS:
        return {}
    layers = [{"layer": layer, "positions": positions.tolist()} for layer, positions in held.items()]
    seen = 1 + max(int(positions.max(initial=-1)) for positions in held.values())
    return {BESIDE_KEY: to_json({POSITIONS: json.dumps({"tokens_seen": seen, "layers": layers}).encode()})}


def _places(runs: Ranges) -> list[int]:
    return [place for begin, size in runs for place in range(begin, begin + size)]


def check_names(path: str, source: Source, options: ReadOptions) -> None:
    """`SourceError` for a name in `options.tensors` that the source does not have."""
    missing = set(options.tensors) - {array.name for array in source.arrays}
    if missing:
        found = ", ".join(repr(array.name) for array in source.arrays[:8])
        raise SourceError(f"{path}: no array named {min(missing)!r}; it has {found}")
