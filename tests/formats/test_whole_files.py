"""Whole files and prefixes through Python: `kvmnn.bundle.encode` of a path and `kvmnn.formats.restore`."""

from __future__ import annotations

from pathlib import Path
from random import Random

import llama_files
import numpy as np
import packed_samples
import pytest
from llama_files import Shape

import kvmnn
from kvmnn.bundle import encode, open_frames
from kvmnn.formats import ReadOptions, restore

GEOMETRY = ["--kv-heads", 2, "--head-dim", 6, "--backend", "x86-avx2", "--valid-tokens", 30]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("chat.session").write_bytes(llama_files.state(Random(2), Shape(k_type="q8_0", v_type="q8_0"), [9])[0])
    return Path("chat.session")


def test_encode_path_of_session_restores_the_file(session: Path, run) -> None:
    encode(session, "python/")
    run("encode", session, "-o", "command/")
    assert {path.name: path.read_bytes() for path in Path("python").iterdir()} == {
        path.name: path.read_bytes() for path in Path("command").iterdir()
    }
    assert "LOSSLESS" in str(restore("python/", "again.session"))
    assert Path("again.session").read_bytes() == session.read_bytes()
    restore("python/", "arrays/", form="arrays")
    assert sorted(path.suffix for path in Path("arrays").iterdir()) == [".npy"] * len(open_frames("python/").arrays)


def test_encode_part_of_session_keeps_arrays(session: Path) -> None:
    encode(session, "part/", read_options=ReadOptions(tensors=("layer_0.key",), packed=_with_heads()))
    assert [array.name for array in open_frames("part/").arrays] == ["layer_0.key"]
    restore("part/", "r/")
    assert sorted(path.name for path in Path("r").iterdir()) == ["completeness.json", "layer_0.key.npy", "loss.json"]


def _with_heads() -> kvmnn.formats.PackedOptions:
    return kvmnn.formats.PackedOptions(geometry=kvmnn.packed.PackedGeometry(kv_heads=2))


def test_encode_path_of_prefix_restores_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed_samples.write_prefix(Path("p"), packed_samples.arrays(2, 2, 30, 6), capacity=40)
    packed = kvmnn.formats.PackedOptions(
        geometry=kvmnn.packed.PackedGeometry(kv_heads=2, head_dim=6, backend="x86-avx2"), valid_tokens=(30,)
    )
    result = encode("p", "f/", read_options=ReadOptions(packed=packed))
    assert "4 packed files rebuilt in memory, every byte" in str(result)
    restore("f/", "r/")
    originals = sorted(Path("p").iterdir())
    assert originals and all(Path("r", path.name).read_bytes() == path.read_bytes() for path in originals)
    restore("f/", "arrays.npz")
    with np.load("arrays.npz") as arrays:
        assert arrays["layer_1.value"].shape == (2, 30, 6)


def test_decode_without_output_names_what_gives_the_original_back(session: Path, run) -> None:
    packed_samples.write_prefix(Path("p"), packed_samples.arrays(2, 2, 30, 6), capacity=40)
    run("encode", session, "-o", "l/")
    run("encode", "p", *GEOMETRY, "-o", "m/")
    assert "use -o chat.session for the file that was encoded" in run("decode", "l/", code=2).err
    assert "use -o DIR/ for the files of the prefix" in run("decode", "m/", code=2).err
    for folder in ("l/", "m/"):
        assert "use -o X.npy, -o X.npz" in run("decode", folder, "--arrays", code=2).err


def test_verify_against_bundle_or_other_sizes_names_which_is_which(session: Path, run) -> None:
    run("encode", session, "-o", "l/")
    error = run("verify", "l/", "--against", "l/", code=1).err
    assert "l/: is a kvmnn bundle of frames" in error and "not a file" not in error
    Path("o.session").write_bytes(llama_files.state(Random(2), Shape(k_type="f16", v_type="q8_0"), [9])[0])
    error = run("verify", "l/", "--against", "o.session", code=1).err
    sizes = [kvmnn.bundle.open_frames(folder).arrays[0].nbytes for folder in ("l/", _encode_other(run))]
    assert f"of the frames has {sizes[0]} bytes, that of the original {sizes[1]}" in error


def _encode_other(run) -> str:
    run("encode", "o.session", "-o", "o/")
    return "o/"


def test_frame_set_repr_has_path_sizes_and_names(tmp_path: Path) -> None:
    arrays = {f"layer_{n}.{part}": np.zeros((2, 3, 4), np.float16) for n in range(9) for part in ("key", "value")}
    encode(arrays, tmp_path / "f")
    text = repr(open_frames(str(tmp_path / "f")))
    assert text.startswith("<FrameSet ") and "layer_0.key" in text and "for 864) " in text and "14 more" in text
    assert len(text) < 400
