"""Table sets: what short blocks share so that none of them has tables of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..dtypes import Words
from ..errors import FrameError, KvmnnError
from ..frames.words import raw_bytes_of
from . import _stream
from .header import DTYPES
from .rotary import Rotary
from .taking import Given
from .trial import Auto, Trial

_MAGIC, _VERSION = b"KVMT", 1


class Tables:
    """A table set (docs/format-v2.md): one for K and one for V of a layer, for blocks of up to some 256 tokens.

    Parameters
    ----------
    data
        The bytes of a set, as `made_of` gives them in `data`.

    Raises
    ------
    FrameError
        For what is no table set.
    """

    def __init__(self, data: Any) -> None:
        found = raw_bytes_of(data, "data")
        if found[:4].tobytes() != _MAGIC or found.size < 5:
            raise FrameError(
                f"no table set: expected {_MAGIC.hex(' ')}, found {found[:4].tobytes().hex(' ') or 'nothing'}"
            )
        if found[4] != _VERSION:
            raise FrameError(f"table set has version {found[4]}: expected {_VERSION}")
        self.data = found.tobytes()
        """All of it: keep it with the streams that were made with it."""
        self.held = _stream.TableSet(found)

    @classmethod
    def made_of(
        cls,
        arrays: Iterable[Words],
        *,
        dtype: str | None = None,
        rotary: Rotary | Auto | None = None,
        positions: Any = None,
    ) -> Tables:
        """Tables for arrays like these: K, or V, of the same layer of the same model.

        Parameters
        ----------
        arrays
            One or more ``[kv_head, token, head_dim]``, a few hundred tokens or more in all.
        dtype, rotary
            As for `encode`, ``"auto"`` by the first array; the set keeps `rotary`, so that `encode` need not be told
            again.
        positions
            With `rotary`: for each array the positions of its tokens, or None for 0, 1, 2 ...

        Raises
        ------
        KvmnnError, TypeError
            As `encode`, and for no array at all.
        """
        found = list(arrays)
        if not found:
            raise KvmnnError("no arrays: tables are made of at least one")
        places = [None] * len(found) if positions is None else list(positions)
        if len(places) != len(found):
            raise KvmnnError(f"positions of {len(places)} arrays: expected {len(found)}")
        first = Trial().rotary(rotary, found[0], places[0], dtype)
        given = [Given(array, dtype, first, at, None, None) for array, at in zip(found, places, strict=True)]
        if len({one.dtype for one in given}) > 1:
            raise KvmnnError("arrays of several dtypes: a table set is for one")
        base = max(one.rows.base for one in given)
        counts = _stream.Counts()
        for one in given:
            counts.add(one.rows, base)
        return cls(counts.table_set(given[0].rows, base))

    @property
    def id(self) -> int:
        """What a stream calls the set by; `DenseInfo.table_set` of it."""
        return self.held.id

    @property
    def dtype(self) -> str:
        """Name of the element type it is for."""
        return DTYPES[self.held.dtype].name

    @property
    def rotary_dims(self) -> int:
        """Words of a head that its arrays have rotated, 0 for none."""
        return self.held.rotary[0] if self.held.rotary else 0

    def __repr__(self) -> str:
        rotated = f", {self.rotary_dims} words of a head rotated" if self.rotary_dims else ""
        return f"Tables({self.id:016x}: {self.dtype}{rotated}, {len(self.data)} bytes)"


def held_tables(tables: Any) -> _stream.TableSet | None:
    """What the compiled code takes for `tables`; `TypeError` for anything but a `Tables` or None."""
    if tables is None:
        return None
    if not isinstance(tables, Tables):
        raise TypeError(f"tables must be a kvmnn.dense.Tables, not {type(tables).__name__}")
    return tables.held


def rotation_of(held: _stream.TableSet) -> _stream.Rotation | None:
    """The rotary parameters of a set, as the compiled code takes them."""
    found = held.rotary
    return found and (found[0], found[1], np.array(found[2], np.uint64))
