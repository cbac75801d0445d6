"""Opaque state as arrays of bytes in files of arrays, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ..arrays.named_array import LazyArray, bytes_array
from ..arrays.opaque_state import MAX_STATE_AXES, MAX_STATE_NAME_CHARS, OpaqueState
from ..arrays.source import Source
from ..errors import ManifestError
from ..files.json_document import parse_document

STATES_KEY: Final = "kvmnn.states"
"""Metadata key for layer, name, dtype and shape of each state that a file has as an array of bytes."""

_STATES_VERSION = 1
_MAX_DOCUMENT_BYTES = 16 << 20


def make_state_array_name(state: OpaqueState) -> str:
    """Return the name of the array, which no K and V has."""
    return f"layer_{state.layer}.state.{state.name}"


def build_state_arrays(states: Sequence[OpaqueState]) -> list[LazyArray]:
    """Return the arrays of all states that have bytes."""
    return [bytes_array(make_state_array_name(state), state.read()) for state in states if state.nbytes]


def encode_states_metadata(states: Sequence[OpaqueState]) -> dict[str, str]:
    """Return metadata that tells what the arrays of `build_state_arrays` are."""
    entries = [
        {"layer": state.layer, "name": state.name, "dtype": state.dtype, "shape": list(state.shape)}
        for state in states
        if state.nbytes
    ]
    return (
        {STATES_KEY: json.dumps({"version": _STATES_VERSION, "states": entries}, separators=(",", ":"))}
        if entries
        else {}
    )


def extract_states(source: Source) -> Source:
    """Return a source with the arrays that are state as `Source.states`, where its metadata tells them.

    Raises
    ------
    ManifestError
        For malformed metadata, and for state whose array is missing or contains numbers.
    """
    if STATES_KEY not in source.metadata:
        return source
    label = f"{' '.join(source.inputs)}: metadata {STATES_KEY!r}"
    root = parse_document(source.metadata[STATES_KEY], label, _MAX_DOCUMENT_BYTES)
    root.get("version").check_version(_STATES_VERSION)
    arrays = {array.name: array for array in source.arrays}
    states: list[OpaqueState] = []
    for node in root.get("states").read_list():
        name, dtype = node.get("name"), node.get("dtype")
        for text_node in (name, dtype):
            if not 0 < len(text_node.read_str()) <= MAX_STATE_NAME_CHARS:
                raise text_node.error(f"1 to {MAX_STATE_NAME_CHARS} characters")
        state = OpaqueState(
            layer=node.get("layer").read_int(0),
            name=name.read_str(),
            dtype=dtype.read_str(),
            shape=tuple(axis.read_int(0) for axis in node.get("shape").read_list(max_len=MAX_STATE_AXES)),
            nbytes=0,
            reader=bytes,
        )
        array = arrays.pop(make_state_array_name(state), None)
        if array is None or array.itemsize != 1:
            raise ManifestError(f"{label}: there is no array of bytes called {make_state_array_name(state)!r}")
        states.append(replace(state, nbytes=array.nbytes, reader=partial(_read_state_bytes, array)))
    return replace(source, arrays=list(arrays.values()), states=tuple(states))


def _read_state_bytes(array: LazyArray) -> bytes:
    return array.to_numpy().tobytes()
