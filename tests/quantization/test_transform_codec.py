"""The transform codec of a cache: the words and bytes of its streams."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from repository import FIXTURES

from kvmnn.arrays import LayerCache
from kvmnn.calibration import ProfileOptions, make_profile_from_caches
from kvmnn.dense import RopeConfig
from kvmnn.errors import KvmnnError
from kvmnn.evaluation import evaluate
from kvmnn.evaluation.settings import EvaluationSettings
from kvmnn.formats.layer_streams.codecs import CacheEncoder, LayerStreamOptions
from kvmnn.lm import dump_kv
from kvmnn.profiles import Profile, TextOrigin
from kvmnn.quantization import CacheShape, create_codec
from kvmnn.transform import TransformOptions, decode_layer, encode_layer, get_tables, plan_steps, split_heads

TEXTS = sorted((FIXTURES / "lm" / "texts").glob("*.txt"))


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    dump_kv(FIXTURES / "lm", TEXTS[0], folder / "kv", tokens=400)
    make_profile_from_caches(
        [folder / "kv"], folder / "p.kvmp", ProfileOptions(below=(0, 1)), rope=RopeConfig(10000.0, 16)
    )
    return folder / "p.kvmp"


def test_transform_codec_gives_words_and_bytes_of_the_streams(profile: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    dump_kv(FIXTURES / "lm", TEXTS[1], folder, tokens=50, dtype="fp16")
    layers = [
        LayerCache(layer=i, **{f"{part}s": np.load(folder / f"layer_{i}.{part}.npy") for part in ("key", "value")})
        for i in range(6)
    ]
    codec = create_codec(f"transform:profile={profile},kl=0.5")
    assert create_codec(f"transform:{profile},kl=0.5") == codec
    assert codec is not None and codec.when == "always"
    assert codec.label == "transform:p.kvmp,kl=0.5"
    coder = codec.start_text(CacheShape(6, 4, 64))
    options = LayerStreamOptions(codec="transform", profile=str(profile), settings={"kl": 0.5})
    for (stream, decoded), cache in zip(
        CacheEncoder(Profile.read(profile), options).encode(layers), layers, strict=True
    ):
        total = 0
        for part, elements, expected in (("key", cache.keys, decoded.keys), ("value", cache.values, decoded.values)):
            rows, fields = coder.quantize(cache.layer, part, elements.astype(np.float32), np.arange(50))
            assert np.array_equal(rows, expected.astype(np.float32))
            sizes = coder.measure(cache.layer, part, fields)
            total += sizes.plain_bytes
        assert total == len(stream) == sizes.coded_bytes


def test_cache_encoder_comes_near_a_ratio_on_a_text_unlike_the_profile(profile: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    dump_kv(FIXTURES / "lm", TEXTS[1], folder, tokens=200, dtype="fp16")
    layers = [
        LayerCache(layer=i, **{f"{part}s": np.load(folder / f"layer_{i}.{part}.npy") for part in ("key", "value")})
        for i in range(6)
    ]
    model, settings = Profile.read(profile), {"ratio": 5.0, "below": 1}
    plan = plan_steps(get_tables(model), TransformOptions(**settings), 200)
    options = LayerStreamOptions(codec="transform", profile=str(profile), settings=settings)
    planned, lower = 0, []
    for layer in layers:
        encoding = encode_layer(layer, model, lower, TransformOptions(**settings), plan=plan)
        lower, planned = [encoding.decoded], planned + len(encoding.data)
    corrected = sum(len(stream) for stream, _ in CacheEncoder(model, options).encode(layers))
    ratios = [sum(layer.nbytes for layer in layers) / size for size in (corrected, planned)]
    assert abs(ratios[0] - 5) < 0.5 * abs(ratios[1] - 5), ratios


@pytest.mark.parametrize("bits", [6.0, 12.0, 13.0])
def test_cache_encoder_comes_near_bits_where_rows_become_exact(profile: Path, tmp_path: Path, bits: float) -> None:
    """Small steps make rows exact, whose bits do not follow the steps: corrections in proportion swing around."""
    folder = tmp_path / "kv"
    dump_kv(FIXTURES / "lm", TEXTS[1], folder, tokens=200, dtype="fp16")
    layers = [
        LayerCache(layer=i, **{f"{part}s": np.load(folder / f"layer_{i}.{part}.npy") for part in ("key", "value")})
        for i in range(6)
    ]
    options = LayerStreamOptions(codec="transform", profile=str(profile), settings={"bits": bits, "below": 1})
    encoded = CacheEncoder(Profile.read(profile), options).encode(layers)
    reached = 16 * sum(len(stream) for stream, _ in encoded) / sum(layer.nbytes for layer in layers)
    assert abs(reached / bits - 1) < 0.06, reached


def test_transform_codec_in_an_evaluation(profile: Path) -> None:
    spec = f"transform:profile={profile},ratio=4"
    settings = EvaluationSettings(tokens=160, chunk=60, prompt=100, timing=False)
    result = evaluate(
        FIXTURES / "lm", TEXTS[1], "recent_only:budget=64", codecs=["none", spec], settings=settings, jobs=0
    )
    assert result.refused == ()
    lossy = [row for row in result.rows if row.codec is not None]
    size_note = (
        f"p.kvmp has {profile.stat().st_size:,} bytes, once for all texts of the model, which no row counts; the"
    )
    assert any(note.startswith(size_note) for note in result.notes)
    assert len(lossy) == 2 and all(row.kind == "LOSSY" and row.lossy_ratio > 1 for row in lossy)
    assert [row.label for row in lossy] == [f"{name}transform:p.kvmp,ratio=4.0" for name in ("", "recent_only 64 + ")]


def test_transform_codec_codes_later_tokens_in_blocks_too(profile: Path) -> None:
    specs = [f"transform:{profile},ratio=4{more}" for more in (",when=prompt", "", ",block=40")]
    settings = EvaluationSettings(tokens=181, chunk=20, prompt=100, timing=False)  # 181: the last 81 tokens in 5 steps
    result = evaluate(FIXTURES / "lm", TEXTS[1], codecs=specs, settings=settings, jobs=0)
    prompt, default, small = (row for row in result.rows if row.codec is not None)
    assert prompt.codes_prompt_only and not default.codes_prompt_only
    # 100, 180 and 180 of 180 tokens are coded at the end, in 1, 2 and 3 streams
    assert prompt.bytes_per_token > 1.3 * max(small.bytes_per_token, default.bytes_per_token)
    assert default.cut_divergence.tokens == prompt.cut_divergence.tokens == 81
    coder = create_codec(specs[1]).start_text(CacheShape(6, 4, 64))  # type: ignore[union-attr]
    assert [coder.count_due("key", count) for count in (1, 63, 64, 500)] == [0, 0, 64, 500]


@pytest.mark.slow
def test_evaluation_lossy_runtime_is_compared_with_the_full_cache_as_computed(profile: Path) -> None:
    """Policies pay for what the runtime rounds: the row that they are compared with holds nothing rounded."""
    switches = {f"kv_lossless_{name}": True for name in ("enable", "runtime_enable")}
    numbers = {"front_n": 6, "block_tokens": 16, "hot_recent_tokens": 16, "hot_sink_tokens": 4, "bits": 1.0}
    runtime = {
        **switches,
        **{f"kv_lossless_{name}": value for name, value in numbers.items()},
        "kv_lossless_runtime_mode": "store",
        "kv_lossless_async_threads": 0,  # encodings are done when a step ends, whatever else the machine does
        "kv_lossless_codec": "transform",
        "kv_lossless_profile": str(profile),
        "kv_h2o_trigger_min_tokens": 32,
    }
    policies, losses = ["streaming:budget=90", "streaming:budget=200"], []
    for lossless in (None, runtime):
        settings = EvaluationSettings(tokens=130, prompt=100, timing=False, lossless=lossless)
        result = evaluate(FIXTURES / "lm", TEXTS[2:3], policies, settings=settings, jobs=0)
        assert result.refused == ()
        full, streaming, whole = result.rows
        assert (full.runtime, full.kind) == (None, "LOSSLESS")
        assert all((row.runtime is not None) == (lossless is not None) for row in (streaming, whole))
        assert streaming.divergence is not None and streaming.cut_divergence is not None
        assert streaming.cut_divergence.tokens == 30
        losses.append(streaming.divergence.kl)
        assert whole.kind == ("not cut" if lossless is None else "LOSSY") and whole.evicted is False
        assert (whole.cut_divergence is not None) == (lossless is not None)
    assert streaming.runtime is not None and streaming.runtime.encoded_ratio
    assert losses[0] > 0 and losses[1] != losses[0]
    assert whole.divergence is not None and whole.divergence.kl > 0  # it evicts nothing: this is what rounding costs
    settings = EvaluationSettings(tokens=130, prompt=100, timing=False, lossless=runtime)
    result = evaluate(FIXTURES / "lm", TEXTS[2:3], settings=settings, jobs=0)
    full, alone = result.rows
    assert not [note for note in result.notes if "evicted nothing" in note or "nothing was evicted" in note]
    threads = replace(settings, lossless=runtime | {"kv_lossless_async_threads": 1})
    assert evaluate(FIXTURES / "lm", TEXTS[2:3], settings=threads, jobs=0).rows[1].divergence == alone.divergence
    assert (full.runtime, full.kind, alone.label, alone.kind) == (None, "LOSSLESS", "full, in the runtime", "LOSSY")
    for row in (alone, streaming):
        assert row.runtime is not None and row.runtime.lossless_ratio is None
        assert row.runtime.lossy_ratio == row.runtime.total_ratio and row.lossless_ratio == 1
        streams = sum(layer.stored_bytes for layer in row.runtime.layers)
        raw = sum(layer.stored_raw_bytes for layer in row.runtime.layers)
        assert row.kept_bytes == (row.runtime.live_bytes - raw) // 2 + streams and raw > 4 * streams > 0
    assert alone.lossy_ratio is not None and alone.lossy_ratio > 1.5
    assert alone.divergence is not None and alone.divergence.kl == whole.divergence.kl


def test_transform_codec_behind_a_policy_with_tokens_of_its_own_for_each_head(profile: Path) -> None:
    """Streams of each head by the split profile; what they decode to is what the model reads."""
    spec = f"transform:profile={profile},ratio=4"
    settings = EvaluationSettings(tokens=181, chunk=20, prompt=100, timing=False)
    result = evaluate(
        FIXTURES / "lm",
        TEXTS[1],
        "keydiff:budget=64,phase=both,interval=20",
        codecs=["none", spec],
        settings=settings,
        jobs=0,
    )
    assert result.refused == ()
    _, cut, _, lossy = result.rows
    assert lossy.label.startswith("keydiff") and lossy.kind == "LOSSY" and lossy.quantized_share > 0.98
    assert lossy.lossy_ratio > 2 * cut.lossy_ratio  # 100 and 80 tokens of each head, with a header each
    coder = create_codec(spec).start_text(CacheShape(6, 4, 64, is_per_head=True))  # type: ignore[union-attr]
    heads, random, places = split_heads(Profile.read(profile)), np.random.default_rng(2), np.arange(0, 120, 2)
    for head in range(4):
        keys, values = random.standard_normal((2, 1, len(places), 64)).astype(np.float16)
        cache = LayerCache(layer=8 + head, keys=keys, values=values, positions=places + head)
        first = int((cache.positions < 4).sum())
        plan = plan_steps(get_tables(heads), TransformOptions(ratio=4, first=0), 1)
        stream = encode_layer(cache, heads, [], TransformOptions(ratio=4, first=first), plan=plan).data
        decoded = decode_layer(stream, heads)
        quantized = [
            coder.quantize(2, part, rows.astype(np.float32), cache.positions, head)
            for part, rows in (("key", keys), ("value", values))
        ]
        assert np.array_equal(quantized[0].rows, decoded.keys.astype(np.float32))
        assert np.array_equal(quantized[1].rows, decoded.values.astype(np.float32))
        assert coder.measure(2, "value", quantized[1].fields).plain_bytes == len(stream)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["profile", "transform"])
def test_evaluation_runtime_by_a_profile_behind_a_policy_of_heads(profile: Path, codec: str) -> None:
    runtime = {f"kv_lossless_{name}": True for name in ("enable", "runtime_enable")} | {
        "kv_lossless_front_n": 6,
        "kv_lossless_block_tokens": 16,
        "kv_lossless_hot_recent_tokens": 16,
        "kv_lossless_hot_sink_tokens": 4,
        "kv_lossless_runtime_mode": "store",
        "kv_lossless_async_threads": 0,
        "kv_lossless_codec": codec,
        "kv_lossless_profile": str(profile),
        "kv_h2o_trigger_min_tokens": 32,
    }
    runtime |= {"kv_lossless_kl": 0.01} if codec == "transform" else {}
    settings = EvaluationSettings(tokens=130, prompt=100, timing=False, lossless=runtime)
    result = evaluate(FIXTURES / "lm", TEXTS[2:3], ["h2o_decayed_heads:budget=90"], settings=settings, jobs=0)
    assert result.refused == ()
    cut = result.rows[1]
    assert cut.runtime is not None and cut.runtime.encoded_ratio
    assert cut.runtime.encoded_ratio > (1.15 if codec == "profile" else 3)
    plain = evaluate(
        FIXTURES / "lm", TEXTS[2:3], ["h2o_decayed_heads:budget=90"],
        settings=EvaluationSettings(tokens=130, prompt=100, timing=False), jobs=0,
    ).rows[1]  # fmt: skip
    assert (cut.perplexity == plain.perplexity) == (codec == "profile")


def test_transform_codec_takes_bits_as_encode_does(profile: Path) -> None:
    codecs = [create_codec(f"transform:{profile},{size}") for size in ("bits=2", "ratio=8")]
    first, second = (codec.build_options(4) for codec in codecs if codec is not None)  # type: ignore[attr-defined]
    assert (first.bits, first.ratio, first.kl) == (2, None, None)
    plans = [plan_steps(get_tables(Profile.read(profile)), options, 1) for options in (first, second)]
    assert np.array_equal(plans[0].steps, plans[1].steps)


def test_transform_codec_refuses_what_it_cannot_code(profile: Path) -> None:
    for spec, message in (
        ("transform", "transform:FILE"),
        (f"transform:profile={profile},kl=1,ratio=2", "one of them"),
        (f"transform:profile={profile},bits=1,ratio=2", "one of them"),
        (f"transform:profile={profile},below=3", "below"),
        (f"transform:profile={profile},kl=x", "expected a number"),
        (f"transform:profile={profile},kl=0", "kl is 0"),
        (f"transform:profile={profile},block=0", "block is 0"),
    ):
        with pytest.raises(KvmnnError, match=message):
            create_codec(spec)
    codec = create_codec(f"transform:profile={profile}")
    assert codec is not None
    with pytest.raises(KvmnnError, match="another model"):
        codec.start_text(CacheShape(1, 4, 64))
    coder = codec.start_text(CacheShape(6, 4, 64))
    with pytest.raises(KvmnnError, match="beyond fp16"):
        coder.quantize(0, "key", np.full((4, 5, 64), 1e6, np.float32), np.arange(5))


def test_evaluation_notes_texts_that_the_profile_was_made_of(profile: Path, tmp_path: Path) -> None:
    """Of a cache by its name alone; of texts by what is in them, whatever their name."""
    copy, other = tmp_path / "kv.txt", tmp_path / "other.txt"
    copy.write_text(TEXTS[0].read_text())
    other.write_text(TEXTS[1].read_text())
    made = Profile.read(profile)
    origin = TextOrigin(name="kv.txt", sha256=hashlib.sha256(other.read_bytes()).hexdigest(), tokens=400)
    Profile(replace(made.info, texts=(origin,)), made.arrays).write(tmp_path / "texts.kvmp")
    settings = EvaluationSettings(tokens=24, chunk=8, timing=False)
    result = evaluate(
        FIXTURES / "lm",
        [copy, other],
        codecs=[f"transform:{path},ratio=4" for path in (profile, tmp_path / "texts.kvmp")],
        settings=settings,
        jobs=0,
    )
    effect = "KL and sizes of its rows may be better than on texts that it has not seen."
    assert [note for note in result.notes if "made of texts" in note or "made of caches" in note] == [
        "p.kvmp was made of caches that have the names of texts scored here (it records no SHA-256): kv.txt. If they "
        f"are of these texts, {effect}",
        f"texts.kvmp was made of texts that are scored here, by their SHA-256: other.txt. {effect}",
    ]


def test_transform_codec_options_are_those_that_are_in_effect(profile: Path) -> None:
    options = [create_codec(f"transform:{profile}{size}").to_options() for size in ("", ",bits=2")]  # type: ignore[union-attr]
    assert [(entry["kl"], entry["bits"], entry["block"], entry["when"]) for entry in options] == [
        (0.002, None, 64, "always"),
        (None, 2.0, 64, "always"),
    ]


@pytest.mark.slow
def test_evaluation_target_divergence_is_compared_with_measured(profile: Path) -> None:
    specs = ["none", *(f"transform:{profile}{more},when=prompt" for more in (",ratio=4", ""))]
    settings = EvaluationSettings(tokens=40, chunk=8, prompt=32, timing=False)
    result = evaluate(FIXTURES / "lm", TEXTS[1:3], "recent_only:budget=24", codecs=specs, settings=settings, jobs=0)
    alone = [row for row in result.rows if row.codec is not None and row.policy == "full"]
    targets = [row.target_divergence for row in alone]
    assert targets[0] is None
    assert targets[1] is not None and targets[1].target == 0.002
    assert targets[1].measured == pytest.approx(alone[1].cut_divergence.kl)
    low, high = sorted(text.cut_divergence.kl for text in alone[1].documents)
    assert (targets[1].low, targets[1].high) == pytest.approx((low, high))  # the bootstrap of two texts has their range
    assert all(row.target_divergence is None for row in result.rows if row not in alone)
    alone_note, policy_note = (note for note in result.notes if "nats was asked for" in note)
    assert " measured (" in alone_note and "behind policies what they cost is in it: recent_only" in policy_note
    assert policy_note.endswith(" without).") and "ratio=4" not in policy_note
