"""What torch computes with the shipped model, recorded once (tools/lm/record_logits.py): a session equals it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from repository import FIXTURES
from slow_cases import mark_most_slow

from kvmnn.lm.session import DecoderSession

FIXTURE = FIXTURES / "lm"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def torch():
    with np.load(FIXTURE / "torch_logits.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module", params=["plain", "bias", "attentions"])
def model(request, torch):
    """The shipped model as it is and operated on, and the first tokens fed to it."""
    operations = {"bias": request.param == "bias", "attentions": request.param == "attentions"}
    session = DecoderSession.open(FIXTURE, cache=False, **operations)
    prefix = int(torch["cut.prefix"])
    present = session.run_step(torch["ids"][:prefix], np.arange(prefix), session.create_empty_past()).present_pairs
    return SimpleNamespace(session=session, present_pairs=present, prefix=prefix)


def feed(session, ids, first, sizes, past):
    """Logits of the tokens from `first` on, in steps of `sizes`."""
    rows = []
    for size in sizes:
        step = session.run_step(ids[first : first + size], np.arange(first, first + size), past)
        past, first = step.present_pairs, first + size
        rows.append(step.logits)
    return np.concatenate(rows)


def cut(present, kept):
    """K and V with the tokens of `kept`, one ``[head, token]`` for each layer."""
    return [
        tuple(np.take_along_axis(array, indices[None, :, :, None], axis=2) for array in pair)
        for pair, indices in zip(present, kept, strict=True)
    ]


@pytest.mark.parametrize("way", mark_most_slow(["chunks", "prefill", "decode"], 3))
def test_session_full_cache_equals_torch(model, torch, way):
    tokens, chunk = len(torch["ids"]), int(torch["chunks.size"])
    sizes = {
        "prefill": [tokens],
        "decode": [1] * tokens,
        "chunks": [chunk] * (tokens // chunk) + [tokens % chunk],
    }[way]
    logits = feed(model.session, torch["ids"], 0, sizes, model.session.create_empty_past())
    found = logits[np.ix_(torch[f"{way}.positions"], torch["vocabulary"])]
    assert np.abs(torch[f"{way}.logits"]).max() > 5
    np.testing.assert_allclose(found, torch[f"{way}.logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("way", ["one token at a time", "one chunk"])
@pytest.mark.parametrize("what", ["cut", "layers"])
def test_session_cut_cache_with_true_positions_equals_torch(model, torch, what, way):
    """`cut`: the same tokens stay everywhere; `layers`: other numbers in every layer, other tokens in every head."""
    heads, layers = model.session.interface.kv_heads, model.session.interface.layers
    if what == "cut":
        kept = [np.stack([torch["cut.kept"]] * heads)] * layers
    else:
        kept = [torch[f"layers.kept.{layer}"] for layer in range(layers)]
        assert len({indices.shape for indices in kept}) > 2
    tokens = len(torch[f"{what}.positions"])
    sizes = [1] * tokens if way.endswith("time") else [tokens]
    logits = feed(model.session, torch["ids"], model.prefix, sizes, cut(model.present_pairs, kept))
    expected = torch[f"{what}.logits"]
    np.testing.assert_allclose(logits[:, torch["vocabulary"]], expected, rtol=0, atol=TOLERANCE)


def test_session_cut_cache_with_restarted_positions_differs(model, torch):
    """The control: restarted at the stored length, as the classic mistake has it, logits are far off."""
    kept = np.stack([torch["cut.kept"]] * model.session.interface.kv_heads)
    past = cut(model.present_pairs, [kept] * model.session.interface.layers)
    ids = torch["ids"][model.prefix : model.prefix + len(torch["cut.positions"])]
    wrong = np.arange(kept.shape[1], kept.shape[1] + len(ids))
    logits = model.session.run_step(ids, wrong, past).logits[:, torch["vocabulary"]]
    assert np.abs(logits - torch["cut.logits"]).max() > 1
