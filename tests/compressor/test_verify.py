"""Proofs of weight files: findings and their codes, comparison with the checkpoint, accounts of every byte, export."""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compressor_files import checkpoint, weight_file, weights
from fixtures.compressor_checkpoint import training_state

import kvmnn
from kvmnn import KvmnnError
from kvmnn.cli import entry_point
from kvmnn.compressor import kvcm
from kvmnn.compressor.checkpoint import open_checkpoint
from kvmnn.compressor.convert import convert_checkpoint
from kvmnn.compressor.export import export_weights
from kvmnn.compressor.inspect import inspect_checkpoint, inspect_weight_file
from kvmnn.compressor.lint import check_weight_file
from kvmnn.compressor.select import ConvertOptions
from kvmnn.compressor.verify import verify_weights

STATE = weights()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A weight file and its checkpoint."""
    source = checkpoint(tmp_path / "c.pth", training_state(STATE))
    convert_checkpoint(source, tmp_path / "w.bin")
    return tmp_path / "w.bin", source


# -- findings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reasons"),
    [
        (weight_file(), []),
        (weight_file(count=6), []),
        (weight_file(header={"head_dim": 0, "hidden_size": 0, "num_heads": 0}), []),
        (weight_file(count=7), ["weight_count_not_multiple_of_3"]),
        (weight_file(count=3), ["missing_text_mlp"]),
        (weight_file(count=9), ["odd_prefix_count", "missing_image_mlp"]),
        (weight_file(count=15), ["odd_prefix_count"]),
        (weight_file(header={"hidden_size": 5}), ["hidden_size_mismatch", "factor_mismatch"]),
        (weight_file(header={"head_dim": 3}), ["head_dim_mismatch", "factor_mismatch"]),
        (weight_file(header={"compression_factor": 3}), ["factor_mismatch"]),
        (weight_file(header={"compression_factor": 3, "head_dim": 0}), ["factor_mismatch"]),
        (weight_file(header={"compression_factor": 0}), ["factor_invalid"]),
        (weight_file(header={"compression_factor": 1}), ["factor_invalid"]),
        (weight_file(header={"reserved": 1}), ["reserved_nonzero"]),
        (weight_file(header={"min_seq_len": 1, "num_heads": 512}), []),
        (weight_file(header={"min_seq_len": 2**31 - 1}), []),
        (weight_file(header={"min_seq_len": 0}), ["min_seq_len_implausible"]),
        (weight_file(header={"min_seq_len": 2**31}), ["min_seq_len_implausible"]),
        (weight_file(header={"num_heads": 513}), ["num_heads_implausible"]),
        (
            weight_file(header={"min_seq_len": 2**32 - 1, "num_heads": 2**32 - 1}),
            ["min_seq_len_implausible", "num_heads_implausible"],
        ),
    ],
)
def test_check_weight_file_reports_reasons(data: bytes, reasons: list[str]) -> None:
    assert [finding.reason for finding in check_weight_file(kvcm.parse_weight_file(data))] == reasons


def with_shape(block: int, rows: int, cols: int) -> bytes:
    """Two layers of six blocks, one of them of another shape."""
    header = kvcm.WeightFileHeader(
        dtype_code=0, num_layers=2, head_dim=2, hidden_size=4, compression_factor=2, weight_count_per_layer=6
    )
    shapes = [(2, 4), (2, 2), (2, 2)] * 4
    shapes[block] = (rows, cols)
    sink = io.BytesIO()
    kvcm.write_weight_file(sink, header, ((np.zeros(shape, "<f2"), None) for shape in shapes))
    return sink.getvalue()


@pytest.mark.parametrize(
    ("block", "shape", "text"),
    [
        (1, (2, 3), "layer 0, block 1: the weight has 3 columns: expected 2, the rows of the weight before it"),
        (3, (2, 6), "layer 0, block 3: the weight has 6 columns: expected 4, the columns of the first weight"),
        (5, (3, 2), "layer 0, block 5: the weight has 3 rows: expected 2, the head_dim"),
        (6, (2, 6), "layer 1, block 0: the weight has 6 columns: expected 4"),
        (10, (3, 2), "layer 1, block 4: the weight has 3 x 2: expected 2 x 2 as in layer 0"),
    ],
)
def test_check_weight_file_mismatched_shapes_are_errors(block: int, shape: tuple[int, int], text: str) -> None:
    (finding,) = check_weight_file(kvcm.parse_weight_file(with_shape(block, *shape)))
    assert finding.reason == "shape_chain"
    assert text in finding.text
    assert finding.is_error


def test_check_weight_file_non_finite_elements_are_warnings() -> None:
    data = bytearray(weight_file())
    struct.pack_into("<2H", data, 56, 0x7C00, 0xFE00)
    (finding,) = check_weight_file(kvcm.parse_weight_file(bytes(data)))
    assert (finding.reason, finding.is_error) == ("non_finite", False)
    assert finding.text.startswith("2 elements are infinite or no number, the first in the weight of layer 0, block 0")


# -- against the checkpoint -------------------------------------------------------------------------------------------


def test_verify_converted_file_is_exact(pair: tuple[Path, Path]) -> None:
    verdict = verify_weights(pair[0], against=pair[1])
    assert verdict.is_ok
    assert verdict.num_compared == sum(value.size for value in STATE.values())


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_verify_names_every_flipped_element(tmp_path: Path, dtype: str) -> None:
    source = checkpoint(tmp_path / "c.pth", STATE)
    convert_checkpoint(source, tmp_path / "w.bin", ConvertOptions(dtype=dtype))
    whole = (tmp_path / "w.bin").read_bytes()
    file = kvcm.parse_weight_file(whole)
    size = file.header.dtype.itemsize
    for layer, index, part, at in ((0, 0, "weight", (0, 0)), (1, 7, "weight", (3, 2)), (1, 11, "bias", (3,))):
        place = file.get_placement(layer, index)
        element = np.ravel_multi_index(at, (place.rows, place.cols) if part == "weight" else (place.rows,))
        begin = place.offset + 12 + int(element) * size + (part == "bias") * place.rows * place.cols * size
        changed = bytearray(whole)
        changed[begin] ^= 1
        (tmp_path / "w.bin").write_bytes(changed)
        verdict = verify_weights(tmp_path / "w.bin", against=source)
        assert not verdict.is_ok
        prefix, slot = kvcm.DEFAULT_PREFIXES[index // 3], kvcm.DEFAULT_SLOTS[index % 3]
        expected = f"offset {place.offset}: layer {layer}, {prefix}, slot {slot}: {part}{list(at)} is "
        assert [text.startswith(expected) for text in verdict.differences] == [True], verdict.differences


def test_verify_ignores_nan_payload_but_not_nan(tmp_path: Path) -> None:
    name = "compress_tk.0.0.weight"
    source = checkpoint(tmp_path / "c.pth", {**STATE, name: np.full((4, 12), np.nan, np.float32)})
    convert_checkpoint(source, tmp_path / "w.bin")
    data = bytearray((tmp_path / "w.bin").read_bytes())
    struct.pack_into("<H", data, 56, 0xFFFF)
    (tmp_path / "w.bin").write_bytes(data)
    assert verify_weights(tmp_path / "w.bin", against=source).is_ok
    struct.pack_into("<H", data, 58, 0x7C00)
    (tmp_path / "w.bin").write_bytes(data)
    verdict = verify_weights(tmp_path / "w.bin", against=source)
    assert re.search(r"weight\[0, 1\] is inf, the checkpoint gives nan \(1 of 48", verdict.differences[0])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"compress_tk.0.0.bias": None}, "bias is there, the checkpoint has none"),
        (
            {"compress_tv.0.3.weight": np.zeros((4, 5), np.float32)},
            r"weight has shape \[4, 4\], the checkpoint's \[4, 5\]",
        ),
        ({"compress_tk.0.0.weight": np.zeros((4, 8), np.float32)}, "header field hidden_size is 12: expected 8"),
        (weights(3), "header field num_layers is 2: expected 3"),
    ],
)
def test_verify_other_checkpoint_is_different(
    pair: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    state = {key: value for key, value in {**STATE, **change}.items() if value is not None}
    other = checkpoint(tmp_path / "other.pth", state)
    differences = verify_weights(pair[0], against=other).differences
    assert any(re.search(match, text) for text in differences), differences


def test_verify_extra_weights_are_named_by_number(tmp_path: Path) -> None:
    """As many weights, in a layer of four prefixes there and in two layers of two here."""
    convert_checkpoint(checkpoint(tmp_path / "one.pth", weights(1)), tmp_path / "w.bin")
    two = checkpoint(tmp_path / "two.pth", weights(2, prefixes=kvcm.TEXT_PREFIXES))
    differences = verify_weights(
        tmp_path / "w.bin", against=two, options=ConvertOptions(prefixes=kvcm.TEXT_PREFIXES)
    ).differences
    named = {text.split(", ")[1] for text in differences if ", slot " in text}
    assert "prefix 2" in named <= {*kvcm.TEXT_PREFIXES, "prefix 2", "prefix 3"}


def test_verify_missing_bias_is_a_difference(tmp_path: Path) -> None:
    state = {key: value for key, value in STATE.items() if not key.endswith("bias")}
    convert_checkpoint(checkpoint(tmp_path / "c.pth", state), tmp_path / "w.bin")
    differences = verify_weights(tmp_path / "w.bin", against=checkpoint(tmp_path / "d.pth", STATE)).differences
    assert len(differences) == 24
    assert differences[0].endswith("bias is missing, the checkpoint has one")


def test_verify_omitted_bias_needs_as_reference(tmp_path: Path, run: Callable[..., SimpleNamespace]) -> None:
    source = checkpoint(tmp_path / "c.pth", {**STATE, "compress_ik.0.3.bias": np.zeros(7, np.float32)})
    made = tmp_path / "w.bin"
    convert_checkpoint(source, made, ConvertOptions(as_reference=True))
    told = run("compressor", "verify", made, "--against", source, code=1)
    assert "EXACT" not in told.out
    assert "compress_ik, slot 3: bias is left out, the checkpoint has one of 7 for 4 rows" in told.err
    exact = run("compressor", "verify", made, "--against", source, "--as-reference").out
    assert "EXACT" in exact
    assert "1 of the checkpoint's biases left out" in exact
    document = run("compressor", "verify", made, "--against", source, "--as-reference", "--json").out
    assert json.loads(document)["left_out"] == ["compress_ik.0.3.bias"]


def test_verify_text_only_and_other_orders(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c.pth", STATE)
    convert_checkpoint(source, tmp_path / "t.bin", ConvertOptions(prefixes=kvcm.TEXT_PREFIXES))
    assert verify_weights(tmp_path / "t.bin", against=source).is_ok
    other = ConvertOptions(prefixes=kvcm.DEFAULT_PREFIXES[::-1], slots=(3, 0, 6), as_reference=True)
    convert_checkpoint(source, tmp_path / "o.bin", other)
    assert verify_weights(tmp_path / "o.bin", against=source).differences
    assert not verify_weights(tmp_path / "o.bin", against=source, options=other).differences


# -- the command ------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = entry_point.main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_verify_command_output_and_exit_code(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, source = pair
    code, out, err = run(capsys, "compressor", "verify", file)
    assert (code, err) == (0, "")
    assert out.startswith(f"{file}: VALID (no --against: nothing to compare with), 2 layers of 12 weights, fp16")
    code, out, err = run(capsys, "compressor", "verify", file, "--against", source)
    assert (code, err) == (0, "")
    assert f"EXACT (header and {_size():,} elements compared with {source}, rounded to fp16)" in out
    code, out, err = run(
        capsys, "compressor", "verify", file, "--against", source, "--min-seq-len", 5, "--num-heads", 1
    )
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        f"kvmnn: error: {file}: DIFFERS from {source}: offset 16: header field num_heads is 0: expected 1",
        f"kvmnn: error: {file}: DIFFERS from {source}: offset 32: header field min_seq_len is 2: expected 5",
    ]
    code, out, err = run(capsys, "compressor", "verify", file, "--against", source, "--json")
    document = json.loads(out)
    assert (document["kind"], document["verdict"], document["reasons"]) == ("weights", "accept", [])
    code, _, err = run(capsys, "compressor", "verify", file, "--against", source, "--against", source)
    assert code == 2


def _size() -> int:
    return sum(value.size for value in STATE.values())


def test_verify_command_refused_file_is_json_reject(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(weight_file(header={"dtype_code": 9}))
    code, out, err = run(capsys, "compressor", "verify", path, "--json")
    document = json.loads(out)
    assert code == 1
    assert (document["verdict"], document["reasons"]) == ("reject", ["bad_dtype"])
    assert document["findings"][0]["offset"] == 8
    assert (
        err
        == f"kvmnn: error: {path}: offset 8: field dtype_code is 9: expected 0 (fp16), 1 (bf16), 2 (fp32) (bad_dtype)\n"
    )
    path.write_bytes(weight_file(header={"compression_factor": 1}))
    code, out, err = run(capsys, "compressor", "verify", path)
    assert (code, out) == (1, "")
    assert err.endswith("field compression_factor is 1: expected 2 or more (factor_invalid)\n")
    path.write_bytes(weight_file(header={"reserved": 1}))
    code, _, err = run(capsys, "compressor", "verify", path)
    assert (code, err.startswith("kvmnn: warning: ")) == (0, True)


def test_verify_command_allows_trailing_bytes_on_request(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    weights, source = pair
    longer = weights.with_name("longer.bin")
    longer.write_bytes(weights.read_bytes() + b"tail")
    code, out, err = run(capsys, "compressor", "verify", longer, "--against", source)
    assert (code, out) == (1, "")
    assert err.endswith("4 more bytes follow: expected the end of the file (trailing_bytes)\n")
    code, out, err = run(capsys, "compressor", "verify", longer, "--against", source, "--allow-trailing")
    size = weights.stat().st_size
    assert (code, "EXACT" in out, "rounded to fp16; 4 bytes after them not)" in out) == (0, True, True)
    assert (
        err
        == f"kvmnn: warning: offset {size}: 4 bytes follow the last block, which loaders pass over (trailing_bytes)\n"
    )
    _, out, _ = run(capsys, "compressor", "verify", longer, "--allow-trailing", "--json")
    assert json.loads(out)["verdict"] == "accept_warn"


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_weight_file_accounts_for_every_byte() -> None:
    file = kvcm.parse_weight_file(weight_file(2, metadata=b"note") + b"tail", allow_trailing=True)
    account = inspect_weight_file(file)
    assert sum(account.parts.values()) == account.size == file.size
    assert account.parts["metadata"] == account.parts["trailing"] == 4
    assert account.parts["header"] == 44
    assert account.parts["block heads"] == 24 * 12


def test_inspect_statistics_use_finite_elements(tmp_path: Path) -> None:
    weight = np.array([[1, 2], [np.inf, np.nan]], "<f4")
    header = kvcm.WeightFileHeader(dtype_code=2, num_layers=1, compression_factor=1, weight_count_per_layer=2)
    path = tmp_path / "w.bin"
    with path.open("wb") as file:
        kvcm.write_weight_file(file, header, [(weight, np.array([3, 6], "<f4")), (weight[1:], None)])
    first, second = inspect_weight_file(kvcm.read_weight_file(path)).rows
    assert (first.minimum, first.maximum, first.mean, first.non_finite) == (1, 6, 3, 2)
    assert first.std == pytest.approx(np.std([1, 2, 3, 6]))
    assert (second.minimum, second.std, second.non_finite, second.bias) == (None, None, 2, False)


def test_inspect_checkpoint_accounts_for_every_byte(pair: tuple[Path, Path]) -> None:
    account = inspect_checkpoint(open_checkpoint(pair[1]), ConvertOptions())
    assert sum(account.parts.values()) == account.size == pair[1].stat().st_size
    assert account.parts["storages of the compressor"] == 4 * _size()
    assert account.parts["other storages"] == 4 * (2 * _size() + len(STATE))
    assert [row.name for row in account.rows] == [linear.name for linear in account.selection.linears]
    assert account.rows[0].maximum == max(STATE["compress_tk.0.0.weight"].max(), STATE["compress_tk.0.0.bias"].max())


def test_inspect_command_output_and_exit_code(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for path, kind in zip(pair, ("weights", "checkpoint"), strict=True):
        code, out, err = run(capsys, "compressor", "inspect", path)
        assert (code, err) == (0, "")
        assert "compress_iv.1.6" in out
        assert f"{path.stat().st_size:,}" in out.splitlines()[-1]
        code, out, _ = run(capsys, "compressor", "inspect", path, "--json")
        (document,) = json.loads(out)["inputs"]
        assert (code, document["kind"], len(document["weights"])) == (0, kind, 24)
        assert sum(document["parts"].values()) == document["bytes"]


# -- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [{"b": "\u00e9", "a": "x"}, b"\xff\0", b"not JSON", b'{ "a": "b" }'],
    ids=["own", "bytes", "text", "JSON"],
)
def test_convert_restores_options_recorded_by_export(tmp_path: Path, metadata: Any) -> None:
    source, first, last = checkpoint(tmp_path / "c.pth", STATE), tmp_path / "w.bin", tmp_path / "again.bin"
    convert_checkpoint(source, first, ConvertOptions(dtype="bf16", min_seq_len=5, num_heads=8, metadata=metadata))
    export_weights(first, tmp_path / "w.safetensors")
    again = convert_checkpoint(tmp_path / "w.safetensors", last)
    assert again.notices == ["header fields and metadata that were not said are those that the checkpoint's own "
                             "metadata notes"]  # fmt: skip
    assert last.read_bytes() == first.read_bytes()
    assert verify_weights(first, against=tmp_path / "w.safetensors").is_ok


def test_convert_options_override_recorded_ones(tmp_path: Path) -> None:
    source, first, last = checkpoint(tmp_path / "c.pth", STATE), tmp_path / "w.bin", tmp_path / "again.bin"
    convert_checkpoint(source, first, ConvertOptions(dtype="bf16", min_seq_len=5, num_heads=8, metadata={"a": "x"}))
    export_weights(first, tmp_path / "w.safetensors")
    again = convert_checkpoint(
        tmp_path / "w.safetensors", last, ConvertOptions(num_heads=4), specified_options=["min_seq_len", "metadata"]
    )
    header = kvcm.read_weight_file(last).header
    assert (header.dtype.name, header.min_seq_len, header.num_heads, header.metadata_size_bytes) == ("bf16", 2, 4, 0)
    assert again.notices[1:] == [
        "header field num_heads is 4, the checkpoint's metadata notes 8",
        "header field min_seq_len is 2, the checkpoint's metadata notes 5",
        "header field metadata_size_bytes is 0, the checkpoint's metadata notes 12",
        "the metadata is another than the checkpoint's own metadata notes",
    ]
    assert not verify_weights(first, against=tmp_path / "w.safetensors", specified_options=["min_seq_len"]).is_ok


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_export_and_convert_are_inverse(tmp_path: Path, dtype: str) -> None:
    source = checkpoint(tmp_path / "c.pth", STATE)
    convert_checkpoint(source, tmp_path / "w.bin", ConvertOptions(dtype=dtype))
    file = kvcm.read_weight_file(tmp_path / "w.bin")
    assert export_weights(file, tmp_path / "w.safetensors").num_tensors == len(STATE)
    again = convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "again.bin")
    assert again.rounded_types == []
    same, rounded = (
        verify_weights(tmp_path / "again.bin", against=tmp_path / "w.safetensors"),
        verify_weights(again.target, against=source),
    )
    assert (same.is_ok, same.is_rounded, "rounded" in str(same)) == (True, False, False)
    assert (rounded.is_rounded, f"rounded to {dtype}" in str(rounded)) == (dtype != "fp32", dtype != "fp32")
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "w.bin").read_bytes()
    export_weights(file, tmp_path / "w.npz")
    with np.load(tmp_path / "w.npz") as arrays:
        assert list(arrays) == [
            f"{prefix}.{layer}.{slot}.{part}"
            for layer in range(2)
            for prefix in kvcm.DEFAULT_PREFIXES
            for slot in kvcm.DEFAULT_SLOTS
            for part in ("weight", "bias")
        ]
        assert np.array_equal(arrays["compress_ik.1.3.weight"], file.get_block(1, 7).weight)


def test_export_invalid_prefixes_or_slots_are_refused(tmp_path: Path) -> None:
    file = kvcm.parse_weight_file(weight_file(count=9))
    export_weights(file, tmp_path / "nine.npz")
    export_weights(file, tmp_path / "named.npz", prefixes=("a", "b", "c"), slots=(1, 2, 3))
    with np.load(tmp_path / "named.npz") as arrays:
        assert "c.0.3.bias" in arrays
    for prefixes in (("a", "b"), ("a", "a", "b")):
        with pytest.raises(KvmnnError, match="has 9 weights in a layer: expected"):
            export_weights(file, tmp_path / "x.npz", prefixes=prefixes)
    with pytest.raises(KvmnnError, match=r"ends in \.safetensors or \.npz"):
        export_weights(file, tmp_path / "x.bin")


def test_export_command_writes_archives(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "w.safetensors"
    code, out, _ = run(capsys, "compressor", "export", pair[0], "-o", target)
    assert (code, out) == (0, f"{target}: 48 tensors of fp16, LOSSLESS (read back)\n")
    nowhere = tmp_path / "w.npz"
    nowhere.symlink_to("/dev/null")
    code, out, _ = run(capsys, "compressor", "export", pair[0], "-o", nowhere)
    assert (code, out) == (0, f"{nowhere}: 48 tensors of fp16, UNCHANGED (copied)\n")
    code, _, err = run(capsys, "compressor", "export", pair[0], "-o", target)
    assert code == 1
    assert "exists already" in err
    assert run(capsys, "compressor", "export", pair[0], "-o", "-")[0] == 2


def test_inspect_command_frame_named_bin_is_a_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "frame.bin"
    path.write_bytes(kvmnn.encode(np.arange(64, dtype=np.float16)))
    assert run(capsys, "inspect", path)[0] == 0
    code, out, _ = run(capsys, "verify", path)
    assert (code, "DECODES" in out) == (0, True)
    path.write_bytes(weight_file(header={"magic": 0}))
    code, _, err = run(capsys, "verify", path)
    assert (code, "(bad_magic)" in err) == (1, True)


@pytest.mark.slow
def test_convert_command_reads_standard_input(pair: tuple[Path, Path], tmp_path: Path) -> None:
    file, source = pair
    entry_point = [sys.executable, "-m", "kvmnn", "compressor", "convert", "-", "-"]
    with source.open("rb") as stdin:
        done = subprocess.run(entry_point, stdin=stdin, capture_output=True, check=True)
    assert done.stdout == file.read_bytes()
    assert done.stderr.decode().startswith("Wrote - (layers=2")
