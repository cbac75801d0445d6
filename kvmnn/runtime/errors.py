"""What a runtime raises when rows cannot be brought back."""

from __future__ import annotations

from ..errors import KvmnnError


class RestoreError(KvmnnError):
    """Stored rows that do not decode to what they were: the cache must not be read.

    Parameters
    ----------
    layer, start, count
        Which tokens of which layer.
    reason
        What is wrong with them.
    """

    def __init__(self, layer: int, start: int, count: int, reason: str) -> None:
        super().__init__(f"layer {layer}: tokens {start} to {start + count} cannot be restored: {reason}")
        self.layer, self.start, self.count = layer, start, count
