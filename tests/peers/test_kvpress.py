"""kvmnn's policies keep the tokens that kvpress' presses keep of a prompt on the shipped model.

A press is hooked to each attention module as kvpress hooks it to the models that it knows by name. Which tokens it kept
is read off the compressed cache: keys carry their position, so no two tokens of a head have equal keys.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvmnn.lm.runner import Runner
from kvmnn.policies import LayerState, create_policy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a dependency of kvpress imports what Python 3.13 has no more
    from kvpress import KnormPress, ObservedAttentionPress, StreamingLLMPress

TOKENS = 400
RATIOS = (0.25, 0.5, 0.9)  # pruned
TIE = 1e-6  # relative; what float32 leaves open


@pytest.fixture(scope="module")
def ids(read):
    return read("calendar.py.txt", TOKENS)


@contextmanager
def hooked(model, press):
    """`press` on every layer; kvpress knows the module's arguments by the names that other families use."""

    def after(module, inputs, options, output):
        return press.forward_hook(
            module, inputs, {**options, "hidden_states": inputs[0], "past_key_values": options["layer_past"]}, output
        )

    hooks = []
    for layer in model.gpt_neox.layers:
        layer.attention.head_dim = layer.attention.head_size
        hooks.append(layer.attention.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def prefill(decoder, ids, press=None):
    """K of each layer ``[head, token, head_dim]`` after the prompt, and the attention probabilities."""
    cache = DynamicCache()
    with hooked(decoder.model, press) if press else warnings.catch_warnings():
        result = decoder.model(torch.tensor(ids)[None], past_key_values=cache, use_cache=True, output_attentions=True)
    keys = [layer.keys[0].numpy() for layer in cache.layers]
    return keys, [weights[0].numpy() for weights in result.attentions]


@pytest.fixture(scope="module")
def full(decoder, ids):
    return prefill(decoder, ids)


def kept_by(decoder, ids, full, press):
    """Indices of each layer, ``[head, kept]``, in the order in which the press stored the tokens."""
    indices = []
    for before, after in zip(full[0], prefill(decoder, ids, press)[0], strict=True):
        rows = []
        for known, stored in zip(before, after, strict=True):
            places = {row.tobytes(): place for place, row in enumerate(known)}
            assert len(places) == TOKENS
            rows.append([places[row.tobytes()] for row in stored])
        indices.append(np.array(rows))
    return indices


def scores_of(policy, keys, attention):
    """What `policy` ranks by, ``[head, token]``, higher first."""
    if policy.requires == "head scores":
        return policy.sum_columns(attention, len(keys))
    return -np.sqrt((keys.astype(np.float64) ** 2).sum(-1))


def assert_same_tokens(ours, theirs, scores, layer):
    """Equal sets in every head; in layer 0 but for tokens whose scores differ by rounding alone.

    Layer 0's keys depend on the token, and rotation keeps norms: the same word twice has the same norm twice.
    """
    assert ours.shape == theirs.shape
    for mine, other, row in zip(ours, theirs, scores, strict=True):
        disputed = sorted(set(mine) ^ set(other))
        assert layer == 0 or not disputed
        assert len(disputed) <= 0.05 * TOKENS
        assert not disputed or np.ptp(row[disputed]) <= TIE * np.abs(row[disputed]).max()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("name", "kind"), [("knorm", KnormPress), ("observed_attention", ObservedAttentionPress)])
def test_ranking_policies_keep_what_kvpress_keeps(decoder, ids, full, name, kind, ratio):
    policy = create_policy(name, keep_ratio=1 - ratio)
    theirs = kept_by(decoder, ids, full, kind(compression_ratio=ratio))
    for layer, (keys, attention) in enumerate(zip(*full, strict=True)):
        scores = scores_of(policy, keys, attention)
        seen = scores.astype(np.float32) if policy.requires == "head scores" else None
        ours = policy.select_or_all(LayerState(tokens=TOKENS, layer=layer, keys=keys, scores=seen))
        assert_same_tokens(ours, theirs[layer], scores, layer)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("sink", [1, 4, 16])
def test_streaming_press_keeps_what_kvpress_keeps(decoder, ids, full, ratio, sink):
    policy = create_policy("streaming_press", keep_ratio=1 - ratio, sink=sink)
    theirs = kept_by(decoder, ids, full, StreamingLLMPress(compression_ratio=ratio, n_sink=sink))
    for layer, keys in enumerate(full[0]):
        ours = policy.select_or_all(LayerState(tokens=TOKENS, layer=layer, keys=keys))
        for row in theirs[layer]:
            np.testing.assert_array_equal(np.sort(row), ours)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("knorm", KnormPress, {}),
        ("observed_attention", ObservedAttentionPress, {}),
        ("streaming_press", StreamingLLMPress, {"sink": 4}),
    ],
)
def test_runner_keeps_what_kvpress_keeps(session, decoder, ids, full, name, kind, options):
    """End to end: onnxruntime's keys and attention, kvmnn's cache."""
    theirs = kept_by(decoder, ids, full, kind(compression_ratio=0.5))
    policy = create_policy(name, keep_ratio=0.5, **options)
    runner = Runner(session, policy)
    runner.step(ids)
    for layer, (keys, attention) in enumerate(zip(*full, strict=True)):
        ours = np.broadcast_to(runner.cache.get_positions(layer), theirs[layer].shape)
        if name == "streaming_press":
            np.testing.assert_array_equal(ours, np.sort(theirs[layer]))
        else:
            assert_same_tokens(ours, theirs[layer], scores_of(policy, keys, attention), layer)
