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
from ..files.changes import InputGuard
from ..files.output import FileOutput, wrap_os_errors
from ..threads.pipeline import Progress
from ..threads.pool import parallel_map, resolve_threads
from .measurement import MeasureResult, format_reference_json, format_reference_markdown
from .memory_budget import MemoryBudget
from .options import FP32_LANES, LANE_HALVES, LaneHalf, MeasureOptions, format_lane
from .selection import DumpSelection, select_dumps
from .simulated_sizes import (
    CompressorPool,
    StreamSizeEstimate,
    estimate_fp32_stream_size,
    estimate_memory_bytes,
    estimate_stream_size,
)
from .stored_sizes import StoredSize, measure_stored_size
from .totals import AggregateSizeStats, Fp32SizeStats
from .units import CompressionUnit, build_units

MAX_MEMORY_BYTES = 320 << 20
"""Bytes of anonymous memory that streams which are measured at one time may take, unless one alone takes more."""

COMPRESSION_FAILED = "compression_failed"

_JobTarget = LaneHalf | int | None
"""A byte lane of 16-bit words, or of 32-bit ones by its number; None for frames, which hold all."""

_SizeResults = dict[tuple[int, Part, _JobTarget], StreamSizeEstimate | StoredSize]
"""By unit and part."""


class _MeasureJob(NamedTuple):
    unit_index: int
    part: Part
    target: _JobTarget
    cost: int
    memory_bytes: int


def measure_dumps(
    inputs: Sequence[str],
    selection: DumpSelection | None = None,
    options: MeasureOptions | None = None,
    *,
    real: bool = False,
    threads: int | None = None,
    out_json: str | None = None,
    out_md: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> MeasureResult:
    """Measure how well KV dumps can be compressed without loss.

    Parameters
    ----------
    inputs
        What the documents call the data; without a `selection`, directories of MNN KV dumps.
    selection
        What to measure, as `select_dumps` and `add_source` give it.
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
        Called with bytes done, which add up to `count_work_bytes`; never from two threads at once.

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
    selection = select_dumps(inputs, options.scope) if selection is None else selection
    selection.require_entries()
    with ExitStack() as stack:
        stack.enter_context(InputGuard())
        outputs = _open_documents(stack, out_json, out_md, force, [*inputs, *selection.list_files()])
        units = build_units(selection, options)
        jobs = _plan_jobs(units, options, real)
        results = _run_jobs(jobs, units, options, resolve_threads(threads), progress)
        result = _sum_results(list(inputs), options, selection, units, results, real)
        for output, format_document in outputs:
            output.file.write(format_document(result).encode())
        for output, _ in outputs:
            output.commit()
    return result


def count_work_bytes(selection: DumpSelection, options: MeasureOptions, real: bool) -> int:
    """The bytes that `progress` will have heard of in the end."""
    units = [unit for unit in build_units(selection, options) if unit.is_complete()]
    sizes = [(sum(map(unit.count_raw_bytes, PARTS)), options.fp32 and unit.is_rounded) for unit in units]
    return sum((1 + real + 2 * has_fp32_lanes) * nbytes for nbytes, has_fp32_lanes in sizes)


def _open_documents(
    stack: ExitStack, out_json: str | None, out_md: str | None, force: bool, protect: list[str]
) -> list[tuple[FileOutput, Callable[[MeasureResult], str]]]:
    """The outputs, opened before anything is measured, each with what makes its text."""
    requested = [
        (Path(path), format_document)
        for path, format_document in ((out_json, format_reference_json), (out_md, format_reference_markdown))
        if path
    ]
    for path, _ in requested:
        if os.path.lexists(path) and not force:
            raise OutputError(f"{path}: exists already (--overwrite replaces it)")
    if len({os.path.realpath(path) for path, _ in requested}) < len(requested):
        raise OptionError(f"{out_json} and {out_md} name the same file")
    outputs: list[tuple[FileOutput, Callable[[MeasureResult], str]]] = []
    for path, format_document in requested:
        with wrap_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        outputs.append((stack.enter_context(FileOutput(path, force=force, exclude=protect)), format_document))
    return outputs


def _plan_jobs(units: list[CompressionUnit], options: MeasureOptions, real: bool) -> list[_MeasureJob]:
    """The largest first, so that no thread is left with one at the end."""
    jobs = []
    for index, unit in enumerate(units):
        if not unit.is_complete():
            continue
        for part in unit.parts:
            nbytes, memory_bytes = unit.count_raw_bytes(part), estimate_memory_bytes(unit, part, options)
            if unit.get_itemsize(part) == 2:
                for half in LANE_HALVES:
                    cost = 2 * unit.count_elements(part) * len(options.predictors.get_lane(format_lane(part, half)))
                    jobs.append(_MeasureJob(index, part, half, cost, memory_bytes))
            if unit.get_itemsize(part) == 4 or (options.fp32 and unit.is_rounded):
                jobs.extend(
                    _MeasureJob(index, part, lane, 4 * unit.count_elements(part), memory_bytes) for lane in FP32_LANES
                )
            if real:
                jobs.append(_MeasureJob(index, part, None, 3 * nbytes, 3 * unit.count_chunk_bytes(part)))
    return sorted(jobs, key=lambda job: -job.cost)


def _run_jobs(
    jobs: list[_MeasureJob],
    units: list[CompressionUnit],
    options: MeasureOptions,
    threads: int,
    progress: Progress | None,
) -> _SizeResults:
    """The results by unit, part and lane."""
    compressor_pool, budget = CompressorPool(MAX_MEMORY_BYTES // threads), MemoryBudget(MAX_MEMORY_BYTES)
    report_progress = _serialize_progress(progress)

    def run_job(job: _MeasureJob) -> StreamSizeEstimate | StoredSize:
        unit = units[job.unit_index]
        with budget.reserve(job.memory_bytes):
            if job.target is None:
                return measure_stored_size(unit, job.part, report_progress)
            if isinstance(job.target, int):
                return estimate_fp32_stream_size(unit, job.part, job.target, options, compressor_pool, report_progress)
            return estimate_stream_size(unit, job.part, job.target, options, compressor_pool, report_progress)

    sizes = parallel_map(run_job, jobs, threads)
    return {(job.unit_index, job.part, job.target): size for job, size in zip(jobs, sizes, strict=True)}


def _sum_results(
    inputs: list[str],
    options: MeasureOptions,
    selection: DumpSelection,
    units: list[CompressionUnit],
    results: _SizeResults,
    real: bool,
) -> MeasureResult:
    layers: dict[int, AggregateSizeStats] = {}
    totals, chunks = AggregateSizeStats(), 0
    for index, unit in enumerate(units):
        if not unit.is_complete():
            incomplete_entry = next(entry for entry in unit.entries if not entry.is_complete())
            selection.count_skip(COMPRESSION_FAILED, incomplete_entry.location)
            continue
        chunks += len(unit.parts) * unit.count_chunks()
        for target_totals in (totals, layers.setdefault(unit.layer, AggregateSizeStats())):
            target_totals.tokens += unit.tokens
            for part in unit.parts:
                target_totals.extra_bytes[part] += unit.extra_bytes
                for half in LANE_HALVES:
                    size = results.get((index, part, half))
                    if isinstance(size, StreamSizeEstimate):
                        target_totals.lanes[format_lane(part, half)].add_stream(size)
                target_totals.is_fp32_counted = not options.scope.to_fp16
                _add_fp32_lanes(target_totals, part, unit, [results.get((index, part, lane)) for lane in FP32_LANES])
                stored_result = results.get((index, part, None))
                if isinstance(stored_result, StoredSize):
                    target_totals.stored_sizes[part] = (
                        target_totals.stored_sizes.get(part, StoredSize(0, 0)) + stored_result
                    )
    return MeasureResult(
        inputs=inputs,
        options=options,
        selection=selection,
        num_groups=len(units) if options.is_grouped else 0,
        num_chunks=chunks if options.is_chunked else 0,
        totals=totals,
        totals_by_layer=dict(sorted(layers.items())),
        is_stored=real,
    )


def _add_fp32_lanes(
    totals: AggregateSizeStats,
    part: Part,
    unit: CompressionUnit,
    sizes: Sequence[StreamSizeEstimate | StoredSize | None],
) -> None:
    for lane, size in enumerate(sizes):
        if isinstance(size, StreamSizeEstimate):
            totals.fp32 = totals.fp32 or Fp32SizeStats()
            totals.fp32.lanes[part, lane].add_stream(size)
    if totals.fp32 and sizes[0]:
        totals.fp32.extra_bytes[part] += unit.extra_bytes


def _serialize_progress(progress: Progress | None) -> Progress | None:
    if progress is None:
        return None
    lock = threading.Lock()

    def report(nbytes: int) -> None:
        with lock:
            progress(nbytes)

    return report
