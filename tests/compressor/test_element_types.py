"""Rare element types and old files: every code of float8, the negation bit, storages within storages."""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressor_files import legacy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmnn import KvmnnError
from kvmnn.arrays import float8
from kvmnn.cli import entry_point
from kvmnn.compressor.checkpoint import convert_elements, open_checkpoint
from kvmnn.compressor.convert import convert_checkpoint, prepare_conversion
from kvmnn.compressor.inspect import inspect_checkpoint
from kvmnn.compressor.kvcm import round_float32
from kvmnn.compressor.select import _EXACT_TYPES, ConvertOptions
from kvmnn.compressor.verify import verify_weights
from kvmnn.dtypes import BF16, FP16, FP32, parse_dtype
from kvmnn.errors import CheckpointError
from kvmnn.formats.torch.allowed_globals import set_tensor_state
from kvmnn.formats.torch.tensors import ELEMENT_TYPES, TorchStorage, TorchTensor

ONE = ConvertOptions(prefixes=("compress_tk",))


@pytest.fixture(scope="module")
def recorded(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("compressor_types")


# -- float8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("float8_e4m3fn", {0: 0.0, 1: 2**-9, 7: 7 * 2**-9, 8: 2**-6, 0x38: 1.0, 0x7E: 448.0, 0x81: -(2**-9)}),
        ("float8_e5m2", {1: 2**-16, 4: 2**-14, 0x3C: 1.0, 0x7B: 57344.0, 0x7C: math.inf, 0xFC: -math.inf}),
        ("float8_e4m3fnuz", {1: 2**-10, 8: 2**-7, 0x40: 1.0, 0x7F: 240.0, 0xFF: -240.0}),
        ("float8_e5m2fnuz", {1: 2**-17, 4: 2**-15, 0x40: 1.0, 0x7F: 57344.0, 0xFF: -57344.0}),
        ("float8_e8m0fnu", {0: 2**-127, 1: 2**-126, 127: 1.0, 128: 2.0, 254: 2.0**127}),
    ],
)
def test_float8_value_table_equals_known_codes(name: str, values: dict[int, float]) -> None:
    table = float8.build_value_table(name)
    assert {code: float(table[code]) for code in values} == values
    nan = {"fn": [0x7F, 0xFF], "m2": [*range(0x7D, 0x80), *range(0xFD, 0x100)], "nu": [255]}
    expected = [0x80] if name.endswith("fnuz") else nan[name[-2:]]
    assert np.flatnonzero(np.isnan(table)).tolist() == expected
    upper = table[: 256 if name.endswith("e8m0fnu") else 128]
    finite = upper[np.isfinite(upper)]
    assert (np.diff(finite) > 0).all()
    if not name.endswith(("fnuz", "fnu")):
        assert struct.pack("<f", table[0x80]) == struct.pack("<f", -0.0)
    assert not table.flags.writeable


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_convert_types_called_exact_lose_nothing(dtype: Any) -> None:
    """Their label is LOSSLESS: every value must come back from the words of the file."""
    for name in ("int8", "uint8", "bool", *float8.DECODABLE_NAMES):
        codes = np.arange(2 if name == "bool" else 256, dtype=np.uint8)
        tensor = _of(codes, name)
        values = tensor.to_float32()
        words = round_float32(values, dtype)
        back = words.astype(np.float32) if dtype != BF16 else (words.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(values, back, equal_nan=True) == (name in _EXACT_TYPES[dtype.name])
    assert not any(name.startswith("complex") for name in _EXACT_TYPES[dtype.name])


def _of(data: np.ndarray[Any, Any], name: str, **fields: Any) -> TorchTensor:
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    storage = TorchStorage("0", ELEMENT_TYPES[name], raw.size, lambda: raw)
    made = {"shape": data.shape, "strides": tuple(stride // data.itemsize for stride in data.strides), **fields}
    return TorchTensor(storage, storage.element_type, 0, **made)


# -- the negation bit -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4),
)
def test_is_contiguous_equals_numpy(axes: list[tuple[int, int]]) -> None:
    shape, strides = tuple(length for length, _ in axes), tuple(stride for _, stride in axes)
    array = np.lib.stride_tricks.as_strided(np.zeros(64, np.uint8), shape, strides)
    tensor = TorchTensor(
        TorchStorage("0", ELEMENT_TYPES["uint8"], 64, bytes), ELEMENT_TYPES["uint8"], 0, shape, strides
    )
    assert tensor.is_contiguous == array.flags.c_contiguous


@pytest.mark.parametrize(("name", "dtype"), [("float16", FP16), ("bfloat16", BF16), ("float32", FP32)])
def test_convert_elements_negation_bit_same_type(name: str, dtype: Any) -> None:
    patterns = np.array([[0, 1, 0x8000], [0x7C00, 0x3C00, 0xBC01]], "<u2")
    words = patterns.view(dtype.numpy_dtype) if dtype.itemsize == 2 else patterns.astype("<u4").view("<f4")
    with pytest.raises(CheckpointError, match=f"{name} tensor with torch's negation bit"):
        convert_elements(_of(words, name, is_negated=True), dtype)
    turned = _of(words, name, shape=(3, 2), strides=(1, 3), is_negated=True)
    bits = np.dtype(f"<u{dtype.itemsize}")
    sign = bits.type(1 << 8 * dtype.itemsize - 1)
    assert np.array_equal(convert_elements(turned, dtype).view(bits), words.T.view(bits) ^ sign)


def test_to_float32_negated_integers_wrap() -> None:
    found = _of(np.array([-128, 0, 127], np.int8), "int8", is_negated=True).to_float32()
    assert found.view(np.uint32).tolist() == np.array([-128, 0, -127], np.float32).view(np.uint32).tolist()
    assert _of(np.array([0, 1, 255], np.uint8), "uint8", is_negated=True).to_float32().tolist() == [0, 255, 1]


# -- storages within storages, and states -----------------------------------------------------------------------------

FOUR = np.arange(4, dtype="<f4").tobytes()


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _storage(view: bytes, *, kind: bytes = b"ctorch\nFloatStorage\n", key: str = "k") -> bytes:
    return b"(" + _text("storage") + kind + _text(key) + _text("cpu") + b"K\4" + view + b"tQ"


def _view(key: str = "v", offset: int = 1, count: int = 2) -> bytes:
    return b"(" + _text(key) + pickle.dumps(offset, 2)[2:-1] + pickle.dumps(count, 2)[2:-1] + b"t"


def _tensor(storage: bytes) -> bytes:
    return b"ctorch._utils\n_rebuild_tensor\n(" + storage + b"K\0K\1\x85K\1\x85tR"


def _root(*values: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(_text(str(n)) + value for n, value in enumerate(values)) + b"u."


def _opened(path: Path, root: bytes) -> Any:
    return open_checkpoint(legacy(path / "c.pth", root, ["k"], [(4).to_bytes(8, "little") + FOUR])).root


def test_open_checkpoint_storage_views_share_bytes(tmp_path: Path) -> None:
    parts = (_view(), _view("w", 0, 4), _view(), b"N")
    found = _opened(tmp_path, _root(*(_tensor(_storage(part)) for part in parts)))
    assert [found[key].read_elements().tolist() for key in found] == [[1], [0], [1], [0]]
    assert found["0"].storage is found["2"].storage
    assert found["0"].storage.root is found["3"].storage


@pytest.mark.parametrize(
    ("storages", "match"),
    [
        ([_storage(_view(offset=3))], "'v' is bytes 12 to 20 of storage 'k', which has 16"),
        ([_storage(_view(offset=-1))], "bytes -4 to 4"),
        ([_storage(_view(count=-1))], "bytes 4 to 0"),
        ([_storage(_view(offset=2**2000))], "is bytes"),
        ([_storage(_view(count=2**62))], "is bytes"),
        ([_storage(_view("x", 4, 0))], "reaches element 0: the storage holds 0"),
        ([_storage(_view()), _storage(_view(offset=2))], "'v' is given two places or sizes"),
        ([_storage(_view()), _storage(_view(count=3))], "'v' is given two places or sizes"),
        ([_storage(_view("k"))], "'k' is a whole storage and a part of one"),
        ([_storage(b"(K\1K\2K\3t")], "not a key, an offset and a size"),
        ([_storage(b"K\1")], "not a key, an offset and a size"),
        ([_storage(b"(" + _text("v") + b"K\1t")], "not a key, an offset and a size"),
        ([_storage(_view(), kind=b"ctorch.storage\nUntypedStorage\n")], "has no type"),
        ([_storage(_view(), kind=b"ctorch\nSize\n")], "does not name a storage"),
    ],
)
def test_open_checkpoint_invalid_storage_views_are_refused(tmp_path: Path, storages: list[bytes], match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as refused:
        _opened(tmp_path, _root(*(_tensor(storage) for storage in storages)))
    assert len(str(refused.value)) < 600


FLOAT_TENSOR = b"ctorch\nFloatTensor\n)\x81"


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (FLOAT_TENSOR + b"(" + _storage(b"N") + b"K\1K\3\x85K\1\x85tb", None),
        (FLOAT_TENSOR, "shape"),
        (FLOAT_TENSOR + b"(" + _storage(b"N") + b"K\2K\3\x85K\1\x85tb", "reaches element 4"),
        (FLOAT_TENSOR + b"(" + _storage(b"N") + b"K\2tb", "sets the state of TorchTensor"),
        (FLOAT_TENSOR + b"}b", "sets the state of TorchTensor"),
        (FLOAT_TENSOR + b"(NNNNtb", "tensor over NoneType"),
        (
            b"ctorch\nIntTensor\n)\x81(" + _storage(b"N") + b"K\1K\3\x85K\1\x85tb",
            "int32 tensor over a storage of float",
        ),
        (b"ctorch\nFloatTensor\nK\x05\x85R", "made of 1 values"),
        (b"ctorch.cuda\nFloatTensor\n)\x81", "class of torch.cuda"),
        (b"ctorch.sparse\nFloatTensor\n)\x81", "calls torch.sparse.FloatTensor"),
    ],
)
def test_open_checkpoint_legacy_tensor_constructors(tmp_path: Path, value: bytes, match: str | None) -> None:
    root = _root(value, _tensor(_storage(b"N")))
    if match in (None, "shape"):
        found = _opened(tmp_path, root)["0"]
        assert found.read_elements().tolist() == ([] if match else [1, 2, 3])
        return
    with pytest.raises(CheckpointError, match=match):
        _opened(tmp_path, root)


def test_set_tensor_state_accepts_only_tensors() -> None:
    tensor = _of(np.zeros(2, np.float32), "float32")
    assert not set_tensor_state(object(), (True, False, None))
    assert not set_tensor_state(tensor, (1, 2, 3))
    assert set_tensor_state(tensor, (True, False, None))
    assert tensor.shape == (2,)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(
    name=st.sampled_from(["old_views.pth", "old_plain_tensors_as_parameters.pth", "legacy_sparse.pth"]),
    flips=st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_convert_damaged_old_files_are_read_or_refused(
    tmp_path: Path, recorded: Path, name: str, flips: list[tuple[int, int]]
) -> None:
    data = bytearray((recorded / name).read_bytes())
    for place, mask in flips:
        data[place] ^= mask
    path = tmp_path / "c.pth"
    path.write_bytes(data)
    try:
        _, selection = prepare_conversion(path, ONE)
    except KvmnnError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2_000
        return
    assert selection.linears


# -- through the command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_convert_verifies_and_labels_rare_types(recorded: Path, tmp_path: Path, dtype: str) -> None:
    names = ("float8_e5m2.pth", "complex64_neg.pth", "old_views.pth", "neg_int16.pth", "float8_e8m0fnu.safetensors")
    for name in names:
        source, target = recorded / name, tmp_path / f"{name}.bin"
        done = convert_checkpoint(
            source, target, ConvertOptions(dtype=dtype, prefixes=("compress_tk",), as_reference=True)
        )
        verdict = verify_weights(target, against=source, options=ONE)
        assert verdict.differences == []
        assert verdict.num_compared == (target.stat().st_size - 44 - 36) // parse_dtype(dtype).itemsize
        kind = name.rpartition(".")[0].partition("_neg")[0].removeprefix("neg_").replace("old_views", "float32")
        plain = [] if dtype == "fp32" else ["float32"]
        lossless = kind in _EXACT_TYPES[dtype]
        assert sorted({*done.rounded_types, *plain}) == sorted({*plain, *([] if lossless else [kind])})
        assert any("imaginary parts" in warning for warning in done.warnings) == name.startswith("complex")


def test_inspect_accounts_for_storage_views(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("old_views.pth", "old_views_beside_their_root.pth", "float8_e4m3fn.pth", "complex32.pth"):
        path = recorded / name
        assert entry_point.main(["compressor", "inspect", str(path), "--json", "--prefix-order", "compress_tk"]) == 0
        (document,) = json.loads(capsys.readouterr().out)["inputs"]
        parts = document["parts"]
        assert sum(parts.values()) == path.stat().st_size
        assert min(parts.values()) >= 0


def test_inspect_safetensors_is_header_and_tensors(recorded: Path) -> None:
    checkpoint = open_checkpoint(recorded / "float8_e8m0fnu.safetensors")
    parts = inspect_checkpoint(checkpoint, ConvertOptions(prefixes=("compress_tk",))).parts
    assert parts["directory, names, padding"] == 0


def test_inspect_names_unreadable_tensors(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, part in (("sparse.pth", "weight"), ("quantised_channel_bias.pth", "bias")):
        path = recorded / name
        assert entry_point.main(["compressor", "inspect", str(path), "--prefix-order", "compress_tk"]) == 1
        assert capsys.readouterr().err.startswith(f"kvmnn: error: {path}: 'compress_tk.0.0.{part}': ")


def test_convert_complex_weights_are_reported(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(recorded / "complex32.pth"), str(tmp_path / "w.bin")
    assert (
        entry_point.main(["compressor", "convert", source, target, "--prefix-order", "compress_tk", "--as-reference"])
        == 0
    )
    shown = capsys.readouterr()
    assert shown.out.endswith("LOSSY (the real part of complex32, float32 rounded to fp16)\n")
    assert "left out the imaginary parts of 2 complex tensors ('compress_tk.0.0.weight', " in shown.err
