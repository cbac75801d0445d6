"""Dense streams in bundles: which arrays become dense streams, their manifest entries, and the round trip."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import dense_decoder
import numpy as np
import pytest
from bundles import edit
from dense_samples import DTYPES, near_rows, rotated, to_dtype
from plain_dumps import contents, dump

import kvmnn
from kvmnn import RopeConfig, bundle, formats
from kvmnn.bundle import DenseOptions, EncodeOptions
from kvmnn.errors import FrameError, KvmnnError, ManifestError, OptionError
from kvmnn.formats.mnn import restore_dump

RANDOM = np.random.default_rng(3)
TOKENS = 90


def layer(dtype: str = "fp16", heads: int = 2, tokens: int = TOKENS, dim: int = 16, positions: Any = None) -> Any:
    """K, rotated, and V of a layer."""
    where = np.arange(tokens) if positions is None else positions
    keys, values = near_rows(RANDOM, heads, tokens, dim), near_rows(RANDOM, heads, tokens, dim)
    return to_dtype(rotated(keys, dim, 10000.0, where, "half"), dtype), to_dtype(values, dtype)


def cache(dtype: str = "fp16", layers: int = 2) -> dict[str, np.ndarray]:
    found = {}
    for number in range(layers):
        found[f"layer_{number}.key"], found[f"layer_{number}.value"] = layer(dtype)
    return found


DENSE = EncodeOptions(dense=DenseOptions(rotary=RopeConfig(dims=16)))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stored(folder: str) -> dict[str, list[tuple[str, str | None]]]:
    arrays = bundle.open_frames(folder).arrays
    return {array.name: [(entry.stored, entry.axes) for entry in array.frames] for array in arrays}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_bundle_round_trips_and_is_verified(dtype):
    arrays = cache(dtype)
    np.savez("kv.npz", **arrays)
    made = bundle.encode_source(kvmnn.open("kv.npz"), "d/", DENSE)
    assert made.label == "LOSSLESS" and "4 dense streams, LOSSLESS (decoded and compared)" in str(made)
    assert made.to_dict()["byte_exact"] is None
    assert stored("d") == {name: [("dense", "htd")] for name in arrays}
    document = json.loads(Path("d/manifest.json").read_text())
    assert document["schema_version"] == 3
    frames = bundle.open_frames("d")
    formats.restore(frames, "back.npz")
    with np.load("back.npz") as back:
        assert {name: back[name].tobytes() for name in back} == {name: kv.tobytes() for name, kv in arrays.items()}
    assert (bundle.verify_frame_set(frames).proof, bundle.verify_frame_set(frames, kvmnn.open("kv.npz")).proof) == (
        "sha256",
        "bytes",
    )
    source = kvmnn.open("d")
    assert source["layer_1.key"].to_numpy().tobytes() == arrays["layer_1.key"].tobytes()
    stream = Path("d/layer_1.key.frame").read_bytes()
    words = np.uint32 if dtype == "fp32" else np.uint16
    assert np.array_equal(dense_decoder.decode(stream), arrays["layer_1.key"].view(words))


def test_dense_bundle_rotates_keys_only():
    np.savez("kv.npz", **cache())
    turned = bundle.encode_source(kvmnn.open("kv.npz"), "d/", DENSE).manifest.arrays
    plain = bundle.encode_source(kvmnn.open("kv.npz"), "p/", EncodeOptions(dense=DenseOptions())).manifest.arrays
    for with_rotary, without in zip(turned, plain, strict=True):
        is_key = with_rotary.name.endswith("key")
        assert (with_rotary.stored_bytes < 0.95 * without.stored_bytes) == is_key
        stream = Path("d", with_rotary.frames[0].file).read_bytes()
        assert kvmnn.dense.inspect(stream).rotary == is_key


def test_dense_bundle_axes_of_layers_and_batches():
    keys, values = layer()
    np.savez(
        "kv.npz",
        **{
            "layer_0.key": keys,
            "layer_0.value": values.astype(">f2"),
            "layer_1.key": keys[None],
            "layer_1.value": np.stack([values, values[:, ::-1]]),
            "k": np.stack([keys, -keys, keys]),
            "v": np.stack([[values], [values]]),
            "mask": np.ones((3, 40), np.float16),
            "layer_2.key": np.asfortranarray(keys),
        },
    )
    made = bundle.encode_source(kvmnn.open("kv.npz"), "d/", DENSE)
    assert {name: len(found) for name, found in stored("d").items() if found[0] == ("dense", "htd")} == {
        "layer_0.key": 1,
        "layer_0.value": 1,
        "layer_1.key": 1,
        "layer_1.value": 2,
        "k": 3,
        "v": 2,
    }
    assert stored("d")["mask"] == stored("d")["layer_2.key"] == [("frame", None)]
    assert "10 dense streams, 2 frames, LOSSLESS" in str(made)
    assert bundle.verify_frame_set(bundle.open_frames("d"), kvmnn.open("kv.npz")).ok
    formats.restore(bundle.open_frames("d"), "back.npz")
    with np.load("back.npz") as back, np.load("kv.npz") as before:
        for name in before:
            assert (back[name].dtype, back[name].tobytes("A")) == (before[name].dtype, before[name].tobytes("A"))


def test_dense_bundle_of_dump_is_token_major():
    dump(Path("dumps/layer_0"), tokens=40)
    source = kvmnn.open("dumps")
    bundle.encode_source(source, "d/", EncodeOptions(dense=DenseOptions(rotary=RopeConfig(dims=4))))
    assert set(map(tuple, stored("d").values())) == {(("dense", "thd"),)}
    assert bundle.verify_frame_set(bundle.open_frames("d"), source).ok
    restore_dump(bundle.open_frames("d"), "again/")
    assert contents(Path("again")) == contents(Path("dumps"))


def test_dense_bundle_without_suitable_array_is_refused():
    np.savez("m.npz", mask=np.ones((3, 40), np.float16))
    with pytest.raises(OptionError, match="no array can be a dense stream: array 'mask': its name does not say"):
        bundle.encode_source(kvmnn.open("m.npz"), "d/", DENSE)
    np.save("k.npy", np.ones((2, 3, 8), np.float16))
    with pytest.raises(OptionError, match="has 8 words a head: 16 of them cannot be rotated"):
        bundle.encode_source(kvmnn.open("k.npy"), "k.frame", DENSE)
    np.savez("w.npz", k=np.zeros((200, 2, 400), np.float16))
    with pytest.raises(OptionError, match="above what a dense stream holds: 65,536 words a token"):
        bundle.encode_source(kvmnn.open("w.npz"), "d/", EncodeOptions(dense=DenseOptions()))
    np.savez("t.npz", k=np.zeros((300, 2, 4), np.float16))
    with pytest.raises(OptionError, match="it has 300 heads: where tokens come first, --axes says so"):
        bundle.encode_source(kvmnn.open("t.npz"), "d/", EncodeOptions(dense=DenseOptions()))
    assert not Path("d").exists()


def test_dense_bundle_token_ids_reduce_size_and_must_fit():
    ids = RANDOM.integers(0, 50, 200)
    rows = RANDOM.standard_normal((2, 50, 16))[:, ids] + 0.1 * RANDOM.standard_normal((2, 200, 16))
    np.savez("kv.npz", **{"layer_0.key": to_dtype(rows.astype(np.float32), "fp16")})
    for given in (ids, [*ids, 5, 6]):
        bundle.encode_source(kvmnn.open("kv.npz"), "d/", EncodeOptions(dense=DenseOptions(token_ids=given)), force=True)
        assert bundle.verify_frame_set(bundle.open_frames("d"), kvmnn.open("kv.npz")).ok
    with pytest.raises(OptionError, match="3 token ids are fewer than the tokens of every layer"):
        bundle.encode_source(kvmnn.open("kv.npz"), "e/", EncodeOptions(dense=DenseOptions(token_ids=[1, 2, 3])))


def test_dense_bundle_single_array_is_one_stream():
    keys, _ = layer("bf16")
    np.save("k.npy", keys)
    bundle.encode_source(kvmnn.open("k.npy"), "k.frame", DENSE)
    out = io.BytesIO()
    bundle.encode_source(kvmnn.open("k.npy"), out, DENSE)
    assert out.getvalue() == Path("k.frame").read_bytes() == kvmnn.dense.encode(keys, rotary=RopeConfig(dims=16))
    alone = bundle.open_frames("k.frame", use_manifest=False)
    assert (alone.arrays[0].shape, alone.arrays[0].dtype) == (keys.shape, "bf16")
    formats.restore(alone, "back.npy")
    assert np.array_equal(np.load("back.npy"), keys)
    assert bundle.verify_frame_set(alone).label == "DECODES"
    info = bundle.inspect_frame_set(alone)
    assert isinstance(info, bundle.BareFrameInfo) and info.to_dict()["kind"] == "dense"
    with pytest.raises(OptionError, match="the dense stream says bf16, not fp16"):
        bundle.open_frames("k.frame", use_manifest=False, options=bundle.DecodeOptions(dtype="fp16"))
    np.save("k.npy", np.stack([keys, keys]))
    with pytest.raises(OptionError, match="a stream carries one layer, array 'k' holds several"):
        bundle.encode_source(kvmnn.open("k.npy"), io.BytesIO(), DENSE)


def test_inspect_dense_bundle_accounts_for_every_byte():
    np.savez("kv.npz", **cache(), mask=np.ones((3, 40), np.float16))
    bundle.encode_source(kvmnn.open("kv.npz"), "d/", DENSE)
    found = bundle.inspect_frame_set(bundle.open_frames("d"))
    assert isinstance(found, bundle.BundleInfo)
    total = found.streams["fp16 dense"]
    assert total.chosen == {"dense rows": 4} and total.header_bytes == 4 * 28
    assert total.payload_bytes + total.header_bytes == sum(array.entry.stored_bytes for array in found.arrays[:4])
    assert sum(each.raw_bytes for each in found.streams.values()) == found.raw_bytes
    text = found.text(verbose=True)
    assert "layer_0.key    fp16 [2, 90, 16] C" in text and "1 dense stream\n" in text and "method rows, rotary" in text
    first = found.to_dict()["arrays"][0]["frames"][0]
    assert (first["stored"], first["axes"], first["streams"], first["dense"]["tokens"]) == ("dense", "htd", [], 90)
    verified = bundle.verify_frame_set(bundle.open_frames("d"))
    assert (verified.frames, verified.dense_streams, verified.raw_pieces) == (1, 4, 0)


def test_dense_bundle_incompressible_array_may_be_raw():
    noise = RANDOM.integers(0, 1 << 16, (2, 40, 16), np.uint16)
    np.savez("kv.npz", **{"layer_0.key": noise, "layer_0.value": layer()[1]})
    options = EncodeOptions(allow_raw=True, dense=DenseOptions())
    bundle.encode_source(kvmnn.open("kv.npz"), "d/", options)
    assert stored("d") == {"layer_0.key": [("raw", None)], "layer_0.value": [("dense", "htd")]}
    assert bundle.verify_frame_set(bundle.open_frames("d"), kvmnn.open("kv.npz")).ok


def test_dense_bundle_wrong_decoding_writes_nothing(monkeypatch):
    """A stream that does not decode to its input is refused before anything is written."""
    from kvmnn.bundle import dense

    np.savez("kv.npz", **cache())
    real = dense.dense.decode
    monkeypatch.setattr(dense.dense, "decode", lambda stream: real(stream)[:, ::-1])
    with pytest.raises(KvmnnError, match="a dense stream did not decode to its own input; nothing was written"):
        bundle.encode_source(kvmnn.open("kv.npz"), "d/", DENSE)
    assert not Path("d").exists()


# -- manifests that say otherwise --------------------------------------------------------------------------------------


def entry(document: Any) -> Any:
    return document["arrays"][0]["frames"][0]


LIES = {
    "version": (lambda d: d.update(schema_version=2), ManifestError, "expected 'frame': only version 3 of the schema"),
    "no axes": (lambda d: entry(d).pop("axes"), ManifestError, "arrays[0].frames[0].axes: is missing"),
    "axes": (lambda d: entry(d).update(axes="hdt"), ManifestError, "axes: found \"hdt\", expected 'htd' or 'thd'"),
    "other axes": (lambda d: entry(d).update(axes="thd"), FrameError, "manifest's fp16 [2, 90, 16] with axes thd"),
    "kind": (lambda d: entry(d).update(stored="tight"), ManifestError, "expected 'frame' or 'raw' or 'dense'"),
    "frame": (lambda d: (d.update(effort="exact"), entry(d).update(stored="frame")), FrameError, "layer_0.key"),
    "no effort": (lambda d: entry(d).update(stored="frame"), ManifestError, "a string, as there are frames"),
    "raw": (lambda d: entry(d).update(stored="raw"), ManifestError, "as the words are stored raw"),
    "shape": (lambda d: d["arrays"][0].update(shape=[2, 16, 90]), FrameError, "the manifest's fp16 [2, 16, 90]"),
    "flat": (lambda d: d["arrays"][0].update(shape=[2880]), FrameError, "does not fit the manifest's fp16 [2880]"),
    "order": (lambda d: d["arrays"][0].update(order="F"), FrameError, "does not fit the manifest's"),
    "dtype": (lambda d: d["arrays"][0].update(dtype="bf16"), FrameError, "holds fp16 [kv_head 2, token 90"),
    "array": (lambda d: d["arrays"][0].update(sha256="0" * 64), ManifestError, "do not match the manifest's sha256"),
    "stream": (lambda d: entry(d).update(sha256="0" * 64), ManifestError, "the dense stream does not match the"),
}


@pytest.mark.parametrize("lie", LIES)
def test_dense_bundle_inconsistent_manifest_is_refused(lie):
    change, error, message = LIES[lie]
    np.savez("kv.npz", **cache())
    bundle.encode_source(kvmnn.open("kv.npz"), "d/", DENSE)
    edit(Path("d/manifest.json"), change)
    with pytest.raises(error) as caught:
        bundle.verify_frame_set(bundle.open_frames("d"))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("d")


def test_dense_bundle_frame_as_dense_stream_is_refused():
    np.savez("kv.npz", **cache())
    bundle.encode_source(kvmnn.open("kv.npz"), "f/")
    edit(Path("f/manifest.json"), lambda d: (d.update(schema_version=3), entry(d).update(stored="dense", axes="htd")))
    with pytest.raises(FrameError, match=r"array 'layer_0\.key': no dense stream"):
        bundle.verify_frame_set(bundle.open_frames("f"))
