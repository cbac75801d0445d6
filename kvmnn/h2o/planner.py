"""The planner of all layers: scores, clocks, triggers, plans in waiting."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks import whole
from ..dtypes import Floats
from ..errors import KvmnnError
from ..packed.kv_meta import KVMeta
from ..packed.reserve import INT32_MAX, Pair
from .clocks import CADENCES, LayerCallClock, TokenClock
from .config import H2OConfig
from .layer_state import Compaction, LayerCall, LayerState, Metrics, PendingPlan, valid_pairs
from .plan import Plan, plan
from .scores import as_rows, as_scores, block_sums, updated


class Planner:
    """Decides for every layer and step what to drop, as the engine does, outside it.

    Each call of a layer has two halves: `begin` applies the plan that the layer made earlier, `end` takes the
    attention of this step, keeps the scores, and plans for the layer's next call. Between them the caller compacts the
    cache and appends the new tokens::

        todo = planner.begin(len(cache))
        cache.append(keys, values, remove=todo.remove, reserve=todo.reserve)
        planner.end(rows=attention)

    and calls `sync` when all layers of a step are through.

    Parameters
    ----------
    config
        Options; None for the engine's defaults.
    cadence
        ``"layer-calls"`` counts as the engine does: calls of any layer, one clock for all, and which layer it is by the
        number of calls; so two of 32 layers trigger per token with an interval of 16. Everything else follows the
        engine too, its behaviour at a second turn included (docs/h2o.md).
        ``"tokens"`` is what the interval was meant to be: decode steps between two plans of the same layer, whose
        number the caller gives. Plans are only ever applied to their own layer, and scores are cut when that happens.

    on_invalid
        ``"raise"`` refuses a call at which the engine would drop all that the layer holds because the shared count of
        tokens is 0: the planner began with a cache that it has not seen (set ``meta.previous``), or `sync` was not
        called. ``"engine"`` drops it.

    Attributes
    ----------
    config, cadence
        As given.
    layers
        `LayerState` of each layer.
    metrics
        Figures under the engine's names.
    meta
        The counts that layers share, as the engine keeps them; unused with cadence "tokens".
    clock
        `LayerCallClock` or `TokenClock`.

    Raises
    ------
    KvmnnError
        For an unknown cadence or `on_invalid`.
    """

    def __init__(
        self, config: H2OConfig | None = None, *, cadence: str = "layer-calls", on_invalid: str = "raise"
    ) -> None:
        if cadence not in CADENCES:
            raise KvmnnError(f"cadence is {cadence!r}: expected one of {', '.join(CADENCES)}")
        if on_invalid not in ("raise", "engine"):
            raise KvmnnError(f"on_invalid is {on_invalid!r}: expected 'raise' or 'engine'")
        self._strict = on_invalid == "raise"
        self.config = config or H2OConfig()
        self.cadence = cadence
        self.reset()

    def reset(self) -> None:
        """Forget everything, figures and shared counts included."""
        self.layers = [LayerState() for _ in range(self.config.layer_count)]
        self.metrics = Metrics()
        self.meta = KVMeta()
        self.clock: LayerCallClock | TokenClock = LayerCallClock() if self.cadence == "layer-calls" else TokenClock()
        self._open: tuple[Compaction, int, bool] | None = None

    def __repr__(self) -> str:
        return f"Planner({self.config!r}, cadence={self.cadence!r})"

    # -- one call of one layer -----------------------------------------------------------------------------------------

    def begin(self, kv_length: int, add: int = 1, *, decode: bool = True, layer: int | None = None) -> Compaction:
        """First half of a call: what to drop from the layer's cache now.

        Parameters
        ----------
        kv_length
            Tokens that the layer's cache holds.
        add
            New tokens of this step.
        decode
            False while a prompt is processed.
        layer
            Which layer; required with cadence "tokens", not allowed with "layer-calls", which counts by itself.

        Raises
        ------
        KvmnnError
            For a layer that there is not, lengths outside 0 to 2**31 - 1, when the call before was not ended, and as
        `on_invalid` says.
        """
        if self._open is not None:
            raise KvmnnError("begin: the call before was not ended")
        whole(kv_length, "kv_length", 0, INT32_MAX)
        whole(add, "add", 0, INT32_MAX - kv_length)
        index = self._index(layer, decode)
        if self._strict:
            self._check_count(index, kv_length)
        state = self.layers[index]
        pending, state.pending = state.pending, None
        valid = pending if pending is not None and pending.fits(kv_length) else None
        if valid is not None:
            state.active = valid.pairs
            if valid.keep is not None:
                state.scores = kept_scores(state.scores, valid.keep)
        self.metrics.set_pending(None)
        remove, reserve = self._window(kv_length, add, decode, valid)
        after = kv_length - remove + sum(size for _, size in reserve)
        found = Compaction(index, remove, reserve, kv_length, after, pending is not None, pending is not valid)
        self._open = found, add, decode
        return found

    def end(self, sums: Any = None, *, rows: Any = None, threads: int = 1, tile: int | None = None) -> LayerCall:
        """Second half of a call: score, and plan if it is time.

        Parameters
        ----------
        sums
            Sums of the attention on each block, as `block_sums` gives them. Not looked at in a call that does not
            score: outside decoding, or in a layer that does not evict.
        rows
            Instead of `sums`: the attention itself, ``[heads, queries, keys]`` or ``[heads, keys]``.
        threads, tile
            For `block_sums` on `rows`.

        Raises
        ------
        KvmnnError
            When the sums or rows do not match the length. Nothing has changed then, and `end` can be called again.
        """
        if self._open is None:
            raise KvmnnError("end: no call was begun")
        opened, add, decode = self._open
        kv_len = opened.kv_after + add
        enabled = self._enabled(opened.layer, decode, add, kv_len)
        scores = self._scored(self.layers[opened.layer], kv_len, add, sums, rows, threads, tile) if enabled else None
        self._open = None
        layer = self.clock.tick(self.layers, opened.layer, decode)
        reset = not decode and kv_len <= add
        if reset:
            self._reset(layer)
        if scores is None:
            return LayerCall(layer, False, kv_len, 0, False, reset, self.layers[layer].scores, None, kv_len)
        self.layers[layer].scores = scores
        made = self._plan(layer, scores, kv_len) if self._due(layer, kv_len) else None
        keep = made.final_keep if made else self._budget(kv_len)
        return LayerCall(layer, True, kv_len, scores.size, made is not None, reset, scores, made, keep)

    def choose(self, scores: Floats, kv_len: int) -> Plan:
        """The plan for a layer that triggers; here for whoever wants to choose by other rules than `plan`."""
        return plan(scores, kv_len, self.config)

    def sync(self) -> int:
        """End a step of all layers: the engine's shared length afterwards, which follows the last layer alone.

        With cadence "tokens" nothing is shared and 0 is returned.
        """
        return self.meta.sync()

    # -- how -----------------------------------------------------------------------------------------------------------

    def _index(self, layer: int | None, decode: bool) -> int:
        if isinstance(self.clock, TokenClock):
            if layer is None:
                raise KvmnnError("layer: expected a layer's number with cadence 'tokens'")
            return whole(layer, "layer", 0, len(self.layers) - 1)
        if layer is not None:
            raise KvmnnError("layer: cadence 'layer-calls' counts layers by itself")
        return self.clock.layer(len(self.layers)) if decode else 0

    def _window(
        self, kv_length: int, add: int, decode: bool, pending: PendingPlan | None
    ) -> tuple[int, tuple[Pair, ...]]:
        """What this layer removes and reserves."""
        if self.cadence == "tokens":
            return (pending.remove, pending.pairs) if pending else (0, ())
        meta = self.meta
        meta.add = add
        if decode and self.config.enable:
            meta.remove, meta.reserve = 0, ()
        if pending:
            meta.remove, meta.reserve = pending.remove, pending.pairs
        if meta.remove > kv_length:
            meta.remove, meta.reserve = kv_length, ()
        if meta.reserve and not valid_pairs(meta.reserve, meta.remove):
            meta.reserve = ()
        if meta.previous == meta.remove and not meta.reserve:
            return kv_length, ()
        return meta.remove, () if self.config.quantised else meta.reserve

    def _check_count(self, layer: int, kv_length: int) -> None:
        if self.cadence == "tokens" or self.meta.previous or self.meta.remove or not kv_length:
            return
        if self.layers[layer].pending is None:
            raise KvmnnError(
                f"meta.previous is 0 while the layer holds {kv_length} tokens: the engine would drop them; expected "
                "sync() after each step, or meta.previous set to the tokens of a cache that was there before"
            )

    def _enabled(self, layer: int, decode: bool, add: int, kv_len: int) -> bool:
        config = self.config
        there = config.enable and not config.quantised and add > 0 and kv_len > 0
        return there and decode and layer in config.layer_range

    def _scored(
        self, state: LayerState, kv_len: int, add: int, sums: Any, rows: Any, threads: int, tile: int | None
    ) -> Floats:
        """The layer's scores after this step."""
        heads = self.config.heads
        if (sums is None) == (rows is None):
            raise KvmnnError("end: expected either sums or rows of the attention")
        if rows is not None:
            array = as_rows(rows)
            if array.shape[2] != kv_len:
                raise KvmnnError(f"rows over {array.shape[2]} keys: expected {kv_len}, the layer's tokens")
            if heads not in (None, array.shape[0]) or array.shape[1] != add:
                raise KvmnnError(f"rows of shape {array.shape}: expected {heads or 'any'} heads and {add} queries")
            heads = array.shape[0]
            sums = block_sums(array, self.config.block, threads=threads, tile=tile)
        elif heads is None:
            raise KvmnnError("sums without config.heads: expected the number of query heads to divide by")
        added = as_scores(sums, "sums")
        if added.size != self.config.blocks(kv_len):
            raise KvmnnError(f"{added.size} sums for {kv_len} tokens: expected {self.config.blocks(kv_len)}")
        return updated(state.scores, added, count=heads * add, alpha=float(self.config.alpha))

    def _due(self, layer: int, kv_len: int) -> bool:
        return kv_len >= self.config.trigger_tokens and self.clock.due(self.layers[layer], self.config.interval)

    def _plan(self, layer: int, scores: Floats, kv_len: int) -> Plan:
        state = self.layers[layer]
        self.clock.triggered(state)
        started = time.perf_counter_ns()
        made = self.choose(scores, kv_len)
        self.metrics.record(made, (time.perf_counter_ns() - started) // 1000)
        state.pending = None
        if made.evicted:
            flat = tuple(made.runs.reshape(-1).tolist())
            if self.cadence == "tokens":
                state.pending = PendingPlan(made.remove, flat, made.keep)
            else:
                state.pending = PendingPlan(made.remove, flat)
                state.scores = kept_scores(scores, made.keep)
        return made

    def _budget(self, kv_len: int) -> int:
        """The ratio that was written last times the length, rounded half up."""
        return max(1, int(float(np.float32(self.metrics.h2o_keep_ratio) * np.float32(kv_len)) + 0.5))

    def _reset(self, layer: int) -> None:
        """A new conversation: for the engine of all layers at once, otherwise of this one."""
        self.clock.reset()
        if self.cadence == "tokens":
            self.layers[layer] = LayerState()
            return
        self.layers = [LayerState() for _ in self.layers]
        self.meta.remove, self.meta.reserve = 0, ()


def kept_scores(scores: Floats, keep: npt.NDArray[np.bool_]) -> Floats:
    """The scores of the kept blocks, in order."""
    kept: Floats = scores[keep[: scores.size]]
    return kept
