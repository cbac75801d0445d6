"""Build one row of the results for each configuration from its cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.text import LOSSLESS, LOSSY
from ..lm.documents import Document
from ..policies.h2o.planner import merge_stats
from ..quantization import CacheCodec, create_codec
from ..quantization.transform_codec import TransformCodec
from ..reports.records import (
    DivergenceStats,
    DocumentRow,
    FrameSizeStats,
    FullCacheDifference,
    ProjectStats,
    ResultRow,
    TargetDivergence,
    merge_runtime_stats,
)
from .divergence import summarize_divergence
from .records import LossSums, ProjectCell, RefusedCell, ScoreCell, TimingCell
from .scoring import CONFIDENCE_LEVEL, compute_paired_interval, compute_perplexity, summarize
from .settings import FULL_POLICY, Configuration, EvaluationSettings, ProjectDefinition


@dataclass(frozen=True)
class ConfigurationCells:
    """Measurements of one configuration, from which its row is built."""

    #: One cell for each document.
    score_cells: Sequence[ScoreCell]
    #: One cell for each document, by the definition of the preset's project; None unless requested.
    project_cells: Sequence[ProjectCell | RefusedCell] | None = None
    #: Timing of the first document; None unless requested.
    timing_cell: TimingCell | RefusedCell | None = None


def build_row(
    configuration: Configuration,
    configuration_cells: ConfigurationCells,
    full_cells: Sequence[ScoreCell],
    documents: Sequence[Document],
    settings: EvaluationSettings,
    start: str | None = None,
) -> ResultRow:
    """Build the row of a configuration."""
    cells = configuration_cells.score_cells
    options = configuration.list_options()
    total_sums, tail_sums = _sum_losses([cell.every for cell in cells]), _sum_losses([cell.deep for cell in cells])
    quality = summarize(total_sums)
    seconds = sum(cell.seconds for cell in cells)
    timing = configuration_cells.timing_cell if isinstance(configuration_cells.timing_cell, TimingCell) else None
    frames = [cell.frames for cell in cells]
    codec = None if configuration.codec is None else create_codec(configuration.codec)
    cut_divergence = _add_interval(_summarize_after_cut, cells, settings.seed)
    full_bytes = sum(frame.full_bytes for frame in frames)
    kept_bytes, frame_bytes = sum(frame.kept_bytes for frame in frames), sum(frame.frame_bytes for frame in frames)
    return ResultRow(
        label=configuration.label,
        policy=configuration.policy,
        options=options,
        budget=options.get("budget"),
        keep_ratio=options.get("keep_ratio"),
        preset=configuration.preset,
        codec=configuration.codec,
        codec_options=None if codec is None else codec.to_options(),
        positions=configuration.positions,
        kind=LOSSY
        if any(_has_evicted(cell) for cell in cells)
        or (codec is not None and any(frame.quantized_elements for frame in frames))
        or _is_rounded_by_runtime(cells, settings)
        or (start and not _is_bit_exact(full_cells))
        else LOSSLESS,
        tokens=quality.tokens,
        nll=quality.nll,
        perplexity=quality.perplexity,
        accuracy=quality.accuracy,
        bits_per_byte=_compute_bits_per_byte(total_sums.nll, sum(document.nbytes for document in documents)),
        deep=summarize(tail_sums, settings.deep_from),
        versus_full=_compute_difference(cells, full_cells, settings.seed)
        if configuration.policy != FULL_POLICY or configuration.codec is not None or start
        else None,
        divergence=_add_interval(_summarize_all, cells, settings.seed),
        deep_divergence=_add_interval(_summarize_tails, cells, settings.seed),
        cut_divergence=cut_divergence,
        target_divergence=None
        if start or configuration.policy != FULL_POLICY  # which diverge by themselves
        else _compare_with_target(codec, cut_divergence),
        prompt_only=configuration.policy != FULL_POLICY and configuration.create_policy().is_prompt_only,
        seconds=seconds,
        model_seconds=sum(cell.model_seconds for cell in cells),
        policy_seconds=sum(cell.policy_seconds for cell in cells),
        ttft_seconds=None if timing is None else timing.ttft_seconds,
        tpot_seconds=None if timing is None else timing.tpot_seconds,
        attention_seconds=None if timing is None else timing.attention_seconds,
        tokens_per_second=total_sums.tokens / seconds
        if seconds > 0 and not any(cell.stored_tokens for cell in cells)  # then times are not those of all tokens
        else None,
        cache_bytes_mean=float(sum(cell.cache_bytes_mean * cell.every.tokens for cell in cells) / total_sums.tokens),
        cache_bytes_peak=max(cell.cache_bytes_peak for cell in cells),
        process_peak_bytes=_find_max([cell.process_peak_bytes for cell in cells]),
        process_opened_bytes=_find_max([cell.process_opened_bytes for cell in cells]),
        tokens_kept=tuple(max(kept_bytes) for kept_bytes in zip(*(cell.tokens_kept for cell in cells), strict=True)),
        unequal_layers=any(len(set(cell.tokens_kept)) > 1 for cell in cells),
        lossy_ratio=full_bytes / kept_bytes if kept_bytes else None,
        lossless_ratio=kept_bytes / frame_bytes if kept_bytes else None,
        ratio=full_bytes / frame_bytes if kept_bytes else None,
        lossless_dtype=frames[0].dtype,
        rounded_first=any(frame.rounded for frame in frames),
        full_bytes=full_bytes,
        kept_bytes=kept_bytes,
        frame_bytes=frame_bytes,
        bytes_per_token=kept_bytes / sum(cell.tokens_seen for cell in cells),
        frame_bytes_per_token=frame_bytes / sum(cell.tokens_seen for cell in cells),
        quantized_bits=_compute_bits(frames, [frame.plain_bytes for frame in frames]),
        coded_bits=_compute_bits(frames, [frame.coded_bytes for frame in frames]),
        quantized_share=None if configuration.codec is None else _compute_quantized_share(frames),
        h2o=merge_stats(cell.h2o for cell in cells if cell.h2o is not None),
        runtime=merge_runtime_stats(cell.runtime for cell in cells if cell.runtime is not None),
        initial_cache=start,
        evicted=_has_scored_after_eviction(cells),
        project_stats=_build_project_numbers(
            configuration.definition,
            configuration_cells.project_cells,
            timing,
            _find_max([cell.process_peak_bytes for cell in cells]),
            cells[0].model.layers,
        ),
        documents=tuple(_build_document_row(cell, document) for cell, document in zip(cells, documents, strict=True)),
    )


def _compute_difference(cells: Sequence[ScoreCell], full_cells: Sequence[ScoreCell], seed: int) -> FullCacheDifference:
    """Compute the differences to the full cache over documents, with their paired bootstrap intervals."""
    total_pairs = [(cell.every, base.every) for cell, base in zip(cells, full_cells, strict=True)]
    tail_pairs = [(cell.deep, base.deep) for cell, base in zip(cells, full_cells, strict=True)]
    nll, low, high = _compute_interval(total_pairs, lambda sums: sums.nll, seed)
    deep_nll, deep_low, deep_high = _compute_interval(tail_pairs, lambda sums: sums.nll, seed)
    accuracy, accuracy_low, accuracy_high = _compute_interval(total_pairs, lambda sums: sums.hits, seed)
    deep_accuracy, deep_accuracy_low, deep_accuracy_high = _compute_interval(tail_pairs, lambda sums: sums.hits, seed)
    return FullCacheDifference(
        documents=len(cells),
        level=CONFIDENCE_LEVEL,
        nll=nll,
        low=low,
        high=high,
        deep_nll=deep_nll,
        deep_low=deep_low,
        deep_high=deep_high,
        accuracy=accuracy,
        accuracy_low=accuracy_low,
        accuracy_high=accuracy_high,
        deep_accuracy=deep_accuracy,
        deep_accuracy_low=deep_accuracy_low,
        deep_accuracy_high=deep_accuracy_high,
        note="one document: no interval" if len(cells) == 1 else None,
    )


def _compute_interval(
    pairs: Sequence[tuple[LossSums, LossSums]], get_value: Callable[[LossSums], float], seed: int
) -> tuple[float | None, float | None, float | None]:
    """Return the mean difference per token over documents with tokens, and the bounds of its interval."""
    scored_pairs = [(cell_sums, full_sums) for cell_sums, full_sums in pairs if cell_sums.tokens]
    if not scored_pairs:
        return None, None, None
    differences = [
        (get_value(cell_sums) - get_value(full_sums)) / cell_sums.tokens for cell_sums, full_sums in scored_pairs
    ]
    return compute_paired_interval(differences, [cell_sums.tokens for cell_sums, _ in scored_pairs], seed=seed)


def _build_project_numbers(
    definition: ProjectDefinition | None,
    project_cells: Sequence[ProjectCell | RefusedCell] | None,
    timing: TimingCell | None,
    peak: int | None,
    layers: int,
) -> ProjectStats | None:
    if definition is None or project_cells is None:
        return None
    refusal_reason = next((cell.refused for cell in project_cells if isinstance(cell, RefusedCell)), None)
    if refusal_reason is not None:
        return ProjectStats(evaluation=definition.evaluation, label=definition.label, refused=refusal_reason)
    cells = [cell for cell in project_cells if isinstance(cell, ProjectCell)]
    weight, num_scored = sum(cell.weight for cell in cells), sum(cell.scored_tokens for cell in cells)
    nll = sum(cell.weighted_nll for cell in cells) / weight if weight else None
    numbers = ProjectStats(
        evaluation=definition.evaluation,
        label=definition.label,
        perplexity=None if nll is None else compute_perplexity(nll),
        accuracy=sum(cell.hits for cell in cells) / num_scored if num_scored else None,
        nll=nll,
        scored_tokens=num_scored,
        text_tokens=sum(cell.text_tokens for cell in cells),
        final_cache_tokens=max(cell.final_cache_tokens for cell in cells),
    )
    if definition.evaluation == "E1":
        return replace(
            numbers,
            ttft_seconds=_compute_mean([cell.ttft_seconds for cell in cells]),
            tpot_seconds=_compute_mean([cell.tpot_seconds for cell in cells]),
            tokens_per_second=_compute_mean([cell.text_tokens / cell.seconds for cell in cells if cell.seconds > 0]),
        )
    chunks_left_out = sum(cell.chunks_left_out or 0 for cell in cells)
    numbers = replace(numbers, chunk=definition.chunk, chunks_left_out=chunks_left_out, process_peak_bytes=peak)
    if timing is None or timing.project_times is None:
        return numbers
    attention = timing.attention_seconds
    return replace(
        numbers,
        attention_seconds=None if attention is None else attention / layers,
        **timing.project_times.to_dict(),
    )


def _build_document_row(cell: ScoreCell, document: Document) -> DocumentRow:
    quality = summarize(cell.every)
    return DocumentRow(
        name=document.name,
        tokens=quality.tokens,
        nll=quality.nll,
        perplexity=quality.perplexity,
        accuracy=quality.accuracy,
        bits_per_byte=_compute_bits_per_byte(cell.every.nll, document.nbytes),
        deep=summarize(cell.deep),
        tokens_kept=cell.tokens_kept,
        seconds=cell.seconds,
        model_seconds=cell.model_seconds,
        policy_seconds=cell.policy_seconds,
        cache_bytes_mean=cell.cache_bytes_mean,
        cache_bytes_peak=cell.cache_bytes_peak,
        frames=cell.frames,
        stored_tokens=cell.stored_tokens,
        divergence=_summarize_all([cell]),
        deep_divergence=_summarize_tails([cell]),
        cut_divergence=_summarize_after_cut([cell]),
        evicted=_has_scored_after_eviction([cell]),
        h2o=cell.h2o,
        runtime=cell.runtime,
    )


def _summarize_all(cells: Sequence[ScoreCell]) -> DivergenceStats | None:
    return summarize_divergence([cell.divergence for cell in cells])


def _summarize_tails(cells: Sequence[ScoreCell]) -> DivergenceStats | None:
    return summarize_divergence([cell.divergence for cell in cells], deep=True)


def _summarize_after_cut(cells: Sequence[ScoreCell]) -> DivergenceStats | None:
    """Summarize the tokens that were scored with a cache that is not the one that the model computed."""
    return summarize_divergence([cell.divergence for cell in cells], num_last=[cell.lossy_tokens for cell in cells])


def _add_interval(
    summarize_cells: Callable[[Sequence[ScoreCell]], DivergenceStats | None], cells: Sequence[ScoreCell], seed: int
) -> DivergenceStats | None:
    """Summarize the divergence of all documents, with the bootstrap interval of its mean."""
    stats = summarize_cells(cells)
    if stats is None:
        return None
    document_stats = [entry for cell in cells if (entry := summarize_cells([cell])) is not None]
    _, low, high = compute_paired_interval(
        [entry.kl for entry in document_stats], [entry.tokens for entry in document_stats], seed=seed
    )
    return replace(stats, kl_low=low, kl_high=high)


def _compare_with_target(codec: CacheCodec | None, stats: DivergenceStats | None) -> TargetDivergence | None:
    """Compare the divergence after the cut with the one that the codec was asked for, if it was."""
    target = codec.target_kl if isinstance(codec, TransformCodec) else None
    if target is None or stats is None:
        return None
    return TargetDivergence(target=target, measured=stats.kl, low=stats.kl_low, high=stats.kl_high)


def _sum_losses(sums: Sequence[LossSums]) -> LossSums:
    return LossSums(
        sum(entry.tokens for entry in sums), sum(entry.nll for entry in sums), sum(entry.hits for entry in sums)
    )


def _compute_bits_per_byte(nll: float, nbytes: int) -> float | None:
    return nll / math.log(2) / nbytes if nbytes else None


def _compute_bits(frames: Sequence[FrameSizeStats], sizes: Sequence[int]) -> float | None:
    """Compute the bits of a quantised number; None if nothing was quantised."""
    num_elements = sum(frame.quantized_elements for frame in frames)
    return 8 * sum(sizes) / num_elements if num_elements else None


def _compute_quantized_share(frames: Sequence[FrameSizeStats]) -> float:
    """Compute which share of the kept numbers the codec quantised; the others are counted as words of `dtype`."""
    num_quantized = sum(frame.quantized_elements for frame in frames)
    num_others = sum(
        (frame.kept_bytes - frame.plain_bytes) / dtypes.parse_dtype(frame.dtype).itemsize for frame in frames
    )
    return num_quantized / max(num_quantized + num_others, 1)


def _has_evicted(cell: ScoreCell) -> bool:
    return cell.has_cut or any(num_kept < cell.tokens_seen for num_kept in cell.tokens_kept)


def _is_rounded_by_runtime(cells: Sequence[ScoreCell], settings: EvaluationSettings) -> bool:
    """Return whether a lossless runtime with a lossy codec encoded anything."""
    is_lossy = settings.runtime_config is not None and settings.runtime_config.is_lossy
    return is_lossy and any(cell.runtime is not None and cell.runtime.h2o_lossless_raw_bytes > 0 for cell in cells)


def _has_scored_after_eviction(cells: Sequence[ScoreCell]) -> bool | None:
    """Return whether any scored token attended to a cut cache; None if an older version made a cell without this."""
    if any(cell.cut_tokens is None for cell in cells):
        return None if any(_has_evicted(cell) for cell in cells) else False
    return any(cell.cut_tokens for cell in cells)


def _is_bit_exact(full_cells: Sequence[ScoreCell]) -> bool:
    """Return whether the initial cache has exactly the bits that the model computes for the same tokens."""
    distances = [distance for cell in full_cells for distance in cell.distances or ()]
    return bool(distances) and all(distance.equal == distance.words for distance in distances)


def _compute_mean(values: Sequence[float | None]) -> float | None:
    present_values = [value for value in values if value is not None]
    return sum(present_values) / len(present_values) if present_values else None


def _find_max(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
