"""What a measurement gives: the two documents of the reference's tool, key for key and line for line, and more."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..arrays.completeness import build_completeness_document, format_missing
from ..dtypes import PART_LETTERS, PARTS
from ..text import LOSSLESS, LOSSY, SIMULATED, compute_ratio, escape_markdown
from .breakdown import SizeReport
from .options import LANES, MeasureOptions, parse_lane
from .selection import DumpSelection
from .totals import AggregateSizeStats

SCHEMA_VERSION = 3
CODEC_NAME = "fp16_gear_predictive_zstd"


@dataclass(frozen=True, kw_only=True)
class MeasureResult:
    """What came out.

    Parameters
    ----------
    inputs
        The directories or files, as the documents call them.
    options, selection
        What was asked for and what was found; `selection.skipped` includes what could not be compressed.
    num_groups, num_chunks
        Groups of dumps, where dumps are grouped; pieces of K and of V, where they are cut.
    totals, totals_by_layer
        Everything, and by layer number.
    is_stored
        Whether frames were made too.
    """

    inputs: list[str]
    options: MeasureOptions
    selection: DumpSelection
    num_groups: int
    num_chunks: int
    totals: AggregateSizeStats
    totals_by_layer: dict[int, AggregateSizeStats]
    is_stored: bool

    @property
    def label(self) -> str:
        """What the sizes are worth.

        ``"LOSSY"`` if fp32 words were rounded before anything was measured, ``"LOSSLESS"`` if frames of all that was
        measured were decoded and compared, and ``"SIMULATED"`` where nothing was made that could be.
        """
        if self.selection.num_rounded:
            return LOSSY
        return LOSSLESS if self.is_stored and self.totals.stored_sizes else SIMULATED

    @property
    def notes(self) -> list[str]:
        """What changes the meaning of the sizes, in lines."""
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

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "label": self.label,
            "notes": self.notes,
            "evaluation": build_reference_document(self),
            "breakdown": self.size_report.to_dict(),
            "skipped_files": self.selection.skip_examples,
            **self.selection.coded_input.to_dict(),
            **build_completeness_document(self.selection.completeness),
        }

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
        return "\n".join(lines)

    def _format_example(self, reason: str) -> str:
        """The first file that was left out for a reason."""
        example, skip_count = self.selection.skip_examples.get(reason), self.selection.skip_counts[reason]
        return "" if example is None else f" ({example}{', ...' if skip_count > 1 else ''})"


def build_reference_document(result: MeasureResult) -> dict[str, Any]:
    """The JSON document of the reference's tool (`SCHEMA_VERSION`); with several inputs ``dump_dir`` is a list."""
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
    """`build_reference_document` as text: ASCII, indented by two, no newline at the end."""
    return json.dumps(build_reference_document(result), indent=2)


def format_reference_markdown(result: MeasureResult) -> str:
    """The Markdown summary of the reference's tool."""
    document = build_reference_document(result)
    inputs = "`, `".join(result.inputs)
    lines = [
        "# H2O v6 Offline Lossless Summary",
        "",
        f"- Dump dir: `{inputs}`",
        f"- Stage: `{document['stage']}`",
        f"- Scope: `{document['scope']}`",
        f"- Selected entries: {document['selected_entries']}",
        f"- Selected layers: {document['selected_layers']}",
        f"- Selected dumps: {document['selected_dumps']}",
        f"- Entry mode: `{document['entry_mode']}`",
        f"- Online chunk seq: {document['online_chunk_seq']}",
        f"- Online framing bytes: {document['online_framing_bytes']}",
        f"- Aggregate by stage: `{document['aggregate_by_stage']}`",
        f"- Aggregate groups: {document['aggregate_groups']}",
        f"- Online chunks: {document['online_chunks']}",
        f"- Codec mode: `{document['codec_mode']}`",
        f"- Bitshuffle: `{document['bitshuffle']}`",
        f"- Zstd level: {document['zstd_level']}",
        f"- Codec: `{document['codec']}`",
        "",
        "## Ratios",
        "",
        f"- K lossless ratio: {document['k_lossless_ratio']:.4f}",
        f"- V lossless ratio: {document['v_lossless_ratio']:.4f}",
        f"- Overall lossless ratio: {document['lossless_ratio']:.4f}",
        f"- Weighted lossless ratio: {document['weighted_lossless_ratio']:.4f}",
        "",
        "## Bytes",
        "",
        f"- K raw bytes: {document['k_raw_bytes']}",
        f"- K compressed bytes: {document['k_compressed_bytes']}",
        f"- V raw bytes: {document['v_raw_bytes']}",
        f"- V compressed bytes: {document['v_compressed_bytes']}",
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
        f"- Scanned entries: {document['scanned_entries']}",
        f"- Converted fp32->fp16 entries: {document['converted_fp32_entries']}",
        f"- Skipped entries: {document['skipped_entries']}",
    ]
    if document["skip_reasons"]:
        lines.append("- Skip reasons:")
        lines += [f"  - {name}: {count}" for name, count in sorted(document["skip_reasons"].items())]
    return escape_markdown("\n".join(lines)) + "\n"
