"""The rows of an evaluation: what was measured of each configuration. None: not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..files.records import Record
from ..h2o.figures import H2OStats
from ..policies.full import FullCache
from ..text import LOSSLESS
from .runtime_figures import RuntimeStats


@dataclass(frozen=True, kw_only=True)
class QualityStats(Record):
    """Means over scored tokens.

    Attributes
    ----------
    begin : int or None
        The position from which on tokens are scored, where that is not the first one (JSON: ``from``).
    tokens : int
        Scored.
    nll : float or None
        Negative log-probability in nats; None where no token was scored.
    perplexity : float or None
        ``exp(nll)``; None beyond float64 as well.
    accuracy : float or None
        Share of tokens that were the most probable one.
    """

    begin: int | None = field(default=None, metadata={"key": "from", "omit": True})
    tokens: int
    nll: float | None
    perplexity: float | None
    accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class FullCacheDifference(Record):
    """Differences to the full cache on the same tokens, with the ends of their paired bootstrap intervals.

    `nll` in nats a token, `accuracy` as a share; ``deep_``: over the deep tokens only. No interval: None.
    """

    documents: int
    level: float
    nll: float | None = None
    low: float | None = None
    high: float | None = None
    deep_nll: float | None = None
    deep_low: float | None = None
    deep_high: float | None = None
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    deep_accuracy: float | None = None
    deep_accuracy_low: float | None = None
    deep_accuracy_high: float | None = None
    note: str | None = field(default=None, metadata={"omit": True})


@dataclass(frozen=True, kw_only=True)
class FrameSizeStats(Record):
    """Bytes of one cache.

    Attributes
    ----------
    dtype : str
        Of the words in the frames.
    rounded : bool
        Whether the words are the cache's own rounded to fp16 first, which is LOSSY by itself; frames are LOSSLESS for
        the words that they were given.
    full_bytes : int
        The full cache of all tokens seen, in that dtype.
    kept_bytes : int
        What the policy left of it.
    frame_bytes : int
        The frames of that, each decoded and found equal.
    """

    dtype: str
    rounded: bool
    full_bytes: int
    kept_bytes: int
    frame_bytes: int


@dataclass(frozen=True, kw_only=True)
class DocumentRow(Record):
    """One document under one configuration; the quantities are those of `ResultRow`.

    `stored_tokens` is how many tokens came from a prefix store, where there was one.
    """

    name: str
    tokens: int
    nll: float | None
    perplexity: float | None
    accuracy: float | None
    bits_per_byte: float | None
    deep: QualityStats
    tokens_kept: tuple[int, ...]
    seconds: float
    model_seconds: float
    policy_seconds: float
    cache_bytes_mean: float
    cache_bytes_peak: int
    frames: FrameSizeStats
    h2o: H2OStats | None = field(default=None, metadata={"omit": True})
    runtime: RuntimeStats | None = field(default=None, metadata={"omit": True})
    stored_tokens: int | None = field(default=None, metadata={"omit": True})


@dataclass(frozen=True, kw_only=True)
class ProjectStats(Record):
    """A preset's configuration by the definitions of the preset's project (`kvmnn.evaluation.setup.presets`).

    Attributes
    ----------
    evaluation : str
        ``"E1"``: l2_compress / KnormPress; ``"E2"``: StreamingLLM + H2O.
    label : str
        The project's name for the configuration.
    chunk, chunks_left_out, prompt_tokens, new_tokens, repeats : int or None
        E2 only; times are medians of so many repeats.
    attention_seconds : float or None
        E2 only: of one layer, the mean over layers and steps of one token.
    process_peak_bytes : int or None
        E2 only: that of the row, for what the project's device had allocated at most.
    refused : str or None
        Why nothing was measured.
    """

    evaluation: Literal["E1", "E2"]
    label: str
    perplexity: float | None = None
    accuracy: float | None = None
    nll: float | None = None
    scored_tokens: int | None = None
    text_tokens: int | None = None
    final_cache_tokens: int | None = None
    chunk: int | None = field(default=None, metadata={"omit": True})
    chunks_left_out: int | None = field(default=None, metadata={"omit": True})
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    attention_seconds: float | None = field(default=None, metadata={"omit": True})
    tokens_per_second: float | None = None
    prompt_tokens: int | None = field(default=None, metadata={"omit": True})
    new_tokens: int | None = field(default=None, metadata={"omit": True})
    repeats: int | None = field(default=None, metadata={"omit": True})
    process_peak_bytes: int | None = field(default=None, metadata={"omit": True})
    refused: str | None = field(default=None, metadata={"omit": True})

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without what the project does not measure."""
        document = super().to_dict()
        if self.refused is not None:
            return {key: document[key] for key in ("evaluation", "label", "refused")}
        if self.evaluation == "E2" and self.new_tokens is None:  # generation was not timed
            for key in ("ttft_seconds", "tpot_seconds", "tokens_per_second"):
                del document[key]
        return document


@dataclass(frozen=True, kw_only=True)
class ResultRow(Record):
    """One configuration over all documents.

    Attributes
    ----------
    label, policy, options, preset, positions
        Those of the `Configuration`; options with the policy's defaults.
    budget, keep_ratio
        Tokens, or share of the stored tokens, that stay in each layer.
    kind : str or None
        ``"LOSSLESS"`` where nothing was evicted, else ``"LOSSY"``.
    tokens, nll, perplexity, accuracy, deep
        See `QualityStats`; `deep` is over the tokens behind ``settings.deep_from``.
    versus_full
        None for the full cache itself.
    seconds, model_seconds, policy_seconds
        Wall time of all documents: all, inside onnxruntime, holding, choosing and cutting.
    ttft_seconds, tpot_seconds
        Time to the first token of a prompt, and for each token after it.
    attention_seconds
        Attention of all layers, in each of the steps after the prompt.
    cache_bytes_mean, cache_bytes_peak
        K and V held, over the tokens fed.
    process_peak_bytes, process_opened_bytes
        Resident memory of the configuration's process at most, and once the model was open.
    tokens_kept
        Of each layer, the highest of all documents.
    unequal_layers
        Whether layers hold different numbers of tokens, so that the budget is not what every layer holds.
    lossy_ratio, lossless_ratio, ratio
        Bytes of the full cache over those kept; those kept over those of their frames; the product.
    project
        By the definitions of the preset's project (JSON: ``as_seed``).
    h2o
        What the engine's planner did, where it is what evicts: counts of all documents, ratios of the last one.
    runtime
        What the lossless runtime did, where the cache lay in one: all documents added up.
    start
        What it goes on from, where that is K and V that were computed elsewhere (`kvmnn.reports.start`).
    evicted
        Whether any scored token was attended over a cache that the policy had cut. Where none was, quality is that of
        the full cache and says nothing of the policy. None in results of older versions.
    """

    label: str
    policy: str
    options: Mapping[str, object] = field(default_factory=dict)
    budget: int | None = None
    keep_ratio: float | None = None
    preset: str | None = None
    positions: Literal["true", "stored"] = "true"
    kind: str | None = None
    tokens: int | None = None
    nll: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None
    bits_per_byte: float | None = None
    deep: QualityStats | None = None
    versus_full: FullCacheDifference | None = None
    seconds: float | None = None
    model_seconds: float | None = None
    policy_seconds: float | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    attention_seconds: float | None = None
    tokens_per_second: float | None = None
    cache_bytes_mean: float | None = None
    cache_bytes_peak: int | None = None
    process_peak_bytes: int | None = None
    process_opened_bytes: int | None = None
    tokens_kept: tuple[int, ...] | None = None
    unequal_layers: bool | None = None
    lossy_ratio: float | None = None
    lossless_ratio: float | None = None
    ratio: float | None = None
    lossless_dtype: str | None = None
    rounded_first: bool | None = None
    full_bytes: int | None = None
    kept_bytes: int | None = None
    frame_bytes: int | None = None
    project: ProjectStats | None = field(default=None, metadata={"key": "as_seed"})
    h2o: H2OStats | None = field(default=None, metadata={"omit": True})
    runtime: RuntimeStats | None = field(default=None, metadata={"omit": True})
    start: str | None = field(default=None, metadata={"omit": True})
    evicted: bool | None = field(default=None, metadata={"omit": True})
    documents: tuple[DocumentRow, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether this is a full cache, all of it the model's own."""
        return self.policy == FullCache.name and self.start is None

    @property
    def has_no_eviction(self) -> bool:
        """Whether this is a policy that evicted nothing before the last token was scored, so that it is no rival of
        those that did."""
        if self.policy == FullCache.name:
            return False
        return self.kind == LOSSLESS if self.evicted is None else not self.evicted


def find_full_row(rows: Sequence[ResultRow]) -> ResultRow | None:
    """The row of the full cache."""
    return next((row for row in rows if row.is_full), None)
