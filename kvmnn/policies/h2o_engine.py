"""The H2O planner of the MNN fork, bit for bit, as a policy of a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from ..checks import check_count
from ..errors import KvmnnError
from ..h2o import CADENCES, Planner
from ..h2o.config import QUANTISED_MODES, H2OConfig
from ..h2o.plan import never_drops
from .base import Kept, Policy
from .view import Moment, View


@dataclass(frozen=True, kw_only=True)
class H2OEngine(Policy):
    """Keep the blocks that the engine's planner keeps: sinks, recent tokens, and those that drew the most attention.

    Paper: arXiv 2306.14048 (H2O). Original: the planner of the MNN fork with H2O, `kvmnn.h2o.Planner` bit for bit;
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
    needs = "scores"
    moments = frozenset({Moment.APPENDED})
    layers_apart = True
    budget_means = "it has none: `target_lossy_ratio`, or `target_keep_ratio` with `target_mode=static`, is the target"

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
            check_count(f"{self.name}: layer_nums", self.layer_nums)
        self._config()

    @classmethod
    def from_engine(cls, document: Mapping[str, Any], **more: Any) -> H2OEngine:
        """The policy that the object in an engine's ``config.json`` asks for; `more` are options that it does not say.

        Raises
        ------
        KvmnnError
            As `options_from_engine`.
        """
        return cls(**{**cls.options_from_engine(document), **more})

    @classmethod
    def options_from_engine(cls, document: Mapping[str, Any]) -> dict[str, Any]:
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
        found = {name: value for name, value in values.items() if value != getattr(cls, name)}
        return found | ({"layer_nums": config.layers} if "layer_nums" in document else {})

    def planner(self, layers: int, bytes_per_token: int) -> Planner:
        """The planner of a model whose layers have `bytes_per_token` bytes of K and V a token.

        Raises
        ------
        KvmnnError
            Where `layer_nums` is another number than `layers`: the engine would take one layer for another.
        """
        if self.layer_nums not in (None, layers):
            raise KvmnnError(
                f"{self.name}: layer_nums is {self.layer_nums}, the model has {layers} layers: the engine would take "
                f"one layer for another; expected {layers}"
            )
        return Planner(self._config(layers=layers, bytes_per_token=bytes_per_token), cadence=self.cadence)

    def skipped(self, layers: int) -> frozenset[int]:
        return frozenset(range(layers)) - frozenset(self._config(layers=layers).layer_range)

    def why_all_stay(self, prompt: int, tokens: int) -> str | None:
        return never_drops(self._config(), tokens)

    def rule(self, view: View) -> Kept:
        raise KvmnnError(
            f"{self.name} decides for all layers of a model together: use kvmnn.lm.Runner, or kvmnn.h2o.Planner call "
            "by call; h2o_blocks is its rule for one layer"
        )

    def _config(self, **more: Any) -> H2OConfig:
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
            **more,
        )
