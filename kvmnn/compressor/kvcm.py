"""KVCM weight files (``.bin``): header, metadata, then weight blocks layer by layer (docs/compressor-weights.md).

Reading maps the file and takes views of it: nothing is copied, and nothing is allocated for a number that the file
merely claims. A file has no names; a block is identified by layer, prefix and slot. Loaders skip the metadata, which
the format does not define: kvmnn writes a JSON object with string values, and accepts any bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from ..dtypes import BF16, FP16, FP32, DType, Elements, Floats
from ..errors import KvmnnError, ManifestError, WeightsError
from ..files.mapped_file import MappedFile, read_head
from ..files.schema import Record, parse_document
from ..formats import detect_engine_name

if TYPE_CHECKING:
    from ..formats.base import Sink


def to_float32(elements: Elements) -> Floats:
    """Convert float16, float32 or bf16 (uint16) elements to float32: exact, and a view of float32."""
    if elements.dtype.kind == "u":
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return elements.astype(np.float32, copy=False)


def round_float32(floats: Floats, dtype: DType) -> Elements:
    """Round float32 to elements of `dtype`; NaN stays NaN, with any payload."""
    if dtype == FP32:
        return floats.astype(dtype.numpy_dtype, copy=False)
    if dtype == FP16:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return floats.astype(dtype.numpy_dtype)
    bits = np.ascontiguousarray(floats).view(np.uint32)
    halves = bits >> np.uint32(16)
    halves &= np.uint32(1)
    halves += bits
    halves += np.uint32(0x7FFF)
    halves >>= np.uint32(16)
    elements = halves.astype(dtype.numpy_dtype)
    elements[np.isnan(floats)] = 0x7FC0
    return elements


MAGIC = 0x4B56434D
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
VERSION = 1
DTYPES: tuple[DType, ...] = (FP16, BF16, FP32)  # by their code in the header

# Limits of the runtime's loader.
MAX_LAYERS = 10_000
MAX_WEIGHTS_PER_LAYER = 4_096
MAX_WEIGHT_ELEMENTS = 100_000_000

#: Order in which the runtime takes the blocks of a layer: text K, text V, image K, image V.
DEFAULT_PREFIXES = ("compress_tk", "compress_tv", "compress_ik", "compress_iv")
TEXT_PREFIXES = DEFAULT_PREFIXES[:2]
DEFAULT_SLOTS = (0, 3, 6)  # positions of the three Linear layers among the modules of one compressor
SLOTS_PER_PREFIX = 3

HEADER_STRUCT = struct.Struct("<IIHHIIIIIIII")
BLOCK_HEADER_STRUCT = struct.Struct("<III")
HEADER_BYTES = HEADER_STRUCT.size
BLOCK_HEADER_BYTES = BLOCK_HEADER_STRUCT.size
MAX_U32 = 0xFFFF_FFFF


@dataclass(frozen=True, kw_only=True)
class WeightFileHeader(Record):
    """The 44-byte header; fields are named as in the documentation of the format."""

    magic: int = MAGIC
    version: int = VERSION
    #: 0 fp16, 1 bf16, 2 fp32: the type of all weights and biases.
    dtype_code: int
    reserved: int = 0
    #: Number of layers.
    num_layers: int
    #: For information; 0 means that the file does not say. `hidden_size` is the width of the first Linear layer,
    #: head_dim x compression_factor, and not the hidden size of the model.
    num_heads: int = 0
    head_dim: int = 0
    hidden_size: int = 0
    #: Tokens that become one, and the least number of such groups that is compressed at all.
    compression_factor: int
    min_seq_len: int = 2
    weight_count_per_layer: int
    #: Bytes between the header and the first block.
    metadata_size_bytes: int = 0

    @property
    def dtype(self) -> DType:
        """Return the element type of `dtype_code`."""
        return DTYPES[self.dtype_code]

    def pack(self) -> bytes:
        """Return the header as bytes; `KvmnnError` for a field that is out of range."""
        for name, value in self.to_dict().items():
            limit = 0xFFFF if name in ("dtype_code", "reserved") else MAX_U32
            if not 0 <= value <= limit:
                value_text = value if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"
                raise KvmnnError(f"header field {name} is {value_text}: expected 0 to {limit}")
        return HEADER_STRUCT.pack(*self.to_dict().values())


#: Offset of each header field in bytes.
FIELD_OFFSETS = dict(
    zip((f.name for f in fields(WeightFileHeader)), (0, 4, 8, 10, 12, 16, 20, 24, 28, 32, 36, 40), strict=True)
)


@dataclass(frozen=True, eq=False)
class WeightBlock:
    """One Linear layer: ``y = x @ weight.T + bias``."""

    #: Which block: `index` counts within the layer, prefix by prefix and slot by slot.
    layer: int
    index: int
    #: Where the block begins in the file (bytes).
    offset: int
    #: ``[rows, cols]`` (out, in) words as stored: float16, float32, or uint16 for bf16; a view, possibly unaligned.
    weight: Elements
    #: ``[rows]`` words, or None.
    bias: Elements | None

    @property
    def rows(self) -> int:
        """Number of outputs of the layer."""
        return int(self.weight.shape[0])

    @property
    def cols(self) -> int:
        """Number of inputs of the layer."""
        return int(self.weight.shape[1])

    @property
    def prefix(self) -> int:
        """Return the compressor's position in the layer: 0 text K, 1 text V, 2 image K, 3 image V."""
        return self.index // SLOTS_PER_PREFIX

    @property
    def slot(self) -> int:
        """Return the position within the compressor: 0, 1, 2."""
        return self.index % SLOTS_PER_PREFIX

    @property
    def nbytes(self) -> int:
        """Return the size of the block in the file in bytes, its head included."""
        return BLOCK_HEADER_BYTES + self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def convert_weight_to_float32(self) -> Floats:
        """Return the weight as float32 ``[rows, cols]``; a view if the file contains fp32."""
        return to_float32(self.weight)

    def convert_bias_to_float32(self) -> Floats | None:
        """Return the bias as float32 ``[rows]``, or None."""
        return None if self.bias is None else to_float32(self.bias)


class BlockPlacement(NamedTuple):
    """Offset of a block, and the fields of its header."""

    offset: int
    rows: int
    cols: int
    has_bias: bool


_ALIGNMENT_BYTES = 4  # blanks fill the JSON up to a multiple of this, so that fp32 weights stay aligned
_MAX_JSON_BYTES = 1 << 20  # of metadata that is parsed as JSON


def pack_metadata(entries: Mapping[str, str] | bytes) -> bytes:
    """Serialize metadata entries in their order; bytes are returned unchanged."""
    if isinstance(entries, bytes):
        return entries
    if not entries:
        return b""
    for value in (*entries, *entries.values()):
        if not isinstance(value, str):
            raise KvmnnError(f"metadata {value!a} is no text")
    try:
        text = json.dumps(dict(entries), ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise KvmnnError(f"metadata {error.object!a:.80} is no UTF-8 text") from error
    return text + b" " * (-len(text) % _ALIGNMENT_BYTES)


def unpack_metadata(metadata: bytes) -> dict[str, str] | None:
    """Parse metadata that is a JSON object with string values; return None for anything else."""
    if not metadata.startswith(b"{"):
        return None
    try:
        return parse_document(metadata, "metadata", _MAX_JSON_BYTES).read_str_map()
    except (ManifestError, RecursionError):
        return None


def describe_metadata_differences(actual: bytes, expected: bytes) -> list[str]:
    """Describe how metadata differs from the expected one: by key if both are JSON objects."""
    if actual == expected:
        return []
    actual_entries, expected_entries = unpack_metadata(actual or b"{}"), unpack_metadata(expected or b"{}")
    if actual_entries is None or expected_entries is None:
        return [f"metadata is {format_metadata(actual)}: expected {format_metadata(expected)}"]
    if actual_entries == expected_entries and pack_metadata(actual_entries) == actual:
        return []  # the order of the keys is no difference
    differences = []
    for key in {**expected_entries, **actual_entries}:
        actual_text, expected_text = (
            ascii(entries[key]) if key in entries else "not there" for entries in (actual_entries, expected_entries)
        )
        if actual_text != expected_text:
            differences.append(f"metadata {key!a} is {actual_text}: expected {expected_text}")
    return differences or ["metadata holds the same entries in other bytes: expected those of kvmnn compressor convert"]


def format_metadata(metadata: bytes) -> str:
    """Format the number of bytes, and the first of them."""
    if not metadata:
        return "not there"
    return f"{len(metadata)} bytes, {metadata[:32]!r}{'...' if len(metadata) > 32 else ''}"


class WeightFile:
    """A validated weight file; blocks are views, created on access.

    Attributes
    ----------
    label
        Name of the file in messages.
    header
        The `WeightFileHeader`.
    size, trailing_bytes
        Bytes of the file, and those after the last block; 0 unless they were tolerated.
    warnings
        ``(reason, text)`` of what a loader accepts but a writer should not write.
    """

    def __init__(self, label: str, data: npt.NDArray[np.uint8], *, allow_trailing: bool) -> None:
        self.label = label
        self._data = data
        self.size = data.size
        self.warnings: list[tuple[str, str]] = []
        self.header = self._read_header()
        self._offsets, self._rows, self._cols = array("Q"), array("I"), array("I")
        self._has_bias = bytearray()
        end = self._scan_blocks()
        self.trailing_bytes = self.size - end
        if self.trailing_bytes and not allow_trailing:
            raise self._build_error(
                "trailing_bytes",
                end,
                f"the last block ends here, but {self.trailing_bytes} more bytes follow: expected the end of the file",
            )

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def metadata(self) -> bytes:
        """Return a copy of the bytes between header and blocks."""
        return self._data[HEADER_BYTES : HEADER_BYTES + self.header.metadata_size_bytes].tobytes()

    @property
    def sha256(self) -> str:
        """Return the hash of the whole file."""
        return hashlib.sha256(self._data.data).hexdigest()

    def get_placement(self, layer: int, index: int) -> BlockPlacement:
        """Return offset and shape of block `index` of `layer`, without touching its data."""
        header = self.header
        if not (0 <= layer < header.num_layers and 0 <= index < header.weight_count_per_layer):
            raise KvmnnError(
                f"{self.label}: has no block {index} in layer {layer}: it has {header.num_layers} layers "
                f"of {header.weight_count_per_layer} blocks"
            )
        return self._build_placement(layer * header.weight_count_per_layer + index)

    def iter_placements(self) -> Iterator[BlockPlacement]:
        """Iterate over all placements in file order."""
        return map(self._build_placement, range(len(self)))

    def _build_placement(self, position: int) -> BlockPlacement:
        has_bias = bool(self._has_bias[position])
        return BlockPlacement(self._offsets[position], self._rows[position], self._cols[position], has_bias)

    def get_block(self, layer: int, index: int) -> WeightBlock:
        """Return block `index` (prefix x 3 + slot) of `layer`."""
        placement = self.get_placement(layer, index)
        element_type = self.header.dtype.numpy_dtype
        begin = placement.offset + BLOCK_HEADER_BYTES
        weight_end = begin + placement.rows * placement.cols * element_type.itemsize
        end = weight_end + placement.rows * element_type.itemsize * placement.has_bias
        weight = self._data[begin:weight_end].view(element_type).reshape(placement.rows, placement.cols)
        bias = self._data[weight_end:end].view(element_type) if placement.has_bias else None
        return WeightBlock(layer, index, placement.offset, weight, bias)

    def iter_blocks(self) -> Iterator[WeightBlock]:
        """Iterate over all blocks in file order."""
        for layer in range(self.header.num_layers):
            for index in range(self.header.weight_count_per_layer):
                yield self.get_block(layer, index)

    def _read_header(self) -> WeightFileHeader:
        if self.size < HEADER_BYTES:
            raise self._build_error(
                "truncated_header", 0, f"the file has {self.size} bytes, the header alone needs {HEADER_BYTES}"
            )
        names = (field.name for field in fields(WeightFileHeader))
        header = WeightFileHeader(**dict(zip(names, HEADER_STRUCT.unpack_from(self._data.data), strict=True)))
        max_metadata = self.size - HEADER_BYTES
        metadata_text = f"at most {max_metadata}, the bytes after the header"
        dtypes_text = ", ".join(f"{code} ({dtype.name})" for code, dtype in enumerate(DTYPES))
        checks = (
            ("magic", "bad_magic", MAGIC, MAGIC, f"{MAGIC:#010x}{self._describe_magic()}"),
            ("version", "bad_version", VERSION, VERSION, f"{VERSION}"),
            ("dtype_code", "bad_dtype", 0, len(DTYPES) - 1, dtypes_text),
            ("num_layers", "bad_num_layers", 1, MAX_LAYERS, f"1 to {MAX_LAYERS}"),
            ("weight_count_per_layer", "bad_weight_count", 1, MAX_WEIGHTS_PER_LAYER, f"1 to {MAX_WEIGHTS_PER_LAYER}"),
            ("metadata_size_bytes", "bad_metadata_size", 0, max_metadata, metadata_text),
        )
        for name, reason, minimum, maximum, expected in checks:
            value = getattr(header, name)
            if not minimum <= value <= maximum:
                value_text = f"{value:#010x}" if name == "magic" else str(value)
                text = f"field {name} is {value_text}: expected {expected}"
                raise self._build_error(reason, FIELD_OFFSETS[name], text)
        if header.reserved:
            text = f"offset {FIELD_OFFSETS['reserved']}: field reserved is {header.reserved}: writers put 0"
            self.warnings.append(("reserved_nonzero", text))
        return header

    def _scan_blocks(self) -> int:
        """Check head and end of every block; return the end of the last one."""
        buffer = self._data.data
        itemsize = self.header.dtype.itemsize
        position = HEADER_BYTES + self.header.metadata_size_bytes
        for layer in range(self.header.num_layers):
            for index in range(self.header.weight_count_per_layer):
                location = _describe_block(layer, index)
                self._require_bytes(location, "head", position, position + BLOCK_HEADER_BYTES)
                rows, cols, has_bias = BLOCK_HEADER_STRUCT.unpack_from(buffer, position)
                if not 0 < rows * cols <= MAX_WEIGHT_ELEMENTS:
                    text = f"rows x cols is {rows} x {cols}: expected 1 to {MAX_WEIGHT_ELEMENTS} elements"
                    raise self._build_error("bad_shape", position, f"{location}: {text}")
                if has_bias > 1:
                    text = f"field has_bias is {has_bias}: expected 0 or 1"
                    raise self._build_error("bad_has_bias", position + 8, f"{location}: {text}")
                begin = position + BLOCK_HEADER_BYTES
                weight_end = begin + rows * cols * itemsize
                end = weight_end + rows * itemsize * has_bias
                self._require_bytes(location, f"{rows} x {cols} weight", begin, weight_end)
                self._require_bytes(location, f"bias of {rows}", weight_end, end)
                self._offsets.append(position)
                self._rows.append(rows)
                self._cols.append(cols)
                self._has_bias.append(has_bias)
                position = end
        return position

    def _require_bytes(self, location: str, part_name: str, begin: int, end: int) -> None:
        if end > self.size:
            text = f"the {part_name} needs {end - begin} bytes, the file has {self.size - begin} left"
            raise self._build_error("truncated_block", begin, f"{location}: {text}")

    def _build_error(self, reason: str, offset: int, text: str) -> WeightsError:
        return WeightsError(f"{self.label}: offset {offset}: {text} ({reason})", reason=reason, offset=offset)

    def _describe_magic(self) -> str:
        """Suggest what a file with a wrong magic number may be."""
        head = self._data[:64].tobytes()
        if head.startswith(b"PK\3\4"):
            return "; this is a zip, perhaps a .pth checkpoint: kvmnn compressor convert makes a weight file of one"
        if head.startswith(b"version https://git-lfs"):
            return "; this is a Git LFS pointer, not the file itself: git lfs pull fetches it"
        if head.startswith(MAGIC_BYTES[::-1]):
            return "; this file is big-endian, the format is little-endian"
        return ""


def _describe_block(layer: int, index: int) -> str:
    return f"layer {layer}, block {index}"


def read_weight_file(path: str | os.PathLike[str], *, allow_trailing: bool = False) -> WeightFile:
    """Map a weight file and check its structure.

    Parameters
    ----------
    path
        A file; ``"-"`` for standard input.
    allow_trailing
        Accept bytes after the last block, as the runtime does.

    Raises
    ------
    WeightsError
        If the file breaks the format; it carries a reason code and the offset.
    SourceError
        If it cannot be opened.
    """
    file = MappedFile(path)
    return WeightFile(file.label, file.view(0, file.size) if file.size else _EMPTY_BYTES, allow_trailing=allow_trailing)


def has_weight_file_magic(path: str) -> bool:
    """Return whether a file begins with the magic number of weight files."""
    return read_head(path).startswith(MAGIC_BYTES)


def is_weight_file(path: str) -> bool:
    """Return whether a file is a weight file: by its magic number, or by ``.bin`` if it is not a frame."""
    if has_weight_file_magic(path):
        return True
    if detect_engine_name(path) is not None:
        return False
    head = read_head(path)
    looks_like_frame = len(head) >= 10 and head[4] < 3 and head[5] < 2 and head[:4] == head[6:10] != bytes(4)
    return path.lower().endswith(".bin") and not (
        looks_like_frame or os.path.isdir(path) or os.path.exists(path + ".json")
    )


def parse_weight_file(data: bytes | memoryview, *, label: str = "weights", allow_trailing: bool = False) -> WeightFile:
    """Parse a weight file in memory; the result contains views of it."""
    bytes_array = np.frombuffer(data, np.uint8) if len(data) else _EMPTY_BYTES
    return WeightFile(label, bytes_array, allow_trailing=allow_trailing)


_EMPTY_BYTES: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


def write_weight_file(
    sink: Sink,
    header: WeightFileHeader,
    blocks: Iterable[tuple[Elements, Elements | None]],
    *,
    metadata: bytes = b"",
    allow_empty: bool = False,
) -> int:
    """Write blocks ``(weight [rows, cols], bias [rows] or None)`` in file order; return the size in bytes."""
    if header.metadata_size_bytes != len(metadata):
        raise KvmnnError(f"metadata has {len(metadata)} bytes, the header says {header.metadata_size_bytes}")
    expected = header.num_layers * header.weight_count_per_layer
    sink.write(header.pack() + metadata)
    total = HEADER_BYTES + len(metadata)
    num_blocks = 0
    for weight, bias in blocks:
        location = _describe_block(*divmod(num_blocks, header.weight_count_per_layer))
        element_type = header.dtype.numpy_dtype
        if weight.ndim != 2:
            raise KvmnnError(f"{location}: the weight has shape {list(weight.shape)}: expected two axes")
        if weight.dtype != element_type or (bias is not None and bias.dtype != element_type):
            raise KvmnnError(f"{location}: holds words of type {weight.dtype}: expected {element_type}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise KvmnnError(f"{location}: the bias has shape {list(bias.shape)}: expected [{weight.shape[0]}]")
        if weight.size > MAX_WEIGHT_ELEMENTS or (weight.size == 0 and not allow_empty):
            text = f"the weight has {weight.size} elements: loaders take 1 to {MAX_WEIGHT_ELEMENTS}"
            raise KvmnnError(f"{location}: {text}")
        rows, cols = weight.shape
        sink.write(BLOCK_HEADER_STRUCT.pack(rows, cols, bias is not None))
        total += BLOCK_HEADER_BYTES
        for elements in (weight,) if bias is None else (weight, bias):
            sink.write(np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data)
            total += elements.nbytes
        num_blocks += 1
    if num_blocks != expected:
        raise KvmnnError(f"{num_blocks} blocks were given, the header says {expected}")
    return total
