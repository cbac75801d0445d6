"""The measurement: selected dumps, put together and cut up, each byte lane's size, and the sums."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from ..dtypes import PARTS, Part
from ..errors import OptionError, OutputError
from ..files.changes import Reading
from ..files.output import FileOutput, failures
from ..threads.pipeline import Progress
from ..threads.pool import map_pulled, resolve_threads
from .measurement import Measurement, to_json, to_markdown
from .memory_budget import MemoryBudget
from .options import FP32_LANES, HALVES, Half, MeasureOptions, lane_of
from .selection import Selection, select
from .simulated_sizes import Meters, StreamSize, fp32_stream_size, memory_needed, stream_size
from .stored_sizes import StoredSize, stored_size
from .totals import FP32Totals, Totals
from .units import Unit, units_of

MAX_MEMORY = 320 << 20
"""Bytes of anonymous memory that streams which are measured at one time may take, unless one alone takes more."""

COMPRESSION_FAILED = "compression_failed"

_What = Half | int | None
"""A byte lane of 16-bit words, or of 32-bit ones by its number; None for frames, which hold all."""

_Results = dict[tuple[int, Part, _What], StreamSize | StoredSize]
"""By unit and part."""


class _Job(NamedTuple):
    unit: int
    part: Part
    what: _What
    cost: int
    memory: int


def measure(
    inputs: Sequence[str],
    selection: Selection | None = None,
    options: MeasureOptions | None = None,
    *,
    real: bool = False,
    threads: int | None = None,
    out_json: str | None = None,
    out_md: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Measurement:
    """Measure how well KV dumps can be compressed without loss.

    Parameters
    ----------
    inputs
        What the documents call the data; without a `selection`, directories of MNN KV dumps.
    selection
        What to measure, as `select` and `select_source` give it.
    options
        What to measure it with; None for the defaults.
    real
        Also encode frames, decode them and compare.
    threads
        None for all processors.
    out_json, out_md
        Files to write the reference's two documents to; directories above them are made. Both appear, or neither.
    force
        Replace these where they exist.
    progress
        Called with bytes done, which add up to `work_bytes`; never from two threads at once.

    Raises
    ------
    NothingSelectedError
        When no dump was selected.
    OptionError
        When both documents have the same name.
    OutputError
        When a document exists, is an input, or cannot be written.
    SourceError
        When an input is damaged, cannot be read or changes meanwhile. Only a dump whose file has another length than
        its metadata says is left out, as the reference does.
    KvmnnError
        If a frame does not decode to what it was made of, which would be a defect of kvmnn or of the machine.
    """
    options = options or MeasureOptions()
    selection = select(inputs, options.scope) if selection is None else selection
    selection.require_entries()
    with ExitStack() as stack:
        stack.enter_context(Reading())
        outputs = _open_documents(stack, out_json, out_md, force, [*inputs, *selection.files()])
        units = units_of(selection, options)
        jobs = _jobs(units, options, real)
        results = _run(jobs, units, options, resolve_threads(threads), progress)
        measured = _sum_up(list(inputs), options, selection, units, results, real)
        for output, make in outputs:
            output.file.write(make(measured).encode())
        for output, _ in outputs:
            output.commit()
    return measured


def work_bytes(selection: Selection, options: MeasureOptions, real: bool) -> int:
    """The bytes that `progress` will have heard of in the end."""
    units = [unit for unit in units_of(selection, options) if unit.is_complete()]
    sizes = [(sum(map(unit.raw_bytes, PARTS)), options.fp32 and unit.is_rounded) for unit in units]
    return sum((1 + real + 2 * also_as_stored) * nbytes for nbytes, also_as_stored in sizes)


def _open_documents(
    stack: ExitStack, out_json: str | None, out_md: str | None, force: bool, protect: list[str]
) -> list[tuple[FileOutput, Callable[[Measurement], str]]]:
    """The outputs, opened before anything is measured, each with what makes its text."""
    wanted = [(Path(path), make) for path, make in ((out_json, to_json), (out_md, to_markdown)) if path]
    for path, _ in wanted:
        if os.path.lexists(path) and not force:
            raise OutputError(f"{path}: exists already (--overwrite replaces it)")
    if len({os.path.realpath(path) for path, _ in wanted}) < len(wanted):
        raise OptionError(f"{out_json} and {out_md} name the same file")
    outputs: list[tuple[FileOutput, Callable[[Measurement], str]]] = []
    for path, make in wanted:
        with failures(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        outputs.append((stack.enter_context(FileOutput(path, force=force, protect=protect)), make))
    return outputs


def _jobs(units: list[Unit], options: MeasureOptions, real: bool) -> list[_Job]:
    """The largest first, so that no thread is left with one at the end."""
    found = []
    for index, unit in enumerate(units):
        if not unit.is_complete():
            continue
        for part in unit.parts:
            nbytes, memory = unit.raw_bytes(part), memory_needed(unit, part, options)
            if unit.word_bytes(part) == 2:
                for half in HALVES:
                    cost = 2 * unit.words(part) * len(options.predictors.of(lane_of(part, half)))
                    found.append(_Job(index, part, half, cost, memory))
            if unit.word_bytes(part) == 4 or (options.fp32 and unit.is_rounded):
                found.extend(_Job(index, part, lane, 4 * unit.words(part), memory) for lane in FP32_LANES)
            if real:
                found.append(_Job(index, part, None, 3 * nbytes, 3 * unit.piece_bytes(part)))
    return sorted(found, key=lambda job: -job.cost)


def _run(
    jobs: list[_Job], units: list[Unit], options: MeasureOptions, threads: int, progress: Progress | None
) -> _Results:
    """The results by unit, part and lane."""
    meters, budget = Meters(MAX_MEMORY // threads), MemoryBudget(MAX_MEMORY)
    tell = _one_at_a_time(progress)

    def work(job: _Job) -> StreamSize | StoredSize:
        unit = units[job.unit]
        with budget.holding(job.memory):
            if job.what is None:
                return stored_size(unit, job.part, tell)
            if isinstance(job.what, int):
                return fp32_stream_size(unit, job.part, job.what, options, meters, tell)
            return stream_size(unit, job.part, job.what, options, meters, tell)

    made = map_pulled(work, jobs, threads)
    return {(job.unit, job.part, job.what): size for job, size in zip(jobs, made, strict=True)}


def _sum_up(
    inputs: list[str],
    options: MeasureOptions,
    selection: Selection,
    units: list[Unit],
    results: _Results,
    real: bool,
) -> Measurement:
    layers: dict[int, Totals] = {}
    totals, chunks = Totals(), 0
    for index, unit in enumerate(units):
        if not unit.is_complete():
            incomplete = next(entry for entry in unit.entries if not entry.is_complete())
            selection.skip(COMPRESSION_FAILED, incomplete.where)
            continue
        chunks += len(unit.parts) * unit.piece_count()
        for total in (totals, layers.setdefault(unit.layer, Totals())):
            total.tokens += unit.tokens
            for part in unit.parts:
                total.extra_bytes[part] += unit.extra_bytes
                for half in HALVES:
                    size = results.get((index, part, half))
                    if isinstance(size, StreamSize):
                        total.lanes[lane_of(part, half)].add(size)
                total.is_fp32_counted = not options.scope.to_fp16
                _add_fp32(total, part, unit, [results.get((index, part, lane)) for lane in FP32_LANES])
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


def _add_fp32(total: Totals, part: Part, unit: Unit, sizes: Sequence[StreamSize | StoredSize | None]) -> None:
    for lane, size in enumerate(sizes):
        if isinstance(size, StreamSize):
            total.fp32 = total.fp32 or FP32Totals()
            total.fp32.lanes[part, lane].add(size)
    if total.fp32 and sizes[0]:
        total.fp32.extra_bytes[part] += unit.extra_bytes


def _one_at_a_time(progress: Progress | None) -> Progress | None:
    if progress is None:
        return None
    lock = threading.Lock()

    def tell(nbytes: int) -> None:
        with lock:
            progress(nbytes)

    return tell
