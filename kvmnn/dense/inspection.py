"""What a dense stream says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .decoding import open_rows
from .header import METHOD_NAMES, ROTARY, ROWS, SIZE, read_header


@dataclass(frozen=True)
class DenseInfo:
    """A dense stream, every byte accounted for by `sections`; nothing is decoded for it."""

    dtype: str
    kv_heads: int
    tokens: int
    head_dim: int
    method: str
    """``rows``, or ``frame`` or ``words`` where that was smaller."""
    rotary: bool
    history: int
    """Rows before it that it refers to."""
    table_set: int | None
    """Id of the tables it needs, if not its own."""
    raw_bytes: int
    stream_bytes: int
    sections: dict[str, int]
    """Bytes of each."""

    @property
    def ratio(self) -> float:
        """Raw bytes over bytes of the stream."""
        return self.raw_bytes / self.stream_bytes

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**vars(self), "ratio": self.ratio}

    def __str__(self) -> str:
        extras = ["rotary"] * self.rotary + [f"history of {self.history} rows"] * bool(self.history)
        if self.table_set is not None:
            extras.append(f"table set {self.table_set:016x}")
        lines = [
            f"{self.dtype} dense stream [{self.kv_heads}, {self.tokens}, {self.head_dim}]: {self.raw_bytes} -> "
            f"{self.stream_bytes} bytes, ratio {self.ratio:.4f}",
            f"method {self.method}" + "".join(f", {extra}" for extra in extras),
        ]
        lines += [f"{name:>12} {size:>12}" for name, size in self.sections.items()]
        return "\n".join(lines)


def inspect(stream: Any) -> DenseInfo:
    """Account for every byte of a dense stream; its header and lengths are checked, its words are not decoded.

    Raises
    ------
    FrameError
        For what is no dense stream, cut, or inconsistent in its lengths.
    """
    header = read_header(stream)
    sections = {"header": SIZE}
    history, table_set = 0, None
    if header.method == ROWS:
        parsed = open_rows(header)
        history, table_set = parsed.history, parsed.table_set
        sections |= parsed.sections()
    else:
        sections["payload"] = header.payload.size
    return DenseInfo(
        dtype=header.dtype.name,
        kv_heads=header.heads,
        tokens=header.tokens,
        head_dim=header.dim,
        method=METHOD_NAMES[header.method],
        rotary=bool(header.flags & ROTARY),
        history=history,
        table_set=table_set,
        raw_bytes=header.raw_bytes,
        stream_bytes=header.stream.size,
        sections=sections,
    )
