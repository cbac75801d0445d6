"""The H2O planner of the MNN fork, bit for bit, as a policy of a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from ..checks import validate_count
from ..errors import KvmnnError
from ..h2o import CADENCES, H2OPlanner
from ..h2o.config import QUANTISED_MODES, H2OConfig
from ..h2o.plan import explain_no_eviction
from .base import Policy, Selection
from .view import PolicyInput, Trigger


@dataclass(frozen=True, kw_only=True)
class H2OEngine(Policy):
    """Keep the blocks that the engine's planner keeps: sinks, recent tokens, and those that drew the most attention.

    Paper: arXiv 2306.14048 (H2O). Original: the planner of the MNN fork with H2O, `kvmnn.h2o.H2OPlanner` bit for bit;
    docs/h2o.md. A plan is made in one decode step of a layer and carried out at the beginning of the next (its double
    buffer), layers are planned at different steps and hold different numbers of tokens, and the first step of a text
    is the prompt, which plans nothing.

    It decides for all layers of a model together, so it runs in `kvmnn.lm` (`Runner`, `generate`, `evaluate`) only;
    `H2OBlocks` is the same idea for one layer.

    Parameters
    ----------
    block_tokens, sink_tokens, recent_tokens, target_mode, target_lossy_ratio, target_keep_ratio, ema_alpha
        As in `kvmnn.h2o.H2OConfig`, with the engine's defaults.
    update_interval, trigger_min_tokens, layer_start, layer_end
        Likewise.
    cadence
        What `update_interval` counts: ``"layer-calls"`` of all layers together, as the engine does, or ``"tokens"`` of
        the same layer, as its documents say.
    layer_nums
        Layers that the model's configuration claims; None where it says nothing. Another number than the model has is
        refused when the model is run.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cadence not in CADENCES:
            raise KvmnnError(f"{self.name}: cadence is {self.cadence!r}: expected one of {', '.join(CADENCES)}")
        if self.layer_nums is not None:
            validate_count(f"{self.name}: layer_nums", self.layer_nums)
        self._build_config()

    @classmethod
    def from_engine(cls, document: Mapping[str, Any], **extra_options: Any) -> H2OEngine:
        """The policy that the object in an engine's ``config.json`` asks for; `extra_options` are options that it does
        not say.

        Raises
        ------
        KvmnnError
            As `parse_engine_options`.
        """
        return cls(**{**cls.parse_engine_options(document), **extra_options})

    @classmethod
    def parse_engine_options(cls, document: Mapping[str, Any]) -> dict[str, Any]:
        """The options that the ``kv_h2o_`` keys of an engine's ``config.json`` set to something else than the default.

        Raises
        ------
        KvmnnError
            For keys that do not exist, values that they cannot have, and a configuration with which the engine evicts
            nothing at all: ``kv_h2o_enable`` false, or an ``attention_mode`` that quantises K or V.
        """
        if document.get("kv_h2o_enable", True) is not True:
            raise KvmnnError("kv_h2o_enable is not true: the engine evicts nothing then; expected true")
        if document.get("attention_mode") in QUANTISED_MODES:
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
        """The planner of a model whose layers have `bytes_per_token` bytes of K and V a token.

        Raises
        ------
        KvmnnError
            Where `layer_nums` is another number than `num_layers`: the engine would take one layer for another.
        """
        if self.layer_nums not in (None, num_layers):
            raise KvmnnError(
                f"{self.name}: layer_nums is {self.layer_nums}, the model has {num_layers} layers: the engine would "
                f"take "
                f"one layer for another; expected {num_layers}"
            )
        return H2OPlanner(self._build_config(layers=num_layers, bytes_per_token=bytes_per_token), cadence=self.cadence)

    def resolve_skip_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset(range(num_layers)) - frozenset(self._build_config(layers=num_layers).evicting_layers)

    def explain_no_eviction(self, prompt_tokens: int, tokens: int) -> str | None:
        return explain_no_eviction(self._build_config(), tokens)

    def select_tokens(self, state: PolicyInput) -> Selection:
        raise KvmnnError(
            f"{self.name} decides for all layers of a model together: use kvmnn.lm.Runner, or kvmnn.h2o.H2OPlanner "
            "call by call; h2o_blocks is its rule for one layer"
        )

    def _build_config(self, **extra_options: Any) -> H2OConfig:
        return H2OConfig(
            block_tokens=self.block_tokens,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            target_mode=self.target_mode,
            target_lossy_ratio=self.target_lossy_ratio,
            target_keep_ratio=self.target_keep_ratio,
            ema_alpha=self.ema_alpha,
            update_interval=self.update_interval,
            trigger_min_tokens=self.trigger_min_tokens,
            layer_start=self.layer_start,
            layer_end=self.layer_end,
            **extra_options,
        )
