"""Ratios over layers with the entropy of their bytes, memory over time, and codecs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from ...text import count
from .blocks import Block, Cell, Chart, Point, Section, Series, Table, Text, missing, number
from .material import Material
from .records import CodecArray, Codecs, Evaluation, LayerSizes, Measured, Replayed

_MIB = float(1 << 20)
_MOST_ARRAYS = 40


def layers_section(found: Material) -> Section:
    """Lossless ratios layer by layer."""
    blocks: list[Block] = []
    for name, measured in found.measured:
        blocks += _measured(name, measured)
    for name, replay in found.replays:
        if any(layer.raw_bytes for layer in replay.metrics.layers):
            blocks += _replayed_layers(name, replay)
    if not blocks:
        blocks = [missing("Ratios over layers: not measured. kvmnn measure DUMP --json > DIR/measure.json has them.")]
    return Section("layers", "Lossless ratios over layers", blocks)


def _measured(name: str, measured: Measured) -> list[Block]:
    totals, parts = measured.evaluation, measured.breakdown
    if parts is None:
        text = (
            f"{name}: lossless ratio {totals.weighted_lossless_ratio:.4f} (K {totals.k_lossless_ratio:.4f}, V "
            f"{totals.v_lossless_ratio:.4f}), simulated: {totals.raw_bytes:,} over {totals.compressed_bytes:,} bytes. "
            "Its layers are not measured: --json has them, --out-json does not."
        )
        return [Text(text)]
    blocks: list[Block] = []
    if measured.label == "LOSSY":
        blocks.append(Text(f"{name}: the words were rounded to fp16 before they were measured, which is LOSSY."))
    layers = [(_place(key, place), layer) for place, (key, layer) in enumerate(parts.layers.items())]
    if layers:
        blocks.append(_layer_chart(name, layers))
    rows = [_layer_row(f"{number_}", number_, layer, layer.tokens) for number_, layer in layers[:200]]
    whole = parts.overall
    total: list[Cell] = [Cell("all", float("inf")), Cell("-"), number(whole.raw_bytes, 0)]
    total += [number(whole.simulated_ratio, 4), number(whole.limit_ratio, 4), number(whole.stored_ratio, 4)]
    total += [Cell("-", None, "muted")] * 4
    columns = (
        "layer", "tokens", "raw bytes", "simulated", "byte entropy", "STORED", "K STORED", "K byte entropy", "V STORED",
        "V byte entropy",
    )  # fmt: skip
    simulated = all(layer.k.stored_ratio is None for _, layer in layers)
    if simulated:
        columns = (*columns[:6], "K simulated", "K byte entropy", "V simulated", "V byte entropy")
    note = " ".join(
        f"{said if said.lower().startswith(key) else f'{key}: {said}'}." for key, said in parts.meaning.items()
    )
    table = Table(f"{name}: ratios by layer", columns, [*rows, total], frozenset(), False, note)
    return [*blocks, table]


def _place(key: str, otherwise: int) -> int:
    """The number of a layer, which is a key in JSON."""
    return int(key) if key.isdecimal() and len(key) < 10 else otherwise


def _layer_row(label: str, place: int, layer: LayerSizes, tokens: int) -> list[Cell]:
    k, v = layer.k, layer.v
    return [
        Cell(label, place), Cell(f"{tokens:,}", tokens), number(layer.raw_bytes, 0), number(layer.simulated_ratio, 4),
        number(layer.limit_ratio, 4), number(layer.stored_ratio, 4),
        number(k.stored_ratio if k.stored_ratio is not None else k.simulated_ratio, 4), number(k.limit_ratio, 4),
        number(v.stored_ratio if v.stored_ratio is not None else v.simulated_ratio, 4), number(v.limit_ratio, 4),
    ]  # fmt: skip


def _layer_chart(name: str, layers: Sequence[tuple[int, LayerSizes]]) -> Chart:
    stored = all(layer.k.stored_ratio is not None and layer.v.stored_ratio is not None for _, layer in layers)
    kind = "STORED" if stored else "simulated"
    series = []
    for look, part in enumerate(("k", "v")):
        sizes = [(place, getattr(layer, part)) for place, layer in layers]
        here = [Point(at, one.stored_ratio if stored else one.simulated_ratio, name=part.upper()) for at, one in sizes]
        series.append(Series(f"{part.upper()}, {kind}", here, look))
        limit = [
            Point(at, one.limit_ratio, name=f"{part.upper()} byte entropy") for at, one in sizes if one.limit_ratio
        ]
        if limit:
            series.append(Series(f"{part.upper()}, byte entropy", limit, look, dashed=True, marker=False))
    said = f"Ratio of raw over compressed bytes of K and V by layer, from {name}; dashed: the entropy of their bytes."
    return Chart("Lossless ratio by layer", said, "layer", "raw over compressed", series, whole_x=True, digits=4,
                 from_zero=False)  # fmt: skip


def _replayed_layers(name: str, replay: Replayed) -> list[Block]:
    layers = [layer for layer in replay.metrics.layers if layer.compressed_bytes]
    points = [Point(layer.layer, layer.raw_bytes / layer.compressed_bytes) for layer in layers]
    chart = Chart(
        "Encoded ratio by layer in a replay",
        f"Raw over compressed bytes of what the runtime encoded, by layer, from {name}.",
        "layer", "raw over compressed", [Series("encoded", points, 0)], whole_x=True, from_zero=False,
    )  # fmt: skip
    rows = [
        [
            Cell(f"{layer.layer}", layer.layer), number(layer.tokens, 0), number(layer.raw_bytes, 0),
            number(layer.compressed_bytes, 0),
            number(layer.raw_bytes / layer.compressed_bytes if layer.compressed_bytes else None),
            number(layer.held_bytes, 0),
        ]
        for layer in replay.metrics.layers[:200]
    ]  # fmt: skip
    columns = ("layer", "tokens", "encoded bytes", "compressed bytes", "encoded ratio", "held bytes")
    return [chart, Table(f"{name}: layers of the replay", columns, rows, frozenset())]


def memory_section(found: Material) -> Section:
    """Bytes held, step by step."""
    blocks: list[Block] = []
    for name, replay in found.replays:
        blocks += _replayed_memory(name, replay)
    for name, evaluation in found.evaluations:
        blocks += _evaluated_memory(name, evaluation)
    if not blocks:
        text = (
            "Memory over time: not measured. kvmnn replay --json and kvmnn eval --plot DIR -o RESULTS.json record it."
        )
        blocks = [missing(text)]
    return Section("memory", "Memory over time", blocks)


def _replayed_memory(name: str, replay: Replayed) -> list[Block]:
    if not replay.points:
        return [missing(f"{name}: memory over time: not measured, the replay has no steps.")]
    series = []
    for look, (label, key) in enumerate(
        (("all tokens, raw", "appended_bytes"), ("tokens that are left, raw", "live_bytes"), ("held", "held_bytes"))
    ):
        points = [Point(step.tokens, getattr(step, key) / _MIB, name=label) for step in replay.points]
        series.append(Series(label, points, look, dashed=look == 0, marker=False))
    last = replay.points[-1]
    chart = Chart(
        "Memory of a replay",
        f"K and V of all layers over the tokens, from {name}: at the end {last.held_bytes / _MIB:.2f} MiB hold "
        f"{last.live_bytes / _MIB:.2f} MiB.",
        "tokens", "MiB, all layers", series, whole_x=True,
    )  # fmt: skip
    metrics = replay.metrics
    held, total = (
        "not measured" if figure is None else f"{figure:.3f}"
        for figure in (metrics.lossless_ratio, metrics.total_ratio)
    )
    coded = f"{metrics.h2o_lossless_ratio:.3f}" if metrics.h2o_lossless_raw_bytes else "not measured"
    text = (
        f"{name}: {count(replay.layers, 'layer')}, {replay.prompt:,} tokens as prompt, {replay.tokens:,} in all. Lossy "
        f"{metrics.lossy_ratio:.3f}, held {held}, in all {total}; of what was "
        f"encoded {coded}; {count(metrics.h2o_lossless_fallback_count, 'fallback')}."
    )
    return [Text(text), chart]


def _evaluated_memory(name: str, evaluation: Evaluation) -> list[Block]:
    traces = [trace for trace in evaluation.traces if trace.cache_bytes][:8]
    if not traces:
        return [missing(f"{name}: memory over time: not measured. kvmnn eval --plot records the course of a text.")]
    series = []
    for look, trace in enumerate(traces):
        steps = zip(trace.step_tokens, trace.cache_bytes, strict=False)
        points = [Point(tokens, size / _MIB, name=trace.label) for tokens, size in steps]
        series.append(Series(trace.label, points, look, dashed=look % 2 == 1, marker=False))
    more = f" {len(evaluation.traces) - 8:,} more are not drawn." if len(evaluation.traces) > 8 else ""
    said = f"K and V held over the tokens of {traces[0].document}, from {name}, a line for each policy.{more}"
    if len({trace.cache_bytes for trace in traces}) < len(traces):
        said += " Policies that hold the same lie over each other."
    return [Chart("Memory of an evaluation", said, "tokens seen", "MiB, all layers", series, whole_x=True)]


def codecs_section(found: Material) -> Section:
    """Ratios and speeds of codecs."""
    blocks: list[Block] = []
    for name, codecs in found.codecs:
        blocks += _codecs(name, codecs)
    if not blocks:
        blocks = [missing("Codecs side by side: not measured. kvmnn bench FILES --json > DIR/bench.json has them.")]
    return Section("codecs", "Codecs side by side", blocks)


def _codecs(name: str, codecs: Codecs) -> list[Block]:
    names = list(dict.fromkeys(result.codec for array in codecs.arrays for result in array.results))[:40]
    rows, points = [], list[Series]()
    for codec in names:
        results = [result for array in codecs.arrays for result in array.results if result.codec == codec]
        good = [result for result in results if result.error is None and result.ratio is not None]
        raw, stored = sum(one.raw_bytes for one in good), sum(one.stored_bytes for one in good)
        ratio = raw / stored if stored else None
        speeds = [_speed([(one.raw_bytes, getattr(one, key)) for one in good]) for key in _SPEEDS]
        errors = len(results) - len(good)
        rows.append([
            Cell(codec), number(ratio, 4), *map(_rate, speeds),
            Cell(f"{len(good)}", len(good)),
            Cell(f"{errors}", errors, "bad" if errors else "") if errors else Cell("0", 0),
        ])  # fmt: skip
        if ratio is not None and speeds[0] is not None:
            points.append(Series(codec, [Point(speeds[0] / 1e6, ratio, name=codec)], len(points), line=False))
    columns = ("codec", "ratio", "encode MB/s", "decode MB/s", "arrays", "failed")
    note = (
        f"Sums over {count(len(codecs.arrays), 'array')}; speeds: raw bytes over processor time, medians of the rounds "
        f"of each array, {count(codecs.threads, 'thread')}; every round trip was compared. MB are 10^6 bytes."
    )
    blocks: list[Block] = []
    if 0 < len(points) <= 12:
        said = f"Ratio over encode speed, from {name}: better is up and right."
        blocks.append(
            Chart(
                "Ratio over encode speed", said, "encode MB/s", "ratio", points, log_x=True, from_zero=False, digits=2
            )
        )
    blocks.append(Table(f"{name}: codecs", columns, rows, frozenset({0}), False, note))
    blocks.append(_arrays(name, codecs.arrays))
    return blocks


_SPEEDS = ("encode_bytes_per_s_cpu", "decode_bytes_per_s_cpu")


def _rate(speed: float | None) -> Cell:
    """Bytes a second as MB/s."""
    return number(speed, 0 if (speed or 0) >= 100e6 else 1, scale=1e-6)


def _speed(pairs: Sequence[tuple[int, float | None]]) -> float | None:
    """Bytes a second over all arrays; None where one has no speed."""
    seconds = [nbytes / speed for nbytes, speed in pairs if speed]
    return sum(nbytes for nbytes, _ in pairs) / sum(seconds) if seconds and len(seconds) == len(pairs) else None


def _arrays(name: str, arrays: Sequence[CodecArray]) -> Table:
    rows = []
    for array in arrays[:_MOST_ARRAYS]:
        good = [one for one in array.results if one.error is None and one.ratio is not None]
        best = max(good, key=lambda one: one.ratio or 0.0, default=None)
        rows.append([
            Cell(array.name), Cell(array.dtype), number(array.array_bytes, 0), number(array.entropy_ratio, 4),
            number(None if best is None else best.ratio, 4), Cell("-" if best is None else best.codec),
        ])  # fmt: skip
    more = len(arrays) - len(rows)
    note = f"{more:,} more arrays are in {name}." if more > 0 else ""
    columns = ("array", "type", "bytes", "byte entropy", "best ratio", "by")
    return Table(f"{name}: arrays and the entropy of their bytes", columns, rows, frozenset({0, 1, 5}), False, note)
