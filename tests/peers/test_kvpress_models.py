"""kvmnn's scored policies keep the tokens that kvpress' presses keep, on tiny models with random weights.

torch runs the checkpoint under a press, kvmnn the same checkpoint, imported, under a policy. Which tokens a press kept
is read off its cache: keys carry their position, so no two tokens of a head have equal keys.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvmnn.lm.importer.importer import import_model
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies import create_policy
from kvmnn.policies.key_value_scores import draw_projection
from kvmnn.profiles import LayerGeometry, Profile, ProfileInfo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import kvpress

TOKENS = 250  # different ones: in layer 0 keys of equal tokens differ by their rotation alone


class RecordingCache(DynamicCache):
    """Remembers the keys of all tokens, whatever a press does."""

    def __init__(self):
        super().__init__()
        self.appended = defaultdict(list)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.appended[layer_idx].append(key_states.clone())
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Peer:
    """A tiny model in torch and in kvmnn."""

    def __init__(self, folder, name):
        tiny_models.write_checkpoint(folder / name, tiny_models.MODELS[name])
        (folder / name / "tokenizer.json").write_text("{}")
        import_model(folder / name, folder / f"{name}-onnx")
        self.session = DecoderSession.open(folder / f"{name}-onnx", cache=False)
        (folder / name / "tokenizer.json").unlink()
        self.model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        self.ids = np.random.default_rng(5).permutation(np.arange(3, tiny_models.VOCAB))[:TOKENS]

    @torch.no_grad()
    def run(self, press, steps=()):
        """The cache after the prompt and further steps of so many tokens."""
        cache, begin = RecordingCache(), 0
        with press(self.model) if press else contextlib.nullcontext():
            for count in steps or [TOKENS]:
                ids = torch.tensor(self.ids[begin : begin + count])[None]
                positions = torch.arange(begin, begin + count)
                self.model.model(ids, past_key_values=cache, cache_position=positions, position_ids=positions[None])
                begin += count
        return cache

    def keep_by_press(self, press, steps=()):
        """The tokens of each head of each layer that the press kept."""
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        kept = []
        cache = self.run(press, steps)
        for layer, stored in enumerate(cache.layers):
            full, cut = torch.cat(cache.appended[layer], dim=2)[0].numpy(), stored.keys
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


def snapkv(ratio):
    return kvpress.SnapKVPress(ratio, window_size=32)


def finch(ratio):
    """kvpress takes the window from a delimiter in the text."""
    press = kvpress.FinchPress(ratio, rerotate_keys=False)
    press.window_size, press.delimiter_token_id = 20, -1
    return press


def sketched(kind, ratio):
    return kind(ratio, sketch_dimension=6)


SCORERS = {
    "random": (lambda ratio: kvpress.RandomPress(ratio, seed=7), {"seed": 7}),
    "keydiff": (kvpress.KeyDiffPress, {}),
    "lagkv": (lambda ratio: kvpress.LagKVPress(ratio, lag_size=32, cross_scoring=True), {"lag": 32, "cross": True}),
    "cur": (kvpress.CURPress, {}),
    "leverage": (partial(sketched, kvpress.LeverageScorePress), {"sketch": 6}),
    "snapkv": (snapkv, {"window": 32}),
    "pyramidkv": (lambda ratio: kvpress.PyramidKVPress(ratio, window_size=12), {"window": 12}),
    "finch": (finch, {"window": 20}),
    "tova": (kvpress.TOVAPress, {}),
    "expected_attention": (kvpress.ExpectedAttentionPress, {}),
    "capkv": (kvpress.CapPress, {}),
    "non_causal": (lambda ratio: kvpress.NonCausalAttnPress(ratio, 64), {"part": 64}),
    "compactor": (partial(sketched, kvpress.CompactorPress), {"sketch": 6}),
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
def test_scored_policy_keeps_what_its_press_keeps(peer, name, press, options, ratio, monkeypatch):
    policy = create_policy(name, keep_ratio=1 - ratio, **options)
    if "sketch" in options:
        layers = itertools.count()

        def draw(_batch, heads, head_dim, sketch, **more):
            return torch.from_numpy(draw_projection(heads, head_dim, sketch, 0, next(layers)))[None]

        monkeypatch.setattr(torch, "randn", draw)
    assert peer.keep_by_policy(policy) == peer.keep_by_press(press(ratio))


@pytest.mark.parametrize("rank", [3, 20])
def test_lagkv_keeps_what_its_press_keeps(peer, rank):
    """Ranks of chunks tie, so that as many tokens stay as leave no choice: 58 at the ends and 6 of each rank."""
    ratio = 1 - (58.5 + 6 * rank) / TOKENS
    policy = create_policy("lagkv", keep_ratio=1 - ratio, lag=32)
    assert peer.keep_by_policy(policy) == peer.keep_by_press(kvpress.LagKVPress(ratio, lag_size=32))


@pytest.mark.parametrize("ratio", [0.3, 0.75])
def test_simlayerkv_cuts_the_layers_that_its_press_cuts(peer, ratio):
    budget = int(TOKENS * (1 - ratio))
    for threshold in (0.3, 0.5, 0.7):
        policy = create_policy("simlayerkv", budget=budget, threshold=threshold)
        press = kvpress.SimLayerKVPress(threshold, n_recent=budget - 4 + 1)
        assert peer.keep_by_policy(policy) == peer.keep_by_press(press)


WRAPPERS = [
    ("ada", {}, lambda base: kvpress.AdaKVPress(base)),
    ("ada", {"safeguard": 0.0}, lambda base: kvpress.AdaKVPress(base, 0.0)),
    ("critical", {}, lambda base: kvpress.CriticalKVPress(base)),
    ("critical_ada", {}, lambda base: kvpress.CriticalAdaKVPress(base)),
    ("chunkkv", {}, lambda base: kvpress.ChunkKVPress(base)),
    ("chunkkv", {"chunk": 7}, lambda base: kvpress.ChunkKVPress(base, 7)),
    ("entropy_chunkkv", {}, lambda base: kvpress.EntropyGatedChunkKVPress(base)),
]
BASES = [
    ("snapkv", {"window": 32}, snapkv),
    ("keydiff", {}, kvpress.KeyDiffPress),
    ("expected_attention", {"value_norm": False}, lambda ratio: kvpress.ExpectedAttentionPress(ratio, use_vnorm=False)),
]
KEY_WRAPPERS = [
    ("chunk", {"chunk": 100}, lambda base: kvpress.ChunkPress(base, 100)),
    ("block", {"chunk": 50}, lambda base: kvpress.BlockPress(base, 50)),
]
KEY_BASES = [("keydiff", {}, kvpress.KeyDiffPress), ("cur", {}, kvpress.CURPress)]
# CUR looks at neighbours, and BlockPress lays tokens out in the order of their scores.
WRAPPED = [*itertools.product(BASES, WRAPPERS), *list(itertools.product(KEY_BASES, KEY_WRAPPERS))[:3]]


@pytest.mark.parametrize("ratio", [0.3, 0.75])
@pytest.mark.parametrize(("base", "wrapper"), WRAPPED, ids=lambda case: f"{case[0]} {case[1]}")
def test_wrapper_keeps_what_its_press_keeps(peer, base, wrapper, ratio):
    (name, options, press), (kind, more, wrap) = base, wrapper
    policy = create_policy(name, keep_ratio=1 - ratio, wrapper=kind, **options, **more)
    assert peer.keep_by_policy(policy) == peer.keep_by_press(wrap(press(ratio)))


@pytest.mark.parametrize("phase", ["decoding", "both"])
@pytest.mark.parametrize(
    ("name", "press"),
    [("keydiff", kvpress.KeyDiffPress), ("tova", kvpress.TOVAPress)],  # whose scores do not depend on the order
)
def test_decoding_keeps_what_its_press_keeps(peer, name, press, phase):
    """A prompt of 150 tokens, then one token after the other; cut to 60 at every 20th."""
    steps = [150, *[1] * 67]
    policy = create_policy(name, budget=60, phase=phase, interval=20)
    decoding = kvpress.DecodingPress(press(0.0), compression_interval=20, target_size=60)
    if phase == "both":
        decoding = kvpress.PrefillDecodingPress(press(1 - 60.5 / 150), decoding)
    assert peer.keep_by_policy(policy, steps) == peer.keep_by_press(decoding, steps)


def write_profile(path, tables):
    """A profile of a tiny model with these tables, by layer."""
    head_dim = tables[0]["filter"].shape[1]
    geometry = LayerGeometry(kv_heads=tiny_models.KV_HEADS, head_dim=head_dim, value_dim=head_dim, rope=None)
    info = ProfileInfo(model="tiny", fingerprint=None, dtype="fp32", texts=(), layers=(geometry,) * len(tables))
    arrays = {f"queries/{layer}/key/{name}": array for layer, row in enumerate(tables) for name, array in row.items()}
    Profile(info, arrays).write(path)
    return str(path)


@pytest.fixture(scope="module")
def tables(peer):
    """Tables of queries, by layer: random numbers, with covariances that are some."""
    random, head_dim = np.random.default_rng(9), peer.session.interface.head_dim
    roots = random.standard_normal((tiny_models.LAYERS, tiny_models.HEADS, 3 * head_dim, head_dim), np.float32)
    return [
        {
            "mean": random.standard_normal((tiny_models.HEADS, head_dim), np.float32),
            "covariance": (root.transpose(0, 2, 1) @ root / np.float32(9 * head_dim)).astype(np.float32),
            "filter": random.standard_normal((tiny_models.KV_HEADS, head_dim), np.float32),
            "score": random.random(tiny_models.KV_HEADS, np.float32),
        }
        for root in roots
    ]


def stack(tables, name):
    return torch.from_numpy(np.stack([row[name] for row in tables]))


@pytest.mark.parametrize("wrapper", ["none", "ada", "block"])
@pytest.mark.parametrize("ratio", [0.3, 0.75])
def test_qfilter_keeps_what_its_press_keeps(peer, tables, tmp_path, ratio, wrapper):
    profile = write_profile(tmp_path / "tiny.kvmp", tables)
    press = kvpress.QFilterPress(ratio)
    press.post_init_from_model = lambda model: None
    press.q_filters = -stack(tables, "filter")
    policy = create_policy("qfilter", keep_ratio=1 - ratio, profile=profile, wrapper=wrapper)
    wrapped = {"none": lambda base: base, "ada": kvpress.AdaKVPress, "block": kvpress.BlockPress}[wrapper](press)
    assert peer.keep_by_policy(policy) == peer.keep_by_press(wrapped)


@pytest.mark.parametrize("ratio", [0.3, 0.75])
def test_expected_attention_stats_keeps_what_its_press_keeps(peer, tables, tmp_path, ratio):
    profile = write_profile(tmp_path / "tiny.kvmp", tables)
    press = kvpress.ExpectedAttentionStatsPress(ratio)
    press.mu, press.cov = stack(tables, "mean"), stack(tables, "covariance")
    policy = create_policy("expected_attention_stats", keep_ratio=1 - ratio, profile=profile)
    assert peer.keep_by_policy(policy) == peer.keep_by_press(press)


@pytest.mark.parametrize("kind", ["profile", "tsv"])
@pytest.mark.parametrize("ratio", [0.25, 0.6])
def test_duo_attention_keeps_what_its_press_keeps(peer, tables, tmp_path, monkeypatch, ratio, kind):
    scores = stack(tables, "score").numpy()
    pattern = tmp_path / "full_attention_heads.tsv"
    np.savetxt(pattern, scores.astype(np.float64), delimiter="\t")
    if kind == "profile":
        pattern = write_profile(tmp_path / "tiny.kvmp", tables)
    press = kvpress.DuoAttentionPress(ratio)
    monkeypatch.setattr(press, "load_attention_pattern", lambda model: (20, 90, scores))
    policy = create_policy("duo_attention", keep_ratio=1 - ratio, pattern=str(pattern), sink=20, recent=90)
    kept = peer.keep_by_policy(policy)
    assert kept == peer.keep_by_press(press)
    assert len({len(head) for layer in kept for head in layer}) == 2


@pytest.mark.parametrize("share", [0.25, 0.6])
@pytest.mark.parametrize("base", [None, "snapkv"])
def test_think_changes_the_channels_that_its_press_changes(peer, share, base):
    press = kvpress.ThinKPress(1 - share, window_size=12)
    policy = create_policy("think", keep_ratio=share, window=12)
    if base is not None:
        press = kvpress.ComposedPress([kvpress.SnapKVPress(0.5), press])
        text = f"snapkv@keep_ratio=0.5+think@keep_ratio={share}@window=12"
        policy = create_policy("composed", keep_ratio=0.5, policies=text)
    runner = Runner(peer.session, policy)
    runner.step(peer.ids)
    for cut, stored in zip(runner.cache.copy_layers(), peer.run(press).layers, strict=True):
        keys = np.sort(stored.keys[0].numpy(), axis=1)  # in the order of scores
        assert ((keys == 0) == (np.sort(cut.keys, axis=1) == 0)).all()
        assert (cut.keys == 0).all(axis=1).sum() == len(keys) * int(keys.shape[2] * (1 - share))
        np.testing.assert_allclose(np.sort(cut.keys, axis=1), keys, atol=1e-4)


@pytest.mark.parametrize("budget", [30, 100])
@pytest.mark.parametrize("names", ["tova+keydiff", "expected_attention+keydiff", "cur@wrapper=chunkkv+snapkv@window=9"])
def test_composed_keeps_what_its_press_keeps(peer, names, budget):
    """The second score does not depend on the order of tokens, which a press changes, or the first press sorts."""
    policy = create_policy("composed", budget=budget, policies=names)
    middle = round(TOKENS * (budget / TOKENS) ** 0.5)
    first, second = 1 - (middle + 0.5) / TOKENS, 1 - (budget + 0.5) / middle
    presses = {
        "tova+keydiff": lambda: [kvpress.TOVAPress(first), kvpress.KeyDiffPress(second)],
        "expected_attention+keydiff": lambda: [kvpress.ExpectedAttentionPress(first), kvpress.KeyDiffPress(second)],
    }
    if names not in presses:  # whole chunks make other numbers of tokens
        chunks = kvpress.ChunkKVPress(kvpress.CURPress(1 - (middle + 0.01) / TOKENS))
        size = len(peer.keep_by_press(chunks)[0][0])
        presses[names] = lambda: [chunks, kvpress.SnapKVPress(1 - (budget + 0.5) / size, window_size=9)]
    assert peer.keep_by_policy(policy) == peer.keep_by_press(kvpress.ComposedPress(presses[names]()))


@pytest.mark.parametrize("name", ["keydiff", "snapkv"])
def test_by_layer_keeps_what_its_press_keeps(peer, name):
    ratios = [0.11, 0.53, 0.71, 0.95]
    options = {"keydiff": {}, "snapkv": {"window": 8}}[name]
    press = {"keydiff": kvpress.KeyDiffPress, "snapkv": partial(kvpress.SnapKVPress, window_size=8)}[name]()
    shares = tuple(1 - ratio for ratio in ratios)
    policy = create_policy(name, keep_ratio=sum(shares) / len(shares), by_layer=shares, **options)
    kept = peer.keep_by_policy(policy)
    assert kept == peer.keep_by_press(kvpress.PerLayerCompressionPress(press, ratios))
    assert [len(layer[0]) for layer in kept] == [int(TOKENS * share) for share in shares]


def test_share_of_seen_keeps_what_its_press_keeps(peer):
    steps = [150, *[1] * 67]
    policy = create_policy("keydiff", keep_ratio=0.4, share_of="seen", phase="decoding", interval=20)
    press = kvpress.CompressionRatioDecodingPress(
        kvpress.KeyDiffPress(0.0), compression_interval=20, target_compression_ratio=0.6
    )
    assert peer.keep_by_policy(policy, steps) == peer.keep_by_press(press, steps)
