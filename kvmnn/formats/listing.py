"""Inspect what is not frames: the arrays that a file or directory holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays.named_array import ArrayInfo
from ..arrays.source import Source
from ..text import count


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
    """

    path: str
    arrays: tuple[ArrayInfo, ...]
    skipped: tuple[str, ...] = ()

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
        return {"input": self.path, "kind": "arrays", "arrays": arrays, "skipped": list(self.skipped)}

    def __str__(self) -> str:
        lines = [f"{self.path}: {count(len(self.arrays), 'array')} to encode"]
        lines += [
            f"  {array.name}: {array.dtype} {list(array.shape)} {array.order}, {array.nbytes:,} bytes"
            for array in self.arrays
        ]
        lines += [f"  not: {line}" for line in self.skipped]
        return "\n".join(lines)


def inspect(source: Source) -> ArraysInfo:
    """List the arrays of a source; none is read."""
    return ArraysInfo(path=" ".join(source.inputs), arrays=tuple(source.arrays), skipped=tuple(source.skipped))
