"""Decode transform streams to K and V of a layer (docs/format-transform.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays.layer_cache import LayerCache
from ..dtypes import PARTS, Elements
from ..errors import FrameError, KvmnnError
from . import _codec
from .header import (
    KEY_BYTES,
    MAX_POSITION,
    PayloadReader,
    TransformHeader,
    compute_checksum,
    read_header,
    read_runs,
    read_sections,
)
from .profile_tables import ProfileTables, TableSource, get_tables
from .results import TransformInfo
from .rows import (
    Regressors,
    allocate_coefficients,
    check_lower_layers,
    compute_token_steps,
    create_rotation,
    get_words,
    reconstruct,
)
from .steps import StepPlan

_MIN_EXPONENT, _MAX_EXPONENT = -16, 15


def inspect_layer(data: Any) -> TransformInfo:
    """Return what the header of a stream says; no profile is needed.

    Raises
    ------
    FrameError
        For anything but one whole stream.
    """
    header, payload = read_header(data)
    reader = PayloadReader(payload)
    read_runs(reader, header.tokens, MAX_POSITION + 1, "positions")
    exact_rows = read_runs(reader, header.tokens, header.tokens, "exact tokens")
    return TransformInfo.from_header(header, len(memoryview(data).cast("B")), len(exact_rows))


def is_stream_of_plan(data: Any, profile_key: bytes, plan: StepPlan, first: int) -> bool:
    """Return whether a stream lost what a plan of steps says, and has its first tokens exactly.

    Parameters
    ----------
    data
        Bytes-like; exactly one stream, whose checksum was compared.
    profile_key
        Key of the profile that the plan was made with.
    plan
        Steps of all layers of its model.
    first
        Tokens at the beginning that are to be exact.

    Raises
    ------
    FrameError
        For anything but one whole stream.
    """
    header, payload = read_header(data)
    reader = PayloadReader(payload)
    read_runs(reader, header.tokens, MAX_POSITION + 1, "positions")
    exact_rows = read_runs(reader, header.tokens, header.tokens, "exact tokens")
    num_first = min(first, header.tokens)
    return (
        header.profile_key == profile_key
        and header.below == plan.below
        and header.steps == plan.get_layer_steps(header.layer)
        and np.array_equal(exact_rows[:num_first], np.arange(num_first))
    )


def decode_layer(
    data: Any, profile: TableSource, lower: Sequence[LayerCache] = (), *, max_bytes: int | None = None
) -> LayerCache:
    """Decode K and V of one layer; the words are the same on every machine.

    Parameters
    ----------
    data
        Bytes-like; exactly one stream.
    profile
        The profile that the stream names.
    lower
        Layers l - 1 and l - 2 as decoded, as many as the stream is predicted from.
    max_bytes
        Reject a stream that claims more raw bytes, before any memory is allocated.

    Raises
    ------
    FrameError
        If the stream violates the format or its checksum differs: it is damaged, or lower layers are others.
    LimitError
        Beyond `max_bytes`.
    KvmnnError
        For another profile than the stream's, and missing lower layers.
    """
    header, payload = read_header(data, max_bytes)
    tables = get_tables(profile)
    _check_profile(header, tables)
    check_lower_layers(header.layer, header.below, lower, None)
    reader = PayloadReader(payload)
    positions = read_runs(reader, header.tokens, MAX_POSITION + 1, "positions")
    if len(positions) != header.tokens:
        raise FrameError(f"a transform stream of {header.tokens} tokens has {len(positions)} positions")
    for cache in lower[: min(header.below, header.layer)]:
        if not np.array_equal(cache.positions, positions):
            raise KvmnnError(f"layer {header.layer}: layer {cache.layer} holds other tokens than the stream")
    decoded = _LayerDecoder(header, tables, lower, positions, reader).decode()
    header_bytes = header.pack()
    if compute_checksum(header_bytes, payload, *(get_words(words) for words in decoded)) != header.checksum:
        raise FrameError(
            f"layer {header.layer}: a transform stream decodes to other words than its checksum says: it is damaged"
            + (", or the lower layers are not those that it was made with" if header.below else "")
        )
    return LayerCache(layer=header.layer, keys=decoded[0], values=decoded[1], positions=positions)


class _LayerDecoder:
    def __init__(
        self,
        header: TransformHeader,
        tables: ProfileTables,
        lower: Sequence[LayerCache],
        positions: npt.NDArray[np.int64],
        reader: PayloadReader,
    ) -> None:
        self._header, self._tables, self._positions = header, tables, positions
        self._regressors = Regressors(tables, lower)
        self._sides = [tables.get_side(header.layer, part, header.below) for part in PARTS]
        self._exact_rows = read_runs(reader, header.tokens, header.tokens, "exact tokens")
        is_coded = np.ones(header.tokens, bool)
        is_coded[self._exact_rows] = False
        self._coded_rows = np.flatnonzero(is_coded)
        counts = [side.elements for side in self._sides] if header.has_corrections else []
        counts += [len(self._coded_rows)] if header.has_exponents else []
        list_levels = [reader.read_varint() for _ in counts]
        if max(list_levels, default=0) >= _codec.NUM_TABLES:
            raise FrameError("a list of a transform stream has a table that there is none of")
        num_coefficient_sections = 4 if len(self._coded_rows) else 0
        sections = list(read_sections(reader, (2 if counts else 0) + num_coefficient_sections))
        self._lists = self._read_lists(counts, list_levels, sections)
        self._sections = sections[2 if counts else 0 :]
        self._exact_words = []
        for side in self._sides:
            count = len(self._exact_rows) * side.elements * header.dtype.itemsize
            self._exact_words.append(reader.read_bytes(count))
        if reader.num_left:
            raise FrameError(f"a transform stream's payload has {reader.num_left} surplus bytes")

    def decode(self) -> list[Elements]:
        """Return the words of K and V, ``[head, token, dim]``."""
        header = self._header
        exponents: npt.NDArray[np.int8] | None = None
        if header.has_exponents:
            numbers = self._lists[-1]
            if ((numbers < _MIN_EXPONENT) | (numbers > _MAX_EXPONENT)).any():
                raise FrameError(f"a token's exponent: expected {_MIN_EXPONENT} to {_MAX_EXPONENT}")
            exponents = numbers.astype(np.int8)
        return [self._decode_side(index, exponents) for index in range(len(PARTS))]

    def _decode_side(self, index: int, exponents: npt.NDArray[np.int8] | None) -> Elements:
        header, tokens, side, part = self._header, self._header.tokens, self._sides[index], PARTS[index]
        coefficients = self._read_coefficients(index, exponents)
        token_exponents = None
        if exponents is not None:
            token_exponents = np.zeros(tokens, np.int8)
            token_exponents[self._coded_rows] = exponents
        words = reconstruct(
            side,
            coefficients,
            self._regressors.predict(side, tokens),
            compute_token_steps(side, header.steps[index], token_exponents, tokens),
            header.dtype,
            create_rotation(self._tables.layers[header.layer], part),
            self._positions,
        )
        if len(self._exact_rows):
            exact = np.frombuffer(self._exact_words[index], header.dtype.numpy_dtype)
            shape = (len(self._exact_rows), side.kv_heads, side.dim)
            words[:, self._exact_rows] = exact.reshape(shape).transpose(1, 0, 2)
        if part == "key":
            self._regressors.add(header.layer, part, words, self._positions)
        return words

    def _read_coefficients(self, index: int, exponents: npt.NDArray[np.int8] | None) -> npt.NDArray[np.int16]:
        header, side = self._header, self._sides[index]
        coefficients = allocate_coefficients(header.tokens, side.elements)
        if not len(self._coded_rows):
            return coefficients
        levels = side.levels - header.step_levels[index]
        if header.has_corrections:
            levels = levels + self._lists[index]
        units, bits = self._sections[2 * index : 2 * index + 2]
        _decode_numbers(units, bits, self._coded_rows, levels, exponents, self._tables, coefficients)
        return coefficients

    def _read_lists(
        self, counts: list[int], list_levels: list[int], sections: list[memoryview]
    ) -> list[npt.NDArray[np.int16]]:
        if not counts:
            return []
        numbers = np.zeros(sum(counts) + 1, np.int16)
        levels = np.repeat(np.array(list_levels, np.int32), counts)
        if len(levels):
            _decode_numbers(sections[0], sections[1], np.zeros(1, np.int64), levels, None, self._tables, numbers)
        return np.split(numbers[:-1], np.cumsum(counts)[:-1])


def _decode_numbers(
    units: memoryview,
    bits: memoryview,
    places: npt.NDArray[np.int64],
    levels: npt.NDArray[Any],
    exponents: npt.NDArray[np.int8] | None,
    tables: ProfileTables,
    numbers: npt.NDArray[np.int16],
) -> None:
    levels = np.ascontiguousarray(levels, np.int32)
    if not _codec.decode_coefficients(units, bits, places, levels, exponents, tables.frequencies, numbers):
        raise FrameError("sections of a transform stream that do not hold its coefficients: it is damaged")


def _check_profile(header: TransformHeader, tables: ProfileTables) -> None:
    if header.profile_key != tables.key:
        raise KvmnnError(
            f"layer {header.layer}: the stream needs the profile {header.profile_key.hex()[:16]}, this one is "
            f"{tables.key.hex()[:16]} (of {KEY_BYTES} bytes, the first 8)"
        )
    if header.layer >= len(tables.layers):
        raise FrameError(f"a stream of layer {header.layer}: its profile has {len(tables.layers)}")
    geometry = tables.layers[header.layer]
    sizes = (geometry.kv_heads, geometry.head_dim, geometry.value_dim)
    if (header.kv_heads, header.head_dim, header.value_dim) != sizes:
        raise FrameError(
            f"a stream of {header.kv_heads} heads of {header.head_dim} and {header.value_dim}: not {sizes}"
        )
