"""The oracle of an evaluation: attention of later tokens, in a run with the full cache, and what others reach of it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from .._util.text import pluralize
from ..dtypes import Floats
from ..errors import KvmnnError
from ..lm.runner import Runner
from ..lm.session import DecoderSession
from ..policies.key_value_scores import RandomTokens
from ..policies.oracle import Oracle
from ..policies.policy import FullCache
from ..policies.scores import sum_by_group
from ..reports.records import ResultRow
from .scoring import list_steps

_MAX_STEP_TOKENS = 64  # whose attention is held at once
_MAX_ATTENTION_BYTES = 1 << 30
#: Differences of random tokens and the oracle, in nats per token, below which there is no headroom to share.
MIN_HEADROOM = 1e-4


def list_cuts(policy: Oracle, steps: Sequence[tuple[int, int]]) -> list[int]:
    """List the tokens seen at each cut of a text that is fed in `steps`."""
    (_, prompt_end), *later_steps = steps
    cuts = [prompt_end] if policy.phase != "decoding" else []
    if policy.phase != "prompt":
        for number, (begin, end) in enumerate(later_steps, start=1):
            if number % policy.interval == 0 or end - begin >= policy.resolve_budget(end):
                cuts.append(end)
    return cuts


def collect_later_attention(
    session: DecoderSession,
    ids: npt.NDArray[np.int64],
    policy: Oracle,
    *,
    chunk: int,
    prompt: int,
    advance: Callable[[int], object] | None = None,
) -> None:
    """Run a text with the full cache, and fill the `later_attention` of a policy that will be fed the same steps.

    Parameters
    ----------
    session
        The model, opened with ``attentions=True``.
    ids
        int64 ``[token]``; of the last one only the loss is known.
    chunk, prompt
        Tokens of a step, and of the first one, as `score_document` takes them.
    advance
        Called with the number of tokens after each step.

    Raises
    ------
    KvmnnError
        For so many cuts that their attention takes more than a gibibyte.
    """
    tokens = len(ids) - 1
    cuts = list_cuts(policy, list_steps(tokens, chunk, prompt))
    interface = session.interface
    nbytes = 4 * len(cuts) * interface.layers * interface.kv_heads * tokens
    if nbytes > _MAX_ATTENTION_BYTES:
        raise KvmnnError(
            f"{policy.name}: {pluralize(len(cuts), 'cut')} of {tokens:,} tokens take {nbytes:,} bytes of attention: "
            f"expected at most {_MAX_ATTENTION_BYTES:,}; phase=prompt cuts once, and a larger interval less often"
        )
    sums = np.zeros((len(cuts), interface.layers, interface.kv_heads, tokens), np.float32)
    runner = Runner(session)
    bounds = sorted({*range(0, tokens, _MAX_STEP_TOKENS), *cuts, tokens})
    for begin, end in itertools.pairwise(bounds):
        number = int(np.searchsorted(cuts, begin, side="right")) - 1  # the last cut before these queries
        runner.on_step = None if number < 0 else lambda step, out=sums[number]: _add_attention(step.attentions, out)
        runner.step(ids[begin:end])
        if advance is not None:
            advance(end - begin)
    later_sums = np.cumsum(sums[::-1], axis=0)[::-1]
    policy.later_attention.update({cut: list(later_sums[number]) for number, cut in enumerate(cuts)})


def _add_attention(attentions: Sequence[Floats] | None, sums: Floats) -> None:
    """Add a step's attention to sums ``[layer, kv_head, token]``."""
    for layer, attention in enumerate(attentions or ()):
        sums[layer, :, : attention.shape[2]] += sum_by_group(attention, sums.shape[1])


def compute_headroom_shares(rows: Sequence[ResultRow]) -> dict[str, float]:
    """Return which share of the oracle's advantage over random tokens each row has, by its label.

    At one budget, a row's share is ``(random - row) / (random - oracle)``, of negative log-likelihoods per token: 0 for
    random tokens, 1 for the oracle. Rows of budgets without both of them have none, and so do those where the two
    differ by less than `MIN_HEADROOM`.
    """
    rows_by_size: dict[tuple[object, ...], list[ResultRow]] = defaultdict(list)
    for row in rows:
        if row.policy != FullCache.name:  # a budget of the prompt is another one than one that holds at every step
            rows_by_size[row.budget, row.keep_ratio, row.prompt_only, row.codec].append(row)
    shares = {}
    for group in rows_by_size.values():
        ends = {row.policy: row.nll for row in group if row.policy in (RandomTokens.name, Oracle.name)}
        floor, ceiling = ends.get(RandomTokens.name), ends.get(Oracle.name)
        if floor is None or ceiling is None or floor - ceiling < MIN_HEADROOM:
            continue
        for row in group:
            if row.nll is not None and row.policy not in ends:
                shares[row.label] = (floor - row.nll) / (floor - ceiling)
    return shares


def describe_headroom(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Describe the shares of `compute_headroom_shares`, if there is an oracle."""
    if not any(row.policy == Oracle.name for row in rows):
        return
    shares = compute_headroom_shares(rows)
    if not shares:
        yield "The oracle's headroom is counted from random tokens: add --policy random with the same budgets."
        return
    share_texts = (f"{label} {100 * share:.0f} %" for label, share in shares.items())
    yield (
        f"Share of the headroom, 0 % for random tokens and 100 % for the oracle of the same budget (loss per token): "
        f"{'; '.join(share_texts)}."
    )
    above = [label for label, share in shares.items() if share > 1]
    if above:
        yield (
            f"Above 100 %: {'; '.join(above)}. The oracle keeps the tokens that later ones attend to most, which are "
            "not always those that lower the loss most: on a text a policy may have less loss than it."
        )
