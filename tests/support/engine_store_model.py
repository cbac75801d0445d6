"""The engine's lossless store as its specification says it, in plain Python and without kvmnn.runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvmnn.frames import encode_block, fnv1a64

_INTEGERS = {
    "kv_lossless_front_n": (2, 0),
    "kv_lossless_block_tokens": (128, 1),
    "kv_lossless_hot_recent_tokens": (256, 0),
    "kv_lossless_hot_sink_tokens": (16, 0),
    "kv_lossless_kept_sample_layers": (1, 0),
    "kv_lossless_kept_sample_token_interval": (1, 0),
    "kv_lossless_front_sample_token_interval": (1, 0),
    "kv_lossless_store_bootstrap_tokens": (32, 0),
    "kv_lossless_store_grouped_step_tokens": (256, 0),
    "kv_lossless_async_threads": (1, 0),
    "kv_lossless_max_queue": (256, 1),
    "kv_lossless_decode_cache_blocks": (64, 0),
    "kv_h2o_layer_start": (2, 0),
    "kv_h2o_update_interval": (16, 1),
    "kv_h2o_trigger_min_tokens": (512, 1),
}
"""Default and least value of every key that is a number here."""
_SWITCHES = (
    *("kv_lossless_enable", "kv_lossless_runtime_enable", "kv_lossless_store_disable_front"),
    *("kv_lossless_strict_roundtrip_check", "kv_h2o_enable"),
)
_FRONT, _KEPT, _BOTH, _NONE = 1, 2, 3, 0
_SCOPES = {"none": _NONE, "h2o_kept": _KEPT, "front_n_and_h2o_kept": _BOTH, "front_n+h2o_kept": _BOTH}


@dataclass(eq=False)
class _Block:
    start: int
    count: int
    coded: Any
    decoded: bool
    dropped: bool = False


@dataclass(eq=False)
class _Entry:
    start: int
    count: int
    coded: Any
    pair: Any

    def matches(self, block: _Block, position: bool) -> bool:
        mine, other = self.coded, block.coded
        if (mine.raw_bytes, mine.compressed_bytes) != (other.raw_bytes, other.compressed_bytes):
            return False
        if position and (self.start, self.count) != (block.start, block.count):
            return False
        raw = other.raw_hash != 0 and mine.raw_hash == other.raw_hash
        return raw or (other.blob_hash != 0 and mine.blob_hash == other.blob_hash)


@dataclass(eq=False)
class _State:
    figures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FIGURES, 0))
    blocks: list[_Block] = field(default_factory=list)
    local: list[_Entry] = field(default_factory=list)
    plan: tuple[int, list[list[int]]] | None = None
    bound: int = 0


_APPLIED = (
    *("layer", "s", "n", "raw", "comp", "att", "kb", "vb", "rh", "bh", "origin", "counted", "fb", "skip"),
    *("dropped", "seeded", "trimmed", "scheduled", "queue"),
)
_FIGURES = ("step", "mark", "updates", "raw", "comp", "decomp", "fallbacks", "skips")


class StoreModel:
    """The engine of one conversation.

    `plans` are the H2O decisions by call, as traces have them: they depend on attention and are input.
    """

    def __init__(
        self, config: dict[str, Any], layers: int, dtype: str, *, lazy: bool, layer_nums: int | None = None
    ) -> None:
        self.c = {key: max(least, config.get(key, default)) for key, (default, least) in _INTEGERS.items()}
        self.c |= {key: config.get(key, False) for key in _SWITCHES}
        self.mode = config.get("kv_lossless_runtime_mode", "probe")
        self.mode = self.mode if self.mode in ("full", "store") else "probe"
        self.scope = _SCOPES.get(config.get("kv_lossless_scope", "front_n"), _FRONT)
        self.on = self.c["kv_lossless_enable"] and self.c["kv_lossless_runtime_enable"]
        self.codec = config.get("kv_lossless_codec", "none") == "gear_delta"
        self.predictors = (
            config.get("kv_lossless_predictors_k", "raw,delta_seq,xor_seq,pair_delta"),
            config.get("kv_lossless_predictors_v", "raw,delta_seq,xor_seq"),
        )
        self.dtype, self.lazy, self.total = dtype, lazy, layer_nums or layers
        end = config.get("kv_h2o_layer_end", -1)
        self.first = min(self.c["kv_h2o_layer_start"], self.total - 1)
        self.last = self.total - 1 if end < 0 else min(end, self.total - 1)
        self.rows: list[Any] = [None] * layers
        self.shared: list[_Entry] = []
        self.previous = self.remove = 0
        self.reserve: list[list[int]] = []
        self.ratio = np.float32(1)
        self.reported = [0] * 9
        self.reported_ratio = np.float32(1)
        self.decode, self.number, self.add = False, 0, 0
        self._reset()

    def _reset(self) -> None:
        self.states = [_State() for _ in range(self.total)]
        self.cursor = self.token_step = self.queue_peak = self.async_peak = self.hits = self.misses = 0
        self.open: list[Any] = []
        self.done: list[Any] = []

    # -- what a driver does --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.decode = False
        self.remove, self.reserve, self.ratio = self.previous, [], np.float32(1)
        self.reported, self.reported_ratio = [0] * 9, np.float32(1)

    def start_request(self, keep: bool) -> None:
        self.decode = False
        if not keep:
            self.reset()

    def erase(self, begin: int, end: int) -> None:
        stop = end or self.previous
        if begin < stop <= self.previous:
            self.remove = self.previous - begin
            self.reserve = [] if stop == self.previous else [[stop - begin, self.previous - stop]]

    def sync(self) -> None:
        self.previous += self.add - self.remove + sum(size for _, size in self.reserve)
        self.remove, self.reserve, self.decode = 0, [], True

    # -- one call ------------------------------------------------------------------------------------------------------

    def begin(self, layer: int, new: Any) -> Any:
        """Up to attention; returns what it reads. `new` is K and V, ``[2, head, token, dim]``."""
        self.event = event = {"call": self.number, "layer": layer}
        self.number += 1
        pre = self.cursor % self.total if self.decode else 0
        state, self.add = self.states[pre], new.shape[2]
        held = 0 if self.rows[layer] is None else self.rows[layer].shape[2]
        if self.on and self.mode == "store":
            self._restore(state, layer, event)
        if self.decode and self.c["kv_h2o_enable"]:
            self.remove, self.reserve = 0, []
        if state.plan is not None:
            length, pairs = state.plan
            state.plan, fits = None, length == held
            if fits:
                self.remove, self.reserve = length, pairs
            event["plan"] = {"layer": pre, "remove": length, "ok": int(fits), "pairs": pairs}
        if self.remove > held:
            self.remove, self.reserve = held, []
        clear = self.previous == self.remove and not self.reserve
        if clear or self.remove:
            event["edit"] = {"clear": int(clear), "remove": self.remove, "pairs": self.reserve}
        if clear or self.rows[layer] is None:
            self.rows[layer] = new.copy()
        else:
            old, at = self.rows[layer], held - self.remove
            kept = [old[:, :, :at], *(old[:, :, at + begin : at + begin + size] for begin, size in self.reserve)]
            self.rows[layer] = np.concatenate([*kept, new], axis=2)
        event["kv"] = self.rows[layer].shape[2]
        return self.rows[layer]

    def end(self, layer: int, plan: dict[str, Any] | None) -> dict[str, Any]:
        """From attention on; `plan` is the H2O decision of this call."""
        event, length = self.event, self.event["kv"]
        index = self.cursor % self.total if self.decode else 0
        event["index"] = index
        if self.decode:
            self.cursor += 1
            self.token_step += index == 0
        elif length <= self.add:
            self._reset()
            self.remove, self.reserve = 0, []
            event["reset"] = 1
        state = self.states[index]
        state.bound = layer
        if self.decode:
            self._compress(state, index, self._kept(state, index, length, plan), event)
        figures = [state.figures[name] for name in _FIGURES]
        event["state"] = [*figures, len(state.blocks), len(state.local), len(self.shared)]
        event["metrics"], event["ratio"] = list(self.reported), float(self.reported_ratio)
        return event

    def _kept(self, state: _State, index: int, length: int, plan: dict[str, Any] | None) -> int:
        if not self.c["kv_h2o_enable"] or not self.first <= index <= self.last:
            return length
        if plan is None:
            product = self.ratio * np.float32(length)
            return max(1, int(np.floor(float(product) + 0.5)))
        state.plan = (length, plan["pairs"]) if plan["evict"] else None
        if plan["floor"]:
            return length
        self.ratio = np.float32(plan["keep"]) / np.float32(length)
        return int(plan["keep"])

    def _compress(self, state: _State, index: int, kept: int, event: dict[str, Any]) -> None:
        if index == self.total - 1:
            event["m_token_end"] = 1
        self._drain(index, event)
        budget = self._budget(index, event["kv"], kept)
        event["apply"] = int(budget is not None)
        if budget is not None:
            begin = min(budget, self.c["kv_lossless_hot_sink_tokens"])
            end = max(begin, budget - self.c["kv_lossless_hot_recent_tokens"])
            event["budget"], event["cold"] = budget, [begin, end]
            if end < state.figures["mark"]:
                self._shrink(state, end, event)
            pending = self._pending(state) + len(self.open)
            self.queue_peak = max(self.queue_peak, pending)
            self.async_peak = max(self.async_peak, len(self.open))
            due = self._due(state, begin, end, event["kv"])
            if due is not None:
                self._encode(state, index, due, pending, end, event)
        self._drain(index, event)
        self._aggregate()

    def _budget(self, index: int, length: int, kept: int) -> int | None:
        if not (self.on and self.codec):
            return None
        front, deep = index < self.c["kv_lossless_front_n"], self.first <= index <= self.last
        scope = self.scope
        applies = {_NONE: False, _FRONT: front, _KEPT: deep, _BOTH: front or deep}[scope]
        budget = length if scope == _FRONT or (scope == _BOTH and front) else kept
        if self.mode == "store" and self.c["kv_lossless_store_disable_front"] and front:
            if scope == _FRONT:
                applies = False
            elif scope == _BOTH:
                applies, budget = deep, kept
        step = max(1, self.token_step) - 1
        interval = self.c["kv_lossless_front_sample_token_interval"]
        if interval > 1 and self.mode != "probe" and front:
            applies = applies and step % interval == 0
        if self.mode == "full" and scope in (_KEPT, _BOTH) and deep and not (scope == _BOTH and front):
            layers, every = self.c["kv_lossless_kept_sample_layers"], self.c["kv_lossless_kept_sample_token_interval"]
            applies = applies and (layers <= 0 or 0 <= index - self.first < layers)
            applies = applies and (every <= 1 or step % every == 0)
        if self.mode == "probe":
            probed = {_FRONT: (0,), _KEPT: (self.first,), _BOTH: (0, self.first), _NONE: ()}[scope]
            applies = applies and index in probed
        return budget if applies else None

    def _due(self, state: _State, begin: int, end: int, length: int) -> tuple[int, int, bool] | None:
        block, store = self.c["kv_lossless_block_tokens"], self.mode == "store"
        if length < self.c["kv_h2o_trigger_min_tokens"] or end <= begin:
            return None
        growth = end - state.figures["mark"]
        if state.figures["updates"] <= 0:
            first = {"probe": min(block, 32), "full": block}.get(self.mode)
            if first is None:
                first = self.c["kv_lossless_store_bootstrap_tokens"] or max(16, block // 2)
            if growth < first:
                return None
            return (begin if self.mode == "probe" else max(begin, end - first)), min(first, end - begin), True
        group = (self.c["kv_lossless_store_grouped_step_tokens"] or 3 * block) if store else block
        overlap = group // 8 if store else 0
        if self.token_step - state.figures["step"] < self.c["kv_h2o_update_interval"] or growth + overlap < group:
            return None
        start = max(state.figures["mark"], begin)
        start = max(start - overlap, begin) if store else start
        count = min(group, max(0, end - start))
        return (start, count, False) if count > 0 else None

    def _encode(
        self, state: _State, index: int, due: tuple[int, int, bool], pending: int, end: int, event: dict[str, Any]
    ) -> None:
        start, count, first = due
        mark = end if first and self.mode == "probe" else start + count
        event["block"] = told = {"s": start, "n": count, "boot": int(first), "pending": pending}
        if pending >= self.c["kv_lossless_max_queue"]:
            told["how"] = "skip"
            self._apply(state, index, due, None, mark, event)
            return
        background = self.c["kv_lossless_async_threads"] > 0 and self.mode != "probe"
        if background:
            self._take(event)
        pair = np.ascontiguousarray(self.rows[event["layer"]][:, :, start : start + count])
        told |= {"how": "async" if background else "sync", "raw_hash": f"{_hash(pair):016x}"}
        coded = encode_block(
            *pair,
            dtype=self.dtype,
            predictors_k=self.predictors[0],
            predictors_v=self.predictors[1],
            strict_roundtrip_check=self.c["kv_lossless_strict_roundtrip_check"],
        )
        if not background:
            self._apply(state, index, due, coded, mark, event)
            return
        self._scheduled(state, mark)
        self.open.append((index, due, coded))
        self.async_peak = max(self.async_peak, len(self.open))
        if not self.lazy:
            self._finish()

    def _finish(self) -> None:
        self.done += self.open
        self.open = []

    def _take(self, event: dict[str, Any]) -> None:
        done, self.done = self.done, []
        for index, due, coded in done:
            self._apply(self.states[index], index, due, coded, None, event)

    def _drain(self, index: int, event: dict[str, Any]) -> None:
        self._take(event)
        if index == self.total - 1 and self.open:
            self._finish()
            self._take(event)

    def _scheduled(self, state: _State, mark: int) -> None:
        state.figures["updates"] += 1
        state.figures["mark"], state.figures["step"] = mark, self.token_step

    def _pending(self, state: _State) -> int:
        return sum(one.dropped if self.mode == "store" else not one.decoded for one in state.blocks)

    def _apply(
        self, state: _State, index: int, due: tuple[int, int, bool], coded: Any, mark: int | None, event: dict[str, Any]
    ) -> None:
        start, count, _ = due
        store, size = self.mode == "store", self.c["kv_lossless_decode_cache_blocks"]
        figures = state.figures
        over = store and any(
            one.dropped and one.start < start + count and start < one.start + one.count for one in state.blocks
        )
        figures["skips"] += coded is None
        dropped = seeded = -1
        trimmed = 0
        blobs = coded is not None and coded.key_frame is not None
        if coded is not None and coded.fallback:
            figures["fallbacks"] += 1
        if blobs:
            block = _Block(start, count, coded, store)
            state.blocks.append(block)
            if store:
                part = self.rows[state.bound][:, :, start : start + count]
                if size:
                    seeded = 1
                    self._keep_local(state, block, part.copy())
                part[:] = 0
                dropped, block.dropped = 1, True
            elif size:
                trimmed = max(0, len(state.blocks) - size)
                state.blocks = state.blocks[trimmed:]
        if not store:
            waiting = [one for one in state.blocks if not one.decoded]
            if waiting:
                self._decode_once(state, waiting[0], event)
        raw = coded.raw_bytes if coded is not None else 0
        comp = coded.compressed_bytes if coded is not None else 0
        if not over:
            figures["raw"] += raw
            figures["comp"] += comp
        if mark is not None:
            self._scheduled(state, mark)
        queue = len(state.blocks) + len(self.open)
        self.queue_peak = max(self.queue_peak, queue)
        hashes = (f"{coded.raw_hash:016x}", f"{coded.blob_hash:016x}") if coded is not None else ("0" * 16, "0" * 16)
        blob_bytes = (len(coded.key_frame), len(coded.value_frame)) if blobs else (0, 0)
        attempted = coded.attempted_bytes if coded is not None else 0
        failed, skipped = coded is not None and coded.fallback, coded is None
        told = (index, start, count, raw, comp, attempted, *blob_bytes, *hashes, int(over), int(not over), int(failed))
        told += (int(skipped), dropped, seeded, trimmed, int(mark is not None), queue)
        event.setdefault("applied", []).append(dict(zip(_APPLIED, told, strict=True)))

    # -- caches --------------------------------------------------------------------------------------------------------

    def _keep_local(self, state: _State, block: _Block, pair: Any) -> None:
        size = self.c["kv_lossless_decode_cache_blocks"]
        mine = (block.start, block.count, block.coded.raw_bytes, block.coded.compressed_bytes)
        state.local = [
            one
            for one in state.local
            if (one.start, one.count, one.coded.raw_bytes, one.coded.compressed_bytes) != mine
            and not one.matches(block, False)
        ]
        state.local = [*state.local, _Entry(block.start, block.count, block.coded, pair)][-size:]

    def _look_up(self, state: _State, block: _Block) -> tuple[str, Any]:
        """How a block was found, and its K and V; None where they do not come out right."""
        how, pair = self._cached(state, block)
        if pair is None:
            how, self.misses = "miss", self.misses + 1
            pair = np.stack(block.coded.decode())
        else:
            self.hits += 1
        if self.c["kv_lossless_strict_roundtrip_check"] and _hash(pair) != block.coded.raw_hash:
            return how, None
        size = self.c["kv_lossless_decode_cache_blocks"]
        if size:
            if how == "miss":
                self._keep_local(state, block, pair)
            self.shared = [one for one in self.shared if not one.matches(block, False)]
            self.shared = [*self.shared, _Entry(block.start, block.count, block.coded, pair)][-size:]
        return how, pair

    def _cached(self, state: _State, block: _Block) -> tuple[str, Any]:
        if not self.c["kv_lossless_decode_cache_blocks"]:
            return "", None
        for how, entries, position in (
            ("local_pos", state.local, True),
            ("local_hash", state.local, False),
            ("global", self.shared, False),
        ):
            for one in entries:
                if one.matches(block, position):
                    entries.remove(one)
                    entries.append(one)
                    if how == "global":
                        self._keep_local(state, block, one.pair)
                    return how, one.pair
        return "", None

    def _decode_once(self, state: _State, block: _Block, event: dict[str, Any]) -> None:
        block.decoded = True
        how, pair = self._look_up(state, block)
        raw = block.coded.raw_bytes
        told = {"s": block.start, "n": block.count, "raw": raw, "hit": how, "ok": int(pair is not None)}
        event.setdefault("decode", []).append(told)
        if pair is None:
            state.figures["fallbacks"] += 1
        else:
            state.figures["decomp"] += raw

    def _restore(self, state: _State, layer: int, event: dict[str, Any]) -> None:
        if not self.c["kv_lossless_decode_cache_blocks"]:
            state.local, self.shared = [], []
        chunks = []
        for block in state.blocks:
            how, pair = self._look_up(state, block)
            told = {"s": block.start, "n": block.count, "raw": block.coded.raw_bytes}
            told |= {"comp": block.coded.compressed_bytes, "hit": how, "ok": int(pair is not None)}
            event.setdefault("restore", []).append(told)
            if pair is None:
                state.figures["fallbacks"] += 1
            else:
                chunks.append((block.start, block.count, pair))
        state.blocks = []
        assert len(chunks) <= 1, "merged chunks do not occur in the engine's schedule"
        for start, count, pair in chunks:
            rows = self.rows[layer]
            ok = start + count <= rows.shape[2]
            if ok:
                rows[:, :, start : start + count] = pair.reshape(2, rows.shape[1], count, rows.shape[3])
                state.figures["decomp"] += pair.nbytes
            else:
                state.figures["fallbacks"] += 1
            event.setdefault("scatter", []).append({"s": start, "n": count, "bytes": pair.nbytes, "ok": int(ok)})

    def _shrink(self, state: _State, end: int, event: dict[str, Any]) -> None:
        waiting = [one for one in state.blocks if not one.decoded]
        event["shrink"] = {
            "from": state.figures["mark"],
            "to": end,
            "pending": self._pending(state),
            "blocks": len(state.blocks),
            "discarded": 0,
            "plan_cleared": int(state.plan is not None),
        }
        for block in waiting:
            self._decode_once(state, block, event)
        state.figures["step"], state.figures["mark"] = 0, end
        state.blocks, state.local, state.plan = [], [], None

    def _aggregate(self) -> None:
        updated = [state for state in self.states if state.figures["updates"] > 0]
        front = range(self.c["kv_lossless_front_n"] if self.scope in (_FRONT, _BOTH) else 0)
        deep = range(self.first, self.last + 1) if self.scope in (_KEPT, _BOTH) else range(0)
        inside = [one for index, one in enumerate(self.states) if one in updated and (index in front or index in deep)]
        sums = {name: sum(one.figures[name] for one in inside or updated) for name in _FIGURES}
        if sums["raw"] > 0 and sums["comp"] > 0:
            self.reported[:4] = [sums[name] for name in ("raw", "comp", "decomp", "fallbacks")]
            self.reported_ratio = np.float32(sums["raw"] / sums["comp"])
        self.reported[4:] = [sums["skips"], self.queue_peak, self.async_peak, self.hits, self.misses]


def _hash(pair: Any) -> int:
    return fnv1a64(np.ascontiguousarray(pair[1]), fnv1a64(np.ascontiguousarray(pair[0])))
