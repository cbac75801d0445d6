"""KVCM weight files (``.bin``): header, metadata, then weight blocks layer by layer. docs/compressor-weights.md.

Reading maps the file and takes views of it: nothing is copied, and nothing is allocated for a number that the file
merely claims. A file has no names; a block is known by its place: layer, prefix, slot.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...dtypes import Words
from ...errors import KvmnnError, WeightsError
from ...files.mapped import MappedFile, head_of
from ...formats import engine_kind
from .header import (
    DTYPES,
    FIELD_OFFSETS,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAGIC_BYTES,
    MAX_ELEMENTS,
    MAX_LAYERS,
    MAX_WEIGHTS,
    META,
    META_BYTES,
    VERSION,
    Block,
    BlockPlace,
    Header,
)

if TYPE_CHECKING:
    from ...formats.sinks import Sink


class WeightFile:
    """A weight file that has been checked; blocks are views made when asked for.

    Attributes
    ----------
    label
        What messages call the file.
    header
        The `Header`.
    trailing
        Bytes behind the last block; 0 unless they were tolerated.
    size
        Bytes of the file.
    warnings
        ``(reason, text)`` of what a loader takes but a writer should not write.
    """

    def __init__(self, label: str, data: npt.NDArray[np.uint8], *, allow_trailing: bool) -> None:
        self.label = label
        self._data = data
        self.size = data.size
        self.warnings: list[tuple[str, str]] = []
        self.header = self._read_header()
        self._offsets, self._rows, self._cols = array("Q"), array("I"), array("I")
        self._has_bias = bytearray()
        end = self._walk()
        self.trailing = self.size - end
        if self.trailing and not allow_trailing:
            raise self._error(
                "trailing_bytes",
                end,
                f"the last block ends here, but {self.trailing} more bytes follow: expected the end of the file",
            )

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def metadata(self) -> bytes:
        """A copy of the bytes between header and blocks."""
        return self._data[HEADER_BYTES : HEADER_BYTES + self.header.metadata_size_bytes].tobytes()

    @property
    def sha256(self) -> str:
        """Of the whole file, as it was read."""
        return hashlib.sha256(self._data.data).hexdigest()

    def place(self, layer: int, index: int) -> BlockPlace:
        """Offset and shape of block `index` of `layer`, without touching its data."""
        header = self.header
        if not (0 <= layer < header.num_layers and 0 <= index < header.weight_count_per_layer):
            raise KvmnnError(
                f"{self.label}: has no block {index} in layer {layer}: it has {header.num_layers} layers "
                f"of {header.weight_count_per_layer} blocks"
            )
        at = layer * header.weight_count_per_layer + index
        return BlockPlace(self._offsets[at], self._rows[at], self._cols[at], bool(self._has_bias[at]))

    def places(self) -> Iterator[BlockPlace]:
        """All places in file order."""
        for at, offset in enumerate(self._offsets):
            yield BlockPlace(offset, self._rows[at], self._cols[at], bool(self._has_bias[at]))

    def block(self, layer: int, index: int) -> Block:
        """Block `index` (prefix x 3 + slot) of `layer`."""
        place = self.place(layer, index)
        words = self.header.dtype.numpy
        begin = place.offset + META_BYTES
        middle = begin + place.rows * place.cols * words.itemsize
        end = middle + place.rows * words.itemsize * place.has_bias
        weight = self._data[begin:middle].view(words).reshape(place.rows, place.cols)
        bias = self._data[middle:end].view(words) if place.has_bias else None
        return Block(layer, index, place.offset, weight, bias)

    def blocks(self) -> Iterator[Block]:
        """All blocks in file order."""
        for layer in range(self.header.num_layers):
            for index in range(self.header.weight_count_per_layer):
                yield self.block(layer, index)

    def _read_header(self) -> Header:
        if self.size < HEADER_BYTES:
            raise self._error(
                "truncated_header", 0, f"the file has {self.size} bytes, the header alone needs {HEADER_BYTES}"
            )
        names = (field.name for field in fields(Header))
        header = Header(**dict(zip(names, HEADER.unpack_from(self._data.data), strict=True)))
        self._expect(header, "magic", "bad_magic", header.magic == MAGIC, f"{MAGIC:#010x}{self._guess()}")
        self._expect(header, "version", "bad_version", header.version == VERSION, f"{VERSION}")
        self._expect(
            header,
            "dtype_code",
            "bad_dtype",
            header.dtype_code < len(DTYPES),
            ", ".join(f"{code} ({dtype.name})" for code, dtype in enumerate(DTYPES)),
        )
        self._expect(header, "num_layers", "bad_num_layers", 0 < header.num_layers <= MAX_LAYERS, f"1 to {MAX_LAYERS}")
        self._expect(
            header,
            "weight_count_per_layer",
            "bad_weight_count",
            0 < header.weight_count_per_layer <= MAX_WEIGHTS,
            f"1 to {MAX_WEIGHTS}",
        )
        self._expect(
            header,
            "metadata_size_bytes",
            "bad_metadata_size",
            header.metadata_size_bytes <= self.size - HEADER_BYTES,
            f"at most {self.size - HEADER_BYTES}, the bytes after the header",
        )
        if header.reserved:
            self.warnings.append(
                (
                    "reserved_nonzero",
                    f"offset {FIELD_OFFSETS['reserved']}: field reserved is {header.reserved}: writers put 0",
                )
            )
        return header

    def _walk(self) -> int:
        """Check every block's head and end; returns where the last one ends."""
        buffer = self._data.data
        word = self.header.dtype.itemsize
        position = HEADER_BYTES + self.header.metadata_size_bytes
        for layer in range(self.header.num_layers):
            for index in range(self.header.weight_count_per_layer):
                if self.size - position < META_BYTES:
                    raise self._cut(layer, index, position, "head", META_BYTES)
                rows, cols, has_bias = META.unpack_from(buffer, position)
                if not 0 < rows * cols <= MAX_ELEMENTS:
                    raise self._error(
                        "bad_shape",
                        position,
                        f"{_name(layer, index)}: rows x cols is {rows} x {cols}: expected 1 to {MAX_ELEMENTS} elements",
                    )
                if has_bias > 1:
                    raise self._error(
                        "bad_has_bias",
                        position + 8,
                        f"{_name(layer, index)}: field has_bias is {has_bias}: expected 0 or 1",
                    )
                begin = position + META_BYTES
                middle = begin + rows * cols * word
                end = middle + rows * word * has_bias
                if middle > self.size:
                    raise self._cut(layer, index, begin, f"{rows} x {cols} weight", middle - begin)
                if end > self.size:
                    raise self._cut(layer, index, middle, f"bias of {rows}", end - middle)
                self._offsets.append(position)
                self._rows.append(rows)
                self._cols.append(cols)
                self._has_bias.append(has_bias)
                position = end
        return position

    def _expect(self, header: Header, name: str, reason: str, holds: bool, expected: str) -> None:
        if not holds:
            value = getattr(header, name)
            found = f"{value:#010x}" if name == "magic" else str(value)
            raise self._error(reason, FIELD_OFFSETS[name], f"field {name} is {found}: expected {expected}")

    def _cut(self, layer: int, index: int, position: int, what: str, needed: int) -> WeightsError:
        return self._error(
            "truncated_block",
            position,
            f"{_name(layer, index)}: the {what} needs {needed} bytes, the file has {self.size - position} left",
        )

    def _error(self, reason: str, offset: int, text: str) -> WeightsError:
        return WeightsError(f"{self.label}: offset {offset}: {text} ({reason})", reason=reason, offset=offset)

    def _guess(self) -> str:
        """What a file with the wrong magic number may be."""
        head = self._data[:64].tobytes()
        if head.startswith(b"PK\3\4"):
            return "; this is a zip, perhaps a .pth checkpoint: kvmnn convert makes a weight file of one"
        if head.startswith(b"version https://git-lfs"):
            return "; this is a Git LFS pointer, not the file itself: git lfs pull fetches it"
        if head.startswith(MAGIC_BYTES[::-1]):
            return "; this file is big-endian, the format is little-endian"
        return ""


def _name(layer: int, index: int) -> str:
    return f"layer {layer}, block {index}"


def read(path: str | os.PathLike[str], *, allow_trailing: bool = False) -> WeightFile:
    """Map a weight file and check its structure.

    Parameters
    ----------
    path
        A file; ``"-"`` for standard input.
    allow_trailing
        Take bytes behind the last block, as the runtime does.

    Raises
    ------
    WeightsError
        When the file breaks the format; carries a reason code and the offset.
    SourceError
        When it cannot be opened.
    """
    file = MappedFile(path)
    return WeightFile(file.label, file.view(0, file.size) if file.size else _NOTHING, allow_trailing=allow_trailing)


def is_weights(path: str) -> bool:
    """Whether a file says by its magic number that it is a weight file."""
    return head_of(path).startswith(MAGIC_BYTES)


def is_weight_file(path: str) -> bool:
    """Whether a file is a weight file: by its magic number, or by ``.bin`` where it is no frame."""
    if is_weights(path):
        return True
    if engine_kind(path) is not None:
        return False
    head = head_of(path)
    looks_like_frame = len(head) >= 10 and head[4] < 3 and head[5] < 2 and head[:4] == head[6:10] != bytes(4)
    return path.lower().endswith(".bin") and not (
        looks_like_frame or os.path.isdir(path) or os.path.exists(path + ".json")
    )


def parse(data: bytes | memoryview, *, label: str = "weights", allow_trailing: bool = False) -> WeightFile:
    """The same for bytes in memory, of which the result holds views."""
    mapped = np.frombuffer(data, np.uint8) if len(data) else _NOTHING
    return WeightFile(label, mapped, allow_trailing=allow_trailing)


_NOTHING: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


def write(
    sink: Sink,
    header: Header,
    blocks: Iterable[tuple[Words, Words | None]],
    *,
    metadata: bytes = b"",
    allow_empty: bool = False,
) -> int:
    """Write a weight file; `blocks` may be made one by one while they are written.

    Parameters
    ----------
    header
        Its `metadata_size_bytes` must be the length of `metadata`.
    blocks
        ``(weight [rows, cols], bias [rows] or None)`` in file order, words of ``header.dtype``.
    allow_empty
        Write weights without elements too, which no loader takes.

    Returns
    -------
    Bytes written.

    Raises
    ------
    KvmnnError
        For blocks that do not fit the header or that no loader would take.
    """
    if header.metadata_size_bytes != len(metadata):
        raise KvmnnError(f"metadata has {len(metadata)} bytes, the header says {header.metadata_size_bytes}")
    expected = header.num_layers * header.weight_count_per_layer
    sink.write(header.pack() + metadata)
    total = HEADER_BYTES + len(metadata)
    count = 0
    for weight, bias in blocks:
        where = _name(*divmod(count, header.weight_count_per_layer))
        _check_block(where, header, weight, bias, allow_empty)
        rows, cols = weight.shape
        sink.write(META.pack(rows, cols, bias is not None))
        total += META_BYTES
        for words in (weight,) if bias is None else (weight, bias):
            sink.write(np.ascontiguousarray(words).reshape(-1).view(np.uint8).data)
            total += words.nbytes
        count += 1
    if count != expected:
        raise KvmnnError(f"{count} blocks were given, the header says {expected}")
    return total


def _check_block(where: str, header: Header, weight: Words, bias: Words | None, allow_empty: bool) -> None:
    words = header.dtype.numpy
    if weight.ndim != 2:
        raise KvmnnError(f"{where}: the weight has shape {list(weight.shape)}: expected two axes")
    if weight.dtype != words or (bias is not None and bias.dtype != words):
        raise KvmnnError(f"{where}: holds words of type {weight.dtype}: expected {words}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise KvmnnError(f"{where}: the bias has shape {list(bias.shape)}: expected [{weight.shape[0]}]")
    if weight.size > MAX_ELEMENTS or (weight.size == 0 and not allow_empty):
        raise KvmnnError(f"{where}: the weight has {weight.size} elements: loaders take 1 to {MAX_ELEMENTS}")
