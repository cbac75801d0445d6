"""kvmnn's scored policies keep the tokens that kvpress' presses keep, on tiny models with random weights.

torch runs the checkpoint under a press, kvmnn the same checkpoint, imported, under a policy. Which tokens a press kept
is read off its cache: keys carry their position, so no two tokens of a head have equal keys.
"""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvmnn.lm.importer.importer import import_model
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies import create_policy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import kvpress

TOKENS = 301


class Peer:
    """A tiny model in torch and in kvmnn."""

    def __init__(self, folder, name):
        tiny_models.write_checkpoint(folder / name, tiny_models.MODELS[name])
        (folder / name / "tokenizer.json").write_text("{}")
        import_model(folder / name, folder / f"{name}-onnx")
        self.session = DecoderSession.open(folder / f"{name}-onnx", cache=False)
        (folder / name / "tokenizer.json").unlink()
        self.model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        self.ids = np.random.default_rng(5).integers(3, tiny_models.VOCAB, TOKENS)
        self.full = [keys[0].numpy() for keys in self.run(None)]

    @torch.no_grad()
    def run(self, press, steps=()):
        """K of each layer, ``[1, head, token, head_dim]``, after the prompt and further steps of so many tokens."""
        cache, begin = DynamicCache(), 0
        with press(self.model) if press else contextlib.nullcontext():
            for count in steps or [TOKENS]:
                ids = torch.tensor(self.ids[begin : begin + count])[None]
                positions = torch.arange(begin, begin + count)
                self.model.model(ids, past_key_values=cache, cache_position=positions, position_ids=positions[None])
                begin += count
        return [layer.keys for layer in cache.layers]

    def keep_by_press(self, press, steps=()):
        """The tokens of each head of each layer that the press kept."""
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        kept = []
        for layer, (full, cut) in enumerate(zip(self.full, self.run(press, steps), strict=True)):
            masked = self.model.model.layers[layer].self_attn.masked_key_indices
            places = [{row.tobytes(): place for place, row in enumerate(rows)} for rows in full]
            heads = [{place[row.tobytes()] for row in rows} for place, rows in zip(places, cut[0].numpy(), strict=True)]
            if masked is not None:
                for head, token in zip(*(part.tolist() for part in masked[1:]), strict=True):
                    heads[head].discard(token)
            kept.append([sorted(tokens) for tokens in heads])
        return kept

    def keep_by_policy(self, policy, steps=()):
        runner, begin = Runner(self.session, policy), 0
        for count in steps or [TOKENS]:
            runner.step(self.ids[begin : begin + count])
            begin += count
        return [
            [row.tolist() for row in runner.cache.list_head_positions(layer)] for layer in range(tiny_models.LAYERS)
        ]


@pytest.fixture(scope="module", params=["llama3_rope", "qwen3"])
def peer(request, tmp_path_factory):
    torch.set_num_threads(1)
    return Peer(tmp_path_factory.mktemp("peer"), request.param)


SCORERS = {
    "random": (lambda ratio: kvpress.RandomPress(ratio, seed=7), {"seed": 7}),
    "keydiff": (kvpress.KeyDiffPress, {}),
    "snapkv": (kvpress.SnapKVPress, {}),
    "tova": (kvpress.TOVAPress, {}),
    "expected_attention": (kvpress.ExpectedAttentionPress, {}),
}
VARIANTS = [
    ("snapkv", lambda ratio: kvpress.SnapKVPress(ratio, window_size=16, kernel_size=7), {"window": 16, "kernel": 7}),
    (
        "expected_attention",
        lambda ratio: kvpress.ExpectedAttentionPress(ratio, 32, 2, False, False),
        {"future": 32, "sink": 2, "covariance": False, "value_norm": False},
    ),
]
CASES = [(name, press, options) for name, (press, options) in SCORERS.items()] + VARIANTS


@pytest.mark.parametrize("ratio", [0.3, 0.75])
@pytest.mark.parametrize(("name", "press", "options"), CASES)
def test_scored_policy_keeps_what_its_press_keeps(peer, name, press, options, ratio):
    policy = create_policy(name, keep_ratio=1 - ratio, **options)
    assert peer.keep_by_policy(policy) == peer.keep_by_press(press(ratio))
