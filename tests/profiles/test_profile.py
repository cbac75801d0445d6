"""Profiles: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvmnn.dense import RopeConfig
from kvmnn.dense._stream import xxh64
from kvmnn.dense.rope import RopeFrequencies
from kvmnn.errors import KvmnnError, OutputError, SourceError
from kvmnn.profiles import LayerGeometry, Profile, ProfileInfo, TextOrigin

ROPES = [RopeConfig(10000.0, 8), RopeConfig(1e6, 6, "interleaved"), None]


def make_geometry(rope: RopeConfig | None, **sizes: int) -> LayerGeometry:
    frequencies = None if rope is None else RopeFrequencies.from_config(rope)
    return LayerGeometry(**{"kv_heads": 2, "head_dim": 8, "value_dim": 8, "rope": frequencies, **sizes})  # type: ignore[arg-type]


def make_info() -> ProfileInfo:
    layers = tuple(make_geometry(rope, window=window) for rope, window in zip(ROPES, (512, 7, None), strict=True))
    return ProfileInfo(
        model="tiny",
        fingerprint="ab" * 32,
        dtype="fp32",
        texts=(TextOrigin(name="a.txt", sha256="01" * 32, tokens=70), TextOrigin(name="kv/", sha256=None, tokens=3)),
        layers=layers,
        settings={"below": 2},
    )


ARRAYS = {
    "linear/0/key/chain": np.arange(-6, 6, dtype=np.int8).reshape(3, 4),
    "linear/0/key/scales": np.array([1.5, -2], np.float32),
    "transform/1/value/steps": np.array(7, np.int32),
    "empty": np.zeros((0, 3), np.uint16),
}


def test_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = Profile(make_info(), ARRAYS)
    profile.write(tmp_path / "a.kvmp")
    read = Profile.read(tmp_path / "a.kvmp")
    assert read.key == profile.key and len(read.key) == 32 and read.nbytes % 64 == 0
    assert read.info.to_dict() == make_info().to_dict() and read.kinds == ("empty", "linear", "transform")
    assert list(read.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert read.arrays[name].dtype == array.dtype and np.array_equal(read.arrays[name], array)
        assert not read.arrays[name].flags.writeable
    assert set(read.select("linear")) == {"0/key/chain", "0/key/scales"}
    assert all(a.is_equivalent(b) for a, b in zip(read.layers, make_info().layers, strict=True))
    assert not read.layers[0].is_equivalent(read.layers[1]) and not read.layers[0].is_equivalent(read.layers[2])
    assert (read.get_array("linear/0/key/scales", "float32", (2,)) == [1.5, -2]).all()
    for name, dtype, message in (("linear/0/key/scales", "int8", "float32"), ("other", "int8", "no section")):
        with pytest.raises(KvmnnError, match=message):
            read.get_array(name, dtype, (2,))


def test_profile_does_not_replace_a_file_unless_forced(tmp_path: Path) -> None:
    profile = Profile(make_info(), ARRAYS)
    (tmp_path / "a.kvmp").write_bytes(b"mine")
    with pytest.raises(OutputError):
        profile.write(tmp_path / "a.kvmp")
    profile.write(tmp_path / "a.kvmp", force=True)
    assert Profile.read(tmp_path / "a.kvmp").key == profile.key


def test_profile_key_is_of_all_bytes() -> None:
    key = Profile(make_info(), ARRAYS).key
    assert key == Profile(make_info(), ARRAYS).key
    assert key != Profile(replace(make_info(), model="other"), ARRAYS).key
    assert key != Profile(make_info(), {**ARRAYS, "empty": np.zeros((0, 4), np.uint16)}).key


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("", np.zeros(1)),
        ("x" * 121, np.zeros(1)),
        ("a\nb", np.zeros(1)),
        ("ä", np.zeros(1)),
        ("a", np.zeros(1, np.complex128)),
        ("a", np.array(["x"])),
        ("a", np.zeros((1, 1, 1, 1, 1))),
    ],
)
def test_profile_sections_that_the_format_does_not_have_are_refused(name: str, array: object) -> None:
    with pytest.raises(KvmnnError, match="section"):
        Profile(make_info(), {name: array})  # type: ignore[dict-item]


def test_profile_any_damaged_byte_is_refused() -> None:
    data = Profile(make_info(), ARRAYS).to_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(KvmnnError, match=r"^x\.kvmp: "):
            Profile.from_bytes(bytes(damaged), "x.kvmp")
    for size in (*range(0, len(data), 7), len(data) - 1):
        with pytest.raises(SourceError, match=r"^x\.kvmp: "):
            Profile.from_bytes(data[:size], "x.kvmp")
    for extra in (b"\0", bytes(64)):
        with pytest.raises(SourceError, match="after its last section"):
            Profile.from_bytes(data + extra)


def rewrite(change: dict[str, object]) -> bytes:
    """A profile whose header has other values, and checksums that hold."""
    data = Profile(make_info(), ARRAYS).to_bytes()
    (size,) = struct.unpack_from("<I", data, 8)
    header = json.loads(data[24 : 24 + size])
    for path, value in change.items():
        target = header
        *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
        for step in steps:
            target = target[step]
        if value is ...:
            del target[last]
        else:
            target[last] = value
    document = json.dumps(header).encode()
    head = struct.pack("<4sHHIIQ", b"KVMP", 1, 0, len(document), 0, xxh64(document)) + document
    return head + bytes(-len(head) % 64) + data[24 + size + (-(24 + size) % 64) :]


def test_profile_headers_are_read_strictly() -> None:
    assert Profile.from_bytes(rewrite({"later": 1})).info.model == "tiny"
    hostile: list[tuple[dict[str, object], str]] = [
        ({"model": 3}, "model"),
        ({"model": ...}, "model: is missing"),
        ({"fingerprint": "x"}, "fingerprint"),
        ({"dtype": "fp64"}, "dtype"),
        ({"texts": 1}, "texts"),
        ({"texts.0.tokens": -1}, "tokens"),
        ({"layers": []}, "layers"),
        ({"layers.0.kv_heads": 1 << 40}, "sizes that fit"),
        ({"layers.0.head_dim": 4}, "elements of a head"),
        ({"layers.0.window": 0}, "window"),
        ({"layers.0.rope.dims": 10}, "do not fit"),
        ({"layers.0.rope.dims": 7}, "do not fit"),
        ({"layers.0.rope.pairing": "other"}, "do not fit"),
        ({"layers.0.rope.turns.0": "-123456789abcdef"}, "16 hexadecimal"),
        ({"settings": []}, "settings"),
        ({"sections": {}}, "sections"),
        ({"sections.1.name": "linear/0/key/chain"}, "twice"),
        ({"sections.0.name": 7}, "name"),
        ({"sections.0.dtype": "object"}, "type"),
        ({"sections.0.dtype": "M8[s/0]"}, "type"),
        ({"sections.0.shape": [1 << 62, 1 << 62]}, "shape"),
        ({"sections.0.shape": [-1]}, "shape"),
        ({"sections.0.shape": [1 << 29]}, "ends at byte"),
        ({"sections.0.shape": [0, 1 << 60]}, "shape"),
        ({"sections.0.shape": [2] * 5}, "shape"),
        ({"sections.0.xxh64": "0" * 16}, "damaged"),
        ({"sections": ...}, "sections"),
        ({"sections": []}, "after its last section"),
    ]
    for change, message in hostile:
        with pytest.raises(KvmnnError, match=message):
            Profile.from_bytes(rewrite(change))


def test_profile_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        Profile.read(tmp_path / "none.kvmp")
    for data in (b"", b"KVMD" + bytes(100), bytes(1000)):
        (tmp_path / "other").write_bytes(data)
        with pytest.raises(SourceError, match=r"is no profile of a model \(kvmnn profile make\).*KVMP"):
            Profile.read(tmp_path / "other")
    with pytest.raises(KvmnnError):
        Profile.read(tmp_path)


def test_geometry_sizes_are_checked() -> None:
    for sizes in ({"kv_heads": 0}, {"head_dim": 0}, {"head_dim": 1 << 16}, {"value_dim": 1 << 16}, {"head_dim": 4}):
        with pytest.raises(KvmnnError):
            make_geometry(ROPES[0], **sizes)
