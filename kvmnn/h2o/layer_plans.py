"""Plans of all layers of a cache as if each triggered now: what `kvmnn plan` prints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import Floats
from ..text import LOSSY, UNCHANGED, pluralize
from .config import H2OConfig
from .keep_map import MAP_LEGEND, compute_tokens_per_letter, render_block_map
from .plan import BlockPlan, plan_blocks

MAX_SHOWN_PAIRS = 100
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
    plan: BlockPlan

    def to_plan_entry(self) -> dict[str, Any]:
        """What `kvmnn compact --plan` reads of a layer."""
        pairs = [list(pair) for pair in self.plan.reserve_pairs]
        return {"layer": self.layer, "remove": self.plan.window_tokens, "pairs": pairs}

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        layer_plan = self.plan
        return {
            **self.to_plan_entry(),
            "name": self.name,
            "tokens": layer_plan.kv_len,
            "blocks": layer_plan.keep.size,
            "tokens_after": layer_plan.num_final_tokens,
            "evicted": layer_plan.num_evicted,
            "target": layer_plan.target_before_floor,
            "floor_tokens": layer_plan.floor_tokens,
            "floor_dominates": layer_plan.floor_dominates,
            "quantized_keep": layer_plan.quantized_keep,
            "keep_ratio": float(layer_plan.keep_ratio),
            "lossy_ratio": float(layer_plan.lossy_ratio),
            "lossy_ratio_of": self._ratio_basis,
            "keep": "".join("1" if is_kept else "0" for is_kept in layer_plan.keep | (layer_plan.num_evicted == 0)),
        }

    def format_lines(self, config: H2OConfig) -> list[str]:
        """What stays, and the pairs as `kvmnn compact` takes them; without the picture."""
        layer_plan = self.plan
        label = f"layer {self.layer}"
        head = f"{label}: " if self.name == label else f"{label} ({self.name}): "
        if not layer_plan.num_evicted:
            reason = self._explain_floor(config) if layer_plan.floor_dominates else "the target is all of them"
            return [head + f"{UNCHANGED}, all {layer_plan.kv_len:,} tokens stay: {reason}"]
        head += (
            f"{LOSSY}, {layer_plan.num_final_tokens:,} of {layer_plan.kv_len:,} tokens stay, "
            f"{float(layer_plan.lossy_ratio):.3f} x "
            f"{self._ratio_basis}, target {layer_plan.target_before_floor:,}"
        )
        return [head, f"  --remove {layer_plan.window_tokens} --reserve {self._format_reserve()}"]

    def _explain_floor(self, config: H2OConfig) -> str:
        """Why the floor leaves nothing to evict, and what to lower."""
        target = self.plan.target_before_floor
        options = " and ".join(
            f"--{name.removesuffix('_tokens')} ({getattr(config, name):,})"
            for name in self.plan.list_options_to_lower(config)
        )
        return (
            f"sink and recent reach the target, {self.plan.floor_tokens:,} tokens in blocks of "
            f"{config.effective_block_tokens:,} where "
            f"{target:,} are to stay: lower {options}"
        )

    @property
    def _ratio_basis(self) -> str:
        return "tokens" if self.plan.bytes_per_token is None else "bytes"

    def _format_reserve(self) -> str:
        """As `kvmnn compact --reserve` reads them, or the first of very many."""
        reserve = self.plan.reserve_pairs
        pairs_text = ",".join(f"{begin}:{size}" for begin, size in reserve[:MAX_SHOWN_PAIRS])
        num_hidden = len(reserve) - MAX_SHOWN_PAIRS
        return (
            pairs_text
            if num_hidden <= 0
            else f"{pairs_text} ... {pluralize(num_hidden, 'pair')} more (-o writes them all)"
        )


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
        return LOSSY if any(layer.plan.num_evicted for layer in self.layers) else UNCHANGED

    def to_plan_entries(self) -> list[dict[str, Any]]:
        """What `kvmnn compact --plan` reads."""
        return [layer.to_plan_entry() for layer in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        config = self.config
        return {
            "input": self.input,
            "output": self.output,
            "label": self.label,
            "seconds": self.seconds,
            "config": {
                "block_tokens": config.effective_block_tokens,
                "sink_tokens": config.sink_tokens,
                "recent_tokens": config.recent_tokens,
                "target_mode": config.target_mode,
                "keep_ratio": float(config.effective_keep_ratio),
                "ema_alpha": float(config.effective_alpha),
                "bytes_per_token": config.bytes_per_token,
            },
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def format_lines(self, *, width: int = 100, picture: bool = True) -> list[str]:
        """For people: each layer's figures, pairs and, unless `picture` is False, its blocks in `width` columns."""
        lines = []
        for layer in self.layers:
            lines += layer.format_lines(self.config)
            if picture:
                lines += [f"  {line}" for line in render_block_map(layer.plan, width - 2)]
            if picture and layer.layer == 0:
                lines.append(f"  {compute_tokens_per_letter(layer.plan, width - 2):,} tokens a letter: {MAP_LEGEND}")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.format_lines())


def plan_layers(scores: Sequence[LayerScores], config: H2OConfig | None = None) -> LayerPlans:
    """Plan every layer as if it triggered now.

    Raises
    ------
    KvmnnError
        As for `plan_blocks`.
    """
    config = config or H2OConfig()
    start_time = time.perf_counter()
    layers = tuple(
        LayerPlan(layer=number, name=layer.name, plan=plan_blocks(layer.scores, layer.kv_len, config))
        for number, layer in enumerate(scores)
    )
    return LayerPlans(config=config, layers=layers, seconds=time.perf_counter() - start_time)
