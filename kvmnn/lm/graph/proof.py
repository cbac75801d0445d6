"""A graph that was operated on is tried beside the one that it was made from, before anything relies on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from .decoder import OnnxDecoder, StepResult
from .unequal_lengths import are_close, probe_tokens, select_slots

_CHECK_PAST_TOKENS, _CHECK_NEW_TOKENS, _MASKED_SLOTS = (
    6,
    3,
    (1, 4),
)  # tokens in the past, in the chunk; slots that are masked


@dataclass(frozen=True)
class ReferenceOutputs:
    """What the graph as it was exported gives for a few tokens."""

    prompt: StepResult
    step: StepResult
    removed_logits: NDArray[np.float32] | None
    """Logits after slots were removed; None where the graph has no positions, which then change."""


def compute_reference(decoder: OnnxDecoder) -> ReferenceOutputs:
    """Run a graph as it was exported.

    Raises
    ------
    ModelError
        When onnxruntime fails.
    """
    ids, positions = _probe_inputs(decoder)
    try:
        prompt = decoder.run_step(ids[:_CHECK_PAST_TOKENS], positions[:_CHECK_PAST_TOKENS], decoder.create_empty_past())
    except ModelError as error:
        raise ModelError(
            f"{error} (a prompt with an empty past); export one graph for prompt and past "
            "(optimum-cli export onnx --task text-generation-with-past)"
        ) from error
    step = decoder.run_step(ids[_CHECK_PAST_TOKENS:], positions[_CHECK_PAST_TOKENS:], prompt.present_pairs)
    removed_logits = None
    if decoder.interface.has_positions:
        live_slots = np.setdiff1d(np.arange(_CHECK_PAST_TOKENS), _MASKED_SLOTS)
        removed_logits = decoder.run_step(
            ids[_CHECK_PAST_TOKENS:],
            positions[_CHECK_PAST_TOKENS:],
            select_slots(prompt.present_pairs, [live_slots] * len(prompt.present_pairs)),
        ).logits
    return ReferenceOutputs(prompt, step, removed_logits)


def check_equivalence(reference: ReferenceOutputs, rewritten: OnnxDecoder) -> str | None:
    """What an operated graph does wrong, or None.

    Logits must be those of the graph it was made from, for a prompt and with a past; attention probabilities must be
    probabilities of the tokens so far; and masking slots by the bias must do what removing them does.
    """
    ids, positions = _probe_inputs(rewritten)
    dtype = rewritten.interface.dtype
    past = reference.prompt.present_pairs
    try:
        prompt = rewritten.run_step(
            ids[:_CHECK_PAST_TOKENS], positions[:_CHECK_PAST_TOKENS], rewritten.create_empty_past()
        )
        if not are_close(prompt.logits, reference.prompt.logits, dtype):
            return "other logits for a prompt"
        step = rewritten.run_step(ids[_CHECK_PAST_TOKENS:], positions[_CHECK_PAST_TOKENS:], past)
        if not are_close(step.logits, reference.step.logits, dtype):
            return "other logits with a past"
        problem = _check_probabilities(prompt, 0) or _check_probabilities(step, _CHECK_PAST_TOKENS)
        if problem or not rewritten.has_bias:
            return problem
        if reference.removed_logits is None:
            return "masking cannot be compared with removing"
        heads = len(step.attentions[0]) if step.attentions else rewritten.interface.query_heads
        for rows in {1, heads or 1}:
            bias = np.repeat(mask_slots(_CHECK_PAST_TOKENS + _CHECK_NEW_TOKENS, _MASKED_SLOTS), rows, axis=1)
            masked_step = rewritten.run_step(
                ids[_CHECK_PAST_TOKENS:], positions[_CHECK_PAST_TOKENS:], past, [bias] * len(past)
            )
            if not are_close(masked_step.logits, reference.removed_logits, dtype):
                return "masking slots is not removing them"
    except ModelError as error:
        return str(error)
    return None


def _probe_inputs(decoder: OnnxDecoder) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return probe_tokens(_CHECK_PAST_TOKENS + _CHECK_NEW_TOKENS, decoder.interface.vocab_size), np.arange(
        _CHECK_PAST_TOKENS + _CHECK_NEW_TOKENS
    )


def mask_slots(total: int, masked_slots: tuple[int, ...]) -> NDArray[np.float32]:
    """The bias ``[1, 1, 1, total]`` that masks the slots `masked_slots`."""
    bias = np.zeros((1, 1, 1, total), np.float32)
    bias[..., list(masked_slots)] = np.finfo(np.float32).min
    return bias


def _check_probabilities(step: StepResult, num_past: int) -> str | None:
    for layer, probabilities in enumerate(step.attentions or ()):
        queries, keys = probabilities.shape[-2:]
        if (queries, keys) != (len(step.logits), num_past + len(step.logits)):
            return f"attention of layer {layer} has {queries} x {keys} values for {len(step.logits)} tokens"
        future_probabilities = probabilities[:, np.triu(np.ones((queries, keys), bool), num_past + 1)]
        # A softmax with a sink gives less than one; none gives more.
        sums = probabilities.sum(-1)
        if (
            not np.isfinite(sums).all()
            or sums.max() > 1.01
            or probabilities.min() < 0
            or future_probabilities.max(initial=0.0) > 1e-4
        ):
            return f"what multiplies the values of layer {layer} are no probabilities of the tokens so far"
    return None
