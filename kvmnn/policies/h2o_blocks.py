"""The H2O planner of the MNN fork as policies: its rule for one layer, and an exact copy for a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np

from .._util.dataclass import dataclass
from .._util.validation import validate_count, validate_fraction
from ..dtypes import Indices
from ..errors import KvmnnError
from .h2o import CADENCES, H2OPlanner, plan_blocks
from .h2o.config import QUANTIZED_MODES, STATIC, H2OConfig
from .h2o.plan import explain_no_eviction
from .h2o.scores import sum_by_block
from .policy import BudgetedPolicy, Policy, PolicyInput, Selection, Trigger
from .scores import EmaScores


@dataclass(frozen=True, kw_only=True)
class H2OBlocks(BudgetedPolicy):
    """Keep blocks of tokens: those of sinks and recent tokens, and those that drew the most attention until the target.

    Paper: arXiv 2306.14048 (H2O). Original: the planner of the MNN fork with H2O. The choice is `plan_blocks` of
    `kvmnn.policies.h2o`; docs/h2o.md.

    Parameters
    ----------
    keep_ratio
        Target before full blocks and protected ones raise it; a third by default, the engine's adaptive target 3.0
        (`from_lossy_ratio`). At most 1.
    budget
        Or the target in tokens.
    block_tokens, sink, recent, ema_alpha, update_interval, trigger_min_tokens
        As in `kvmnn.policies.h2o.H2OConfig`.
    skip_layers
        0 and 1 by default, the engine's layer_start of 2.

    Notes
    -----
    Where it differs from the engine, which `kvmnn.policies.h2o.H2OPlanner` is bit for bit:

    * Scores belong to tokens here, as those of the other policies, and are added up to blocks when a plan is made; the
      engine averages block sums. The two agree but for rounding.
    * `update_interval` counts decode steps of the layer since its last plan, as the fork's settings are described;
      the engine counts calls of all layers together.
    * What a plan drops goes right after the step that made it, not at the start of the next: nothing attends between.
    * Scores are cut when the cache is, never before it.
    """

    name: ClassVar[str] = "h2o_blocks"
    requires = "scores"
    default_keep_ratio = float(H2OConfig().effective_keep_ratio)
    budget_help = "a target that protected tokens and whole blocks raise; more is held between two plans"

    block_tokens: int = 64
    sink: int = 32
    recent: int = 256
    ema_alpha: float = 0.9
    update_interval: int = 16
    trigger_min_tokens: int = 512
    skip_layers: tuple[int, ...] = (0, 1)

    @classmethod
    def from_lossy_ratio(cls, lossy_ratio: float, **options: Any) -> H2OBlocks:
        """Create the engine's adaptive target: keep one token in `lossy_ratio`, in float32."""
        return cls(keep_ratio=float(H2OConfig(target_lossy_ratio=lossy_ratio).effective_keep_ratio), **options)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block_tokens", "sink", "recent", "update_interval", "trigger_min_tokens"):
            validate_count(f"{self.name}: {name}", getattr(self, name))
        validate_fraction(f"{self.name}: ema_alpha", self.ema_alpha)

    @property
    def score_accumulator(self) -> EmaScores:
        return EmaScores(self.ema_alpha)

    def explain_no_eviction(self, prompt_tokens: int, tokens: int) -> str | None:
        names = {"sink_tokens": "sink", "recent_tokens": "recent"}
        config = replace(self._build_config(tokens), trigger_min_tokens=self.trigger_min_tokens)
        return super().explain_no_eviction(prompt_tokens, tokens) or explain_no_eviction(config, tokens, names)

    def select_tokens(self, state: PolicyInput) -> list[Indices] | None:
        is_due = state.num_steps is None or state.num_steps >= max(1, self.update_interval)
        if state.tokens < max(1, self.trigger_min_tokens) or not is_due:
            return None
        config = self._build_config(state.tokens)
        plans = [
            plan_blocks(sum_by_block(row[None], config.effective_block_tokens), state.tokens, config)
            for row in state.get_row_scores()
        ]
        # All tokens where nothing goes, not None, so that steps are counted from here on.
        return [layer_plan.list_kept_tokens().astype(np.int64) for layer_plan in plans]

    def _build_config(self, tokens: int) -> H2OConfig:
        ratio = self.keep_ratio
        if self.budget is not None:
            share = np.float32(self.budget / tokens)
            while np.ceil(share * np.float32(tokens)) > self.budget:  # float32 could ask for one token more
                share = np.nextafter(share, np.float32(0))
            ratio = float(share)
        if ratio is None:
            raise KvmnnError(f"{self.name}: expected a budget or a keep_ratio")
        return H2OConfig(
            block_tokens=self.block_tokens,
            sink_tokens=self.sink,
            recent_tokens=self.recent,
            target_mode=STATIC,
            target_keep_ratio=ratio,
        )


@dataclass(frozen=True, kw_only=True)
class H2OEngine(Policy):
    """Keep the blocks that the engine's planner keeps: sinks, recent tokens, and those that drew the most attention.

    Paper: arXiv 2306.14048 (H2O). Original: the planner of the MNN fork with H2O, `kvmnn.policies.h2o.H2OPlanner` bit
    for bit; docs/h2o.md. A plan is made in one decode step of a layer and carried out at the beginning of the next (its
    double buffer), layers are planned at different steps and hold different numbers of tokens, and the first step of a
    text is the prompt, which plans nothing.

    It decides for all layers of a model together, so it runs in `kvmnn.lm` (`Runner`, `generate`, `evaluate`) only;
    `H2OBlocks` is the same idea for one layer.

    Parameters
    ----------
    block_tokens, sink_tokens, recent_tokens, target_mode, target_lossy_ratio, target_keep_ratio, ema_alpha
        As in `kvmnn.policies.h2o.H2OConfig`, with the engine's defaults.
    update_interval, trigger_min_tokens, layer_start, layer_end, floor
        Likewise.
    cadence
        Unit of `update_interval`: ``"layer-calls"`` of all layers, as in the engine, or ``"tokens"`` of the same layer,
        as in its documentation.
    layer_nums
        Layers of the model's configuration, or None. A model with another number is refused.
    """

    name: ClassVar[str] = "h2o_engine"
    requires = "scores"
    triggers = frozenset({Trigger.AFTER_APPEND})
    has_independent_layers = True
    budget_help = "it has none: `target_lossy_ratio`, or `target_keep_ratio` with `target_mode=static`, is the target"

    skip_layers: tuple[int, ...] = field(default=(), init=False, repr=False)
    block_tokens: int = H2OConfig.block_tokens
    sink_tokens: int = H2OConfig.sink_tokens
    recent_tokens: int = H2OConfig.recent_tokens
    target_mode: Literal["adaptive", "static"] = "adaptive"
    target_lossy_ratio: float = H2OConfig.target_lossy_ratio
    target_keep_ratio: float = H2OConfig.target_keep_ratio
    ema_alpha: float = H2OConfig.ema_alpha
    update_interval: int = H2OConfig.update_interval
    trigger_min_tokens: int = H2OConfig.trigger_min_tokens
    layer_start: int = H2OConfig.layer_start
    layer_end: int = H2OConfig.layer_end
    cadence: Literal["layer-calls", "tokens"] = "layer-calls"
    layer_nums: int | None = None
    floor: Literal["engine", "keep"] = "engine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cadence not in CADENCES:
            raise KvmnnError(f"{self.name}: cadence is {self.cadence!r}: expected one of {', '.join(CADENCES)}")
        if self.layer_nums is not None:
            validate_count(f"{self.name}: layer_nums", self.layer_nums)
        self._build_config()

    @classmethod
    def from_engine(cls, document: Mapping[str, Any], **extra_options: Any) -> H2OEngine:
        """Create the policy of an engine's ``config.json``; `extra_options` are options that it lacks.

        Raises
        ------
        KvmnnError
            As `parse_engine_options`.
        """
        return cls(**{**cls.parse_engine_options(document), **extra_options})

    @classmethod
    def parse_engine_options(cls, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that ``kv_h2o_`` keys of an engine's ``config.json`` set to a value other than the
        default.

        Raises
        ------
        KvmnnError
            For keys that do not exist, values that they cannot have, and a configuration with which the engine evicts
            nothing at all: ``kv_h2o_enable`` false, or an ``attention_mode`` that quantises K or V.
        """
        if document.get("kv_h2o_enable", True) is not True:
            raise KvmnnError("kv_h2o_enable is not true: the engine evicts nothing then; expected true")
        if document.get("attention_mode") in QUANTIZED_MODES:
            raise KvmnnError(
                f"attention_mode {document['attention_mode']} quantises K or V: the engine evicts nothing then; "
                "expected 0 or 8"
            )
        config = H2OConfig.from_engine(document)
        names = [entry.name for entry in fields(cls) if entry.init and hasattr(config, entry.name)]
        values = {name: getattr(config, name) for name in names}
        changed_options = {name: value for name, value in values.items() if value != getattr(cls, name)}
        return changed_options | ({"layer_nums": config.layers} if "layer_nums" in document else {})

    def create_planner(self, num_layers: int, bytes_per_token: int) -> H2OPlanner:
        """Create the planner of a model whose layers have `bytes_per_token` bytes of K and V per token.

        Raises
        ------
        KvmnnError
            Where `layer_nums` is another number than `num_layers`: the engine would take one layer for another.
        """
        if self.layer_nums not in (None, num_layers):
            raise KvmnnError(
                f"{self.name}: layer_nums is {self.layer_nums}, the model has {num_layers} layers: the engine would "
                f"take one layer for another; expected {num_layers}"
            )
        return H2OPlanner(self._build_config(layers=num_layers, bytes_per_token=bytes_per_token), cadence=self.cadence)

    def resolve_skip_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset(range(num_layers)) - frozenset(self._build_config(layers=num_layers).evicting_layers)

    def explain_no_eviction(self, prompt_tokens: int, tokens: int) -> str | None:
        return explain_no_eviction(self._build_config(), tokens)

    def select_tokens(self, state: PolicyInput) -> Selection:
        raise KvmnnError(
            f"{self.name} decides for all layers of a model together: use kvmnn.lm.Runner, or "
            "kvmnn.policies.h2o.H2OPlanner call by call; h2o_blocks is its rule for one layer"
        )

    def _build_config(self, **extra_options: Any) -> H2OConfig:
        names = {entry.name for entry in fields(H2OConfig)} & {entry.name for entry in fields(self)}
        return H2OConfig(**{name: getattr(self, name) for name in names}, **extra_options)
