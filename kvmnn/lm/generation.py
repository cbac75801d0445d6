"""New tokens from a model whose cache is under a policy."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..dtypes import Floats
from ..errors import KvmnnError
from ..h2o.figures import H2OStats
from ..reports.runtime_figures import RuntimeStats
from ..threads.pipeline import Progress
from .graph.model_files import ModelFiles, get_section
from .runner import Runner
from .sampling import SamplingOptions
from .session import DecoderSession
from .stored_prefixes import StoredPrefixes, StoreUseStats


@dataclass(frozen=True, kw_only=True)
class GenerationStats:
    """A text that was generated.

    Attributes
    ----------
    ids
        The new tokens.
    stopped
        ``"end of text"`` where the model ended it (that token is the last of `ids`), else ``"length"``.
    tokens_seen, tokens_kept
        Tokens fed, and live tokens of each layer at the end.
    cache_bytes
        Of K and V held at the end.
    prompt_seconds
        From the first token of the prompt to the first new one (TTFT).
    token_seconds
        Mean of the steps after it, the choice of the token included (TPOT); None where there were none.
    model_seconds, policy_seconds
        Means of the same steps: inside onnxruntime, and for holding, scoring and cutting the cache.
    h2o
        What the engine's planner did, where it is what evicts.
    runtime
        What the lossless runtime did, where the cache lies in one.
    store
        What a prefix store did, where there was one.
    """

    ids: tuple[int, ...]
    stopped: str
    tokens_seen: int
    tokens_kept: tuple[int, ...]
    cache_bytes: int
    prompt_seconds: float
    token_seconds: float | None
    model_seconds: float | None
    policy_seconds: float | None
    h2o: H2OStats | None = None
    runtime: RuntimeStats | None = None
    store: StoreUseStats | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        document = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name, stats in (("h2o", self.h2o), ("runtime", self.runtime), ("store", self.store)):
            del document[name]
            if stats is not None:
                document[name] = stats.to_dict()
        return document


def check_positions(label: str, limit: int | None, prompt_tokens: int, new_tokens: int) -> None:
    """Refuse what would need more positions than the model was made for.

    Parameters
    ----------
    label
        What messages call the model.
    limit
        Its positions; None where they are not known.
    prompt_tokens, new_tokens
        Tokens of the prompt, and tokens to generate: the last of them is not fed any more.

    Raises
    ------
    KvmnnError
        A policy does not help: tokens keep their true positions however small the cache is.
    """
    if limit is None or prompt_tokens + max(new_tokens - 1, 0) <= limit:
        return
    if prompt_tokens > limit:
        raise KvmnnError(
            f"{label}: the prompt has {prompt_tokens:,} tokens, the model was made for {limit:,} positions"
        )
    raise KvmnnError(
        f"{label}: {prompt_tokens:,} tokens of prompt and {new_tokens:,} new ones need more than the {limit:,} "
        f"positions that the "
        f"model was made for: at most {limit - prompt_tokens + 1:,} new ones"
    )


def warm_up(session: DecoderSession, token: int) -> None:
    """Let the model run once, and find out what it does with layers of unequal lengths: neither is to be timed."""
    runner = Runner(session)
    for _ in range(2):
        runner.step([token])
    session.probe_unequal_lengths()


def prefill(runner: Runner, ids: Sequence[int], chunk: int | None = None) -> Floats:
    """Feed a text from its beginning; the logits of its last token.

    Parameters
    ----------
    ids
        At least one token.
    chunk
        Tokens fed at once; None feeds all in one step, which is what policies that act once on a prompt expect.
    """
    runner.reset()
    return _feed_rest(runner, ids, chunk)


def _feed_rest(runner: Runner, ids: Sequence[int], chunk: int | None) -> Floats:
    """Feed what the runner has not read yet of a text; the logits of the last token."""
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
    """Continue a prompt.

    Parameters
    ----------
    runner
        The model under its policy; it begins a new text.
    prompt
        Token ids, at least one.
    max_tokens
        New tokens, at least one.
    sampling
        How they are chosen; greedily by default.
    end_tokens
        Tokens that end the text.
    chunk
        As for `prefill`.
    prefixes
        Begin with the longest prefix that is stored, and store all that was computed.
    progress
        Told 1 for each new token.

    Raises
    ------
    KvmnnError
        For an empty prompt, no tokens to make, or more positions than the model has (`check_positions`).
    """
    if max_tokens < 1:
        raise KvmnnError(f"max_tokens is {max_tokens}: expected at least 1")
    interface = runner.session.interface
    check_positions(interface.label, interface.max_positions, len(prompt), max_tokens)
    select_token = (sampling or SamplingOptions()).create_selector()
    start_time = time.perf_counter()
    store_use = _start_text(runner, prompt, prefixes)
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


def _start_text(runner: Runner, prompt: Sequence[int], prefixes: StoredPrefixes | None) -> StoreUseStats | None:
    """Begin a new text, with what is stored of it."""
    if prefixes is None:
        runner.reset()
        return None
    start_time = time.perf_counter()
    prefix = prefixes.begin_text(runner, prompt)
    return StoreUseStats(tokens=prefix.tokens, get_seconds=time.perf_counter() - start_time, notes=prefix.notes)


def find_end_tokens(files: ModelFiles) -> frozenset[int]:
    """Tokens that end a text, by the settings beside a model; empty where they say nothing."""
    setting = files.config.get("eos_token_id", get_section(files.genai, "model").get("eos_token_id"))
    values = setting if isinstance(setting, list) else [setting]
    return frozenset(value for value in values if isinstance(value, int) and not isinstance(value, bool))
