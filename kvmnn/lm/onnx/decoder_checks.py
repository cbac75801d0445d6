"""Test how a graph handles layers that store different numbers of tokens, and compare a rewritten graph with its
original.

Exporters build one mask for all layers. Some graphs cut it to the first columns that a layer needs: correct for a
single query, but with several queries each also sees later tokens of its chunk, without any error. Others fail. The
names in a graph do not show this, so it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..._util.dataclass import dataclass
from ...dtypes import KVPair
from ...errors import ModelError
from .decoder import OnnxDecoder, StepResult

# Nothing about a graph is assumed that can be tried: a rewritten graph is run and compared with its original before it
# is used, and its behaviour with layers of unequal lengths is found by running it.

UnequalLengthSupport = Literal["chunks", "single", "none"]

# Tokens in the past, in the past of a layer that was cut, and in the chunk.
_PROBE_LONG_TOKENS, _PROBE_SHORT_TOKENS, _PROBE_NEW_TOKENS = 8, 3, 4


def try_unequal_lengths(decoder: OnnxDecoder) -> UnequalLengthSupport:
    """Test how tokens may be fed while layers store different numbers of tokens."""
    interface = decoder.interface
    if not interface.has_positions or interface.derives_positions_from_length:
        return "none"
    if interface.layers == 1:
        return "chunks"
    long, total = _PROBE_LONG_TOKENS, _PROBE_LONG_TOKENS + _PROBE_NEW_TOKENS
    ids, positions = probe_tokens(total, interface.vocab_size), np.arange(total)
    past = decoder.run_step(ids[:long], positions[:long], decoder.create_empty_past()).present_pairs
    long_slots, short_slots = np.arange(long), np.linspace(0, long - 1, _PROBE_SHORT_TOKENS).astype(np.int64)
    last_layer = interface.layers - 1
    slots_by_case = [
        [long_slots if layer == 0 else short_slots for layer in range(interface.layers)],
        [short_slots if layer == 0 else long_slots for layer in range(interface.layers)],
        [short_slots if layer == last_layer else long_slots for layer in range(interface.layers)],
    ]
    new_ids, new_positions = ids[long:], positions[long:]
    results = [_try_lengths(decoder, new_ids, new_positions, past, slots_by_layer) for slots_by_layer in slots_by_case]
    if results[0] == "none" or "wrong" in results:
        return "none"
    return "chunks" if all(result == "chunks" for result in results) else "single"


def probe_tokens(count: int, vocab: int) -> NDArray[np.int64]:
    """Return tokens spread over the vocabulary, all distinct if it is large enough."""
    return (np.arange(count, dtype=np.int64) * 37 + 11) % vocab


def are_close(actual: NDArray[np.float32], expected: NDArray[np.float32], dtype: type[np.generic]) -> bool:
    """Return whether two computations of the same logits agree within the precision of `dtype`."""
    tolerance = 2e-2 if dtype == np.float16 else 1e-3
    scale = float(np.abs(expected).max(initial=0.0))
    return bool(
        np.isfinite(actual).all() and np.abs(actual - expected).max(initial=0.0) <= tolerance * max(scale, 1e-3)
    )


def select_slots(past: Sequence[KVPair], slots_by_layer: Sequence[NDArray[np.int64]]) -> list[KVPair]:
    """Select the slots `slots_by_layer` of each layer."""
    return [
        (np.ascontiguousarray(keys[:, :, slots]), np.ascontiguousarray(values[:, :, slots]))
        for (keys, values), slots in zip(past, slots_by_layer, strict=True)
    ]


def _try_lengths(
    decoder: OnnxDecoder,
    ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    past: Sequence[KVPair],
    slots_by_layer: Sequence[NDArray[np.int64]],
) -> Literal["chunks", "single", "none", "wrong"]:
    dtype = decoder.interface.dtype
    cut_past = select_slots(past, slots_by_layer)
    rows = []
    try:
        # Attention does not care for the order of its slots. A graph that overlooks some of them does.
        first = decoder.run_step(ids[:1], positions[:1], cut_past)
        reversed_step = decoder.run_step(
            ids[:1], positions[:1], select_slots(past, [slots[::-1] for slots in slots_by_layer])
        )
        if not are_close(reversed_step.logits, first.logits, dtype):
            return "wrong"
        grown_past = cut_past
        for index in range(len(ids)):
            step = decoder.run_step(ids[index : index + 1], positions[index : index + 1], grown_past)
            rows.append(step.logits)
            grown_past = step.present_pairs
    except ModelError:
        return "none"
    try:
        chunk = decoder.run_step(ids, positions, cut_past)
    except ModelError:
        return "single"
    return "chunks" if are_close(chunk.logits, np.concatenate(rows), dtype) else "single"


# Tokens in the past and in the chunk; slots that are masked.
_CHECK_PAST_TOKENS, _CHECK_NEW_TOKENS, _MASKED_SLOTS = 6, 3, (1, 4)


@dataclass(frozen=True)
class ReferenceOutputs:
    """Outputs of the exported graph for a few tokens."""

    prompt: StepResult
    step: StepResult
    removed_logits: NDArray[np.float32] | None
    """Logits after slots were removed; None where the graph has no positions, which then change."""


def compute_reference(decoder: OnnxDecoder) -> ReferenceOutputs:
    """Compute the outputs of the exported graph."""
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
    """Return the first difference of a rewritten graph from its original, or None."""
    # Logits must be those of the original graph, for a prompt and with a past; attention probabilities must be
    # probabilities of the tokens so far; and masking slots by the bias must do what removing them does.
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
    total = _CHECK_PAST_TOKENS + _CHECK_NEW_TOKENS
    return probe_tokens(total, decoder.interface.vocab_size), np.arange(total)


def mask_slots(total: int, masked_slots: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the bias ``[1, 1, 1, total]`` that masks the slots `masked_slots`."""
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
