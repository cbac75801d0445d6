"""Weight files: written files are read back, and malformed ones are refused with the offset."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from compressor_files import weight_file
from hypothesis import given
from hypothesis import strategies as st
from kvcm_loaders import csrc_accepts, src_accepts

from kvmnn import KvmnnError
from kvmnn.compressor import kvcm
from kvmnn.errors import SourceError, WeightsError


@given(
    dtype_code=st.integers(0, 2),
    layers=st.integers(1, 3),
    count=st.integers(1, 12),
    head_dim=st.integers(1, 5),
    bias=st.booleans(),
    metadata=st.binary(max_size=9),
    numbers=st.tuples(*[st.integers(0, 2**32 - 1)] * 5),
)
def test_weight_file_round_trips_byte_for_byte(
    dtype_code: int,
    layers: int,
    count: int,
    head_dim: int,
    bias: bool,
    metadata: bytes,
    numbers: tuple[int, ...],
) -> None:
    names = ("num_heads", "head_dim", "hidden_size", "compression_factor", "min_seq_len")
    data = weight_file(
        layers,
        count,
        dtype_code=dtype_code,
        bias=bias,
        head_dim=head_dim,
        metadata=metadata,
        header=dict(zip(names, numbers, strict=True)),
    )
    file = kvcm.parse_weight_file(data)
    again = io.BytesIO()
    size = kvcm.write_weight_file(
        again, file.header, ((b.weight, b.bias) for b in file.iter_blocks()), metadata=file.metadata
    )
    assert again.getvalue() == data
    assert size == file.size == len(data)
    assert file.metadata == metadata
    assert len(file) == layers * count
    assert [getattr(file.header, name) for name in names] == list(numbers)
    assert src_accepts(data)
    assert csrc_accepts(data)


def test_get_block_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(weight_file(2, metadata=b"odd"))
    file = kvcm.read_weight_file(path)
    block = file.get_block(1, 7)
    assert (block.layer, block.prefix, block.slot) == (1, 2, 1)
    assert block.weight.base is not None
    assert not block.weight.flags.owndata
    assert not block.weight.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        block.weight[0, 0] = 1
    place = file.get_placement(1, 7)
    assert place == (block.offset, block.rows, block.cols, True)
    assert path.read_bytes()[place.offset + 12 :].startswith(block.weight.tobytes())


def test_get_block_bf16_words_and_values() -> None:
    words = np.array([[0x3F80, 0xC000], [0x7F80, 0x0001]], "<u2")
    sink = io.BytesIO()
    header = kvcm.WeightFileHeader(dtype_code=1, num_layers=1, compression_factor=1, weight_count_per_layer=1)
    kvcm.write_weight_file(sink, header, [(words, words[0])])
    block = kvcm.parse_weight_file(sink.getvalue()).get_block(0, 0)
    assert block.weight.dtype == np.uint16
    assert block.convert_weight_to_float32().tolist() == [[1.0, -2.0], [np.inf, float.fromhex("0x1p-133")]]
    bias = block.convert_bias_to_float32()
    assert bias is not None
    assert bias.tolist() == [1.0, -2.0]


def test_convert_weight_to_float32_of_fp32_is_a_view() -> None:
    block = kvcm.parse_weight_file(weight_file(dtype_code=2, bias=False)).get_block(0, 0)
    assert np.shares_memory(block.convert_weight_to_float32(), block.weight)
    assert block.convert_bias_to_float32() is None


FIELD = [
    ({"magic": 0}, "bad_magic", 0),
    ({"version": 2}, "bad_version", 4),
    ({"dtype_code": 3}, "bad_dtype", 8),
    ({"num_layers": 0}, "bad_num_layers", 12),
    ({"num_layers": 10_001}, "bad_num_layers", 12),
    ({"num_layers": 0xFFFF_FFFF}, "bad_num_layers", 12),
    ({"num_layers": 2}, "truncated_block", 364),
    ({"weight_count_per_layer": 0}, "bad_weight_count", 36),
    ({"weight_count_per_layer": 4_096}, "truncated_block", 364),
    ({"weight_count_per_layer": 4_097}, "bad_weight_count", 36),
    ({"weight_count_per_layer": 11}, "trailing_bytes", 340),
    ({"metadata_size_bytes": 10_000}, "bad_metadata_size", 40),
]


@pytest.mark.parametrize(("field", "reason", "offset"), FIELD)
def test_parse_weight_file_error_names_field_offset(field: dict[str, int], reason: str, offset: int) -> None:
    data = weight_file(header=field)
    assert len(data) == 364
    with pytest.raises(WeightsError, match=rf"offset {offset}: .*\({reason}\)$") as refused:
        kvcm.parse_weight_file(data)
    assert (refused.value.reason, refused.value.offset) == (reason, offset)


@pytest.mark.parametrize(
    ("rows", "cols", "has_bias", "reason", "text"),
    [
        (0, 4, 1, "bad_shape", "rows x cols is 0 x 4: expected 1 to 100000000"),
        (2, 0, 1, "bad_shape", "rows x cols is 2 x 0"),
        (0xFFFF_FFFF, 0xFFFF_FFFF, 0, "bad_shape", "4294967295 x 4294967295"),
        (10_000, 10_001, 0, "bad_shape", "10000 x 10001"),
        (2, 4, 2, "bad_has_bias", "field has_bias is 2: expected 0 or 1"),
        (10_000, 10_000, 0, "truncated_block", "10000 x 10000 weight needs 200000000 bytes, the file has"),
        (100_000_000, 1, 1, "truncated_block", "needs 200000000 bytes"),
    ],
)
def test_parse_weight_file_error_names_block_offset(
    rows: int, cols: int, has_bias: int, reason: str, text: str
) -> None:
    data = bytearray(weight_file())
    struct.pack_into("<III", data, 44, rows, cols, has_bias)
    with pytest.raises(WeightsError, match="layer 0, block 0: ") as refused:
        kvcm.parse_weight_file(bytes(data))
    assert refused.value.reason == reason
    assert text in str(refused.value)
    assert refused.value.offset in (44, 52, 56)


@pytest.mark.parametrize("dtype_code", [0, 2])
def test_parse_weight_file_truncated_file_is_refused(dtype_code: int) -> None:
    data = weight_file(2, 3, dtype_code=dtype_code, metadata=b"meta")
    for length in range(len(data)):
        with pytest.raises(WeightsError) as refused:
            kvcm.parse_weight_file(data[:length])
        reason = "truncated_header" if length < 44 else "bad_metadata_size" if length < 48 else "truncated_block"
        assert refused.value.reason == reason
        assert refused.value.offset <= length


@given(st.data())
def test_parse_weight_file_flipped_bits_parse_or_are_refused(data: st.DataObject) -> None:
    whole = bytearray(weight_file(2, 6, metadata=b"m"))
    for place in data.draw(st.lists(st.integers(0, len(whole) * 8 - 1), min_size=1, max_size=4)):
        whole[place // 8] ^= 1 << place % 8
    try:
        file = kvcm.parse_weight_file(bytes(whole))
    except WeightsError:
        return
    assert sum(block.nbytes for block in file.iter_blocks()) + 44 + len(file.metadata) == len(whole)
    assert src_accepts(bytes(whole))


def test_parse_weight_file_trailing_bytes_need_permission() -> None:
    data = weight_file() + b"\0\0\0\0"
    with pytest.raises(WeightsError, match="4 more bytes follow"):
        kvcm.parse_weight_file(data)
    assert kvcm.parse_weight_file(data, allow_trailing=True).trailing_bytes == 4


def test_parse_weight_file_nonzero_reserved_is_a_warning() -> None:
    file = kvcm.parse_weight_file(weight_file(header={"reserved": 7}))
    assert [reason for reason, _ in file.warnings] == ["reserved_nonzero"]
    assert kvcm.parse_weight_file(weight_file()).warnings == []


@pytest.mark.parametrize(
    ("head", "hint"),
    [
        (b"PK\3\4", "kvmnn compressor convert"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (kvcm.MAGIC_BYTES[::-1], "big-endian"),
    ],
)
def test_parse_weight_file_other_magic_has_a_hint(head: bytes, hint: str) -> None:
    with pytest.raises(WeightsError, match=hint):
        kvcm.parse_weight_file(head + bytes(100))


def test_read_weight_file_unreadable_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        kvcm.read_weight_file(tmp_path / "nothing.bin")
    with pytest.raises(SourceError, match="directory"):
        kvcm.read_weight_file(tmp_path)


def test_get_block_out_of_range_is_refused() -> None:
    file = kvcm.parse_weight_file(weight_file(1, 6))
    with pytest.raises(KvmnnError, match="no block 6 in layer 0: it has 1 layers of 6 blocks"):
        file.get_block(0, 6)
    with pytest.raises(KvmnnError, match="no block 0 in layer 1"):
        file.get_block(1, 0)


HALF = np.zeros((2, 2), "<f2")


@pytest.mark.parametrize(
    ("blocks", "match"),
    [
        ([], "0 blocks were given, the header says 1"),
        ([(HALF, None), (HALF, None)], "2 blocks were given"),
        ([(HALF[0], None)], "has shape \\[2\\]: expected two axes"),
        ([(HALF.astype("<f4"), None)], "words of type float32: expected float16"),
        ([(HALF, HALF[0].astype("<f4"))], "expected float16"),
        ([(HALF, np.zeros(3, "<f2"))], "bias has shape \\[3\\]: expected \\[2\\]"),
        ([(np.zeros((0, 2), "<f2"), None)], "the weight has 0 elements: loaders take 1 to"),
    ],
)
def test_write_weight_file_invalid_blocks_are_refused(
    blocks: list[tuple[np.ndarray, np.ndarray | None]], match: str
) -> None:
    header = kvcm.WeightFileHeader(dtype_code=0, num_layers=1, compression_factor=1, weight_count_per_layer=1)
    with pytest.raises(KvmnnError, match=match):
        kvcm.write_weight_file(io.BytesIO(), header, blocks)


def test_write_weight_file_invalid_header_is_refused() -> None:
    header = kvcm.WeightFileHeader(dtype_code=0, num_layers=1, compression_factor=-1, weight_count_per_layer=1)
    with pytest.raises(KvmnnError, match="compression_factor is -1: expected 0 to 4294967295"):
        kvcm.write_weight_file(io.BytesIO(), header, [])
    with pytest.raises(KvmnnError, match="metadata has 1 bytes, the header says 0"):
        kvcm.write_weight_file(
            io.BytesIO(), kvcm.WeightFileHeader(**{**header.to_dict(), "compression_factor": 1}), [], metadata=b"x"
        )


def test_loader_models_agree_with_recorded_loaders(unpacked: Callable[[str], Path]) -> None:
    folder = unpacked("compressor")
    cases = json.loads((folder / "bad_index.json").read_text())["cases"]
    for case in cases:
        data = (folder / case["file"]).read_bytes()
        assert src_accepts(data) == (case["ref_src_loader"]["verdict"] == "accept"), case["file"]
        assert csrc_accepts(data) == (case["ref_csrc_loader"]["verdict"] == "accept"), case["file"]
    assert len(cases) == 82
