"""A run of neighbouring tokens of one layer, raw or as frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...dtypes import Elements
from .codec import KVFrames

SegmentState = Literal["raw", "due", "queued", "stored", "settled"]
"""Raw; cold and waiting for a place in the queue; in encoding; frames only; raw for good, as frames do not gain."""


@dataclass(eq=False)
class TokenSegment:
    """Tokens that are kept, dropped, encoded and restored together.

    Attributes
    ----------
    count
        Tokens.
    rows
        ``[2, kv_head, token, head_dim]``, never written to; None where only `frames` are there.
    attempts
        Encodings that failed.
    is_alive
        Whether the piece still stands for tokens of its layer.
    """

    count: int
    rows: Elements | None
    state: SegmentState = "raw"
    frames: KVFrames | None = None
    attempts: int = 0
    is_alive: bool = True

    @property
    def resident_bytes(self) -> int:
        """Bytes of the rows or of the frames, whichever is there."""
        if self.rows is not None:
            return self.rows.nbytes
        return self.frames.nbytes if self.frames is not None else 0

    @property
    def owns_rows(self) -> bool:
        """Whether the rows are no part of a larger array, which they would keep alive."""
        return self.rows is None or self.rows.base is None or self.rows.flags.c_contiguous

    def own_rows(self) -> None:
        """Copy rows that are a view."""
        if self.rows is not None and not self.owns_rows:
            self.rows = self.rows.copy()
