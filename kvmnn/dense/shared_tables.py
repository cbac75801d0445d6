"""Entropy tables that many short streams share, so that none of them has to contain its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..dtypes import Elements
from ..errors import FrameError, KvmnnError
from ..frames.buffers import as_raw_bytes
from . import _stream
from .header import DTYPES
from .inputs import EncoderInput
from .rope import RopeConfig
from .rope_search import AutoRope, RopeSearch

_MAGIC, _VERSION = b"KVMT", 1


class SharedTables:
    """A table set (docs/format-v2.md): one for K and one for V of a layer, for blocks of up to about 256 tokens.

    Parameters
    ----------
    data
        The bytes of a set, as in the attribute `data`.

    Raises
    ------
    FrameError
        If the bytes are not a table set.
    """

    def __init__(self, data: Any) -> None:
        raw = as_raw_bytes(data, "data")
        if raw[:4].tobytes() != _MAGIC or raw.size < 5:
            raise FrameError(
                f"no table set: expected {_MAGIC.hex(' ')}, found {raw[:4].tobytes().hex(' ') or 'nothing'}"
            )
        if raw[4] != _VERSION:
            raise FrameError(f"table set has version {raw[4]}: expected {_VERSION}")
        self.data = raw.tobytes()
        """The bytes of the set: store them with the streams that refer to it."""
        self.table_set = _stream.TableSet(raw)

    @classmethod
    def from_arrays(
        cls,
        arrays: Iterable[Elements],
        *,
        dtype: str | None = None,
        rotary: RopeConfig | AutoRope | None = None,
        positions: Any = None,
    ) -> SharedTables:
        """Build the tables for arrays like these: K, or V, of the same layer of the same model.

        Parameters
        ----------
        arrays
            One or more ``[kv_head, token, head_dim]``, a few hundred tokens or more in all.
        dtype, rotary
            As for `encode`; ``"auto"`` searches the first array. The set contains `rotary`, so `encode` does not need
            it again.
        positions
            With `rotary`: the positions of the tokens of each array, or None for 0, 1, 2 ...

        Raises
        ------
        KvmnnError, TypeError
            As `encode`, and if there is no array.
        """
        array_list = list(arrays)
        if not array_list:
            raise KvmnnError("no arrays: tables are made of at least one")
        position_lists = [None] * len(array_list) if positions is None else list(positions)
        if len(position_lists) != len(array_list):
            raise KvmnnError(f"positions of {len(position_lists)} arrays: expected {len(array_list)}")
        rotary_config = RopeSearch().resolve(rotary, array_list[0], position_lists[0], dtype)
        inputs = [
            EncoderInput(array, dtype, rotary_config, token_positions, None, None)
            for array, token_positions in zip(array_list, position_lists, strict=True)
        ]
        if len({encoder_input.dtype for encoder_input in inputs}) > 1:
            raise KvmnnError("arrays of several dtypes: a table set is for one")
        table_base = max(encoder_input.compiled_input.base for encoder_input in inputs)
        counts = _stream.SymbolCounts()
        for encoder_input in inputs:
            counts.add(encoder_input.compiled_input, table_base)
        return cls(counts.table_set(inputs[0].compiled_input, table_base))

    @property
    def id(self) -> int:
        """Return the id of the set in streams, and in `DenseInfo.table_set`."""
        return self.table_set.id

    @property
    def dtype(self) -> str:
        """Return the name of the element type that the tables are for."""
        return DTYPES[self.table_set.dtype].name

    @property
    def rotary_dims(self) -> int:
        """Return the rotated elements of each head; 0 if K is not rotated."""
        return self.table_set.rotary[0] if self.table_set.rotary else 0

    def __repr__(self) -> str:
        rotation_text = f", {self.rotary_dims} words of a head rotated" if self.rotary_dims else ""
        return f"SharedTables({self.id:016x}: {self.dtype}{rotation_text}, {len(self.data)} bytes)"


def to_table_set(tables: Any) -> _stream.TableSet | None:
    """Return the compiled form of `tables`; `TypeError` for anything but a `SharedTables` or None."""
    if tables is None:
        return None
    if not isinstance(tables, SharedTables):
        raise TypeError(f"tables must be a kvmnn.dense.SharedTables, not {type(tables).__name__}")
    return tables.table_set


def get_rotation(table_set: _stream.TableSet) -> _stream.Rotation | None:
    """Return the RoPE parameters of a set, as the compiled code expects them."""
    rotary = table_set.rotary
    return rotary and (rotary[0], rotary[1], np.array(rotary[2], np.uint64))
