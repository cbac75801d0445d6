"""Benchmark codecs on the same arrays, interleaved, and derive ratios, speeds and dominance."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from math import ceil
from statistics import median
from typing import Any

import numpy as np

from .._util.dataclass import dataclass
from .._util.parallel import Progress, cpu_count
from .._util.text import LOSSLESS, LOSSY, MIN_RATE_BYTES, format_mb_per_second, pluralize
from ..arrays.array import Chunk, LazyArray
from ..arrays.layers import collect_layers
from ..arrays.source import Source
from ..bundle.dense import DensePlan
from ..errors import KvmnnError
from ..files.schema import Record, json_key
from ..formats.layer_streams.codecs import LayerStreamOptions
from ..frames import encode, inspect
from ..profiles import Profile
from ..reports.break_even import BreakEvenReport, CodecTimes, EngineTimes, compute_break_even
from ..reports.table import Column, Table
from . import codecs
from . import layer_codecs as makers
from .codecs import BenchCodec, LossStats, count_dense_bytes, explain_no_dense, make_dense_codec, make_dense_plans

_NAME_COLUMNS = 25


@dataclass(frozen=True)
class Timing(Record):
    """Median seconds of one call: wall time, and CPU time summed over threads."""

    wall: float
    cpu: float
    #: Wall time that 95 % of the calls do not exceed; that of the slowest for fewer than 20.
    wall_p95: float | None = None


@dataclass(frozen=True)
class CodecBenchResult(Record):
    """Result of one codec on one array."""

    #: Name of the codec.
    codec: str
    version: str
    #: Bytes before and after encoding.
    raw_bytes: int
    stored_bytes: int
    #: Timings; None if the codec failed.
    encode: Timing | None
    decode: Timing | None
    #: Reason of a failure.
    error: str | None = None
    #: What a lossy codec lost; None for all others.
    loss: LossStats | None = field(default=None, metadata={"omit": True})
    #: Timed turns of a codec that took so long that it had fewer than the others; None for all others.
    rounds: int | None = field(default=None, metadata={"omit": True})

    @property
    @json_key()
    def ratio(self) -> float | None:
        """Return raw bytes divided by stored bytes; None if the codec failed."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else None

    @property
    @json_key()
    def encode_bytes_per_s_cpu(self) -> float | None:
        """Return the raw bytes encoded per second of CPU time."""
        return None if self.encode is None else self.raw_bytes / max(self.encode.cpu, 1e-9)

    @property
    @json_key()
    def encode_bytes_per_s_wall(self) -> float | None:
        """Return the raw bytes encoded per second of wall time."""
        return None if self.encode is None else self.raw_bytes / max(self.encode.wall, 1e-9)

    @property
    @json_key()
    def decode_bytes_per_s_cpu(self) -> float | None:
        """Return the raw bytes decoded per second of CPU time."""
        return None if self.decode is None else self.raw_bytes / max(self.decode.cpu, 1e-9)

    @property
    @json_key()
    def decode_bytes_per_s_wall(self) -> float | None:
        """Return the raw bytes decoded per second of wall time."""
        return None if self.decode is None else self.raw_bytes / max(self.decode.wall, 1e-9)

    @property
    @json_key("break_even_bytes_per_s")
    def break_even(self) -> float | None:
        """Return the link speed (bytes per second) below which compressed transfer is faster than raw; None if none is.

        With n raw bytes, ratio r, encode and decode speeds E and D (bytes per second, wall time) and a link of B bytes
        per second, without overlap: ``n/E + n/(r B) + n/D < n/B``, so ``B < (1 - 1/r) / (1/E + 1/D)``. If coding
        overlaps the transfer, the limit is higher.
        """
        if self.encode is None or self.decode is None:
            return None
        return self._compute_break_even(self.encode.wall + self.decode.wall)

    @property
    @json_key("break_even_p95_bytes_per_s")
    def break_even_p95(self) -> float | None:
        """Return the break-even link speed if both calls take the 95th percentile of their times."""
        if self.encode is None or self.decode is None or None in (self.encode.wall_p95, self.decode.wall_p95):
            return None
        return self._compute_break_even((self.encode.wall_p95 or 0.0) + (self.decode.wall_p95 or 0.0))

    @property
    @json_key(after="version")
    def label(self) -> str | None:
        """Return ``LOSSY``, or ``LOSSLESS``, which every round trip is compared for; None if the codec failed."""
        return None if self.encode is None else LOSSLESS if self.loss is None else LOSSY

    @property
    def title(self) -> str:
        """Return the codec's name, marked if it is LOSSY."""
        return self.codec if self.loss is None else f"{self.codec} {LOSSY}"

    def _compute_break_even(self, seconds: float) -> float | None:
        if not self.ratio or self.ratio <= 1:
            return None
        return (1 - 1 / self.ratio) / (seconds / self.raw_bytes)

    def dominates(self, competitor: CodecBenchResult) -> bool:
        """Return whether ratio and CPU times are no worse than those of `competitor`, one better, on the same bytes.

        Lossy codecs and lossless ones are not compared.
        """
        if (self.loss is None) != (competitor.loss is None):
            return False
        if self.encode is None or self.decode is None or competitor.encode is None or competitor.decode is None:
            return False
        own_costs = (self.stored_bytes, self.encode.cpu, self.decode.cpu)
        competitor_costs = (competitor.stored_bytes, competitor.encode.cpu, competitor.decode.cpu)
        is_no_worse = all(a <= b for a, b in zip(own_costs, competitor_costs, strict=True))
        return self.raw_bytes == competitor.raw_bytes and is_no_worse and own_costs != competitor_costs

    def __str__(self) -> str:
        if self.encode is None or self.decode is None or self.ratio is None:
            return f"{self.codec:<{_NAME_COLUMNS}} failed: {self.error}"
        # A longer name has a line of its own: rows fit terminals of 80 columns.
        name = self.title if len(self.title) <= _NAME_COLUMNS else f"{self.title}\n"
        line = f"{name}{'':<{_NAME_COLUMNS - len(name.rpartition(chr(10))[2])}} {self.ratio:>7.4f}"
        if self.raw_bytes < MIN_RATE_BYTES:
            return f"{line} {'-':>8} {'-':>8} {'-':>8} {'-':>8} {'-':>10}"
        times = (self.encode.cpu, self.encode.wall, self.decode.cpu, self.decode.wall)
        speeds = " ".join(f"{format_mb_per_second(self.raw_bytes, seconds):>8}" for seconds in times)
        break_even_text = "never" if self.break_even is None else f"{self.break_even / 1e6:.1f}"
        return f"{line} {speeds} {break_even_text:>10}"


def _make_speed_column(heading: str, get: Callable[[CodecBenchResult], float | None]) -> Column:
    """Make a column of MB/s; arrays that are too small to time have none."""

    def format_speed(result: CodecBenchResult) -> str | None:
        speed = get(result)
        return None if speed is None or result.raw_bytes < MIN_RATE_BYTES else f"{speed / 1e6:.1f}"

    return Column(heading, format_speed)


_COLUMNS = (
    Column("codec", lambda result: result.title, is_left_aligned=True),
    Column("ratio", lambda result: None if result.ratio is None else f"{result.ratio:.4f}"),
    _make_speed_column("encode, CPU (MB/s)", lambda result: result.encode_bytes_per_s_cpu),
    _make_speed_column("encode, wall (MB/s)", lambda result: result.encode_bytes_per_s_wall),
    _make_speed_column("decode, CPU (MB/s)", lambda result: result.decode_bytes_per_s_cpu),
    _make_speed_column("decode, wall (MB/s)", lambda result: result.decode_bytes_per_s_wall),
    _make_speed_column("break-even (MB/s)", lambda result: result.break_even),
)


_HEADING_LINES = (
    f"{'':<{_NAME_COLUMNS}} {'':>7} {'encode MB/s':>17} {'decode MB/s':>17} {'break-even':>10}",
    f"{'codec':<{_NAME_COLUMNS}} {'ratio':>7} {'cpu':>8} {'wall':>8} {'cpu':>8} {'wall':>8} {'MB/s':>10}",
)


@dataclass(frozen=True)
class ArrayBenchReport(Record):
    """Results of all codecs on one array."""

    json_keys = "name dtype array_bytes sample_bytes entropy_ratio rounds results=_result_documents missing note"

    name: str
    dtype: str
    array_bytes: int
    #: Bytes measured, from the start of the array.
    sample_bytes: int
    #: The ratio at the order-0 entropy of the byte lanes: the bound for coders of single bytes. None for data without
    #: entropy.
    entropy_ratio: float | None
    rounds: int
    results: tuple[CodecBenchResult, ...]
    #: Packages that are not installed.
    missing: tuple[str, ...]
    #: Why there are no dense streams; empty if there are.
    note: str = ""

    def find_dominated(self) -> dict[str, str]:
        """Map each codec off the Pareto front (ratio, CPU time to encode and to decode) to the smallest that dominates
        it.

        Only codecs that were measured on the same bytes are compared.
        """
        dominated_by: dict[str, str] = {}
        for codec_result in self.results:
            dominating = [competitor for competitor in self.results if competitor.dominates(codec_result)]
            if dominating:
                dominated_by[codec_result.codec] = min(dominating, key=lambda result: result.stored_bytes).codec
        return dominated_by

    @property
    def _result_documents(self) -> list[dict[str, Any]]:
        dominated_by = self.find_dominated()
        return [{**result.to_dict(), "dominated_by": dominated_by.get(result.codec)} for result in self.results]

    def __str__(self) -> str:
        lines = [*_HEADING_LINES, *map(str, self.results)]
        if self.missing:
            names = ", ".join(self.missing)
            lines.append(f"not measured, as they are not installed: {names} (pip install {' '.join(self.missing)})")
        lines += [f"{result.codec}: {result.loss}" for result in self.results if result.loss is not None]
        lines += [
            f"{result.codec}: of {pluralize(result.rounds, 'turn')}: more than {MAX_CODEC_SECONDS} s (--repeats)"
            for result in self.results
            if result.rounds is not None
        ]
        lines += [
            f"{result.codec}: of the first {result.raw_bytes:,} bytes"
            for result in self.results
            if result.raw_bytes != self.sample_bytes
        ]
        lines += [self.note] if self.note else []
        if self.sample_bytes >= MIN_RATE_BYTES:
            dominated_by = self.find_dominated().items()
            lines += [f"{codec}: dominated by {winner} (ratio, CPU time both ways)" for codec, winner in dominated_by]
        if any(result.raw_bytes < MIN_RATE_BYTES for result in self.results):
            lines.append(f"-: speeds of less than {MIN_RATE_BYTES:,} bytes are not shown")
        return "\n".join(lines)

    def format_heading(self, threads: int) -> str:
        """Return one line that describes what was measured."""
        sample_text = "" if self.sample_bytes == self.array_bytes else f", first {self.sample_bytes:,} measured"
        entropy_text = "is 0" if self.entropy_ratio is None else f"would give ratio {self.entropy_ratio:.4f}"
        return (
            f"{self.name}: {self.dtype}, {self.array_bytes:,} bytes{sample_text}; order-0 entropy of its bytes "
            f"{entropy_text}"
            f"; {pluralize(threads, 'thread')}, medians of {self.rounds}, every round trip LOSSLESS unless said"
        )


@dataclass(frozen=True)
class MachineInfo(Record):
    """The machine that the codecs ran on."""

    processor: str
    cpus: int
    system: str


@dataclass(frozen=True, kw_only=True)
class BenchReport(Record):
    """Results of all codecs on all arrays."""

    rows_path = "arrays.results"

    def to_tables(self) -> list[Table]:
        """Return a table for each array: ratio and speeds of each codec."""
        return [Table.from_items(array.name, _COLUMNS, array.results) for array in self.arrays]

    #: Machine of the measurement.
    machine: MachineInfo
    #: Threads of each codec.
    threads: int
    #: One report for each array.
    arrays: tuple[ArrayBenchReport, ...]
    #: Where the codecs that succeeded on every array pay; None if there is none.
    break_even: BreakEvenReport | None = field(default=None, metadata={"omit": True})

    @property
    @json_key(after="arrays")
    def totals(self) -> tuple[CodecBenchResult, ...]:
        """Return the sums of bytes and of times of each codec that succeeded on every array."""
        return tuple(_sum_results(self.arrays))

    def __str__(self) -> str:
        blocks = [f"{report.format_heading(self.threads)}\n{report}" for report in self.arrays]
        totals = self.totals
        if len(self.arrays) > 1 and totals:
            heading = f"All {len(self.arrays):,} arrays, sums of bytes and of times; codecs that succeeded on each:"
            blocks.append("\n".join([heading, *_HEADING_LINES, *map(str, totals)]))
        is_timed = any(result.raw_bytes >= MIN_RATE_BYTES for result in totals)
        return "\n\n".join([*blocks, *([str(self.break_even)] if self.break_even is not None and is_timed else [])])


DEFAULT_REPEATS = 5
"""Timed turns of each codec by default."""
MAX_CODEC_SECONDS = 5
"""A codec whose turns have taken so long has no more of them by default."""
DEFAULT_SAMPLE_BYTES = 64 << 20
"""Default number of bytes to measure of each array."""
MAX_EFFORT_SAMPLE_BYTES = 1 << 20
"""Bytes on which effort "max" is measured by default, because it is slow."""
SHORT_SAMPLE_SUFFIX = ", first MiB"
"""Suffix of the names of codecs that are measured on `MAX_EFFORT_SAMPLE_BYTES`."""


def compare(
    source: Source,
    *,
    max_bytes: int = DEFAULT_SAMPLE_BYTES,
    repeats: int | None = None,
    threads: int = 1,
    with_max: bool = False,
    progress: Progress | None = None,
    engine: EngineTimes | None = None,
    link: float | None = None,
) -> BenchReport:
    """Measure kvmnn's efforts, its dense streams and all installed alternatives on the arrays of a source.

    Parameters
    ----------
    source
        The data: `kvmnn.open`.
    max_bytes
        Bytes of each array, from its beginning, to measure; 0 for all.
    repeats
        Number of timed runs of each codec, of which medians are reported; None for `DEFAULT_REPEATS`, or fewer for a
        codec whose runs take more than `MAX_CODEC_SECONDS` together.
    threads
        Threads of each codec.
    with_max
        Measure effort "max" on all of these bytes instead of the first MiB.
    progress
        Called with 1 after each turn of a codec; there are `count_runs` of them.
    engine, link
        As for `kvmnn.reports.break_even.compute_break_even`: times to the first token with stored K and V.

    Raises
    ------
    KvmnnError
        When `engine` is specified and the arrays are not K and V of layers.
    SourceError
        When an array is damaged. A codec that fails or does not restore the data is a row of the result.
    """
    plans = make_dense_plans(source)
    reports = [
        measure(
            array,
            max_bytes=max_bytes,
            repeats=repeats,
            threads=threads,
            with_max=with_max,
            dense=plans.get(array.name),
            progress=progress,
        )
        for array in source.arrays
    ]
    return _make_report(source, reports, threads, engine, link)


def _make_report(
    source: Source,
    reports: Sequence[ArrayBenchReport],
    threads: int,
    engine: EngineTimes | None,
    link: float | None,
) -> BenchReport:
    machine = MachineInfo(platform.processor() or platform.machine(), cpu_count(), platform.system())
    times = [_make_codec_times(result) for result in _sum_results(reports)]
    break_even = None
    if times:
        token_bytes = None if engine is None else _compute_token_bytes(source)
        break_even = compute_break_even(times, token_bytes=token_bytes, engine=engine, link=link)
    return BenchReport(machine=machine, threads=threads, arrays=tuple(reports), break_even=break_even)


def compare_on_cache(
    source: Source,
    layer_codecs: Sequence[LayerStreamOptions],
    *,
    max_bytes: int = DEFAULT_SAMPLE_BYTES,
    repeats: int | None = None,
    threads: int = 1,
    progress: Progress | None = None,
    engine: EngineTimes | None = None,
    link: float | None = None,
    make_adapted: Callable[[makers.CacheSample, BenchCodec, makers.GetRope], BenchCodec] | None = None,
) -> BenchReport:
    """Measure codecs of whole layers on the K and V of all layers, next to those that `compare` measures on each array.

    Codecs of whole layers run on one thread. The other parameters are those of `compare`; of a longer cache the first
    tokens of all layers are measured. Decoded bytes of lossless codecs are compared with the input, those of lossy ones
    with what the encoder promises. `make_adapted` is `kvmnn.calibration.make_adapted_codec`, to measure that codec too.

    Raises
    ------
    OptionError
        For arrays that are not K and V of layers.
    KvmnnError
        For a profile of another model.
    """
    sample = makers.read_sample(source, max_bytes)
    profiles = [Profile.read(options.profile) for options in layer_codecs]
    for profile in profiles:
        for layer in sample.layers:
            profile.check_layer(layer)
    own_codecs = codecs.make_kvmnn_codecs(sample.dtype, threads)
    third_party_codecs, not_installed = codecs.find_installed_codecs(sample.dtype, threads)
    get_rope = makers.make_rope_getter(source, profiles[0] if profiles else None)
    dense_codec = makers.make_dense_cache_codec(sample, get_rope, threads)
    bench_codecs = [
        *(makers.apply_by_array(codec, sample) for codec in own_codecs),
        dense_codec,
        *([] if make_adapted is None else [make_adapted(sample, dense_codec, get_rope)]),
        *(
            makers.make_layer_codec(sample, profile, options)
            for profile, options in zip(profiles, layer_codecs, strict=True)
        ),
        *(makers.apply_by_array(codec, sample) for codec in third_party_codecs),
    ]
    runs = [_CodecRun(codec, sample.words) for codec in bench_codecs]
    _run_all(runs, repeats, progress)
    info = inspect(encode(sample.words, dtype=sample.dtype, effort="balanced", threads=threads))
    report = ArrayBenchReport(
        name=f"K and V of {pluralize(len(sample.layers), 'layer')}",
        dtype=sample.dtype,
        array_bytes=sample.cache_bytes,
        sample_bytes=sample.words.size,
        entropy_ratio=None if info.entropy_ratio == float("inf") else info.entropy_ratio,
        rounds=repeats or DEFAULT_REPEATS,
        results=tuple(run.to_result(repeats or DEFAULT_REPEATS) for run in runs),
        missing=tuple(not_installed),
    )
    return _make_report(source, [report], threads, engine, link)


def count_cache_runs(dtype: str, num_layer_codecs: int, repeats: int | None, threads: int) -> int:
    """Return how often `compare_on_cache` calls its `progress`."""
    num_codecs = len(codecs.make_kvmnn_codecs(dtype, threads)) + 1 + num_layer_codecs
    return ((repeats or DEFAULT_REPEATS) + 1) * (num_codecs + len(codecs.find_installed_codecs(dtype, threads)[0]))


def _compute_token_bytes(source: Source) -> float:
    arrays = collect_layers(source)
    return sum(entry.array.nbytes for entry in arrays) / max(max(entry.geometry[1] for entry in arrays), 1)


def _sum_results(reports: Sequence[ArrayBenchReport]) -> list[CodecBenchResult]:
    """Sum sizes and times of each codec that succeeded on every array; LOSSY ones only run on one array of all."""
    totals = []
    for codec in dict.fromkeys(result.codec for report in reports for result in report.results):
        results = [result for report in reports for result in report.results if result.codec == codec]
        encodes = [result.encode for result in results if result.encode is not None]
        decodes = [result.decode for result in results if result.decode is not None]
        if len(encodes) < len(reports) or len(decodes) < len(reports):
            continue
        totals.append(
            replace(
                results[0],
                raw_bytes=sum(result.raw_bytes for result in results),
                stored_bytes=sum(result.stored_bytes for result in results),
                encode=_sum_timings(encodes),
                decode=_sum_timings(decodes),
                rounds=min((result.rounds for result in results if result.rounds is not None), default=None),
            )
        )
    return totals


def _sum_timings(timings: Sequence[Timing]) -> Timing:
    return Timing(
        sum(timing.wall for timing in timings),
        sum(timing.cpu for timing in timings),
        sum(timing.wall_p95 or timing.wall for timing in timings),
    )


def _make_codec_times(total: CodecBenchResult) -> CodecTimes:
    encode, decode = total.encode or Timing(0.0, 0.0), total.decode or Timing(0.0, 0.0)
    return CodecTimes(
        codec=total.codec,
        raw_bytes=total.raw_bytes,
        stored_bytes=total.stored_bytes,
        encode_p50=encode.wall,
        encode_p95=encode.wall_p95 or encode.wall,
        decode_p50=decode.wall,
        decode_p95=decode.wall_p95 or decode.wall,
    )


def count_runs(
    source: Source, repeats: int | None, threads: int, max_bytes: int = DEFAULT_SAMPLE_BYTES, *, with_max: bool = False
) -> int:
    """Return how often `compare` calls its `progress`."""
    plans = make_dense_plans(source, with_rope_search=False)

    def count_codecs(array: LazyArray) -> int:
        sample_bytes = min(array.nbytes, max_bytes or array.nbytes)
        num_dense_bytes = count_dense_bytes(plans.get(array.name), sample_bytes)
        has_short_sample = not with_max and (num_dense_bytes or sample_bytes) > MAX_EFFORT_SAMPLE_BYTES
        return 4 + has_short_sample + len(codecs.find_installed_codecs(array.dtype, threads)[0]) + bool(num_dense_bytes)

    return sum(((repeats or DEFAULT_REPEATS) + 1) * count_codecs(array) for array in source.arrays)


def measure(
    array: LazyArray,
    *,
    max_bytes: int,
    repeats: int | None,
    threads: int | None,
    with_max: bool = False,
    dense: DensePlan | None = None,
    progress: Progress | None = None,
) -> ArrayBenchReport:
    """Measure every codec on the first bytes of an array; dense streams on as many as make whole streams.

    The codecs are interleaved, so that a disturbance of the machine affects all of them. Medians of timed runs
    follow one uncounted run, in which each round trip is compared with its input.

    Parameters
    ----------
    max_bytes
        Most bytes of the array to measure; 0 for all.
    repeats
        As for `compare`.
    threads
        Threads for each codec; None for all processors.
    with_max
        Measure effort max on all of the sample, and not on its first MiB only.
    dense
        Plan for dense streams, of whole layers (or whole tokens of the first); None if not possible.
    progress
        Called with 1 after every turn of a codec.
    """
    chunks = array.iter_chunks(max_bytes)
    sample = next(chunks)
    if sample.size == array.nbytes:
        deque(chunks, maxlen=0)  # checksums and hashes are compared after the last byte
    own_codecs = codecs.make_kvmnn_codecs(array.dtype, threads)
    max_codec = codecs.make_kvmnn_codecs(array.dtype, threads, with_max=True)[-1]
    third_party_codecs, not_installed = codecs.find_installed_codecs(array.dtype, threads)
    num_dense_bytes = count_dense_bytes(dense, sample.size)
    sample = sample[: num_dense_bytes or sample.size]
    short_sample = (
        sample if with_max else sample[: MAX_EFFORT_SAMPLE_BYTES // array.coded_itemsize * array.coded_itemsize]
    )
    runs = [_CodecRun(codec, sample) for codec in own_codecs]
    if short_sample.size < sample.size:  # exact next to it, so that the two can be compared
        runs += [
            _CodecRun(replace(codec, name=f"{codec.name}{SHORT_SAMPLE_SUFFIX}"), short_sample)
            for codec in (own_codecs[0], max_codec)
        ]
    else:
        runs.append(_CodecRun(max_codec, sample))
    if dense is not None and num_dense_bytes:
        runs.append(_CodecRun(make_dense_codec(dense, threads), sample))
    runs += [_CodecRun(codec, sample) for codec in third_party_codecs]
    _run_all(runs, repeats, progress)
    info = inspect(encode(sample, dtype=array.dtype, effort="balanced", threads=threads))
    entropy_ratio = info.entropy_ratio
    return ArrayBenchReport(
        name=array.name,
        dtype=array.dtype,
        array_bytes=array.nbytes,
        sample_bytes=sample.size,
        entropy_ratio=None if entropy_ratio == float("inf") else entropy_ratio,
        rounds=repeats or DEFAULT_REPEATS,
        results=tuple(run.to_result(repeats or DEFAULT_REPEATS) for run in runs),
        missing=tuple(not_installed),
        note=explain_no_dense(dense, sample.size),
    )


def _run_all(runs: Sequence[_CodecRun], repeats: int | None, progress: Progress | None) -> None:
    """Run all codecs in turns, the first of which is not timed; without `repeats` slow ones have fewer turns."""
    for repeat in range((repeats or DEFAULT_REPEATS) + 1):
        for run in runs:
            if repeats is not None or not run.has_taken_long:
                run.run_once(is_timed=repeat > 0)
            if progress:
                progress(1)


class _CodecRun:
    """The runs of one codec."""

    def __init__(self, codec: BenchCodec, sample: Chunk) -> None:
        self._codec = codec
        self._sample = sample
        self._stored_bytes = 0
        self._error: str | None = None
        self._loss: LossStats | None = None
        self._encode_timings: list[Timing] = []
        self._decode_timings: list[Timing] = []

    def run_once(self, *, is_timed: bool) -> None:
        if self._error:
            return
        try:
            payload, encode_time = _time_call(self._codec.encode, self._sample)
            output, decode_time = _time_call(self._codec.decode, payload)
            if self._codec.check_loss is not None:
                self._loss = self._loss if is_timed else self._codec.check_loss(output, self._sample)
            elif not is_timed and not _is_same(output, self._sample):
                raise KvmnnError("the round trip changed the data")
        except Exception as exc:
            self._error = f"{type(exc).__name__}: {exc}"[:200]
            return
        self._stored_bytes = self._codec.count_bytes(payload)
        if is_timed:
            self._encode_timings.append(encode_time)
            self._decode_timings.append(decode_time)

    @property
    def has_taken_long(self) -> bool:
        """Return whether its timed runs have taken `MAX_CODEC_SECONDS`."""
        timings = [*self._encode_timings, *self._decode_timings]
        return sum(timing.wall for timing in timings) >= MAX_CODEC_SECONDS

    def to_result(self, num_turns: int) -> CodecBenchResult:
        """Return the result; `num_turns` is the number of timed runs of codecs that do not take long."""
        num_timed = len(self._encode_timings)
        is_ok = self._error is None and self._encode_timings
        return CodecBenchResult(
            codec=self._codec.name,
            version=self._codec.version,
            raw_bytes=self._sample.size,
            stored_bytes=self._stored_bytes if is_ok else 0,
            encode=_compute_median(self._encode_timings) if is_ok else None,
            decode=_compute_median(self._decode_timings) if is_ok else None,
            error=self._error,
            loss=self._loss if is_ok else None,
            rounds=num_timed if is_ok and num_timed < num_turns else None,
        )


def _time_call(function: Callable[[Any], Any], argument: Any) -> tuple[Any, Timing]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = function(argument)
    return result, Timing(time.perf_counter() - wall, time.process_time() - cpu)


def _compute_median(timings: Sequence[Timing]) -> Timing:
    walls = sorted(timing.wall for timing in timings)
    return Timing(median(walls), median(timing.cpu for timing in timings), walls[ceil(0.95 * len(walls)) - 1])


def _is_same(output: Any, sample: Chunk) -> bool:
    output_bytes = (
        output.reshape(-1).view(np.uint8) if isinstance(output, np.ndarray) else np.frombuffer(output, np.uint8)
    )
    return np.array_equal(output_bytes, sample)
