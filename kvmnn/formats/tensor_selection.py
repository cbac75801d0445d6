"""Selection of arrays and their dtypes, shared by the readers of all formats."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np

from .. import dtypes
from ..arrays.array import LazyArray, UnsupportedArrayError, UntypedArrayError
from ..arrays.completeness import select_completeness
from ..arrays.engine_cache import select_engine_layers
from ..arrays.float8 import decode_array
from ..arrays.layers import format_array_name
from ..arrays.positions import read_token_positions
from ..arrays.source import ENGINE_KEY, SIDECAR_KEY, Source, parse_cache_info, select_subset_metadata
from ..bundle.passthrough import POSITIONS_NAME, dump_sidecars
from ..dtypes import FLOAT8_NAMES, PARTS
from ..errors import KvmnnError, SourceError, UnsuitableOptionError
from ..packed.cache_info import CacheInfo, PositionRuns
from .options import ReadOptions


def format_dequantized_note(types: Iterable[str], dtype: str, block_bytes: int, value_bytes: int) -> str:
    """Format a note on values decoded from quantised blocks: their types, and the bytes before and after."""
    return (
        f"dequantised from {', '.join(types)} to {dtype}: {block_bytes:,} bytes in the file became {value_bytes:,}, "
        "and sizes and ratios are of these"
    )


def select_tensors(
    label: str, entries: Sequence[tuple[str, Callable[[], LazyArray]]], options: ReadOptions
) -> tuple[list[LazyArray], list[str]]:
    """Return the arrays that `options` select from a file's `entries` (name, maker), and why others were skipped."""
    name_counts = Counter(name for name, _ in entries)
    for name, count in name_counts.items():
        if count > 1:
            raise SourceError(f"{label}: has {count} arrays named {name!r}")
    for name in options.tensors:
        if name not in name_counts:
            raise UnsuitableOptionError(f"{label}: no array named {name!r}; it has {format_names(name_counts)}")
    arrays: list[LazyArray] = []
    skipped: list[str] = []
    for name, make_array in entries:
        if options.tensors and name not in options.tensors:
            continue
        try:
            arrays.append(make_array())
        except UnsupportedArrayError as exc:
            if options.tensors or not options.skip_unsupported:
                raise
            skipped.append(str(exc))
    if not arrays:
        raise make_no_tensor_error(label, skipped)
    return arrays, skipped


def make_no_tensor_error(label: str, skipped: Sequence[str]) -> SourceError:
    """Build the error for an input without usable arrays; `skipped` has the reason for each array."""
    reason = f": {skipped[0].removeprefix(f'{label}: ')}" if skipped else ""
    return SourceError(f"{label}: holds no array that can be encoded{reason}")


def format_names(names: Iterable[str], max_listed: int = 8) -> str:
    """Format the first names of an input for a message, and how many more there are."""
    names = list(names)
    names_text = ", ".join(repr(name) for name in names[:max_listed])
    return (names_text or "none") + (f" and {len(names) - max_listed} more" if len(names) > max_listed else "")


def resolve_dtype_name(array_dtype: np.dtype[np.generic], options: ReadOptions, label: str) -> str:
    """Return the dtype name under which an array of numpy type `array_dtype` is encoded."""
    if array_dtype.hasobject:
        raise UnsupportedArrayError(f"{label}: holds Python objects (pickles), which are never loaded")
    if array_dtype.fields is not None or array_dtype.subdtype is not None:
        raise UnsupportedArrayError(f"{label}: structured type {array_dtype} is not supported")
    try:
        if options.dtype is not None:
            return _validate_reinterpretation(options.dtype, array_dtype, options.forbid_reinterpretation)
        return dtypes.infer_dtype(np.empty(0, array_dtype)).name
    except (TypeError, KvmnnError) as exc:
        for fallback in options.fallback_dtypes if options.dtype is None else ():
            with suppress(TypeError):
                return _validate_reinterpretation(fallback, array_dtype)
        if options.dtype is not None:
            raise UnsupportedArrayError(f"{label}: {exc}") from None
        raise _make_missing_dtype_error(array_dtype, label) from None


def _make_missing_dtype_error(array_dtype: np.dtype[np.generic], label: str) -> UnsupportedArrayError:
    """Build the error that explains why a numpy type does not determine the dtype, and what to do."""
    names = [dtype.name for dtype in dtypes.DTYPES.values() if dtype.itemsize == array_dtype.itemsize]
    if array_dtype == np.uint8:
        return UntypedArrayError(
            f"{label}: raw bytes need a dtype (--dtype {', '.join(dtypes.DTYPES)}); codes of one byte have "
            f"{', '.join(FLOAT8_NAMES)}"
        )
    type_text = f"{label}: numpy type {array_dtype}"
    if names and array_dtype.kind in "iuV":
        return UntypedArrayError(
            f"{type_text} does not say what its words are: --dtype {' or '.join(names)} takes them as they are"
        )
    return UnsupportedArrayError(
        f"{type_text} is none that frames hold: expected float16, float32 or uint16 (bf16); convert it first"
    )


def _validate_reinterpretation(
    name: str, array_dtype: np.dtype[np.generic], forbid_reinterpretation: bool = False
) -> str:
    if name in FLOAT8_NAMES:
        if array_dtype != np.uint8:
            raise KvmnnError(f"numpy type {array_dtype} holds no codes of {name}: expected uint8")
        return FLOAT8_FRAME_DTYPE
    dtype = dtypes.parse_dtype(name)
    if array_dtype != np.uint8:
        dtypes.check_array_dtype(np.empty(0, array_dtype), dtype)
    if forbid_reinterpretation and array_dtype.kind == "f" and dtype.numpy_dtype.kind != "f":
        raise make_reinterpretation_error(dtypes.infer_dtype(np.empty(0, array_dtype)).name, name)
    return name


def check_declared_dtype(declared_dtype: str | None, options: ReadOptions, label: str) -> None:
    """Raise `UnsupportedArrayError` if the options specify another dtype than the one that the file declares."""
    if declared_dtype is not None and options.dtype not in (None, declared_dtype):
        raise UnsupportedArrayError(f"{label}: {make_reinterpretation_error(declared_dtype, options.dtype)}")


def make_reinterpretation_error(declared_dtype: str, requested_dtype: str | None) -> KvmnnError:
    """Build the error for values of type `declared_dtype` for which the caller specifies another type."""
    return KvmnnError(
        f"holds {declared_dtype} numbers, and {requested_dtype} (--dtype) would make others of them: leave --dtype out"
    )


def add_byte_fallback(options: ReadOptions, metadata: Mapping[str, str]) -> ReadOptions:
    """Return options that read untyped bytes of an engine's cache, its raw blocks (``--raw-blocks``), as fp16 words."""
    if options.dtype is None and ENGINE_KEY in metadata:
        return replace(options, fallback_dtypes=(*options.fallback_dtypes, "fp16"))
    return options


FLOAT8_FRAME_DTYPE: Final = "fp16"
"""Dtype under which frames store float8 codes: two codes form a word."""


def validate_array(array: LazyArray, label: str, options: ReadOptions) -> LazyArray:
    """Return `array` in the requested form; reject an empty array, or one that has a fractional number of words.

    Bytes are codes if the options specify a float8 type; codes are decoded unless the options request codes.
    """
    if options.dtype in FLOAT8_NAMES and array.array_dtype == "|u1":
        array = replace(array, element=options.dtype)
    if array.element and not options.codes:
        array = decode_array(array)
    if array.nbytes == 0:
        raise UnsupportedArrayError(f"{label}: is empty (shape {list(array.shape)}), there is nothing to encode")
    if array.nbytes % array.coded_itemsize:
        raise UnsupportedArrayError(
            f"{label}: {array.nbytes} bytes are not a whole number of {array.coded_itemsize}-byte {array.dtype} words"
        )
    return array


def select_from_source(source: Source, path: str, options: ReadOptions) -> Source:
    """Return the source with only the arrays that `options` name, and the metadata that applies to these.

    Raises
    ------
    SourceError
        For a name that it does not have.
    """
    if not options.tensors:
        return source
    missing_names = set(options.tensors) - {array.name for array in source.arrays}
    if missing_names:
        names_text = ", ".join(repr(array.name) for array in source.arrays[:8])
        raise UnsuitableOptionError(f"{path}: no array named {min(missing_names)!r}; it has {names_text}")
    arrays = [array for array in source.arrays if array.name in options.tensors]
    if len(arrays) == len(source.arrays):
        return source
    names = [array.name for array in arrays]
    cache = source.engine_cache and select_engine_layers(source.engine_cache, source, names)
    completeness = source.completeness and select_completeness(source.completeness, source, names)
    metadata = build_subset_metadata(source.metadata, source.cache or parse_cache_info(source.metadata, path))
    return replace(source, arrays=arrays, metadata=metadata, cache=None, engine_cache=cache, completeness=completeness)


def drop_whole_file_metadata(source: Source, path: str) -> None:
    """Reduce the description of a packed cache to the selected arrays, unless all were selected."""
    cache = parse_cache_info(source.metadata, path)
    if cache is not None and any(
        format_array_name(layer.layer, part) not in source for layer in cache.layers for part in PARTS
    ):
        source.metadata = build_subset_metadata(source.metadata, cache)


def build_subset_metadata(metadata: dict[str, str], cache: CacheInfo | None) -> dict[str, str]:
    """Build the metadata of some arrays of an input; for packed files, with the positions of their tokens."""
    return select_subset_metadata(metadata) | build_packed_positions_sidecar(cache)


def build_packed_positions_sidecar(cache: CacheInfo | None) -> dict[str, str]:
    """Return a sidecar with the positions of an evicted packed cache; empty if no tokens are missing."""
    if cache is None or all(layer.text_position_runs == ((0, layer.tokens),) for layer in cache.layers):
        return {}
    layers = [
        {
            "layer": layer.layer,
            "positions": _expand_runs(layer.positions),
            **({} if layer.text_positions is None else {"text_positions": _expand_runs(layer.text_positions)}),
        }
        for layer in cache.layers
    ]
    is_rotated = any(layer.text_positions is not None for layer in cache.layers)  # then it is no length of the text
    return build_positions_sidecar(None if is_rotated else cache.next_position, layers)


def build_positions_sidecar(tokens_seen: int | None, layers: list[dict[str, Any]]) -> dict[str, str]:
    """Return a positions document as the metadata that frames keep of it."""
    tokens_entry = {} if tokens_seen is None else {"tokens_seen": tokens_seen}
    return {SIDECAR_KEY: dump_sidecars({POSITIONS_NAME: json.dumps({**tokens_entry, "layers": layers}).encode()})}


_MAX_SIDECAR_POSITIONS = 1 << 20  # of a folder: the document must stay below what is read of one


def build_engine_positions_sidecar(source: Source) -> dict[str, str]:
    """Return a sidecar with the positions of another engine's cache that lacks tokens.

    Empty if nothing is missing, if tokens are not in the order of their text, and above 2^20 positions.
    """
    cache = source.engine_cache
    if cache is None or SIDECAR_KEY in source.metadata:
        return {}
    if cache.is_contiguous_prefix or cache.has_padding or not cache.is_ascending:
        return {}
    position_map = read_token_positions(source)
    if not position_map or sum(positions.size for positions in position_map.values()) > _MAX_SIDECAR_POSITIONS:
        return {}
    layers = [{"layer": layer, "positions": positions.tolist()} for layer, positions in position_map.items()]
    tokens_seen = 1 + max(int(positions.max(initial=-1)) for positions in position_map.values())
    return build_positions_sidecar(tokens_seen, layers)


def _expand_runs(runs: PositionRuns) -> list[int]:
    return [position for begin, size in runs for position in range(begin, begin + size)]
