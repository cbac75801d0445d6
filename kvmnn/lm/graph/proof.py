"""A graph that was operated on is tried beside the one that it was made from, before anything relies on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from .decoder import Decoder, Step
from .unequal_lengths import alike, cut, probe_tokens

_HELD, _FED, _DEAD = 6, 3, (1, 4)  # tokens in the past, in the chunk; slots that are masked


@dataclass(frozen=True)
class Expected:
    """What the graph as it was exported gives for a few tokens."""

    prompt: Step
    step: Step
    removed: NDArray[np.float32] | None
    """Logits after slots were removed; None where the graph has no positions, which then change."""


def expect(plain: Decoder) -> Expected:
    """Run a graph as it was exported.

    Raises
    ------
    ModelError
        When onnxruntime fails.
    """
    ids, positions = _tokens(plain)
    try:
        prompt = plain.run(ids[:_HELD], positions[:_HELD], plain.empty())
    except ModelError as error:
        raise ModelError(
            f"{error} (a prompt with an empty past); export one graph for prompt and past "
            "(optimum-cli export onnx --task text-generation-with-past)"
        ) from error
    step = plain.run(ids[_HELD:], positions[_HELD:], prompt.present)
    removed = None
    if plain.interface.has_positions:
        alive = np.setdiff1d(np.arange(_HELD), _DEAD)
        removed = plain.run(ids[_HELD:], positions[_HELD:], cut(prompt.present, [alive] * len(prompt.present))).logits
    return Expected(prompt, step, removed)


def fault(expected: Expected, operated: Decoder) -> str | None:
    """What an operated graph does wrong, or None.

    Logits must be those of the graph it was made from, for a prompt and with a past; attention probabilities must be
    probabilities of the tokens so far; and masking slots by the bias must do what removing them does.
    """
    ids, positions = _tokens(operated)
    kind = operated.interface.dtype
    past = expected.prompt.present
    try:
        prompt = operated.run(ids[:_HELD], positions[:_HELD], operated.empty())
        if not alike(prompt.logits, expected.prompt.logits, kind):
            return "other logits for a prompt"
        step = operated.run(ids[_HELD:], positions[_HELD:], past)
        if not alike(step.logits, expected.step.logits, kind):
            return "other logits with a past"
        wrong = _wrong_probabilities(prompt, 0) or _wrong_probabilities(step, _HELD)
        if wrong or not operated.has_bias:
            return wrong
        if expected.removed is None:
            return "masking cannot be compared with removing"
        heads = len(step.attentions[0]) if step.attentions else operated.interface.query_heads
        for rows in {1, heads or 1}:
            bias = np.repeat(dead_slots(_HELD + _FED, _DEAD), rows, axis=1)
            masked = operated.run(ids[_HELD:], positions[_HELD:], past, [bias] * len(past))
            if not alike(masked.logits, expected.removed, kind):
                return "masking slots is not removing them"
    except ModelError as error:
        return str(error)
    return None


def _tokens(decoder: Decoder) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return probe_tokens(_HELD + _FED, decoder.interface.vocab), np.arange(_HELD + _FED)


def dead_slots(total: int, dead: tuple[int, ...]) -> NDArray[np.float32]:
    """The bias ``[1, 1, 1, total]`` that masks the slots `dead`."""
    bias = np.zeros((1, 1, 1, total), np.float32)
    bias[..., list(dead)] = np.finfo(np.float32).min
    return bias


def _wrong_probabilities(step: Step, held: int) -> str | None:
    for layer, probabilities in enumerate(step.attentions or ()):
        queries, keys = probabilities.shape[-2:]
        if (queries, keys) != (len(step.logits), held + len(step.logits)):
            return f"attention of layer {layer} has {queries} x {keys} values for {len(step.logits)} tokens"
        future = probabilities[:, np.triu(np.ones((queries, keys), bool), held + 1)]
        # A softmax with a sink gives less than one; none gives more.
        sums = probabilities.sum(-1)
        if (
            not np.isfinite(sums).all()
            or sums.max() > 1.01
            or probabilities.min() < 0
            or future.max(initial=0.0) > 1e-4
        ):
            return f"what multiplies the values of layer {layer} are no probabilities of the tokens so far"
    return None
