"""What quantised inputs take as they are, beside the words that are made of their codes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..arrays.source import Source


@dataclass
class CodedInputInfo:
    """Inputs that hold codes, of which words were made before anything was measured.

    Attributes
    ----------
    types
        Names of the types of the codes; empty where all words are the inputs' own.
    nbytes
        Bytes of the files that hold codes; None where an input is no file (standard input, a URL).
    room_bytes
        Bytes of these that are room behind the valid tokens.
    """

    types: tuple[str, ...] = ()
    nbytes: int | None = 0
    room_bytes: int = 0

    def add_source(self, source: Source) -> None:
        """Count a source in, if its words are made of codes."""
        if source.dequantised_types:
            self.types = tuple(dict.fromkeys((*self.types, *source.dequantised_types)))
            nbytes = count_input_bytes(source)
            self.nbytes = None if nbytes is None or self.nbytes is None else self.nbytes + nbytes
            self.room_bytes += source.engine_cache.unused_bytes if source.engine_cache is not None else 0

    def describe(self, element_bytes: int, coded_bytes: int, label: str) -> list[str]:
        """Say of what the words were made, and how the `coded_bytes` of `label` compare with the input; or nothing."""
        if not self.types:
            return []
        line = f"words dequantised from {', '.join(self.types)}"
        if self.nbytes:
            room = min(self.room_bytes, self.nbytes - 1)
            input_text = "the input without room" if room else "the input"
            line += f": the input has {self.nbytes:,} bytes" + (f", {room:,} of them room" if room else "")
            line += (
                f", its words {element_bytes:,}; {label} is {coded_bytes / (self.nbytes - room):.2f} times {input_text}"
            )
        return [line]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``: nothing where all words are the inputs' own."""
        if not self.types:
            return {}
        room = {"room_bytes": self.room_bytes} if self.room_bytes else {}
        return {"dequantised": {"types": list(self.types), "input_bytes": self.nbytes, **room}}


def count_input_bytes(source: Source) -> int | None:
    """Return the bytes of the files that a source was read from; None where one of its inputs is no file."""
    if not source.inputs or not all(map(os.path.exists, source.inputs)):
        return None
    files = {os.path.realpath(path) for path in source.files if os.path.isfile(path)}
    return sum(map(os.path.getsize, files)) or None
