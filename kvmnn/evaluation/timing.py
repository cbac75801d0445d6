"""Time of a model under a policy: to the first token, per output token, in attention (a separate profiled pass)."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..lm.documents import Ids
from ..lm.onnx.profile import AttentionTimeStats
from ..lm.runner import Runner
from ..lm.session import DecoderSession
from .records import ProjectTimes, TimingCell

PROMPT_CHUNK_TOKENS = 128
"""Tokens of a prompt that are fed in one step, which bounds the memory for logits."""
MAX_DECODED_TOKENS = 32
"""Tokens that are fed one by one after the prompt."""
NUM_WARM_UP_TOKENS = 5
"""Tokens that are decoded before anything is timed."""
PROJECT_PROMPT_TOKENS, PROJECT_NEW_TOKENS = 64, 64
"""Tokens of the prompt, and generated, by the definition of StreamingLLM + H2O."""


def measure_generation_times(runner: Runner, ids: Ids, repeats: int) -> TimingCell:
    """Measure TTFT and TPOT on one document, medians of `repeats` warm runs.

    Parameters
    ----------
    ids
        int64 ``[1 + tokens]``. Up to `MAX_DECODED_TOKENS` tokens before the last one are decoded; those before them are
        the prompt.
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
    """Measure the times of StreamingLLM + H2O (E3 of `presets`): greedy generation from the first tokens of a text, no
    bos.

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
    """Split a text into the prompt and the tokens that are decoded one by one; its last token is not fed."""
    num_decoded = min(MAX_DECODED_TOKENS, max(len(ids) - 2, 0))
    end = len(ids) - 1
    return ids[: end - num_decoded], ids[end - num_decoded : end]


def feed_prompt(runner: Runner, prompt: Ids) -> int:
    """Feed a prompt in chunks, the last of which ends a chunk of text; return the most probable next token."""
    best = 0
    for begin in range(0, len(prompt), PROMPT_CHUNK_TOKENS):
        chunk_ids = prompt[begin : begin + PROMPT_CHUNK_TOKENS]
        logits = runner.step(chunk_ids, end_chunk=begin + len(chunk_ids) == len(prompt))
        best = int(logits[-1].argmax())
    return best


def _time_generation(runner: Runner, prompt: Ids, num_new: int) -> float:
    """Return the seconds of generating `num_new` tokens, the prompt's included."""
    runner.reset()
    start_time = time.perf_counter()
    best = feed_prompt(runner, prompt)
    for _ in range(num_new - 1):
        best = int(runner.step([best])[-1].argmax())
    return time.perf_counter() - start_time


OpenProfiled = Callable[[Path], DecoderSession]
"""Opens the runner's model once more, with a profile in a folder."""


def measure_attention_time(runner: Runner, ids: Ids, open_profiled: OpenProfiled) -> AttentionTimeStats | None:
    """Measure the mean time of attention in the single-token steps whose TPOT is measured.

    Parameters
    ----------
    ids
        int64 ``[1 + tokens]``, as for `measure_generation_times`.
    """
    prompt, decoded_ids = split_prompt(ids)
    if not len(decoded_ids):
        return None
    runner.reset()
    feed_prompt(runner, prompt)
    del runner.session
    with TemporaryDirectory(prefix="kvmnn-profile-", ignore_cleanup_errors=True) as folder:
        session = open_profiled(Path(folder))
        with closing(session.open_profile()) as profile:
            shutil.rmtree(folder, ignore_errors=True)  # nothing remains, even if this process is killed
            _warm_up(session, runner, decoded_ids)
            runner.session = session
            for index in range(len(decoded_ids)):
                runner.step(decoded_ids[index : index + 1])
            return profile.read_attention_time(len(decoded_ids))


def _warm_up(session: DecoderSession, runner: Runner, decoded_ids: Ids) -> None:
    """Run the model on the runner's cache without changing it."""
    session.probe_unequal_lengths()  # tried now, not between the steps
    cache = runner.cache
    past = [(layer.keys[None], layer.values[None]) for layer in cache.copy_layers()]
    for token in decoded_ids[:NUM_WARM_UP_TOKENS]:
        session.run_step(np.array([token]), np.array([cache.num_seen]), past)
