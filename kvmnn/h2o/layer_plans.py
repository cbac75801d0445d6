"""Plans of all layers of a cache as if each triggered now: what `kvmnn plan` prints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import Floats
from ..text import LOSSY, UNCHANGED, count
from .config import H2OConfig
from .keep_map import LEGEND, keep_map, tokens_per_letter
from .plan import Plan, plan

MAX_PAIRS = 100
"""Pairs of a layer that are shown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerScores:
    """What is known of one layer.

    Attributes
    ----------
    name
        Where it came from.
    kv_len
        Tokens.
    scores
        float32 ``[blocks]``.
    """

    name: str
    kv_len: int
    scores: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan:
    """The plan of one layer.

    Attributes
    ----------
    layer, name
        Its number, and where its scores came from.
    plan
        What stays.
    """

    layer: int
    name: str
    plan: Plan

    def entry(self) -> dict[str, Any]:
        """What `kvmnn compact --plan` reads of a layer."""
        pairs = [list(pair) for pair in self.plan.reserve]
        return {"layer": self.layer, "remove": self.plan.remove, "pairs": pairs}

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        made = self.plan
        return {
            **self.entry(),
            "name": self.name,
            "tokens": made.kv_len,
            "blocks": made.keep.size,
            "tokens_after": made.final_keep,
            "evicted": made.evicted,
            "target": made.target_before_floor,
            "floor_tokens": made.floor_tokens,
            "floor_dominates": made.floor_dominates,
            "quantized_keep": made.quantized_keep,
            "keep_ratio": float(made.keep_ratio),
            "lossy_ratio": float(made.lossy_ratio),
            "lossy_ratio_of": self._ratio_of,
            "keep": "".join("1" if kept else "0" for kept in made.keep | (made.evicted == 0)),
        }

    def lines(self, config: H2OConfig) -> list[str]:
        """What stays, and the pairs as `kvmnn compact` takes them; without the picture."""
        made = self.plan
        label = f"layer {self.layer}"
        head = f"{label}: " if self.name == label else f"{label} ({self.name}): "
        if not made.evicted:
            why = self._why(config) if made.floor_dominates else "the target is all of them"
            return [head + f"{UNCHANGED}, all {made.kv_len:,} tokens stay: {why}"]
        head += (
            f"{LOSSY}, {made.final_keep:,} of {made.kv_len:,} tokens stay, {float(made.lossy_ratio):.3f} x "
            f"{self._ratio_of}, target {made.target_before_floor:,}"
        )
        return [head, f"  --remove {made.remove} --reserve {self._pairs()}"]

    def _why(self, config: H2OConfig) -> str:
        """Why the floor leaves nothing to evict, and what to lower."""
        target = self.plan.target_before_floor
        options = " and ".join(
            f"--{name.removesuffix('_tokens')} ({getattr(config, name):,})" for name in self.plan.to_lower(config)
        )
        return (
            f"sink and recent reach the target, {self.plan.floor_tokens:,} tokens in blocks of {config.block:,} where "
            f"{target:,} are to stay: lower {options}"
        )

    @property
    def _ratio_of(self) -> str:
        return "tokens" if self.plan.bytes_per_token is None else "bytes"

    def _pairs(self) -> str:
        """As `kvmnn compact --reserve` reads them, or the first of very many."""
        reserve = self.plan.reserve
        shown = ",".join(f"{begin}:{size}" for begin, size in reserve[:MAX_PAIRS])
        left = len(reserve) - MAX_PAIRS
        return shown if left <= 0 else f"{shown} ... {count(left, 'pair')} more (-o writes them all)"


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlans:
    """The plans of all layers.

    Attributes
    ----------
    config
        The options that they were made with.
    layers
        A plan each.
    seconds
        Time taken, reading included.
    input, output
        The file of scores, and the file that the plans were written to, if any.
    """

    config: H2OConfig
    layers: tuple[LayerPlan, ...]
    seconds: float
    input: str | None = None
    output: str | None = None

    @property
    def label(self) -> str:
        """``"LOSSY"`` if any layer drops tokens, else ``"UNCHANGED"``: nothing is decoded here, nothing compared."""
        return LOSSY if any(layer.plan.evicted for layer in self.layers) else UNCHANGED

    def entries(self) -> list[dict[str, Any]]:
        """What `kvmnn compact --plan` reads."""
        return [layer.entry() for layer in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        config = self.config
        return {
            "input": self.input,
            "output": self.output,
            "label": self.label,
            "seconds": self.seconds,
            "config": {
                "block_tokens": config.block,
                "sink_tokens": config.sink_tokens,
                "recent_tokens": config.recent_tokens,
                "target_mode": config.target_mode,
                "keep_ratio": float(config.ratio),
                "ema_alpha": float(config.alpha),
                "bytes_per_token": config.bytes_per_token,
            },
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def lines(self, *, width: int = 100, picture: bool = True) -> list[str]:
        """For people: each layer's figures, pairs and, unless `picture` is False, its blocks in `width` columns."""
        lines = []
        for layer in self.layers:
            lines += layer.lines(self.config)
            if picture:
                lines += [f"  {line}" for line in keep_map(layer.plan, width - 2)]
            if picture and layer.layer == 0:
                lines.append(f"  {tokens_per_letter(layer.plan, width - 2):,} tokens a letter: {LEGEND}")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


def plan_layers(scores: Sequence[LayerScores], config: H2OConfig | None = None) -> LayerPlans:
    """Plan every layer as if it triggered now.

    Raises
    ------
    KvmnnError
        As for `plan`.
    """
    config = config or H2OConfig()
    started = time.perf_counter()
    layers = tuple(
        LayerPlan(layer=number, name=layer.name, plan=plan(layer.scores, layer.kv_len, config))
        for number, layer in enumerate(scores)
    )
    return LayerPlans(config=config, layers=layers, seconds=time.perf_counter() - started)
