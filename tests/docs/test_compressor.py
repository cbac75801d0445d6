"""The dump and the tables of docs/compressor-weights.md agree with kvmnn."""

from __future__ import annotations

import io
import re
from itertools import pairwise

import numpy as np
import pytest
from compressor_files import weight_file
from repository import DOCS

from kvmnn.compressor import kvcm, select
from kvmnn.compressor.inspect import inspect_weight_file
from kvmnn.compressor.lint import check_weight_file
from kvmnn.errors import WeightsError
from kvmnn.formats.torch import allowed_globals, tensors, torch_file
from kvmnn.formats.torch.torch_file import MAX_INFLATED_BYTES

TEXT = (DOCS / "compressor-weights.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def tables(title: str) -> list[list[list[str]]]:
    blocks = re.findall(r"(?:^\|.*\n)+", section(title), re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|\n").split("|")] for line in b.splitlines()[2:]] for b in blocks]


def dump() -> bytes:
    rows = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)$", section("A file of one layer"), re.MULTILINE)
    data = b""
    for offset, row in rows:
        assert int(offset, 16) == len(data)
        data += bytes.fromhex(row)
    return data


def half(*values: float) -> np.ndarray:
    return np.array(values, "<f2")


def test_weights_dump_equals_written_file() -> None:
    header = kvcm.WeightFileHeader(
        dtype_code=0, num_layers=1, head_dim=1, hidden_size=2, compression_factor=2, weight_count_per_layer=6
    )
    blocks = [
        (half(0.5, -1.5), half(0.25)),
        (half(1), half(0)),
        (half(2), half(-1)),
        (half(0.5, 0.5), None),
        (half(1), None),
        (half(1), None),
    ]
    sink = io.BytesIO()
    kvcm.write_weight_file(sink, header, ((weight.reshape(1, -1), bias) for weight, bias in blocks))
    assert sink.getvalue() == dump()
    file = kvcm.parse_weight_file(dump())
    assert list(check_weight_file(file)) == []


def test_walk_through_covers_every_byte_and_field() -> None:
    (rows,) = tables("A file of one layer")
    data, position, told = dump(), 0, []
    for offset, spelled, field, value in rows:
        found = bytes.fromhex(spelled.strip("`"))
        assert int(offset) == position
        assert data[position : position + len(found)] == found
        position += len(found)
        told.append((field, value))
    assert position == len(data)
    file = kvcm.parse_weight_file(data)
    for field, value in told[1:12]:
        assert str(getattr(file.header, field)) == value.split()[0]
    expected = []
    for row, block in zip(inspect_weight_file(file).rows, file.iter_blocks(), strict=True):
        expected.append((row.name, f"{row.shape[0]} x {row.shape[1]}" + (", bias" if row.bias else "")))
        expected.append(("weight", " ".join(str(v) for v in block.weight.reshape(-1).tolist())))
        if block.bias is not None:
            expected.append(("bias", " ".join(str(v) for v in block.bias.tolist())))
    assert told[12:] == expected


def test_header_table_equals_field_offsets() -> None:
    (rows,) = tables("Header")
    assert {row[2].strip("`"): int(row[0]) for row in rows} == kvcm.FIELD_OFFSETS
    assert [{"u32": 4, "u16": 2}[row[1]] for row in rows] == [
        end - begin for begin, end in pairwise([*kvcm.FIELD_OFFSETS.values(), 44])
    ]


FORMAT = {
    "truncated_header": weight_file()[:43],
    "bad_magic": weight_file(header={"magic": 1}),
    "bad_version": weight_file(header={"version": 2}),
    "bad_dtype": weight_file(header={"dtype_code": 3}),
    "bad_num_layers": weight_file(header={"num_layers": 10_001}),
    "bad_weight_count": weight_file(header={"weight_count_per_layer": 4_097}),
    "bad_metadata_size": weight_file(header={"metadata_size_bytes": 10_000}),
    "truncated_block": weight_file()[:-1],
    "bad_shape": weight_file()[:44] + bytes(4) + weight_file()[48:],
    "bad_has_bias": weight_file()[:52] + b"\2" + weight_file()[53:],
    "trailing_bytes": weight_file() + b"\0",
}
SEMANTIC = {
    "weight_count_not_multiple_of_3": weight_file(count=7),
    "missing_text_mlp": weight_file(count=3),
    "odd_prefix_count": weight_file(count=15),
    "missing_image_mlp": weight_file(count=9),
    "shape_chain": weight_file(header={"compression_factor": 4, "head_dim": 1}),
    "head_dim_mismatch": weight_file(header={"head_dim": 3}),
    "hidden_size_mismatch": weight_file(header={"hidden_size": 3}),
    "factor_mismatch": weight_file(header={"compression_factor": 3}),
    "factor_invalid": weight_file(header={"compression_factor": 1}),
}

WARNED = {
    "min_seq_len_implausible": weight_file(header={"min_seq_len": 0}),
    "num_heads_implausible": weight_file(header={"num_heads": 513}),
    "reserved_nonzero": weight_file(header={"reserved": 1}),
    "non_finite": weight_file()[:56] + b"\0\x7c" + weight_file()[58:],
}


def test_code_tables_are_complete() -> None:
    refused_by_reader, refused_by_verify, warned = tables("What a reader refuses")
    assert [row[0].strip("`") for row in refused_by_reader] == list(FORMAT)
    assert [row[0].strip("`") for row in refused_by_verify] == list(SEMANTIC)
    assert [row[0].strip("`") for row in warned] == list(WARNED)


@pytest.mark.parametrize("code", WARNED)
def test_warning_code_is_the_only_finding(code: str) -> None:
    assert [(found.reason, found.is_error) for found in check_weight_file(kvcm.parse_weight_file(WARNED[code]))] == [
        (code, False)
    ]


@pytest.mark.parametrize("code", FORMAT)
def test_reader_code_is_the_error_reason(code: str) -> None:
    with pytest.raises(WeightsError) as refused:
        kvcm.parse_weight_file(FORMAT[code])
    assert refused.value.reason == code


@pytest.mark.parametrize("code", SEMANTIC)
def test_verifier_code_is_among_the_errors(code: str) -> None:
    assert code in [
        finding.reason for finding in check_weight_file(kvcm.parse_weight_file(SEMANTIC[code])) if finding.is_error
    ]


def test_limits_equal_the_code() -> None:
    said = section("From a checkpoint").replace("\n", " ")
    assert f"{torch_file.MAX_PICKLE_BYTES >> 20} MiB of pickle, {torch_file.MAX_OPCODES:,} opcodes" in said
    assert (
        f"limit of {MAX_INFLATED_BYTES >> 20} MiB, the weight file of {select.MAX_WEIGHT_FILE_BYTES >> 30} GiB" in said
    )
    assert f"a list of {len(allowed_globals._ALLOWED_GLOBALS)} (what" in said
    assert {kind.name for kind in tensors.ELEMENT_TYPES.values() if not kind.numpy_code} == {
        *("qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
        *("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    }
    assert all(f"{kind.name}" in said for kind in tensors.ELEMENT_TYPES.values() if kind.name.startswith("float8"))
    assert f"1 to {kvcm.MAX_WEIGHT_ELEMENTS:,}" in section("Block")
