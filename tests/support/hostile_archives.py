"""Zip archives made byte by byte, which may say one thing in one place and another in the next."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

STORED, DEFLATED = 0, 8


@dataclass
class Entry:
    """A member, and what its two headers say that is not so (names of the fields below)."""

    name: bytes
    data: bytes
    method: int = STORED
    local: dict[str, object] = field(default_factory=dict)
    central: dict[str, object] = field(default_factory=dict)
    at: int | None = None
    """Where its local header is said to be."""

    @property
    def packed(self) -> bytes:
        if self.method == STORED:
            return self.data
        engine = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
        return engine.compress(self.data) + engine.flush()

    def says(self, lies: dict[str, object]) -> dict[str, object]:
        packed = self.packed
        truth = {"name": self.name, "flags": 0, "method": self.method, "crc": zlib.crc32(self.data), "disk": 0}
        return {**truth, "packed": len(packed), "size": len(self.data), "extra": b"", **lies}


def archive(*entries: Entry, end: dict[str, int] | None = None, behind: bytes = b"", before: bytes = b"") -> bytes:
    """The archive; `end` replaces fields of the record at its end."""
    body, directory = before, b""
    for entry in entries:
        offset = len(body) if entry.at is None else entry.at
        if entry.at is None:
            says = entry.says(entry.local)
            body += struct.pack(
                "<4s5H3L2H", b"PK\3\4", 20, says["flags"], says["method"], 0, 33, says["crc"], says["packed"],
                says["size"], len(says["name"]), len(says["extra"]),  # type: ignore[arg-type]
            )  # fmt: skip
            body += says["name"] + says["extra"] + entry.packed  # type: ignore[operator]
        says = entry.says(entry.central)
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 20, 20, says["flags"], says["method"], 0, 33, says["crc"], says["packed"],
            says["size"], len(says["name"]), 0, 0, says["disk"], 0, 0, offset,  # type: ignore[arg-type]
        ) + says["name"]  # type: ignore[operator]  # fmt: skip
    record = {"disk": 0, "first": 0, "here": len(entries), "count": len(entries), "bytes": len(directory)}
    record |= {"begin": len(body), "comment": 0, **(end or {})}
    return body + directory + struct.pack("<4s4H2LH", b"PK\5\6", *record.values()) + behind
