"""K and V of a model's layers in a lossless runtime, their cold tokens as frames between the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Literal

import numpy as np

from ... import dtypes
from ...arrays import LayerCache
from ...dtypes import Indices, KVPair
from ...reports.runtime_figures import RuntimeFigures, RuntimeLayer
from ...runtime import LosslessRuntime, RuntimeConfig
from ...runtime.config import check_layers
from ...runtime.metrics import RuntimeMetrics
from ...runtime.schedule import Scope
from ...text import count, span
from ..graph.interface import DecoderInterface
from .kv_store import PlainStore
from .packed_store import runs_of


class LosslessStore:
    """A `LosslessRuntime` around the cache: what a step returns is appended, what the next one attends to is restored.

    One run of the graph does all layers, so all rows are there while it runs; between two steps only the hot ones are,
    and the frames of the others. Layers that the scope leaves out stay in the model's own buffers, which costs nothing.
    The policy decides what goes, not the runtime's own planner.

    Parameters
    ----------
    interface
        The model's.
    config
        Options of the runtime; its scope, trigger and interval count, its eviction does not.
    by_head
        Whether heads keep different tokens: each is then a layer of its own for the runtime.

    Raises
    ------
    KvmnnError
        Where the configuration claims another number of layers than the model has.
    """

    def __init__(self, interface: DecoderInterface, config: RuntimeConfig, *, by_head: bool) -> None:
        self._layers = check_layers(config, interface.layers)
        self._parts = interface.kv_heads if by_head else 1
        self._heads = interface.kv_heads // self._parts
        self._mode = config.mode
        self._seen = 0
        self._token_bytes = 2 * self._heads * interface.head_dim * np.dtype(interface.dtype).itemsize
        covered = _covered(config, self._layers)
        self._places = {layer: place for place, layer in enumerate(covered)}
        none = np.zeros((1, interface.kv_heads, 0, interface.head_dim), interface.dtype)
        self._plain = PlainStore([(none, none) for _ in range(self._layers)])
        self._runtime = LosslessRuntime(
            _narrowed(config, self._layers, covered, self._parts),
            layers=len(covered) * self._parts,
            kv_heads=self._heads,
            head_dim=interface.head_dim,
            dtype=dtypes.of_array(none).name,
        )
        self._none = none, none

    @property
    def nbytes(self) -> int:
        """Bytes held between the steps."""
        return self._runtime.held_bytes + self._plain.nbytes

    def past(self) -> list[KVPair]:
        pairs = list(self._plain.past())
        restored = iter(self._runtime.read_layers(range(len(self._places) * self._parts)))
        for layer in self._places:
            pairs[layer] = _joined([next(restored) for _ in range(self._parts)])
        return pairs

    def adopt(self, present: Sequence[KVPair], new: int, *, prompt: bool = False) -> None:
        if prompt and self._seen:
            self._runtime.start_request(keep=True)  # as in the engine, no block is encoded at a prompt
        for layer, place in self._places.items():
            keys, values = present[layer]
            for part in range(self._parts):
                heads = slice(part * self._heads, (part + 1) * self._heads)
                self._runtime.append(place * self._parts + part, keys[0, heads, -new:], values[0, heads, -new:])
                self._runtime.end()
        self._runtime.sync()
        self._plain.adopt([self._none if layer in self._places else pair for layer, pair in enumerate(present)], new)
        self._seen += new

    def compact(self, layer: int, slots: Indices, live: int) -> None:
        if layer not in self._places:
            self._plain.compact(layer, slots, live)
            return
        for part in range(self._parts):
            row = slots[part if len(slots) > 1 else 0, :live]
            self._runtime.evict(self._places[layer] * self._parts + part, runs_of(row))

    def figures(self) -> RuntimeFigures:
        """What the runtime did, once the encodings that are open are done."""
        self._runtime.wait()
        metrics = self._runtime.metrics()
        layers, tokens = [], 0
        for layer, pair in enumerate(self._plain.past()):
            if layer not in self._places:
                held = sum(part.nbytes for part in pair)
                layers.append(RuntimeLayer(layer=layer, tokens=pair[0].shape[2], held_bytes=held))
                tokens += pair[0].shape[2] * self._parts
                continue
            first = self._places[layer] * self._parts
            parts = metrics.layers[first : first + self._parts]
            names = [entry.name for entry in fields(RuntimeLayer) if entry.name not in ("layer", "tokens")]
            sums = {name: sum(getattr(part, name) for part in parts) for name in names}
            layers.append(RuntimeLayer(layer=layer, tokens=max(part.tokens for part in parts), **sums))
            tokens += sum(part.tokens for part in parts)
        shared = {
            entry.name: getattr(metrics, entry.name) for entry in fields(RuntimeFigures) if entry.name[:4] == "h2o_"
        }
        return RuntimeFigures(
            mode=self._mode,
            appended_bytes=self._seen * self._layers * self._parts * self._token_bytes,
            live_bytes=tokens * self._token_bytes,
            held_bytes=self.nbytes,
            **shared,
            layers=tuple(layers),
        )

    def metrics(self) -> RuntimeMetrics:
        """The runtime's own, once the encodings that are open are done; its layers are those that it covers."""
        self._runtime.wait()
        return self._runtime.metrics()


def _joined(caches: Sequence[LayerCache]) -> KVPair:
    """K and V of a layer from caches of some of its heads each."""
    if len(caches) == 1:
        return caches[0].keys[None], caches[0].values[None]
    keys, values = ([getattr(cache, side) for cache in caches] for side in ("keys", "values"))
    return np.concatenate(keys)[None], np.concatenate(values)[None]


def _covered(config: RuntimeConfig, layers: int) -> list[int]:
    """Layers that may be compressed; the first one where there is none, as a runtime has at least one."""
    scope = Scope(config.for_layers(layers, 1))
    return [layer for layer in range(layers) if scope.at_every_step(layer) is not False] or [0]


def _narrowed(config: RuntimeConfig, layers: int, covered: Sequence[int], parts: int) -> RuntimeConfig:
    """The options for a runtime of these layers only, `parts` of its layers for each, and no eviction of its own."""
    evicting = replace(config.h2o, layers=layers).layer_range
    kept = [place for place, layer in enumerate(covered) if layer in evicting] or [0]
    return replace(
        config,
        front_n=sum(layer < config.front_n for layer in covered) * parts,
        kept_sample_layers=config.kept_sample_layers * parts,
        layer_nums=None,
        h2o=replace(config.h2o, enable=False, layer_start=kept[0] * parts, layer_end=(kept[-1] + 1) * parts - 1),
    )


def storing_notes(runs: Iterable[tuple[str, RuntimeFigures]], config: RuntimeConfig) -> list[str]:
    """Sentences about runs and their labels: where nothing was encoded and why, and which layers stay raw.

    Runs of one label are its texts: each has its own cause.
    """
    found = list(runs)
    texts = Counter(label for label, _ in found)
    without: dict[_Cause, list[tuple[str, RuntimeFigures]]] = {}
    for label, one in found:
        if not one.h2o_lossless_raw_bytes:
            without.setdefault(_cause(one, config), []).append((label, one))
    lines = []
    for cause, same in without.items():
        counts = Counter(label for label, _ in same)
        labels = [
            label if number == texts[label] else f"{label} ({number:,} of {count(texts[label], 'text')})"
            for label, number in counts.items()
        ]
        held = sorted({layer.tokens for _, one in same for layer in one.layers})
        lines.append(f"{', '.join(labels)}: nothing was encoded: {_why_nothing(cause, held, config)}.")
    encoded = sorted({layer.layer for _, one in found for layer in one.layers if layer.raw_bytes})
    layers = max((len(one.layers) for _, one in found), default=0)
    refused = {layer.layer for _, one in found for layer in one.layers if layer.skips} - set(encoded)
    if encoded and refused:
        which = "layer" if len(refused) == 1 else "layers"
        lines.append(
            f"The queue was full (max_queue {config.max_queue:,}) before it came to {which} {span(sorted(refused))}, "
            "still raw at the end; more steps encode them."
        )
    if encoded and len(encoded) + len(refused) < layers:
        scope = f"scope {config.scope}, front_n {config.front_n}" + (", mode probe" if config.mode == "probe" else "")
        which = "layer" if len(encoded) == 1 else "layers"
        lines.append(f"Encoded: {which} {span(encoded)} of {layers} ({scope}); the others stay raw.")
    return lines


_Cause = Literal["scope", "interval", "few tokens"]


def _cause(run: RuntimeFigures, config: RuntimeConfig) -> _Cause:
    if config.scope == "none" or (config.scope == "front_n" and not config.front_n):
        return "scope"
    held = max((layer.tokens for layer in run.layers), default=0)
    return "interval" if held >= config.first_block_tokens else "few tokens"


def _why_nothing(cause: _Cause, held: Sequence[int], config: RuntimeConfig) -> str:
    """Of layers that held these numbers of tokens at the end, ascending."""
    if cause == "scope":
        return f"scope {config.scope} with front_n {config.front_n} names no layer"
    if cause == "interval":
        return f"no block came in the {count(config.h2o.interval, 'step')} between two tries (h2o_update_interval)"
    return (
        f"layers held {span(held)} tokens at the end, a first block needs {config.first_block_tokens:,}: the larger of "
        f"h2o_trigger_min_tokens ({config.h2o.trigger_tokens:,}) and hot_sink_tokens + hot_recent_tokens + "
        f"block_tokens ({config.hot_sink_tokens:,} + {config.hot_recent_tokens:,} + {config.block_tokens:,}). "
        "Lower these, or read more tokens"
    )
