"""Cells, the measurements of one configuration on one document, which a run stores and rows are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, overload

from .._util.dataclass import dataclass
from ..files.schema import Record
from ..policies.h2o.planner import H2OStats
from ..reports.records import FrameSizeStats, LayerDistanceStats, ModelInfo, RuntimeStats, TimeSeries

CellKind = Literal["score", "seed", "timing", "reference"]
"""Kind of a cell, as in files of cells; "seed": by the definition of a preset's project. "reference" has no cell: the
full cache is scored again for its distributions, as its cell is known already but not they."""


@dataclass
class LossSums(Record):
    """Sums over scored tokens."""

    #: Scored tokens, and those that were the most probable one.
    tokens: int = 0
    #: Negative log-probabilities in nats, float64.
    nll: float = 0.0
    hits: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenDivergence(Record):
    """The next-token distributions of one document next to those of the full cache (`kvmnn.evaluation.divergence`)."""

    #: Scored tokens; the last `num_deep` are the deep ones.
    tokens: int
    num_deep: int
    #: Base64 of the divergence of each token in nats, little-endian float32, and of one bit for each, the highest of a
    #: byte first: whether both find the same token most probable.
    kl: str
    agreement: str


@dataclass(frozen=True, kw_only=True)
class ScoreCell(Record):
    """Quality, time and bytes of one document; `ResultRow` explains the quantities."""

    model: ModelInfo
    every: LossSums
    deep: LossSums
    seconds: float
    model_seconds: float
    policy_seconds: float
    cache_bytes_mean: float
    cache_bytes_peak: int
    tokens_kept: tuple[int, ...]
    tokens_seen: int
    process_peak_bytes: int | None
    process_opened_bytes: int | None
    frames: FrameSizeStats
    h2o: H2OStats | None = field(default=None, metadata={"omit": True})
    runtime: RuntimeStats | None = field(default=None, metadata={"omit": True})
    trace: TimeSeries | None = field(default=None, metadata={"omit": True})
    stored_tokens: int | None = field(default=None, metadata={"omit": True})
    stored_notes: tuple[str, ...] | None = field(default=None, metadata={"omit": True})
    distances: tuple[LayerDistanceStats, ...] | None = field(default=None, metadata={"omit": True})
    cut_tokens: int | None = field(default=None, metadata={"omit": True})
    lossy_tokens: int | None = field(default=None, metadata={"omit": True})
    #: Whether anything of the cache was evicted or changed by the policy in the end, tokens of which heads still hold.
    has_cut: bool = field(default=False, metadata={"omit": True})
    divergence: TokenDivergence | None = field(default=None, metadata={"omit": True})


@dataclass(frozen=True, kw_only=True)
class ProjectCell(Record):
    """Measurement of one document by the definition of a preset's project."""

    #: `weighted_nll` / `weight` is the loss in nats.
    weight: int
    weighted_nll: float
    #: Correct, scored and all tokens.
    hits: int
    scored_tokens: int
    text_tokens: int
    #: Only when measured in chunks (E2).
    chunks_left_out: int | None = field(default=None, metadata={"omit": True})
    #: Wall time; the other two only when measured token by token (E1).
    seconds: float
    ttft_seconds: float | None = field(default=None, metadata={"omit": True})
    tpot_seconds: float | None = field(default=None, metadata={"omit": True})
    #: Tokens in one layer at the end.
    final_cache_tokens: int


@dataclass(frozen=True, kw_only=True)
class ProjectTimes(Record):
    """Times of a generation, as the StreamingLLM + H2O project defines them (E3 of `kvmnn.evaluation.presets`)."""

    ttft_seconds: float
    tpot_seconds: float
    tokens_per_second: float
    prompt_tokens: int
    new_tokens: int
    repeats: int


@dataclass(frozen=True, kw_only=True)
class TimingCell(Record):
    """Latency of the model under one configuration."""

    #: Time from the first chunk of the prompt to the logits of its last token.
    ttft_seconds: float
    #: Mean time of the steps after it, each of one token of the text and so comparable between policies.
    tpot_seconds: float | None
    prompt_tokens: int
    decoded_tokens: int
    repeats: int
    #: Attention of all layers in one such step (`kvmnn.lm.onnx.profile.AttentionTimeStats`).
    attention_seconds: float | None = field(default=None, metadata={"omit": True})
    #: Reason if the attention time is unknown although there were such steps.
    no_attention: str | None = field(default=None, metadata={"omit": True})
    #: Times by the definition of a preset's project (JSON: ``as_seed``).
    project_times: ProjectTimes | None = field(default=None, metadata={"key": "as_seed", "omit": True})


@dataclass(frozen=True)
class RefusedCell(Record):
    """Reason why the model cannot measure a cell of kind "seed" or "timing"."""

    refused: str


Cell = ScoreCell | ProjectCell | TimingCell | RefusedCell


@overload
def read_cell(kind: Literal["score"], document: object, where: str) -> ScoreCell: ...
@overload
def read_cell(kind: Literal["seed"], document: object, where: str) -> ProjectCell | RefusedCell: ...
@overload
def read_cell(kind: Literal["timing"], document: object, where: str) -> TimingCell | RefusedCell: ...
@overload
def read_cell(kind: CellKind, document: object, where: str) -> Cell: ...
def read_cell(kind: CellKind, document: object, where: str) -> Cell:
    """Parse a cell from its `to_dict`."""
    if kind == "score":
        return ScoreCell.from_dict(document, where)
    if isinstance(document, Mapping) and "refused" in document:
        return RefusedCell.from_dict(document, where)
    return ProjectCell.from_dict(document, where) if kind == "seed" else TimingCell.from_dict(document, where)
