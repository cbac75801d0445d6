"""Rows of an evaluation, and the parts of its results that reports read. None: not measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from math import sqrt
from typing import Any, Literal, Protocol, TypeVar

from .._util.dataclass import dataclass
from .._util.text import LOSSLESS
from ..dtypes import Part
from ..files.schema import Record, json_key
from ..policies.h2o.planner import H2OStats
from ..policies.policy import FullCache

NOT_CUT = "not cut"
"""`ResultRow.kind` where a policy evicted nothing and nothing was rounded."""
UNCUT_LABEL = "full, in the runtime"
"""Label of the row of a lossy runtime around a cache that nothing cuts."""


@dataclass(frozen=True, kw_only=True)
class RuntimeLayerStats(Record):
    """Figures of one layer of the model, with the names of `kvmnn.runtime.RuntimeLayerMetrics`."""

    layer: int
    tokens: int = 0
    raw_bytes: int = 0
    compressed_bytes: int = 0
    blocks: int = 0
    stored_raw_bytes: int = 0
    stored_bytes: int = 0
    held_bytes: int = 0
    fallbacks: int = 0
    num_backpressure_skips: int = field(default=0, metadata={"key": "skips"})

    @property
    def ratio(self) -> float | None:
        """Raw over compressed bytes of everything that was encoded; None if nothing was."""
        return self.raw_bytes / self.compressed_bytes if self.compressed_bytes else None


@dataclass(frozen=True, kw_only=True)
class RuntimeStats(Record):
    """Figures of one run over all layers, with the engine's names where it has the same figure.

    Attributes
    ----------
    mode
        ``"probe"``, ``"full"`` or ``"store"``.
    appended_bytes, live_bytes, held_bytes
        Bytes of K and V: of all tokens that were seen; of those that the policy retained; and the memory for these
        between two steps, which is rows, frames and spare capacity.
    lossy_ratio, lossless_ratio, total_ratio
        Ratios of these sizes: first to second, second to third, first to third (JSON only). Of a codec that is LOSSY
        `lossless_ratio` is None, and `lossy_ratio` the first to the third where it encoded anything.
    """

    mode: Literal["probe", "full", "store"]
    appended_bytes: int
    live_bytes: int
    held_bytes: int
    h2o_lossless_raw_bytes: int = 0
    h2o_lossless_compressed_bytes: int = 0
    h2o_lossless_decompressed_bytes: int = 0
    h2o_lossless_compress_us: int = 0
    h2o_lossless_decompress_us: int = 0
    h2o_lossless_fallback_count: int = 0
    h2o_lossless_backpressure_skip_count: int = 0
    #: Whether the codec is LOSSY.
    is_lossy: bool = field(default=False, metadata={"omit": True})
    layers: tuple[RuntimeLayerStats, ...] = ()

    @property
    def is_rounded(self) -> bool:
        """Return whether the codec is LOSSY and encoded anything."""
        return self.is_lossy and self.h2o_lossless_raw_bytes > 0

    @property
    def eviction_ratio(self) -> float | None:
        """Bytes of all tokens over bytes of the retained ones."""
        return self.appended_bytes / self.live_bytes if self.live_bytes else None

    @property
    @json_key(before="layers")
    def lossy_ratio(self) -> float | None:
        """Bytes of all tokens over bytes of the retained ones; of a codec that is LOSSY over those that store them."""
        return self.total_ratio if self.is_rounded else self.eviction_ratio

    @property
    @json_key(before="layers")
    def lossless_ratio(self) -> float | None:
        """Bytes of the retained tokens over the bytes that store them without loss."""
        return self.live_bytes / self.held_bytes if self.held_bytes and not self.is_lossy else None

    @property
    @json_key(before="layers")
    def total_ratio(self) -> float | None:
        """Bytes of all tokens over the resident bytes."""
        return self.appended_bytes / self.held_bytes if self.held_bytes else None

    @property
    @json_key("h2o_lossless_ratio", before="layers")
    def lossless_encoded_ratio(self) -> float | None:
        """Raw over compressed bytes of everything that was encoded (the engine's name); null of a LOSSY codec."""
        return None if self.is_lossy else self.encoded_ratio

    @property
    def encoded_ratio(self) -> float | None:
        """Raw over compressed bytes of everything that was encoded; None if nothing was."""
        compressed_bytes = self.h2o_lossless_compressed_bytes
        return self.h2o_lossless_raw_bytes / compressed_bytes if compressed_bytes else None


T = TypeVar("T", RuntimeLayerStats, RuntimeStats)


def merge_runtime_stats(all_stats: Iterable[RuntimeStats]) -> RuntimeStats | None:
    """Add up the figures of several texts; return None without any."""
    merged: RuntimeStats | None = None
    for stats in all_stats:
        layers = stats.layers
        if merged is not None:
            layers = tuple(_add_int_fields(old, new) for old, new in zip(merged.layers, stats.layers, strict=True))
            stats = replace(_add_int_fields(merged, stats), is_lossy=merged.is_lossy or stats.is_lossy)
        merged = replace(stats, layers=layers)
    return merged


def _add_int_fields(first: T, second: T) -> T:
    names = [entry.name for entry in fields(first) if entry.type == "int" and entry.name != "layer"]
    return replace(second, **{name: getattr(first, name) + getattr(second, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class QualityStats(Record):
    """Means over the scored tokens."""

    #: Position of the first scored token, if not the first of the text (JSON: ``from``).
    begin: int | None = field(default=None, metadata={"key": "from", "omit": True})
    #: Number of scored tokens.
    tokens: int
    #: Negative log-probability in nats; None without scored tokens.
    nll: float | None
    #: ``exp(nll)``; None also if it exceeds float64.
    perplexity: float | None
    #: Share of tokens that were the most probable one.
    accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class FullCacheDifference(Record):
    """Differences from the full cache on the same tokens, each with a paired bootstrap interval.

    `nll` is in nats per token, `accuracy` a fraction; ``deep_*`` fields cover only the deep tokens, those from position
    ``settings.deep_from`` on. The bounds of an interval are None if there is none.
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
class DivergenceStats(Record):
    """Next-token distributions next to those of the full cache, over scored tokens (`kvmnn.evaluation.divergence`)."""

    tokens: int
    #: Kullback-Leibler divergence from the full cache in nats, a lower bound: mean and 99th percentile over tokens.
    kl: float
    kl_p99: float
    #: Bounds of the mean's 95 % interval by a bootstrap over documents; None with a single one.
    kl_low: float | None = field(default=None, metadata={"omit": True})
    kl_high: float | None = field(default=None, metadata={"omit": True})
    #: Share of tokens at which both find the same token most probable.
    agreement: float


@dataclass(frozen=True, kw_only=True)
class TargetDivergence(Record):
    """The Kullback-Leibler divergence that a codec was asked for, and the measured one, in nats."""

    #: The codec's option ``kl``.
    target: float
    #: Mean over the tokens that were scored with the quantised cache.
    measured: float
    #: Bounds of the 95 % interval by a bootstrap over documents; None with a single one.
    low: float | None = None
    high: float | None = None

    @property
    def is_exceeded(self) -> bool:
        """Return whether more was measured, by more than a quarter and than the interval explains."""
        return self.measured > 1.25 * self.target and (self.low is None or self.low > self.target)


@dataclass(frozen=True, kw_only=True)
class FrameSizeStats(Record):
    """Sizes of one cache, raw and as frames."""

    #: Element type of the frames.
    dtype: str
    #: Whether elements were rounded to fp16 first, which is LOSSY; the frames are LOSSLESS for the rounded elements.
    rounded: bool
    #: Bytes of the full cache of all tokens seen, in that dtype.
    full_bytes: int
    #: Bytes that the policy kept.
    kept_bytes: int
    #: Bytes of the frames of these, each decoded and compared.
    frame_bytes: int
    #: Of a cache in a lossy codec: numbers that are quantised (others are frames), their bytes in the format, and those
    #: after lossless entropy coding.
    quantized_elements: int = field(default=0, metadata={"omit": True})
    plain_bytes: int = field(default=0, metadata={"omit": True})
    coded_bytes: int = field(default=0, metadata={"omit": True})


@dataclass(frozen=True, kw_only=True)
class DocumentRow(Record):
    """The figures of one document under one configuration; its quantities are those of `ResultRow`.

    `stored_tokens` is the number of tokens from a prefix store, if there was one.
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
    divergence: DivergenceStats | None = field(default=None, metadata={"omit": True})
    deep_divergence: DivergenceStats | None = field(default=None, metadata={"omit": True})
    cut_divergence: DivergenceStats | None = field(default=None, metadata={"omit": True})
    evicted: bool | None = field(default=None, metadata={"omit": True})


@dataclass(frozen=True, kw_only=True)
class ProjectStats(Record):
    """Figures of a preset as defined by the project whose results it reproduces (`kvmnn.evaluation.presets`)."""

    #: ``"E1"``: l2_compress / KnormPress; ``"E2"``: StreamingLLM + H2O.
    evaluation: Literal["E1", "E2"]
    #: The project's name for the configuration.
    label: str
    perplexity: float | None = None
    accuracy: float | None = None
    nll: float | None = None
    scored_tokens: int | None = None
    text_tokens: int | None = None
    final_cache_tokens: int | None = None
    #: E2 only; times are medians of so many repeats.
    chunk: int | None = field(default=None, metadata={"omit": True})
    chunks_left_out: int | None = field(default=None, metadata={"omit": True})
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    #: E2 only: attention time of one layer, the mean over layers and single-token steps.
    attention_seconds: float | None = field(default=None, metadata={"omit": True})
    tokens_per_second: float | None = None
    prompt_tokens: int | None = field(default=None, metadata={"omit": True})
    new_tokens: int | None = field(default=None, metadata={"omit": True})
    repeats: int | None = field(default=None, metadata={"omit": True})
    #: E2 only: peak memory of the row, in place of the project's peak of allocated device memory.
    process_peak_bytes: int | None = field(default=None, metadata={"omit": True})
    #: Why nothing was measured.
    refused: str | None = field(default=None, metadata={"omit": True})

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, without those that the project does not measure."""
        # computed: which keys there are depends on what the project measures
        document = super().to_dict()
        if self.refused is not None:
            return {key: document[key] for key in ("evaluation", "label", "refused")}
        if self.evaluation == "E2" and self.new_tokens is None:  # generation was not timed
            for key in ("ttft_seconds", "tpot_seconds", "tokens_per_second"):
                del document[key]
        return document


@dataclass(frozen=True, kw_only=True)
class ResultRow(Record):
    """The figures of one configuration over all documents."""

    #: As in the `Configuration`; options include the policy's defaults.
    label: str
    policy: str
    options: Mapping[str, object] = field(default_factory=dict)
    #: Tokens, or share of the stored tokens, that stay in each layer.
    budget: int | None = None
    keep_ratio: float | None = None
    preset: str | None = None
    #: Spec of the lossy codec that holds the cache, if there is one (`kvmnn.quantization`).
    codec: str | None = field(default=None, metadata={"omit": True})
    #: All options of the codec, those at their defaults included, which its spec leaves out.
    codec_options: Mapping[str, object] | None = field(default=None, metadata={"omit": True})
    positions: Literal["true", "stored"] = "true"
    #: ``"LOSSY"`` if anything was evicted or quantised, else ``"LOSSLESS"``; ``"not cut"`` if that is so because a
    #: policy evicted, or a codec quantised, nothing.
    kind: str | None = None
    #: See `QualityStats`; `deep` is over the tokens from position ``settings.deep_from`` on.
    tokens: int | None = None
    nll: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None
    bits_per_byte: float | None = None
    deep: QualityStats | None = None
    #: None for the full cache itself.
    versus_full: FullCacheDifference | None = None
    #: None also where a prefix store had the scores of the full cache, but not its distributions.
    divergence: DivergenceStats | None = field(default=None, metadata={"omit": True})
    deep_divergence: DivergenceStats | None = field(default=None, metadata={"omit": True})
    #: Over the tokens that were scored with an evicted, quantised or loaded cache only. None without any, as then the
    #: row says nothing of its policy or codec, and wherever `divergence` is.
    cut_divergence: DivergenceStats | None = field(default=None, metadata={"omit": True})
    #: Of rows of a codec alone that was asked for a divergence: that and the measured one.
    target_divergence: TargetDivergence | None = field(default=None, metadata={"omit": True})
    #: Whether the policy cuts a prompt only, so that its budget is of the prompt and all later tokens stay.
    prompt_only: bool = field(default=False, metadata={"omit": True})
    #: Wall time of all documents: total, inside onnxruntime, and in cache and policy.
    seconds: float | None = None
    model_seconds: float | None = None
    policy_seconds: float | None = None
    #: Time to the first token of a prompt, and for each token after it.
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    #: Attention time of all layers in one step after the prompt.
    attention_seconds: float | None = None
    tokens_per_second: float | None = None
    #: Bytes of K and V in the cache, over the tokens fed.
    cache_bytes_mean: float | None = None
    cache_bytes_peak: int | None = None
    #: Peak resident memory of the configuration's process, and the one after opening the model.
    process_peak_bytes: int | None = None
    process_opened_bytes: int | None = None
    #: The maximum over all documents, for each layer.
    tokens_kept: tuple[int, ...] | None = None
    #: Whether layers store different numbers of tokens, so that not every layer stores the budget.
    unequal_layers: bool | None = None
    #: Bytes of the full cache over kept bytes; kept bytes over those of their frames; the product.
    lossy_ratio: float | None = None
    lossless_ratio: float | None = None
    ratio: float | None = None
    lossless_dtype: str | None = None
    rounded_first: bool | None = None
    full_bytes: int | None = None
    kept_bytes: int | None = None
    frame_bytes: int | None = None
    #: Kept bytes, and those of their frames, over the tokens of the texts.
    bytes_per_token: float | None = None
    frame_bytes_per_token: float | None = None
    #: Bits of a number that the codec quantised: in its format, and after lossless entropy coding.
    quantized_bits: float | None = field(default=None, metadata={"omit": True})
    coded_bits: float | None = field(default=None, metadata={"omit": True})
    #: Numbers that the codec quantised over all that were kept at the end; None without a codec.
    quantized_share: float | None = field(default=None, metadata={"omit": True})
    #: By the definitions of the preset's project (JSON: ``as_seed``).
    project_stats: ProjectStats | None = field(default=None, metadata={"key": "as_seed"})
    #: Statistics of the engine's planner, if it is the policy: counts of all documents, ratios of the last one.
    h2o: H2OStats | None = field(default=None, metadata={"omit": True})
    #: Statistics of the lossless runtime, if it stored the cache: sums over all documents.
    runtime: RuntimeStats | None = field(default=None, metadata={"omit": True})
    #: Name of the initial cache that it continues from, if there is one (JSON: ``start``).
    initial_cache: str | None = field(default=None, metadata={"key": "start", "omit": True})
    #: Whether any scored token attended to a cut cache. If none did, quality is that of the full cache and shows
    #: nothing about the policy. None in results of older versions.
    evicted: bool | None = field(default=None, metadata={"omit": True})
    documents: tuple[DocumentRow, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == LOSSLESS and self.is_untried:
            object.__setattr__(self, "kind", NOT_CUT)

    @property
    def is_full(self) -> bool:
        """Return whether this is the full cache and all of it was computed by the model."""
        return self.policy == FullCache.name and self.initial_cache is None and self.codec is None

    @property
    def codes_prompt_only(self) -> bool:
        """Return whether the codec rounds the first step only, so that later tokens are stored as they are."""
        return self.codec is not None and "when=prompt" in self.codec

    @property
    def has_no_eviction(self) -> bool:
        """Return whether a policy evicted nothing before the last scored token.

        Such a row is not comparable with rows of policies that did evict.
        """
        if self.policy == FullCache.name or self.label == UNCUT_LABEL:
            return False
        return self.kind in (LOSSLESS, NOT_CUT) if self.evicted is None else not self.evicted

    @property
    def has_idle_codec(self) -> bool:
        """Return whether the codec quantised nothing of what was kept at the end.

        Such a row takes the bytes of the policy alone, or of the full cache.
        """
        return self.codec is not None and self.quantized_share == 0

    @property
    def has_late_codec(self) -> bool:
        """Return whether the codec quantised something, but only after the last token was scored."""
        is_compared = self.divergence is not None and self.cut_divergence is None
        return self.codec is not None and is_compared and not self.has_idle_codec

    @property
    @json_key("untried", after="evicted")
    def is_untried(self) -> bool:
        """Return whether the policy or the codec of the row did nothing: it is marked, and never the best."""
        return self.has_no_eviction or self.has_idle_codec or self.has_late_codec

    @property
    def num_uncut_documents(self) -> int:
        """Number of texts of which the policy evicted nothing before the last token was scored, all included."""
        if self.policy == FullCache.name or self.label == UNCUT_LABEL:
            return 0
        return sum(text.evicted is False for text in self.documents)


def find_full_row(rows: Sequence[ResultRow]) -> ResultRow | None:
    """Find the row of the full cache."""
    return next((row for row in rows if row.is_full), None)


@dataclass(frozen=True, kw_only=True)
class DocumentInfo(Record):
    """A document: its name, tokens scored, their UTF-8 bytes, and the SHA-256 of its file."""

    name: str
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class KeepMap(Record):
    """The live tokens of one KV head over the steps of a document."""

    layer: int
    kv_head: int
    #: Tokens seen at each sample.
    steps: tuple[int, ...]
    #: Text positions of the live tokens at each sample.
    kept: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class KeptPositions(Record):
    """The positions of the tokens in a layer at the end of a text."""

    layer: int
    #: Text positions: one list for all KV heads, or one for each if they store different tokens.
    positions: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class TimeSeries(Record):
    """Cache size and live tokens over a text, sampled at several steps; final positions are of all layers."""

    step_tokens: tuple[int, ...]
    cache_bytes: tuple[int, ...]
    keep_map: KeepMap | None = None
    #: The tokens in each layer at the end, as `kvmnn mnn compact --plan` reads them.
    kept: tuple[KeptPositions, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DocumentTrace(TimeSeries):
    """The trace of a document under one configuration."""

    json_keys = "label document step_tokens cache_bytes keep_map kept"

    label: str
    document: str


@dataclass(frozen=True, kw_only=True)
class Refusal(Record):
    """A configuration that the model cannot run."""

    label: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelInfo(Record):
    """Description of a model in results."""

    layers: int
    kv_heads: int
    query_heads: int | None
    head_dim: int
    cache_dtype: str
    vocab: int
    max_positions: int | None
    #: Layers that attend to the latest `window` tokens alone, where the graph takes windows by true positions. Of these
    #: layers only such tokens count in bytes and ratios of rows.
    windowed_layers: int = field(default=0, metadata={"omit": True})
    window: int | None = field(default=None, metadata={"omit": True})


@dataclass(frozen=True, kw_only=True)
class EvaluatedModelInfo(ModelInfo):
    """The model: its path, the SHA-256 of its graph and weights, and its shape."""

    json_keys = (
        "path name sha256 architecture weights layers kv_heads query_heads head_dim cache_dtype vocab max_positions "
        "windowed_layers window"
    )

    path: str
    name: str
    sha256: str
    #: Architecture, and element types of the weights in their source and as they are stored, as far as files say them.
    architecture: str | None = field(default=None, metadata={"omit": True})
    weights: str | None = field(default=None, metadata={"omit": True})


class SettingsProtocol(Protocol):
    """The settings of an evaluation (`kvmnn.evaluation.EvaluationSettings`)."""

    @property
    def chunk(self) -> int: ...
    @property
    def prompt(self) -> int: ...
    @property
    def deep_from(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def repeats(self) -> int: ...


class EvaluationResultsProtocol(Protocol):
    """The results that tables and plots are made from."""

    @property
    def kvmnn(self) -> str: ...
    @property
    def model(self) -> EvaluatedModelInfo: ...
    @property
    def settings(self) -> SettingsProtocol: ...
    @property
    def documents(self) -> Sequence[DocumentInfo]: ...
    @property
    def rows(self) -> Sequence[ResultRow]: ...
    @property
    def traces(self) -> Sequence[DocumentTrace]: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def refused(self) -> Sequence[Refusal]: ...


MIN_NON_ROUNDING_DISTANCE = 0.5
"""From this `compute_relative_distance` distance on K or V are not roundings of the model's own.

Of 4-bit blocks it is about 0.1.
"""


@dataclass(frozen=True, kw_only=True)
class LayerDistanceStats(Record):
    """The distance of a layer's K or V from those that the model computes for the same tokens."""

    layer: int
    part: Part
    #: Elements compared, in the model's dtype, and those with equal bits.
    words: int
    equal: int
    #: Sums of the squared differences, and of the squares of the model's own.
    squares: float
    own_squares: float
    #: For values far from the model's own (`MIN_NON_ROUNDING_DISTANCE`): the transforms whose inverse makes them
    #: roundings of those.
    undo: tuple[str, ...] | None = field(default=None, metadata={"omit": True})

    @property
    def relative_distance(self) -> float:
        """Root mean square of the difference over that of the model's own values.

        It is 1.4 for unrelated values.
        """
        return compute_relative_distance([self])


@dataclass(frozen=True, kw_only=True)
class InitialCacheInfo(Record):
    """The saved cache that the texts start from."""

    #: Name of the file, and a description of its contents.
    name: str
    about: str
    #: Type of the elements in the file.
    dtype: str
    #: Tokens stored in each layer.
    tokens: tuple[int, ...]
    #: Tokens of the text.
    tokens_seen: int
    #: Bits that a number of K and V takes in the file; None unless any are quantised.
    bits: float | None = field(default=None, metadata={"omit": True})
    #: Hash of elements in the model's dtype, positions and token ids.
    sha256: str
    #: Distances to K and V that the model computed.
    distances: tuple[LayerDistanceStats, ...] = field(default=())


def compute_relative_distance(distances: Sequence[LayerDistanceStats]) -> float:
    """Compute `LayerDistanceStats.relative_distance` over several layers."""
    squares, own_squares = (
        sum(distance.squares for distance in distances),
        sum(distance.own_squares for distance in distances),
    )
    return sqrt(squares / own_squares) if own_squares > 0 else float(squares > 0)
