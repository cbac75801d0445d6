"""Inspect inputs other than frames: the arrays in a file or directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal

from .._util.dataclass import dataclass
from .._util.text import pluralize
from ..arrays.array import ArrayInfo
from ..arrays.completeness import Completeness
from ..arrays.engine_cache import EngineCacheInfo
from ..arrays.positions import describe_layer_states, position_runs_by_layer
from ..arrays.source import Source
from ..errors import KvmnnError
from ..files.schema import Record
from ..packed.cache_info import PositionRuns
from .sidecars import read_positions_by_layer

MAX_LISTED_ARRAYS = 1000
"""Number of arrays, and of skipped ones, that the command shows by default."""


def _build_array_documents(arrays: Sequence[ArrayInfo]) -> list[dict[str, Any]]:
    return [
        {
            "name": array.name,
            "dtype": array.dtype,
            "shape": list(array.shape),
            "array_dtype": array.array_dtype,
            "order": array.order,
            "raw_bytes": array.nbytes,
        }
        for array in arrays
    ]


@dataclass(frozen=True, kw_only=True)
class ArraysInfo(Record):
    """The arrays of an input."""

    #: The path that was opened.
    path: str = field(metadata={"key": "input"})
    kind: Literal["arrays"] = field(default="arrays", init=False)
    #: Arrays that frames can store.
    arrays: Sequence[ArrayInfo] = field(metadata={"convert": _build_array_documents})
    #: Numbers of arrays and skipped ones that `truncate` removed.
    arrays_left_out: int = 0
    #: One line for each other array.
    skipped: Sequence[str] = ()
    skipped_left_out: int = 0
    #: Description of another engine's cache, if the input is one.
    engine_cache: EngineCacheInfo | None = field(default=None, metadata={"omit": True})
    #: How much of the model's state the arrays contain; None if unknown.
    completeness: Completeness | None = field(default=None, metadata={"omit": True})
    #: One line for each inferred property.
    notes: Sequence[str] = ()
    #: Known positions of each layer as ``(begin, size)`` runs.
    positions: Mapping[int, PositionRuns] = field(default_factory=dict, metadata={"json": False})

    def truncate(self, max_listed: int = MAX_LISTED_ARRAYS) -> ArraysInfo:
        """Return only the first arrays and the first skipped ones: a file may have a million."""
        return replace(
            self,
            arrays=self.arrays[:max_listed],
            skipped=self.skipped[:max_listed],
            arrays_left_out=self.arrays_left_out + max(0, len(self.arrays) - max_listed),
            skipped_left_out=self.skipped_left_out + max(0, len(self.skipped) - max_listed),
        )

    def __str__(self) -> str:
        lines = [f"{self.path}: {pluralize(len(self.arrays) + self.arrays_left_out, 'array')} to encode"]
        lines += [f"  {self.engine_cache}"] if self.engine_cache else []
        lines += [f"  {line}" for line in describe_layer_states(self.completeness, self.positions)]
        lines += [
            f"  {array.name}: {array.type_name} {list(array.shape)} {array.order}, {array.nbytes:,} bytes"
            for array in self.arrays
        ]
        lines += _format_omitted(self.arrays_left_out)
        lines += [f"  not: {line}" for line in self.skipped]
        lines += _format_omitted(self.skipped_left_out)
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _format_omitted(num_omitted: int) -> list[str]:
    return [f"  and {num_omitted:,} more: -v lists all"] if num_omitted else []


def inspect(source: Source) -> ArraysInfo:
    """List the arrays of a source without reading them."""
    return ArraysInfo(
        path=" ".join(source.inputs),
        arrays=source.arrays,
        skipped=source.skipped_arrays,
        engine_cache=source.engine_cache,
        notes=tuple(source.notes),
        completeness=source.completeness,
        positions=_find_position_runs(source),
    )


def _find_position_runs(source: Source) -> dict[int, PositionRuns]:
    """Return the positions of each layer that are known; a damaged document of positions is ignored here."""
    try:
        return position_runs_by_layer(read_positions_by_layer(source))
    except KvmnnError:
        return {}
