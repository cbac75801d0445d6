"""What goes into a file comes out of its source: names, types and every byte; and bad files are refused in one line."""

from __future__ import annotations

import io
import json
import os
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmnn.arrays.named_array import ArrayInfo, NamedArray
from kvmnn.errors import SourceError
from kvmnn.formats import open as open_source
from kvmnn.formats.options import ReadOptions

WORDS = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)


def content(array: NamedArray, limit: int = 0) -> bytes:
    return b"".join(bytes(piece) for piece in array.pieces(limit))


def only(path: Path, **options: object) -> NamedArray:
    (array,) = open_source(str(path), ReadOptions(**options)).arrays  # type: ignore[arg-type]
    return array


# -- what an array is --------------------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 7), max_size=4).map(tuple),
    kind=st.sampled_from(["<f2", "<f4", "<u2"]),
    order=st.sampled_from(["C", "F"]),
    limit=st.integers(4, 400),
)
def test_pieces_are_whole_rows_of_the_leading_axes(shape, kind, order, limit):
    info = ArrayInfo(name="a", dtype={"<f2": "fp16", "<f4": "fp32", "<u2": "bf16"}[kind], shape=shape,
                     array_dtype=kind, order=order)  # fmt: skip
    step = info.piece_bytes(limit)
    assert info.itemsize <= step <= max(limit, info.nbytes)
    assert step <= limit
    assert step % info.itemsize == 0
    assert info.piece_count(limit) == -(-info.nbytes // step)
    rows = {info.nbytes}
    for axis in shape if order == "C" else shape[::-1]:
        rows.add(min(rows) // axis)
    largest = max(row for row in rows if row <= limit)
    assert step % largest == 0
    assert step + largest > limit or step == info.nbytes


def test_zero_never_cuts():
    info = ArrayInfo(name="a", dtype="fp32", shape=(1 << 20, 1 << 10), array_dtype="<f4")
    assert info.piece_count(0) == 1


def test_raw_bytes_are_cut_between_words():
    info = ArrayInfo(name="a", dtype="fp32", shape=(3, 20), array_dtype="|u1")
    assert info.piece_bytes(23) == 20


@pytest.mark.parametrize("order", ["C", "F"])
def test_index_of_a_byte(order):
    info = ArrayInfo(name="a", dtype="fp32", shape=(2, 3, 4), array_dtype="<f4", order=order)
    flat = np.arange(24).reshape(2, 3, 4).ravel(order=order)
    for position in range(24):
        assert np.arange(24).reshape(2, 3, 4)[info.index_of(4 * position + 3)] == flat[position]


# -- npy ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "named"),
    [
        ("<f2", None, "fp16"),
        (">f2", None, "fp16"),
        ("<f4", None, "fp32"),
        (">f4", None, "fp32"),
        ("<u2", None, "bf16"),
        ("<u2", "fp16", "fp16"),
        (">i2", "fp16", "fp16"),
        ("<i4", "fp32", "fp32"),
        ("<f2", "bf16", "bf16"),
        ("|V2", None, "bf16"),
        ("|u1", "fp32", "fp32"),
    ],
)
def test_npy_types(tmp_path, kind, dtype, named):
    values = np.arange(24, dtype="<u4").view(np.uint8).view("u" + kind[2])[:24].reshape(2, 3, 4)
    np.save(tmp_path / "keys.npy", values.astype(kind[0].replace("|", "<") + "u" + kind[2]).view(kind))
    array = only(tmp_path / "keys.npy", dtype=dtype)
    assert (array.name, array.dtype, array.shape, array.array_dtype) == ("keys", named, (2, 3, 4), kind)
    assert content(array) == content(array, 8) == values.tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4)])
def test_npy_shapes(tmp_path, shape):
    values = np.ones(shape, np.float16)
    np.save(tmp_path / "a.npy", values)
    assert only(tmp_path / "a.npy").shape == shape
    assert content(only(tmp_path / "a.npy")) == values.tobytes()


def test_npy_in_fortran_order_is_read_in_memory_order(tmp_path):
    np.save(tmp_path / "a.npy", np.asfortranarray(WORDS))
    array = only(tmp_path / "a.npy")
    assert (array.order, array.shape) == ("F", (2, 3, 4))
    assert content(array, 32) == WORDS.tobytes("F")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_format_versions(tmp_path, version):
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, WORDS, version=version)
    assert content(only(tmp_path / "a.npy")) == WORDS.tobytes()


def test_pieces_are_views_of_the_mapped_file(tmp_path):
    np.save(tmp_path / "a.npy", WORDS)
    for piece in only(tmp_path / "a.npy").pieces(16):
        assert not piece.flags.owndata
        assert not piece.flags.writeable


def saved(values: np.ndarray, **options: bool) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, **options)
    return buffer.getvalue()


def header(text: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a valid .npy header"),
        (b"not numpy at all", "not a valid .npy header"),
        (saved(WORDS)[:40], "not a valid .npy header"),
        (saved(WORDS)[:-1], "is truncated: the header promises 96 bytes"),
        (saved(WORDS) + b"\0", "has trailing bytes"),
        (saved(WORDS) + saved(WORDS), "has trailing bytes"),
        (saved(np.array([{}, []], object), allow_pickle=True), "pickles"),
        (saved(np.zeros(3, [("a", "<f2")])), "structured type"),
        (saved(np.zeros(3)), "float64"),
        (saved(np.zeros(3, bool)), "bool"),
        (saved(np.zeros(3, "<i2")), "say dtype="),
        (saved(np.zeros(3, np.uint8)), "uint8"),
        (saved(np.zeros((3, 0), np.float16)), "is empty"),
        (header("{'descr': '<f2', 'fortran_order': False, 'shape': (-1,)}\n"), "impossible shape"),
        (header(f"{{'descr': '<f2', 'fortran_order': False, 'shape': ({2**70}, 4)}}\n"), "is truncated"),
        (
            header("{'descr': '<f2', 'fortran_order': False, 'shape': (2,)" + " " * 20000 + "}"),
            "not a valid .npy header",
        ),
        (header("__import__('os').system('true')\n"), "not a valid .npy header"),
        (header("{" * 5000), "not a valid .npy header"),
        (b"\x93NUMPY\x09\x00\x10\x00" + b" " * 16, "version 9.0"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 16, "not a valid .npy header"),
    ],
)
def test_bad_npy(tmp_path, data, message):
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(SourceError, match=r"a.npy") as caught:
        open_source(str(tmp_path / "a.npy"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 223))
def test_damaged_npy_is_refused_or_read(tmp_path_factory, noise, at):
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    whole = saved(WORDS)
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    try:
        array = only(path)
    except SourceError:
        return
    assert len(content(array, 16)) == array.nbytes


# -- raw ---------------------------------------------------------------------------------------------------------------


def test_raw_words(tmp_path):
    (tmp_path / "keys.bin").write_bytes(WORDS.tobytes())
    array = only(tmp_path / "keys.bin", dtype="bf16")
    assert (array.name, array.dtype, array.shape, array.array_dtype) == ("keys", "bf16", (48,), "<u2")
    assert content(array, 10) == WORDS.tobytes()


@pytest.mark.parametrize(
    ("data", "dtype", "message"),
    [
        (b"1234", None, "raw bytes need a dtype"),
        (b"", "fp16", "is empty"),
        (b"123456", "fp32", "whole number of 4-byte"),
    ],
)
def test_bad_raw(tmp_path, data, dtype, message):
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(SourceError, match=message):
        open_source(str(tmp_path / "a.bin"), ReadOptions(dtype=dtype))


def test_a_pipe_is_spooled(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(WORDS.tobytes(),))
    writer.start()
    assert content(only(pipe, dtype="fp32")) == WORDS.tobytes()
    writer.join()


def test_missing_file(tmp_path):
    with pytest.raises(SourceError, match="No such file"):
        open_source(str(tmp_path / "a.npy"))


# -- npz ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    big = np.asfortranarray(WORDS).astype(">f4")
    save(tmp_path / "a.npz", k=WORDS, v=WORDS.astype(np.float16), big=big)
    arrays = {array.name: array for array in open_source(str(tmp_path / "a.npz")).arrays}
    assert list(arrays) == ["k", "v", "big"]
    assert content(arrays["k"], 16) == WORDS.tobytes()
    assert content(arrays["v"], 7) == WORDS.astype(np.float16).tobytes()
    assert (arrays["big"].order, arrays["big"].array_dtype) == ("F", ">f4")
    assert content(arrays["big"], 16) == WORDS.tobytes("F")


def test_npz_choice(tmp_path):
    np.savez(tmp_path / "a.npz", k=WORDS, v=WORDS, n=np.arange(3))
    path = str(tmp_path / "a.npz")
    with pytest.raises(SourceError, match=r"'n.npy'.*int64"):
        open_source(path)
    assert [a.name for a in open_source(path, ReadOptions(tensors=("v",))).arrays] == ["v"]
    source = open_source(path, ReadOptions(skip_unsupported=True))
    assert [a.name for a in source.arrays] == ["k", "v"]
    assert len(source.skipped) == 1
    with pytest.raises(SourceError, match="no array named 'x'; it has 'k', 'v', 'n'"):
        open_source(path, ReadOptions(tensors=("x",)))
    with pytest.raises(SourceError, match="int64"):
        open_source(path, ReadOptions(tensors=("n",), skip_unsupported=True))


def test_npz_with_pickles_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    np.savez(tmp_path / "a.npz", k=np.array([Bomb()], object))
    with pytest.raises(SourceError, match="pickles"):
        open_source(str(tmp_path / "a.npz"))
    assert not (tmp_path / "ran").exists()


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_bad_npz(tmp_path, method):
    path = tmp_path / "a.npz"

    def refused(message: str) -> None:
        with pytest.raises(SourceError, match=message):
            for array in open_source(str(path)).arrays:
                content(array)

    path.write_bytes(b"not a zip file")
    refused("not a readable .npz")
    archive(path, {"readme.txt": b"hello"}, method)
    refused("is not a .npy file")
    archive(path, {"k.npy": saved(WORDS)[:-4]}, method)
    refused("header promises 96 bytes of data after 128 of header, the archive says 220")
    archive(path, {}, method)
    refused("holds no array")
    archive(path, {"k.npy": saved(WORDS)}, method)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    refused("not a readable .npz")
    at = whole.index(b"k.npy") + 5 + (150 if method == zipfile.ZIP_STORED else 90)
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
    refused("checksum|damaged|ends .* early|not a valid")


def test_npz_with_more_data_than_it_says(tmp_path):
    archive(tmp_path / "a.npz", {"k.npy": saved(WORDS) + bytes(1000)}, zipfile.ZIP_DEFLATED)
    data = (tmp_path / "a.npz").read_bytes()
    size = (len(saved(WORDS)) + 1000).to_bytes(4, "little")
    assert data.count(size) == 2
    (tmp_path / "a.npz").write_bytes(data.replace(size, len(saved(WORDS)).to_bytes(4, "little")))
    (array,) = open_source(str(tmp_path / "a.npz")).arrays
    with pytest.raises(SourceError, match="holds more data than the archive says"):
        content(array, 16)


@pytest.mark.parametrize(("method", "flags"), [(zipfile.ZIP_BZIP2, 0), (zipfile.ZIP_STORED, 1)])
def test_npz_methods_that_numpy_never_uses(tmp_path, method, flags):
    archive(tmp_path / "a.npz", {"k.npy": saved(WORDS)}, method)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[6] |= flags
    data[data.index(b"PK\1\2") + 8] |= flags
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(SourceError, match=r"is encrypted|compression method 12"):
        open_source(str(tmp_path / "a.npz"))


def test_npz_with_a_member_twice(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("k.npy", saved(WORDS))
        file.writestr("k.npy", saved(WORDS))
    with pytest.raises(SourceError, match="2 arrays named 'k'"):
        open_source(str(tmp_path / "a.npz"))


# -- MNN dumps ---------------------------------------------------------------------------------------------------------


def dump(folder: Path, *, start: int = 0, tokens: int = 3, width: int = 2, **changes: object) -> np.ndarray:
    """Write one dump as the engine does; returns K."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"t{start}_{start + tokens}"
    values = np.arange(tokens * 2 * 4, dtype=f"<f{width}").reshape(tokens, 2, 4)
    (folder / f"k_{stem}.bin").write_bytes(values.tobytes())
    (folder / f"v_{stem}.bin").write_bytes((-values).tobytes())
    meta = {"layer_id": 0, "seq_start": start, "seq_len": tokens, "kv_heads": 2, "head_dim": 4, "bytes_per_elem": width,
            "dtype": f"fp{8 * width}", "k_file": f"k_{stem}.bin", "v_file": f"v_{stem}.bin", **changes}  # fmt: skip
    (folder / f"meta_{stem}.json").write_text(json.dumps(meta))
    return values


def test_mnn_dump(tmp_path):
    first = dump(tmp_path / "run" / "layer_0")
    second = dump(tmp_path / "run" / "layer_1", start=16, width=4, dtype="unknown")
    arrays = open_source(str(tmp_path)).arrays
    assert [a.name for a in arrays] == [
        "run/layer_0/k_t0_3", "run/layer_0/v_t0_3", "run/layer_1/k_t16_19", "run/layer_1/v_t16_19",
    ]  # fmt: skip
    assert [(a.dtype, a.shape, a.array_dtype) for a in arrays[::2]] == [
        ("fp16", (3, 2, 4), "<f2"),
        ("fp32", (3, 2, 4), "<f4"),
    ]
    assert content(arrays[0]) == first.tobytes()
    assert content(arrays[3]) == (-second).tobytes()


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
def test_bad_mnn_dump(tmp_path, changes, message):
    dump(tmp_path / "dump" / "layer_0", **changes)
    (tmp_path / "outside.bin").write_bytes(bytes(48))
    (tmp_path / "dump" / "layer_0" / "link.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(SourceError) as caught:
        open_source(str(tmp_path / "dump"))
    assert message in str(caught.value)


def test_a_file_that_changes_after_it_was_listed(tmp_path):
    dump(tmp_path)
    array, _ = open_source(str(tmp_path)).arrays
    (tmp_path / "k_t0_3.bin").write_bytes(bytes(46))
    with pytest.raises(SourceError, match="46 bytes came where 48 were announced"):
        content(array)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '"x"'])
def test_bad_metadata(tmp_path, text):
    (tmp_path / "meta_t0_3.json").write_text(text)
    with pytest.raises(SourceError, match=r"meta_t0_3.json: (is not|holds no) JSON"):
        open_source(str(tmp_path))


def test_a_directory_without_metadata(tmp_path):
    with pytest.raises(SourceError, match=r"has no meta_\*.json"):
        open_source(str(tmp_path))
