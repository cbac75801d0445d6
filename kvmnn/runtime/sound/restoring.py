"""Stored rows brought back: from the cache, from a thread that decoded ahead, or decoded now."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

from ...dtypes import Words
from ...errors import KvmnnError
from ..errors import RestoreError
from ..metrics import Timings
from .codec import RowCodec
from .decoded_rows import DecodedRows
from .figures import LayerFigures
from .piece import Piece
from .workers import Workers


class Restorer:
    """Decodes pieces, once each as long as the cache has room.

    Attributes
    ----------
    ahead, late
        Restores that a thread had finished before they were needed, and those that had to be waited for.
    """

    def __init__(self, codec: RowCodec, cache: DecodedRows, workers: Workers, max_bytes: int, token_bytes: int) -> None:
        self.codec = codec
        self.cache = cache
        self.ahead = self.late = 0
        self._workers = workers
        self._max_bytes, self._token_bytes = max_bytes, token_bytes
        self._coming: dict[int, tuple[Piece, Future[Words]]] = {}

    def rows(self, layer: int, start: int, piece: Piece, figures: LayerFigures, timings: Timings) -> Words:
        """The rows of a piece that begins at token `start`.

        Raises
        ------
        RestoreError
            For frames that do not give the rows back. Nothing has changed then.
        """
        if piece.rows is not None:
            return piece.rows
        cached = self.cache.find(piece)
        if cached is not None:
            return cached
        began = time.perf_counter_ns()
        rows = self._prefetched(piece, timings)
        if rows is None:
            rows = self._decoded(layer, start, piece)
        self.cache.insert(piece, rows)
        elapsed = time.perf_counter_ns() - began
        timings.decompress.add(elapsed)
        figures.decompress_ns += elapsed
        figures.decompressed_bytes += rows.nbytes
        return rows

    def prefetch(self, pieces: Iterable[Piece]) -> None:
        """Let threads decode pieces that will be needed soon, as far as the bound on bytes goes."""
        if not self._workers.threads:
            return
        self._coming = {key: entry for key, entry in self._coming.items() if entry[0].alive}
        room = self._max_bytes - sum(piece.count for piece, _ in self._coming.values()) * self._token_bytes
        for piece in pieces:
            frames, size = piece.frames, piece.count * self._token_bytes
            if frames is None or piece.rows is not None or id(piece) in self._coming or self.cache.has(piece):
                continue
            room -= size
            if room < 0:
                return
            future = self._workers.submit(partial(self.codec.decode, frames, piece.count))
            self._coming[id(piece)] = piece, future

    def reset(self) -> None:
        """Drop everything that was decoded, and all counts."""
        self.ahead = self.late = self.cache.hits = self.cache.misses = 0
        for _, future in self._coming.values():
            future.cancel()
        self._coming.clear()
        self.cache.sweep()

    def _prefetched(self, piece: Piece, timings: Timings) -> Words | None:
        """What a thread decoded; None where it has not begun, or failed (it is then tried again here)."""
        entry = self._coming.pop(id(piece), None)
        if entry is None or entry[1].cancel():
            return None
        future = entry[1]
        if future.done():
            self.ahead += 1
        else:
            self.late += 1
            began = time.perf_counter_ns()
            future.exception()
            timings.wait.add(time.perf_counter_ns() - began)
        return None if future.exception() is not None else future.result()

    def _decoded(self, layer: int, start: int, piece: Piece) -> Words:
        if piece.frames is None:
            raise RestoreError(layer, start, piece.count, "it has neither rows nor frames")
        try:
            return self.codec.decode(piece.frames, piece.count)
        except KvmnnError as error:
            raise RestoreError(layer, start, piece.count, str(error)) from error
        except Exception as error:
            raise RestoreError(layer, start, piece.count, f"{type(error).__name__}: {error}") from error
