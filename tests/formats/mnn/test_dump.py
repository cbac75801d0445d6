"""MNN KV dumps: arrays by metadata path; and damaged ones."""

from __future__ import annotations

import pytest
from plain_dumps import dump
from sources import content

from kvmnn import formats
from kvmnn.arrays import compare_bitwise
from kvmnn.arrays.layers import collect_layer_arrays
from kvmnn.bundle import encode_source
from kvmnn.errors import SourceError


def test_open_dump_arrays_are_named_by_path(tmp_path):
    first = dump(tmp_path / "run" / "layer_0")
    second = dump(tmp_path / "run" / "layer_1", start=16, width=4, dtype="unknown")
    arrays = formats.open(str(tmp_path)).arrays
    assert [a.name for a in arrays] == [
        "run/layer_0/k_t0_3", "run/layer_0/v_t0_3", "run/layer_1/k_t16_19", "run/layer_1/v_t16_19",
    ]  # fmt: skip
    assert [(a.dtype, a.shape, a.array_dtype) for a in arrays[::2]] == [
        ("fp16", (3, 2, 4), "<f2"),
        ("fp32", (3, 2, 4), "<f4"),
    ]
    assert content(arrays[0]) == first.tobytes()
    assert content(arrays[3]) == (-second).tobytes()


def test_bundle_of_dump_stays_a_dump(tmp_path):
    for start in (0, 3):
        dump(tmp_path / "dump" / "run" / "layer_0", start=start)
    source = formats.open(tmp_path / "dump")
    encode_source(source, tmp_path / "bundle")
    found = compare_bitwise(source, formats.open(tmp_path / "bundle"))
    assert (found.equal, found.words) == (True, 2 * 6 * 8)
    (keys, _) = collect_layer_arrays(formats.open(tmp_path / "bundle").arrays)
    assert (keys.array.name, keys.geometry) == ("run/layer_0/k_t0_6", (2, 6, 4))
    assert b"".join(run.tobytes() for run in keys.array.iter_chunks(16)) == b"".join(map(content, source.arrays[::2]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 4}, "has 48 bytes, its metadata says 64"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"kv_heads": "2"}, "kv_heads is '2'"),
        ({"head_dim": True}, "head_dim is True"),
        ({"bytes_per_elem": 1}, "bytes_per_elem is 1"),
        ({"dtype": "fp32"}, "dtype is 'fp32'"),
        ({"k_file": None}, "k_file is None"),
        ({"k_file": "missing.bin"}, "No such file"),
        ({"k_file": "../../outside.bin"}, "leads out of the dump directory"),
        ({"k_file": "/etc/hostname"}, "leads out of the dump directory"),
        ({"k_file": "C:\\x.bin"}, "leads out of the dump directory"),
        ({"k_file": "link.bin"}, "leads out of the dump directory"),
        ({"k_file": "v_t0_3.bin"}, "2 arrays named"),
    ],
)
def test_open_dump_inconsistent_metadata_is_refused(tmp_path, changes, message):
    dump(tmp_path / "dump" / "layer_0", **changes)
    (tmp_path / "outside.bin").write_bytes(bytes(48))
    (tmp_path / "dump" / "layer_0" / "link.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(SourceError) as caught:
        formats.open(str(tmp_path / "dump"))
    assert message in str(caught.value)


def test_read_dump_file_changed_after_open_is_refused(tmp_path):
    dump(tmp_path)
    array, _ = formats.open(str(tmp_path)).arrays
    (tmp_path / "k_t0_3.bin").write_bytes(bytes(46))
    with pytest.raises(SourceError, match=r"k_t0_3\.bin: changed while it was read"):
        content(array)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '"x"'])
def test_open_dump_malformed_metadata_is_refused(tmp_path, text):
    (tmp_path / "meta_t0_3.json").write_text(text)
    with pytest.raises(SourceError, match=r"meta_t0_3.json: (is not|holds no) JSON"):
        formats.open(str(tmp_path))


def test_open_dump_directory_without_metadata_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"not a file kvmnn knows: it is an empty folder"):
        formats.open(str(tmp_path))
