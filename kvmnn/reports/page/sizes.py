"""Ratios over layers with the entropy of their bytes, memory over time, and codecs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from ...text import pluralize
from .blocks import (
    Block,
    Cell,
    ChartBlock,
    ChartPoint,
    ChartSeries,
    Paragraph,
    Section,
    TableBlock,
    make_missing_note,
    make_number_cell,
)
from .material import ReportInputs
from .records import CodecArrayResult, CodecsRecord, EvaluationRecord, LayerSizeStats, MeasurementRecord, ReplayRecord

_BYTES_PER_MIB = float(1 << 20)
_MAX_ARRAY_ROWS = 40


def build_layers_section(inputs: ReportInputs) -> Section:
    """Lossless ratios layer by layer."""
    blocks: list[Block] = []
    for name, measurement in inputs.measurements:
        blocks += _build_measurement_blocks(name, measurement)
    for name, replay in inputs.replays:
        if any(layer.raw_bytes for layer in replay.metrics.layers):
            blocks += _build_replay_layer_blocks(name, replay)
    if not blocks:
        blocks = [
            make_missing_note(
                "Ratios over layers: not measured. kvmnn measure DUMP --json > DIR/measure.json has them."
            )
        ]
    return Section("layers", "Lossless ratios over layers", blocks)


def _build_measurement_blocks(name: str, measurement: MeasurementRecord) -> list[Block]:
    totals, size_report = measurement.evaluation, measurement.breakdown
    if size_report is None:
        text = (
            f"{name}: lossless ratio {totals.weighted_lossless_ratio:.4f} (K {totals.k_lossless_ratio:.4f}, V "
            f"{totals.v_lossless_ratio:.4f}), simulated: {totals.raw_bytes:,} over {totals.compressed_bytes:,} bytes. "
            "Its layers are not measured: --json has them, --out-json does not."
        )
        return [Paragraph(text)]
    blocks: list[Block] = []
    if measurement.label == "LOSSY":
        blocks.append(Paragraph(f"{name}: the words were rounded to fp16 before they were measured, which is LOSSY."))
    layers = [
        (_parse_layer_number(key, layer_index), layer)
        for layer_index, (key, layer) in enumerate(size_report.layers.items())
    ]
    if layers:
        blocks.append(_build_layer_chart(name, layers))
    rows = [
        _make_layer_cells(f"{layer_number}", layer_number, layer, layer.tokens) for layer_number, layer in layers[:200]
    ]
    overall_sizes = size_report.overall
    total_cells: list[Cell] = [Cell("all", float("inf")), Cell("-"), make_number_cell(overall_sizes.raw_bytes, 0)]
    total_cells += [
        make_number_cell(overall_sizes.simulated_ratio, 4),
        make_number_cell(overall_sizes.limit_ratio, 4),
        make_number_cell(overall_sizes.stored_ratio, 4),
    ]
    total_cells += [Cell("-", None, "muted")] * 4
    columns = (
        "layer", "tokens", "raw bytes", "simulated", "byte entropy", "STORED", "K STORED", "K byte entropy", "V STORED",
        "V byte entropy",
    )  # fmt: skip
    is_simulated = all(layer.k.stored_ratio is None for _, layer in layers)
    if is_simulated:
        columns = (*columns[:6], "K simulated", "K byte entropy", "V simulated", "V byte entropy")
    note = " ".join(
        f"{meaning if meaning.lower().startswith(key) else f'{key}: {meaning}'}."
        for key, meaning in size_report.meaning.items()
    )
    table = TableBlock(f"{name}: ratios by layer", columns, [*rows, total_cells], frozenset(), False, note)
    return [*blocks, table]


def _parse_layer_number(key: str, fallback: int) -> int:
    """The number of a layer, which is a key in JSON."""
    return int(key) if key.isdecimal() and len(key) < 10 else fallback


def _make_layer_cells(label: str, layer_number: int, layer: LayerSizeStats, tokens: int) -> list[Cell]:
    k, v = layer.k, layer.v
    return [
        Cell(label, layer_number), Cell(f"{tokens:,}", tokens), make_number_cell(layer.raw_bytes, 0),
        make_number_cell(layer.simulated_ratio, 4),
        make_number_cell(layer.limit_ratio, 4), make_number_cell(layer.stored_ratio, 4),
        make_number_cell(k.stored_ratio if k.stored_ratio is not None else k.simulated_ratio, 4),
        make_number_cell(k.limit_ratio, 4),
        make_number_cell(v.stored_ratio if v.stored_ratio is not None else v.simulated_ratio, 4),
        make_number_cell(v.limit_ratio, 4),
    ]  # fmt: skip


def _build_layer_chart(name: str, layers: Sequence[tuple[int, LayerSizeStats]]) -> ChartBlock:
    is_stored = all(layer.k.stored_ratio is not None and layer.v.stored_ratio is not None for _, layer in layers)
    kind = "STORED" if is_stored else "simulated"
    series = []
    for style_number, part in enumerate(("k", "v")):
        sizes = [(layer_index, getattr(layer, part)) for layer_index, layer in layers]
        ratio_points = [
            ChartPoint(
                layer_number, part_sizes.stored_ratio if is_stored else part_sizes.simulated_ratio, name=part.upper()
            )
            for layer_number, part_sizes in sizes
        ]
        series.append(ChartSeries(f"{part.upper()}, {kind}", ratio_points, style_number))
        limit_points = [
            ChartPoint(layer_number, part_sizes.limit_ratio, name=f"{part.upper()} byte entropy")
            for layer_number, part_sizes in sizes
            if part_sizes.limit_ratio
        ]
        if limit_points:
            series.append(
                ChartSeries(
                    f"{part.upper()}, byte entropy", limit_points, style_number, is_dashed=True, has_markers=False
                )
            )
    summary = (
        f"Ratio of raw over compressed bytes of K and V by layer, from {name}; dashed: the entropy of their bytes."
    )
    return ChartBlock("Lossless ratio by layer", summary, "layer", "raw over compressed", series,
                      has_integer_x=True, digits=4, starts_at_zero=False)  # fmt: skip


def _build_replay_layer_blocks(name: str, replay: ReplayRecord) -> list[Block]:
    layers = [layer for layer in replay.metrics.layers if layer.compressed_bytes]
    points = [ChartPoint(layer.layer, layer.raw_bytes / layer.compressed_bytes) for layer in layers]
    chart = ChartBlock(
        "Encoded ratio by layer in a replay",
        f"Raw over compressed bytes of what the runtime encoded, by layer, from {name}.",
        "layer", "raw over compressed", [ChartSeries("encoded", points, 0)], has_integer_x=True, starts_at_zero=False,
    )  # fmt: skip
    rows = [
        [
            Cell(f"{layer.layer}", layer.layer), make_number_cell(layer.tokens, 0), make_number_cell(layer.raw_bytes,
            0),
            make_number_cell(layer.compressed_bytes, 0),
            make_number_cell(layer.raw_bytes / layer.compressed_bytes if layer.compressed_bytes else None),
            make_number_cell(layer.held_bytes, 0),
        ]
        for layer in replay.metrics.layers[:200]
    ]  # fmt: skip
    columns = ("layer", "tokens", "encoded bytes", "compressed bytes", "encoded ratio", "held bytes")
    return [chart, TableBlock(f"{name}: layers of the replay", columns, rows, frozenset())]


def build_memory_section(inputs: ReportInputs) -> Section:
    """Bytes held, step by step."""
    blocks: list[Block] = []
    for name, replay in inputs.replays:
        blocks += _build_replay_memory_blocks(name, replay)
    for name, evaluation in inputs.evaluations:
        blocks += _build_evaluation_memory_blocks(name, evaluation)
    if not blocks:
        text = (
            "Memory over time: not measured. kvmnn replay --json and kvmnn eval --plot DIR -o RESULTS.json record it."
        )
        blocks = [make_missing_note(text)]
    return Section("memory", "Memory over time", blocks)


def _build_replay_memory_blocks(name: str, replay: ReplayRecord) -> list[Block]:
    if not replay.points:
        return [make_missing_note(f"{name}: memory over time: not measured, the replay has no steps.")]
    series = []
    for style_number, (label, key) in enumerate(
        (("all tokens, raw", "appended_bytes"), ("tokens that are left, raw", "live_bytes"), ("held", "held_bytes"))
    ):
        points = [ChartPoint(step.tokens, getattr(step, key) / _BYTES_PER_MIB, name=label) for step in replay.points]
        series.append(ChartSeries(label, points, style_number, is_dashed=style_number == 0, has_markers=False))
    last_step = replay.points[-1]
    chart = ChartBlock(
        "Memory of a replay",
        f"K and V of all layers over the tokens, from {name}: at the end {last_step.held_bytes / _BYTES_PER_MIB:.2f} "
        f"MiB hold "
        f"{last_step.live_bytes / _BYTES_PER_MIB:.2f} MiB.",
        "tokens", "MiB, all layers", series, has_integer_x=True,
    )  # fmt: skip
    metrics = replay.metrics
    held_text, total = (
        "not measured" if figure is None else f"{figure:.3f}"
        for figure in (metrics.lossless_ratio, metrics.total_ratio)
    )
    coded_text = f"{metrics.h2o_lossless_ratio:.3f}" if metrics.h2o_lossless_raw_bytes else "not measured"
    text = (
        f"{name}: {pluralize(replay.layers, 'layer')}, {replay.prompt:,} tokens as prompt, {replay.tokens:,} in all. "
        f"Lossy "
        f"{metrics.lossy_ratio:.3f}, held {held_text}, in all {total}; of what was "
        f"encoded {coded_text}; {pluralize(metrics.h2o_lossless_fallback_count, 'fallback')}."
    )
    return [Paragraph(text), chart]


def _build_evaluation_memory_blocks(name: str, evaluation: EvaluationRecord) -> list[Block]:
    traces = [trace for trace in evaluation.traces if trace.cache_bytes][:8]
    if not traces:
        return [
            make_missing_note(
                f"{name}: memory over time: not measured. kvmnn eval --plot records the course of a text."
            )
        ]
    series = []
    for style_number, trace in enumerate(traces):
        steps = zip(trace.step_tokens, trace.cache_bytes, strict=False)
        points = [ChartPoint(tokens, size / _BYTES_PER_MIB, name=trace.label) for tokens, size in steps]
        series.append(
            ChartSeries(trace.label, points, style_number, is_dashed=style_number % 2 == 1, has_markers=False)
        )
    more_text = f" {len(evaluation.traces) - 8:,} more are not drawn." if len(evaluation.traces) > 8 else ""
    summary = f"K and V held over the tokens of {traces[0].document}, from {name}, a line for each policy.{more_text}"
    if len({trace.cache_bytes for trace in traces}) < len(traces):
        summary += " Policies that hold the same lie over each other."
    return [
        ChartBlock("Memory of an evaluation", summary, "tokens seen", "MiB, all layers", series, has_integer_x=True)
    ]


def build_codecs_section(inputs: ReportInputs) -> Section:
    """Ratios and speeds of codecs."""
    blocks: list[Block] = []
    for name, codecs in inputs.codecs:
        blocks += _build_codec_blocks(name, codecs)
    if not blocks:
        blocks = [
            make_missing_note("Codecs side by side: not measured. kvmnn bench FILES --json > DIR/bench.json has them.")
        ]
    return Section("codecs", "Codecs side by side", blocks)


def _build_codec_blocks(name: str, codecs: CodecsRecord) -> list[Block]:
    names = list(dict.fromkeys(result.codec for array in codecs.arrays for result in array.results))[:40]
    rows, points = [], list[ChartSeries]()
    for codec in names:
        results = [result for array in codecs.arrays for result in array.results if result.codec == codec]
        successes = [result for result in results if result.error is None and result.ratio is not None]
        raw_bytes, stored_bytes = (
            sum(success.raw_bytes for success in successes),
            sum(success.stored_bytes for success in successes),
        )
        ratio = raw_bytes / stored_bytes if stored_bytes else None
        speeds = [
            _compute_total_speed([(success.raw_bytes, getattr(success, key)) for success in successes])
            for key in _SPEED_KEYS
        ]
        errors = len(results) - len(successes)
        rows.append([
            Cell(codec), make_number_cell(ratio, 4), *map(_make_rate_cell, speeds),
            Cell(f"{len(successes)}", len(successes)),
            Cell(f"{errors}", errors, "bad" if errors else "") if errors else Cell("0", 0),
        ])  # fmt: skip
        if ratio is not None and speeds[0] is not None:
            points.append(
                ChartSeries(codec, [ChartPoint(speeds[0] / 1e6, ratio, name=codec)], len(points), has_line=False)
            )
    columns = ("codec", "ratio", "encode MB/s", "decode MB/s", "arrays", "failed")
    note = (
        f"Sums over {pluralize(len(codecs.arrays), 'array')}; speeds: raw bytes over processor time, medians of the "
        f"rounds "
        f"of each array, {pluralize(codecs.threads, 'thread')}; every round trip was compared. MB are 10^6 bytes."
    )
    blocks: list[Block] = []
    if 0 < len(points) <= 12:
        summary = f"Ratio over encode speed, from {name}: better is up and right."
        blocks.append(
            ChartBlock(
                "Ratio over encode speed",
                summary,
                "encode MB/s",
                "ratio",
                points,
                is_log_x=True,
                starts_at_zero=False,
                digits=2,
            )
        )
    blocks.append(TableBlock(f"{name}: codecs", columns, rows, frozenset({0}), False, note))
    blocks.append(_build_array_table(name, codecs.arrays))
    return blocks


_SPEED_KEYS = ("encode_bytes_per_s_cpu", "decode_bytes_per_s_cpu")


def _make_rate_cell(speed: float | None) -> Cell:
    """Bytes a second as MB/s."""
    return make_number_cell(speed, 0 if (speed or 0) >= 100e6 else 1, scale=1e-6)


def _compute_total_speed(pairs: Sequence[tuple[int, float | None]]) -> float | None:
    """Bytes a second over all arrays; None where one has no speed."""
    seconds = [nbytes / speed for nbytes, speed in pairs if speed]
    return sum(nbytes for nbytes, _ in pairs) / sum(seconds) if seconds and len(seconds) == len(pairs) else None


def _build_array_table(name: str, arrays: Sequence[CodecArrayResult]) -> TableBlock:
    rows = []
    for array in arrays[:_MAX_ARRAY_ROWS]:
        successes = [
            array_result
            for array_result in array.results
            if array_result.error is None and array_result.ratio is not None
        ]
        best = max(successes, key=lambda array_result: array_result.ratio or 0.0, default=None)
        rows.append([
            Cell(array.name), Cell(array.dtype), make_number_cell(array.array_bytes, 0),
            make_number_cell(array.entropy_ratio, 4),
            make_number_cell(None if best is None else best.ratio, 4), Cell("-" if best is None else best.codec),
        ])  # fmt: skip
    num_hidden = len(arrays) - len(rows)
    note = f"{num_hidden:,} more arrays are in {name}." if num_hidden > 0 else ""
    columns = ("array", "type", "bytes", "byte entropy", "best ratio", "by")
    return TableBlock(
        f"{name}: arrays and the entropy of their bytes", columns, rows, frozenset({0, 1, 5}), False, note
    )
