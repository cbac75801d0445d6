"""What a measurement gives: the two documents of the reference's tool, key for key and line for line, and more."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..arrays.completeness import completeness_document, report_missing
from ..dtypes import PART_LETTERS, PARTS
from ..text import LOSSLESS, LOSSY, SIMULATED, escape_markdown, ratio
from .breakdown import Breakdown
from .options import LANES, MeasureOptions, part_and_half
from .selection import Selection
from .totals import Totals

SCHEMA_VERSION = 3
CODEC = "fp16_gear_predictive_zstd"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What came out.

    Parameters
    ----------
    inputs
        The directories or files, as the documents call them.
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

    @property
    def label(self) -> str:
        """What the sizes are worth.

        ``"LOSSY"`` if fp32 words were rounded before anything was measured, ``"LOSSLESS"`` if frames of all that was
        measured were decoded and compared, and ``"SIMULATED"`` where nothing was made that could be.
        """
        if self.selection.converted:
            return LOSSY
        return LOSSLESS if self.is_stored and self.totals.stored else SIMULATED

    @property
    def notes(self) -> list[str]:
        """What changes the meaning of the sizes, in lines."""
        coded = self.totals.stored_bytes() if self.is_stored else self.totals.simulated_bytes()
        lines = self.selection.coded.note(self.totals.raw_bytes(), coded, "STORED" if self.is_stored else "simulated")
        return lines if self.totals.raw_bytes(["value"]) else [*lines, "of K alone: nothing is stored as V"]

    @property
    def breakdown(self) -> Breakdown:
        """Sizes by layer, part and byte lane."""
        return Breakdown(
            overall=self.totals,
            layers=self.layers,
            found_layers=len(self.selection.layers),
            has_limits=self.options.limits,
            is_stored=self.is_stored,
        )

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "label": self.label,
            "notes": self.notes,
            "evaluation": to_document(self),
            "breakdown": self.breakdown.to_dict(),
            "skipped_files": self.selection.skipped_files,
            **self.selection.coded.to_dict(),
            **completeness_document(self.selection.completeness),
        }

    def __str__(self) -> str:
        lines = [str(self.breakdown), *report_missing(self.selection.completeness), *self.notes]
        if self.selection.fp32:
            lines.append("fp32 is measured as fp32; the evaluation rounds it to fp16 first, as --to-fp16 does")
        if converted := self.selection.converted:
            lines.append(f"{LOSSY}: {converted:,} fp32 entries were rounded to fp16 before anything else")
        if self.options.fp32 and self.totals.fp32 is None:
            lines.append("--fp32: no fp32 words were measured")
        lines += [
            f"skipped: {number:,} {name}{self._example(name)}"
            for name, number in sorted(self.selection.skipped.items())
        ]
        return "\n".join(lines)

    def _example(self, reason: str) -> str:
        """The first file that was left out for a reason."""
        where, number = self.selection.skipped_files.get(reason), self.selection.skipped[reason]
        return "" if where is None else f" ({where}{', ...' if number > 1 else ''})"


def to_document(measured: Measurement) -> dict[str, Any]:
    """The JSON document of the reference's tool (`SCHEMA_VERSION`); with several inputs ``dump_dir`` is a list."""
    options, selection, totals = measured.options, measured.selection, measured.totals
    scope = options.scope
    raw = {PART_LETTERS[part]: totals.raw_bytes([part]) for part in PARTS}
    compressed = {PART_LETTERS[part]: totals.simulated_bytes([part]) for part in PARTS}
    overall = ratio(sum(raw.values()), sum(compressed.values()))
    return {
        "schema_version": SCHEMA_VERSION,
        "dump_dir": measured.inputs[0] if len(measured.inputs) == 1 else measured.inputs,
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
        "aggregate_groups": measured.groups,
        "online_chunks": measured.chunks,
        "codec": CODEC,
        "codec_mode": options.codec_mode,
        "bitshuffle": options.bitshuffle,
        "adaptive_block_seq": options.adaptive_block_seq,
        **{f"{lane}_predictors": list(options.predictors.of(lane)) for lane in LANES},
        "zstd_level": options.zstd_level,
        "k_raw_bytes": raw["k"],
        "k_compressed_bytes": compressed["k"],
        "v_raw_bytes": raw["v"],
        "v_compressed_bytes": compressed["v"],
        "k_chunk_meta_bytes": totals.extra_bytes["key"],
        "v_chunk_meta_bytes": totals.extra_bytes["value"],
        "raw_bytes": sum(raw.values()),
        "compressed_bytes": sum(compressed.values()),
        "k_lossless_ratio": ratio(raw["k"], compressed["k"]),
        "v_lossless_ratio": ratio(raw["v"], compressed["v"]),
        "lossless_ratio": overall,
        "weighted_lossless_ratio": overall,
        **{f"{lane}_mode_counts": totals.modes(*part_and_half(lane)) for lane in LANES},
        "scanned_entries": selection.scanned,
        "converted_fp32_entries": selection.converted,
        "skipped_entries": selection.skipped.total(),
        "skip_reasons": dict(selection.skipped),
    }


def to_json(measured: Measurement) -> str:
    """`to_document` as text: ASCII, indented by two, no newline at the end."""
    return json.dumps(to_document(measured), indent=2)


def to_markdown(measured: Measurement) -> str:
    """The Markdown summary of the reference's tool."""
    made = to_document(measured)
    inputs = "`, `".join(measured.inputs)
    lines = [
        "# H2O v6 Offline Lossless Summary",
        "",
        f"- Dump dir: `{inputs}`",
        f"- Stage: `{made['stage']}`",
        f"- Scope: `{made['scope']}`",
        f"- Selected entries: {made['selected_entries']}",
        f"- Selected layers: {made['selected_layers']}",
        f"- Selected dumps: {made['selected_dumps']}",
        f"- Entry mode: `{made['entry_mode']}`",
        f"- Online chunk seq: {made['online_chunk_seq']}",
        f"- Online framing bytes: {made['online_framing_bytes']}",
        f"- Aggregate by stage: `{made['aggregate_by_stage']}`",
        f"- Aggregate groups: {made['aggregate_groups']}",
        f"- Online chunks: {made['online_chunks']}",
        f"- Codec mode: `{made['codec_mode']}`",
        f"- Bitshuffle: `{made['bitshuffle']}`",
        f"- Zstd level: {made['zstd_level']}",
        f"- Codec: `{made['codec']}`",
        "",
        "## Ratios",
        "",
        f"- K lossless ratio: {made['k_lossless_ratio']:.4f}",
        f"- V lossless ratio: {made['v_lossless_ratio']:.4f}",
        f"- Overall lossless ratio: {made['lossless_ratio']:.4f}",
        f"- Weighted lossless ratio: {made['weighted_lossless_ratio']:.4f}",
        "",
        "## Bytes",
        "",
        f"- K raw bytes: {made['k_raw_bytes']}",
        f"- K compressed bytes: {made['k_compressed_bytes']}",
        f"- V raw bytes: {made['v_raw_bytes']}",
        f"- V compressed bytes: {made['v_compressed_bytes']}",
        f"- K chunk metadata bytes: {made['k_chunk_meta_bytes']}",
        f"- V chunk metadata bytes: {made['v_chunk_meta_bytes']}",
        f"- Total raw bytes: {made['raw_bytes']}",
        f"- Total compressed bytes: {made['compressed_bytes']}",
        "",
        "## Predictor Usage",
        "",
        *(f"- {lane[0].upper()} {lane[2:]} mode counts: {made[f'{lane}_mode_counts']}" for lane in LANES),
        "",
        "## Diagnostics",
        "",
        f"- Scanned entries: {made['scanned_entries']}",
        f"- Converted fp32->fp16 entries: {made['converted_fp32_entries']}",
        f"- Skipped entries: {made['skipped_entries']}",
    ]
    if made["skip_reasons"]:
        lines.append("- Skip reasons:")
        lines += [f"  - {name}: {count}" for name, count in sorted(made["skip_reasons"].items())]
    return escape_markdown("\n".join(lines)) + "\n"
