"""Measure dumps: the size of each byte lane by layer and part, simulated or stored.

The reference's two documents are reproduced key for key and line for line.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.parallel import Progress, parallel_map, resolve_threads
from .._util.text import LOSSLESS, LOSSY, SIMULATED, compute_ratio, escape_markdown, format_range, pluralize
from ..arrays.completeness import Completeness, format_missing
from ..dtypes import PART_LETTERS, PARTS, Part
from ..errors import REPLACE_HINT, OptionError, OutputError
from ..files.atomic import FileOutput, wrap_os_errors
from ..files.change_detection import InputGuard
from ..files.schema import Record, json_key
from ..reports.break_even import BreakEvenReport
from ..reports.table import Column, Table
from .options import FP32_LANES, LANE_HALVES, LANES, LaneHalf, MeasureOptions, format_lane, parse_lane
from .selection import CompressionUnit, DumpSelection, build_units, select_dumps
from .stream_sizes import (
    AggregateSizeStats,
    CompressorPool,
    Fp32SizeStats,
    LaneSizeStats,
    StoredSize,
    StreamSizeEstimate,
    estimate_fp32_stream_size,
    estimate_memory_bytes,
    estimate_stream_size,
    measure_stored_size,
)

SIMULATED_MEANING = "simulated: zstd frames were made and their lengths added up; no such file exists"
STORED_MEANING = (
    "STORED: frames as MNN makes them were encoded, decoded and compared: LOSSLESS for the words measured, "
    "[token, kv_head, head_dim] as dumps have them"
)
FP32_MEANING = "fp32 words as they are, nothing rounded, in four byte lanes, the lowest byte first"
LIMIT_MEANING = (
    "order-0 entropy of the byte lanes, the bound of coders that code each byte by its frequency alone; predictors and "
    "matches go beyond it, so it is no limit of codecs"
)


@dataclass(frozen=True, kw_only=True)
class SizeEntry:
    """Sizes of a layer, a part or a lane; None for limits that were not computed and frames that were not encoded."""

    raw_bytes: int
    simulated_bytes: int
    limit_bytes: float | None = None
    stored_size: StoredSize | None = None

    @property
    def limit_ratio(self) -> float | None:
        """Raw bytes over the entropy bound; None if it is unknown or 0."""
        return self.raw_bytes / self.limit_bytes if self.limit_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as JSON values."""
        # computed: a limit has four keys and stored frames four, or none; a ratio of theirs may be null
        document: dict[str, Any] = {
            "raw_bytes": self.raw_bytes,
            "simulated_bytes": self.simulated_bytes,
            "simulated_ratio": compute_ratio(self.raw_bytes, self.simulated_bytes),
        }
        if self.limit_bytes is not None:
            document |= {"limit_bytes": self.limit_bytes, "limit_ratio": self.limit_ratio}  # since the first version
            document |= {"byte_entropy_bytes": self.limit_bytes, "byte_entropy_ratio": self.limit_ratio}
        if self.stored_size is not None:
            document |= {
                "stored_bytes": self.stored_size.bytes,
                "stored_ratio": compute_ratio(self.raw_bytes, self.stored_size.bytes),
                "stored_frames": self.stored_size.frames,
                "verified": True,
            }
        return document

    def format_line(self, label: str) -> str:
        """Format the sizes as a line of the table."""
        simulated_ratio = compute_ratio(self.raw_bytes, self.simulated_bytes)
        text = f"{label:<9} {self.raw_bytes:>13,} {self.simulated_bytes:>13,} {simulated_ratio:>6.4f}"
        if self.limit_bytes is not None:
            text += f" {'none' if self.limit_ratio is None else f'{self.limit_ratio:.4f}':>13}"
        if self.stored_size is not None:
            text += f" {self.stored_size.bytes:>13,} {compute_ratio(self.raw_bytes, self.stored_size.bytes):>6.4f}"
        return text


_SIZE_COLUMNS = (
    Column("part", lambda item: str(item[0]), is_left_aligned=True),
    Column("raw bytes", lambda item: f"{item[1].raw_bytes:,}"),
    Column("simulated bytes", lambda item: f"{item[1].simulated_bytes:,}"),
    Column("ratio", lambda item: f"{compute_ratio(item[1].raw_bytes, item[1].simulated_bytes):.4f}"),
    Column("byte entropy ratio", lambda item: item[1].limit_ratio and f"{item[1].limit_ratio:.4f}"),
    Column("stored bytes", lambda item: item[1].stored_size and f"{item[1].stored_size.bytes:,}"),
    Column(
        "stored ratio",
        lambda item: item[1].stored_size and f"{compute_ratio(item[1].raw_bytes, item[1].stored_size.bytes):.4f}",
    ),
)


@dataclass(frozen=True, kw_only=True)
class SizeReport:
    """Measured sizes: in total and by layer."""

    #: Sizes of everything that was measured; then the sizes by layer number.
    totals: AggregateSizeStats
    totals_by_layer: dict[int, AggregateSizeStats]
    #: Number of layers in the inputs, measured or not.
    num_layers: int
    #: Whether the entropy of bytes was computed.
    has_limits: bool
    #: Whether frames were encoded as well.
    is_stored: bool

    def build_entry(self, totals: AggregateSizeStats, parts: Sequence[Part] = PARTS) -> SizeEntry:
        """Build the sizes of a layer, or of one part of it."""
        return SizeEntry(
            raw_bytes=totals.raw_bytes(parts),
            simulated_bytes=totals.simulated_bytes(parts),
            limit_bytes=totals.limit_bytes(parts) if self.has_limits else None,
            stored_size=StoredSize(totals.stored_bytes(parts), totals.stored_frames(parts)) if self.is_stored else None,
        )

    def build_lane_entry(self, lane: LaneSizeStats) -> SizeEntry:
        """Build the sizes of a lane, for which no frames exist."""
        limit = lane.limit_bytes if self.has_limits else None
        return SizeEntry(raw_bytes=lane.raw_bytes, simulated_bytes=lane.simulated_bytes, limit_bytes=limit)

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as JSON values."""
        # computed: a tree of layers, parts and lanes out of sums
        meaning = {"simulated": SIMULATED_MEANING}
        if self.has_limits:
            meaning["limit"] = LIMIT_MEANING
        if self.is_stored:
            meaning["stored"] = STORED_MEANING
        layer_tokens = [totals.tokens for totals in self.totals_by_layer.values()]
        fp32_document = {"fp32": self._build_fp32_document()} if self.totals.fp32 else {}
        return {
            "meaning": meaning,
            "found_layers": self.num_layers,
            "overall": {
                "layers": len(self.totals_by_layer),
                "least_tokens": min(layer_tokens, default=0),
                "most_tokens": max(layer_tokens, default=0),
                **self._build_document(self.totals),
            },
            "layers": {
                str(layer): {"tokens": totals.tokens, **self._build_document(totals)}
                for layer, totals in self.totals_by_layer.items()
            },
            **fp32_document,
        }

    def _build_document(self, totals: AggregateSizeStats) -> dict[str, Any]:
        return self.build_entry(totals).to_dict() | {
            PART_LETTERS[part]: self._build_part_document(totals, part) for part in PARTS
        }

    def _build_part_document(self, totals: AggregateSizeStats, part: Part) -> dict[str, Any]:
        lanes: dict[str, LaneSizeStats] = {half: totals.lanes[format_lane(part, half)] for half in LANE_HALVES}
        wide_lanes = {
            str(number): lane
            for (lane_part, number), lane in totals.fp32_lanes.items()
            if lane_part == part and lane.raw_bytes
        }
        lanes |= (
            wide_lanes  # "hi" and "lo" are there for every part, as programs have read them since the first version
        )
        lane_documents = {
            name: {**self.build_lane_entry(lane).to_dict(), "modes": dict(lane.modes)} for name, lane in lanes.items()
        }
        sizes = self.build_entry(totals, [part]).to_dict()
        return {**sizes, "framing_bytes": totals.extra_bytes[part], "lanes": lane_documents}

    def _build_fp32_document(self) -> dict[str, Any]:
        """Return the sizes of fp32 words as JSON values: overall, and of each layer that has fp32 words."""
        layers = {
            str(layer): self._build_fp32_totals_document(totals.fp32)
            for layer, totals in self.totals_by_layer.items()
            if totals.fp32
        }
        overall = {"layers": len(layers), **self._build_fp32_totals_document(self.totals.fp32)}
        return {"meaning": FP32_MEANING, "overall": overall, "layers": layers}

    def _build_fp32_totals_document(self, totals: Fp32SizeStats | None) -> dict[str, Any]:
        if totals is None:
            return {}
        document = self.build_lane_entry(totals.sum_lanes()).to_dict()
        for part in PARTS:
            lanes = {lane: totals.lanes[part, lane] for lane in FP32_LANES}
            document[PART_LETTERS[part]] = {
                **self.build_lane_entry(totals.sum_lanes([part])).to_dict(),
                "framing_bytes": totals.extra_bytes[part],
                "lanes": {
                    str(n): {**self.build_lane_entry(lane).to_dict(), "modes": dict(lane.modes)}
                    for n, lane in lanes.items()
                },
            }
        return document

    def _format_fp32_lines(self) -> list[str]:
        """Format the sizes of fp32 words that the other figures count after rounding to fp16."""
        lines: list[str] = []
        if self.totals.is_fp32_counted:
            return lines
        labels_and_totals = [
            *((f"layer {n}", totals.fp32) for n, totals in self.totals_by_layer.items()),
            ("total", self.totals.fp32),
        ]
        for label, totals in labels_and_totals:
            if totals is None:
                continue
            lines.append(self.build_lane_entry(totals.sum_lanes()).format_line(f"{label} fp32"))
            for part in (part for part in PARTS if totals.sum_lanes([part]).raw_bytes):
                lines.append(
                    self.build_lane_entry(totals.sum_lanes([part])).format_line(f"  {PART_LETTERS[part].upper()}")
                )
                lines += [self.build_lane_entry(totals.lanes[part, n]).format_line(f"    lane {n}") for n in FP32_LANES]
        return lines

    def __str__(self) -> str:
        header = f"{'':<9} {'raw bytes':>13} {'simulated':>13} {'ratio':>6}"
        header += f" {'byte entropy':>13}" if self.has_limits else ""
        header += f" {'STORED':>13} {'ratio':>6}" if self.is_stored else ""
        lines = [header]
        for label, totals in [*((f"layer {n}", t) for n, t in self.totals_by_layer.items()), ("total", self.totals)]:
            lines.append(self.build_entry(totals).format_line(label))
            for part in (part for part in PARTS if totals.raw_bytes([part])):
                lines.append(self.build_entry(totals, [part]).format_line(f"  {PART_LETTERS[part].upper()}"))
                lanes: list[tuple[str, LaneSizeStats]] = [
                    (half, totals.lanes[format_lane(part, half)]) for half in LANE_HALVES
                ]
                lanes += [(f"lane {n}", totals.fp32_lanes[part, n]) for n in FP32_LANES if totals.fp32_lanes]
                lines += [
                    self.build_lane_entry(lane).format_line(f"    {name}") for name, lane in lanes if lane.raw_bytes
                ]
        lines += self._format_fp32_lines()
        lines += ["", f"total: {self._describe_scope()}", SIMULATED_MEANING]
        if self.has_limits:
            lines.append(f"byte entropy: {LIMIT_MEANING}")
        if self.totals.fp32:
            layers = sum(totals.fp32 is not None for totals in self.totals_by_layer.values())
            simulated_text = "" if self.totals.is_fp32_counted else "simulated too: "
            lines.append(f"fp32: {pluralize(layers, 'layer')}, {simulated_text}{FP32_MEANING}")
        return "\n".join([*lines, STORED_MEANING] if self.is_stored else lines)

    def _describe_scope(self) -> str:
        """Describe how many layers and tokens the total covers."""
        layers = pluralize(self.num_layers, "layer")
        if len(self.totals_by_layer) < self.num_layers:
            layers = f"{len(self.totals_by_layer):,} of {layers}"
        tokens = sorted({totals.tokens for totals in self.totals_by_layer.values()})
        return (
            f"{layers}, {format_range(tokens)} tokens{' each' if len(self.totals_by_layer) > 1 else ''}"
            if tokens
            else "nothing"
        )


class MemoryBudget:
    """A limit of bytes shared by threads; a worker that needs more than the limit waits until it is alone."""

    def __init__(self, nbytes: int) -> None:
        self._max_bytes = nbytes
        self._used_bytes = 0
        self._condition = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` are free, and reserve them inside the ``with`` block."""
        with self._condition:
            self._condition.wait_for(lambda: self._used_bytes == 0 or self._used_bytes + nbytes <= self._max_bytes)
            self._used_bytes += nbytes
        try:
            yield
        finally:
            with self._condition:
                self._used_bytes -= nbytes
                self._condition.notify_all()


SCHEMA_VERSION = 3
CODEC_NAME = "fp16_gear_predictive_zstd"


@dataclass(frozen=True, kw_only=True)
class MeasureResult(Record):
    """Sizes of all measured dumps."""

    rows_path = "breakdown.layers"

    def to_tables(self) -> list[Table]:
        """Return the sizes by layer and part."""
        report = self.size_report
        items: list[tuple[str, SizeEntry]] = []
        for label, totals in [
            *((f"layer {n}", totals) for n, totals in report.totals_by_layer.items()),
            ("total", report.totals),
        ]:
            items.append((label, report.build_entry(totals)))
            items += [(f"{label}, {PART_LETTERS[part].upper()}", report.build_entry(totals, [part])) for part in PARTS]
        columns = [
            *_SIZE_COLUMNS[:4],
            *(_SIZE_COLUMNS[4:5] if report.has_limits else ()),
            *(_SIZE_COLUMNS[5:] if report.is_stored else ()),
        ]
        return [Table.from_items(self.label, columns, items)]

    json_keys = (
        "label notes evaluation=_reference_document breakdown=size_report "
        "skipped_files=selection.skip_examples **selection.coded_input completeness break_even"
    )

    #: The directories or files, named as in the documents.
    inputs: list[str]
    #: What was requested and what was found; `selection.skipped` includes inputs that could not be compressed.
    options: MeasureOptions
    selection: DumpSelection
    #: Number of groups if dumps are grouped; number of chunks of K and V if dumps are split.
    num_groups: int
    num_chunks: int
    #: Total sizes, and sizes by layer number.
    totals: AggregateSizeStats
    totals_by_layer: dict[int, AggregateSizeStats]
    #: Whether frames were encoded as well.
    is_stored: bool
    #: Where codecs and prefixes pay; only if it was measured.
    break_even: BreakEvenReport | None = field(default=None, metadata={"omit": True})

    @property
    def label(self) -> str:
        """How the sizes were obtained.

        ``"LOSSY"`` if fp32 elements were rounded first, ``"LOSSLESS"`` if frames of everything were decoded and
        compared, and ``"SIMULATED"`` if no frames were encoded.
        """
        if self.selection.num_rounded:
            return LOSSY
        return LOSSLESS if self.is_stored and self.totals.stored_sizes else SIMULATED

    @property
    def notes(self) -> list[str]:
        """Lines that qualify the sizes."""
        coded_bytes = self.totals.stored_bytes() if self.is_stored else self.totals.simulated_bytes()
        lines = self.selection.coded_input.describe(
            self.totals.raw_bytes(), coded_bytes, "STORED" if self.is_stored else "simulated"
        )
        return lines if self.totals.raw_bytes(["value"]) else [*lines, "of K alone: nothing is stored as V"]

    @property
    def size_report(self) -> SizeReport:
        """Sizes by layer, part and byte lane."""
        return SizeReport(
            totals=self.totals,
            totals_by_layer=self.totals_by_layer,
            num_layers=len(self.selection.layers),
            has_limits=self.options.limits,
            is_stored=self.is_stored,
        )

    @property
    def _reference_document(self) -> dict[str, Any]:
        return build_reference_document(self)

    @property
    @json_key(omit=True)
    def completeness(self) -> Completeness | None:
        """The part of the model's state that the arrays contain; None if unknown."""
        return self.selection.completeness

    def __str__(self) -> str:
        lines = [str(self.size_report), *format_missing(self.selection.completeness), *self.notes]
        if self.selection.num_fp32:
            lines.append("fp32 is measured as fp32; the evaluation rounds it to fp16 first, as --to-fp16 does")
        if num_rounded := self.selection.num_rounded:
            lines.append(f"{LOSSY}: {num_rounded:,} fp32 entries were rounded to fp16 before anything else")
        if self.options.fp32 and self.totals.fp32 is None:
            lines.append("--fp32: no fp32 words were measured")
        lines += [
            f"skipped: {number:,} {name}{self._format_example(name)}"
            for name, number in sorted(self.selection.skip_counts.items())
        ]
        lines += ["", str(self.break_even)] if self.break_even is not None else []
        return "\n".join(lines)

    def _format_example(self, reason: str) -> str:
        """Format the first file that was skipped for a reason."""
        example, skip_count = self.selection.skip_examples.get(reason), self.selection.skip_counts[reason]
        return "" if example is None else f" ({example}{', ...' if skip_count > 1 else ''})"


def build_reference_document(result: MeasureResult) -> dict[str, Any]:
    """Build the JSON document of the reference's tool (`SCHEMA_VERSION`); ``dump_dir`` may be a list."""
    options, selection, totals = result.options, result.selection, result.totals
    scope = options.scope
    raw_bytes_by_part = {PART_LETTERS[part]: totals.raw_bytes([part]) for part in PARTS}
    compressed_bytes_by_part = {PART_LETTERS[part]: totals.simulated_bytes([part]) for part in PARTS}
    overall_ratio = compute_ratio(sum(raw_bytes_by_part.values()), sum(compressed_bytes_by_part.values()))
    return {
        "schema_version": SCHEMA_VERSION,
        "dump_dir": result.inputs[0] if len(result.inputs) == 1 else result.inputs,
        "stage": scope.stage,
        "scope": scope.scope,
        "front_n": scope.front_n,
        "layer_start": scope.layer_start,
        "layer_end": scope.layer_end,
        "layer_ids": list(scope.layer_ids),
        "selected_layers": sorted({entry.layer for entry in selection.entries}),
        "selected_entries": len(selection.entries),
        "selected_dumps": len(selection.dumps),
        "entry_mode": options.entry_mode,
        "online_chunk_seq": options.online_chunk_seq,
        "online_framing_bytes": options.online_framing_bytes,
        "aggregate_by_stage": options.aggregate_by_stage,
        "aggregate_groups": result.num_groups,
        "online_chunks": result.num_chunks,
        "codec": CODEC_NAME,
        "codec_mode": options.codec_mode,
        "bitshuffle": options.bitshuffle,
        "adaptive_block_seq": options.adaptive_block_seq,
        **{f"{lane}_predictors": list(options.predictors.get_lane(lane)) for lane in LANES},
        "zstd_level": options.zstd_level,
        "k_raw_bytes": raw_bytes_by_part["k"],
        "k_compressed_bytes": compressed_bytes_by_part["k"],
        "v_raw_bytes": raw_bytes_by_part["v"],
        "v_compressed_bytes": compressed_bytes_by_part["v"],
        "k_chunk_meta_bytes": totals.extra_bytes["key"],
        "v_chunk_meta_bytes": totals.extra_bytes["value"],
        "raw_bytes": sum(raw_bytes_by_part.values()),
        "compressed_bytes": sum(compressed_bytes_by_part.values()),
        "k_lossless_ratio": compute_ratio(raw_bytes_by_part["k"], compressed_bytes_by_part["k"]),
        "v_lossless_ratio": compute_ratio(raw_bytes_by_part["v"], compressed_bytes_by_part["v"]),
        "lossless_ratio": overall_ratio,
        "weighted_lossless_ratio": overall_ratio,
        **{f"{lane}_mode_counts": totals.count_modes(*parse_lane(lane)) for lane in LANES},
        "scanned_entries": selection.num_scanned,
        "converted_fp32_entries": selection.num_rounded,
        "skipped_entries": selection.skip_counts.total(),
        "skip_reasons": dict(selection.skip_counts),
    }


def format_reference_json(result: MeasureResult) -> str:
    """Format `build_reference_document` as JSON: ASCII, indented by two, without a newline at the end."""
    return json.dumps(build_reference_document(result), indent=2)


def format_reference_markdown(result: MeasureResult) -> str:
    """Format the Markdown summary of the reference's tool."""
    document = build_reference_document(result)

    def format_keys(keys: str, format_spec: str = "") -> list[str]:
        """A line for each key, which is its heading as well; values of quoted keys are quoted."""
        pairs = [(key, format(document[key.strip("`")], format_spec)) for key in keys.split()]
        return [
            f"- {key.strip('`').replace('_', ' ').capitalize()}: " + (f"`{text}`" if key.startswith("`") else text)
            for key, text in pairs
        ]

    inputs = "`, `".join(result.inputs)
    lines = [
        "# H2O v6 Offline Lossless Summary",
        "",
        f"- Dump dir: `{inputs}`",
        *format_keys("`stage` `scope` selected_entries selected_layers selected_dumps `entry_mode` online_chunk_seq"),
        *format_keys("online_framing_bytes `aggregate_by_stage` aggregate_groups online_chunks `codec_mode`"),
        *format_keys("`bitshuffle` zstd_level `codec`"),
        "",
        "## Ratios",
        "",
        *format_keys("k_lossless_ratio v_lossless_ratio", ".4f"),
        f"- Overall lossless ratio: {document['lossless_ratio']:.4f}",
        *format_keys("weighted_lossless_ratio", ".4f"),
        "",
        "## Bytes",
        "",
        *format_keys("k_raw_bytes k_compressed_bytes v_raw_bytes v_compressed_bytes"),
        f"- K chunk metadata bytes: {document['k_chunk_meta_bytes']}",
        f"- V chunk metadata bytes: {document['v_chunk_meta_bytes']}",
        f"- Total raw bytes: {document['raw_bytes']}",
        f"- Total compressed bytes: {document['compressed_bytes']}",
        "",
        "## Predictor Usage",
        "",
        *(f"- {lane[0].upper()} {lane[2:]} mode counts: {document[f'{lane}_mode_counts']}" for lane in LANES),
        "",
        "## Diagnostics",
        "",
        *format_keys("scanned_entries"),
        f"- Converted fp32->fp16 entries: {document['converted_fp32_entries']}",
        *format_keys("skipped_entries"),
    ]
    if document["skip_reasons"]:
        lines.append("- Skip reasons:")
        lines += [f"  - {name}: {count}" for name, count in sorted(document["skip_reasons"].items())]
    return escape_markdown("\n".join(lines)) + "\n"


MAX_MEMORY_BYTES = 320 << 20
"""Maximum bytes of anonymous memory for all streams that are measured at one time; one stream alone may exceed it."""

COMPRESSION_FAILED = "compression_failed"

_JobTarget = LaneHalf | int | None
"""A byte lane of 16-bit words, or of 32-bit ones by its number; None for frames, which contain all."""

_SizeResults = dict[tuple[int, Part, _JobTarget], StreamSizeEstimate | StoredSize]
"""By unit and part."""


class _MeasureJob(NamedTuple):
    unit_index: int
    part: Part
    target: _JobTarget
    estimated_cost: int
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
        Names of the data in the documents; without a `selection`, directories of MNN KV dumps.
    selection
        Result of `select_dumps` and `add_source`.
    options
        Options; None for the defaults.
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
        When an input is damaged, cannot be read or changes meanwhile. A dump whose file has another length than in its
        metadata is skipped instead, as in the reference.
    KvmnnError
        If a frame does not decode to its input, which would be a defect of kvmnn or of the machine.
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
    """Return the total of the bytes that `progress` is called with."""
    units = [unit for unit in build_units(selection, options) if unit.is_complete()]
    sizes = [(sum(map(unit.count_raw_bytes, PARTS)), options.fp32 and unit.is_rounded) for unit in units]
    return sum((1 + real + 2 * has_fp32_lanes) * nbytes for nbytes, has_fp32_lanes in sizes)


def _open_documents(
    stack: ExitStack, out_json: str | None, out_md: str | None, force: bool, protect: list[str]
) -> list[tuple[FileOutput, Callable[[MeasureResult], str]]]:
    """Open the output documents before anything is measured, each with the function that formats its text."""
    requested = [
        (Path(path), format_document)
        for path, format_document in ((out_json, format_reference_json), (out_md, format_reference_markdown))
        if path
    ]
    for path, _ in requested:
        if os.path.lexists(path) and not force:
            raise OutputError(f"{path}: exists already ({REPLACE_HINT} replaces it)")
    if len({os.path.realpath(path) for path, _ in requested}) < len(requested):
        raise OptionError(f"{out_json} and {out_md} name the same file")
    outputs: list[tuple[FileOutput, Callable[[MeasureResult], str]]] = []
    for path, format_document in requested:
        with wrap_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        outputs.append((stack.enter_context(FileOutput(path, force=force, exclude=protect)), format_document))
    return outputs


def _plan_jobs(units: list[CompressionUnit], options: MeasureOptions, real: bool) -> list[_MeasureJob]:
    """Plan the jobs, the largest first, so that no thread ends with a large one."""
    jobs = []
    for index, unit in enumerate(units):
        if not unit.is_complete():
            continue
        for part in unit.parts:
            nbytes, memory_bytes = unit.count_raw_bytes(part), estimate_memory_bytes(unit, part, options)
            if unit.get_itemsize(part) == 2:
                for half in LANE_HALVES:
                    num_predictors = len(options.predictors.get_lane(format_lane(part, half)))
                    estimated_cost = 2 * unit.count_elements(part) * num_predictors
                    jobs.append(_MeasureJob(index, part, half, estimated_cost, memory_bytes))
            if unit.get_itemsize(part) == 4 or (options.fp32 and unit.is_rounded):
                jobs.extend(
                    _MeasureJob(index, part, lane, 4 * unit.count_elements(part), memory_bytes) for lane in FP32_LANES
                )
            if real:
                jobs.append(_MeasureJob(index, part, None, 3 * nbytes, 3 * unit.count_chunk_bytes(part)))
    return sorted(jobs, key=lambda job: -job.estimated_cost)


def _run_jobs(
    jobs: list[_MeasureJob],
    units: list[CompressionUnit],
    options: MeasureOptions,
    threads: int,
    progress: Progress | None,
) -> _SizeResults:
    """Run the jobs, and return their results by unit, part and lane."""
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
