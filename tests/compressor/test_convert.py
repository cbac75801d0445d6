"""Conversion: the reference's rules in their order, the extensions after them, rounding, and what is left over."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from compressor_files import checkpoint, weights
from hypothesis import given
from hypothesis import strategies as st
from kvcm_loaders import csrc_accepts, src_accepts

from kvmnn import KvmnnError
from kvmnn.cli import entry_point
from kvmnn.compressor import convert as conversion
from kvmnn.compressor import kvcm
from kvmnn.compressor.checkpoint import convert_elements, count_non_finite
from kvmnn.compressor.convert import ConvertResult, convert_checkpoint
from kvmnn.compressor.kvcm import round_float32
from kvmnn.compressor.select import ConvertOptions, TensorSelection, select_tensors
from kvmnn.compressor.verify import verify_weights
from kvmnn.dtypes import BF16, FP16, FP32
from kvmnn.errors import CheckpointError, OutputError
from kvmnn.formats.torch.tensors import ELEMENT_TYPES, TorchStorage, TorchTensor

STATE = weights()
OTHER = weights(seed=1)
TEXT = weights(prefixes=kvcm.TEXT_PREFIXES)


def converted(
    tmp_path: Path, root: Any, options: ConvertOptions | None = None
) -> tuple[kvcm.WeightFile, ConvertResult]:
    source = checkpoint(tmp_path / "c.pth", root)
    done = convert_checkpoint(source, tmp_path / "w.bin", options, overwrite=True)
    data = (tmp_path / "w.bin").read_bytes()
    assert src_accepts(data)
    assert csrc_accepts(data)
    return kvcm.parse_weight_file(data), done


def refusal(tmp_path: Path, root: Any, options: ConvertOptions | None = None) -> str:
    source = checkpoint(tmp_path / "c.pth", root)
    with pytest.raises(KvmnnError) as refused:
        convert_checkpoint(source, tmp_path / "w.bin", options)
    assert os.listdir(tmp_path) == ["c.pth"]
    return str(refused.value)


def holds(file: kvcm.WeightFile, state: dict[str, npt.NDArray[np.float32]], prefixes: tuple[str, ...]) -> bool:
    names = [
        f"{p}.{layer}.{s}" for layer in range(file.header.num_layers) for p in prefixes for s in kvcm.DEFAULT_SLOTS
    ]
    for name, block in zip(names, file.iter_blocks(), strict=True):
        bias = state.get(f"{name}.bias")
        if not np.array_equal(block.weight, state[f"{name}.weight"].astype(np.float16)):
            return False
        if (block.bias is None) != (bias is None):
            return False
        if bias is not None and not np.array_equal(block.bias, bias.astype(np.float16)):
            return False
    return True


@pytest.mark.parametrize(
    ("root", "notice"),
    [
        ({"model_state_dict": {"compressor": STATE}, "compressor": OTHER, "epoch": 1}, None),
        ({"model_state_dict": {"compressor": 1}, "compressor": STATE, "state_dict": OTHER}, None),
        ({"compressor": STATE, **OTHER}, None),
        ({**STATE, "state_dict": OTHER}, None),
        (dict(reversed(STATE.items())), None),
        ({f"module.{key}": value for key, value in STATE.items()}, "'module.' or 'compressor.' was left out"),
        (
            {f"module.compressor.{key}": value for key, value in STATE.items()},
            "'module.' or 'compressor.' was left out",
        ),
        ({"compressor": {f"module.{key}": value for key, value in STATE.items()}}, "was left out"),
        ({"state_dict": STATE, "model_state_dict": OTHER}, "taken from state_dict"),
        ({"model_state_dict": STATE}, "taken from model_state_dict"),
        ({"model_state_dict": {f"compressor.{key}": value for key, value in STATE.items()}}, "taken from model_state"),
        ({**STATE, "compress_ik.7.0.extra": 1}, "counted from the weights alone"),
    ],
)
def test_convert_finds_weights_by_reference_order(tmp_path: Path, root: Any, notice: str | None) -> None:
    file, done = converted(tmp_path, root)
    assert holds(file, STATE, kvcm.DEFAULT_PREFIXES)
    assert [notice is not None and notice in text for text in done.notices] == [True] * (notice is not None)


def test_convert_infers_text_only_without_contradiction(tmp_path: Path) -> None:
    file, done = converted(tmp_path, TEXT)
    assert holds(file, TEXT, kvcm.TEXT_PREFIXES)
    assert file.header.weight_count_per_layer == 6
    assert "text only, as with --prefix-order compress_tk,compress_tv" in done.notices[0]
    partial = {**TEXT, "compress_ik.0.0.weight": STATE["compress_ik.0.0.weight"]}
    (tmp_path / "w.bin").unlink()
    assert "'compress_ik.0.3.weight' is missing" in refusal(tmp_path, partial)
    (tmp_path / "c.pth").unlink()
    assert "for a text-only compressor say --prefix-order" in refusal(
        tmp_path, TEXT, ConvertOptions(prefixes=(*kvcm.DEFAULT_PREFIXES[:3],))
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"compress_tk.0.0.weight": None}, "'compress_tk.0.0.weight' is missing"),
        ({"compress_iv.1.6.weight": None}, "'compress_iv.1.6.weight' is missing"),
        ({"compress_tk.3.0.weight": STATE["compress_tk.0.0.weight"]}, "'compress_tk.2.0.weight' is missing"),
        ({"compress_tk.02.0.weight": STATE["compress_tk.0.0.weight"]}, "'compress_tk.2.0.weight' is missing"),
        ({"compress_tk.0.0.weight": [1]}, "is a list: expected a tensor"),
        ({"compress_iv.1.6.bias": 1}, "is an int: expected a tensor"),
        ({"compress_tk.0.0.weight": STATE["compress_tk.0.0.bias"]}, r"has shape \[4\]: expected two axes"),
        ({"compress_ik.1.3.weight": np.zeros((4, 2, 2), np.float32)}, r"has shape \[4, 2, 2\]"),
        ({"compress_ik.1.3.weight": np.zeros((0, 4), np.float32)}, r"has shape \[0, 4\]: loaders take"),
        ({"compress_tk.0.0.weight": np.zeros((0, 4), np.float32)}, r"\[0, 4\]"),
        ({"compress_tk.0.0.weight": np.zeros((5, 12), np.float32)}, "no multiple of head_dim 5"),
    ],
)
def test_convert_invalid_compressor_writes_nothing(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    state = {key: value for key, value in {**STATE, **change}.items() if value is not None}
    text = refusal(tmp_path, {"model_state_dict": {"compressor": state}, "state_dict": OTHER})
    assert re.search(match, text), text


@pytest.mark.parametrize(
    ("root", "match"),
    [
        ([1], "holds a list: expected a dict"),
        (STATE["compress_tk.0.0.weight"], "holds a bare tensor"),
        ({}, "holds no weights of a KV compressor: has no layer of compress_tk, .* it has no keys"),
        ({"attention.0.weight": STATE["compress_tk.0.0.weight"]}, "it has 'attention.0.weight'"),
        ({3: 4}, "not all of its keys are strings"),
        ({"compress_tk.0.weight": 1, "compress_tk.x.0.weight": 1}, "has no layer"),
        ({"a": 1, "module.compress_tk.0.0.weight": 1, "compressor.compress_tk.0.0.weight": 1}, "is there twice"),
    ],
)
def test_convert_checkpoint_without_compressor_is_refused(tmp_path: Path, root: Any, match: str) -> None:
    assert re.search(match, refusal(tmp_path, root))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (ConvertOptions(slots=(0, 3)), "has 2 entries: expected 3"),
        (ConvertOptions(dtype="float16"), "unknown dtype"),
        (ConvertOptions(head_dim=5), "no multiple of head_dim 5"),
        (ConvertOptions(min_seq_len=-1), "min_seq_len is -1: expected 0 to 4294967295"),
        (ConvertOptions(num_heads=-1), "num_heads is -1"),
        (ConvertOptions(compression_factor=2**32), "compression_factor is 4294967296"),
        (ConvertOptions(prefixes=()), "no layer of no prefix at all"),
        (ConvertOptions(prefixes=(*kvcm.DEFAULT_PREFIXES, "x")), "'x.0.0.weight' is missing"),
        (ConvertOptions(prefixes=("compress_tk",) * 1366), "2 layers of 4098 weights: loaders take 10000 of 4096"),
    ],
)
def test_convert_invalid_options_are_refused(tmp_path: Path, options: ConvertOptions, match: str) -> None:
    assert match in refusal(tmp_path, STATE, options)


def test_convert_header_fields_from_weights_or_options(tmp_path: Path) -> None:
    file, _ = converted(tmp_path, STATE)
    assert file.header == kvcm.WeightFileHeader(
        dtype_code=0,
        num_layers=2,
        head_dim=4,
        hidden_size=12,
        compression_factor=3,
        weight_count_per_layer=12,
    )
    options = ConvertOptions(
        dtype="fp32", compression_factor=7, min_seq_len=9, num_heads=32, head_dim=6, as_reference=True
    )
    header = converted(tmp_path, STATE, options)[0].header
    assert (header.compression_factor, header.min_seq_len, header.num_heads, header.head_dim) == (7, 9, 32, 6)
    for factor, dim, expected in ((-1, -3, (3, 4)), (0, 0, (3, 4)), (1, 1, (1, 1))):
        header = converted(tmp_path, STATE, ConvertOptions(compression_factor=factor, head_dim=dim, as_reference=True))[
            0
        ].header
        assert (header.compression_factor, header.head_dim) == expected


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        (
            {"compress_tv.1.3.bias": np.zeros(5, np.float32)},
            ConvertOptions(as_reference=True),
            "left out 1 bias \\('compress_tv.1.3'\\): the length is 5, its weight has 4 rows",
        ),
        (
            {"compress_tv.1.3.weight": np.full((4, 4), 7e4, np.float32)},
            ConvertOptions(),
            "16 elements are infinite .* as fp16",
        ),
        (
            {"compress_tv.1.3.bias": np.full(4, np.nan, np.float32)},
            ConvertOptions(dtype="fp32"),
            "4 elements .* as fp32, the first in 'compress_tv.1.3.bias'",
        ),
        (
            {"compress_tv.1.3.weight": np.zeros((5, 5), np.float32)},
            ConvertOptions(as_reference=True),
            "layers differ in shape: .*1.3.weight",
        ),
        (
            {},
            ConvertOptions(compression_factor=4, as_reference=True),
            "factor 4 is not columns / rows .* 12 / 4",
        ),
        ({}, ConvertOptions(prefixes=kvcm.DEFAULT_PREFIXES[::-1]), "whatever they are"),
        ({}, ConvertOptions(slots=(6, 3, 0), as_reference=True), "slot order 6,3,0"),
        ({}, ConvertOptions(slots=(0, 3, 3)), "slot order 0,3,3"),
        ({}, ConvertOptions(min_seq_len=0), "field min_seq_len is 0: expected 1 to 2147483647"),
        ({}, ConvertOptions(min_seq_len=2**31), "field min_seq_len is 2147483648"),
        ({}, ConvertOptions(min_seq_len=2**32 - 1), "field min_seq_len is 4294967295"),
        ({}, ConvertOptions(num_heads=513), "field num_heads is 513: expected 0 .not given. to 512"),
        ({}, ConvertOptions(num_heads=2**32 - 1), "field num_heads is 4294967295"),
        ({"compress_tk.0.9.weight": 1, "attention.0.weight": 2}, ConvertOptions(), "not used: 2 keys"),
    ],
)
def test_convert_reports_warnings(tmp_path: Path, change: dict[str, Any], options: ConvertOptions, match: str) -> None:
    _, done = converted(tmp_path, {**STATE, **change}, options)
    assert any(re.search(match, warning) for warning in done.warnings), done.warnings


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"compress_tv.1.3.weight": np.zeros((5, 5), np.float32)}, ConvertOptions(), "shape_chain"),
        ({}, ConvertOptions(compression_factor=4), "factor_mismatch"),
        ({}, ConvertOptions(head_dim=6), "shape_chain"),
        ({}, ConvertOptions(slots=(6, 3, 0)), "factor_invalid"),
        ({}, ConvertOptions(prefixes=("compress_tk",)), "missing_text_mlp"),
        ({}, ConvertOptions(prefixes=kvcm.DEFAULT_PREFIXES[:3]), "odd_prefix_count"),
    ],
)
def test_convert_file_that_verify_refuses_needs_as_reference(
    tmp_path: Path, change: dict[str, Any], options: ConvertOptions, reason: str
) -> None:
    said = refusal(tmp_path, {**STATE, **change}, options)
    assert "gives a weight file that kvmnn verify refuses: offset" in said
    assert said.endswith("; --as-reference writes it")
    convert_checkpoint(tmp_path / "c.pth", tmp_path / "w.bin", replace(options, as_reference=True))
    (first, *_) = verify_weights(tmp_path / "w.bin").findings
    assert first.is_error
    assert f"{first.text} ({first.reason})" in said
    assert first.reason == reason


@pytest.mark.parametrize("length", [1, 3, 5, 8])
@pytest.mark.parametrize("name", ["compress_tk.0.0", "compress_iv.1.6"])
def test_convert_bias_of_other_length_refused_unless_as_reference(tmp_path: Path, name: str, length: int) -> None:
    state = {**STATE, f"{name}.bias": np.ones(length, np.float32)}
    text = refusal(tmp_path, state)
    assert f"gives a weight file without 1 bias ('{name}'): the length is {length}, its weight has 4 rows" in text
    assert text.endswith("; --as-reference leaves it out, as the published converter does")
    file, done = converted(tmp_path, state, ConvertOptions(as_reference=True))
    assert sum(block.bias is None for block in file.iter_blocks()) == 1
    assert any("left out 1 bias" in warning for warning in done.warnings)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_convert_cache_file_error_names_no_other_format(
    tmp_path: Path, name: str, run: Callable[..., SimpleNamespace]
) -> None:
    source = tmp_path / name
    if name.endswith(".pth"):
        checkpoint(source, {"k": np.zeros(4, np.float32), "v": np.zeros(4, np.float32)})
    else:
        fields = {"dtype": "F32", "shape": [4]}
        header = json.dumps({"k": {**fields, "data_offsets": [0, 16]}, "v": {**fields, "data_offsets": [16, 32]}})
        source.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(32))
    told = run("compressor", "convert", source, tmp_path / "w.bin", code=1).err
    assert "holds no weights of a KV compressor" in told
    assert "it has 'k', 'v'" in told
    assert "torch.save" not in told


def test_convert_clean_checkpoint_has_no_warnings(tmp_path: Path) -> None:
    _, done = converted(tmp_path, STATE)
    assert (done.warnings, done.notices, done.unused, done.rounded_types) == ([], [], [], ["float32"])
    assert converted(tmp_path, STATE, ConvertOptions(dtype="fp32"))[1].rounded_types == []


def test_convert_bias_of_any_shape_with_one_element_per_row(tmp_path: Path) -> None:
    state = {**STATE, "compress_tk.0.0.bias": STATE["compress_tk.0.0.bias"].reshape(2, 2)}
    assert holds(converted(tmp_path, state)[0], STATE, kvcm.DEFAULT_PREFIXES)


def test_convert_weights_without_rows_need_as_reference(tmp_path: Path) -> None:
    state = {**STATE, "compress_ik.1.3.weight": np.zeros((0, 4), np.float32)}
    assert "loaders take 1 to" in refusal(tmp_path, state)
    convert_checkpoint(tmp_path / "c.pth", tmp_path / "w.bin", ConvertOptions(as_reference=True))
    data = (tmp_path / "w.bin").read_bytes()
    assert not src_accepts(data)
    assert b"\0\0\0\0\4\0\0\0\0\0\0\0" in data


# -- rounding ---------------------------------------------------------------------------------------------------------


def nearest(value: int, exponent_bits: int, fraction_bits: int) -> int:
    """Bits of a float32, rounded to a smaller format by exact integer arithmetic; NaN aside."""
    sign, magnitude = value >> 31, value & 0x7FFF_FFFF
    bias, most = (1 << exponent_bits - 1) - 1, (1 << exponent_bits) - 1
    infinity = most << fraction_bits
    if magnitude >= 0x7F80_0000:
        return sign << exponent_bits + fraction_bits | infinity
    exponent = max(magnitude >> 23, 1)
    significand = (magnitude & 0x7F_FFFF) | ((1 << 23) if magnitude >> 23 else 0)
    shift = 23 - fraction_bits
    if exponent - 127 + bias < 1:
        shift += 1 - (exponent - 127 + bias)
    target = max(exponent - 127 + bias, 1)
    quotient, rest = significand >> shift, significand & ((1 << shift) - 1)
    half = 1 << shift - 1
    quotient += rest > half or (rest == half and quotient & 1)
    result = quotient if target == 1 else quotient + (target - 1 << fraction_bits)
    return sign << exponent_bits + fraction_bits | min(result, infinity)


EDGES = [
    *(0, 0x8000_0000, 1, 0x7F_FFFF, 0x80_0000, 0x3F80_0000, 0x3F80_1000, 0x3F80_3000, 0x3F80_8000, 0x3F81_8000),
    *(0x477F_E000, 0x477F_EFFF, 0x477F_F000, 0x4780_0000, 0x3300_0000, 0x3300_0001, 0x3380_0000, 0x3880_0000),
    *(0x387F_C000, 0x387F_E000, 0x387F_FFFF, 0x7F7F_FFFF, 0x7F7F_8000, 0x7F7F_7FFF, 0x7F80_0000, 0xFF80_0000),
]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_round_float32_is_to_nearest_even(bits: list[int]) -> None:
    bits = [b for b in bits if b & 0x7FFF_FFFF <= 0x7F80_0000] + EDGES
    floats = np.array(bits, np.uint32).view(np.float32)
    assert round_float32(floats, FP16).view(np.uint16).tolist() == [nearest(b, 5, 10) for b in bits]
    assert round_float32(floats, BF16).tolist() == [nearest(b, 8, 7) for b in bits]
    assert round_float32(floats, FP32).view(np.uint32).tolist() == bits


def of(values: npt.NDArray[Any], name: str) -> TorchTensor:
    data = values.reshape(-1).view(np.uint8)
    storage = TorchStorage("0", ELEMENT_TYPES[name], data.size, lambda: data)
    return TorchTensor(storage, storage.element_type, 0, values.shape, (1,))


def test_convert_elements_rounds_float64_through_float32() -> None:
    value = np.array([1 + 2**-11 + 2**-40])  # to fp16 at once this is 1 + 2^-10; by way of float32 a tie, hence 1
    assert convert_elements(of(value, "float64"), FP16).tolist() == [1.0]
    assert value.astype(np.float16).tolist() == [1 + 2**-10]
    assert convert_elements(of(np.array([2**24 + 1], np.int64), "int64"), FP32).tolist() == [2.0**24]
    assert convert_elements(of(np.array([1e300, -1e300]), "float64"), BF16).tolist() == [0x7F80, 0xFF80]


def test_convert_elements_same_type_keeps_bits() -> None:
    for name, dtype, patterns in (
        ("float16", FP16, [0x7C01, 0xFE01, 1, 0x8000]),
        ("bfloat16", BF16, [0x7F81, 0xFFC1, 1, 0x8000]),
    ):
        words = np.array(patterns, "<u2")
        assert convert_elements(of(words.view(dtype.numpy_dtype), name), dtype).view("<u2").tolist() == patterns


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_count_non_finite_counts_nan_and_infinity(dtype: Any) -> None:
    words = round_float32(np.array([1, np.nan, np.inf, -np.inf, 0, -0.0, 3e38], np.float32), dtype)
    assert count_non_finite(words, dtype) == {"fp16": 4, "bf16": 3, "fp32": 3}[dtype.name]
    assert np.isnan(kvcm.to_float32(words)).tolist() == [False, True] + [False] * 5


# -- output -----------------------------------------------------------------------------------------------------------


def test_convert_existing_output_needs_overwrite(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c.pth", STATE)
    target = tmp_path / "w.bin"
    target.write_bytes(b"mine")
    with pytest.raises(OutputError, match="exists already"):
        convert_checkpoint(source, target)
    assert target.read_bytes() == b"mine"
    convert_checkpoint(source, target, overwrite=True)
    assert len(target.read_bytes()) > 1000
    with pytest.raises(OutputError, match="is the input itself"):
        convert_checkpoint(source, source, overwrite=True)


def test_convert_write_failure_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "c.pth", STATE)
    calls = 0

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise CheckpointError("the disk was pulled out")
        return original(*arguments)

    original = conversion.convert_elements
    monkeypatch.setattr(conversion, "convert_elements", fail)
    with pytest.raises(CheckpointError, match="pulled out"):
        convert_checkpoint(source, tmp_path / "w.bin")
    assert os.listdir(tmp_path) == ["c.pth"]


def test_convert_damaged_storage_is_detected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "c.pth", STATE)
    data = bytearray(source.read_bytes())
    data[data.index(STATE["compress_iv.1.6.bias"].tobytes())] ^= 1
    source.write_bytes(data)
    monkeypatch.setattr(conversion.PreparedConversion, "write_weight_file", None)
    with pytest.raises(CheckpointError, match=r"'compress_iv.1.6.bias': member .* does not match its checksum"):
        convert_checkpoint(source, tmp_path / "w.bin")


def test_convert_progress_counts_all_bytes_but_the_header(tmp_path: Path) -> None:
    done: list[int] = []
    source = checkpoint(tmp_path / "c.pth", STATE)
    result = convert_checkpoint(source, tmp_path / "w.bin", progress=done.append)
    assert sum(done) + kvcm.HEADER_BYTES == result.nbytes == (tmp_path / "w.bin").stat().st_size


def test_convert_command_equals_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = checkpoint(tmp_path / "c.pth", {**STATE, "x": 1}), tmp_path / "new" / "folder" / "w.bin"
    options = ["--dtype", "bf16", "--prefix-order", " compress_tk,, compress_tv", "--slot-order", "0, 3 ,6,"]
    assert entry_point.main(["compressor", "convert", str(source), "--output", str(target), *options]) == 0
    shown = capsys.readouterr()
    first, second = shown.out.splitlines()
    assert first == f"Wrote {target} (layers=2, weights/layer=6, dtype=bf16, factor=3, hidden_size=12, head_dim=4)"
    assert second.startswith("sha256 ")
    assert second.endswith("bytes, LOSSY (float32 rounded to bf16)")
    assert shown.err.startswith("kvmnn: warning: not used: 25 keys ('compress_ik.0.0.weight'")
    assert entry_point.main(["compressor", "convert", str(source), str(target), "--json", "-f", "--dtype", "fp32"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["label"] == "LOSSLESS"
    assert document["unused"] == ["x"]
    assert document["bytes"] == target.stat().st_size
    assert entry_point.main(["compressor", "convert", str(source), str(target)]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["-"],
        ["in.pth", "a.bin", "--output", "b.bin"],
        ["--output", "b.bin"],
        ["in.pth", "a.bin", "--dtype", "float16"],
        ["in.pth", "a.bin", "--slot-order", "0,3"],
        ["in.pth", "a.bin", "--slot-order", "a,b,c"],
        ["in.pth", "a.bin", "--min-seq-len", "x"],
        ["in.pth", "-", "--json"],
    ],
)
def test_convert_command_invalid_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry_point.main(["compressor", "convert", *arguments]) == 2
    assert capsys.readouterr().err.startswith("kvmnn: error: ")


def test_select_tensors_counts_bytes_without_a_file() -> None:
    selection = select_tensors(_tensors(), ConvertOptions())
    assert isinstance(selection, TensorSelection)
    assert selection.nbytes == 44 + 24 * 12 + 2 * sum(value.size for value in STATE.values())


def _tensors() -> dict[str, TorchTensor]:
    found = {}
    for name, value in STATE.items():
        made = of(value, "float32")
        strides = tuple(stride // 4 for stride in value.strides)
        found[name] = TorchTensor(made.storage, made.element_type, 0, value.shape, strides)
    return found
