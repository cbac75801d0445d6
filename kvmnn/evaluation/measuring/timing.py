"""How fast a model answers under a policy: time to first token, time per output token."""

from __future__ import annotations

import statistics
import time

from ...lm.documents import Ids
from ...lm.runner import Runner
from .cells import ProjectTimes, TimingCell

PIECE = 128
"""Tokens of a prompt that are fed at once, so that no more logits than these are held."""
DECODED = 32
"""Tokens that are fed one by one after the prompt."""
WARM_UP = 5
"""Tokens that are decoded before anything is timed."""
PROJECT_PROMPT, PROJECT_NEW = 64, 64
"""Tokens of the prompt, and generated, by the definition of StreamingLLM + H2O."""


def generation_times(runner: Runner, ids: Ids, repeats: int) -> TimingCell:
    """TTFT and TPOT on one document, medians of `repeats` warm runs.

    Parameters
    ----------
    runner
        Of the configuration.
    ids
        int64 ``[1 + tokens]``. The last `DECODED` tokens but one are decoded, what lies before is the prompt.
    """
    prompt, rest = split(ids)
    decoded = len(rest)
    first, each = [], []
    feed_prompt(runner, prompt[:PIECE])
    for index in range(min(WARM_UP, decoded)):
        runner.feed(rest[index : index + 1])
    for _ in range(repeats):
        runner.reset()
        began = time.perf_counter()
        feed_prompt(runner, prompt)
        first.append(time.perf_counter() - began)
        began = time.perf_counter()
        for index in range(decoded):
            runner.feed(rest[index : index + 1])
        each.append((time.perf_counter() - began) / max(decoded, 1))
    return TimingCell(
        ttft_seconds=statistics.median(first),
        tpot_seconds=statistics.median(each) if decoded else None,
        prompt_tokens=len(prompt),
        decoded_tokens=decoded,
        repeats=repeats,
    )


def project_generation_times(runner: Runner, ids: Ids, repeats: int) -> ProjectTimes:
    """What StreamingLLM + H2O time (E3 of `presets`), greedily from the first tokens of a text without bos.

    The project runs once after its warm-up; these are medians of `repeats` runs.
    """
    prompt = ids[:PROJECT_PROMPT]
    _generate(runner, prompt, WARM_UP)
    first = statistics.median(_generate(runner, prompt, 1) for _ in range(repeats))
    seconds = statistics.median(_generate(runner, prompt, PROJECT_NEW) for _ in range(repeats))
    return ProjectTimes(
        ttft_seconds=first,
        tpot_seconds=seconds / PROJECT_NEW,
        tokens_per_second=PROJECT_NEW / seconds,
        prompt_tokens=len(prompt),
        new_tokens=PROJECT_NEW,
        repeats=repeats,
    )


def split(ids: Ids) -> tuple[Ids, Ids]:
    """The prompt, and the tokens that are decoded one by one after it; the text's last token is fed to nobody."""
    decoded = min(DECODED, max(len(ids) - 2, 0))
    end = len(ids) - 1
    return ids[: end - decoded], ids[end - decoded : end]


def feed_prompt(runner: Runner, prompt: Ids) -> int:
    """Feed a prompt in pieces, its end being that of a chunk; the most probable next token."""
    best = 0
    for begin in range(0, len(prompt), PIECE):
        piece = prompt[begin : begin + PIECE]
        logits = runner.feed(piece, end_chunk=begin + len(piece) == len(prompt))
        best = int(logits[-1].argmax())
    return best


def _generate(runner: Runner, prompt: Ids, new: int) -> float:
    """Seconds of generating `new` tokens, the prompt's included."""
    runner.reset()
    began = time.perf_counter()
    best = feed_prompt(runner, prompt)
    for _ in range(new - 1):
        best = int(runner.feed([best])[-1].argmax())
    return time.perf_counter() - began
