"""One run of one side of a case, and the comparison of what attention reads with a plain cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...dtypes import Floats
from ...files.records import Record
from ...lm.generation import check_positions
from ...lm.prompt_steps import read_prompt
from ...lm.runner import Runner
from ...lm.session import DecoderSession
from ...policies.base import Policy
from ...runtime import RuntimeConfig
from .work import Workload

_EVERY = 16
"""Decode steps between two comparisons of all of K and V; logits are compared at every step."""


@dataclass(frozen=True, kw_only=True)
class RunRecord(Record):
    """One run.

    Attributes
    ----------
    prompt_tokens, decode_tokens
        Fed at once at the beginning of turns, and one by one.
    prefill_seconds, decode_seconds
        What these took.
    lossy_ratio
        Bytes of all tokens over bytes of those that the policy left at the end.
    held_ratio
        Bytes of those that were left over the bytes that hold them between two steps.
    encoded_ratio
        Raw over compressed bytes of all that was encoded; None where nothing was.
    total_ratio
        Bytes of all tokens over the bytes that are held.
    latencies
        ``decompress``, ``wait`` and ``verify`` (the decoding that proves a block before its rows go): count, sum and
        percentiles, microseconds.
    counters
        Of the runtime, under the engine's names.
    new_ids
        Generated after the last turn.
    """

    prompt_tokens: int
    decode_tokens: int
    prefill_seconds: float
    decode_seconds: float
    lossy_ratio: float
    held_ratio: float
    encoded_ratio: float | None
    total_ratio: float
    latencies: dict[str, dict[str, float]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    keep: dict[str, float] = field(default_factory=dict)
    new_ids: tuple[int, ...] = ()

    @property
    def decode_speed(self) -> float:
        """Tokens a second."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def decompress_us(self) -> float:
        """Restoring; in modes that restore nothing, decoding what is compared with the rows before they go."""
        return self.counter("decompress_us") or self.latencies.get("verify", {}).get("total_us", 0.0)

    def counter(self, name: str) -> float:
        """Of the runtime; 0 where nothing was counted."""
        return self.counters.get(f"h2o_lossless_{name}", 0.0)


def run_once(
    session: DecoderSession,
    policy: Policy,
    lossless: RuntimeConfig | None,
    work: Workload,
    advance: Callable[[int], object] = lambda steps: None,
) -> RunRecord:
    """Let a model do a piece of work with its cache under a policy and in a runtime, greedily.

    `advance` is called with the number of tokens generated since its last call, and with 0 after each step of a prompt.
    """
    runner = Runner(session, policy, lossless=lossless)
    interface = session.interface
    check_positions(
        interface.label, interface.max_positions, sum(map(len, work.turns)), work.new_tokens * len(work.turns)
    )
    prefill = decode = 0.0
    new: list[int] = []
    for turn in work.turns:
        ids = [*new[-1:], *turn]  # the last token of an answer was given, not fed
        begun = time.perf_counter()
        for logits in read_prompt(runner, ids):
            new = [int(logits[-1].argmax())]
            advance(0)
        told = time.perf_counter()
        advance(1)
        while len(new) < work.new_tokens:
            new.append(int(runner.feed(new[-1:])[-1].argmax()))
            advance(1)
        prefill += told - begun
        decode += time.perf_counter() - told
    return _recorded(runner, work, prefill, decode, new)


def _recorded(runner: Runner, work: Workload, prefill: float, decode: float, new: list[int]) -> RunRecord:
    cache, interface = runner.cache, runner.session.interface
    figures, metrics = runner.runtime_figures(), runner.runtime_metrics()
    token_bytes = 2 * interface.kv_heads * interface.head_dim * np.dtype(interface.dtype).itemsize
    appended = cache.seen * len(cache.tokens) * token_bytes
    live = sum(cache.tokens) * token_bytes if figures is None else figures.live_bytes
    held = live if figures is None else figures.held_bytes
    planned = cache.h2o_figures()
    counters: dict[str, float] = {}
    latencies: dict[str, dict[str, float]] = {}
    if metrics is not None:
        counters = {name: float(value) for name, value in metrics.to_dict().items() if name.startswith("h2o_lossless_")}
        latencies = {
            name: {key: float(value) for key, value in getattr(metrics, name).to_dict().items()}
            for name in ("decompress", "wait", "verify")
        }
    return RunRecord(
        prompt_tokens=sum(map(len, work.turns)),
        decode_tokens=(work.new_tokens - 1) * len(work.turns),
        prefill_seconds=prefill,
        decode_seconds=decode,
        lossy_ratio=appended / live if live else 1.0,
        held_ratio=live / held if held else 1.0,
        encoded_ratio=None if figures is None else figures.encoded_ratio,
        total_ratio=appended / held if held else 1.0,
        latencies=latencies,
        counters=counters,
        keep=_keep(planned.to_dict() if planned is not None else {}),
        new_ids=tuple(new),
    )


def _keep(planned: Mapping[str, Any]) -> dict[str, float]:
    """What the planner says of its last plan, numbers only."""
    return {name: float(value) for name, value in planned.items() if type(value) in (int, float)}


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """What attention reads out of the runtime beside a plain cache under the same policy, step by step.

    Attributes
    ----------
    steps, compared_steps
        Steps in all, and those after which all of K and V were compared; logits were at every step.
    compared_bytes
        Bytes of K and V that were compared.
    different_bytes
        Bytes that differ.
    different_steps
        Steps at which bytes, positions or logits differ.
    encoded_bytes
        Raw bytes that the runtime encoded meanwhile; 0: both caches held plain rows, so nothing was shown.
    """

    steps: int
    compared_steps: int
    compared_bytes: int
    different_bytes: int
    different_steps: int
    encoded_bytes: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs, and something that was encoded was compared."""
        return min(self.compared_bytes, self.encoded_bytes) > 0 and self.different_bytes == self.different_steps == 0


def compare_contents(
    session: DecoderSession,
    policy: Policy,
    lossless: RuntimeConfig,
    work: Workload,
    advance: Callable[[int], object] = lambda steps: None,
) -> Comparison:
    """Run a plain cache and one in the runtime on the same tokens, step by step, and compare their bytes.

    `advance` is as for `run_once`; a token counts once for each of the two caches.
    """
    plain, stored = Runner(session, policy), Runner(session, policy, lossless=lossless)
    steps = compared = nbytes = different = wrong = 0
    new: list[int] = []
    for turn in work.turns:
        ids, given = [*new[-1:], *turn], 0
        while given < work.new_tokens:
            unequal = False
            for logits, others in _steps((plain, stored), ids, prompt=given == 0):
                unequal |= logits.tobytes() != others.tobytes()
                advance(0)
            steps, given = steps + 1, given + 1
            advance(2)
            if given <= 2 or given == work.new_tokens or given % _EVERY == 0:
                compared += 1
                size, unlike = _unlike(plain, stored)
                nbytes, different = nbytes + size, different + unlike
                unequal |= unlike > 0
            wrong += unequal
            new = [int(logits[-1].argmax())]
            ids = new
    metrics = stored.runtime_metrics()
    return Comparison(
        steps=steps,
        compared_steps=compared,
        compared_bytes=nbytes,
        different_bytes=different,
        different_steps=wrong,
        encoded_bytes=0 if metrics is None else int(metrics.to_dict()["h2o_lossless_raw_bytes"]),
    )


def _steps(runners: tuple[Runner, Runner], ids: list[int], *, prompt: bool) -> Iterator[tuple[Floats, Floats]]:
    """Feed both runners the same tokens; yields the logits of both after each step."""
    one, other = runners
    if prompt:
        return zip(read_prompt(one, ids), read_prompt(other, ids), strict=True)
    return iter([(one.feed(ids), other.feed(ids))])


def _unlike(plain: Runner, stored: Runner) -> tuple[int, int]:
    """Bytes of K and V that both hold, and how many of them differ; all, where they hold different tokens."""
    size = different = 0
    for one, other in zip(plain.cache.layers(), stored.cache.layers(), strict=True):
        for left, right in ((one.keys, other.keys), (one.values, other.values)):
            size += left.nbytes
            if left.shape != right.shape or not np.array_equal(one.positions, other.positions):
                different += left.nbytes
            else:
                words = np.ascontiguousarray(left).view(np.uint8), np.ascontiguousarray(right).view(np.uint8)
                different += int(np.count_nonzero(words[0] != words[1]))
    return size, different
