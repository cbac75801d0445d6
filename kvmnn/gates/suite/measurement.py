"""Measure one case on a model: runs with and without compression, perplexity, and equality of K and V in attention."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from math import expm1
from pathlib import Path
from typing import Any

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ...dtypes import Floats
from ...errors import KvmnnError
from ...evaluation import EvaluationSettings, TaskOptions, evaluate, evaluate_tasks
from ...evaluation.runner import ignore_refusals
from ...evaluation.settings import build_configuration
from ...evaluation.task_result import TaskScore
from ...files.schema import Record
from ...lm.documents import Document
from ...lm.generation import check_positions
from ...lm.onnx.interface import DecoderInterface
from ...lm.onnx.onnx_session import trim_heap
from ...lm.runner import Runner, feed_prompt_steps
from ...lm.session import DecoderSession
from ...policies.h2o_blocks import H2OEngine
from ...policies.policy import Policy
from ...runtime import RuntimeConfig
from ...runtime.metrics import LatencySummary
from .cases import RunCase
from .settings import RunSettings
from .workloads import Workload


class ModelSessions:
    """Sessions with and without attention probabilities, whose cost is part of a candidate's speed.

    Parameters
    ----------
    model
        An ONNX decoder: file or folder.
    threads
        Number of onnxruntime's threads.

    Attributes
    ----------
    interface
        Sizes and names of the model.
    """

    def __init__(self, model: str, threads: int) -> None:
        self._model, self._threads = model, threads
        self._open_sessions: dict[bool, DecoderSession] = {}
        self.interface: DecoderInterface = self.get(attentions=False).interface

    def get(self, *, attentions: bool) -> DecoderSession:
        """Return the session; open it if necessary."""
        if attentions not in self._open_sessions:
            open_session = self._open_sessions.get(not attentions)
            shared = None if open_session is None else open_session.share(attentions=attentions)
            self._open_sessions[attentions] = shared or DecoderSession.open(
                self._model, attentions=attentions, threads=self._threads
            )
        return self._open_sessions[attentions]

    def release(self, *, kept_kind: bool | None = None) -> None:
        """Close the sessions except the one whose `attentions` is `kept_kind`."""
        self._open_sessions = {
            has_attentions: session
            for has_attentions, session in self._open_sessions.items()
            if has_attentions is kept_kind
        }
        gc.collect()
        trim_heap()


_COMPARISON_INTERVAL_STEPS = 16
"""Decode steps between two comparisons of all of K and V; logits are compared at every step."""


@dataclass(frozen=True, kw_only=True)
class RunRecord(Record):
    """The measurements of one run."""

    #: Tokens fed in one step at the beginning of turns, and tokens fed one by one.
    prompt_tokens: int
    decode_tokens: int
    #: Time of these.
    prefill_seconds: float
    decode_seconds: float
    #: Bytes of all tokens over bytes of those that the policy left at the end, or, `is_rounded`, that store these.
    lossy_ratio: float
    #: Bytes of the remaining tokens over the bytes that store them between two steps.
    held_ratio: float
    #: Raw over compressed bytes of everything that was encoded; None if nothing was.
    encoded_ratio: float | None
    #: Bytes of all tokens over the resident bytes.
    total_ratio: float
    #: ``decompress``, ``wait`` and ``verify`` (the decoding that proves a block before its rows go): count, sum and
    #: percentiles, microseconds.
    latencies: dict[str, LatencySummary] = field(default_factory=dict)
    #: Counters of the runtime, under the engine's names.
    counters: dict[str, float] = field(default_factory=dict)
    #: Numbers of the H2O statistics.
    plan_stats: dict[str, float] = field(default_factory=dict, metadata={"key": "keep"})
    #: Whether the codec is LOSSY and encoded anything: none of the ratio is lossless then.
    is_rounded: bool = field(default=False, metadata={"omit": True})
    #: Tokens generated after the last turn.
    new_ids: tuple[int, ...] = field(default=(), metadata={"omit": True})

    @property
    def eviction_ratio(self) -> float:
        """Bytes of all tokens over bytes of those that the policy left at the end."""
        return self.total_ratio / self.held_ratio if self.is_rounded else self.lossy_ratio

    @property
    def lossless_ratio(self) -> float:
        """`encoded_ratio` of a lossless codec, else 1, a factor of the total; tables have none of a LOSSY codec."""
        return 1.0 if self.is_rounded else self.encoded_ratio or 1.0

    @property
    def decode_speed(self) -> float:
        """Decode speed in tokens per second."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def decompress_us(self) -> float:
        """Time to restore blocks, or, in modes without restoring, to decode blocks for comparison."""
        return self.get_counter("decompress_us") or (
            self.latencies["verify"].total_us if "verify" in self.latencies else 0.0
        )

    def get_counter(self, name: str) -> float:
        """Return a counter of the runtime; 0 if nothing was counted."""
        return self.counters.get(f"h2o_lossless_{name}", 0.0)


def measure_run(
    session: DecoderSession,
    policy: Policy,
    lossless: RuntimeConfig | None,
    workload: Workload,
    advance: Callable[[int], object] = lambda steps: None,
) -> RunRecord:
    """Run a workload with greedy decoding, with the cache under a policy and in the lossless runtime.

    `advance` is called with the number of tokens generated since its last call, and with 0 after each step of a prompt.
    """
    runner = Runner(session, policy, lossless=lossless)
    interface = session.interface
    check_positions(
        interface.label,
        interface.max_positions,
        sum(map(len, workload.turns)),
        workload.new_tokens * len(workload.turns),
    )
    prefill_seconds = decode_seconds = 0.0
    new_ids: list[int] = []
    for turn in workload.turns:
        ids = [*new_ids[-1:], *turn]  # the last token of an answer was given, not fed
        start_time = time.perf_counter()
        for logits in feed_prompt_steps(runner, ids):
            new_ids = [int(logits[-1].argmax())]
            advance(0)
        first_token_time = time.perf_counter()
        advance(1)
        while len(new_ids) < workload.new_tokens:
            new_ids.append(int(runner.step(new_ids[-1:])[-1].argmax()))
            advance(1)
        prefill_seconds += first_token_time - start_time
        decode_seconds += time.perf_counter() - first_token_time
    return _build_run_record(runner, workload, prefill_seconds, decode_seconds, new_ids)


def _build_run_record(
    runner: Runner, workload: Workload, prefill_seconds: float, decode_seconds: float, new_ids: list[int]
) -> RunRecord:
    cache, interface = runner.cache, runner.session.interface
    runtime_stats, metrics = runner.collect_runtime_stats(), runner.collect_runtime_metrics()
    token_bytes = 2 * interface.kv_heads * interface.head_dim * np.dtype(interface.dtype).itemsize
    appended_bytes = cache.num_seen * len(cache.tokens) * token_bytes
    live_bytes = sum(cache.tokens) * token_bytes if runtime_stats is None else runtime_stats.live_bytes
    resident_bytes = live_bytes if runtime_stats is None else runtime_stats.held_bytes
    h2o_stats = cache.collect_h2o_stats()
    plan_values = {} if h2o_stats is None else h2o_stats.to_dict()
    counters: dict[str, float] = {}
    latencies: dict[str, LatencySummary] = {}
    if metrics is not None:
        counters = {
            name: float(value)
            for name, value in metrics.to_dict().items()
            if name.startswith("h2o_lossless_") and value is not None
        }
        latencies = {
            name: LatencySummary(**{key: float(value) for key, value in getattr(metrics, name).to_dict().items()})
            for name in ("decompress", "wait", "verify")
        }
    is_rounded = runtime_stats is not None and runtime_stats.is_rounded
    lossy_bytes = resident_bytes if is_rounded else live_bytes
    return RunRecord(
        prompt_tokens=sum(map(len, workload.turns)),
        decode_tokens=(workload.new_tokens - 1) * len(workload.turns),
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        lossy_ratio=appended_bytes / lossy_bytes if lossy_bytes else 1.0,
        held_ratio=live_bytes / resident_bytes if resident_bytes else 1.0,
        encoded_ratio=None if runtime_stats is None else runtime_stats.encoded_ratio,
        total_ratio=appended_bytes / resident_bytes if resident_bytes else 1.0,
        latencies=latencies,
        counters=counters,
        plan_stats={name: float(value) for name, value in plan_values.items() if type(value) in (int, float)},
        is_rounded=is_rounded,
        new_ids=tuple(new_ids),
    )


@dataclass(frozen=True, kw_only=True)
class ContentComparison(Record):
    """A comparison of the K and V that attention reads with those of a plain cache, step by step."""

    #: Steps in all, and those after which all of K and V were compared; logits were at every step.
    steps: int
    compared_steps: int
    #: Bytes of K and V that were compared.
    compared_bytes: int
    #: Bytes that differ.
    different_bytes: int
    #: Steps at which bytes, positions or logits differ.
    different_steps: int
    #: Raw bytes that the runtime encoded meanwhile; 0: both caches held plain rows, so nothing was shown.
    encoded_bytes: int

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs, and the comparison covered encoded tokens."""
        return min(self.compared_bytes, self.encoded_bytes) > 0 and self.different_bytes == self.different_steps == 0


def compare_contents(
    session: DecoderSession,
    policy: Policy,
    lossless: RuntimeConfig,
    workload: Workload,
    advance: Callable[[int], object] = lambda steps: None,
) -> ContentComparison:
    """Run a plain cache and one in the runtime on the same tokens, step by step, and compare their bytes.

    `advance` is as for `measure_run`; a token counts once for each of the two caches.
    """
    plain_runner, runtime_runner = Runner(session, policy), Runner(session, policy, lossless=lossless)
    steps = num_compared = compared_bytes = different_bytes = different_steps = 0
    new_ids: list[int] = []
    for turn in workload.turns:
        ids, num_given = [*new_ids[-1:], *turn], 0
        while num_given < workload.new_tokens:
            is_step_different = False
            for logits, runtime_logits in _feed_both((plain_runner, runtime_runner), ids, prompt=num_given == 0):
                is_step_different |= logits.tobytes() != runtime_logits.tobytes()
                advance(0)
            steps, num_given = steps + 1, num_given + 1
            advance(2)
            if num_given <= 2 or num_given == workload.new_tokens or num_given % _COMPARISON_INTERVAL_STEPS == 0:
                num_compared += 1
                step_bytes, step_different_bytes = _count_different_bytes(plain_runner, runtime_runner)
                compared_bytes, different_bytes = compared_bytes + step_bytes, different_bytes + step_different_bytes
                is_step_different |= step_different_bytes > 0
            different_steps += is_step_different
            new_ids = [int(logits[-1].argmax())]
            ids = new_ids
    metrics = runtime_runner.collect_runtime_metrics()
    return ContentComparison(
        steps=steps,
        compared_steps=num_compared,
        compared_bytes=compared_bytes,
        different_bytes=different_bytes,
        different_steps=different_steps,
        encoded_bytes=0 if metrics is None else int(metrics.to_dict()["h2o_lossless_raw_bytes"]),
    )


def _feed_both(runners: tuple[Runner, Runner], ids: list[int], *, prompt: bool) -> Iterator[tuple[Floats, Floats]]:
    """Feed both runners the same tokens; yield the logits of both after each step."""
    plain_runner, runtime_runner = runners
    if prompt:
        return zip(feed_prompt_steps(plain_runner, ids), feed_prompt_steps(runtime_runner, ids), strict=True)
    return iter([(plain_runner.step(ids), runtime_runner.step(ids))])


def _count_different_bytes(plain_runner: Runner, runtime_runner: Runner) -> tuple[int, int]:
    """Count the bytes of K and V, and how many of them differ between the two runners.

    All bytes of a layer count as different if the layers contain different tokens.
    """
    total_bytes = different_bytes = 0
    for plain_layer, runtime_layer in zip(
        plain_runner.cache.copy_layers(), runtime_runner.cache.copy_layers(), strict=True
    ):
        for left, right in ((plain_layer.keys, runtime_layer.keys), (plain_layer.values, runtime_layer.values)):
            total_bytes += left.nbytes
            if left.shape != right.shape or not np.array_equal(plain_layer.positions, runtime_layer.positions):
                different_bytes += left.nbytes
            else:
                byte_views = np.ascontiguousarray(left).view(np.uint8), np.ascontiguousarray(right).view(np.uint8)
                different_bytes += int(np.count_nonzero(byte_views[0] != byte_views[1]))
    return total_bytes, different_bytes


_MAX_EXTRA_TOKENS = 4096
"""Maximum tokens by which texts are extended in the search for a length at which the planner would evict."""


@dataclass(frozen=True, kw_only=True)
class PerplexityChange(Record):
    """The relative change of perplexity against the full cache; without interval for fewer than two texts.

    lossy_ratio: bytes of all tokens over those kept at the end of the texts, 1 where nothing was evicted; why_all_stay
    is then the planner's reason, where it has one.
    """

    mean: float
    low: float | None
    high: float | None
    texts: int
    tokens: int
    lossy_ratio: float
    why_all_stay: str = ""
    #: KL divergence of the next token from the full cache in nats, mean and 99th percentile; None if not measured.
    kl: float | None = None
    kl_p99: float | None = None
    #: Raw over coded bytes of what a codec that is LOSSY rounded; None without one, or if nothing was coded.
    coded_ratio: float | None = None
    #: Accuracy of tasks, if there are any, and the share of their contexts that was left before the questions.
    task_scores: tuple[TaskScore, ...] = ()
    stored_share: float | None = None


class PerplexityProgress:
    """The progress of an evaluation, converted to units of the suite.

    Parameters
    ----------
    units
        Total of these units.
    advance
        Called with the units done since its last call.

    Attributes
    ----------
    remaining_units
        Units that were not counted yet.
    """

    def __init__(self, units: int, advance: Callable[[int], object]) -> None:
        self.remaining_units, self._units, self._advance = units, units, advance
        self._tokens, self._done_tokens = 0, 0

    def start(self, tokens: int, cells: int, reused: int) -> None:
        """Start, given the total number of tokens."""
        self._tokens = tokens

    def advance(self, tokens: int, cells: int) -> None:
        """Count tokens."""
        self._done_tokens += tokens
        remaining_units = self._units - self._units * min(self._done_tokens, self._tokens) // max(self._tokens, 1)
        self._advance(self.remaining_units - remaining_units)
        self.remaining_units = remaining_units


def measure_perplexity_change(
    model: str,
    documents: Sequence[Document],
    case: RunCase,
    *,
    jobs: int,
    store: Path,
    progress: PerplexityProgress | None = None,
) -> PerplexityChange:
    """Evaluate the planner of a case, and a codec that is LOSSY, on the beginnings of texts."""
    settings = case.settings
    with ignore_refusals():
        result = evaluate(
            model,
            [truncate_document(document, settings.quality_tokens) for document in documents[: settings.quality_texts]],
            [build_configuration(H2OEngine.name, H2OEngine.parse_engine_options(case.engine))],
            settings=EvaluationSettings(
                tokens=settings.quality_tokens,
                prompt=settings.quality_prompt,
                threads=settings.threads,
                seed=settings.seed,
                lossless=_select_runtime(case),
            ),
            jobs=jobs,
            store=store,
            progress=progress,
        )
    if result.refused:
        raise KvmnnError(f"{case.name}: {result.refused[0].reason}")
    row, texts = result.rows[-1], result.documents
    difference: Any = row.versus_full
    lossy_ratio = (row.lossy_ratio if row.runtime is None else row.runtime.eviction_ratio) or 1.0
    return PerplexityChange(
        mean=expm1(difference.nll),
        low=None if difference.low is None else expm1(difference.low),
        high=None if difference.high is None else expm1(difference.high),
        texts=len(texts),
        tokens=sum(text.tokens for text in texts),
        lossy_ratio=lossy_ratio,
        why_all_stay="" if lossy_ratio > 1 else explain_no_eviction(case.policy, settings),
        kl=None if row.divergence is None else row.divergence.kl,
        kl_p99=None if row.divergence is None else row.divergence.kl_p99,
        coded_ratio=None if row.runtime is None else row.runtime.encoded_ratio,
        **_measure_tasks(model, documents, case, store),
    )


def _select_runtime(case: RunCase) -> dict[str, Any] | None:
    """Return the engine's options for the runtime if it changes what attention reads; None if it is lossless."""
    return case.engine if case.is_lossy_codec else None


def _measure_tasks(model: str, documents: Sequence[Document], case: RunCase, store: Path) -> dict[str, Any]:
    """Measure the tasks of the settings; half of a context is the prompt, the planner evicts in the other half."""
    settings = case.settings
    if not settings.tasks:
        return {}
    options = TaskOptions.parse(settings.tasks)
    evaluated = evaluate_tasks(
        model,
        list(documents),
        [build_configuration(H2OEngine.name, H2OEngine.parse_engine_options(case.engine))],
        tasks=options,
        settings=EvaluationSettings(
            prompt=options.tokens // 2,
            threads=settings.threads,
            seed=settings.seed,
            lossless=_select_runtime(case),
        ),
        store=store,
    )
    if evaluated.refused:
        raise KvmnnError(f"{case.name}: {evaluated.refused[0].reason}")
    return {"task_scores": evaluated.rows[-1].scores, "stored_share": evaluated.rows[-1].stored_share}


def explain_no_eviction(policy: Policy, settings: RunSettings) -> str:
    """Explain why no token of the texts was evicted, and the length from which eviction would begin."""
    prompt_tokens, tokens = settings.quality_prompt, settings.quality_tokens
    reason = policy.explain_no_eviction(
        prompt_tokens, max(1, tokens - 1)
    )  # what the last step plans, no step carries out
    if reason is None:
        decoded_text = pluralize(tokens - prompt_tokens, "token")
        return f"too few steps for a plan: {decoded_text} after the prompt (quality_tokens less quality_prompt)"
    lengths = range(tokens, tokens + _MAX_EXTRA_TOKENS)
    sufficient_length = next(
        (length for length in lengths if policy.explain_no_eviction(prompt_tokens, length) is None), None
    )
    return reason if sufficient_length is None else f"{reason}, or quality_tokens above {sufficient_length:,}"


def truncate_document(document: Document, tokens: int) -> Document:
    """Truncate a text to `tokens`; its byte count, which perplexity does not use, is not changed."""
    if document.num_scored <= tokens:
        return document
    return Document(
        name=document.name,
        ids=document.ids[: tokens + 1],
        nbytes=document.nbytes,
        sha256=document.sha256,
        begins_with_bos=document.begins_with_bos,
        requested_tokens=tokens,
    )
