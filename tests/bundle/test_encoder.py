"""Arrays to frames and a manifest: split, listed and verified."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from bundles import CUT, KEYS, frame_file, named

import kvmnn
from kvmnn import bundle
from kvmnn.bundle import EncodeOptions, manifest
from kvmnn.errors import KvmnnError


def test_encode_source_splits_leading_axes_in_order(tmp_path):
    path = frame_file(tmp_path / "k.frame", named(KEYS))
    document = manifest.load_manifest(tmp_path / "k.frame.json")
    (array,) = document.arrays
    stored = path.read_bytes()
    rows = 4096 // 128
    position = 0
    for number, entry in enumerate(array.frames):
        assert (entry.file, entry.offset) == ("k.frame", position)
        part = stored[position : position + entry.bytes]
        expected = KEYS.reshape(-1, 64)[number * rows : (number + 1) * rows]
        assert part == kvmnn.encode(expected)
        assert entry.sha256 == hashlib.sha256(part).hexdigest()
        assert entry.raw_bytes == expected.nbytes
        position += entry.bytes
    assert position == len(stored) == array.stored_bytes
    assert array.sha256 == hashlib.sha256(KEYS.tobytes()).hexdigest()
    assert document.zstd_version == kvmnn.frames.zstd.get_version()
    assert document.predictors == ("raw", "delta_seq", "xor_seq")


def test_encode_source_options_reach_the_encoder(tmp_path):
    options = EncodeOptions(predictors="raw", hi_predictors="xor_seq", codecs=("rle",), effort="fast")
    expected = kvmnn.encode(KEYS, predictors="raw", hi_predictors="xor_seq", codecs=("rle",), effort="fast")
    path = frame_file(tmp_path / "k.frame", named(KEYS), options)
    assert path.read_bytes() == expected
    document = manifest.load_manifest(tmp_path / "k.frame.json")
    assert (document.predictors, document.hi_predictors, document.codecs, document.effort) == (
        ("raw",), ("xor_seq",), ("rle",), "fast",
    )  # fmt: skip
    streams = bundle.inspect_frame_set(bundle.open_frames(str(path))).streams
    assert {name.split()[-1]: total.chosen for name, total in streams.items()} == {
        "lo": {"raw+rle": 1}, "hi": {"xor_seq+rle": 1},
    }  # fmt: skip


def test_encode_source_stream_headers_are_counted_per_frame(tmp_path):
    path = frame_file(tmp_path / "k.frame", named(KEYS))
    count = len(manifest.load_manifest(tmp_path / "k.frame.json").arrays[0].frames)
    streams = bundle.inspect_frame_set(bundle.open_frames(str(path))).streams
    assert count > 1
    assert [total.header_bytes for total in streams.values()] == [10 * count, 10 * count]


@pytest.mark.parametrize(
    "options",
    [{"frame_bytes": 3}, {"effort": "slow"}, {"codecs": ()}, {"predictors": ("none",)}, {"frame_bytes": -1}],
)
def test_encode_options_invalid_are_refused(options):
    with pytest.raises(KvmnnError):
        EncodeOptions(**options)


def test_encode_source_failed_verification_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("kvmnn.bundle.encoder.verify_roundtrip", lambda *_, **__: False)
    with pytest.raises(KvmnnError, match="did not decode to its own input"):
        frame_file(tmp_path / "k.frame", named(KEYS))
    assert not list(tmp_path.iterdir())
    frame_file(tmp_path / "k.frame", named(KEYS), replace(CUT, verify=False))
