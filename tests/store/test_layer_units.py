"""Stores of streams by a model's profile: lossless ones, and those that say that they are lossy."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transform_samples
from linear_samples import make_cache, make_profile

from kvmnn import LayerCache
from kvmnn.dense.rope import RopeConfig
from kvmnn.errors import KvmnnError, ManifestError, OptionError, SourceError
from kvmnn.linear import encode_layers
from kvmnn.profiles import Profile
from kvmnn.store import PrefixStore, read_exported
from kvmnn.store.backend import parse_settings
from kvmnn.store.export import is_lossy
from kvmnn.store.layer_units import read_checksum
from kvmnn.store.unit import parse_unit
from kvmnn.transform import TransformOptions, encode_layer
from kvmnn.transform.profile_tables import get_tables
from kvmnn.transform.steps import plan_steps

GEOMETRY = transform_samples.create_geometries(4, 2, 8, 8, RopeConfig(10000.0, 8))
PROFILE = transform_samples.create_profile(GEOMETRY)
IDS = [(7 * index) % 1009 for index in range(700)]
CACHES = transform_samples.create_caches(5, len(IDS), GEOMETRY)
MODEL = "sample"


def are_equal(layers: list[LayerCache], others: list[LayerCache], tokens: int) -> bool:
    """Whether the first tokens of layers are the same words."""
    return all(
        np.array_equal(a[:, :tokens].view("u2"), b[:, :tokens].view("u2"))
        for first, second in zip(layers, others, strict=True)
        for a, b in ((first.keys, second.keys), (first.values, second.values))
    )


def measure_error(layers: list[LayerCache], others: list[LayerCache]) -> float:
    """The relative error of K and V."""
    pairs = [
        (a.astype(np.float64), b.astype(np.float64))
        for first, second in zip(layers, others, strict=True)
        for a, b in ((first.keys, second.keys), (first.values, second.values))
    ]
    return float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)))


@pytest.mark.parametrize("engine", ["directory", "memory"])
@pytest.mark.parametrize("block_tokens", [64, 256])
def test_profile_store_returns_every_word(new_url: Callable[[str], str], engine: str, block_tokens: int) -> None:
    caches = make_cache(700, "fp16", seed=3)
    with PrefixStore(new_url(engine), codec="profile", profile=make_profile(), block_tokens=block_tokens) as store:
        put = store.put(IDS[:600], [take(cache, 600) for cache in caches], model=MODEL)
        assert not put.is_lossy and "LOSSY" not in str(put) and put.stored_bytes < 0.8 * put.raw_bytes
        assert store.put(IDS, caches, model=MODEL).known_tokens == 600
        prefix = store.get(IDS, model=MODEL)
        assert (prefix.tokens, prefix.label, prefix.notes) == (700, None, ())
        assert are_equal(prefix.layers, caches, 700)
        assert are_equal(store.get([*IDS[:333], 5], model=MODEL).layers, [take(cache, 333) for cache in caches], 333)
        assert are_equal(list(store.get_by_layer(IDS, model=MODEL).layers), caches, 700)
        assert store.verify().damaged == () and not store.stats().is_lossy
        assert store.stats().profile == make_profile().key.hex()


def test_measured_ratio_of_a_profile_is_that_of_a_real_store(tmp_path: Path, run) -> None:
    caches = make_cache(700, "fp16", seed=3)
    with PrefixStore(tmp_path / "s", codec="profile", profile=make_profile()) as store:
        put = store.put(IDS, caches, model=MODEL)
    path, trace = tmp_path / "p.kvmp", tmp_path / "trace.jsonl"
    make_profile().write(path)
    trace.write_text("5 6 7\n5 6 7\n")
    arrays = {
        f"layer_{cache.layer}.{part}": getattr(cache, f"{part}s") for cache in caches for part in ("key", "value")
    }
    np.savez(tmp_path / "kv.npz", **arrays)
    words = ["--ratio", "measured", "--model-shape", "2x2x64", "--size", "1M", "--codec", f"profile:{path}", "--json"]
    rows = json.loads(run("store", "simulate", trace, tmp_path / "kv.npz", *words).out)["rows"]
    assert {row["codec"] for row in rows} == {"profile"}
    assert rows[0]["ratio"] == pytest.approx(put.raw_bytes / put.stored_bytes)


def take(cache: LayerCache, tokens: int) -> LayerCache:
    return LayerCache(layer=cache.layer, keys=cache.keys[:, :tokens], values=cache.values[:, :tokens])


@pytest.mark.parametrize("engine", ["directory", "memory"])
@pytest.mark.parametrize("options", [{"kl": 0.02}, {"kl": 0.02, "below": 0}, {"ratio": 6}])
def test_transform_store_says_lossy_and_rounds_as_streams_do(
    new_url: Callable[[str], str], engine: str, options: dict[str, float]
) -> None:
    with PrefixStore(new_url(engine), codec="transform", profile=PROFILE, codec_options=options) as store:
        put = store.put(IDS, CACHES, model=MODEL)
        assert put.is_lossy and "LOSSY" in str(put) and put.raw_bytes > 4 * put.stored_bytes
        if "kl" in options:
            assert put.predicted_kl == pytest.approx(0.02)
        prefix = store.get(IDS, model=MODEL)
        assert prefix.predicted_kl == store.describe(IDS, model=MODEL).predicted_kl
        assert prefix.predicted_kl == pytest.approx(put.predicted_kl, rel=0.2)  # of `ratio` units differ
        assert (prefix.tokens, prefix.label) == (700, "LOSSY")
        assert 0 < measure_error(prefix.layers, CACHES) < 0.2
        assert are_equal([take(cache, 4) for cache in prefix.layers], [take(cache, 4) for cache in CACHES], 4)
        by_layer = store.get_by_layer(IDS, model=MODEL)
        assert by_layer.label == "LOSSY" and are_equal(list(by_layer.layers), prefix.layers, 700)
        short = store.get([*IDS[:100], 3], model=MODEL)
        assert are_equal(short.layers, [take(cache, 100) for cache in prefix.layers], 100)
        assert "LOSSY" in str(store.stats()) and "LOSSY" in str(store.ls())
        assert store.stats().to_dict()["is_lossy"] and store.ls().to_dict()["texts"][0]["is_lossy"]
        verified = store.verify()
        assert (verified.damaged, verified.lossy_units) == ((), verified.units)
        assert str(verified).startswith(f"{verified.units} LOSSY units, 700 tokens summed over units, ")
        assert str(store.find(IDS, model=MODEL)) == "700 LOSSY" and str(store.find([5], model=MODEL)) == "0"
        assert str(store.pin(IDS, model=MODEL)) == "700 LOSSY tokens: pinned"
        assert "removed 0 LOSSY units" in str(store.gc())
        # what was read is put again: next to nothing more is lost
        before = measure_error(prefix.layers, CACHES)
    with PrefixStore(new_url(engine), codec="transform", profile=PROFILE, codec_options=options) as store:
        store.put(IDS, prefix.layers, model=MODEL)
        assert measure_error(store.get(IDS, model=MODEL).layers, CACHES) < 1.1 * before


def test_put_with_attention_has_smaller_errors_where_more_was_drawn(tmp_path: Path) -> None:
    attention = np.where(np.arange(len(IDS)) < 512, 1.0, 0.1) * np.ones((len(CACHES), 2, 1))
    spans = (0, 512), (512, 700)  # two units: steps are relative to the whole text, not to a unit
    errors = {}
    for name, drawn in (("even", None), ("drawn", attention)):
        with PrefixStore(tmp_path / name, codec="transform", profile=PROFILE, codec_options={"kl": 0.02}) as store:
            put = store.put(IDS, CACHES, model=MODEL, attention=drawn)
            assert put.predicted_kl == pytest.approx(0.02)
            layers = store.get(IDS, model=MODEL).layers
        errors[name] = [measure_error(slice_layers(layers, *span), slice_layers(CACHES, *span)) for span in spans]
    assert errors["drawn"][0] < errors["even"][0] and errors["drawn"][1] > 1.5 * errors["even"][1]


def slice_layers(layers: list[LayerCache], begin: int, end: int) -> list[LayerCache]:
    return [
        LayerCache(layer=cache.layer, keys=cache.keys[:, begin:end], values=cache.values[:, begin:end])
        for cache in layers
    ]


def test_put_with_attention_of_other_shape_or_codec_is_refused(tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s", codec="transform", profile=PROFILE) as store:
        for shape in ((len(CACHES) - 1, 2, 700), (len(CACHES), 2, 699), (len(CACHES), 700)):
            with pytest.raises(KvmnnError, match=r"attention .*: layer"):
                store.put(IDS, CACHES, model=MODEL, attention=np.ones(shape))
        with pytest.raises(KvmnnError, match="expected a finite number of at least 0"):
            store.put(IDS, CACHES, model=MODEL, attention=np.full((len(CACHES), 2, 700), np.nan))
        assert not store.ls().texts
    with (
        PrefixStore(tmp_path / "d") as store,
        pytest.raises(OptionError, match="attention is about the steps of lossy streams: the store has codec 'dense'"),
    ):
        store.put(IDS, CACHES, model=MODEL, attention=np.ones((len(CACHES), 2, 700)))


@pytest.mark.parametrize(("first", "is_predicted"), [(4, True), (0, False)])
def test_put_predicts_no_loss_where_first_tokens_are_rounded(tmp_path: Path, first: int, is_predicted: bool) -> None:
    """Units after the first one predict theirs, but of all of the text nothing is predicted."""
    options = {"kl": 0.02, "first": first}
    with PrefixStore(tmp_path / "s", codec="transform", profile=PROFILE, codec_options=options) as store:
        for tokens in (64, 200, 700):
            put = store.put(IDS[:tokens], [take(cache, tokens) for cache in CACHES], model=MODEL)
            assert (put.predicted_kl is not None) == (is_predicted or tokens > 64)  # of what it added
            assert (store.get(IDS, model=MODEL).predicted_kl is not None) == is_predicted
            assert (store.describe(IDS[:tokens], model=MODEL).predicted_kl is not None) == is_predicted


def test_transform_unit_bytes_of_hand_decoding(tmp_path: Path) -> None:
    """Taken apart by hand, for the second of two units; streams are those of the codec."""
    options = {"kl": 0.02, "first": 2}
    with PrefixStore(tmp_path / "s", codec="transform", profile=PROFILE, codec_options=options) as store:
        store.put(IDS[:64], [take(cache, 64) for cache in CACHES], model=MODEL)
        store.put(IDS[:200], [take(cache, 200) for cache in CACHES], model=MODEL)
        space = store._backend.list_namespaces()[0].key
    data = (tmp_path / "s" / "units" / "000" / "00000002.unit").read_bytes()
    parent = hashlib.blake2b(space + np.array(IDS[:64], "<u4").tobytes(), digest_size=16).digest()
    assert data[:52] == b"KVMNNPU3" + struct.pack("<III", 136, 4, 64) + space + parent
    assert data[52:88] == struct.pack("<I", 1) + PROFILE.key
    assert np.frombuffer(data, "<u4", 136, 88).tolist() == IDS[64:200]
    sizes = np.frombuffer(data, "<u8", 8, 88 + 4 * 136).reshape(4, 2)
    begin = 88 + 4 * 136 + 16 * 4 + 8
    lower: list[LayerCache] = []
    for cache, (size, checksum) in zip(CACHES, sizes.tolist(), strict=True):
        tokens = LayerCache(
            layer=cache.layer,
            keys=cache.keys[:, 64:200],
            values=cache.values[:, 64:200],
            positions=np.arange(64, 200),
        )
        unit_options = TransformOptions(kl=0.02, first=0)
        plan = plan_steps(get_tables(PROFILE), unit_options, 136, begin_token=64)
        encoding = encode_layer(tokens, PROFILE, lower[::-1], unit_options, plan=plan)
        assert encoding.data == data[begin : begin + size] and read_checksum(encoding.data) == checksum
        lower = [*lower, encoding.decoded][-2:]
        begin += size
    assert begin == len(data)


def test_profile_unit_streams_are_those_of_the_codec(tmp_path: Path) -> None:
    caches = make_cache(100, "bf16", seed=3)
    with PrefixStore(tmp_path / "s", codec="profile", profile=make_profile()) as store:
        store.put(IDS[:100], caches, model=MODEL)
    data = (tmp_path / "s" / "units" / "000" / "00000001.unit").read_bytes()
    assert data[52:88] == struct.pack("<I", 0) + make_profile().key
    streams = list(encode_layers(caches, make_profile()))
    assert data.endswith(b"".join(streams)) and read_checksum(streams[0]) != 0


def save_store(folder: Path, name: str = "model.kvmp") -> Path:
    """A store whose profile is a file next to it."""
    PROFILE.write(folder / name)
    with PrefixStore(folder / "s", codec="transform", profile=folder / name, codec_options={"kl": 0.02}) as store:
        store.put(IDS, CACHES, model=MODEL)
    return folder / "s"


def test_layer_units_without_their_profile_are_no_damage(tmp_path: Path) -> None:
    """The message says which profile is missing, and nothing is removed."""
    path = save_store(tmp_path)
    shutil.move(tmp_path / "model.kvmp", tmp_path / "elsewhere")
    with PrefixStore(path) as store:
        assert store.match(IDS, model=MODEL) == 700 and "LOSSY" in str(store.ls())
        calls: list[Callable[[], object]] = [
            lambda: store.get(IDS, model=MODEL),
            lambda: list(store.get_by_layer(IDS, model=MODEL).layers),
            lambda: store.put([*IDS, 5], [*transform_samples.create_caches(5, 701, GEOMETRY)], model=MODEL),
            store.verify,
            lambda: store.export(IDS, tmp_path / "x", model=MODEL),
        ]
        for call in calls:
            with pytest.raises(SourceError, match=f"{PROFILE.key.hex()[:16]} \\(model.kvmp\\)"):
                call()
        assert store.match(IDS, model=MODEL) == 700
    with PrefixStore(path, profile=tmp_path / "elsewhere") as store:
        assert store.get(IDS, model=MODEL).tokens == 700
    with PrefixStore(path, profile=make_profile()) as store, pytest.raises(SourceError, match="the one that was given"):
        store.get(IDS, model=MODEL)


def test_layer_units_find_the_profile_where_it_was(tmp_path: Path) -> None:
    path = save_store(tmp_path)
    with PrefixStore(path, read_only=True, create=False) as store:
        assert store.get(IDS, model=MODEL).tokens == 700
    shutil.move(tmp_path / "model.kvmp", path / "other.kvmp")
    with PrefixStore(path) as store:
        assert store.get(IDS, model=MODEL).tokens == 700


def test_store_keeps_its_profile_and_options(tmp_path: Path) -> None:
    path = save_store(tmp_path)
    document = json.loads((path / "store.json").read_text())
    assert document["profile"] == {"key": PROFILE.key.hex(), "file": "../model.kvmp", "options": {"kl": 0.02}}
    PrefixStore(path, codec="transform", profile=PROFILE).close()
    PrefixStore(path, codec="transform", profile=PROFILE, codec_options={"kl": 0.02}).close()
    with pytest.raises(OptionError, match=r"was made with kl=0\.02, not with kl=0\.1"):
        PrefixStore(path, codec="transform", profile=PROFILE, codec_options={"kl": 0.1})
    equal = {"kl": 0.02, "first": 4, "below": 2}  # the last two are what it does without them
    PrefixStore(path, codec="transform", profile=PROFILE, codec_options=equal).close()
    with pytest.raises(OptionError, match=r"was made with kl=0\.02, not with kl=0\.02,first=5"):
        PrefixStore(path, codec="transform", profile=PROFILE, codec_options={"kl": 0.02, "first": 5})
    with pytest.raises(OptionError, match="is a store of transform streams, not of profile streams"):
        PrefixStore(path, codec="profile", profile=make_profile())
    other = transform_samples.create_profile(GEOMETRY, belows=(0,))
    with pytest.raises(OptionError, match=f"needs the profile {PROFILE.key.hex()[:16]}"):
        PrefixStore(path, codec="transform", profile=other)
    path.joinpath("store.json").write_bytes(b"{")
    with PrefixStore(path) as store:
        assert (store.codec, store.is_lossy, len(store.notes)) == ("transform", True, 1)
        assert store.get(IDS, model=MODEL).tokens == 700


@pytest.mark.parametrize("engine", ["directory", "memory"])
def test_store_of_the_default_loss_takes_the_same_loss_typed_out(new_url: Callable[[str], str], engine: str) -> None:
    url = new_url(engine)
    for options in ({}, {"kl": 0.002}):
        with PrefixStore(url, codec="transform", profile=PROFILE, codec_options=options) as store:
            store.stats()
    for options in ({"kl": 0.0021}, {"ratio": 8.0}):
        with (
            pytest.raises(OptionError, match="was made with the default options"),
            PrefixStore(url, codec="transform", profile=PROFILE, codec_options=options) as store,
        ):
            store.stats()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("change", ["removed", "dense", "frames", "profile"])
def test_transform_store_with_lost_or_wrong_settings_stays_lossy(
    tmp_path: Path, run, change: str, read_only: bool
) -> None:
    path = save_store(tmp_path)
    settings = path / "store.json"
    document = json.loads(settings.read_text())
    del document["checksum"]  # as the first versions wrote it
    if change == "removed":
        settings.unlink()
    else:
        settings.write_text(json.dumps(document | {"codec": change}))
    changed = settings.read_bytes() if settings.exists() else None
    problem = "is missing" if changed is None else f"units are {change}( streams)?, and the units are transform streams"
    with PrefixStore(path, read_only=read_only, create=False) as store:
        assert (store.codec, len(store.notes)) == ("transform", 1)
        assert re.search(rf"store\.json: .*{problem}", store.notes[0])
        prefix = store.get(IDS, model=MODEL)
        assert (prefix.tokens, prefix.label) == (700, "LOSSY")
        assert store.get_by_layer(IDS, model=MODEL).label == "LOSSY"
        assert "LOSSY" in str(store.stats()) and "LOSSY" in str(store.ls())
        assert store.export(IDS, tmp_path / "x.kvmnn", model=MODEL).is_lossy and is_lossy(tmp_path / "x.kvmnn")
        assert dict(store.codec_options) == {"kl": 0.002 if changed is None else 0.02}
        assert ("nothing says the options of its codec, and new units have kl=0.002" in store.notes[0]) == (
            changed is None
        )
    if read_only:
        assert (settings.read_bytes() if settings.exists() else None) == changed, "a reader changes nothing"
    else:
        written = json.loads(settings.read_text())
        assert (written["codec"], written["profile"]["key"]) == ("transform", PROFILE.key.hex())
        PrefixStore(path).close()
        assert "LOSSY" in run("store", "stat", path).out


def test_lost_settings_and_index_get_advice_with_what_units_say(tmp_path: Path) -> None:
    path = save_store(tmp_path)
    (path / "store.json").unlink()
    (path / "index.sqlite").unlink()
    with pytest.raises(
        SourceError, match=r"such as .*\(codec and key of the profile are those of the units"
    ) as refused:
        PrefixStore(path)
    example = re.search(r"such as (\{.*\})", str(refused.value))
    assert example is not None
    (path / "store.json").write_text(example[1])
    with PrefixStore(path) as store:
        assert store.get(IDS, model=MODEL).label == "LOSSY"


def test_lost_settings_of_units_take_the_options_that_are_given(tmp_path: Path) -> None:
    path = save_store(tmp_path)
    (path / "store.json").unlink()
    with pytest.raises(OptionError, match="is a store of transform streams, not of dense streams"):
        PrefixStore(path, codec="dense")
    (path / "store.json").unlink()
    with PrefixStore(path, codec="transform", profile=tmp_path / "model.kvmp", codec_options={"kl": 0.02}) as store:
        assert dict(store.codec_options) == {"kl": 0.02}
        assert "new units have" not in store.notes[0]


def test_units_say_lossy_whatever_the_settings_say(tmp_path: Path) -> None:
    """Units that an open does not look at, between others, in a store whose settings say dense."""
    path, others = tmp_path / "s", [[1, 2, 3], [4, 5, 6]]
    short = [take(cache, 3) for cache in CACHES]
    PROFILE.write(tmp_path / "model.kvmp")
    PrefixStore(path, codec="dense").close()
    plain = (path / "store.json").read_bytes()
    with PrefixStore(path) as store:
        store.put(others[0], short, model=MODEL)
    settings = json.loads(plain)
    del settings["checksum"]
    profile = {"key": PROFILE.key.hex(), "file": "../model.kvmp", "options": {}}
    lossy = parse_settings(json.dumps(settings | {"codec": "transform", "profile": profile}).encode(), "")
    store = PrefixStore(path, profile=PROFILE)
    store._backend.settings, store._backend.codec = lossy, "transform"
    store.put(IDS, CACHES, model=MODEL)
    store.close()
    with PrefixStore(path) as store:  # the last unit is lossy
        assert store.is_lossy and len(store.notes) == 1
    (path / "store.json").write_bytes(plain)
    store = PrefixStore(path)
    store._backend.settings, store._backend.codec = parse_settings(plain, ""), "dense"
    store.put(others[1], short, model=MODEL)
    store.close()
    (path / "store.json").write_bytes(plain)
    with PrefixStore(path, profile=PROFILE) as store:
        assert (store.codec, store.notes) == ("dense", ())
        assert store.get(IDS, model=MODEL).label == store.get_by_layer(IDS, model=MODEL).label == "LOSSY"
        assert store.get(others[0], model=MODEL).label is None
        assert store.find(IDS, model=MODEL).is_lossy and not store.find(others[0], model=MODEL).is_lossy
        assert store.verify().lossy_units
        assert {text.tokens: text.is_lossy for text in store.ls().texts} == {3: False, 700: True}
        assert store.stats().is_lossy
        with pytest.raises(KvmnnError, match=r"has LOSSY units, .* say codec dense: expected transform"):
            store.export(IDS, tmp_path / "x.kvmnn", model=MODEL)


@pytest.mark.parametrize("change", ["removed", "dense", "profile"])
def test_remote_transform_store_with_lost_or_wrong_settings_stays_lossy(tmp_path: Path, change: str) -> None:
    pytest.importorskip("fsspec")
    url, settings = f"file://{tmp_path}/r", tmp_path / "r" / "store" / "about"
    with PrefixStore(url, codec="transform", profile=PROFILE) as store:
        store.put(IDS, CACHES, model=MODEL)
    document = json.loads(settings.read_text())
    del document["checksum"]
    settings.unlink() if change == "removed" else settings.write_text(json.dumps(document | {"codec": change}))
    with PrefixStore(url, profile=PROFILE, create=False) as store:
        assert store.codec == "transform" and store.find(IDS, model=MODEL).is_lossy
        for words in ("is missing" if change == "removed" else "says that units are ", "new units have kl=0.002"):
            assert [(words in note) for note in store.notes] == [True]
        assert store.get(IDS, model=MODEL).label == store.get_by_layer(IDS, model=MODEL).label == "LOSSY"
        assert "LOSSY" in str(store.stats()) and "LOSSY" in str(store.ls())


def test_remote_lost_settings_advice_has_the_codec_of_the_units(tmp_path: Path) -> None:
    """Of a text shorter than a block nothing says how many tokens a block has."""
    pytest.importorskip("fsspec")
    with PrefixStore(f"file://{tmp_path}/r", codec="transform", profile=PROFILE) as store:
        store.put(IDS[:2], [take(cache, 2) for cache in CACHES], model=MODEL)
    settings = tmp_path / "r" / "store" / "about"
    settings.write_text("{")
    (space,) = (tmp_path / "r" / "spaces").iterdir()
    document = json.loads(space.read_text())
    assert document.pop("block_tokens") == 64
    space.write_text(json.dumps(document))  # as earlier versions wrote it
    with pytest.raises(
        ManifestError, match=r"such as .*codec and key of the profile are those of the units"
    ) as refused:
        PrefixStore(f"file://{tmp_path}/r", create=False).ls()
    example = re.search(r"such as (\{.*\})", str(refused.value))
    assert example is not None
    settings.write_text(example[1])
    with PrefixStore(f"file://{tmp_path}/r", profile=PROFILE, create=False) as store:
        assert store.get(IDS[:2], model=MODEL).label == "LOSSY"


def test_profile_store_without_settings_keeps_its_profile(tmp_path: Path) -> None:
    caches = make_cache(300, "fp16", seed=3)
    with PrefixStore(tmp_path, codec="profile", profile=make_profile()) as store:
        store.put(IDS[:300], caches, model=MODEL)
    (tmp_path / "store.json").unlink()
    with PrefixStore(tmp_path, profile=make_profile()) as store:
        assert (store.codec, store.is_lossy, len(store.notes)) == ("profile", False, 1)
        assert store.stats().profile == make_profile().key.hex()
        assert are_equal(store.get(IDS[:300], model=MODEL).layers, caches, 300)


@pytest.mark.parametrize(
    "codec, profile, options, message",
    [
        ("transform", None, None, "needs the profile of a model"),
        ("dense", None, {"kl": 1}, "codec_options are of the codecs"),
        ("transform", PROFILE, {"recent": 8}, "no option of a store of transform streams"),
        ("transform", PROFILE, {"kl": 0.1, "bits": 2}, "expected one of them"),
        ("transform", PROFILE, {"below": 1}, "below"),
        ("profile", PROFILE, {}, "no sections linear/"),
        ("profile", make_profile(), {"kl": 1}, "no option of a store of profile streams"),
    ],
)
def test_layer_codec_options_are_checked_before_anything_is_made(
    tmp_path: Path, codec: str, profile: Profile | None, options: dict[str, float] | None, message: str
) -> None:
    with pytest.raises(KvmnnError, match=message):
        PrefixStore(tmp_path / "s", codec=codec, profile=profile, codec_options=options)
    assert not (tmp_path / "s").exists()


def test_put_of_another_model_is_refused(tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s", codec="transform", profile=PROFILE) as store:
        with pytest.raises(KvmnnError, match="layer 1: has 2 heads of 8"):
            store.put(IDS[:20], make_cache(20, "fp16")[1:2], model="other")
        assert store.stats().units == 0


def test_damaged_layer_unit_is_a_miss_wherever_it_is_damaged(tmp_path: Path) -> None:
    path = save_store(tmp_path)
    file = path / "units" / "000" / "00000002.unit"
    data = file.read_bytes()
    rng = np.random.default_rng(1)
    for offset in [9, 60, 90, *rng.integers(len(data), size=40).tolist()]:
        file.write_bytes(data[:offset] + bytes([data[offset] ^ 1 << int(rng.integers(8))]) + data[offset + 1 :])
        with PrefixStore(path) as store:
            tokens = list(range(700))
            prefix = store.get(IDS, model=MODEL)
            assert (prefix.tokens, len(prefix.notes)) == (512, 1), offset
            store.put(IDS, CACHES, model=MODEL)
            assert store.get(IDS, model=MODEL).tokens == len(tokens)
        file = sorted((path / "units").glob("*/*.unit"))[-1]
        assert file.read_bytes() == data


def test_layerwise_get_of_a_damaged_stream_ends_with_an_error(tmp_path: Path) -> None:
    path = save_store(tmp_path)
    file = path / "units" / "000" / "00000002.unit"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with PrefixStore(path) as store:
        layers = store.get_by_layer(IDS, model=MODEL).layers
        with pytest.raises(SourceError, match="layer 3"):
            list(layers)
        assert store.match(IDS, model=MODEL) == 512


def test_lossy_export_says_so_and_goes_into_stores_that_do(tmp_path: Path) -> None:
    path = save_store(tmp_path)
    with PrefixStore(path) as store:
        exported = store.export(IDS[:650], tmp_path / "text.kv", model=MODEL)
        whole = store.export(IDS, tmp_path / "whole.kv", model=MODEL)
        stored = store.get(IDS, model=MODEL).layers
    assert exported.is_lossy and "LOSSY" in str(exported) and "LOSSLESS" not in str(exported)
    _, ids, layers = read_exported(tmp_path / "whole.kv")
    assert whole.is_lossy and ids.tolist() == IDS and are_equal(layers, stored, 700)
    with PrefixStore(tmp_path / "dense") as store, pytest.raises(OptionError, match="is LOSSY"):
        store.import_file(tmp_path / "text.kv")
    note = "units that have other texts as well were rounded once more without them"
    assert (exported.notes, whole.notes) == ((note,), ()) and note in str(exported)
    with PrefixStore(tmp_path / "t", codec="transform", profile=PROFILE, codec_options={"kl": 0.02}) as store:
        result = store.import_file(tmp_path / "text.kv")
        assert result.is_lossy and result.predicted_kl is None and "expected" not in str(result)
        assert "text.kv: is LOSSY, and its words were rounded once more" in str(result)
        assert store.get(IDS, model=MODEL).loss.startswith("K and V are rounded before they were put")
        assert measure_error(store.get(IDS, model=MODEL).layers, [take(cache, 650) for cache in CACHES]) < 0.2


def test_losses_before_a_put_are_of_the_texts_that_had_them(tmp_path: Path) -> None:
    """Next to texts that were rounded before, or twice by an import, an exact one was rounded by the store alone."""
    exact_ids, cast_ids = [index + 2000 for index in range(200)], [index + 5000 for index in range(200)]
    exported_path = save_store(tmp_path)
    with PrefixStore(exported_path) as store:
        store.export(IDS[:650], tmp_path / "text.kv", model=MODEL)
    layers = [take(cache, 200) for cache in CACHES]
    with PrefixStore(tmp_path / "t", codec="transform", profile=PROFILE, codec_options={"kl": 0.02}) as store:
        store.put(exact_ids, layers, model=MODEL)
        nats = store.describe(exact_ids, model=MODEL).predicted_kl
        store.put(cast_ids, layers, model=MODEL, loss="rounded by a cast")
        store.import_file(tmp_path / "text.kv")
        for ids in (cast_ids, IDS[:650]):
            loss = store.get(ids, model=MODEL).loss
            assert "rounded by a cast" in loss and "K and V are rounded before they were put" in loss
            assert store.describe(ids, model=MODEL).predicted_kl is None
        assert store.get(exact_ids, model=MODEL).loss == store.get_by_layer(exact_ids, model=MODEL).loss == ""
        stat = store.describe(exact_ids, model=MODEL)
        assert (stat.loss, stat.predicted_kl) == ("K and V are rounded (transform streams)", nats) and nats is not None
        assert store.export(exact_ids, tmp_path / "exact.kv", model=MODEL).loss == ""


@pytest.mark.parametrize(
    ("options", "block_tokens", "is_equal"),
    [
        ({"kl": 0.02}, 64, True),
        ({"kl": 0.03}, 64, False),
        ({"kl": 0.02, "first": 8}, 64, False),
        ({"kl": 0.02}, 48, False),
    ],
)
@pytest.mark.parametrize("with_attention", [False, True])
def test_import_of_lossy_units_of_equal_options_stores_the_same_streams(
    tmp_path: Path, options: dict[str, float], block_tokens: int, is_equal: bool, with_attention: bool
) -> None:
    attention = np.random.default_rng(3).uniform(0.1, 1, (4, 2, 700)) if with_attention else None
    with PrefixStore(tmp_path / "s", codec="transform", profile=PROFILE, codec_options={"kl": 0.02}) as store:
        for tokens in (64, 512, 700):  # units that a single put would not make
            part = None if attention is None else attention[:, :, :tokens]
            layers = [take(cache, tokens) for cache in CACHES]
            store.put(IDS[:tokens], layers, model=MODEL, attention=part)
        stored = store.get(IDS, model=MODEL).layers
        assert store.export(IDS, tmp_path / "text.kv", model=MODEL).notes == ()
    path = tmp_path / "t"
    with PrefixStore(
        path, codec="transform", profile=PROFILE, codec_options=options, block_tokens=block_tokens, namespace="team"
    ) as store:
        result = store.import_file(tmp_path / "text.kv")
        imported = store.get(IDS, model=MODEL).layers
        assert store.verify().damaged == ()
        assert (store.get(IDS, model=MODEL).loss == "") == is_equal
    assert ("rounded once more" in str(result), result.predicted_kl is None) == (not is_equal, not is_equal)
    if is_equal:
        assert are_equal(imported, stored, 700) and "0.02 nats a token expected" in str(result)
        streams = [[read_streams(file) for file in sorted(tmp_path.glob(f"{name}/units/*/*.unit"))] for name in "st"]
        assert streams[0] == streams[1] and len(streams[0]) == 3


def test_store_stats_count_units_with_steps_by_attention(tmp_path: Path) -> None:
    attention = np.random.default_rng(3).uniform(0.1, 1, (4, 2, 700))
    with PrefixStore(tmp_path / "s", codec="transform", profile=PROFILE) as store:
        store.put(IDS, CACHES, model=MODEL)
        assert store.stats().attention_units == 0
        store.put(IDS, CACHES, model="other", attention=attention)
        stats = store.stats()
    assert (stats.units, stats.attention_units, stats.to_dict()["attention_units"]) == (4, 2, 2)
    assert "2 of 4 units with steps by attention" in str(stats)
    with PrefixStore(tmp_path / "t", codec="profile", profile=make_profile()) as store:
        assert store.stats().attention_units is None and "attention" not in str(store.stats())


def read_streams(path: Path) -> list[bytes]:
    """The streams of a unit's file."""
    return [bytes(frame.data) for frame in parse_unit(np.frombuffer(path.read_bytes(), np.uint8)).frames]


def test_windows_of_a_model_leave_the_other_layers_alone(tmp_path: Path) -> None:
    """Layers below which a window lies are coded without it."""
    window = LayerCache(
        layer=1,
        keys=CACHES[1].keys[:, -16:],
        values=CACHES[1].values[:, -16:],
        positions=np.arange(684, 700),
        tokens_seen=700,
    )
    layers = [CACHES[0], window, *CACHES[2:]]
    with PrefixStore(tmp_path / "s", codec="transform", profile=PROFILE, codec_options={"kl": 0.02}) as store:
        store.put(IDS, layers, model=MODEL, windows=[1])
        prefix = store.get(IDS, model=MODEL)
    assert (prefix.tokens, [cache.tokens for cache in prefix.layers]) == (700, [700, 16, 700, 700])
    assert np.array_equal(prefix.layers[1].keys, window.keys)
    assert measure_error(prefix.layers[2:], CACHES[2:]) < 0.2


@pytest.mark.parametrize("engine", ["directory", "memory"])
def test_put_names_the_loss_of_units_alone_that_had_it_before_the_put(
    new_url: Callable[[str], str], engine: str
) -> None:
    cast_ids, loss = [3, *IDS[:199]], "rounded by a cast"
    layers = [take(cache, 200) for cache in CACHES]
    with PrefixStore(new_url(engine), codec="transform", profile=PROFILE, codec_options={"kl": 0.02}) as store:
        store.put(cast_ids, layers, model=MODEL, loss=loss)
        for _ in range(2):
            assert store.put(IDS[:200], layers, model=MODEL).notes == ()
        (note,) = store.put(IDS[:200], layers, model=MODEL, loss=loss).notes
        assert (
            note == f"200 tokens stay as they were stored before, and have not lost what these K and V had lost: {loss}"
        )
        (note,) = store.put(cast_ids, layers, model=MODEL).notes
        assert f"what these have not: {loss} (store rm of all texts that begin so, then put)" in note


def test_turns_of_a_chat_share_lossy_units(tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s", codec="transform", profile=PROFILE, codec_options={"kl": 0.02}) as store:
        for tokens in itertools.accumulate([100, 64, 1, 300]):
            put = store.put(IDS[:tokens], [take(cache, tokens) for cache in CACHES], model=MODEL)
            assert put.stored_tokens == tokens
            assert store.get(IDS, model=MODEL).tokens == tokens
        assert measure_error(store.get(IDS, model=MODEL).layers, [take(cache, 465) for cache in CACHES]) < 0.2


def test_loss_of_a_profile_without_sensitivities_is_not_predicted(tmp_path: Path) -> None:
    profile = transform_samples.create_profile(GEOMETRY, is_measured=False)
    with PrefixStore(tmp_path / "s", codec="transform", profile=profile, codec_options={"ratio": 4}) as store:
        put = store.put(IDS, CACHES, model=MODEL)
        assert put.predicted_kl is None and "(transform streams), nats not known" in str(put)
        assert store.get(IDS, model=MODEL).predicted_kl is None
        described = store.describe(IDS, model=MODEL)
        assert described.predicted_kl is None and "(transform streams), nats not known" in str(described)
        assert "all of them were stored already, and stay as they were rounded" in str(
            store.put(IDS, CACHES, model=MODEL)
        )


@pytest.mark.parametrize("codec", ["profile", "transform"])
def test_put_of_layers_with_gaps_says_which_tables_the_profile_lacks(tmp_path: Path, codec: str) -> None:
    profile = transform_samples.create_profile(GEOMETRY, (2,))
    layers = [CACHES[0], CACHES[2]]
    if codec == "profile":
        whole = make_profile()
        tables = {name: table for name, table in whole.arrays.items() if name.split("/")[-2] not in ("0", "1")}
        profile, layers = Profile(whole.info, tables), make_cache(20, "fp32")[1:]
    with PrefixStore(tmp_path / "s", codec=codec, profile=profile) as store:
        with pytest.raises(KvmnnError, match=r"below.* units of layers? [0-9, to]+ need them"):
            store.put(list(range(layers[0].tokens)), layers, model=MODEL)
        assert store.stats().units == 0


def test_put_of_random_numbers_stores_no_predicted_loss(tmp_path: Path) -> None:
    """Their bits belie the profile: the streams say that, so later calls do, too."""
    random = np.random.default_rng(3)
    caches = [
        LayerCache(
            layer=cache.layer,
            keys=(8 * random.standard_normal(cache.keys.shape)).astype(np.float16),
            values=(8 * random.standard_normal(cache.values.shape)).astype(np.float16),
        )
        for cache in CACHES
    ]
    with PrefixStore(tmp_path / "s", codec="transform", profile=PROFILE, codec_options={"kl": 0.02}) as store:
        put = store.put(IDS, caches, model=MODEL)
        assert put.predicted_kl is None and "nats not known" in str(put)
        assert any("times the bits that the profile predicts" in note for note in put.notes)
        prefix = store.get(IDS, model=MODEL)
        assert prefix.predicted_kl is None and measure_error(prefix.layers, caches) < 0.2
        assert "nats not known" in str(store.describe(IDS, model=MODEL)) and store.verify().damaged == ()
        other_ids = [index + 1 for index in IDS]
        assert store.put(other_ids, CACHES, model=MODEL).predicted_kl == pytest.approx(0.02)
        store.export(IDS, tmp_path / "e.kvmnn", model=MODEL)
    with PrefixStore(tmp_path / "t", codec="transform", profile=PROFILE, codec_options={"kl": 0.02}) as store:
        imported = store.import_file(tmp_path / "e.kvmnn")
        assert imported.predicted_kl is None and "nats not known" in str(imported)
        assert any("times the bits that the profile predicts" in note for note in imported.notes)
