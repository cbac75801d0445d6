"""Cells put together: one row of the results for each configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..lm.documents import Document
from ..policies.labels import jsonable
from .measuring.scoring import perplexity, summary
from .setup.configurations import FULL, Configuration
from .setup.settings import Settings
from .statistics import paired_interval

Cell = Mapping[str, Any]
LOSSLESS, LOSSY = "LOSSLESS", "LOSSY"


@dataclass(frozen=True)
class Measured:
    """All cells of a configuration.

    Parameters
    ----------
    scores
        Of each document.
    seeds
        As the seed measured each document; None where it did not.
    timing
        Of the first document; None where nobody timed.
    """

    scores: Sequence[Cell]
    seeds: Sequence[Cell] | None = None
    timing: Cell | None = None


def make_row(
    configuration: Configuration,
    measured: Measured,
    full: Sequence[Cell],
    documents: Sequence[Document],
    settings: Settings,
) -> dict[str, Any]:
    """The row of a configuration.

    Parameters
    ----------
    full
        Score cells of the full cache, document by document.
    """
    cells = measured.scores
    policy = configuration.make()
    options = {} if policy is None else jsonable(policy.options())
    every, deep = _total(cells, "every"), _total(cells, "deep")
    model, own = _sum(cells, "model_seconds"), _sum(cells, "policy_seconds")
    seconds = _sum(cells, "seconds")
    timing = measured.timing or {}
    return {
        "label": configuration.label,
        "policy": configuration.policy,
        "options": options,
        "budget": options.get("budget"),
        "keep_ratio": options.get("keep_ratio"),
        "preset": configuration.preset,
        "positions": configuration.positions,
        "kind": LOSSY if any(_evicted(cell) for cell in cells) else LOSSLESS,
        **summary(*every),
        "bits_per_byte": _bits_per_byte(every[1], sum(document.nbytes for document in documents)),
        "deep": {"from": settings.deep_from, **summary(*deep)},
        "versus_full": None if configuration.policy == FULL else _versus(cells, full, settings.seed),
        "seconds": seconds,
        "model_seconds": model,
        "policy_seconds": own,
        "ttft_seconds": timing.get("ttft_seconds"),
        "tpot_seconds": timing.get("tpot_seconds"),
        "tokens_per_second": every[0] / seconds if seconds > 0 else None,
        "cache_bytes_mean": _weighted(cells, "cache_bytes_mean"),
        "cache_bytes_peak": max(cell["cache_bytes_peak"] for cell in cells),
        "process_peak_bytes": _highest(cells, "process_peak_bytes"),
        "process_opened_bytes": _highest(cells, "process_opened_bytes"),
        "tokens_kept": [max(kept) for kept in zip(*(cell["tokens_kept"] for cell in cells), strict=True)],
        **_ratios(cells),
        "as_seed": None if measured.seeds is None else _as_seed(configuration, measured.seeds, timing.get("as_seed")),
        "documents": [_document(cell, document) for cell, document in zip(cells, documents, strict=True)],
    }


def _versus(cells: Sequence[Cell], full: Sequence[Cell], seed: int) -> dict[str, Any]:
    """Differences to the full cache over documents, with their paired bootstrap intervals."""
    found: dict[str, Any] = {"documents": len(cells), "level": 0.95}
    names = {
        ("every", "nll"): ("nll", "low", "high"),
        ("deep", "nll"): ("deep_nll", "deep_low", "deep_high"),
        ("every", "hits"): ("accuracy", "accuracy_low", "accuracy_high"),
        ("deep", "hits"): ("deep_accuracy", "deep_accuracy_low", "deep_accuracy_high"),
    }
    for (part, key), labels in names.items():
        pairs = [(cell[part], base[part]) for cell, base in zip(cells, full, strict=True) if cell[part]["tokens"]]
        if not pairs:
            found.update(dict.fromkeys(labels))
            continue
        differences = [(mine[key] - base[key]) / mine["tokens"] for mine, base in pairs]
        found.update(zip(labels, paired_interval(differences, [m["tokens"] for m, _ in pairs], seed=seed), strict=True))
    if len(cells) == 1:
        found["note"] = "one document: no interval"
    return found


def _ratios(cells: Sequence[Cell]) -> dict[str, Any]:
    frames = [cell["frames"] for cell in cells]
    full, kept, coded = (_sum(frames, name) for name in ("full_bytes", "kept_bytes", "frame_bytes"))
    return {
        "lossy_ratio": full / kept if kept else None,
        "lossless_ratio": kept / coded if kept else None,
        "ratio": full / coded if kept else None,
        "lossless_dtype": frames[0]["dtype"],
        "rounded_first": any(frame["rounded"] for frame in frames),
        "full_bytes": full,
        "kept_bytes": kept,
        "frame_bytes": coded,
    }


def _as_seed(configuration: Configuration, cells: Sequence[Cell], speed: Cell | None) -> dict[str, Any]:
    method = configuration.seed_method
    if method is None:
        return {}
    found: dict[str, Any] = {"evaluation": method.evaluation, "label": method.label}
    refused = next((cell["refused"] for cell in cells if "refused" in cell), None)
    if refused is not None:
        return found | {"refused": refused}
    weight, scored = _sum(cells, "weight"), _sum(cells, "scored_tokens")
    nll = _sum(cells, "weighted_nll") / weight if weight else None
    found |= {
        "perplexity": None if nll is None else perplexity(nll),
        "accuracy": _sum(cells, "hits") / scored if scored else None,
        "nll": nll,
        "scored_tokens": scored,
        "text_tokens": _sum(cells, "text_tokens"),
        "final_cache_tokens": max(cell["final_cache_tokens"] for cell in cells),
    }
    if method.evaluation == "E1":
        found |= {name: _mean([cell[name] for cell in cells]) for name in ("ttft_seconds", "tpot_seconds")}
        found["tokens_per_second"] = _mean(
            [cell["text_tokens"] / cell["seconds"] for cell in cells if cell["seconds"] > 0]
        )
        return found
    found |= {"chunk": method.chunk, "chunks_left_out": _sum(cells, "chunks_left_out")}
    if speed is not None:
        found |= speed
    return found


def _document(cell: Cell, document: Document) -> dict[str, Any]:
    every, deep = summary(**cell["every"]), summary(**cell["deep"])
    return {
        "name": document.name,
        **every,
        "bits_per_byte": _bits_per_byte(cell["every"]["nll"], document.nbytes),
        "deep": deep,
        "tokens_kept": cell["tokens_kept"],
        "seconds": cell["seconds"],
        "model_seconds": cell["model_seconds"],
        "policy_seconds": cell["policy_seconds"],
        "cache_bytes_mean": cell["cache_bytes_mean"],
        "cache_bytes_peak": cell["cache_bytes_peak"],
        "frames": dict(cell["frames"]),
    }


def _bits_per_byte(nll: float, nbytes: int) -> float | None:
    return nll / math.log(2) / nbytes if nbytes else None


def _evicted(cell: Cell) -> bool:
    return any(kept < cell["tokens_seen"] for kept in cell["tokens_kept"])


def _total(cells: Sequence[Cell], part: str) -> tuple[int, float, int]:
    sums = [cell[part] for cell in cells]
    return _sum(sums, "tokens"), _sum(sums, "nll"), _sum(sums, "hits")


def _sum(cells: Sequence[Cell], name: str) -> Any:
    return sum(cell[name] for cell in cells)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _weighted(cells: Sequence[Cell], name: str) -> float:
    tokens = [cell["every"]["tokens"] for cell in cells]
    return float(sum(cell[name] * count for cell, count in zip(cells, tokens, strict=True)) / sum(tokens))


def _highest(cells: Sequence[Cell], name: str) -> int | None:
    known = [cell[name] for cell in cells if cell[name] is not None]
    return max(known) if known else None
