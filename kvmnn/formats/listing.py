"""Inspect what is not frames: the arrays that a file or directory holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..arrays.completeness import Completeness, completeness_document
from ..arrays.engine_cache import EngineCache
from ..arrays.layer_states import list_states, runs_by_layer
from ..arrays.named_array import ArrayInfo
from ..arrays.source import Source
from ..errors import KvmnnError
from ..packed.cache_info import Ranges
from ..text import count
from .noted_positions import held_by

LISTED = 1000
"""Arrays, and lines about others, that the command shows unless it is told to show all."""


@dataclass(frozen=True, kw_only=True)
class ArraysInfo:
    """The arrays of an input.

    Parameters
    ----------
    path
        What was opened.
    arrays
        Those that frames can hold.
    skipped
        One line for each other one.
    arrays_left_out, skipped_left_out
        How many more there are of each (`first`).
    engine_cache
        What the cache of another engine says of itself, where it is one.
    notes
        One line for each thing that was inferred.
    completeness
        The state of the model that the arrays contain, where that is known.
    positions
        Runs of the positions that each layer has, ``(begin, size)``, where they are known.
    """

    path: str
    arrays: Sequence[ArrayInfo]
    skipped: Sequence[str] = ()
    arrays_left_out: int = 0
    skipped_left_out: int = 0
    engine_cache: EngineCache | None = None
    notes: Sequence[str] = ()
    completeness: Completeness | None = None
    positions: Mapping[int, Ranges] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        arrays = [
            {
                "name": array.name,
                "dtype": array.dtype,
                "shape": list(array.shape),
                "array_dtype": array.array_dtype,
                "order": array.order,
                "raw_bytes": array.nbytes,
            }
            for array in self.arrays
        ]
        return {
            "input": self.path,
            "kind": "arrays",
            "arrays": arrays,
            "arrays_left_out": self.arrays_left_out,
            "skipped": list(self.skipped),
            "skipped_left_out": self.skipped_left_out,
            **({"engine_cache": self.engine_cache.to_dict()} if self.engine_cache else {}),
            **completeness_document(self.completeness),
            "notes": list(self.notes),
        }

    def first(self, most: int = LISTED) -> ArraysInfo:
        """The first arrays and the first others: a file may have a million."""
        return replace(
            self,
            arrays=self.arrays[:most],
            skipped=self.skipped[:most],
            arrays_left_out=self.arrays_left_out + max(0, len(self.arrays) - most),
            skipped_left_out=self.skipped_left_out + max(0, len(self.skipped) - most),
        )

    def __str__(self) -> str:
        lines = [f"{self.path}: {count(len(self.arrays) + self.arrays_left_out, 'array')} to encode"]
        lines += [f"  {self.engine_cache}"] if self.engine_cache else []
        lines += [f"  {line}" for line in list_states(self.completeness, self.positions)]
        lines += [
            f"  {array.name}: {array.type_name} {list(array.shape)} {array.order}, {array.nbytes:,} bytes"
            for array in self.arrays
        ]
        lines += _more(self.arrays_left_out)
        lines += [f"  not: {line}" for line in self.skipped]
        lines += _more(self.skipped_left_out)
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _more(left: int) -> list[str]:
    return [f"  and {left:,} more: -v lists all"] if left else []


def inspect(source: Source) -> ArraysInfo:
    """List the arrays of a source; none is read."""
    return ArraysInfo(
        path=" ".join(source.inputs),
        arrays=source.arrays,
        skipped=source.skipped,
        engine_cache=source.engine_cache,
        notes=tuple(source.notes),
        completeness=source.completeness,
        positions=_positions(source),
    )


def _positions(source: Source) -> dict[int, Ranges]:
    """Return the positions of each layer that are known; a damaged document of them is another verb's error."""
    try:
        return runs_by_layer(held_by(source))
    except KvmnnError:
        return {}
