"""Inspect a dense stream without decoding it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._util.dataclass import dataclass
from ..dtypes import Bytes
from ..files.schema import Record, json_key
from .decoder import open_rows
from .header import FLAG_ROTARY, FLAG_TABLES, HEADER_BYTES, METHOD_NAMES, METHOD_ROWS, read_header
from .rope import PAIRINGS, describe_frequencies


@dataclass(frozen=True)
class DenseInfo(Record):
    """A dense stream; the sizes in `sections` sum to its bytes."""

    dtype: str
    kv_heads: int
    tokens: int
    head_dim: int
    method: str
    """``rows``, or ``frame`` or ``words`` if that was smaller."""
    rotary: bool
    rope: str | None
    """The RoPE parameters that the stream states, in the form of `--rope`; None if its table set states them."""
    history: int
    """Preceding rows that the stream requires."""
    table_set: int | None
    """Id of the shared tables that the stream requires; None if it contains its own."""
    raw_bytes: int
    stream_bytes: int
    sections: dict[str, int]
    """Bytes of each section by its name."""

    @property
    @json_key()
    def ratio(self) -> float:
        """Return raw bytes divided by the bytes of the stream."""
        return self.raw_bytes / self.stream_bytes

    def __str__(self) -> str:
        extras = [f"rotary {self.rope}" if self.rope else "rotary"] * self.rotary
        extras += [f"history of {self.history} rows"] * bool(self.history)
        if self.table_set is not None:
            extras.append(f"table set {self.table_set:016x}")
        lines = [
            f"{self.dtype} dense stream [{self.kv_heads}, {self.tokens}, {self.head_dim}]: {self.raw_bytes:,} -> "
            f"{self.stream_bytes:,} bytes, ratio {self.ratio:.4f}",
            f"method {self.method}" + "".join(f", {extra}" for extra in extras),
        ]
        lines += [f"{name:>12} {size:>12,} bytes" for name, size in self.sections.items()]
        return "\n".join(lines)


def inspect(stream: Any) -> DenseInfo:
    """Account for every byte of a dense stream; validates its header and lengths, and decodes nothing.

    Raises
    ------
    FrameError
        If the bytes are not a dense stream, are truncated, or contain inconsistent lengths.
    """
    header = read_header(stream)
    sections = {"header": HEADER_BYTES}
    history, table_set, rope = 0, None, None
    if header.method == METHOD_ROWS:
        rows_payload = open_rows(header)
        history, table_set = rows_payload.history, rows_payload.table_set
        sections |= rows_payload.sections()
        if header.flags & FLAG_ROTARY and not header.flags & FLAG_TABLES:
            rope = _describe_rope(header.payload[sections["lengths"] :][: sections["head"]], header.dim)
    else:
        sections["payload"] = header.payload.size
    return DenseInfo(
        dtype=header.dtype.name,
        kv_heads=header.heads,
        tokens=header.tokens,
        head_dim=header.dim,
        method=METHOD_NAMES[header.method],
        rotary=bool(header.flags & FLAG_ROTARY),
        rope=rope,
        history=history,
        table_set=table_set,
        raw_bytes=header.raw_bytes,
        stream_bytes=header.stream.size,
        sections=sections,
    )


def _describe_rope(head: Bytes, dim: int) -> str | None:
    """Return the RoPE parameters at the start of a header section; None if they are invalid, which `decode` reports."""
    dims = int.from_bytes(head[:2].tobytes(), "little")
    bits = int.from_bytes(head[2 : 3 + 4 * dims].tobytes(), "little")
    if dims % 2 or not 2 <= dims <= dim or head.size < 3 + 4 * dims:
        return None
    frequencies = np.frombuffer((bits >> 1).to_bytes(4 * dims + 1, "little"), "<u8", dims // 2)
    return describe_frequencies(dims, PAIRINGS[bits & 1], tuple(frequencies.tolist()))
