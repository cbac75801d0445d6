"""State of a layer that is not K and V, as bytes: of linear attention, convolutions, recurrent networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field, replace
from functools import partial

from .._util.dataclass import dataclass
from ..errors import SourceError
from .completeness import Completeness

MAX_STATE_AXES = 16
MAX_STATE_NAME_CHARS = 256  # also of its dtype


@dataclass(frozen=True, kw_only=True)
class OpaqueState:
    """One tensor of a layer's state, valid only at the exact length of the text that it was computed from."""

    #: Number of the layer in the model, from 0.
    layer: int
    #: Name in the engine, unique within the layer: ``"conv_states"``, ``"recurrent_states"``.
    name: str
    #: Element type under the engine's name, such as ``"bfloat16"``; ``"bytes"`` if unknown.
    dtype: str
    #: Axis lengths in the engine's order; for ``"bytes"`` their number.
    shape: tuple[int, ...]
    #: Bytes of all elements.
    nbytes: int
    #: Returns these bytes, in the order of the axes, little-endian.
    reader: Callable[[], bytes] = field(repr=False, compare=False)

    def read(self) -> bytes:
        """Return the bytes."""
        data = self.reader()
        if len(data) != self.nbytes:
            raise SourceError(
                f"layer {self.layer}: state {self.name!r} has {len(data):,} bytes where {self.nbytes:,} were announced"
            )
        return data


def make_state(layer: int, name: str, data: bytes, *, dtype: str = "bytes", shape: Iterable[int] = ()) -> OpaqueState:
    """Create a state from bytes in memory; without `shape` it has one axis of bytes."""
    axes = tuple(shape) if dtype != "bytes" else (len(data),)
    return OpaqueState(
        layer=layer, name=name, dtype=dtype, shape=axes, nbytes=len(data), reader=partial(_get_data, data)
    )


def include_states(completeness: Completeness, states: Iterable[OpaqueState]) -> Completeness:
    """Return the completeness with these states counted as included, for verbs that store them."""
    layers = {state.layer for state in states}
    layer_states = (
        replace(state_info, included=True)
        if state_info.layer in layers and state_info.kind in ("linear", "recurrent")
        else state_info
        for state_info in completeness.layers
    )
    return replace(completeness, layers=tuple(layer_states))


def _get_data(data: bytes) -> bytes:
    return data
