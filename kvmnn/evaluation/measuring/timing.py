"""How fast a model answers under a policy: time to first token, time per output token."""

from __future__ import annotations

import statistics
import time

from ...lm.documents import Ids
from ...lm.runner import Runner
from .cells import ProjectTimes, TimingCell

PROMPT_CHUNK_TOKENS = 128
"""Tokens of a prompt that are fed at once, so that no more logits than these are held."""
MAX_DECODED_TOKENS = 32
"""Tokens that are fed one by one after the prompt."""
NUM_WARM_UP_TOKENS = 5
"""Tokens that are decoded before anything is timed."""
PROJECT_PROMPT_TOKENS, PROJECT_NEW_TOKENS = 64, 64
"""Tokens of the prompt, and generated, by the definition of StreamingLLM + H2O."""


def measure_generation_times(runner: Runner, ids: Ids, repeats: int) -> TimingCell:
    """TTFT and TPOT on one document, medians of `repeats` warm runs.

    Parameters
    ----------
    runner
        Of the configuration.
    ids
        int64 ``[1 + tokens]``. The last `MAX_DECODED_TOKENS` tokens but one are decoded, what lies before is the
        prompt.
    """
    prompt, decoded_ids = split_prompt(ids)
    num_decoded = len(decoded_ids)
    ttft_seconds, tpot_seconds = [], []
    feed_prompt(runner, prompt[:PROMPT_CHUNK_TOKENS])
    for index in range(min(NUM_WARM_UP_TOKENS, num_decoded)):
        runner.step(decoded_ids[index : index + 1])
    for _ in range(repeats):
        runner.reset()
        start_time = time.perf_counter()
        feed_prompt(runner, prompt)
        ttft_seconds.append(time.perf_counter() - start_time)
        start_time = time.perf_counter()
        for index in range(num_decoded):
            runner.step(decoded_ids[index : index + 1])
        tpot_seconds.append((time.perf_counter() - start_time) / max(num_decoded, 1))
    return TimingCell(
        ttft_seconds=statistics.median(ttft_seconds),
        tpot_seconds=statistics.median(tpot_seconds) if num_decoded else None,
        prompt_tokens=len(prompt),
        decoded_tokens=num_decoded,
        repeats=repeats,
    )


def measure_project_times(runner: Runner, ids: Ids, repeats: int) -> ProjectTimes:
    """What StreamingLLM + H2O time (E3 of `presets`), greedily from the first tokens of a text without bos.

    The project runs once after its warm-up; these are medians of `repeats` runs.
    """
    prompt = ids[:PROJECT_PROMPT_TOKENS]
    _time_generation(runner, prompt, NUM_WARM_UP_TOKENS)
    ttft_seconds = statistics.median(_time_generation(runner, prompt, 1) for _ in range(repeats))
    seconds = statistics.median(_time_generation(runner, prompt, PROJECT_NEW_TOKENS) for _ in range(repeats))
    return ProjectTimes(
        ttft_seconds=ttft_seconds,
        tpot_seconds=seconds / PROJECT_NEW_TOKENS,
        tokens_per_second=PROJECT_NEW_TOKENS / seconds,
        prompt_tokens=len(prompt),
        new_tokens=PROJECT_NEW_TOKENS,
        repeats=repeats,
    )


def split_prompt(ids: Ids) -> tuple[Ids, Ids]:
    """The prompt, and the tokens that are decoded one by one after it; the text's last token is fed to nobody."""
    num_decoded = min(MAX_DECODED_TOKENS, max(len(ids) - 2, 0))
    end = len(ids) - 1
    return ids[: end - num_decoded], ids[end - num_decoded : end]


def feed_prompt(runner: Runner, prompt: Ids) -> int:
    """Feed a prompt in pieces, its end being that of a chunk; the most probable next token."""
    best = 0
    for begin in range(0, len(prompt), PROMPT_CHUNK_TOKENS):
        chunk_ids = prompt[begin : begin + PROMPT_CHUNK_TOKENS]
        logits = runner.step(chunk_ids, end_chunk=begin + len(chunk_ids) == len(prompt))
        best = int(logits[-1].argmax())
    return best


def _time_generation(runner: Runner, prompt: Ids, num_new: int) -> float:
    """Seconds of generating `num_new` tokens, the prompt's included."""
    runner.reset()
    start_time = time.perf_counter()
    best = feed_prompt(runner, prompt)
    for _ in range(num_new - 1):
        best = int(runner.step([best])[-1].argmax())
    return time.perf_counter() - start_time
