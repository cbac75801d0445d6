"""Hostile checkpoints: nothing in them is executed, their claims are checked, memory stays bounded."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from compressor_files import archive, checkpoint, legacy, weights
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvmnn import KvmnnError
from kvmnn.compressor.convert import convert_checkpoint, prepare_conversion
from kvmnn.compressor.select import ConvertOptions
from kvmnn.errors import CheckpointError
from kvmnn.formats.torch import _pickles

CANARY = "KVMNN_CANARY"


class Evil:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def attacks(canary: str) -> dict[str, bytes]:
    """Pickles that make the file `canary` if anything that they ask for is done."""
    command = f"touch {canary}"
    code = f"open({canary!r}, 'w').close()"
    text = b"X" + struct.pack("<I", len(command)) + command.encode()
    source = b"X" + struct.pack("<I", len(code)) + code.encode()
    line = command.encode() + b"\n"
    ordered = b"ccollections\nOrderedDict\n)R"
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    system = b"cposix\nsystem\n"
    return {
        "reduce": pickle.dumps(Evil(os.system, command), 2),
        "reduce, protocol 4": pickle.dumps(Evil(os.system, command), 4),
        "reduce, protocol 0": pickle.dumps(Evil(os.system, command), 0),
        "exec": pickle.dumps(Evil(exec, code), 2),
        "eval": pickle.dumps(Evil(eval, code), 3),
        "getattr": pickle.dumps(Evil(getattr, pickle.Unpickler, "load"), 2),
        "nested": pickle.dumps({"model_state_dict": {"compressor": Evil(os.system, command)}}, 2),
        "next to the weights": pickle.dumps({"loss": Evil(subprocess.call, ["touch", canary])}, 2),
        "inst": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "obj": b"\x80\x02(" + system + text + b"o.",
        "newobj": b"\x80\x02" + system + text + b"\x85\x81.",
        "newobj_ex": b"\x80\x04" + system + text + b"\x85}\x92.",
        "extension": b"\x80\x02\x82\x01" + text + b"\x85R.",
        "persistent id as text": b"\x80\x02P" + line + b".",
        "persistent id as call": b"\x80\x02" + system + text + b"\x85RQ.",
        "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + text + b"\x85R.",
        "hidden in a dotted name": b"\x80\x04\x8c\x0bcollections\x8c\x13OrderedDict.__class__\x93" + text + b"\x85R.",
        "torch's own ways in": b"\x80\x02ctorch.hub\nload\n" + text + b"\x85R.",
        "copyreg": b"\x80\x02ccopyreg\n__newobj__\n" + system + text + b"\x86R.",
        "two levels": b"\x80\x02c__builtin__\ngetattr\ncos\nX\x06\0\0\0system\x86R" + text + b"\x85R.",
        "state of a name": b"\x80\x02" + rebuild + b"N}X\x08\0\0\0__code__" + source + b"s\x86b0N.",
        "state of a class": b"\x80\x02ccollections\nOrderedDict\nN}X\x0c\0\0\0__setstate__" + system + b"s\x86b0N.",
        "call of a result": b"\x80\x02" + ordered + text + b"\x85R.",
        "subclass by another name": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n("
        + system
        + b"ctorch\nTensor\n"
        + text
        + b"\x85}tR.",
        "tensor over a name": b"\x80\x02" + rebuild + b"(" + system + b"K\0))\x89NtR.",
        "import of this": b"\x80\x02cthis\ns\n.",
    }


NAMES = sorted(attacks(""))


@pytest.mark.parametrize("name", NAMES)
def test_hostile_pickle_has_no_effect(tmp_path: Path, name: str) -> None:
    canary = tmp_path / CANARY
    data = attacks(str(canary))[name]
    before = set(sys.modules)
    count = (0).to_bytes(8, "little")
    files = [archive(tmp_path / "zip.pth", data), legacy(tmp_path / "legacy.pth", data, [], [count])]
    files += [
        legacy(tmp_path / f"{part}.pth", pickle.dumps({}, 2), [], [], **{part: data})
        for part in ("magic", "protocol", "system", "keys")
    ]
    for file in files:
        with pytest.raises(CheckpointError):
            convert_checkpoint(file, tmp_path / "out.bin")
    assert not canary.exists()
    assert not (tmp_path / "out.bin").exists()
    assert not {"this", "torch", "torch.hub"} & (set(sys.modules) - before)


def test_hostile_pickle_harms_python_unpickler(tmp_path: Path) -> None:
    """The control: Python's own unpickler executes such a pickle in a child process."""
    data = attacks(str(tmp_path / CANARY))["reduce"]
    subprocess.run([sys.executable, "-c", f"import pickle; pickle.loads({data!r})"], check=True)
    assert (tmp_path / CANARY).exists()


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    state = weights(1, head_dim=2, factor=2, prefixes=("compress_tk", "compress_tv"))
    return checkpoint(
        tmp_path_factory.mktemp("whole") / "c.pth", {"model_state_dict": {"compressor": state}}
    ).read_bytes()


def attempt(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        _, selection = prepare_conversion(path, ConvertOptions())
    except KvmnnError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2_000
        return
    assert selection.linears


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=5), in_pickle=st.booleans())
def test_checkpoint_with_flipped_bytes_is_read_or_refused(
    tmp_path: Path, whole: bytes, flips: list[tuple[int, int]], in_pickle: bool
) -> None:
    with zipfile.ZipFile(_file(tmp_path, whole)) as file:
        data = file.read("archive/data.pkl")
    begin, size = (whole.index(data), len(data)) if in_pickle else (0, len(whole))
    changed = bytearray(whole)
    for place, mask in flips:
        changed[begin + place % size] ^= mask
    if in_pickle:
        _mend_checksum(changed, begin, size)
    attempt(tmp_path / "c.pth", bytes(changed))


def _file(folder: Path, data: bytes) -> Path:
    (folder / "whole.pth").write_bytes(data)
    return folder / "whole.pth"


def _mend_checksum(data: bytearray, begin: int, size: int) -> None:
    """Let the damage through to the pickle reader."""
    crc = zlib.crc32(data[begin : begin + size])
    entry = data.index(b"PK\1\2")
    struct.pack_into("<I", data, entry + 16, crc)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(end=st.floats(0, 1), cut=st.integers(0, 400))
def test_checkpoint_with_missing_bytes_is_read_or_refused(tmp_path: Path, whole: bytes, end: float, cut: int) -> None:
    at = int(end * len(whole))
    attempt(tmp_path / "c.pth", whole[:at] + whole[at + cut :])


OPCODES = b"(.0123abdehjlqrstuKMNQRXUTGJC}])\x80\x81\x85\x86\x87\x88\x89\x8a\x8c\x8f\x90\x91\x93\x94\x95c"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([bytes([code]) for code in OPCODES]), st.binary(max_size=6)), max_size=30))
@example([(b"}", b""), (b"h", b"\0"), (b".", b"")])
def test_pickle_any_opcodes_are_loaded_or_refused(parts: list[tuple[bytes, bytes]]) -> None:
    data = b"\x80\x02" + b"".join(code + argument for code, argument in parts) + b"."

    def refuse(*_: object) -> Any:
        raise CheckpointError("no")

    try:
        end, _ = _pickles.scan(data, 0, 1000)
        _pickles.load(data, 0, end, refuse, refuse)
    except CheckpointError:
        return
    assert 0 < end <= len(data)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x80\x06.", "protocol 6: expected at most 5"),
        (b"\x80\x02r\xff\xff\xff\x7f.", "memo place 2147483647 is above"),
        (b"\x80\x02X\xff\xff\xff\xff.", "within an opcode's argument"),
        (b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\xff.", "within an opcode's argument"),
        (b"\x80\x02\x8b\0\1\0\0" + bytes(256) + b".", "an integer of 256 bytes"),
        (b"\x80\x02I1\n.", r"0x49 \(INT\) is not one"),
        (b"\x80\x02\x97.", r"0x97 \(NEXT_BUFFER\)"),
        (b"\x80\x02\xff.", "0xff is not one"),
        (b"\x80\x02cx", "within an opcode's argument"),
        (b"\x80\x02N", "ends without its STOP"),
        (b"N" * 1001 + b".", "more than 1000 opcodes"),
    ],
)
def test_pickle_scan_out_of_bounds_is_refused(data: bytes, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        _pickles.scan(data, 0, 1000)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"0.", "the stack is empty"),
        (b"(0.", "the stack is empty"),
        (b"N(t0t.", "there is no mark"),
        (b"NNa.", "appends to NoneType"),
        (b"]NNs.", "sets items of list"),
        (b"}(Nu.", "a dict key without a value"),
        (b"N}b.", "sets the state of NoneType"),
        (b"h\5.", "memo place 5 is empty"),
        (b"K\1K\2\x93.", "a global whose name is not a string"),
        (b"NN\x90.", "there is no mark"),
        (b"N(N\x90.", "adds items to NoneType"),
        (b"U\1\xff.", "not UTF-8"),
        (b"N)R.", "calls NoneType"),
    ],
)
def test_pickle_load_invalid_stack_is_refused(data: bytes, match: str) -> None:
    end, _ = _pickles.scan(data, 0, 1000)
    with pytest.raises(CheckpointError, match=match):
        _pickles.load(data, 0, end, lambda *_: _pickles.AllowedGlobal("x"), lambda _: None)


# -- memory and time --------------------------------------------------------------------------------------------------

_LIMITED = """
import resource, sys, time
from kvmnn import KvmnnError
from kvmnn.compressor.convert import prepare_conversion
from kvmnn.compressor.select import ConvertOptions
start = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (start + int(sys.argv[2]) * 2**20,) * 2)
begin = time.process_time()
try:
    prepare_conversion(sys.argv[1], ConvertOptions())
    print("taken")
except KvmnnError as error:
    print("refused", error)
print(time.process_time() - begin < 20)
"""


def bombs(folder: Path) -> dict[str, tuple[Path, int]]:
    """Small files that claim or unfold to much, with the MiB that reading them may take."""
    deep = b"\x80\x02" + b")" + b"\x85" * 200_000 + b"q\0}h\0Ns."
    wide = b"\x80\x02" + b"]q\0" + b"(" + b"h\0" * 1_000_000 + b"l" + b"."
    lists = b"\x80\x02(" + b"(" + b"]" * 3_000_000 + b"t."
    zeros = bytes(320 << 20)
    made = {
        "deep tuples as a key": (archive(folder / "a.pth", deep), 256),
        "a million references": (archive(folder / "b.pth", wide), 256),
        "three million lists": (archive(folder / "c.pth", lists, method=zipfile.ZIP_DEFLATED), 512),
        "a pickle of 320 MiB of zeros": (archive(folder / "d.pth", zeros, method=zipfile.ZIP_DEFLATED), 256),
    }
    head = b"\x80\x02}(" + _text("compress_tk.0.0.weight") + b"ctorch._utils\n_rebuild_tensor_v2\n((" + _text("storage")
    head += b"ctorch\nFloatStorage\n" + _text("0") + _text("cpu") + b"J" + struct.pack("<i", len(zeros) // 4) + b"tQK\0"
    data = head + b"K\2K\4\x86K\4K\1\x86\x89NtRu."
    path = archive(folder / "e.pth", data, {"0": zeros}, method=zipfile.ZIP_DEFLATED)
    return {**made, "a storage of 320 MiB of zeros": (path, 256)}


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


@pytest.fixture(scope="module")
def bomb_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    return bombs(tmp_path_factory.mktemp("bombs"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits on address space are Linux's")
@pytest.mark.parametrize(
    "name",
    [
        "deep tuples as a key",
        "a million references",
        "three million lists",
        "a pickle of 320 MiB of zeros",
        "a storage of 320 MiB of zeros",
    ],
)
def test_checkpoint_bomb_memory_is_bounded(bomb_files: dict[str, tuple[Path, int]], name: str) -> None:
    path, mebibytes = bomb_files[name]
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(path), str(mebibytes)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.startswith("refused")
    assert done.stdout.endswith("True\n")


def test_checkpoint_huge_expanded_tensors_are_refused(tmp_path: Path) -> None:
    """Stride 0 repeats one element at no cost; 200 weights of 10^8 elements would take 40 GB."""
    head = b"\x80\x02}(" + _text("start") + b"ctorch._utils\n_rebuild_tensor_v2\n((" + _text("storage")
    head += (
        b"ctorch\nFloatStorage\n" + _text("0") + _text("cpu") + b"K\1tQK\0M\x10\x27M\x10\x27\x86K\0K\0\x86\x89NtRq\0"
    )
    keys = [f"compress_tk.{layer}.{slot}.weight" for layer in range(100) for slot in (0, 3, 6)]
    data = head + b"".join(_text(key) + b"h\0" for key in keys) + b"u."
    path = archive(tmp_path / "c.pth", data, {"0": bytes(4)})
    with pytest.raises(KvmnnError, match="the weight file would have 60000003644 bytes: at most 17179869184"):
        prepare_conversion(path, ConvertOptions(prefixes=("compress_tk",)))


@pytest.mark.parametrize("digits", [5, 40, 4_299, 4_300, 5_000])
@pytest.mark.parametrize("as_reference", [False, True])
def test_checkpoint_layer_numbers_of_any_length(tmp_path: Path, digits: int, as_reference: bool) -> None:
    state = {**weights(1), f"compress_tk.{'9' * digits}.0.x": 1}
    options = ConvertOptions(as_reference=as_reference)
    _, selection = prepare_conversion(checkpoint(tmp_path / "c.pth", state), options)
    assert selection.header.num_layers == 1
    assert len(selection.notices) == (digits <= 4_300)
    state[f"compress_tk.{'9' * digits}.0.weight"] = state["compress_tk.0.0.weight"]
    if digits <= 4_300:
        with pytest.raises(KvmnnError, match=r"layers of 12|header field num_layers|is missing") as refused:
            prepare_conversion(checkpoint(tmp_path / "c.pth", state), options)
        assert len(str(refused.value)) < 1_000


def test_checkpoint_error_messages_stay_short(tmp_path: Path) -> None:
    huge = b"\x8a\xff" + b"\x7f" * 255
    head = b"\x80\x02}(" + _text("a") + b"ctorch._utils\n_rebuild_tensor_v2\n((" + _text("storage")
    head += b"ctorch\nFloatStorage\n" + _text("0") + _text("cpu") + b"K\1tQK\0(" + huge * 64 + b"t(" + huge * 64
    with pytest.raises(KvmnnError, match="reaches element") as refused:
        prepare_conversion(archive(tmp_path / "c.pth", head + b"t\x89NtRu.", {"0": bytes(4)}), ConvertOptions())
    assert len(str(refused.value)) < 1_000
