"""A prompt read in steps, so that a long one takes little memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..dtypes import Floats
from ..policies.h2o_engine import H2OEngine
from .runner import Runner
from .session import DecoderSession

MAX_STEP_BYTES = 64 << 20
"""The logits and attention scores of one step take about this many bytes at most."""

MIN_STEP_TOKENS = 16
"""A step reads at least this many tokens: fewer leave the matrix products of a layer too small to be fast."""

_NUM_SCORE_COPIES = 3  # scores, masked scores and probabilities, of the layer that runs
_FLOAT32_BYTES = 4
_DEFAULT_QUERY_HEADS_PER_KV_HEAD = (
    8  # query heads of a KV head, where neither settings nor graph tell: most models have fewer
)


def feed_prompt_steps(runner: Runner, ids: Sequence[int]) -> Iterator[Floats]:
    """Feed a prompt in steps of bounded size.

    Attention of a prompt of n tokens takes n x n scores for each head and, where the session reports probabilities, for
    each layer. The engine's planner does nothing at a prompt and the lossless runtime encodes nothing, so both allow
    several steps. Another policy that evicts gets its prompt in one step, as from `Runner.step`; so does every policy
    that evicts where tokens follow an answer.

    Parameters
    ----------
    runner
        The model, its text begun or not.
    ids
        At least one.

    Yields
    ------
    ndarray
        Logits of each step, float32 ``[token, vocabulary]``. Exhaust the iterator: the steps run as it is read.

    Raises
    ------
    KvmnnError
        As for `Runner.step`.
    """
    is_first_step = not runner.cache.num_seen
    if runner.policy.can_evict and not (is_first_step and isinstance(runner.policy, H2OEngine)):
        yield runner.step(ids, end_chunk=True)
        return
    tokens = np.asarray(ids)
    size = compute_step_tokens(runner.session, runner.cache.num_seen + len(tokens))
    for begin in range(0, len(tokens), size):
        end = begin + size
        yield runner.step(tokens[begin:end], end_chunk=end >= len(tokens), is_prompt=is_first_step)


def compute_step_tokens(session: DecoderSession, tokens: int) -> int:
    """Return how many tokens one step of a prompt reads.

    Parameters
    ----------
    session
        The model. One that reports attention probabilities keeps those of all layers until its step ends.
    tokens
        Tokens that the cache holds after the prompt.
    """
    interface = session.interface
    heads = session.query_heads or _DEFAULT_QUERY_HEADS_PER_KV_HEAD * interface.kv_heads
    copies = interface.layers if session.has_attentions else _NUM_SCORE_COPIES
    token_bytes = _FLOAT32_BYTES * (interface.vocab_size + copies * heads * tokens)
    return max(MIN_STEP_TOKENS, MAX_STEP_BYTES // token_bytes)
