"""Sizes, rotation and windows of the layers of a model or a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from .._util.text import pluralize
from ..arrays.layer_cache import LayerCache
from ..dense import RopeConfig, search_rope
from ..dense.rope import RopeFrequencies
from ..formats.rope_config import read_config_layer_ropes
from ..lm.onnx.interface import DecoderInterface
from ..lm.onnx.model_files import ModelFiles
from ..profiles import LayerGeometry

_MIN_VOTES_PER_LAYER = 0.1
"""Share of the layers that must agree on a rotation found by trial; the rest are outvoted by their neighbours."""


def read_model_layers(
    files: ModelFiles, interface: DecoderInterface, tokens: int
) -> tuple[list[LayerGeometry], list[str]]:
    """Return the layers of a model, and notes.

    Raises
    ------
    SourceError
        For a configuration whose rotation is not known.
    """
    ropes: Sequence[RopeFrequencies | None] | None = None
    notes: list[str] = []
    folder = next((path for path in _list_config_folders(files.graph) if (path / "config.json").is_file()), None)
    if folder is not None:
        ropes, notes = read_config_layer_ropes(str(folder), interface.layers, interface.head_dim, tokens)
    if ropes is None:
        ropes = [None] * interface.layers
        notes.append("the model's configuration says no rotation of K: it is taken as it lies")
    window = files.config.get("sliding_window")
    return [
        LayerGeometry(
            kv_heads=interface.kv_heads,
            head_dim=interface.head_dim,
            value_dim=interface.head_dim,
            rope=rope,
            window=window if type(window) is int and window > 0 and layer in interface.key_position_inputs else None,
        )
        for layer, rope in enumerate(ropes)
    ], notes


def _list_config_folders(graph: Path) -> list[Path]:
    return [graph.parent, graph.parent / "model", graph.absolute().parent.parent]


def find_cache_layers(
    caches: Sequence[LayerCache], rope: RopeConfig | Literal["none", "auto"] = "auto"
) -> tuple[list[LayerGeometry], list[str]]:
    """Return the layers of a cache, and notes.

    Parameters
    ----------
    caches
        K and V of every layer.
    rope
        Rotation of all layers; ``"auto"`` finds that of each by trial.
    """
    if rope != "auto":
        common = rope if isinstance(rope, RopeConfig) else None
        return [LayerGeometry.from_cache(cache, common) for cache in caches], []
    ropes = _vote([search_rope(cache.keys, cache.positions, dtype=cache.dtype) for cache in caches])
    texts = Counter("none" if layer_rope is None else str(layer_rope) for layer_rope in ropes)
    listed = ", ".join(f"{text} ({pluralize(count, 'layer')})" for text, count in texts.items())
    layers = [LayerGeometry.from_cache(cache, layer_rope) for cache, layer_rope in zip(caches, ropes, strict=True)]
    # few models have layers without a rotation among others, and short caches of the rest show it in few layers
    doubt = "; most models rotate K of all layers or of none: a longer cache, or the rotation stated, is safer"
    is_mixed = "none" in texts and len(texts) > 1
    return layers, [f"rotation of K, found by trial: {listed}{doubt if is_mixed else ''}"]


def _vote(ropes: Sequence[RopeConfig | None]) -> list[RopeConfig | None]:
    """Replace rotations that few layers have by that of the nearest layer with a common one."""
    counts = Counter(map(str, ropes))
    common = [
        layer
        for layer, rope in enumerate(ropes)
        if counts[str(rope)] >= max(2, _MIN_VOTES_PER_LAYER * len(ropes)) and rope is not None
    ]
    if not common:
        return list(ropes)
    return [ropes[min(common, key=lambda index: (abs(index - layer), index))] for layer in range(len(ropes))]
