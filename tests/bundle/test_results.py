"""encode, verify, inspect and restore as library functions: the shell's JSON and text come from their results."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import packed_samples
import pytest

import kvmnn
from kvmnn import bundle, formats
from kvmnn.bundle import EncodeOptions
from kvmnn.errors import OptionError, OutputError

KEYS = np.random.default_rng(8).standard_normal((4, 30, 32)).astype(np.float16)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("keys.npy", KEYS)
    np.savez("both.npz", k=KEYS, v=-KEYS.astype(np.float32))
    return tmp_path


def timeless(result: object) -> dict[str, object]:
    document = result if isinstance(result, dict) else result.to_dict()  # type: ignore[attr-defined]
    return {key: value for key, value in document.items() if key not in ("seconds", "verb", "output")}


def test_encode_source_result_equals_command_json(here, run):
    made = bundle.encode_source(kvmnn.open("both.npz"), "one/", EncodeOptions(frame_bytes=4096))
    said = json.loads(run("encode", "both.npz", "-o", "two/", "--chunk-bytes", "4K", "--json").out)
    assert timeless(made) == timeless(said)
    assert (made.label, made.ratio) == ("LOSSLESS", made.raw_bytes / made.stored_bytes)
    assert 0 <= made.seconds < 60
    assert str(made).startswith("one/ (2 arrays): 23,040 -> ")
    assert made.text(verbose=True).count("\n") == 2 + len(made.notes)  # a note where libzstd is not the engine's
    with pytest.raises(OutputError, match="exists already"):
        bundle.encode_source(kvmnn.open("both.npz"), "one/")
    with pytest.raises(OutputError, match="is the input itself"):
        bundle.encode_source(kvmnn.open("keys.npy"), "keys.npy", force=True)


def test_encode_source_to_stream_is_one_frame(here):
    stream = io.BytesIO()
    made = bundle.encode_source(kvmnn.open("keys.npy"), stream)
    assert stream.getvalue() == kvmnn.encode(KEYS)
    assert made.output is None
    assert str(made).startswith("keys: 7,680 -> ")
    with pytest.raises(OptionError, match="carries one frame, not 2"):
        bundle.encode_source(kvmnn.open("both.npz"), stream)
    with pytest.raises(OptionError, match="7680 bytes are above"):
        bundle.encode_source(kvmnn.open("keys.npy"), stream, EncodeOptions(frame_bytes=4096))


def test_encode_source_splits_above_16_mib_and_streams_hold_64(here, run, monkeypatch):
    keys, values = packed_samples.arrays(1, 1, 64, 4)
    np.savez("kv.npz", **{"layer_0.key": keys, "layer_0.value": values})
    run(
        "mnn", "pack", "kv.npz", "-o", "sys/", "--kv-heads", 1, "--head-dim", 4, "--backend", "x86-sse", "--name", "sys"
    )
    np.save("large.npy", np.zeros(17 << 19, np.float16))
    np.save("enough.npy", np.zeros(16 << 19, np.float16))
    for source, options, frames in (
        ("sys", EncodeOptions(frame_bytes=256), 4),
        ("sys", EncodeOptions(), 1),
        ("enough.npy", EncodeOptions(effort="fast"), 1),
        ("large.npy", EncodeOptions(effort="fast"), 2),
        ("large.npy", EncodeOptions(effort="fast", frame_bytes=0), 1),
    ):
        bundle.encode_source(kvmnn.open(source), "cut/", options, force=True)
        assert len(bundle.open_frames("cut").arrays[0].frames) == frames
    stream = io.BytesIO()
    bundle.encode_source(kvmnn.open("large.npy"), stream, EncodeOptions(effort="fast"))
    assert stream.getvalue() == kvmnn.encode(np.zeros(17 << 19, np.float16), effort="fast")
    monkeypatch.setattr("kvmnn.bundle.encoder.DEFAULT_STREAM_FRAME_BYTES", (17 << 20) - 1)
    with pytest.raises(OptionError, match="are above --chunk-bytes: use --chunk-bytes 0 or -o FILE"):
        bundle.encode_source(kvmnn.open("large.npy"), stream)


def test_restore_result_equals_command_json(here, run):
    bundle.encode_source(kvmnn.open("both.npz"), "frames/")
    frames = bundle.open_frames("frames")
    made = formats.restore(frames, "one.npz")
    assert timeless(made) == timeless(json.loads(run("decode", "frames", "-o", "two.npz", "--json").out))
    assert str(made).startswith("one.npz: 2 arrays, ")
    assert Path("one.npz").read_bytes() == Path("two.npz").read_bytes()
    with pytest.raises(OptionError, match="carries one array, not 2"):
        formats.restore(frames, io.BytesIO())
    with pytest.raises(OutputError, match="is the input itself"):
        formats.restore(frames.select_array(frames.arrays[0]), "frames/k.frame", force=True)


def test_restore_to_stream_without_manifest_is_unverified(here):
    bundle.encode_source(kvmnn.open("keys.npy"), "keys.frame")
    stream = io.BytesIO()
    made = formats.restore(bundle.open_frames("keys.frame"), stream)
    assert stream.getvalue() == KEYS.tobytes()
    assert (made.output, made.label) == (None, "LOSSLESS")
    lone = formats.restore(bundle.open_frames("keys.frame", use_manifest=False), "lone.npy")
    assert lone.label is None
    assert "no manifest to check it against" in str(lone)


@pytest.mark.parametrize(("dtype", "says_so"), [(None, True), ("fp16", False), ("bf16", False)])
def test_restore_frame_without_manifest_says_that_fp16_is_assumed(here, dtype, says_so):
    Path("lone.frame").write_bytes(kvmnn.encode(KEYS))
    Path("two.frame").write_bytes(kvmnn.encode(KEYS) * 2)
    for name in ("lone.frame", "two.frame"):
        frames = bundle.open_frames(name, options=bundle.DecodeOptions(dtype=dtype))
        made = formats.restore(frames, "x.npy", force=True)
        assert ("fp16 is assumed, bf16 frames look the same (--dtype)" in str(made)) == says_so
        assert ("fp16 is assumed" in str(bundle.verify_frame_set(frames))) == says_so
        assert np.load("x.npy").dtype == ("<u2" if dtype == "bf16" else "<f2")


def test_verify_frame_set_result_labels_and_evidence(here, run):
    bundle.encode_source(kvmnn.open("keys.npy"), "keys.frame")
    np.save("other.npy", KEYS + 1)
    for against, label, proof in (
        (None, "LOSSLESS", "sha256"), ("keys.npy", "LOSSLESS", "bytes"), ("other.npy", "DIFFERS", "bytes"),
    ):  # fmt: skip
        found = bundle.verify_frame_set(bundle.open_frames("keys.frame"), against and kvmnn.open(against))
        assert (found.label, found.proof, found.ok) == (label, proof, label != "DIFFERS")
        arguments = ["--against", against] if against else []
        said = run("verify", "keys.frame", *arguments, "--json", code=0 if found.ok else 1)
        assert timeless(found) == timeless(json.loads(said.out))
    assert str(found).startswith("keys.frame: DIFFERS from other.npy: array 'keys' first differs at element [0, 0, 0]")
    alone = bundle.verify_frame_set(bundle.open_frames("keys.frame", use_manifest=False))
    assert (alone.label, alone.proof) == ("DECODES", None)


def test_inspect_results_equal_command_json(here, run):
    bundle.encode_source(kvmnn.open("both.npz"), "frames/")
    Path("lone.frame").write_bytes(kvmnn.encode(KEYS))
    said = json.loads(run("inspect", "frames", "lone.frame", "both.npz", "--json").out)["inputs"]
    found = bundle.inspect_frame_set(bundle.open_frames("frames"))
    lone = bundle.inspect_frame_set(bundle.open_frames("lone.frame"))
    arrays = formats.inspect(kvmnn.open("both.npz"))
    assert [each.to_dict() for each in (found, lone, arrays)] == said
    text = run("inspect", "frames", "lone.frame", "both.npz").out
    assert text == f"{found}\n\n{lone}\n\n{arrays}\n"
    assert isinstance(found, bundle.BundleInfo)
    assert found.streams["fp16 hi"].raw_bytes == KEYS.size
