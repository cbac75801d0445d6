"""Checkpoints of torch and others are read without torch and without running code."""

from __future__ import annotations

import json
import pickle
import pickletools
import struct
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressor_files import archive, checkpoint, legacy, members, repack, weights
from fixtures.compressor_checkpoint import training_state, write_checkpoint

from kvmnn.compressor.checkpoint import Checkpoint, open_checkpoint
from kvmnn.errors import CheckpointError, LimitError, SourceError
from kvmnn.formats.torch import torch_file
from kvmnn.formats.torch._pickles import OpaqueValue
from kvmnn.formats.torch.tensors import TorchTensor

# -- pickles by hand --------------------------------------------------------------------------------------------------

MARK, STOP = b"(", b"."


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def numbers(*values: int) -> bytes:
    return MARK + b"".join(number(value) for value in values) + b"t"


def tensor(
    kind: str = "FloatStorage",
    key: str = "0",
    count: int = 4,
    offset: int = 0,
    shape: bytes = numbers(4),
    strides: bytes = numbers(1),
    *,
    rebuild: bytes = b"ctorch._utils\n_rebuild_tensor_v2\n",
    tail: bytes = b"\x89N",
    legacy: bool = False,
) -> bytes:
    module = b"ctorch.storage\n" if kind == "UntypedStorage" else b"ctorch\n"
    storage = MARK + text("storage") + module + kind.encode() + b"\n" + text(key) + text("cuda:0") + number(count)
    return (
        rebuild + MARK + storage + (b"N" if legacy else b"") + b"tQ" + number(offset) + shape + strides + tail + b"tR"
    )


def dictionary(**values: bytes) -> bytes:
    return b"\x80\x02}" + MARK + b"".join(text(key) + value for key, value in values.items()) + b"u" + STOP


FOUR = np.arange(4, dtype="<f4").tobytes()


def opened(tmp_path: Path, data: bytes, storages: dict[str, bytes] | None = None, **options: Any) -> Checkpoint:
    return open_checkpoint(archive(tmp_path / "c.pth", data, storages or {"0": FOUR}, **options))


def value(checkpoint: Checkpoint, key: str = "a") -> TorchTensor:
    assert isinstance(checkpoint.root, dict)
    found = checkpoint.root[key]
    assert isinstance(found, TorchTensor)
    return found


# -- what is read -----------------------------------------------------------------------------------------------------


def test_open_checkpoint_reads_only_requested_storages(tmp_path: Path) -> None:
    state = weights()
    path = checkpoint(tmp_path / "c.pth", training_state(state))
    found = members(path)
    broken = repack(path, tmp_path / "d.pth", {}, method=zipfile.ZIP_STORED)
    data = bytearray(broken.read_bytes())
    last = found[f"data/{max(int(name[5:]) for name in found if name.startswith('data/'))}"]
    data[data.rindex(last)] ^= 1  # a moment of the optimizer no longer matches its checksum
    broken.write_bytes(data)
    for file in (path, broken):
        root = open_checkpoint(file).root
        assert isinstance(root, dict)
        inner = root["model_state_dict"]["compressor"]
        assert list(inner) == list(state)
        for name, expected in state.items():
            assert np.array_equal(inner[name].read_elements(), expected)


@pytest.mark.parametrize(
    ("kind", "code", "values"),
    [
        ("DoubleStorage", "f8", [0.5, -1e300, np.inf, 1 + 2**-40]),
        ("FloatStorage", "f4", [0.5, -1e30, np.nan, 3.0]),
        ("HalfStorage", "f2", [0.5, -60000, np.nan, 3.0]),
        ("LongStorage", "i8", [1, -(2**40) - 1, 2**62 + 1, 0]),
        ("IntStorage", "i4", [1, -(2**31), 2**24 + 1, 0]),
        ("ShortStorage", "i2", [1, -(2**15), 3, 0]),
        ("CharStorage", "i1", [1, -128, 3, 0]),
        ("ByteStorage", "u1", [1, 255, 3, 0]),
    ],
)
@pytest.mark.parametrize("order", ["little", "big"])
def test_read_elements_types_and_byte_orders(
    tmp_path: Path, kind: str, code: str, values: list[float], order: str
) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values).astype(code)
        expected = array.astype(np.float32)
    data = array.astype(array.dtype.newbyteorder(order)).tobytes()
    more = {"archive/byteorder": order.encode()}
    found = value(opened(tmp_path, dictionary(a=tensor(kind)), {"0": data}, more=more))
    assert found.numel == 4
    assert np.array_equal(found.to_float32(), expected, equal_nan=True)


def test_read_elements_bfloat16_bool_and_complex(tmp_path: Path) -> None:
    kinds = {"b": ("BFloat16Storage", "1"), "t": ("BoolStorage", "2"), "c": ("ComplexFloatStorage", "3")}
    data = dictionary(**{name: tensor(kind, key) for name, (kind, key) in kinds.items()})
    storages = {
        "1": np.array([0x3F80, 0xC040, 0x0001, 0x7F80], "<u2").tobytes(),
        "2": bytes([0, 1, 0, 1]),
        "3": np.array([1 + 2j, 3, -4j, -5], "<c8").tobytes(),
    }
    found = opened(tmp_path, data, storages)
    assert value(found, "b").to_float32().tolist() == [1.0, -3.0, float.fromhex("0x1p-133"), np.inf]
    assert value(found, "t").to_float32().tolist() == [0, 1, 0, 1]
    assert value(found, "c").to_float32().tolist() == [1, 3, 0, -5]


def test_read_elements_views_share_a_storage(tmp_path: Path) -> None:
    data = dictionary(
        a=tensor(count=12, shape=numbers(3, 4), strides=numbers(4, 1)),
        transposed=tensor(count=12, shape=numbers(4, 3), strides=numbers(1, 4)),
        part=tensor(count=12, offset=5, shape=numbers(2, 2), strides=numbers(4, 1)),
        repeated=tensor(count=12, offset=11, shape=numbers(3, 2), strides=numbers(0, 0)),
        empty=tensor(count=12, offset=99, shape=numbers(0, 5), strides=numbers(5, 1)),
        scalar=tensor(count=12, offset=7, shape=b")", strides=b")"),
    )
    base = np.arange(12, dtype="<f4").reshape(3, 4)
    found = opened(tmp_path, data, {"0": base.tobytes()})
    assert np.array_equal(value(found).read_elements(), base)
    assert np.array_equal(value(found, "transposed").read_elements(), base.T)
    assert value(found, "part").read_elements().tolist() == [[5, 6], [9, 10]]
    assert value(found, "repeated").read_elements().tolist() == [[11, 11]] * 3
    assert value(found, "empty").read_elements().shape == (0, 5)
    assert value(found, "scalar").read_elements().item() == 7
    assert not value(found, "transposed").read_elements().flags.writeable


def test_open_checkpoint_parameters_subclasses_and_untyped_storages(tmp_path: Path) -> None:
    parameter = b"ctorch._utils\n_rebuild_parameter\n" + MARK + tensor() + b"\x88ccollections\nOrderedDict\n)RtR"
    inner = MARK + tensor()[len(b"ctorch._utils\n_rebuild_tensor_v2\n") + 1 : -1]
    subclass = (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n" + inner + b"}tR"
    )
    v3 = tensor(
        "UntypedStorage",
        "1",
        8,
        rebuild=b"ctorch._utils\n_rebuild_tensor_v3\n",
        tail=b"\x89Nctorch\nuint16\n",
    )
    data = dictionary(a=parameter, b=subclass, c=v3)
    found = opened(tmp_path, data, {"0": FOUR, "1": np.array([1, 2, 3, 65535], "<u2").tobytes()})
    assert value(found).read_elements().tolist() == value(found, "b").read_elements().tolist() == [0, 1, 2, 3]
    assert value(found, "c").to_float32().tolist() == [1, 2, 3, 65535]


@pytest.mark.parametrize("maker", ["collections OrderedDict", "torch device"])
def test_open_checkpoint_other_subclass_makers_are_refused(tmp_path: Path, maker: str) -> None:
    """Other allowed calls do not rebuild tensors."""
    name = b"c" + maker.replace(" ", "\n").encode() + b"\n"
    data = dictionary(a=b"ctorch._tensor\n_rebuild_from_type_v2\n(" + name + b"ctorch\nTensor\n)}tR")
    with pytest.raises(CheckpointError, match=f"made by {maker.replace(' ', '.')}"):
        opened(tmp_path, data, {})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_open_checkpoint_reads_every_binary_protocol(tmp_path: Path, protocol: int) -> None:
    root = {"epoch": 3, "lr": 0.5, "none": None, "flags": (True, False), "words": ["a", b"bytes", {1, 2}, 2**70]}
    found = opened(tmp_path, pickle.dumps(root, protocol)).root
    assert isinstance(found, dict)
    assert [found[key] for key in ("epoch", "lr", "none", "flags")] == [3, 0.5, None, (True, False)]
    assert found["words"][0] == "a"
    assert found["words"][3] == 2**70
    assert all(isinstance(word, OpaqueValue) for word in found["words"][1:3])
    notices = opened(tmp_path, pickle.dumps({}, protocol)).notices
    assert [f"protocol {protocol}" in notice for notice in notices] == [True] * (protocol > 2)


def test_open_checkpoint_numpy_scalars_are_skipped_with_notice(tmp_path: Path) -> None:
    found = opened(tmp_path, pickle.dumps({"loss": np.float64(0.5), "a": 1}, 2))
    assert isinstance(found.root, dict)
    assert isinstance(found.root["loss"], OpaqueValue)
    assert found.root["a"] == 1
    assert "numpy scalars" in found.notices[0]


def test_open_checkpoint_non_string_keys_stay_distinct(tmp_path: Path) -> None:
    found = opened(tmp_path, pickle.dumps({1: "a", (2, 3): "b", "c": "d", None: "e"}, 2)).root
    assert isinstance(found, dict)
    assert sorted(str(item) for item in found.values()) == ["a", "b", "d", "e"]
    assert [key for key in found if isinstance(key, str)] == ["c"]


def test_open_checkpoint_ordered_dict_of_python_2(tmp_path: Path) -> None:
    pairs = b"\x80\x02ccollections\nOrderedDict\n(](](U\x01aK\x01e](U\x01bK\x02eetR."
    assert opened(tmp_path, pairs).root == {"a": 1, "b": 2}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_open_checkpoint_stored_and_deflated_archives(tmp_path: Path, method: int) -> None:
    assert value(opened(tmp_path, dictionary(a=tensor()), method=method)).read_elements().tolist() == [0, 1, 2, 3]


def test_open_checkpoint_zip64_records_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.pth"
    with zipfile.ZipFile(path, "w") as file:
        for name, data in (("data.pkl", dictionary(a=tensor())), ("data/0", FOUR)):
            with file.open(f"x/{name}", "w", force_zip64=True) as member:
                member.write(data)
    data = path.read_bytes()
    end = data.rindex(b"PK\5\6")
    _, _, _, _, count, size, begin, _ = struct.unpack("<4s4H2LH", data[end:])
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF, 0)
    path.write_bytes(data[:end] + record + locator + last)
    assert value(open_checkpoint(path)).read_elements().tolist() == [0, 1, 2, 3]


def test_open_checkpoint_reads_legacy_file(tmp_path: Path) -> None:
    count = (4).to_bytes(8, "little")
    path = legacy(tmp_path / "c.pth", dictionary(a=tensor(key="k", legacy=True)), ["k"], [count + FOUR])
    found = open_checkpoint(path)
    assert found.kind == "torch legacy"
    assert value(found).read_elements().tolist() == [0, 1, 2, 3]


def test_open_checkpoint_reads_safetensors(tmp_path: Path) -> None:
    header = {
        "model_state_dict.compressor.x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "compressor.y": {"dtype": "BF16", "shape": [2], "data_offsets": [16, 20]},
        "z": {"dtype": "I64", "shape": [], "data_offsets": [20, 28]},
        "__metadata__": {"a": "b"},
    }
    encoded = json.dumps(header).encode()
    path = tmp_path / "c.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + FOUR + struct.pack("<2Hq", 0x3F80, 0x4000, 7))
    root: Any = open_checkpoint(path).root
    assert root["model_state_dict"]["compressor"]["x"].read_elements().tolist() == [[0, 1], [2, 3]]
    assert root["compressor"]["y"].to_float32().tolist() == [1, 2]
    assert root["z"].to_float32().item() == 7


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 177778586\n",
            "Git LFS pointer to .* 177778586",
        ),
        (b"<!DOCTYPE html>\n<html>", "is a text file that begins with '<!DOCTYPE html>'"),
        (b"MCVK" + bytes(40), "is a weight file already"),
        (pickle.dumps({"a": 1}), "without torch's magic number"),
        (bytes(257) + b"ustar" + bytes(300), "tar archive"),
        (b"\x93NUMPY\1\0" + bytes(100), "is no checkpoint: begins with 93 4e"),
        (b"PK\3\4" + bytes(100), "is cut off"),
        (b"PK\3\4" + bytes(100) + b"PK\5\6" + bytes(12) + b"\x68" + bytes(5), "0 data.pkl: expected one"),
    ],
)
def test_open_checkpoint_other_file_kinds_are_named(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "c.pth"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=match) as refused:
        open_checkpoint(path)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"{path}: ")


def test_open_checkpoint_directory_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a directory"):
        open_checkpoint(tmp_path)
    with pytest.raises(SourceError, match="No such file"):
        open_checkpoint(tmp_path / "nothing.pth")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (tensor(offset=-1), "whole numbers from 0 on"),
        (tensor(offset=1), "reaches element 4: the storage holds 4"),
        (tensor(shape=numbers(5)), "reaches element 4"),
        (tensor(shape=numbers(2, 2), strides=numbers(3, 1)), "reaches element 4"),
        (tensor(shape=numbers(-4)), "whole numbers"),
        (tensor(strides=numbers(-1)), "whole numbers"),
        (tensor(shape=numbers(4, 1)), "do not go together"),
        (tensor(shape=b"K\x04"), "do not go together"),
        (tensor(shape=MARK + b"G" + struct.pack(">d", 4.0) + b"t"), "whole numbers"),
        (tensor(shape=numbers(*[1] * 65), strides=numbers(*[1] * 65)), "do not go together"),
        (tensor(shape=MARK + b"\x8a\xff" + b"\x7f" * 255 + b"t"), "reaches element"),
        (tensor(count=5), "storage '0' has 16 bytes"),
        (tensor(count=-4), "storage '0' has 16 bytes"),
        (tensor(key="1"), "storage '1' is not in the archive"),
        (tensor(key="../0"), "is not in the archive"),
        (tensor("DoubleStorage"), "has 16 bytes"),
        (tensor() + b"0" + tensor("IntStorage"), "two sizes or types"),
        (tensor("EvilStorage"), "'torch.EvilStorage'"),
        (tensor(tail=b"\x89NN}X\x03\0\0\0neg\x88s"), "made of 8 values: expected 6 or 7"),
        (tensor("IntStorage", tail=b"\x88N"), "type int32 with a gradient"),
        (tensor(tail=b"\x89N}X\x04\0\0\0conj\x88s"), "conjugation bit, which only complex ones have"),
        (tensor(tail=b"\x89N}K\x01\x88s"), "no dict of names"),
        (tensor(tail=b"\x89NK\x01"), "no dict of names"),
        (tensor(tail=b""), "made of 4 values: expected 6 or 7"),
        (tensor(rebuild=b"ctorch._utils\n_rebuild_tensor\n"), "made of 6 values: expected 4"),
        (tensor(rebuild=b"ctorch._utils\n_rebuild_tensor\n", tail=b""), None),
        (tensor(shape=b"](K\x04e", strides=b"](K\x01e"), None),
        (tensor(tail=b"\x88N"), None),
        (tensor(rebuild=b"ctorch._utils\n_rebuild_tensor_v3\n"), "7 or 8"),
        (b"ctorch._utils\n_rebuild_tensor\n(NK\0))tR", "tensor over NoneType"),
        (b"ctorch.nn.parameter\nParameter\n" + tensor("IntStorage") + b"\x85R", "type int32 with a gradient"),
        (b"(X\x06\0\0\0moduleK\1tQ", "does not name a storage"),
        (b"K\1Q", "does not name a storage"),
    ],
)
def test_open_checkpoint_tensor_beyond_its_storage_is_refused(
    tmp_path: Path, tensors: bytes, match: str | None
) -> None:
    if match is None:
        assert value(opened(tmp_path, dictionary(a=tensors))).read_elements().tolist() == [0, 1, 2, 3]
        return
    with pytest.raises(CheckpointError, match=match):
        opened(tmp_path, dictionary(a=tensors))


def test_read_elements_large_view_of_small_storage_is_refused(tmp_path: Path) -> None:
    found = value(opened(tmp_path, dictionary(a=tensor(shape=numbers(10_000, 10_001), strides=numbers(0, 0)))))
    with pytest.raises(LimitError, match="more than 100000000 elements"):
        found.read_elements()


def test_read_elements_quantised_type_is_refused(tmp_path: Path) -> None:
    found = value(opened(tmp_path, dictionary(a=tensor("QInt8Storage")), {"0": bytes(4)}))
    with pytest.raises(CheckpointError, match=r"quantised elements \(qint8\) cannot be cast"):
        found.read_elements()


def test_open_checkpoint_quantised_tensor_needs_seven_values(tmp_path: Path) -> None:
    rebuild = b"ctorch._utils\n_rebuild_qtensor\n"
    good = tensor("QInt8Storage", rebuild=rebuild, tail=b"N\x89N")
    assert value(opened(tmp_path, dictionary(a=good), {"0": bytes(4)})).shape == (4,)
    with pytest.raises(CheckpointError, match="a quantised tensor made of 6 values: expected 7"):
        opened(tmp_path, dictionary(a=tensor("QInt8Storage", rebuild=rebuild)), {"0": bytes(4)})


@pytest.mark.parametrize("arguments", [b")", b"(}t", b"(K\1t"])
def test_open_checkpoint_counter_is_an_empty_dict(tmp_path: Path, arguments: bytes) -> None:
    data = dictionary(a=b"ccollections\nCounter\n" + arguments + b"R", b=tensor())
    root = opened(tmp_path, data).root
    assert isinstance(root, dict) and root["a"] == {}


def test_open_checkpoint_damaged_archives_are_refused(tmp_path: Path) -> None:
    good = archive(tmp_path / "good.pth", dictionary(a=tensor()), {"0": FOUR}).read_bytes()
    path = tmp_path / "c.pth"

    def refused(data: bytes, match: str, kind: type[CheckpointError] | type[SourceError] = CheckpointError) -> None:
        path.write_bytes(data)
        with pytest.raises(kind, match=match):
            value(open_checkpoint(path)).read_elements()

    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)
    at = good.index(FOUR)
    refused(good[:at] + b"\x01" + good[at + 1 :], "member 'data/0': the data does not match its checksum")
    entry = good.rindex(b"PK\1\2")
    refused(good[:entry] + b"XXXX" + good[entry + 4 :], "entry 1 of the zip directory is damaged")
    changed = bytearray(good)
    struct.pack_into("<I", changed, entry + 42, 0)  # the second member lies where the first does
    refused(bytes(changed), "overlaps the one before it")
    changed = bytearray(good)
    struct.pack_into("<H", changed, entry + 8, 1)
    refused(bytes(changed), "member 'data/0' is encrypted")
    changed = bytearray(good)
    struct.pack_into("<H", changed, entry + 10, 14)
    refused(bytes(changed), "compression method 14")
    for name, match in (
        ("archive/x/data.pkl", "2 data.pkl"),
        ("other/data/1", "outside the top folder"),
        ("archive/data/0", "two members"),
        ("archive/constants.pkl", "TorchScript"),
    ):
        with (
            zipfile.ZipFile(path, "w") as file,
            pytest.warns(UserWarning) if name == "archive/data/0" else nullcontext(),
        ):
            for member, data in (("archive/data.pkl", dictionary(a=tensor())), ("archive/data/0", FOUR), (name, b"x")):
                file.writestr(member, data)
        refused(path.read_bytes(), match)
    refused(
        archive(
            tmp_path / "o.pth", dictionary(a=tensor()), {"0": FOUR}, more={"archive/byteorder": b"middle"}
        ).read_bytes(),
        "byteorder record is b'middle'",
    )


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"protocol": pickle.dumps(1002, 2)}, "legacy format version 1002"),
        ({"keys": pickle.dumps(["k", "x"], 2)}, "'x' belongs to no tensor"),
        ({"keys": pickle.dumps([], 2)}, "'k' is not in the file"),
        ({"keys": pickle.dumps({"k": 1}, 2)}, "not a list of strings"),
        ({"keys": pickle.dumps(["k", "k"], 2)}, "cut off|twice"),
        ({"system": b"\x80\x02cposix\nsystem\n."}, "posix.system"),
    ],
)
def test_open_checkpoint_damaged_legacy_file_is_refused(tmp_path: Path, parts: dict[str, bytes], match: str) -> None:
    count = (4).to_bytes(8, "little")
    path = legacy(tmp_path / "c.pth", dictionary(a=tensor(key="k", legacy=True)), ["k"], [count + FOUR], **parts)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["archive", "legacy"])
def test_open_checkpoint_opcode_limit_is_inclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    data = dictionary(a=tensor(key="k", legacy=kind == "legacy"))
    if kind == "legacy":
        path = legacy(tmp_path / "c.pth", data, ["k"], [(4).to_bytes(8, "little") + FOUR])
    else:
        path = archive(tmp_path / "c.pth", data, {"k": FOUR})
    opcodes = sum(1 for _ in pickletools.genops(data))
    monkeypatch.setattr(torch_file, "MAX_OPCODES", opcodes)
    assert value(open_checkpoint(path)).read_elements().tolist() == [0, 1, 2, 3]
    monkeypatch.setattr(torch_file, "MAX_OPCODES", opcodes - 1)
    with pytest.raises(CheckpointError, match=f"the pickle has more than {opcodes - 1} opcodes"):
        open_checkpoint(path)


def test_open_checkpoint_truncated_legacy_file_is_refused(tmp_path: Path) -> None:
    count = (4).to_bytes(8, "little")
    path = legacy(tmp_path / "c.pth", dictionary(a=tensor(key="k", legacy=True)), ["k"], [count + FOUR])
    data = path.read_bytes()
    path.write_bytes(data.replace(count + FOUR, (5).to_bytes(8, "little") + FOUR))
    with pytest.raises(CheckpointError, match="has 5 elements, its tensors say 4"):
        open_checkpoint(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_write_checkpoint_of_benchmark_equals_pickle(tmp_path: Path) -> None:
    """The benchmark's checkpoint is worth nothing unless its pickle is an honest one."""
    path = tmp_path / "c.pth"
    write_checkpoint(path, {"a": np.arange(4, dtype=np.float32)})
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert [name.partition("/")[2] for name in file.namelist()] == ["data.pkl", "byteorder", "data/0", "version"]
        assert all(info.compress_type == zipfile.ZIP_STORED for info in file.infolist())
    with path.open("rb") as raw:
        assert raw.read().index(np.arange(4, dtype=np.float32).tobytes()) % 64 == 0
    assert value(open_checkpoint(path)).read_elements().tolist() == [0, 1, 2, 3]
