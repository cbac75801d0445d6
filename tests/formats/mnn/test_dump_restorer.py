"""A bundle of a KV dump restores the dump byte for byte; bundles with hostile metadata are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_dumps import contents, dump

from kvmnn import formats
from kvmnn.arrays.source import DUMP_KEY, merge_sources
from kvmnn.bundle import DecodeOptions, EncodeOptions, encode_source, open_frames
from kvmnn.errors import KvmnnError, LimitError, ManifestError, OutputError, SourceError
from kvmnn.formats.mnn import dump as mnn_dump
from kvmnn.formats.mnn import restore_dump


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A dump with two layers, two runs, both widths, and metadata that no program would write twice alike."""
    root = tmp_path / "dump"
    dump(root / "run_1" / "layer_0")
    dump(root / "run_1" / "layer_0", start=3, tokens=1)
    dump(root / "run_1" / "layer_1", width=4, dtype="unknown")
    dump(root / "run_2", k_file="./deep/k.bf16", v_file="v.a.b.bin")
    (root / "run_2" / "deep").mkdir()
    (root / "run_2" / "k_t0_3.bin").rename(root / "run_2" / "deep" / "k.bf16")
    (root / "run_2" / "v_t0_3.bin").rename(root / "run_2" / "v.a.b.bin")
    odd = root / "run_1" / "layer_1" / "meta_t0_3.json"
    odd.write_bytes(b"\r\n\t" + odd.read_bytes()[:-1] + ', "note": "\u00fc\u2028 \U0001f600" }\n\n'.encode())
    wide = root / "run_1" / "layer_0" / "meta_t0_3.json"
    wide.write_bytes(wide.read_text().encode("utf-16"))
    return root


def bundled(source: Path, **options: Any) -> Path:
    encode_source(formats.open(source), source.with_name("bundle"), EncodeOptions(**options))
    return source.with_name("bundle")


@pytest.mark.parametrize("options", [{}, {"frame_bytes": 16}, {"verify": False, "threads": 1}])
def test_restore_dump_round_trips(source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    bundle = bundled(source, **options)
    made = restore_dump(open_frames(str(bundle)), str(tmp_path / "back"))
    assert contents(tmp_path / "back") == contents(source)
    assert (made.label, made.is_read_back, len(made.files), len(made.metadata_files)) == ("LOSSLESS", True, 8, 4)
    assert made.to_dict()["metadata_files"][-1] == "run_2/meta_t0_3.json"
    assert made.to_dict()["arrays"][-2]["file"] == "run_2/deep/k.bf16"
    assert "a KV dump of 8 arrays and 4 metadata files" in str(made)


def test_restore_dump_with_other_dtype_keeps_bytes(source: Path, tmp_path: Path) -> None:
    for file in source.rglob("layer_1/*"):
        file.unlink()
    encode_source(formats.open(source, dtype="bf16"), tmp_path / "bundle")
    restore_dump(open_frames(str(tmp_path / "bundle")), str(tmp_path / "back"))
    assert contents(tmp_path / "back") == contents(source)


def test_restore_dump_into_folder_with_other_files(source: Path, tmp_path: Path) -> None:
    frames, back = open_frames(str(bundled(source))), tmp_path / "back"
    (back / "run_1").mkdir(parents=True)
    (back / "run_1" / "mine.txt").write_text("mine")
    restore_dump(frames, str(back))
    assert contents(back) == contents(source) | {"run_1/mine.txt": b"mine"}
    (back / "run_2" / "meta_t0_3.json").write_text("changed")
    with pytest.raises(OutputError, match="exists already"):
        restore_dump(frames, str(back))
    assert (back / "run_2" / "meta_t0_3.json").read_text() == "changed"
    restore_dump(frames, str(back), force=True)
    assert contents(back) == contents(source) | {"run_1/mine.txt": b"mine"}


def test_restore_dump_needs_the_whole_dump(source: Path, tmp_path: Path) -> None:
    one = formats.open(source, tensors=("run_2/deep/k", "run_2/v.a.b"))
    kept = formats.open(bundled(source), tensors=("run_2/deep/k",))
    two = merge_sources([formats.open(source), formats.open(source)])
    assert [DUMP_KEY in found.metadata for found in (one, kept, two)] == [False, False, False]
    np.savez(tmp_path / "no.npz", k=np.ones(4, "f2"), v=np.ones(4, "f2"))
    for number, other in enumerate((one, formats.open(tmp_path / "no.npz"))):
        encode_source(other, tmp_path / f"other_{number}")
        with pytest.raises(SourceError, match="was not made from a whole KV dump"):
            restore_dump(open_frames(str(tmp_path / f"other_{number}")), str(tmp_path / "back"))
    frames = open_frames(str(next((tmp_path / "bundle").glob("*.frame"))))
    with pytest.raises(SourceError, match="was not made from a whole KV dump"):
        restore_dump(frames, str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_restore_dump_too_large_metadata_is_noted(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnn_dump, "MAX_DUMP_METADATA_BYTES", 600)
    found = formats.open(source)
    assert DUMP_KEY not in found.metadata
    assert "cannot become it again" in found.notes[0]


def test_restore_arrays_drop_dump_metadata(source: Path, tmp_path: Path) -> None:
    formats.restore(open_frames(str(bundled(source))), str(tmp_path / "x.safetensors"))
    assert formats.open(tmp_path / "x.safetensors").metadata == {}


def _meta(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def on_document(document: dict[str, Any]) -> None:
        fields = json.loads(document["metadata_files"]["run_2/meta_t0_3.json"])
        change(fields)
        document["metadata_files"]["run_2/meta_t0_3.json"] = json.dumps(fields)

    return on_document


def _renamed(name: str) -> Callable[[dict[str, Any]], None]:
    def on_document(document: dict[str, Any]) -> None:
        document["metadata_files"][name] = document["metadata_files"].pop("run_2/meta_t0_3.json")

    return on_document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_renamed("../meta_t0_3.json"), "relative file name without"),
        (_renamed("/tmp/meta_t0_3.json"), "relative file name without"),
        (_renamed("C:\\meta_t0_3.json"), "relative file name without"),
        (_renamed("run_2//meta_t0_3.json"), "the name of a file"),
        (_renamed("run_2/.bashrc"), "is no metadata file"),
        (_renamed("away/meta_t0_3.json"), "is no metadata file"),
        (_renamed("meta_\ud800.json"), "is no metadata file"),
        (_renamed("elsewhere/meta_t0_3.json"), "does not fit the arrays: 'elsewhere/deep/k' is not there"),
        (_renamed("run_2/meta_" + "x" * 300 + ".json"), "File name too long"),
        (_meta(lambda fields: fields.update(k_file="../../k.bin")), "leads out of the dump directory"),
        (_meta(lambda fields: fields.update(k_file="/etc/k.bin")), "leads out of the dump directory"),
        (_meta(lambda fields: fields.update(k_file="\ud800.bin")), "leads out of the dump directory"),
        (_meta(lambda fields: fields.update(k_file="deep/l.bf16")), "'run_2/deep/l' is not there"),
        (_meta(lambda fields: fields.update(k_file="deep/k/x.bin")), "'run_2/deep/k/x' is not there"),
        (_meta(lambda fields: fields.update(v_file="deep/k.bin")), "is of another metadata file, too"),
        (_meta(lambda fields: fields.update(seq_len=6, head_dim=2)), "does not fit the arrays"),
        (_meta(lambda fields: fields.update(bytes_per_elem=4, dtype="fp32")), "does not fit the arrays"),
        (_meta(lambda fields: fields.update(kv_heads=10**30)), "does not fit the arrays"),
        (_meta(lambda fields: fields.update(kv_heads="2")), "kv_heads is '2'"),
        (_meta(lambda fields: fields.update(pad="x" * (1 << 20))), "is no metadata file"),
        (lambda document: document["metadata_files"].update({"run_2/meta_t0_3.json": "{"}), "is not JSON"),
        (lambda document: document["metadata_files"].update({"run_2/meta_t0_3.json": "[]"}), "holds no JSON object"),
        (lambda document: document["metadata_files"].update({"run_2/meta_t0_3.json": "[" * 99999}), "is not JSON"),
        (lambda document: document["metadata_files"].update({"run_2/meta_t0_3.json": "\ud800"}), "the text of a file"),
        (lambda document: document["metadata_files"].update({"run_2/meta_t0_3.json": 1}), "expected a string"),
        (lambda document: document["metadata_files"].pop("run_2/meta_t0_3.json"), "no metadata file says"),
        (lambda document: document.update(metadata_files=[]), "expected an object"),
        (lambda document: document.pop("metadata_files"), "is missing"),
        (lambda document: document.update(schema_version=2), "the version this kvmnn reads"),
        (lambda document: document.update(schema="kvmnn-cache"), "expected 'kvmnn-dump'"),
    ],
)
def test_restore_dump_hostile_metadata_is_refused(
    source: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    index = bundled(source) / "manifest.json"
    manifest = json.loads(index.read_text())
    document = json.loads(manifest["metadata"][DUMP_KEY])
    change(document)
    manifest["metadata"][DUMP_KEY] = json.dumps(document)
    index.write_text(json.dumps(manifest))
    back = tmp_path / "back"
    back.mkdir()
    (back / "away").symlink_to(tmp_path)
    before = contents(tmp_path)
    with pytest.raises((ManifestError, OutputError)) as caught:
        restore_dump(open_frames(str(index.parent)), str(back), force=True)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1200
    assert contents(tmp_path) == before
    assert [path.name for path in back.iterdir()] == ["away"]


def test_restore_dump_malformed_metadata_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = bundled(source) / "manifest.json"
    manifest = json.loads(index.read_text())
    good = manifest["metadata"][DUMP_KEY]
    for text in ("", "{", "null", "[" * 99999, good + " " * mnn_dump.MAX_DUMP_METADATA_BYTES):
        manifest["metadata"][DUMP_KEY] = text
        index.write_text(json.dumps(manifest))
        with pytest.raises(ManifestError, match=r"metadata 'kvmnn\.dump'"):
            restore_dump(open_frames(str(index.parent)), str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_restore_dump_failure_leaves_no_files(source: Path, tmp_path: Path) -> None:
    bundle = bundled(source)
    with pytest.raises(LimitError, match="above the limit of 100"):
        restore_dump(open_frames(str(bundle)), str(tmp_path / "back"), DecodeOptions(max_bytes=100))
    frame = bundle / "run_2_v.a.b.frame"
    frame.write_bytes(frame.read_bytes()[:-1] + b"?")
    with pytest.raises(KvmnnError, match=r"run_2/v\.a\.b"):
        restore_dump(open_frames(str(bundle)), str(tmp_path / "back"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "dump"]
