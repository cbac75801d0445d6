"""Folders of layer streams: what comes back, what they say, and what is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transform_samples

import kvmnn
from kvmnn.arrays import LayerCache
from kvmnn.arrays.completeness import Completeness, LayerStateInfo
from kvmnn.calibration.maker import build_linear_tables, build_transform_tables
from kvmnn.dense import RopeConfig
from kvmnn.errors import KvmnnError, OptionError, SourceError
from kvmnn.formats.layer_streams.codecs import CacheEncoder, LayerStreamOptions
from kvmnn.formats.layer_streams.document import LAYERS_NAME, LayerCodec
from kvmnn.formats.layer_streams.reader import inspect_layers, restore_layers, verify_layers
from kvmnn.formats.layer_streams.writer import encode_layers, measure_errors, measure_layers
from kvmnn.formats.options import ReadOptions
from kvmnn.profiles import LayerGeometry, Profile, ProfileInfo, Statistics

ROPE = RopeConfig(10000.0, 8)
LAYERS, HEADS, DIM = 4, 2, 8


def make_cache(tokens: int, seed: int) -> list[LayerCache]:
    """K and V that follow from one another, as a model's do."""
    rng = np.random.default_rng(7)
    mixes = [rng.normal(size=(6, 2, HEADS * DIM)) for _ in range(LAYERS)]
    base = np.random.default_rng(seed).normal(size=(tokens, 6))
    layers = []
    for layer, mix in enumerate(mixes):
        noise = 0.05 * np.random.default_rng(seed + layer).normal(size=(tokens, 2, HEADS * DIM))
        rows = np.einsum("ti,ipn->tpn", base, mix) + noise
        keys, values = (rows[:, part].reshape(tokens, HEADS, DIM).transpose(1, 0, 2) for part in (0, 1))
        layers.append(LayerCache(layer=layer, keys=keys.astype(np.float16), values=values.astype(np.float16)))
    return layers


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    caches = make_cache(900, 1)
    statistics = Statistics([LayerGeometry.from_cache(cache, ROPE) for cache in caches])
    statistics.add(caches)
    arrays: dict[str, Any] = {}
    for below in range(3):
        arrays |= build_linear_tables(statistics, below=below)
        arrays |= build_transform_tables(statistics, None, np.ones((LAYERS, 2)), below=below)
    info = ProfileInfo(model="tiny", fingerprint=None, dtype="fp16", texts=(), layers=statistics.layers)
    path = tmp_path_factory.mktemp("profile") / "tiny.kvmp"
    Profile(info, arrays).write(path)
    return path


def save_folder(folder: Path, layers: list[LayerCache], suffix: str = "") -> Path:
    folder.mkdir()
    for cache in layers:
        np.save(folder / f"layer_{cache.layer}{suffix}.key.npy", cache.keys)
        np.save(folder / f"layer_{cache.layer}{suffix}.value.npy", cache.values)
    return folder


@pytest.fixture
def encoded(tmp_path: Path, profile: Path) -> Iterator[tuple[Path, Path]]:
    """A cache and its layer streams, the profile next to these."""
    cache = save_folder(tmp_path / "cache", make_cache(200, 2))
    shutil.copy(profile, tmp_path / "tiny.kvmp")
    options = LayerStreamOptions(codec="profile", profile=str(tmp_path / "tiny.kvmp"))
    encode_layers(kvmnn.open(cache), tmp_path / "streams", options)
    yield cache, tmp_path / "streams"


def test_layer_streams_written_over_frames_and_other_streams_leave_none_of_them(tmp_path: Path, profile: Path) -> None:
    cache, streams = save_folder(tmp_path / "cache", make_cache(200, 2)), tmp_path / "streams"
    kvmnn.bundle.encode(cache, f"{streams}/")
    for codec, suffix in (("profile", ".kvml"), ("transform", ".kvmx")):
        options = LayerStreamOptions(codec=codec, profile=str(profile))
        document = encode_layers(kvmnn.open(cache), streams, options, force=True).document
        names = {path.name for path in streams.iterdir()}
        assert names == {"layers.json", *(entry.file for entry in document.layers)}
        assert all(name.endswith((suffix, ".json")) for name in names)


def test_folder_of_layer_streams_and_frames_is_refused_by_every_reader(
    encoded: tuple[Path, Path], tmp_path: Path, run: Any
) -> None:
    _, mixture = encoded
    frames = tmp_path / "frames"
    kvmnn.bundle.encode(save_folder(tmp_path / "later", make_cache(200, 3)), f"{frames}/")
    shutil.copytree(frames, mixture, dirs_exist_ok=True)
    reason = (
        f"{mixture}: has both manifest.json and layers.json: two encodings, perhaps of different texts; remove one, "
        f"or name the file ({mixture / 'manifest.json'})"
    )
    for read in (
        lambda: kvmnn.open(mixture),
        lambda: kvmnn.bundle.open_frames(str(mixture)),
        lambda: kvmnn.formats.restore(str(mixture), tmp_path / "x.npz"),
    ):
        with pytest.raises(SourceError) as caught:
            read()
        assert str(caught.value) == reason
    for words in (
        ("verify", mixture),
        ("inspect", mixture),
        ("decode", mixture, "-o", tmp_path / "x.npz"),
        ("diff", mixture, frames),
        ("encode", mixture, "--codec", f"profile:{tmp_path / 'tiny.kvmp'}", "-o", f"{tmp_path / 'x'}/"),
        ("encode", mixture, "--codec", "dense", "-o", f"{tmp_path / 'x'}/"),
        ("mnn", "pack", mixture, "-o", f"{tmp_path / 'x'}/"),
        ("mnn", "unpack", mixture, "-o", tmp_path / "x.npz"),
        ("store", "put", tmp_path / "x", mixture, "--token-ids", "1,2"),
    ):
        assert reason in run(*words, code=1).err, words
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("x")]
    assert reason in run("verify", mixture, "--jobs", 1, code=1).out

    for name, cache in (("manifest.json", tmp_path / "later"), ("layers.json", tmp_path / "cache")):
        assert "LOSSLESS" in run("verify", mixture / name).out
        assert "bit by bit" in run("diff", mixture / name, cache).out
    run("encode", tmp_path / "later", "--codec", f"profile:{tmp_path / 'tiny.kvmp'}", "-o", f"{mixture}/", "-f")
    assert "bit by bit" in run("diff", mixture, tmp_path / "later").out
    assert not [*mixture.glob("*.frame"), *mixture.glob("manifest.json")]


@pytest.mark.parametrize("settings", [{}, {"below": 0}, {"below": 1}])
def test_layer_streams_give_the_same_files(tmp_path: Path, profile: Path, settings: dict[str, Any]) -> None:
    cache = save_folder(tmp_path / "cache", make_cache(200, 2))
    options = LayerStreamOptions(codec="profile", profile=str(profile), settings=settings)
    result = encode_layers(kvmnn.open(cache), tmp_path / "streams", options)
    assert result.label == "LOSSLESS" and result.ratio > 1 and result.tokens == 200
    assert "LOSSLESS (decoded and compared)" in str(result) and result.document.options == settings
    restored = restore_layers(str(tmp_path / "streams"), str(tmp_path / "back") + "/")
    assert restored.label == "LOSSLESS"
    for path in cache.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    assert verify_layers(str(tmp_path / "streams")).label == "LOSSLESS"
    assert verify_layers(str(tmp_path / "streams"), kvmnn.open(cache)).proof == "bytes"


@pytest.mark.parametrize("codec", ["profile", "transform"])
def test_layer_streams_say_which_state_is_missing(tmp_path: Path, profile: Path, codec: LayerCodec) -> None:
    source, folder = kvmnn.open(save_folder(tmp_path / "cache", make_cache(200, 2))), str(tmp_path / "streams")
    missing = "200 of 300 tokens that the model has seen are stored, and nothing tells which"
    states = tuple(LayerStateInfo(layer=layer) for layer in range(LAYERS))
    source.completeness = Completeness(layers=states, evicted=missing)
    settings = {"bits": 4.0} if codec == "transform" else {}
    result = encode_layers(source, folder, LayerStreamOptions(codec=codec, profile=str(profile), settings=settings))
    verified = verify_layers(folder, source, profile=profile)
    hashed = verify_layers(folder, profile=profile)
    measured = measure_layers(source, LayerStreamOptions(codec=codec, profile=str(profile), settings=settings))
    for shown in (result, verified, hashed, measured):
        assert f"{shown.label} for these arrays (" in str(shown) and f"incomplete: {missing}" in str(shown)
        assert shown.to_dict()["completeness"]["missing"] == [missing]
    assert f"  incomplete: {missing}" in str(inspect_layers(folder))
    restored = restore_layers(folder, str(tmp_path / "back"), ReadOptions(profile=str(profile)))
    assert f"incomplete: {missing}" in restored.notes
    assert kvmnn.open(tmp_path / "back").completeness.missing == [missing]


def test_layer_streams_are_smaller_with_lower_layers(tmp_path: Path, profile: Path) -> None:
    cache = save_folder(tmp_path / "cache", make_cache(200, 3))
    sizes = []
    for below in range(3):
        options = LayerStreamOptions(codec="profile", profile=str(profile), settings={"below": below})
        sizes.append(encode_layers(kvmnn.open(cache), tmp_path / f"s{below}", options).stored_bytes)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2]


def test_layer_streams_open_as_a_source(encoded: tuple[Path, Path]) -> None:
    cache, streams = encoded
    for path in (streams, streams / LAYERS_NAME):
        source = kvmnn.open(path)
        assert set(source) == set(kvmnn.open(cache))
    for name in reversed(list(source)):  # each order gives the same
        assert source[name].to_numpy().tobytes() == np.load(cache / f"{name}.npy").tobytes()
    selected = kvmnn.open(streams, tensors=("layer_2.value",))
    assert selected.names == ("layer_2.value",)


def test_layer_streams_of_other_layouts(tmp_path: Path, profile: Path) -> None:
    layers = make_cache(40, 4)
    stacked = {
        "k": np.stack([cache.keys for cache in layers]),
        "v": np.stack([cache.values for cache in layers]),
    }
    np.savez(tmp_path / "stacked.npz", **stacked)
    options = LayerStreamOptions(codec="profile", profile=str(profile))
    encode_layers(kvmnn.open(tmp_path / "stacked.npz"), tmp_path / "streams", options)
    source = kvmnn.open(tmp_path / "streams")
    assert all((source[f"layer_{c.layer}.key"].to_numpy() == c.keys).all() for c in layers)
    dump = {
        f"layer_{c.layer}.{p}": e.transpose(1, 0, 2) for c in layers for p, e in (("key", c.keys), ("value", c.values))
    }
    np.savez(tmp_path / "thd.npz", **dump)
    encode_layers(kvmnn.open(tmp_path / "thd.npz", axes="thd"), tmp_path / "thd", options)
    source = kvmnn.open(tmp_path / "thd")
    assert all(
        np.array_equal(source[name].to_numpy().reshape(array.shape), array) for name, array in dump.items()
    ) or all(np.array_equal(source[name].to_numpy(), array.transpose(1, 0, 2)) for name, array in dump.items())


def test_layer_streams_predicted_kl_other_than_in_headers_is_refused(tmp_path: Path, profile: Path) -> None:
    cache, folder = save_folder(tmp_path / "cache", make_cache(20, 5)), tmp_path / "streams"
    for settings in ({"kl": 0.01}, {"first": 20}):  # of the latter all tokens are exact: 0
        options = LayerStreamOptions(codec="transform", profile=str(profile), settings=settings)
        document = encode_layers(kvmnn.open(cache), folder, options, force=True).document
        assert document.predicted_kl == pytest.approx(settings.get("kl", 0), rel=1e-6)
        assert inspect_layers(str(folder)).document == verify_layers(str(folder)).document == document
    text = (folder / LAYERS_NAME).read_text()
    for value in ("0.001", "null"):
        (folder / LAYERS_NAME).write_text(text.replace('"predicted_kl": 0.0', f'"predicted_kl": {value}'))
        for call in (inspect_layers, verify_layers):
            with pytest.raises(KvmnnError, match=r"layers\.json: predicted_kl is .*: expected 0\.002, the sum"):
                call(str(folder))


@pytest.mark.parametrize("settings", [{"kl": 0.01}, {"ratio": 4.0, "below": 0}, {"bits": 3.0, "recent": 20}])
def test_transform_streams_say_lossy_and_keep_their_promise(
    tmp_path: Path, profile: Path, settings: dict[str, Any]
) -> None:
    layers = make_cache(200, 5)
    cache = save_folder(tmp_path / "cache", layers)
    options = LayerStreamOptions(codec="transform", profile=str(profile), settings=settings)
    result = encode_layers(kvmnn.open(cache), tmp_path / "streams", options)
    assert result.label == "LOSSY" and "LOSSLESS" not in str(result) and result.predicted_kl is not None
    for entry in result.layers:
        assert entry.errors is not None and entry.errors.relative_key_error > 0
    source = kvmnn.open(tmp_path / "streams")
    assert any("LOSSY" in note for note in source.notes)
    for cache_layer in layers:
        decoded = source[f"layer_{cache_layer.layer}.key"].to_numpy()
        assert (decoded[:, :4] == cache_layer.keys[:, :4]).all()
        if "recent" in settings:
            assert (decoded[:, -20:] == cache_layer.keys[:, -20:]).all()
    restored = restore_layers(str(tmp_path / "streams"), str(tmp_path / "back.npz"))
    assert restored.label == "LOSSY" and "LOSSLESS" not in str(restored)
    for against in (None, kvmnn.open(cache)):
        verified = verify_layers(str(tmp_path / "streams"), against)
        assert verified.ok and verified.label == "LOSSY" and "LOSSLESS" not in str(verified)
        figures = {name: getattr(result.document, name) for name in ("tokens", "raw_bytes", "stored_bytes", "ratio")}
        assert {name: verified.to_dict()[name] for name in figures} == figures
    other = save_folder(tmp_path / "other", make_cache(200, 6))
    assert not verify_layers(str(tmp_path / "streams"), kvmnn.open(other)).ok


def test_layer_streams_list_losses_in_the_order_in_which_they_happened(tmp_path: Path, profile: Path) -> None:
    cache = save_folder(tmp_path / "cache", make_cache(100, 5))
    cast = {"schema": "kvmnn-loss", "schema_version": 1, "loss": "rounded by a cast: fp32 to fp16"}
    (cache / "loss.json").write_text(json.dumps(cast))
    options = LayerStreamOptions(codec="transform", profile=str(profile), settings={"kl": 0.01})
    encoded = encode_layers(kvmnn.open(cache), tmp_path / "streams", options)
    restored = restore_layers(str(tmp_path / "streams"), str(tmp_path / "back.npz"))
    texts = [
        str(encoded),
        str(restored),
        str(inspect_layers(str(tmp_path / "streams"))),
        kvmnn.open(tmp_path / "streams").metadata["kvmnn.lossy"],
    ]
    for text in texts:
        assert 0 < text.index("a cast: fp32") < text.index("K and V are rounded"), text
        assert text.count("a cast: fp32") == 1


def test_layer_streams_name_the_profile_that_is_missing(
    encoded: tuple[Path, Path], profile: Path, tmp_path: Path
) -> None:
    _, streams = encoded
    info = inspect_layers(str(streams))
    key = info.document.profile_key
    assert info.label is None and key[:16] in str(info)
    (tmp_path / "tiny.kvmp").unlink()
    for action in (kvmnn.open, lambda path: verify_layers(str(path))):
        with pytest.raises(KvmnnError, match=f"{key[:16]}.*--profile"):
            action(streams)
    assert verify_layers(str(streams), profile=profile).ok
    (streams / "renamed.kvmp").write_bytes(profile.read_bytes())
    assert verify_layers(str(streams)).ok
    changed = Profile(ProfileInfo(**{**vars(Profile.read(profile).info), "model": "x"}), Profile.read(profile).arrays)
    changed.write(tmp_path / "changed.kvmp")
    with pytest.raises(KvmnnError, match=f"{key[:16]}.*{changed.key.hex()[:16]}"):
        verify_layers(str(streams), profile=tmp_path / "changed.kvmp")


def test_layer_streams_of_heads_with_other_tokens_need_no_profile(tmp_path: Path, profile: Path) -> None:
    layers = make_cache(200, 2)
    heads = [list(range(120)), list(range(80, 200))]
    cut = [
        LayerCache(
            layer=layer.layer,
            keys=np.stack([layer.keys[head, rows] for head, rows in enumerate(heads)]),
            values=np.stack([layer.values[head, rows] for head, rows in enumerate(heads)]),
            positions=np.array(heads),
        )
        for layer in layers
    ]
    cache, streams = save_folder(tmp_path / "cache", cut), tmp_path / "streams"
    (cache / "positions.json").write_text(
        json.dumps({"tokens_seen": 200, "layers": [{"layer": i, "positions": heads} for i in range(LAYERS)]})
    )
    shutil.copy(profile, tmp_path / "tiny.kvmp")
    options = LayerStreamOptions(codec="profile", profile=str(tmp_path / "tiny.kvmp"))
    note = "no layer was predicted (heads hold different tokens): decoding needs no profile, and --codec dense is as"
    measured = measure_layers(kvmnn.open(cache), options)
    result = encode_layers(kvmnn.open(cache), streams, options)
    (tmp_path / "tiny.kvmp").unlink()
    verified = verify_layers(str(streams), kvmnn.open(cache))
    for found in (measured, result, verified, inspect_layers(str(streams))):
        assert note in str(found) and "needs the profile" not in str(found) and found.model_profile_bytes is None
    assert verified.label == "LOSSLESS"
    restore_layers(str(streams), str(tmp_path / "back") + "/")
    for path in cache.glob("*.npy"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(KvmnnError, match=r"absent\.kvmp"):
        verify_layers(str(streams), profile=tmp_path / "absent.kvmp")


def test_inspect_layer_streams_that_are_missing_counts_what_is_there(encoded: tuple[Path, Path]) -> None:
    _, streams = encoded
    whole = inspect_layers(str(streams))
    assert whole.is_loadable and "missing" not in whole.to_dict()
    stream = streams / "layer_2.kvml"
    stream.write_bytes(stream.read_bytes()[:-1])
    assert inspect_layers(str(streams)).missing == ("layer_2.kvml",)
    stream.unlink()
    info = inspect_layers(str(streams))
    present = [entry for entry in info.document.layers if entry.layer != 2]
    num_layers = len(info.document.layers)
    assert not info.is_loadable and info.to_dict()["missing"] == ["layer_2.kvml"]
    assert f"{num_layers - 1} of {num_layers} layer streams (" in str(info) and "INCOMPLETE: layer_2.kvml" in str(info)
    sizes = (sum(entry.raw_bytes for entry in present), sum(entry.nbytes for entry in present))
    assert f"{sizes[0]:,} -> {sizes[1]:,} bytes" in str(info)


def test_layer_streams_that_are_damaged_are_refused(encoded: tuple[Path, Path]) -> None:
    cache, streams = encoded
    stream = streams / "layer_2.kvml"
    data = stream.read_bytes()
    for damaged in (data[:-1], data[:100] + bytes([data[100] ^ 1]) + data[101:], b""):
        stream.write_bytes(damaged)
        with pytest.raises(KvmnnError, match=r"layer_2\.kvml"):
            verify_layers(str(streams))
        with pytest.raises(KvmnnError, match=r"layer_2\.kvml"):
            kvmnn.open(streams)["layer_3.key"].to_numpy()
    stream.unlink()
    with pytest.raises(KvmnnError, match="does not exist"):
        verify_layers(str(streams))
    stream.write_bytes(data)
    np.save(cache / "layer_1.key.npy", np.zeros((HEADS, 200, DIM), np.float16))
    result = verify_layers(str(streams), kvmnn.open(cache))
    assert not result.ok and result.label == "DIFFERS" and "layer_1.key" in str(result)


def test_layers_documents_are_read_strictly(encoded: tuple[Path, Path]) -> None:
    _, streams = encoded
    document = json.loads((streams / LAYERS_NAME).read_text())
    hostile: list[tuple[str, Any]] = [
        ("schema", "other"),
        ("schema_version", 2),
        ("codec", "zip"),
        ("profile_key", "00"),
        ("profile_file", 3),
        ("options", []),
        ("predicted_kl", "x"),
        ("lossy", True),
        ("metadata", {"a": 1}),
        ("raw_bytes", 1),
        ("stored_bytes", 1),
        ("layers", []),
        ("layers", document["layers"][1:]),
        ("layers", [{**document["layers"][0], "file": "../x"}, *document["layers"][1:]]),
        ("layers", [{**document["layers"][0], "file": "layer_1.kvml"}, *document["layers"][1:]]),
        ("layers", [{**document["layers"][0], "bytes": 0}, *document["layers"][1:]]),
        ("layers", [{**document["layers"][0], "arrays": document["layers"][0]["arrays"][:1]}, *document["layers"][1:]]),
        ("layers", [{**document["layers"][0], "arrays": document["layers"][1]["arrays"]}, *document["layers"][1:]]),
    ]
    for key, value in hostile:
        (streams / LAYERS_NAME).write_text(json.dumps(document | {key: value}))
        with pytest.raises(KvmnnError, match=r"layers\.json"):
            kvmnn.open(streams)
    for text in ("", "[]", "{" * 10000):
        (streams / LAYERS_NAME).write_text(text)
        with pytest.raises(KvmnnError, match=r"layers\.json"):
            kvmnn.open(streams)


def test_encode_layers_refuses_what_the_profile_is_not_of(tmp_path: Path, profile: Path) -> None:
    options = LayerStreamOptions(codec="profile", profile=str(profile))
    layers = make_cache(20, 8)
    wide = [LayerCache(layer=c.layer, keys=c.keys[:1], values=c.values[:1]) for c in layers]
    more = [*layers, LayerCache(layer=LAYERS, keys=layers[0].keys, values=layers[0].values)]
    late = "has K and V of layers 1 to 3 without layer 0: layer streams are decoded from layer 0 up"
    gap = "has K and V of layers 0, 2 to 3 without layer 1"
    lossy_options = LayerStreamOptions(codec="transform", profile=str(profile), settings={"below": 0})
    for name, caches, match in (
        ("wide", wide, "layer 0"),
        ("more", more, "layer 4"),
        ("late", layers[1:], late),
        ("gap", [layers[0], *layers[2:]], gap),
    ):
        source = kvmnn.open(save_folder(tmp_path / name, caches))
        for stream_options in (options, lossy_options):
            with pytest.raises(KvmnnError, match=match):
                encode_layers(source, tmp_path / "streams", stream_options)
        assert not (tmp_path / "streams").exists()
    with pytest.raises(KvmnnError, match="does not exist"):
        encode_layers(source, tmp_path / "streams", LayerStreamOptions(codec="profile", profile="none.kvmp"))
    with pytest.raises(KvmnnError, match="kl"):
        options = LayerStreamOptions(codec="transform", profile=str(profile), settings={"kl": -1.0})
        encode_layers(kvmnn.open(save_folder(tmp_path / "fine", layers)), tmp_path / "streams", options)


@pytest.mark.parametrize(("codec", "name"), [("profile", "kl"), ("transform", "attention")])
def test_layer_stream_options_unknown_setting_is_refused(codec: LayerCodec, name: str) -> None:
    with pytest.raises(OptionError, match=f"settings has '{name}': expected .*below"):
        LayerStreamOptions(codec=codec, profile="p.kvmp", settings={name: 1})


def test_layer_stream_options_say_how_attention_and_profile_are_passed() -> None:
    with pytest.raises(
        OptionError, match=r"settings has 'attention': .* \(attention is passed as LayerStreamOptions\("
    ):
        LayerStreamOptions(codec="transform", profile="p.kvmp", settings={"ratio": 8, "attention": "att.npy"})
    with pytest.raises(OptionError, match="no profile given: codec 'transform' needs the path of one"):
        LayerStreamOptions(codec="transform")


def test_measure_errors_leaves_infinities_out_silently() -> None:
    keys = np.array([[[1.0, np.inf, np.nan, 4.0]]], np.float16)
    values = np.ones((1, 1, 4), np.float16)
    decoded = LayerCache(layer=0, keys=keys + np.float16(0.5), values=values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = measure_errors(LayerCache(layer=0, keys=keys, values=values), decoded)
    assert (errors.max_key_error, errors.max_value_error) == (0.5, 0.0)


def save_unlike(folder: Path, *, is_measured: bool) -> tuple[Path, list[LayerCache]]:
    """Write a profile; return its path and a cache of numbers that it does not predict."""
    geometries = transform_samples.create_geometries(LAYERS, 2, 8, 8, RopeConfig(10000.0, 8))
    profile = transform_samples.create_profile(geometries, is_measured=is_measured)
    profile.write(folder / "p.kvmp")
    random = np.random.default_rng(3)
    layers = [
        replace(
            layer,
            keys=(8 * random.standard_normal(layer.keys.shape)).astype(np.float16),
            values=(8 * random.standard_normal(layer.values.shape)).astype(np.float16),
        )
        for layer in transform_samples.create_caches(5, 200, geometries)
    ]
    return folder / "p.kvmp", layers


def test_encode_layers_of_upper_layers_unlike_the_profile_comes_near_a_ratio(tmp_path: Path) -> None:
    """Steps are chosen by the first layers, and once more by all of them where these miss the size."""
    geometries = transform_samples.create_geometries(10, 2, 8, 8, RopeConfig(10000.0, 8))
    transform_samples.create_profile(geometries).write(tmp_path / "p.kvmp")
    layers = [
        LayerCache(layer=cache.layer, keys=cache.keys * scale, values=cache.values * scale)
        for cache in transform_samples.create_caches(5, 300, geometries)
        for scale in [np.float16(1 if cache.layer < 4 else 3)]
    ]
    source = kvmnn.open(save_folder(tmp_path / "cache", layers))
    options = LayerStreamOptions(codec="transform", profile=str(tmp_path / "p.kvmp"), settings={"ratio": 6.0})
    first = CacheEncoder(Profile.read(tmp_path / "p.kvmp"), options)
    first_bytes = sum(len(layer.stream) for layer in first.encode(layers))
    result = encode_layers(source, tmp_path / "streams", options)
    ratios = source.nbytes / first_bytes, result.ratio
    assert first.size_change > 1.5 and abs(ratios[1] - 6) < 0.3 * abs(ratios[0] - 6), ratios
    assert measure_layers(source, options).stored_bytes == result.stored_bytes
    assert verify_layers(str(tmp_path / "streams"), source).ok
    assert sorted(path.name for path in (tmp_path / "streams").iterdir()) == sorted(
        [LAYERS_NAME, *(entry.file for entry in result.layers)]
    )
    second = first.create_second_try()
    assert second is not None and list(second.encode(layers)) and second.is_nearer_than(first)
    assert second.create_second_try() is None


def test_encode_layers_of_random_numbers_predicts_no_loss_in_any_verb(tmp_path: Path) -> None:
    """The doubt is in the folder: what reads it later knows no more than the encoder."""
    profile, layers = save_unlike(tmp_path, is_measured=True)
    source, folder = kvmnn.open(save_folder(tmp_path / "cache", layers)), str(tmp_path / "streams")
    options = LayerStreamOptions(codec="transform", profile=str(profile), settings={"kl": 0.02})
    encoded = encode_layers(source, folder, options)
    assert "the nats that it predicts do not hold" in str(encoded)
    restored = restore_layers(folder, str(tmp_path / "back.npz"))
    results = [encoded, measure_layers(source, options), inspect_layers(folder), verify_layers(folder), restored]
    loss = kvmnn.open(tmp_path / "back.npz").metadata["kvmnn.lossy"]
    for text in (*map(str, results), loss):
        assert "times the bits that the profile predicts" in text and "0.02 nats" not in text
    assert encoded.predicted_kl is None and encoded.document.bits_factor is not None
    layers_path = Path(folder, LAYERS_NAME)
    layers_path.write_text(layers_path.read_text().replace('"bits_factor": ', '"bits_factor": -'))
    with pytest.raises(KvmnnError, match=r"bits_factor.*a number above 0"):
        inspect_layers(folder)


def test_encode_layers_without_sensitivities_predicts_no_nats(tmp_path: Path) -> None:
    profile, layers = save_unlike(tmp_path, is_measured=False)
    source = kvmnn.open(save_folder(tmp_path / "cache", layers))
    options = LayerStreamOptions(codec="transform", profile=str(profile), settings={"bits": 2})
    shown = str(encode_layers(source, tmp_path / "streams", options))
    assert "times the bits that the profile predicts: its texts are few, unlike" in shown and "nats" not in shown
    assert "not known: the profile has no sensitivities" in shown
