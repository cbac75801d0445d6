"""Generate text under a policy and with the full cache, which may start with stored prefixes of the text."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import Protocol

import numpy as np

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.parallel import Progress
from .._util.text import LOSSLESS, LOSSY, break_lines, format_range, side_by_side_diff
from ..dtypes import Floats
from ..errors import KvmnnError, ModelError
from ..files.schema import Record, json_key
from ..policies.h2o.planner import H2OStats
from ..policies.policy import FullCache, Policy
from ..policies.registry import LabelledPolicy
from ..reports.records import RuntimeStats
from ..reports.table import wrap_sentences
from ..reports.tables import format_h2o_text, format_runtime_text
from ..store import BackendUnavailableError, PrefixStore, PutResult, StoredPrefix
from .kv_store import describe_encoding
from .onnx.model_files import ModelFiles, compute_fingerprint, find_model, get_section
from .runner import Runner, RunOptions
from .session import DecoderSession
from .tokenizer import encode_prompt


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Record):
    """How the next token is selected.

    Parameters
    ----------
    temperature
        Logits are divided by it; 0 takes the most probable token (the first of equal ones).
    top_k
        Only this many of the most probable tokens are drawn from; None for all.
    seed
        Seed of the random draws. Each token uses one random number, so that runs with equal logits draw equal tokens.

    Raises
    ------
    KvmnnError
        For a temperature below 0 or that is no number, and a `top_k` or `seed` out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise KvmnnError(f"temperature is {self.temperature}: expected a finite number, at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise KvmnnError(f"top_k is {self.top_k}: expected at least 1")
        if self.seed < 0:
            raise KvmnnError(f"seed is {self.seed}: expected at least 0")

    def create_selector(self) -> Callable[[Floats], int]:
        """Create a function that selects a token from logits ``[vocabulary]``; it has its own random generator."""
        generator = np.random.default_rng(self.seed)

        def select_token(logits: Floats) -> int:
            if not np.isfinite(logits.max()):  # NaN is the largest
                raise KvmnnError("the model's logits are no numbers (NaN or infinite)")
            if self.temperature == 0:
                return int(logits.argmax())
            order = np.argsort(-logits, kind="stable")[: self.top_k]
            top_logits = logits[order].astype(np.float64)
            with np.errstate(over="ignore"):  # a tiny temperature gives -inf, whose weight is 0
                weights = np.exp((top_logits - top_logits[0]) / self.temperature)
            sums = np.cumsum(weights)
            return int(order[min(np.searchsorted(sums, generator.random() * sums[-1], side="right"), len(order) - 1)])

        return select_token


@dataclass(frozen=True, kw_only=True)
class StoreUseStats(Record):
    """How much of one text a prefix store provided."""

    #: Tokens of the prompt that were not computed.
    tokens: int
    #: Finding, reading, decoding and handing over their K and V; part of the time to the first token.
    get_seconds: float
    #: Result of storing the text afterwards; None before.
    put: PutResult | None = None
    #: Problems of the store, in sentences.
    notes: tuple[str, ...] = ()


class StoredPrefixes:
    """Stored prefixes of one model, whose fingerprint is `model` (`kvmnn.lm.compute_fingerprint`).

    Examples
    --------
    ::

        with PrefixStore("prefixes/") as store:
            prefixes = StoredPrefixes(store, compute_fingerprint("pythia/"))
            prefix = prefixes.begin_text(runner, ids)
            logits = runner.step(ids[prefix.tokens :])
            prefixes.put_text(runner, ids)
    """

    def __init__(self, store: PrefixStore, model: str) -> None:
        self._store = store
        self._model = model
        self._loss = ""

    @property
    def uses_attention(self) -> bool:
        """Whether new units are smaller if what tokens drew of the attention is known; not while nothing answers."""
        with suppress(BackendUnavailableError):  # a miss of `get`, which explains it
            return self._store.codec == "transform"
        return False

    def begin_text(self, runner: Runner, ids: Sequence[int]) -> StoredPrefix:
        """Reset a runner and load the longest stored prefix of a text; its last token remains to be fed.

        For a store of transform streams the runner sums what tokens draw of the attention, if its session shows it.

        Raises
        ------
        KvmnnError
            If the policy of the runner evicts, or K and V are not those of its model.
        """
        runner.sums_attention = self.uses_attention and runner.session.has_attentions
        runner.reset()
        self._loss = ""
        if len(ids) < 2:
            return StoredPrefix(tokens=0, requested_tokens=0)
        dtype = dtypes.infer_dtype(np.empty(0, runner.session.interface.dtype)).name
        prefix = self._store.get(ids[:-1], model=self._model, dtype=dtype)
        if prefix.tokens:
            runner.load_initial(prefix.layers)
        self._loss = prefix.loss
        return prefix

    def put_text(self, runner: Runner, ids: Sequence[int]) -> PutResult:
        """Store K and V of `ids`, all tokens that a runner has been fed since `begin_text`.

        What the stored prefix had lost is passed on, as a unit that ends within a block is replaced by one of new rows.
        A store that cannot be written does not stop the text: `PutResult.notes` explains why nothing was stored.
        """
        layers = runner.cache.copy_layers()
        attention = None if runner.attention_sums is None else runner.attention_sums.compute_means()
        try:
            return self._store.put(ids, layers, model=self._model, attention=attention, loss=self._loss)
        except KvmnnError as error:
            return PutResult(tokens=len(ids), known_tokens=0, notes=(str(error),))


@dataclass(frozen=True, kw_only=True)
class GenerationStats(Record):
    """A generated text and its statistics."""

    #: The new tokens.
    ids: tuple[int, ...]
    #: ``"end of text"`` where the model ended it (that token is the last of `ids`), else ``"length"``.
    stopped: str
    #: Tokens fed, and live tokens of each layer at the end.
    tokens_seen: int
    tokens_kept: tuple[int, ...]
    #: Bytes of K and V at the end.
    cache_bytes: int
    #: Time from the first token of the prompt to the first new one (TTFT).
    prompt_seconds: float
    #: Mean of the steps after it, the choice of the token included (TPOT); None where there were none.
    token_seconds: float | None
    #: Means of the same steps: inside onnxruntime, and for holding, scoring and cutting the cache.
    model_seconds: float | None
    policy_seconds: float | None
    #: Statistics of the engine's planner, if it is the policy.
    h2o: H2OStats | None = field(default=None, metadata={"omit": True})
    #: Statistics of the lossless runtime, if it stores the cache.
    runtime: RuntimeStats | None = field(default=None, metadata={"omit": True})
    #: Use of a prefix store, if there was one.
    store: StoreUseStats | None = field(default=None, metadata={"omit": True})


def check_positions(label: str, limit: int | None, prompt_tokens: int, new_tokens: int) -> None:
    """Raise an error for texts that need more positions than the model has."""
    if limit is None or prompt_tokens + max(new_tokens - 1, 0) <= limit:
        return
    if prompt_tokens > limit:
        raise KvmnnError(
            f"{label}: the prompt has {prompt_tokens:,} tokens, the model was made for {limit:,} positions"
        )
    raise KvmnnError(
        f"{label}: {prompt_tokens:,} tokens of prompt and {new_tokens:,} new ones need more than the {limit:,} "
        f"positions that the model was made for: at most {limit - prompt_tokens + 1:,} new ones"
    )


def warm_up(session: DecoderSession, token: int) -> None:
    """Run the model once and probe layers of unequal lengths, so that neither is timed later."""
    runner = Runner(session)
    for _ in range(2):
        runner.step([token])
    session.probe_unequal_lengths()


def prefill(runner: Runner, ids: Sequence[int], chunk: int | None = None) -> Floats:
    """Feed a text from its beginning; return the logits of its last token."""
    runner.reset()
    return _feed_rest(runner, ids, chunk)


def _feed_rest(runner: Runner, ids: Sequence[int], chunk: int | None) -> Floats:
    """Feed the tokens of a text that the runner has not read yet; return the logits of the last one."""
    if not len(ids):
        raise KvmnnError("there are no tokens to begin with")
    step = chunk or len(ids)
    last_begin = (len(ids) - 1) // step * step
    for begin in range(0, last_begin, step):
        runner.step(ids[begin : begin + step])
    logits: Floats = runner.step(ids[last_begin:], end_chunk=True)[-1]
    return logits


def generate_tokens(
    runner: Runner,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    sampling: SamplingOptions | None = None,
    end_tokens: Collection[int] = (),
    chunk: int | None = None,
    prefixes: StoredPrefixes | None = None,
    progress: Progress | None = None,
) -> GenerationStats:
    """Continue a prompt."""
    if max_tokens < 1:
        raise KvmnnError(f"max_tokens is {max_tokens}: expected at least 1")
    interface = runner.session.interface
    check_positions(interface.label, interface.max_positions, len(prompt), max_tokens)
    select_token = (sampling or SamplingOptions()).create_selector()
    start_time = time.perf_counter()
    store_use = None
    if prefixes is None:
        runner.reset()
    else:
        prefix = prefixes.begin_text(runner, prompt)
        get_seconds = time.perf_counter() - start_time
        store_use = StoreUseStats(tokens=prefix.tokens, get_seconds=get_seconds, notes=prefix.notes)
    ids = [select_token(_feed_rest(runner, prompt[store_use.tokens if store_use else 0 :], chunk))]
    decode_start = time.perf_counter()
    model_seconds, policy_seconds = runner.timings.model_seconds, runner.timings.policy_seconds
    while ids[-1] not in end_tokens and len(ids) < max_tokens:
        if progress:
            progress(1)
        ids.append(select_token(runner.step(ids[-1:])[-1]))
    seconds, steps = time.perf_counter() - decode_start, len(ids) - 1
    if progress:
        progress(1)
    if prefixes and store_use:
        store_use = replace(store_use, put=prefixes.put_text(runner, [*prompt, *ids[:-1]]))
    return GenerationStats(
        ids=tuple(ids),
        stopped="end of text" if ids[-1] in end_tokens else "length",
        tokens_seen=runner.cache.num_seen,
        tokens_kept=tuple(runner.cache.tokens),
        cache_bytes=runner.cache.nbytes,
        prompt_seconds=decode_start - start_time,
        token_seconds=seconds / steps if steps else None,
        model_seconds=(runner.timings.model_seconds - model_seconds) / steps if steps else None,
        policy_seconds=(runner.timings.policy_seconds - policy_seconds) / steps if steps else None,
        h2o=runner.cache.collect_h2o_stats(),
        runtime=runner.collect_runtime_stats(),
        store=store_use,
    )


def find_end_tokens(files: ModelFiles) -> frozenset[int]:
    """Return the tokens that end a text, by the settings next to a model; empty where none are set."""
    setting = files.config.get("eos_token_id", get_section(files.genai, "model").get("eos_token_id"))
    values = setting if isinstance(setting, list) else [setting]
    return frozenset(value for value in values if isinstance(value, int) and not isinstance(value, bool))


@dataclass(frozen=True, kw_only=True)
class Continuation(Record):
    """A prompt continued with one cache."""

    #: Tokens, sizes and times.
    generation: GenerationStats = field(metadata={"inline": True})
    #: The new tokens as text.
    text: str

    @property
    def label(self) -> str:
        """``"LOSSY"`` if the cache lost anything, else ``"LOSSLESS"``."""
        return LOSSY if min(self.generation.tokens_kept) < self.generation.tokens_seen else LOSSLESS


@dataclass(frozen=True, kw_only=True)
class GenerateResult(Record):
    """A prompt continued with the full cache, and under a policy."""

    #: Path of the model, as specified.
    model: str
    #: The requested policy.
    policy: LabelledPolicy
    #: The text, and its tokens with the one that begins every text.
    prompt: str
    prompt_tokens: int
    #: Sampling of both runs.
    sampling: SamplingOptions
    #: With the full cache.
    full: Continuation
    #: Under the policy; None where it is the full cache.
    cut: Continuation | None
    #: Notes for the reader, in sentences.
    notes: tuple[str, ...] = ()

    @property
    @json_key(after="model")
    def label(self) -> str:
        """Label of the requested cache: ``"LOSSY"`` if it lost anything, else ``"LOSSLESS"``."""
        return (self.cut or self.full).label

    @property
    @json_key(before="sampling")
    def first_difference(self) -> int | None:
        """Return the first new token at which the texts differ, counted from 0; None if they are equal."""
        return None if self.cut is None else find_first_difference(self.full.generation.ids, self.cut.generation.ids)

    @property
    @json_key(after="first_difference")
    def equal(self) -> bool:
        """Return whether the texts are equal."""
        return self.first_difference is None

    def __str__(self) -> str:
        return "\n".join(self.format_lines(shutil.get_terminal_size((100, 24)).columns))

    def format_lines(self, width: int) -> list[str]:
        """Format both texts side by side in `width` columns, their first difference, and statistics of each run."""
        full = self.full.generation
        if self.cut is None:
            generations = {self.policy.label: full}
            lines = [*break_lines(self.full.text, width), ""]
        else:
            generations = {FullCache.name: full, self.policy.label: self.cut.generation}
            sides = ("full cache", self.full.text), (f"{self.cut.label}: {self.policy.label}", self.cut.text)
            difference, num_new = self.first_difference, len(full.ids)
            if difference is None:
                equal = f"equal: all {num_new:,} new tokens"
            else:
                equal = f"equal up to new token {difference:,}, different from {difference + 1:,} of {num_new:,} on"
            lines = [side_by_side_diff(*sides, width), "", equal]
        lines += _format_stats(generations)
        runs = [(label, generation.runtime) for label, generation in generations.items() if generation.runtime]
        if runs:
            lines += ["", format_runtime_text(runs, width)]
        if self.cut is not None and self.cut.generation.h2o is not None:
            lines += ["", format_h2o_text(self.cut.generation.h2o, width)]
        if self.notes:
            lines += ["", wrap_sentences(self.notes, width)]
        return lines


def generate(
    model: str | os.PathLike[str],
    prompt: str,
    policy: Policy | LabelledPolicy | None = None,
    *,
    max_tokens: int = 64,
    sampling: SamplingOptions | None = None,
    options: RunOptions | None = None,
    store: PrefixStore | None = None,
    progress: Progress | None = None,
) -> GenerateResult:
    """Continue a prompt with a model's full cache and with its cache under a policy.

    Parameters
    ----------
    model
        An ONNX decoder: file or folder, its ``tokenizer.json`` next to it.
    prompt
        At least one token, the one that begins every text included.
    policy
        The eviction policy; without one only the full cache runs.
    max_tokens
        New tokens, at least one.
    sampling
        How tokens are selected, with the same random numbers in both runs; greedily by default, so that every
        difference is due to the policy.
    options
        Settings of the model.
    store
        Prefixes that were computed before: the full cache begins with the longest one, and what it computed is put.
        K and V are found under the model's fingerprint (`compute_fingerprint`), which is taken over the whole model
        first.
    progress
        Called with 1 for each new token of either run.

    Raises
    ------
    MissingDependencyError
        Where onnxruntime, onnx or tokenizers is not installed.
    SourceError, ModelError
        For a model or tokenizer that cannot be opened.
    KvmnnError
        For a policy that the model cannot run, or more positions than it was made for.
    """
    labelled_policy = (
        policy if isinstance(policy, LabelledPolicy) else LabelledPolicy.from_policy(policy or FullCache())
    )
    sampling, options = sampling or SamplingOptions(), options or RunOptions()
    prefixes = None if store is None else StoredPrefixes(store, compute_fingerprint(model))
    try:
        session, tokenizer = options.open_model(
            model, labelled_policy.policy, attentions=prefixes is not None and prefixes.uses_attention
        )
    except ModelError:  # a graph that shows no attention: units are larger
        session, tokenizer = options.open_model(model, labelled_policy.policy)
    ids = encode_prompt(tokenizer, prompt)
    end_tokens = find_end_tokens(find_model(model))
    warm_up(session, ids[0])

    def run_policy(policy: Policy) -> Continuation:
        generation = generate_tokens(
            options.create_runner(session, policy),
            ids,
            max_tokens,
            sampling=sampling,
            end_tokens=end_tokens,
            chunk=options.chunk,
            prefixes=None if policy.can_evict else prefixes,
            progress=progress,
        )
        return Continuation(generation=generation, text=decode_continuation(tokenizer, ids, generation.ids))

    full = run_policy(FullCache())
    policy_run = run_policy(labelled_policy.policy) if labelled_policy.policy.can_evict else None
    notes = _describe_evictions(full, policy_run, labelled_policy, options, len(ids))
    has_own_bos = tokenizer.bos is not None and tokenizer.encode(prompt)[:1].tolist() == [tokenizer.bos]
    bos_note = tokenizer.bos_info.format_note(1, int(has_own_bos), noun="prompt")
    return GenerateResult(
        model=os.fspath(model),
        prompt=prompt,
        prompt_tokens=len(ids),
        policy=labelled_policy,
        sampling=sampling,
        full=full,
        cut=policy_run,
        notes=(*([] if bos_note is None else [bos_note]), *notes),
    )


def _describe_evictions(
    full: Continuation,
    policy_run: Continuation | None,
    labelled_policy: LabelledPolicy,
    options: RunOptions,
    prompt_tokens: int,
) -> Iterator[str]:
    """Explain why nothing was evicted, encoded or stored."""
    generations = [(FullCache.name, full.generation)]
    if policy_run is not None:
        generations.append((labelled_policy.label, policy_run.generation))
    if full.generation.store is not None:
        yield from full.generation.store.notes
        if policy_run is not None:
            yield f"{labelled_policy.label}: computed from the beginning, as a policy must see every token come."
    if policy_run is not None and policy_run.label == LOSSLESS:
        first_step_tokens = min(options.chunk or prompt_tokens, prompt_tokens)
        reason = labelled_policy.policy.explain_no_eviction(first_step_tokens, policy_run.generation.tokens_seen)
        num_steps = -(-(prompt_tokens - first_step_tokens) // first_step_tokens)
        num_steps += policy_run.generation.tokens_seen - prompt_tokens
        reason = reason or labelled_policy.policy.explain_few_steps(num_steps)
        yield f"{labelled_policy.label}: nothing was evicted: {reason or 'no step gave it reason to'}."
    if options.lossless is not None:
        runs = [(label, generation.runtime) for label, generation in generations if generation.runtime is not None]
        yield from describe_encoding(runs, options.lossless)


class TokenDecoder(Protocol):
    """The part of `kvmnn.lm.tokenizer.Tokenizer` that returns text."""

    def decode(self, ids: Sequence[int]) -> str: ...


def find_first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index at which two texts differ; None if they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def decode_continuation(tokenizer: TokenDecoder, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
    """Decode new tokens as the continuation of a prompt, because some tokens read differently alone."""
    prompt_text, text = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *new_ids])
    return text[len(prompt_text) :] if text.startswith(prompt_text) else tokenizer.decode(list(new_ids))


def _format_stats(generations: dict[str, GenerationStats]) -> list[str]:
    """Format statistics of each run as aligned lines."""
    has_store = any(generation.store for generation in generations.values())

    def format_column(label: str, generation: GenerationStats) -> list[tuple[str, str]]:
        tokens_text = format_range(sorted(set(generation.tokens_kept)))
        column = [
            ("", label),
            ("new tokens", f"{len(generation.ids):,} ({generation.stopped})"),
            ("tokens kept of seen", f"{tokens_text} of {generation.tokens_seen:,}"),
            ("K and V held", f"{generation.cache_bytes / (1 << 20):.2f} MiB"),
        ]
        if has_store:
            column.append(("prompt from the store", f"{generation.store.tokens:,} tokens" if generation.store else "-"))
        return [
            *column,
            ("first token after", f"{1e3 * generation.prompt_seconds:.1f} ms"),
            ("time per token", _format_milliseconds(generation.token_seconds)),
            ("  in the model", _format_milliseconds(generation.model_seconds)),
            ("  in the policy", _format_milliseconds(generation.policy_seconds)),
        ]

    columns = [format_column(label, generation) for label, generation in generations.items()]
    lines = [[row[0][0], *(cell for _, cell in row)] for row in zip(*columns, strict=True)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)).rstrip() for line in lines]
    for generation in generations.values():
        store = generation.store
        # The notes may already explain why nothing was put.
        if store and store.put and not (store.put.notes and set(store.put.notes) <= set(store.notes)):
            table.append(f"put into the store: {store.put}")
    return table


def _format_milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f} ms"
