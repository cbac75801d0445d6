"""Stored rows brought back: from the cache, from a thread that decoded ahead, or decoded now."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ...dtypes import Words
from ...errors import KvmnnError
from .codec import Frames, RowCodec
from .decoded_rows import DecodedRows
from .figures import LayerFigures
from .piece import Piece
from .workers import Workers

PIECES_TOGETHER = 8
"""Decoded ahead by one job: handing over a job costs as much as decoding a small piece."""


@dataclass(frozen=True, eq=False)
class Restore:
    """The rows of a stored piece of a layer, wanted at a place."""

    layer: int
    piece: Piece
    out: Words
    figures: LayerFigures


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
        self._coming: dict[int, tuple[Piece, Future[dict[int, Words]]]] = {}

    def rows(self, piece: Piece, figures: LayerFigures) -> Words:
        """The rows of a stored piece; whatever a decoder raises for frames that do not give them back."""
        cached = self.cache.find(piece)
        if cached is not None:
            return cached
        began = time.perf_counter_ns()
        rows = self._prefetched(piece, figures)
        if rows is None:
            rows = self.codec.decoded(_frames(piece), piece.count)
        self.cache.insert(piece, rows)
        self._count(time.perf_counter_ns() - began, rows.nbytes, figures)
        return rows

    def write(self, piece: Piece, out: Words, figures: LayerFigures) -> None:
        """Write the rows of a stored piece to `out`; errors as `rows`. Nothing is kept that would only be copied."""
        if self.cache.has(piece) or id(piece) in self._coming or self.cache.has_room(out.nbytes):
            out[...] = self.rows(piece, figures)
            return
        self.cache.misses += 1
        began = time.perf_counter_ns()
        self.codec.decode(_frames(piece), out)
        self._count(time.perf_counter_ns() - began, out.nbytes, figures)

    def write_together(self, restores: Sequence[Restore]) -> list[Restore]:
        """Write rows to their places, this call and the threads side by side; returns those left for `write`.

        These are pieces that are in the cache, or should be, or come already, and those that failed.
        """
        left: list[Restore] = []
        direct: deque[Restore] = deque()
        for one in restores:
            known = self.cache.has(one.piece) or id(one.piece) in self._coming or self.cache.has_room(one.out.nbytes)
            (left if known or not self._workers.threads else direct).append(one)
        taken = list(direct)
        helpers = [self._workers.submit(partial(self._taken_from, direct)) for _ in range(self._workers.threads)]
        done = self._taken_from(direct)
        for helper in helpers:
            if not helper.cancel() and helper.exception() is None:
                done |= helper.result()
        for one in taken:
            if id(one) in done:
                self.cache.misses += 1
                self._count(done[id(one)], one.out.nbytes, one.figures)
            else:
                left.append(one)
        return left

    def _taken_from(self, wanted: deque[Restore]) -> dict[int, int]:
        """Nanoseconds of each that was written; one that fails is left out."""
        done = {}
        while wanted:
            try:
                one = wanted.popleft()
            except IndexError:  # another thread took the last one
                break
            began = time.perf_counter_ns()
            with suppress(Exception):
                self.codec.decode(_frames(one.piece), one.out)
                done[id(one)] = time.perf_counter_ns() - began
        return done

    def prefetch(self, pieces: Iterable[Piece]) -> None:
        """Let threads decode pieces that will be needed soon, as far as the bound on bytes goes."""
        if not self._workers.threads:
            return
        self._coming = {key: entry for key, entry in self._coming.items() if entry[0].alive}
        room = self._max_bytes - sum(piece.count for piece, _ in self._coming.values()) * self._token_bytes
        wanted = []
        for piece in pieces:
            if piece.frames is None or piece.rows is not None or id(piece) in self._coming or self.cache.has(piece):
                continue
            room -= piece.count * self._token_bytes
            if room < 0:
                break
            wanted.append(piece)
        for begin in range(0, len(wanted), PIECES_TOGETHER):
            together = wanted[begin : begin + PIECES_TOGETHER]
            future = self._workers.submit(partial(self._decoded, [(piece, _frames(piece)) for piece in together]))
            self._coming |= {id(piece): (piece, future) for piece in together}

    def reset(self) -> None:
        """Drop everything that was decoded, and all counts."""
        self.ahead = self.late = self.cache.hits = self.cache.misses = 0
        for _, future in self._coming.values():
            future.cancel()
        self._coming.clear()
        self.cache.sweep()

    def _decoded(self, pieces: Sequence[tuple[Piece, Frames]]) -> dict[int, Words]:
        return {id(piece): self.codec.decoded(frames, piece.count) for piece, frames in pieces}

    def _prefetched(self, piece: Piece, figures: LayerFigures) -> Words | None:
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
            figures.timings.wait.add(time.perf_counter_ns() - began)
        return None if future.exception() is not None else future.result()[id(piece)]

    @staticmethod
    def _count(nanoseconds: int, nbytes: int, figures: LayerFigures) -> None:
        figures.timings.decompress.add(nanoseconds)
        figures.decompressed_bytes += nbytes


def _frames(piece: Piece) -> Frames:
    if piece.frames is None:
        raise KvmnnError("it has neither rows nor frames")
    return piece.frames


def reason_of(error: Exception) -> str:
    """What went wrong, in a word for errors that have no message of kvmnn's."""
    return str(error) if isinstance(error, KvmnnError) else f"{type(error).__name__}: {error}"
