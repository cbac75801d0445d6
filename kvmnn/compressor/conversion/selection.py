"""Which tensors of a checkpoint become which blocks: the published converter's rules, then kvmnn's own extensions.

The rules are those of ``convert_kv_compressor_pth_to_bin.py`` (InfiniTensor/InfiniLM c05696dd), the order of checks
included. An extension is tried only where they fail, and says so in a notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...dtypes import by_name
from ...errors import CheckpointError, KvmnnError, LimitError
from ...formats.torch.tensors import Tensor
from ..kvcm import metadata
from ..kvcm.header import (
    DTYPES,
    HEADER_BYTES,
    MAX_ELEMENTS,
    MAX_LAYERS,
    MAX_WEIGHTS,
    META_BYTES,
    PREFIXES,
    SLOTS,
    SLOTS_PER_PREFIX,
    TEXT_PREFIXES,
    Header,
)
from .surprises import key_warnings, layout_warnings

MAX_OUTPUT = 16 << 30
"""Bytes of the largest weight file that is made; a few bytes of checkpoint can ask for any size."""

_STRIPPED = ("module.", "compressor.")

Keys = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What a conversion may be told; names and defaults are the published converter's.

    Parameters
    ----------
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    compression_factor, head_dim
        For the header; 0 and below: as the first weight says.
    min_seq_len, num_heads
        For the header.
    prefixes
        Compressors in file order. The runtime takes them by position, so another order than the default is misread.
    slots
        The three Linear layers of each compressor, in file order.
    metadata
        Names and texts for the section that loaders skip, or its bytes; the published converter leaves it empty.
    as_reference
        Also write what no loader takes (weights without elements, more layers or weights than the limits) and what
        `verify` refuses, and leave out biases whose length is not the number of rows of their weight.
    """

    dtype: str = "fp16"
    compression_factor: int = 0
    min_seq_len: int = 2
    prefixes: tuple[str, ...] = PREFIXES
    slots: tuple[int, ...] = SLOTS
    num_heads: int = 0
    head_dim: int = 0
    metadata: Mapping[str, str] | bytes = field(default_factory=dict)
    as_reference: bool = False


_BYTES = {"int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
_EXACT = {
    "fp16": {"float16", *_BYTES},
    "bf16": {"bfloat16", "float8_e8m0fnu", *_BYTES},
    "fp32": {"float32", "float16", "bfloat16", "int16", "uint16", "float8_e8m0fnu", *_BYTES},
}
"""Element types every value of which the type of the file can hold."""


class Linear(NamedTuple):
    """One block to be written."""

    name: str
    weight: Tensor
    bias: Tensor | None


@dataclass
class Selection:
    """The blocks of a weight file, in order, and the header that fits them.

    Attributes
    ----------
    header, linears, metadata
        What is written.
    prefixes
        The compressors, fewer than asked for where the checkpoint is found to be text-only.
    warnings
        What may surprise; nothing that stops a conversion.
    notices
        Extensions that were needed.
    unused
        Keys beside those that are used.
    misfits
        Biases of another length than their weight has rows, which are left out: by the name of the Linear layer, the
        length and the number of rows.
    """

    header: Header
    linears: list[Linear]
    prefixes: tuple[str, ...]
    metadata: bytes = b""
    warnings: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    misfits: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight file."""
        word = self.header.dtype.itemsize
        return (
            HEADER_BYTES
            + len(self.metadata)
            + sum(
                META_BYTES + word * (linear.weight.numel + (0 if linear.bias is None else linear.weight.shape[0]))
                for linear in self.linears
            )
        )

    @property
    def rounded_types(self) -> list[str]:
        """Element types that are rounded or cut to their real part; none means that the weight file is lossless."""
        found = {
            part.element.name for linear in self.linears for part in (linear.weight, linear.bias) if part is not None
        }
        return sorted(found - _EXACT[self.header.dtype.name])


def select(root: object, options: ConvertOptions) -> Selection:
    """Find the compressor in a checkpoint's object and lay out the weight file.

    Parameters
    ----------
    root
        The object: `checkpoint.Checkpoint.root`.
    options
        See there.

    Raises
    ------
    CheckpointError
        When there is no compressor, or weights of it are missing or have no use.
    KvmnnError
        For options that no header holds.
    LimitError
        When the file would be larger than `MAX_OUTPUT`.
    """
    check_options(options)
    keys, notices = _locate(root, options)
    first_error: KvmnnError | None = None
    for prefixes, weights_only, notice in _attempts(keys, options):
        try:
            selection = _lay_out(keys, options, prefixes, weights_only)
        except KvmnnError as exc:
            first_error = first_error or exc
            continue
        selection.notices += notices + ([notice] if notice else [])
        blocks = selection.linears
        used = {f"{linear.name}.{part}" for linear in blocks for part in ("weight", "bias")}
        selection.unused = [key for key in keys if key not in used]
        selection.warnings = [
            *layout_warnings(selection.header, blocks, selection.prefixes, options.slots),
            *key_warnings(selection.misfits, selection.unused),
        ]
        if selection.nbytes > MAX_OUTPUT:
            raise LimitError(f"the weight file would have {selection.nbytes} bytes: at most {MAX_OUTPUT} are written")
        return selection
    raise first_error or CheckpointError("holds no compressor")


def check_options(options: ConvertOptions) -> None:
    """Refuse options that fit no checkpoint.

    Raises
    ------
    KvmnnError
        Unless there are three slots and a known dtype.
    """
    by_name(options.dtype)
    if len(options.slots) != SLOTS_PER_PREFIX:
        raise KvmnnError(f"slot order {list(options.slots)} has {len(options.slots)} entries: expected 3")


# -- where the compressor is ------------------------------------------------------------------------------------------


def _locate(root: object, options: ConvertOptions) -> tuple[Keys, list[str]]:
    """The keys of the compressor by the reference's rules, or by the first extension that finds layers."""
    if not isinstance(root, dict):
        raise CheckpointError(f"holds {_kind(root)}: expected a dict with the compressor's weights")
    reason = ""
    for keys, notice in _places(root):
        if keys is None:
            reason = reason or (
                "has no dict under model_state_dict.compressor or compressor, and not all of its keys are strings"
            )
        elif _layers(keys, options.prefixes) > 0:
            return keys, [notice] if notice else []
    found = ", ".join(repr(key) for key in list(root)[:8] if isinstance(key, str))
    raise CheckpointError(
        reason
        or f"holds no weights of a KV compressor: has no layer of {', '.join(options.prefixes) or 'no prefix at all'}: "
        f"expected keys such as {(options.prefixes or PREFIXES)[0]}.0.{options.slots[0]}.weight; it has "
        f"{found or 'no keys'} (caches are taken by encode, measure and pack)"
    )


def _places(root: Mapping[Any, object]) -> Iterator[tuple[Keys | None, str]]:
    """Where to look, in order, each with the notice that goes with it."""
    keys = _subtree(root)
    yield keys, ""
    if keys is not None:
        yield _stripped(keys), "the keys' leading 'module.' or 'compressor.' was left out"
    for name in ("state_dict", "model_state_dict"):
        inner = root.get(name)
        if isinstance(inner, dict) and (inside := _subtree(inner)) is not None:
            yield inside, f"the weights were taken from {name}"
            yield _stripped(inside), f"the weights were taken from {name}, without 'module.' or 'compressor.' in front"


def _subtree(root: Mapping[Any, object]) -> Keys | None:
    """``model_state_dict.compressor``, else ``compressor``, else the dict itself if all its keys are strings."""
    state = root.get("model_state_dict")
    for place in (state.get("compressor") if isinstance(state, dict) else None, root.get("compressor")):
        if isinstance(place, dict):
            if not all(isinstance(key, str) for key in place):
                raise CheckpointError("the compressor's dict has keys that are not strings")
            return dict(place)
    if all(isinstance(key, str) for key in root):
        return dict(root)
    return None


def _stripped(keys: Keys) -> Keys:
    found: Keys = {}
    for key, value in keys.items():
        short = key
        while short.startswith(_STRIPPED):
            short = short.partition(".")[2]
        if short in found:
            raise CheckpointError(f"key {short!r} is there twice, with and without 'module.' or 'compressor.' in front")
        found[short] = value
    return found


def _layers(keys: Iterable[str], prefixes: tuple[str, ...], slots: tuple[int, ...] | None = None) -> int:
    """Highest layer number + 1 among keys of four parts or more; with `slots`, only of the weights in them."""
    highest = -1
    starts = tuple(f"{prefix}." for prefix in prefixes)
    ends = None if slots is None else {(str(slot), "weight") for slot in slots}
    for key in keys:
        if not key.startswith(starts):
            continue
        parts = key.split(".")
        if len(parts) < 4 or (ends is not None and (len(parts) > 4 or (parts[2], parts[3]) not in ends)):
            continue
        try:
            highest = max(highest, int(parts[1]))
        except ValueError:
            continue
    return highest + 1


# -- which blocks it gives --------------------------------------------------------------------------------------------


def _attempts(keys: Keys, options: ConvertOptions) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Prefixes, how layers are counted, and the notice: first as the reference, then the extensions."""
    counted = "layers were counted from the weights alone; other keys name more layers"
    yield options.prefixes, False, ""
    yield options.prefixes, True, counted
    image = tuple(f"{prefix}." for prefix in PREFIXES[len(TEXT_PREFIXES) :])
    if options.prefixes == PREFIXES and not any(key.startswith(image) for key in keys):
        text = f"no image compressor in the checkpoint: text only, as with --prefix-order {','.join(TEXT_PREFIXES)}"
        yield TEXT_PREFIXES, False, text
        yield TEXT_PREFIXES, True, f"{text}; {counted}"


def _lay_out(keys: Keys, options: ConvertOptions, prefixes: tuple[str, ...], weights_only: bool) -> Selection:
    layers = _layers(keys, prefixes, options.slots if weights_only else None)
    if layers <= 0:
        raise CheckpointError(f"has no layer of {', '.join(prefixes)}")
    if not options.as_reference and (layers > MAX_LAYERS or len(prefixes) * SLOTS_PER_PREFIX > MAX_WEIGHTS):
        raise CheckpointError(
            f"{layers if layers.bit_length() < 128 else 'far too many'} layers of {len(prefixes) * SLOTS_PER_PREFIX} "
            f"weights: loaders take {MAX_LAYERS} of {MAX_WEIGHTS}"
        )
    selection = Selection(_header(keys, options, prefixes, layers), [], prefixes, metadata.pack(options.metadata))
    for layer in range(layers):
        for prefix in prefixes:
            for slot in options.slots:
                selection.linears.append(_linear(selection, keys, f"{prefix}.{layer}.{slot}", options))
    return selection


def _header(keys: Keys, options: ConvertOptions, prefixes: tuple[str, ...], layers: int) -> Header:
    name = f"{prefixes[0]}.0.{options.slots[0]}"
    rows, hidden_size = _weight(keys, name, options).shape
    head_dim = options.head_dim if options.head_dim > 0 else rows
    if head_dim == 0 or hidden_size % head_dim:
        raise CheckpointError(
            f"{name}.weight has {rows} x {hidden_size} elements: its columns are no multiple of head_dim {head_dim}"
        )
    header = Header(
        dtype_code=DTYPES.index(by_name(options.dtype)),
        num_layers=layers,
        num_heads=options.num_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        compression_factor=options.compression_factor if options.compression_factor > 0 else hidden_size // head_dim,
        min_seq_len=options.min_seq_len,
        weight_count_per_layer=len(prefixes) * SLOTS_PER_PREFIX,
        metadata_size_bytes=len(metadata.pack(options.metadata)),
    )
    header.pack()
    return header


def _weight(keys: Keys, name: str, options: ConvertOptions) -> Tensor:
    key = f"{name}.weight"
    if key not in keys:
        hint = ""
        if name.startswith(PREFIXES[2:]) and not any(other.startswith(PREFIXES[2:]) for other in keys):
            hint = f"; for a text-only compressor say --prefix-order {','.join(TEXT_PREFIXES)}"
        raise CheckpointError(f"weight {key!r} is missing{hint}")
    value = keys[key]
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{key!r} is {_kind(value)}: expected a tensor")
    if len(value.shape) != 2:
        raise CheckpointError(f"{key!r} has shape {list(value.shape)}: expected two axes, [out, in]")
    if value.numel > MAX_ELEMENTS or not (value.numel or options.as_reference):
        raise CheckpointError(f"{key!r} has shape {list(value.shape)}: loaders take 1 to {MAX_ELEMENTS} elements")
    return value


def _linear(selection: Selection, keys: Keys, name: str, options: ConvertOptions) -> Linear:
    weight = _weight(keys, name, options)
    if f"{name}.bias" not in keys:
        return Linear(name, weight, None)
    bias = keys[f"{name}.bias"]
    if not isinstance(bias, Tensor):
        raise CheckpointError(f"'{name}.bias' is {_kind(bias)}: expected a tensor")
    if bias.numel != weight.shape[0]:
        selection.misfits[name] = bias.numel, weight.shape[0]
        return Linear(name, weight, None)
    return Linear(name, weight, bias)


def _kind(value: object) -> str:
    kind = {"Unknown": "a value that is not looked at", "Tensor": "a bare tensor", "NoneType": "None"}
    name = type(value).__name__
    return kind.get(name, f"{'an' if name[0] in 'aeiou' else 'a'} {name}")
