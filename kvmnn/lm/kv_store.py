"""Storage of K and V of the layers of a model between its steps: plain, packed as in MNN, or in a lossless runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Literal, Protocol

import numpy as np

from .. import dtypes
from .._util.text import LOSSY, format_range, pluralize
from ..dtypes import Elements, Indices, KVPair
from ..errors import KvmnnError
from ..linear.tables import build_tables as build_linear_tables
from ..packed.cache import PackedCache
from ..packed.layout import PackLayout
from ..profiles import Profile
from ..reports.records import RuntimeLayerStats, RuntimeStats
from ..runtime import LosslessRuntime, RuntimeConfig
from ..runtime.config import check_num_layers
from ..runtime.metrics import RuntimeMetrics
from ..runtime.schedule import CompressionScope
from ..transform import HeadMoments, split_heads
from . import _eviction
from .onnx.interface import DecoderInterface


class KVStore(Protocol):
    """Storage of K and V between the steps of a model; arrays are ``[1, kv_head, slot, head_dim]``."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the buffers."""

    def get_past(self) -> list[KVPair]:
        """Return K and V of every layer for the next step."""

    def set_present(self, present: Sequence[KVPair], num_new: int, *, is_prompt: bool = False) -> None:
        """Store the outputs of a step: the past and `num_new` tokens after it, which may be (part of) a prompt."""

    def compact(self, layer: int, slots: Indices, num_live: int) -> None:
        """Keep the first `num_live` slots of each row of `slots`, ascending: one row, or one for each KV head."""

    def put_keys(self, layer: int, slots: Indices, keys: Elements) -> None:
        """Replace the keys in these slots, ``[kv_head, slot]``, by ``[kv_head, slot, head_dim]``."""


class PlainStore:
    """Stores the arrays of the model; tokens only move inside the buffer, when others are dropped."""

    def __init__(self, empty_pairs: Sequence[KVPair]) -> None:
        self._pairs = list(empty_pairs)

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._pairs)

    def get_past(self) -> list[KVPair]:
        return self._pairs

    def set_present(self, present: Sequence[KVPair], num_new: int, *, is_prompt: bool = False) -> None:
        self._pairs = list(present)

    def compact(self, layer: int, slots: Indices, num_live: int) -> None:
        keys, values = self._pairs[layer]
        self._pairs[layer] = _compact_rows(keys, slots, num_live), _compact_rows(values, slots, num_live)

    def put_keys(self, layer: int, slots: Indices, keys: Elements) -> None:
        all_keys, values = self._pairs[layer]
        all_keys = all_keys.copy()
        np.put_along_axis(all_keys[0], slots[:, :, np.newaxis], keys, axis=1)
        self._pairs[layer] = all_keys, values


def _compact_rows(elements: Elements, slots: Indices, num_live: int) -> Elements:
    """Move the live tokens to the front of the same memory."""
    if not elements.flags.c_contiguous or not elements.flags.writeable:
        elements = elements.copy()
    _, heads, num_slots, head_dim = elements.shape
    if elements.size:
        _eviction.gather(
            elements.view(np.uint8).reshape(heads, num_slots, head_dim * elements.itemsize), slots, num_live
        )
    return elements.reshape(-1)[: heads * num_live * head_dim].reshape(1, heads, num_live, head_dim)


class PackedStore:
    """A `PackedCache` for each layer, or for each KV head if heads keep different tokens."""

    def __init__(self, interface: DecoderInterface, backend: str, *, per_head: bool) -> None:
        cache_dtype = dtypes.infer_dtype(np.empty(0, interface.dtype)).name
        heads = 1 if per_head else interface.kv_heads
        layout = PackLayout.from_backend(backend, kv_heads=heads, head_dim=interface.head_dim)
        if layout.is_quantized or layout.dtype != cache_dtype:
            layout_dtype = "int8" if layout.is_quantized else layout.dtype
            raise KvmnnError(
                f"layout {backend} holds {layout_dtype}, the cache of this model is {cache_dtype}: expected the same "
                f"for both"
            )
        self._interface = interface
        self._caches = [
            [PackedCache(layout) for _ in range(interface.kv_heads // heads)] for _ in range(interface.layers)
        ]

    @property
    def nbytes(self) -> int:
        return sum(cache.key_buffer.nbytes + cache.value_buffer.nbytes for caches in self._caches for cache in caches)

    def get_past(self) -> list[KVPair]:
        dtype, past = self._interface.dtype, []
        for caches in self._caches:
            sides = zip(*(cache.to_arrays() for cache in caches), strict=True)
            keys, values = (np.concatenate(side)[None].astype(dtype, copy=False) for side in sides)
            past.append((keys, values))
        return past

    def set_present(self, present: Sequence[KVPair], num_new: int, *, is_prompt: bool = False) -> None:
        for caches, (keys, values) in zip(self._caches, present, strict=True):
            heads = self._interface.kv_heads // len(caches)
            for number, cache in enumerate(caches):
                head_range = slice(number * heads, (number + 1) * heads)
                cache.append(
                    np.ascontiguousarray(keys[0, head_range, -num_new:]),
                    np.ascontiguousarray(values[0, head_range, -num_new:]),
                )

    def compact(self, layer: int, slots: Indices, num_live: int) -> None:
        caches = self._caches[layer]
        for number, cache in enumerate(caches):
            row = slots[number if len(slots) > 1 else 0, :num_live]
            cache.realloc(remove=len(cache), reserve=find_runs(row))

    def put_keys(self, layer: int, slots: Indices, keys: Elements) -> None:
        raise KvmnnError("a policy that changes keys runs with the arrays of the model only: no --packed or runtime")


def find_runs(slots: Indices) -> list[tuple[int, int]]:
    """Return the runs of ascending slots as (begin, size)."""
    if not len(slots):
        return []
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = np.concatenate([[0], breaks])
    sizes = np.diff(np.concatenate([starts, [len(slots)]]))
    return [(int(slots[start]), int(size)) for start, size in zip(starts, sizes, strict=True)]


class LosslessStore:
    """A `LosslessRuntime` around the cache: steps append to it, and the next step reads the restored rows."""

    # A step needs all rows; between two steps only the hot ones are in memory, and the others are frames. Layers
    # outside the scope stay in the arrays of the model. Where heads keep different tokens, each is a layer of the
    # runtime. The policy selects the evicted tokens, so options of the runtime's own eviction are ignored.

    def __init__(self, interface: DecoderInterface, config: RuntimeConfig, *, per_head: bool) -> None:
        self._layers = check_num_layers(config, interface.layers)
        self._parts_per_layer = interface.kv_heads if per_head else 1
        self._heads_per_part = interface.kv_heads // self._parts_per_layer
        self._mode, self._is_lossy = config.mode, config.is_lossy
        self._num_seen = 0
        self._token_bytes = 2 * self._heads_per_part * interface.head_dim * np.dtype(interface.dtype).itemsize
        scope = CompressionScope(config.with_num_layers(self._layers, 1))
        # A runtime needs a layer, so that layer 0 stands in where none may be compressed.
        covered_layers = [layer for layer in range(self._layers) if scope.is_always_compressed(layer) is not False] or [
            0
        ]
        self._runtime_index = {layer: index for index, layer in enumerate(covered_layers)}
        empty_rows = np.zeros((1, interface.kv_heads, 0, interface.head_dim), interface.dtype)
        self._raw_store = PlainStore([(empty_rows, empty_rows) for _ in range(self._layers)])
        self._runtime = LosslessRuntime(
            _restrict_config(config, self._layers, covered_layers, self._parts_per_layer),
            layers=len(covered_layers) * self._parts_per_layer,
            kv_heads=self._heads_per_part,
            head_dim=interface.head_dim,
            dtype=dtypes.infer_dtype(empty_rows).name,
        )
        self._empty_pair = empty_rows, empty_rows
        self._has_encoded = False

    @property
    def has_encoded(self) -> bool:
        """Return whether any block was encoded so far."""
        if not self._has_encoded:
            self._has_encoded = any(layer.raw_bytes for layer in self._runtime.collect_metrics().layers)
        return self._has_encoded

    @property
    def nbytes(self) -> int:
        """Number of bytes in memory between the steps."""
        return self._runtime.resident_bytes + self._raw_store.nbytes

    def get_past(self) -> list[KVPair]:
        pairs = list(self._raw_store.get_past())
        restored_caches = iter(self._runtime.read_layers(range(len(self._runtime_index) * self._parts_per_layer)))
        for layer in self._runtime_index:
            caches = [next(restored_caches) for _ in range(self._parts_per_layer)]
            if len(caches) == 1:
                pairs[layer] = caches[0].keys[None], caches[0].values[None]
            else:
                keys, values = np.concatenate([c.keys for c in caches]), np.concatenate([c.values for c in caches])
                pairs[layer] = keys[None], values[None]
        return pairs

    def set_present(self, present: Sequence[KVPair], num_new: int, *, is_prompt: bool = False) -> None:
        if is_prompt and self._num_seen:
            self._runtime.start_request(keep_cache=True)  # as in the engine, no block is encoded at a prompt
        for layer, index in self._runtime_index.items():
            keys, values = present[layer]
            for part in range(self._parts_per_layer):
                heads = slice(part * self._heads_per_part, (part + 1) * self._heads_per_part)
                self._runtime.append_call(
                    index * self._parts_per_layer + part, keys[0, heads, -num_new:], values[0, heads, -num_new:]
                )
                self._runtime.end_call()
        self._runtime.end_step()
        self._raw_store.set_present(
            [self._empty_pair if layer in self._runtime_index else pair for layer, pair in enumerate(present)], num_new
        )
        self._num_seen += num_new

    def compact(self, layer: int, slots: Indices, num_live: int) -> None:
        if layer not in self._runtime_index:
            self._raw_store.compact(layer, slots, num_live)
            return
        for part in range(self._parts_per_layer):
            row = slots[part if len(slots) > 1 else 0, :num_live]
            self._runtime.evict(self._runtime_index[layer] * self._parts_per_layer + part, find_runs(row))

    def put_keys(self, layer: int, slots: Indices, keys: Elements) -> None:
        raise KvmnnError("a policy that changes keys runs with the arrays of the model only: no --packed or runtime")

    def to_stats(self) -> RuntimeStats:
        """Wait for pending encodings and return the statistics of the runtime."""
        self._runtime.wait()
        metrics = self._runtime.collect_metrics()
        layers, tokens = [], 0
        for layer, pair in enumerate(self._raw_store.get_past()):
            if layer not in self._runtime_index:
                resident_bytes = sum(part.nbytes for part in pair)
                layers.append(RuntimeLayerStats(layer=layer, tokens=pair[0].shape[2], held_bytes=resident_bytes))
                tokens += pair[0].shape[2] * self._parts_per_layer
                continue
            first = self._runtime_index[layer] * self._parts_per_layer
            parts = metrics.layers[first : first + self._parts_per_layer]
            names = [entry.name for entry in fields(RuntimeLayerStats) if entry.name not in ("layer", "tokens")]
            sums = {name: sum(getattr(part, name) for part in parts) for name in names}
            layers.append(RuntimeLayerStats(layer=layer, tokens=max(part.tokens for part in parts), **sums))
            tokens += sum(part.tokens for part in parts)
        totals = {
            entry.name: getattr(metrics, entry.name) for entry in fields(RuntimeStats) if entry.name[:4] == "h2o_"
        }
        return RuntimeStats(
            mode=self._mode,
            appended_bytes=self._num_seen * self._layers * self._parts_per_layer * self._token_bytes,
            live_bytes=tokens * self._token_bytes,
            held_bytes=self.nbytes,
            **totals,
            is_lossy=self._is_lossy,
            layers=tuple(layers),
        )

    def collect_metrics(self) -> RuntimeMetrics:
        """Wait for pending encodings and return the metrics of the runtime, for the layers that it covers."""
        self._runtime.wait()
        return self._runtime.collect_metrics()


def _restrict_config(
    config: RuntimeConfig, num_layers: int, covered_layers: Sequence[int], parts_per_layer: int
) -> RuntimeConfig:
    """Return the options, without eviction, for `parts_per_layer` runtime layers for each covered layer."""
    evicting_layers = replace(config.h2o, layers=num_layers).evicting_layers
    evicting_indices = [index for index, layer in enumerate(covered_layers) if layer in evicting_layers] or [0]
    return replace(
        config,
        front_n=sum(layer < config.front_n for layer in covered_layers) * parts_per_layer,
        kept_sample_layers=config.kept_sample_layers * parts_per_layer,
        layer_nums=None,
        layer_numbers=tuple(
            layer * parts_per_layer + part for layer in covered_layers for part in range(parts_per_layer)
        ),
        profile=_split_profile(config) if parts_per_layer > 1 else config.profile,
        h2o=replace(
            config.h2o,
            enable=False,
            layer_start=evicting_indices[0] * parts_per_layer,
            layer_end=(evicting_indices[-1] + 1) * parts_per_layer - 1,
        ),
    )


def _split_profile(config: RuntimeConfig) -> Profile | None:
    """Return a profile whose layers are the heads of the configured one's layers; None without one."""
    if config.profile is None:
        return None
    profile = config.profile if isinstance(config.profile, Profile) else Profile.read(config.profile)
    if config.is_lossy:
        return split_heads(profile)
    moments = HeadMoments(profile)
    return Profile(moments.describe(), build_linear_tables(moments, 0))


def describe_encoding(runs: Iterable[tuple[str, RuntimeStats]], config: RuntimeConfig) -> list[str]:
    """Explain where labelled runs encoded nothing, and which layers stay raw; a label may have several runs."""
    labelled_runs = list(runs)
    run_counts = Counter(label for label, _ in labelled_runs)
    idle_runs: dict[_IdleCause, list[tuple[str, RuntimeStats]]] = {}
    for label, run in labelled_runs:
        if not run.h2o_lossless_raw_bytes:
            idle_runs.setdefault(_find_idle_cause(run, config), []).append((label, run))
    lines = []
    for cause, cause_runs in idle_runs.items():  # texts of one label may have different causes
        counts = Counter(label for label, _ in cause_runs)
        labels = [
            label if number == run_counts[label] else f"{label} ({number:,} of {pluralize(run_counts[label], 'text')})"
            for label, number in counts.items()
        ]
        token_counts = sorted({layer.tokens for _, run in cause_runs for layer in run.layers})
        lines.append(f"{', '.join(labels)}: nothing was encoded: {_explain_idle(cause, token_counts, config)}.")
    if config.is_lossy and any(run.h2o_lossless_raw_bytes for _, run in labelled_runs):
        lines.append(
            f"{LOSSY}: cold tokens are stored as transform streams, rounded: their ratio is LOSSY, no part of it "
            "lossless; figures include what that costs."
        )
    encoded_layers = sorted({layer.layer for _, run in labelled_runs for layer in run.layers if layer.raw_bytes})
    layers = max((len(run.layers) for _, run in labelled_runs), default=0)
    skipped_layers = {layer.layer for _, run in labelled_runs for layer in run.layers if layer.num_backpressure_skips}
    skipped_layers.difference_update(encoded_layers)
    if encoded_layers and skipped_layers:
        noun = "layer" if len(skipped_layers) == 1 else "layers"
        lines.append(
            f"The queue was full (max_queue {config.max_queue:,}) before it came to {noun} "
            f"{format_range(sorted(skipped_layers))}, still raw at the end; more steps encode them."
        )
    if encoded_layers and len(encoded_layers) + len(skipped_layers) < layers:
        scope = f"scope {config.scope}, front_n {config.front_n}" + (", mode probe" if config.mode == "probe" else "")
        noun = "layer" if len(encoded_layers) == 1 else "layers"
        lines.append(f"Encoded: {noun} {format_range(encoded_layers)} of {layers} ({scope}); the others stay raw.")
    return lines


_IdleCause = Literal["scope", "interval", "few tokens"]


def _find_idle_cause(run: RuntimeStats, config: RuntimeConfig) -> _IdleCause:
    if config.scope == "none" or (config.scope == "front_n" and not config.front_n):
        return "scope"
    max_tokens = max((layer.tokens for layer in run.layers), default=0)
    return "interval" if max_tokens >= config.min_first_block_tokens else "few tokens"


def _explain_idle(cause: _IdleCause, token_counts: Sequence[int], config: RuntimeConfig) -> str:
    """Explain why nothing was encoded in layers with these numbers of tokens, which ascend."""
    if cause == "scope":
        return f"scope {config.scope} with front_n {config.front_n} names no layer"
    if cause == "interval":
        return (
            f"no block came in the {pluralize(config.h2o.effective_interval, 'step')} between two tries "
            f"(h2o_update_interval)"
        )
    return (
        f"layers held {format_range(token_counts)} tokens at the end, a first block needs "
        f"{config.min_first_block_tokens:,}: the larger of "
        f"h2o_trigger_min_tokens ({config.h2o.effective_trigger_tokens:,}) and hot_sink_tokens + hot_recent_tokens + "
        f"block_tokens ({config.hot_sink_tokens:,} + {config.hot_recent_tokens:,} + {config.block_tokens:,}). "
        "Lower these, or read more tokens"
    )
