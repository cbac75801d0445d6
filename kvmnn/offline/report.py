"""The two documents of the seeds' tool, key for key and line for line, and kvmnn's own, which says more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .measuring import LaneTotal, Measurement, Totals
from .options import LANES
from .units import PARTS

SCHEMA_VERSION = 3
CODEC = "fp16_gear_predictive_zstd"
SIMULATED = "simulated: zstd frames were made and their lengths added up; no such file exists"
STORED = "STORED: frames as MNN makes them were encoded, decoded and compared: LOSSLESS for the 16-bit words measured"
LIMIT = "order-0 entropy of the byte lanes as they are; what uses neighbours (predictors, matches) can go below"


def ratio(raw_bytes: float, compressed_bytes: float) -> float:
    """Raw over compressed bytes; 0 where there are none."""
    return raw_bytes / compressed_bytes if compressed_bytes > 0 else 0.0


def to_document(measured: Measurement) -> dict[str, Any]:
    """The seeds' JSON document (`SCHEMA_VERSION`); ``dump_dir`` is a list where there are several inputs."""
    options, selection, totals = measured.options, measured.selection, measured.totals
    scope = options.scope
    raw = {part: totals.raw_bytes([part]) for part in PARTS}
    compressed = {part: totals.simulated_bytes([part]) for part in PARTS}
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
        "k_chunk_meta_bytes": totals.extra_bytes["k"],
        "v_chunk_meta_bytes": totals.extra_bytes["v"],
        "raw_bytes": sum(raw.values()),
        "compressed_bytes": sum(compressed.values()),
        "k_lossless_ratio": ratio(raw["k"], compressed["k"]),
        "v_lossless_ratio": ratio(raw["v"], compressed["v"]),
        "lossless_ratio": overall,
        "weighted_lossless_ratio": overall,
        **{f"{lane}_mode_counts": dict(totals.lanes[lane].modes) for lane in LANES},
        "scanned_entries": selection.scanned,
        "converted_fp32_entries": selection.converted,
        "skipped_entries": selection.skipped.total(),
        "skip_reasons": dict(selection.skipped),
    }


def to_json(measured: Measurement) -> str:
    """`to_document` as text: ASCII, indented by two, no newline at the end."""
    return json.dumps(to_document(measured), indent=2)


def to_markdown(measured: Measurement) -> str:
    """The seeds' summary in Markdown."""
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
    return "\n".join(lines) + "\n"


# -- what kvmnn adds -------------------------------------------------------------------------------------------------


def to_breakdown(measured: Measurement) -> dict[str, Any]:
    """Sizes by layer, part and byte lane, each with its entropy limit, and which numbers are simulated or stored."""
    meaning = {"simulated": SIMULATED}
    if measured.options.limits:
        meaning["limit"] = LIMIT
    if measured.is_stored:
        meaning["stored"] = STORED
    return {
        "meaning": meaning,
        "overall": _totals(measured.totals, measured),
        "layers": {str(layer): _totals(totals, measured) for layer, totals in measured.layers.items()},
    }


def _totals(totals: Totals, measured: Measurement) -> dict[str, Any]:
    parts = {part: _part(totals, part, measured) for part in PARTS}
    return {**_sizes(totals, PARTS, measured), **parts}


def _part(totals: Totals, part: str, measured: Measurement) -> dict[str, Any]:
    lanes = {lane: _lane(totals.lanes[f"{part}_{lane}"], measured) for lane in ("hi", "lo")}
    return {**_sizes(totals, [part], measured), "framing_bytes": totals.extra_bytes[part], "lanes": lanes}


def _sizes(totals: Totals, parts: Sequence[str], measured: Measurement) -> dict[str, Any]:
    raw = totals.raw_bytes(parts)
    found = _size(raw, totals.simulated_bytes(parts), totals.limit_bytes(parts), measured)
    if measured.is_stored:
        stored = totals.stored_bytes(parts)
        frames = sum(totals.stored[part].frames for part in parts if part in totals.stored)
        found |= {"stored_bytes": stored, "stored_ratio": ratio(raw, stored), "stored_frames": frames, "verified": True}
    return found


def _lane(lane: LaneTotal, measured: Measurement) -> dict[str, Any]:
    return {**_size(lane.raw_bytes, lane.simulated_bytes, lane.limit_bytes, measured), "modes": dict(lane.modes)}


def _size(raw: int, simulated: int, limit: float, measured: Measurement) -> dict[str, Any]:
    found = {"raw_bytes": raw, "simulated_bytes": simulated, "simulated_ratio": ratio(raw, simulated)}
    if not measured.options.limits:
        return found
    return {**found, "limit_bytes": limit, "limit_ratio": raw / limit if limit > 0 else None}


def to_table(measured: Measurement) -> str:
    """The breakdown for people."""
    header = f"{'':<12} {'raw bytes':>15} {'simulated':>15} {'ratio':>8}"
    header += f" {'order-0 limit':>13}" if measured.options.limits else ""
    header += f" {'STORED':>15} {'ratio':>8}" if measured.is_stored else ""
    lines = [header]
    for label, totals in [*((f"layer {n}", t) for n, t in measured.layers.items()), ("all", measured.totals)]:
        whole = _totals(totals, measured)
        lines.append(_line(label, whole))
        for part in PARTS:
            lines.append(_line(f"  {part.upper()}", whole[part]))
            lines += [_line(f"    {lane}", whole[part]["lanes"][lane]) for lane in ("hi", "lo")]
    lines += ["", SIMULATED]
    if measured.options.limits:
        lines.append(f"limit: {LIMIT}")
    if measured.is_stored:
        lines.append(STORED)
    if measured.selection.converted:
        lines.append(f"LOSSY: {measured.selection.converted:,} fp32 entries were rounded to fp16 before anything else")
    return "\n".join(lines)


def _line(label: str, size: dict[str, Any]) -> str:
    line = f"{label:<12} {size['raw_bytes']:>15,} {size['simulated_bytes']:>15,} {size['simulated_ratio']:>8.4f}"
    if "limit_ratio" in size:
        limit = size["limit_ratio"]
        line += f" {'none' if limit is None else f'{limit:.4f}':>13}"
    if "stored_bytes" in size:
        line += f" {size['stored_bytes']:>15,} {size['stored_ratio']:>8.4f}"
    return line
