"""The measurement: selected dumps, put together and cut up, each byte lane's size, and the sums."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import SourceError
from ..threads.pipeline import Progress
from ..threads.pool import map_pulled, resolve_threads
from .memory_budget import Budget
from .options import LANES, MeasureOptions
from .selection import Selection
from .simulated_sizes import Meters, StreamSize, memory_needed, stream_size
from .stored_sizes import StoredSize, stored_size
from .units import PARTS, Unit, units_of

MEMORY = 320 << 20
"""Bytes of anonymous memory that streams which are measured at one time may take, unless one alone takes more."""

COMPRESSION_FAILED = "compression_failed"


@dataclass
class LaneTotal:
    """One byte lane of a layer, or of all layers: sums over its streams."""

    raw_bytes: int = 0
    simulated_bytes: int = 0
    limit_bytes: float = 0.0
    modes: Counter[str] = field(default_factory=Counter)

    def add(self, size: StreamSize) -> None:
        """Count one stream in."""
        self.raw_bytes += size.raw_bytes
        self.simulated_bytes += size.bytes
        self.limit_bytes += size.limit_bytes
        for name, count in size.modes.items():
            self.modes[name] += count


@dataclass
class Totals:
    """A layer, or all of them.

    Parameters
    ----------
    lanes
        By name: ``"k_hi"``, ``"k_lo"``, ``"v_hi"``, ``"v_lo"``.
    extra_bytes
        By part, ``"k"`` and ``"v"``: framing and tables, which belong to the simulated size.
    stored
        By part: frames that were made and decoded, where that was asked for.
    """

    lanes: dict[str, LaneTotal] = field(default_factory=lambda: {lane: LaneTotal() for lane in LANES})
    extra_bytes: Counter[str] = field(default_factory=Counter)
    stored: dict[str, StoredSize] = field(default_factory=dict)

    def raw_bytes(self, parts: Sequence[str] = PARTS) -> int:
        """fp16 bytes of what could be compressed."""
        return sum(self.lanes[f"{part}_{lane}"].raw_bytes for part in parts for lane in ("hi", "lo"))

    def simulated_bytes(self, parts: Sequence[str] = PARTS) -> int:
        """Bytes that the simulated format would take."""
        lanes = sum(self.lanes[f"{part}_{lane}"].simulated_bytes for part in parts for lane in ("hi", "lo"))
        return lanes + sum(self.extra_bytes[part] for part in parts)

    def limit_bytes(self, parts: Sequence[str] = PARTS) -> float:
        """What the order-0 entropy of the byte lanes amounts to."""
        return sum(self.lanes[f"{part}_{lane}"].limit_bytes for part in parts for lane in ("hi", "lo"))

    def stored_bytes(self, parts: Sequence[str] = PARTS) -> int:
        """Bytes of frames that were made and decoded."""
        return sum(self.stored[part].bytes for part in parts if part in self.stored)


@dataclass
class Measurement:
    """What came out.

    Parameters
    ----------
    inputs
        The directories or files, as absolute paths.
    options, selection
        What was asked for and what was found; `selection.skipped` includes what could not be compressed.
    groups, chunks
        Groups of dumps, where dumps are grouped; pieces of K and of V, where they are cut.
    totals, layers
        Everything, and by layer number.
    is_stored
        Whether frames were made too.
    """

    inputs: list[str]
    options: MeasureOptions
    selection: Selection
    groups: int
    chunks: int
    totals: Totals
    layers: dict[int, Totals]
    is_stored: bool


class _Job(NamedTuple):
    unit: int
    part: str
    lane: str | None  # None: frames of both lanes
    cost: int
    memory: int


def measure(
    inputs: Sequence[str],
    selection: Selection,
    options: MeasureOptions,
    *,
    real: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measure what was selected.

    Parameters
    ----------
    inputs
        What the report calls the data.
    real
        Also encode frames, decode them and compare.
    threads
        None for all processors.
    progress
        Called with bytes done, out of those of `work_bytes`; never from two threads at once.

    Raises
    ------
    NothingSelectedError
        When no dump was selected.
    KvmnnError
        If a frame does not decode to what it was made of, which would be a defect of kvmnn or of the machine.
    """
    selection.require_entries()
    units = units_of(selection, options)
    jobs = _jobs(units, options, real)
    results, broken = _run(jobs, units, options, resolve_threads(threads), progress)
    return _sum_up(list(inputs), options, selection, units, results, broken, real)


def work_bytes(selection: Selection, options: MeasureOptions, real: bool) -> int:
    """The bytes that `progress` will have heard of in the end, unless files turn out to be unreadable."""
    return sum((2 + 2 * real) * unit.raw_bytes for unit in units_of(selection, options) if unit.is_whole())


def _jobs(units: list[Unit], options: MeasureOptions, real: bool) -> list[_Job]:
    """The largest first, so that no thread is left with one at the end."""
    found = []
    for index, unit in enumerate(units):
        if not unit.is_whole():
            continue
        memory = memory_needed(unit, options)
        for part in PARTS:
            for lane in ("hi", "lo"):
                cost = unit.raw_bytes * len(options.predictors.of(f"{part}_{lane}"))
                found.append(_Job(index, part, lane, cost, memory))
            if real:
                found.append(_Job(index, part, None, 3 * unit.raw_bytes, 3 * unit.piece_bytes))
    return sorted(found, key=lambda job: -job.cost)


def _run(
    jobs: list[_Job], units: list[Unit], options: MeasureOptions, threads: int, progress: Progress | None
) -> tuple[dict[tuple[int, str, str | None], StreamSize | StoredSize], set[int]]:
    """The results by unit, part and lane, and the units whose files could not be read."""
    meters, budget = Meters(MEMORY // threads), Budget(MEMORY)
    tell = _one_at_a_time(progress)

    def work(job: _Job) -> StreamSize | StoredSize | None:
        unit = units[job.unit]
        with budget.holding(job.memory):
            try:
                if job.lane is None:
                    return stored_size(unit, job.part, tell)
                return stream_size(unit, job.part, job.lane, options, meters, tell)
            except (SourceError, OSError):
                return None

    made = map_pulled(work, jobs, threads)
    results = {(job.unit, job.part, job.lane): size for job, size in zip(jobs, made, strict=True) if size is not None}
    broken = {job.unit for job, size in zip(jobs, made, strict=True) if size is None}
    return results, broken


def _sum_up(
    inputs: list[str],
    options: MeasureOptions,
    selection: Selection,
    units: list[Unit],
    results: dict[tuple[int, str, str | None], StreamSize | StoredSize],
    broken: set[int],
    real: bool,
) -> Measurement:
    layers: dict[int, Totals] = {}
    totals, chunks = Totals(), 0
    for index, unit in enumerate(units):
        if index in broken or not unit.is_whole():
            selection.skipped[COMPRESSION_FAILED] += 1
            continue
        chunks += 2 * unit.piece_count()
        for total in (totals, layers.setdefault(unit.layer, Totals())):
            for part in PARTS:
                total.extra_bytes[part] += unit.extra_bytes
                for lane in ("hi", "lo"):
                    size = results[index, part, lane]
                    if isinstance(size, StreamSize):
                        total.lanes[f"{part}_{lane}"].add(size)
                stored = results.get((index, part, None))
                if isinstance(stored, StoredSize):
                    total.stored[part] = total.stored.get(part, StoredSize(0, 0)) + stored
    return Measurement(
        inputs=inputs,
        options=options,
        selection=selection,
        groups=len(units) if options.is_grouped else 0,
        chunks=chunks if options.is_chunked else 0,
        totals=totals,
        layers=dict(sorted(layers.items())),
        is_stored=real,
    )


def _one_at_a_time(progress: Progress | None) -> Callable[[int], object] | None:
    if progress is None:
        return None
    lock = threading.Lock()

    def tell(nbytes: int) -> None:
        with lock:
            progress(nbytes)

    return tell
