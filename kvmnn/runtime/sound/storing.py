"""The way of cold rows to frames: what is due, who encodes it, what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..config import RuntimeConfig
from ..latencies import Latencies
from ..schedule import Scope
from .codec import RowCodec
from .encoding import Encoded, Job, encode_and_verify, result_of, settle
from .layer import Layer
from .workers import OpenJobs, Workers

MAX_PATIENCE_STEPS = 64
"""Steps that a layer whose plan is about to be carried out waits for; one that plans at every step must not wait for
ever."""


class Storer:
    """Hands in the blocks of all layers that became cold, and takes in those that are done.

    Attributes
    ----------
    jobs
        Encodings that are open.
    taken
        Encodings that were taken in since the request began.
    waiting_peak
        Most blocks that were due and had no place in the queue at one time.
    last_compress_ns
        How long the last encoding took.
    """

    def __init__(
        self, config: RuntimeConfig, codec: RowCodec, workers: Workers, layers: Sequence[Layer], waits: Latencies
    ) -> None:
        self.jobs: OpenJobs[Job] = OpenJobs(workers, config.max_queue, config.max_bytes_in_flight)
        self.taken = self.waiting_peak = self.last_compress_ns = 0
        self._config, self._codec, self._workers, self._waits = config, codec, workers, waits
        self._layers = layers
        self._scope = Scope(config)
        self._trigger, self._interval = config.h2o.trigger_tokens, config.h2o.interval
        self._generation = 0

    def reset(self) -> None:
        """Forget what is open: results of an earlier request are not looked at."""
        self._generation += 1
        self.jobs.forget()
        self.jobs.peak = self.jobs.async_peak = 0
        self.taken = self.waiting_peak = self.last_compress_ns = 0

    def schedule(self, number: int, step: int, *, planned: bool) -> int:
        """Hand in what is cold in a layer that may be about to evict; returns how many blocks."""
        layer = self._layers[number]
        if not layer.triggered:
            if layer.rows.tokens < self._trigger:
                return 0
            layer.triggered = True
        if planned and step - (layer.last_step or 0) < MAX_PATIENCE_STEPS:
            return 0  # blocks made now would be cut
        if not layer.applies(step):
            return 0
        if layer.last_step is None or step - layer.last_step >= self._interval:
            layer.take_due()
            layer.last_step = step
        return self._submit(number) if layer.waiting else 0

    def flush(self) -> None:
        """Encode everything that is cold in the layers of the scope, and wait for it."""
        for number, layer in enumerate(self._layers):
            if not layer.applies(1):
                continue
            layer.take_due()
            while layer.next_due() is not None:
                self._submit(number)
                self.take_finished(wait=True)
        self.take_finished(wait=True)

    def take_finished(self, *, wait: bool = False) -> None:
        """Take in the encodings that are done."""
        if not self.jobs.open:
            return
        if wait:
            with self._waits.measured():
                done = self.jobs.finished(wait=True)
        else:
            done = self.jobs.finished()
        for job, future in done:
            if job.generation == self._generation and job.piece.alive:
                self._apply(job, result_of(future))
        self.taken += len(done)

    def _submit(self, number: int) -> int:
        layer, submitted = self._layers[number], 0
        while (piece := layer.next_due()) is not None and piece.rows is not None:
            rows = piece.rows
            if not self.jobs.has_room(rows.nbytes):
                layer.figures.skips += 1
                self.waiting_peak = max(self.waiting_peak, sum(len(each.waiting) for each in self._layers))
                break
            job = Job(number, piece, self._generation)
            self.jobs.submit(job, rows.nbytes, partial(encode_and_verify, self._codec, rows))
            layer.waiting.popleft()
            piece.state = "queued"
            submitted += 1
            if not self._workers.threads:
                self.take_finished()
        return submitted

    def _apply(self, job: Job, result: Encoded | None) -> None:
        layer, piece = self._layers[job.layer], job.piece
        figures, raw = layer.figures, piece.held_bytes
        settle(piece, result, keeps_rows=self._config.mode != "store")
        figures.fallbacks += result is None
        if result is None:
            if piece.state == "due":
                layer.waiting.append(piece)
            return
        figures.timings.compress.add(result.compress_ns)
        figures.timings.verify.add(result.verify_ns)
        self.last_compress_ns = result.compress_ns
        figures.updates += 1
        figures.raw_bytes += raw
        figures.compressed_bytes += result.frames.nbytes if result.frames is not None else raw
