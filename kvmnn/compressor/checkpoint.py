"""Checkpoints, recognised by content: files of ``torch.save`` (zip and legacy) and ``.safetensors``.

Opening reads only the directory and the pickle; the bytes of a storage are read when one of its tensors is requested. A
training checkpoint is mostly optimizer state, which is never read. Elements of any type are converted to fp16, bf16 or
fp32, bit for bit as torch does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..dtypes import BF16, FP16, FP32, DType, Elements
from ..errors import CheckpointError, LimitError
from ..files.mapped_file import STDIN, FileHead, MappedFile
from ..files.zip_archive import read_first_member_name
from ..formats.hf.saved import TORCH_CACHE
from ..formats.raw import parse_page_name
from ..formats.safetensors import read_header
from ..formats.torch.allowed_globals import AllowedGlobals
from ..formats.torch.tensors import ELEMENT_TYPES, ElementType, TorchStorage, TorchTensor
from ..formats.torch.torch_file import detect_torch_kind as torch_kind_of
from ..formats.torch.torch_file import read_torch
from .kvcm import MAGIC_BYTES, round_float32

MAX_SAFETENSORS_HEADER_BYTES = 16 << 20  # every tensor becomes an object, and a compressor has hundreds
_ELEMENT_BY_SAFETENSORS_TYPE = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_NESTED_PATHS = (("model_state_dict", "compressor"), ("compressor",))


@dataclass
class Checkpoint:
    """An opened checkpoint."""

    #: Path of the file, and its name in messages.
    path: str
    label: str
    #: ``"torch zip"``, ``"torch legacy"`` or ``"safetensors"``.
    kind: str
    #: The saved object: dicts, lists, `TorchTensor`s and plain values; what is not looked at is `OpaqueValue`.
    root: object
    #: Bytes of the file.
    size: int
    #: Bytes of its pickles, or of the header of a ``.safetensors`` file.
    pickle_bytes: int
    #: All storages, by key.
    storages: dict[str, TorchStorage]
    #: Unusual properties of the file.
    notices: list[str] = field(default_factory=list)
    #: ``__metadata__`` of a ``.safetensors`` file.
    metadata: dict[str, str] = field(default_factory=dict)


def open_checkpoint(path: str | os.PathLike[str], *, max_bytes: int | None = None) -> Checkpoint:
    """Open a checkpoint without running anything in it.

    Parameters
    ----------
    path
        A file that torch.save wrote, or a ``.safetensors`` file; ``"-"`` for standard input.
    max_bytes
        Limit of the bytes of all its storages; None for the format's own limits only.

    Raises
    ------
    CheckpointError
        If the file is not a checkpoint, is damaged, or needs a class or function that weights do not need.
    SourceError
        If it cannot be read.
    LimitError
        If it contains more than `max_bytes`.
    """
    if os.fspath(path) != STDIN and os.path.isdir(path):
        raise CheckpointError(
            f"{os.fspath(path)}: is a directory: expected a checkpoint file (.pth, .pt, .safetensors)"
        )
    file = MappedFile(path, max_bytes=max_bytes)
    with prefix_errors(file.label):
        checkpoint = _open_file(file)
        storage_bytes = sum(storage.nbytes for storage in checkpoint.storages.values())
        if max_bytes is not None and storage_bytes > max_bytes:
            raise LimitError(f"its storages hold {storage_bytes} bytes, above the limit of {max_bytes}")
        return checkpoint


def _open_file(file: MappedFile) -> Checkpoint:
    head = file.read_head(512)
    match detect_kind(head):
        case "torch zip" if read_first_member_name(head).endswith(b".npy"):
            raise CheckpointError(
                "is a .npz file of arrays, which is not read as a checkpoint: "
                "kvmnn compressor export -o NAME.safetensors writes what convert reads"
            )
        case "torch zip" | "torch legacy" as kind:
            try:
                torch_file = read_torch(file, kind, AllowedGlobals())
            except CheckpointError:
                if TORCH_CACHE.detect(FileHead.from_path(file.path)):
                    text = "holds a cache, no weights: encode, measure, pack and the like take it"
                    raise CheckpointError(text) from None
                raise
            contents = (torch_file.root, file.size, torch_file.pickle_bytes, torch_file.storages, torch_file.notices)
            return Checkpoint(file.path, file.label, kind, *contents)
        case "safetensors":
            return _read_safetensors(file)
    raise CheckpointError(_describe_unknown(head))


def detect_kind(head: bytes) -> str | None:
    """Return the kind of checkpoint that begins with these bytes; None for anything else."""
    if head[8:9] == b"{" and head[4:8] == bytes(4):
        return "safetensors"
    return torch_kind_of(head)


def is_checkpoint(path: str) -> bool:
    """Return whether a file is a checkpoint of torch by its contents or its name, and not a saved cache or page."""
    head = FileHead.from_path(path)
    if TORCH_CACHE.detect(head):
        return False
    if path.lower().endswith((".pth", ".pt")) and parse_page_name(path) is None:
        return True
    kind = torch_kind_of(head.data)
    return kind == "torch legacy" or (kind == "torch zip" and not read_first_member_name(head.data).endswith(b".npy"))


@contextmanager
def prefix_errors(label: str, subject: str = "") -> Iterator[None]:
    """Prefix error messages with the file's name and `subject` if they lack them."""
    try:
        yield
    except (CheckpointError, LimitError) as exc:
        error_class = type(exc)
        prefix = f"{label}: {subject}: " if subject else f"{label}: "
        text = str(exc)
        raise error_class(text if text.startswith(f"{label}: ") else prefix + text) from None


def _read_safetensors(file: MappedFile) -> Checkpoint:
    header = read_header(file, max_header_bytes=MAX_SAFETENSORS_HEADER_BYTES)
    root: dict[str, object] = {}
    storages: dict[str, TorchStorage] = {}
    for entry in header.tensors:
        kind = _ELEMENT_BY_SAFETENSORS_TYPE.get(entry.kind)
        element = ElementType(entry.kind[:40], "", 1) if kind is None else ELEMENT_TYPES[kind]
        size = entry.end - entry.begin
        storage = TorchStorage(entry.name, element, size, partial(file.view, header.data_start + entry.begin, size))
        storages[entry.name] = storage
        strides = tuple(_iter_strides(entry.shape))
        _insert_nested(root, entry.name, TorchTensor(storage, element, 0, entry.shape, strides))
    return Checkpoint(
        file.path, file.label, "safetensors", root, file.size, header.data_start, storages, metadata=header.metadata
    )


def _insert_nested(root: dict[str, object], name: str, value: TorchTensor) -> None:
    """Insert a flat name into nested dicts, as in a ``.pth`` file."""
    for path in _NESTED_PATHS:
        prefix = ".".join(path) + "."
        if name.startswith(prefix):
            for key in path:
                root = root.setdefault(key, {})  # type: ignore[assignment]
            name = name.removeprefix(prefix)
            break
    root[name] = value


def _iter_strides(shape: tuple[int, ...]) -> Iterator[int]:
    step = 1
    for length in shape:
        step *= length
    for length in shape:
        step = step // length if length else 0
        yield step


def _describe_unknown(head: bytes) -> str:
    """Suggest what a file that is not a checkpoint may be."""
    if not head:
        return "is empty: expected a checkpoint"
    if head.startswith(b"version https://git-lfs"):
        size = next((line[5:] for line in head.split(b"\n") if line.startswith(b"size ")), b"?").decode(
            "ascii", "replace"
        )
        return f"is a Git LFS pointer to a file of {size[:20]} bytes, not the file itself: git lfs pull fetches it"
    if head.startswith(MAGIC_BYTES):
        return "is a weight file already: kvmnn inspect shows it, kvmnn compressor export turns it into .safetensors"
    if head[257:262] == b"ustar":
        return "is a tar archive, as torch before 0.1.10 wrote them: save it again with a newer torch"
    if head.startswith(b"\x80"):
        return "is a pickle without torch's magic number: not a checkpoint that torch.save wrote"
    if all(byte in _TEXT_BYTES for byte in head):
        line = head.split(b"\n")[0][:40].decode("ascii")
        return f"is a text file that begins with {line!r}: expected a checkpoint"
    return (
        f"is no checkpoint: begins with {head[:8].hex(' ')}, expected a zip archive, a legacy torch file or safetensors"
    )


_TEXT_BYTES = frozenset(range(0x20, 0x7F)) | {0x09, 0x0A, 0x0D}


_DTYPE_BY_ELEMENT = {"float16": FP16, "bfloat16": BF16, "float32": FP32}


def convert_elements(tensor: TorchTensor, dtype: DType) -> Elements:
    """Return the elements of `tensor` in `dtype`, with its shape."""
    # Other types become float32 first and are rounded from there to the nearest, ties to even, beyond the range to
    # infinity; float64 is therefore rounded twice, as torch does it.
    if not _has_dtype(tensor, dtype):
        return round_float32(tensor.to_float32(), dtype)
    check_convertible(tensor, dtype)
    elements = tensor.read_elements().astype(dtype.numpy_dtype, copy=False)
    if tensor.is_negated:
        bits = np.dtype(f"u{dtype.itemsize}")
        elements = (elements.view(bits) ^ bits.type(1 << 8 * dtype.itemsize - 1)).view(dtype.numpy_dtype)
    return elements


def check_convertible(tensor: TorchTensor, dtype: DType) -> None:
    """Raise an error for elements that can be read but that the published converter cannot write."""
    # torch hands a tensor with the negation bit to numpy only after it had a reason to copy it: another type, or
    # strides.
    if tensor.is_negated and tensor.is_contiguous and _has_dtype(tensor, dtype):
        raise CheckpointError(
            f"a {tensor.element_type.name} tensor with torch's negation bit, which the published converter cannot "
            f"write as {dtype.name}: save what resolve_neg() gives, or choose another dtype"
        )


def _has_dtype(tensor: TorchTensor, dtype: DType) -> bool:
    return _DTYPE_BY_ELEMENT.get(tensor.element_type.name) == dtype


_EXPONENT_MASKS = {FP16: 0x7C00, BF16: 0x7F80, FP32: 0x7F80_0000}


def count_non_finite(elements: Elements, dtype: DType) -> int:
    """Count the elements that are infinite or NaN."""
    exponent = np.array(_EXPONENT_MASKS[dtype], f"u{dtype.itemsize}")
    bits = elements.view(exponent.dtype)
    return int(np.count_nonzero((bits & exponent) == exponent))
