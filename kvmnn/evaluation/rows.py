"""Cells put together: one row of the results for each configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..h2o.figures import together
from ..lm.documents import Document
from ..reports.rows import Difference, DocumentRow, ProjectNumbers, Row
from ..reports.runtime_figures import runs_together
from ..text import LOSSLESS, LOSSY
from .measuring.cells import ProjectCell, RefusedCell, ScoreCell, Sums, TimingCell
from .measuring.scoring import perplexity, summary
from .setup.configurations import FULL, Configuration, ProjectDefinition
from .setup.settings import Settings
from .statistics import LEVEL, paired_interval


@dataclass(frozen=True)
class Measured:
    """All cells of a configuration.

    Parameters
    ----------
    scores
        Of each document.
    by_definition
        Of each document by the definition of the preset's project; None where nobody asked.
    timing
        Of the first document; None where nobody timed.
    """

    scores: Sequence[ScoreCell]
    by_definition: Sequence[ProjectCell | RefusedCell] | None = None
    timing: TimingCell | RefusedCell | None = None


def make_row(
    configuration: Configuration,
    measured: Measured,
    full: Sequence[ScoreCell],
    documents: Sequence[Document],
    settings: Settings,
    start: str | None = None,
) -> Row:
    """The row of a configuration.

    Parameters
    ----------
    full
        Cells of the full cache, document by document.
    start
        What the evaluation's start is called, where the configuration goes on from it.
    """
    cells = measured.scores
    options = configuration.policy_options()
    every, deep = _total([cell.every for cell in cells]), _total([cell.deep for cell in cells])
    quality = summary(every)
    seconds = sum(cell.seconds for cell in cells)
    timing = measured.timing if isinstance(measured.timing, TimingCell) else None
    frames = [cell.frames for cell in cells]
    full_bytes = sum(frame.full_bytes for frame in frames)
    kept, coded = sum(frame.kept_bytes for frame in frames), sum(frame.frame_bytes for frame in frames)
    return Row(
        label=configuration.label,
        policy=configuration.policy,
        options=options,
        budget=options.get("budget"),
        keep_ratio=options.get("keep_ratio"),
        preset=configuration.preset,
        positions=configuration.positions,
        kind=LOSSY if any(_evicted(cell) for cell in cells) or (start and not _is_own(full)) else LOSSLESS,
        tokens=quality.tokens,
        nll=quality.nll,
        perplexity=quality.perplexity,
        accuracy=quality.accuracy,
        bits_per_byte=_bits_per_byte(every.nll, sum(document.nbytes for document in documents)),
        deep=summary(deep, settings.deep_from),
        versus_full=_versus(cells, full, settings.seed) if configuration.policy != FULL or start else None,
        seconds=seconds,
        model_seconds=sum(cell.model_seconds for cell in cells),
        policy_seconds=sum(cell.policy_seconds for cell in cells),
        ttft_seconds=None if timing is None else timing.ttft_seconds,
        tpot_seconds=None if timing is None else timing.tpot_seconds,
        attention_seconds=None if timing is None else timing.attention_seconds,
        tokens_per_second=every.tokens / seconds if seconds > 0 and not _any_stored(cells) else None,
        cache_bytes_mean=float(sum(cell.cache_bytes_mean * cell.every.tokens for cell in cells) / every.tokens),
        cache_bytes_peak=max(cell.cache_bytes_peak for cell in cells),
        process_peak_bytes=_highest([cell.process_peak_bytes for cell in cells]),
        process_opened_bytes=_highest([cell.process_opened_bytes for cell in cells]),
        tokens_kept=tuple(max(kept) for kept in zip(*(cell.tokens_kept for cell in cells), strict=True)),
        unequal_layers=any(len(set(cell.tokens_kept)) > 1 for cell in cells),
        lossy_ratio=full_bytes / kept if kept else None,
        lossless_ratio=kept / coded if kept else None,
        ratio=full_bytes / coded if kept else None,
        lossless_dtype=frames[0].dtype,
        rounded_first=any(frame.rounded for frame in frames),
        full_bytes=full_bytes,
        kept_bytes=kept,
        frame_bytes=coded,
        h2o=together(cell.h2o for cell in cells if cell.h2o is not None),
        runtime=runs_together(cell.runtime for cell in cells if cell.runtime is not None),
        start=start,
        evicted=_saw_cut(cells),
        project=_project_numbers(
            configuration.definition,
            measured.by_definition,
            timing,
            _highest([cell.process_peak_bytes for cell in cells]),
            cells[0].model.layers,
        ),
        documents=tuple(_document_row(cell, document) for cell, document in zip(cells, documents, strict=True)),
    )


def _any_stored(cells: Sequence[ScoreCell]) -> bool:
    """Whether any token came from a prefix store, so that times are not those of all."""
    return any(cell.stored_tokens for cell in cells)


def _versus(cells: Sequence[ScoreCell], full: Sequence[ScoreCell], seed: int) -> Difference:
    """Differences to the full cache over documents, with their paired bootstrap intervals."""
    every = [(cell.every, base.every) for cell, base in zip(cells, full, strict=True)]
    deep = [(cell.deep, base.deep) for cell, base in zip(cells, full, strict=True)]
    nll, low, high = _interval(every, lambda sums: sums.nll, seed)
    deep_nll, deep_low, deep_high = _interval(deep, lambda sums: sums.nll, seed)
    accuracy, accuracy_low, accuracy_high = _interval(every, lambda sums: sums.hits, seed)
    deep_accuracy, deep_accuracy_low, deep_accuracy_high = _interval(deep, lambda sums: sums.hits, seed)
    return Difference(
        documents=len(cells),
        level=LEVEL,
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


def _interval(
    pairs: Sequence[tuple[Sums, Sums]], get: Callable[[Sums], float], seed: int
) -> tuple[float | None, float | None, float | None]:
    """Mean difference a token of documents with tokens, and the ends of its interval."""
    known = [(mine, base) for mine, base in pairs if mine.tokens]
    if not known:
        return None, None, None
    differences = [(get(mine) - get(base)) / mine.tokens for mine, base in known]
    return paired_interval(differences, [mine.tokens for mine, _ in known], seed=seed)


def _project_numbers(
    definition: ProjectDefinition | None,
    measured: Sequence[ProjectCell | RefusedCell] | None,
    timing: TimingCell | None,
    peak: int | None,
    layers: int,
) -> ProjectNumbers | None:
    if definition is None or measured is None:
        return None
    refused = next((cell.refused for cell in measured if isinstance(cell, RefusedCell)), None)
    if refused is not None:
        return ProjectNumbers(evaluation=definition.evaluation, label=definition.label, refused=refused)
    cells = [cell for cell in measured if isinstance(cell, ProjectCell)]
    weight, scored = sum(cell.weight for cell in cells), sum(cell.scored_tokens for cell in cells)
    nll = sum(cell.weighted_nll for cell in cells) / weight if weight else None
    found = ProjectNumbers(
        evaluation=definition.evaluation,
        label=definition.label,
        perplexity=None if nll is None else perplexity(nll),
        accuracy=sum(cell.hits for cell in cells) / scored if scored else None,
        nll=nll,
        scored_tokens=scored,
        text_tokens=sum(cell.text_tokens for cell in cells),
        final_cache_tokens=max(cell.final_cache_tokens for cell in cells),
    )
    if definition.evaluation == "E1":
        return replace(
            found,
            ttft_seconds=_mean([cell.ttft_seconds for cell in cells]),
            tpot_seconds=_mean([cell.tpot_seconds for cell in cells]),
            tokens_per_second=_mean([cell.text_tokens / cell.seconds for cell in cells if cell.seconds > 0]),
        )
    left_out = sum(cell.chunks_left_out or 0 for cell in cells)
    found = replace(found, chunk=definition.chunk, chunks_left_out=left_out, process_peak_bytes=peak)
    if timing is None or timing.project is None:
        return found
    attention = timing.attention_seconds
    return replace(
        found,
        attention_seconds=None if attention is None else attention / layers,
        **timing.project.to_dict(),
    )


def _document_row(cell: ScoreCell, document: Document) -> DocumentRow:
    quality = summary(cell.every)
    return DocumentRow(
        name=document.name,
        tokens=quality.tokens,
        nll=quality.nll,
        perplexity=quality.perplexity,
        accuracy=quality.accuracy,
        bits_per_byte=_bits_per_byte(cell.every.nll, document.nbytes),
        deep=summary(cell.deep),
        tokens_kept=cell.tokens_kept,
        seconds=cell.seconds,
        model_seconds=cell.model_seconds,
        policy_seconds=cell.policy_seconds,
        cache_bytes_mean=cell.cache_bytes_mean,
        cache_bytes_peak=cell.cache_bytes_peak,
        frames=cell.frames,
        stored_tokens=cell.stored_tokens,
        h2o=cell.h2o,
        runtime=cell.runtime,
    )


def _total(sums: Sequence[Sums]) -> Sums:
    return Sums(
        sum(entry.tokens for entry in sums), sum(entry.nll for entry in sums), sum(entry.hits for entry in sums)
    )


def _bits_per_byte(nll: float, nbytes: int) -> float | None:
    return nll / math.log(2) / nbytes if nbytes else None


def _evicted(cell: ScoreCell) -> bool:
    return any(kept < cell.tokens_seen for kept in cell.tokens_kept)


def _saw_cut(cells: Sequence[ScoreCell]) -> bool | None:
    """Whether any scored token was attended over a cut cache; None where a cell of an older version does not tell."""
    if any(cell.cut_tokens is None for cell in cells):
        return None if any(_evicted(cell) for cell in cells) else False
    return any(cell.cut_tokens for cell in cells)


def _is_own(full: Sequence[ScoreCell]) -> bool:
    """Whether the start has the very bits that the model computes, as the full cache's cells have compared them."""
    found = [each for cell in full for each in cell.distances or ()]
    return bool(found) and all(each.equal == each.words for each in found)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _highest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
