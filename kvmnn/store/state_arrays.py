"""Opaque state as arrays of bytes in files of arrays, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ..arrays.named_array import NamedArray, bytes_array
from ..arrays.opaque_state import MAX_STATE_AXES, MAX_STATE_NAME, OpaqueState
from ..arrays.source import Source
from ..errors import ManifestError
from ..files.json_document import parse

STATES_KEY: Final = "kvmnn.states"
"""Metadata key for layer, name, dtype and shape of each state that a file has as an array of bytes."""

_VERSION = 1
_MAX_DOCUMENT = 16 << 20


def array_name_of(state: OpaqueState) -> str:
    """Return the name of the array, which no K and V has."""
    return f"layer_{state.layer}.state.{state.name}"


def state_arrays(states: Sequence[OpaqueState]) -> list[NamedArray]:
    """Return the arrays of all states that have bytes."""
    return [bytes_array(array_name_of(state), state.read()) for state in states if state.nbytes]


def note_states(states: Sequence[OpaqueState]) -> dict[str, str]:
    """Return metadata that tells what the arrays of `state_arrays` are."""
    about = [
        {"layer": state.layer, "name": state.name, "dtype": state.dtype, "shape": list(state.shape)}
        for state in states
        if state.nbytes
    ]
    return {STATES_KEY: json.dumps({"version": _VERSION, "states": about}, separators=(",", ":"))} if about else {}


def take_states(source: Source) -> Source:
    """Return a source with the arrays that are state as `Source.states`, where its metadata tells them.

    Raises
    ------
    ManifestError
        For malformed metadata, and for state whose array is missing or contains numbers.
    """
    if STATES_KEY not in source.metadata:
        return source
    where = f"{' '.join(source.inputs)}: metadata {STATES_KEY!r}"
    root = parse(source.metadata[STATES_KEY], where, _MAX_DOCUMENT)
    root.at("version").check_version(_VERSION)
    arrays = {array.name: array for array in source.arrays}
    states: list[OpaqueState] = []
    for node in root.at("states").items():
        name, dtype = node.at("name"), node.at("dtype")
        for text in (name, dtype):
            if not 0 < len(text.text()) <= MAX_STATE_NAME:
                raise text.wrong(f"1 to {MAX_STATE_NAME} characters")
        state = OpaqueState(
            layer=node.at("layer").integer(0),
            name=name.text(),
            dtype=dtype.text(),
            shape=tuple(axis.integer(0) for axis in node.at("shape").items(most=MAX_STATE_AXES)),
            nbytes=0,
            reader=bytes,
        )
        array = arrays.pop(array_name_of(state), None)
        if array is None or array.itemsize != 1:
            raise ManifestError(f"{where}: there is no array of bytes called {array_name_of(state)!r}")
        states.append(replace(state, nbytes=array.nbytes, reader=partial(_read_array, array)))
    return replace(source, arrays=list(arrays.values()), states=tuple(states))


def _read_array(array: NamedArray) -> bytes:
    return array.to_numpy().tobytes()
