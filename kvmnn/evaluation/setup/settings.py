"""How an evaluation runs: everything its numbers depend on beside model, policies and texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import KvmnnError
from ...files.records import Record
from ...runtime import RuntimeConfig
from ..measuring.cells import CellKind


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Record):
    """Settings of an evaluation.

    Parameters
    ----------
    tokens
        Tokens scored of each document.
    chunk
        Tokens fed at once.
    prompt
        Tokens of the first step, read at once as a prompt; 0 for `chunk` of them. Policies that act on a prompt only
        need one.
    deep_from
        Tokens fed at this position or later are also reported apart; half of `tokens` by default. The tokens of
        `prompt` are never among them: nothing has been cut yet when they are scored.
    seed
        Of the bootstrap and of policies that draw.
    threads
        Of onnxruntime, in each process.
    providers
        Of onnxruntime.
    slack
        Evicted tokens that may stay masked in the buffers before they are cut out, or None (`kvmnn.lm.runner`).
    packed
        Backend of the `PackedCache` that holds the cache, or None.
    frame_dtype
        Words of the frames of the kept cache: ``"fp16"``, rounded as an engine holds them, or ``"fp32"``, as they are.
    repeats
        Of the timed generation; medians are reported.
    project_definitions
        Whether configurations of presets are also measured by their projects' definitions (JSON: ``as_seed``).
    timing
        Whether TTFT, TPOT and the time of attention are measured.
    traces
        Whether memory and live tokens of the first document are recorded over its course.
    lossless
        Options of a lossless runtime around the cache, as the engine's JSON has them (`RuntimeConfig.from_engine`), or
        None for none.
    prefix_store
        Prefix store of which beginnings of texts are taken that were scored before, and in which they are put
        (`kvmnn.evaluation.measuring.stored_scores`); or None. It changes no number but times and the process's peak.
    """

    tokens: int = 2048
    chunk: int = 1
    prompt: int = 0
    deep_from: int = -1
    seed: int = 0
    threads: int = 1
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    slack: int | None = None
    packed: str | None = None
    frame_dtype: Literal["fp16", "fp32"] = "fp16"
    repeats: int = 3
    project_definitions: bool = field(default=True, metadata={"key": "as_seed"})
    timing: bool = True
    traces: bool = False
    lossless: Mapping[str, object] | None = field(default=None, metadata={"omit": True})
    prefix_store: str | None = field(default=None, metadata={"omit": True})

    def __post_init__(self) -> None:
        for name in ("tokens", "chunk", "threads", "repeats"):
            if getattr(self, name) < 1:
                raise KvmnnError(f"{name} is {getattr(self, name)}: expected at least 1")
        if min(self.seed, self.slack or 0, self.prompt) < 0:
            raise KvmnnError("seed, slack and prompt: expected at least 0")
        if self.frame_dtype not in ("fp16", "fp32"):
            raise KvmnnError(f"frame_dtype is {self.frame_dtype!r}: expected 'fp16' or 'fp32'")
        if self.deep_from < 0:
            object.__setattr__(self, "deep_from", self.tokens // 2)
        object.__setattr__(self, "deep_from", max(self.deep_from, self.prompt))
        if self.packed is not None and self.runtime_config is not None:
            raise KvmnnError("packed and lossless: a cache is held packed or in the lossless runtime")
        object.__setattr__(self, "providers", tuple(self.providers))

    @property
    def runtime_config(self) -> RuntimeConfig | None:
        """The options of the lossless runtime around the cache."""
        return None if self.lossless is None else RuntimeConfig.from_engine(self.lossless)

    def select_relevant(self, kind: CellKind) -> dict[str, Any]:
        """The settings that a cell of this kind depends on (`kvmnn.evaluation.running.cell_store`)."""
        relevant = EvaluationSettings.from_dict(self.to_dict()).to_dict()  # without what a subclass adds
        for name in ("as_seed", "timing", "traces", "prefix_store"):
            relevant.pop(name, None)
        if kind != "timing":
            del relevant["repeats"]
        if kind != "score":
            del relevant["deep_from"], relevant["frame_dtype"], relevant["prompt"]
        if kind == "seed":
            del relevant["chunk"]
        return relevant
