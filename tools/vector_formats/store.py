"""`kvmnn-store-trace/1`: runs of the engine's lossless store, recomputed event by event from the rows it appended."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from kvmnn import fnv1a64
from kvmnn.policies.h2o import BlockPlan, H2OConfig, H2OPlanner, plan_blocks
from kvmnn.runtime import LosslessRuntime, RuntimeConfig

from .common import CaseResult, Checker, run_list

_EVERY_TOKENS = 16
"""The last layer of every such decode step has an event, whatever happened."""

_CASE_FIELDS = {
    *("name", "model", "geometry", "async_schedule", "config", "events", "arrays", "tokens", "calls", "n_events"),
    "part",
}
_FREE_FIELDS = ("layer", "index", "kv", "plan", "edit", "restore", "scatter", "live0")
"""What the timing of workers leaves as it is; in the last layer of a token also the first metrics."""
_FREE_METRICS = 5


def run(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    yield from run_list(index["cases"], "cases", lambda case, check: _case(folder, index["models"], case, check))


def _case(folder: Path, models: dict[str, Any], case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_CASE_FIELDS)
    document = json.loads(_member(folder / case["part"], case["events"]))
    geometry = {**models[case["model"]], **case["geometry"]}
    arrays = [(_array(folder, layer["k"]), _array(folder, layer["v"])) for layer in case["arrays"]]
    replay = _Replay(case, geometry, arrays, document, check)
    for op in document["ops"]:
        replay.run(op)
    replay.finish()


class _Replay:
    """One case: the engine's calls on the rows that it appended, compared with what it recorded."""

    def __init__(
        self,
        case: dict[str, Any],
        geometry: dict[str, Any],
        arrays: list[Any],
        document: dict[str, Any],
        check: Checker,
    ) -> None:
        self.check, self.document, self.arrays = check, document, arrays
        self.free = case["async_schedule"] == "free"
        self.layers = geometry["layers"]
        self.reuse = bool(case["config"].get("reuse_kv", False))
        self.layer_nums = geometry.get("layer_nums", self.layers)
        config = RuntimeConfig.from_engine({k: v for k, v in case["config"].items() if k != "layer_nums"}, lenient=True)
        heads, head_dim, size = geometry["kv_heads"], geometry["head_dim"], geometry["elem_bytes"]
        h2o = replace(config.h2o, layers=self.layer_nums, heads=1, bytes_per_token=2 * heads * head_dim * size)
        self.planner = _RecordedPlans(h2o, document["plans"])
        self.runtime = LosslessRuntime(
            replace(config, layer_nums=self.layer_nums),
            layers=self.layers,
            kv_heads=heads,
            head_dim=head_dim,
            dtype={2: "fp16", 4: "fp32"}[size],
            behaviour="engine",
            on_invalid="engine",
            planner=self.planner,
            timing="lazy" if case["async_schedule"] == "lazy" else "eager",
        )
        self.expected = {event["call"]: event for event in document["events"]}
        self.rows = [0] * self.layers
        self.call = self.zero_reads = 0
        self.decode = False
        self.applies = ""
        self.seen: list[int] = []
        self.forwards = [op for op in document["ops"] if op[0] == "forward"]
        check.field("calls", len(self.forwards) * self.layers)
        check.equal("calls of the events", document["calls"], case["calls"])
        check.field("n_events", len(document["events"]))
        check.field("tokens", sum(op[1] for op in self.forwards))

    def run(self, op: list[Any]) -> None:
        kind = op[0]
        if kind == "forward":
            self.forward(op[1])
        elif kind == "init":
            self.runtime.start_request(keep_cache=self.reuse)
            self.decode = False
        elif kind == "reset":
            self.runtime.reset()
            self.decode = False
        elif kind == "erase":
            self.runtime.erase(op[1], op[2])
        else:
            raise ValueError(f"unknown operation {kind!r}")

    def forward(self, add: int) -> None:
        for layer in range(self.layers):
            keys, values = self.arrays[layer]
            begin = self.rows[layer]
            self.rows[layer] += add
            live = self.runtime.begin_call(layer, keys[:, begin : begin + add], values[:, begin : begin + add])
            expected = self.expected.get(self.call)
            found: dict[str, Any] = {}
            if expected is not None and "live0" in expected:
                found["live0"] = _hash(live)
            zeros = int((~live[0].any(axis=(0, 2))).sum())
            self.zero_reads += zeros > 0
            if zeros:
                found["zero_tokens_seen"] = zeros
            self.planner.call = self.call
            event = self.runtime.end_call(sums=self.planner.no_sums(live[0].shape[1]))
            if expected is not None and "live1" in expected:
                found["live1"] = _hash(self.runtime.get_live_rows(layer))
            self.applies += "-" if event.is_in_scope is None else str(int(event.is_in_scope))
            sampled = event.is_token_end and event.token_step % _EVERY_TOKENS == 0 and event.is_in_scope is not None
            last = self.call >= (len(self.forwards) - 1) * self.layers
            if event.has_effect or sampled or last:
                self.seen.append(self.call)
            if expected is not None:
                self.compare(found | event.to_dict(), expected)
            self.call += 1
        self.runtime.end_step()
        self.decode = True

    def compare(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        if len(self.check.problems) > 8:
            return
        if self.free:
            names = [name for name in _FREE_FIELDS if name in found or name in expected]
            if expected.get("m_token_end"):
                found = found | {"metrics": found["metrics"][:_FREE_METRICS]}
                expected = expected | {"metrics": expected["metrics"][:_FREE_METRICS]}
                names += ["metrics", "m_token_end"]
        else:
            names = sorted(found.keys() | expected.keys())
        for name in names:
            one, other = found.get(name), expected.get(name)
            if name == "ratio":
                one, other = np.float32(one), np.float32(other)
            self.check.equal(f"call {expected['call']}: {name}", one, other)

    def finish(self) -> None:
        self.check.equal("rows", self.rows, [keys.shape[1] for keys, _ in self.arrays])
        self.check.equal("apply_per_call", self.applies, self.document["apply_per_call"])
        self.check.equal("zero_reads", self.zero_reads, self.document["zero_reads"])
        self.check.equal("plans", self.planner.made, self.document["plans"])
        if not self.free:
            self.check.equal("calls with events", self.seen, sorted(self.expected))


class _RecordedPlans(H2OPlanner):
    """kvmnn's planner, given the one thing that is not recorded: which blocks the attention preferred."""

    def __init__(self, config: H2OConfig, plans: list[dict[str, Any]]) -> None:
        super().__init__(config, on_invalid="engine")
        self._recorded = {entry["call"]: entry for entry in plans}
        self.made: list[dict[str, Any]] = []
        self.call = 0

    def no_sums(self, tokens: int) -> Any:
        """Attention that prefers nothing."""
        return np.zeros(self.config.count_blocks(tokens), np.float32)

    def select_blocks(self, scores: Any, kv_len: int) -> BlockPlan:
        wanted = np.zeros(self.config.count_blocks(kv_len), np.float32)
        block = self.config.effective_block_tokens
        for begin, size in self._recorded.get(self.call, {"pairs": []})["pairs"]:
            wanted[begin // block : -(-(begin + size) // block)] = 1
        made = plan_blocks(wanted, kv_len, self.config)
        self.made.append(
            {
                "call": self.call,
                "floor": int(made.floor_dominates),
                "keep": made.num_final_tokens,
                "evict": made.num_evicted,
                "pairs": made.retained_runs.tolist(),
            }
        )
        return made


def _hash(pair: Any) -> str:
    return f"{fnv1a64(pair[1], fnv1a64(pair[0])):016x}"


@lru_cache(maxsize=4)
def _archive(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive if entry.isfile()}


def _member(path: Path, name: str) -> bytes:
    members = _archive(path)
    return members[name] if name in members else members[f"./{name}"]


def _array(folder: Path, place: list[str]) -> Any:
    return np.load(BytesIO(_member(folder / place[0], place[1])), allow_pickle=False)
