"""Select the tensors of a checkpoint for the blocks of a weight file.

The rules, and the order of checks, are those of ``convert_kv_compressor_pth_to_bin.py`` (InfiniTensor/InfiniLM
c05696dd). kvmnn's own extensions are only tried if these fail, and add a notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from ..dtypes import parse_dtype
from ..errors import CheckpointError, KvmnnError, LimitError
from ..formats.torch.tensors import TorchTensor
from .kvcm import (
    BLOCK_HEADER_BYTES,
    DEFAULT_PREFIXES,
    DEFAULT_SLOTS,
    DTYPES,
    HEADER_BYTES,
    MAX_LAYERS,
    MAX_WEIGHT_ELEMENTS,
    MAX_WEIGHTS_PER_LAYER,
    SLOTS_PER_PREFIX,
    TEXT_PREFIXES,
    WeightFileHeader,
    pack_metadata,
)
from .lint import check_keys, check_layout

MAX_WEIGHT_FILE_BYTES = 16 << 30  # a few bytes of checkpoint can describe a weight file of any size

_STRIPPED_PREFIXES = ("module.", "compressor.")

TensorsByKey = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of a conversion; names and defaults are the published converter's.

    Parameters
    ----------
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    compression_factor, head_dim
        For the header; 0 and below take those of the first weight.
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
    prefixes: tuple[str, ...] = DEFAULT_PREFIXES
    slots: tuple[int, ...] = DEFAULT_SLOTS
    num_heads: int = 0
    head_dim: int = 0
    metadata: Mapping[str, str] | bytes = field(default_factory=dict)
    as_reference: bool = False


_ONE_BYTE_TYPES = {"int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
#: Element types whose every value the type of the file can represent.
_EXACT_TYPES = {
    "fp16": {"float16", *_ONE_BYTE_TYPES},
    "bf16": {"bfloat16", "float8_e8m0fnu", *_ONE_BYTE_TYPES},
    "fp32": {"float32", "float16", "bfloat16", "int16", "uint16", "float8_e8m0fnu", *_ONE_BYTE_TYPES},
}


class LinearBlock(NamedTuple):
    """A block to write."""

    name: str
    weight: TorchTensor
    bias: TorchTensor | None


@dataclass
class TensorSelection:
    """The blocks of a weight file, in order, and the header for them."""

    #: What is written.
    header: WeightFileHeader
    linears: list[LinearBlock]
    #: The compressors, fewer than asked for where the checkpoint is found to be text-only.
    prefixes: tuple[str, ...]
    metadata: bytes = b""
    #: What may surprise; nothing that stops a conversion.
    warnings: list[str] = field(default_factory=list)
    #: Extensions that were needed.
    notices: list[str] = field(default_factory=list)
    #: Keys next to those that are used.
    unused_keys: list[str] = field(default_factory=list)
    #: Biases of another length than their weight has rows, which are left out: by the name of the Linear layer, the
    #: length and the number of rows.
    mismatched_biases: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the weight file."""
        num_elements = sum(
            linear.weight.numel + (0 if linear.bias is None else linear.weight.shape[0]) for linear in self.linears
        )
        fixed_bytes = HEADER_BYTES + len(self.metadata) + BLOCK_HEADER_BYTES * len(self.linears)
        return fixed_bytes + self.header.dtype.itemsize * num_elements

    @property
    def rounded_types(self) -> list[str]:
        """Return element types that are rounded or reduced to their real part; empty for LOSSLESS."""
        tensors = [tensor for linear in self.linears for tensor in (linear.weight, linear.bias) if tensor is not None]
        element_types = {tensor.element_type.name for tensor in tensors}
        return sorted(element_types - _EXACT_TYPES[self.header.dtype.name])


def select_tensors(root: object, options: ConvertOptions) -> TensorSelection:
    """Find the compressor in a checkpoint's object and lay out the weight file."""
    check_options(options)
    keys, notices = _locate_compressor(root, options)
    first_error: KvmnnError | None = None
    for prefixes, weights_only, notice in _iter_attempts(keys, options):
        try:
            selection = _build_selection(keys, options, prefixes, weights_only)
        except KvmnnError as exc:
            first_error = first_error or exc
            continue
        selection.notices += notices + ([notice] if notice else [])
        linears = selection.linears
        used_keys = {f"{linear.name}.{part}" for linear in linears for part in ("weight", "bias")}
        selection.unused_keys = [key for key in keys if key not in used_keys]
        selection.warnings = [
            *check_layout(selection.header, linears, selection.prefixes, options.slots),
            *check_keys(selection.mismatched_biases, selection.unused_keys),
        ]
        if selection.nbytes > MAX_WEIGHT_FILE_BYTES:
            raise LimitError(
                f"the weight file would have {selection.nbytes} bytes: at most {MAX_WEIGHT_FILE_BYTES} are written"
            )
        return selection
    raise first_error or CheckpointError("holds no compressor")


def check_options(options: ConvertOptions) -> None:
    """Raise an error for options that fit no checkpoint."""
    parse_dtype(options.dtype)
    if len(options.slots) != SLOTS_PER_PREFIX:
        raise KvmnnError(f"slot order {list(options.slots)} has {len(options.slots)} entries: expected 3")


# -- location of the compressor ----------------------------------------------------------------------------------------


def _locate_compressor(root: object, options: ConvertOptions) -> tuple[TensorsByKey, list[str]]:
    """Return the keys of the compressor by the reference's rules, or by the first extension that finds layers."""
    if not isinstance(root, dict):
        raise CheckpointError(f"holds {_describe_kind(root)}: expected a dict with the compressor's weights")
    reason = ""
    for keys, notice in _iter_state_dicts(root):
        if keys is None:
            reason = reason or (
                "has no dict under model_state_dict.compressor or compressor, and not all of its keys are strings"
            )
        elif _count_layers(keys, options.prefixes) > 0:
            return keys, [notice] if notice else []
    keys_text = ", ".join(repr(key) for key in list(root)[:8] if isinstance(key, str))
    raise CheckpointError(
        reason
        or f"holds no weights of a KV compressor: has no layer of {', '.join(options.prefixes) or 'no prefix at all'}: "
        f"expected keys such as {(options.prefixes or DEFAULT_PREFIXES)[0]}.0.{options.slots[0]}.weight; it has "
        f"{keys_text or 'no keys'} (caches are taken by encode, measure and pack)"
    )


def _iter_state_dicts(root: Mapping[Any, object]) -> Iterator[tuple[TensorsByKey | None, str]]:
    """Iterate over the places in a checkpoint to search, in order, each with its notice."""
    keys = _find_subtree(root)
    yield keys, ""
    if keys is not None:
        yield _strip_key_prefixes(keys), "the keys' leading 'module.' or 'compressor.' was left out"
    for name in ("state_dict", "model_state_dict"):
        nested = root.get(name)
        if isinstance(nested, dict) and (nested_keys := _find_subtree(nested)) is not None:
            yield nested_keys, f"the weights were taken from {name}"
            yield (
                _strip_key_prefixes(nested_keys),
                f"the weights were taken from {name}, without 'module.' or 'compressor.' in front",
            )


def _find_subtree(root: Mapping[Any, object]) -> TensorsByKey | None:
    """Return ``model_state_dict.compressor``, else ``compressor``, else the dict itself if its keys are strings."""
    state = root.get("model_state_dict")
    for candidate in (state.get("compressor") if isinstance(state, dict) else None, root.get("compressor")):
        if isinstance(candidate, dict):
            if not all(isinstance(key, str) for key in candidate):
                raise CheckpointError("the compressor's dict has keys that are not strings")
            return dict(candidate)
    if all(isinstance(key, str) for key in root):
        return dict(root)
    return None


def _strip_key_prefixes(keys: TensorsByKey) -> TensorsByKey:
    stripped_keys: TensorsByKey = {}
    for key, value in keys.items():
        stripped = key
        while stripped.startswith(_STRIPPED_PREFIXES):
            stripped = stripped.partition(".")[2]
        if stripped in stripped_keys:
            raise CheckpointError(
                f"key {stripped!r} is there twice, with and without 'module.' or 'compressor.' in front"
            )
        stripped_keys[stripped] = value
    return stripped_keys


def _count_layers(keys: Iterable[str], prefixes: tuple[str, ...], slots: tuple[int, ...] | None = None) -> int:
    """Return the highest layer number + 1 among keys of four parts or more; with `slots`, of their weights only."""
    max_layer = -1
    key_prefixes = tuple(f"{prefix}." for prefix in prefixes)
    weight_suffixes = None if slots is None else {(str(slot), "weight") for slot in slots}
    for key in keys:
        if not key.startswith(key_prefixes):
            continue
        parts = key.split(".")
        if len(parts) < 4 or (
            weight_suffixes is not None and (len(parts) > 4 or (parts[2], parts[3]) not in weight_suffixes)
        ):
            continue
        try:
            max_layer = max(max_layer, int(parts[1]))
        except ValueError:
            continue
    return max_layer + 1


# -- its blocks --------------------------------------------------------------------------------------------------------


def _iter_attempts(keys: TensorsByKey, options: ConvertOptions) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Iterate over prefixes, how layers are counted, and the notice: the reference first, then the extensions."""
    weights_only_notice = "layers were counted from the weights alone; other keys name more layers"
    yield options.prefixes, False, ""
    yield options.prefixes, True, weights_only_notice
    image_prefixes = tuple(f"{prefix}." for prefix in DEFAULT_PREFIXES[len(TEXT_PREFIXES) :])
    if options.prefixes == DEFAULT_PREFIXES and not any(key.startswith(image_prefixes) for key in keys):
        text_only_notice = (
            f"no image compressor in the checkpoint: text only, as with --prefix-order {','.join(TEXT_PREFIXES)}"
        )
        yield TEXT_PREFIXES, False, text_only_notice
        yield TEXT_PREFIXES, True, f"{text_only_notice}; {weights_only_notice}"


def _build_selection(
    keys: TensorsByKey, options: ConvertOptions, prefixes: tuple[str, ...], weights_only: bool
) -> TensorSelection:
    layers = _count_layers(keys, prefixes, options.slots if weights_only else None)
    if layers <= 0:
        raise CheckpointError(f"has no layer of {', '.join(prefixes)}")
    if not options.as_reference and (layers > MAX_LAYERS or len(prefixes) * SLOTS_PER_PREFIX > MAX_WEIGHTS_PER_LAYER):
        raise CheckpointError(
            f"{layers if layers.bit_length() < 128 else 'far too many'} layers of {len(prefixes) * SLOTS_PER_PREFIX} "
            f"weights: loaders take {MAX_LAYERS} of {MAX_WEIGHTS_PER_LAYER}"
        )
    selection = TensorSelection(
        _build_header(keys, options, prefixes, layers), [], prefixes, pack_metadata(options.metadata)
    )
    for layer in range(layers):
        for prefix in prefixes:
            for slot in options.slots:
                selection.linears.append(_build_linear(selection, keys, f"{prefix}.{layer}.{slot}", options))
    return selection


def _build_header(
    keys: TensorsByKey, options: ConvertOptions, prefixes: tuple[str, ...], layers: int
) -> WeightFileHeader:
    name = f"{prefixes[0]}.0.{options.slots[0]}"
    rows, hidden_size = _get_weight(keys, name, options).shape
    head_dim = options.head_dim if options.head_dim > 0 else rows
    if head_dim == 0 or hidden_size % head_dim:
        raise CheckpointError(
            f"{name}.weight has {rows} x {hidden_size} elements: its columns are no multiple of head_dim {head_dim}"
        )
    header = WeightFileHeader(
        dtype_code=DTYPES.index(parse_dtype(options.dtype)),
        num_layers=layers,
        num_heads=options.num_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        compression_factor=options.compression_factor if options.compression_factor > 0 else hidden_size // head_dim,
        min_seq_len=options.min_seq_len,
        weight_count_per_layer=len(prefixes) * SLOTS_PER_PREFIX,
        metadata_size_bytes=len(pack_metadata(options.metadata)),
    )
    header.pack()
    return header


def _get_weight(keys: TensorsByKey, name: str, options: ConvertOptions) -> TorchTensor:
    key = f"{name}.weight"
    if key not in keys:
        hint, image_prefixes = "", DEFAULT_PREFIXES[2:]
        if name.startswith(image_prefixes) and not any(key.startswith(image_prefixes) for key in keys):
            hint = f"; for a text-only compressor say --prefix-order {','.join(TEXT_PREFIXES)}"
        raise CheckpointError(f"weight {key!r} is missing{hint}")
    value = keys[key]
    if not isinstance(value, TorchTensor):
        raise CheckpointError(f"{key!r} is {_describe_kind(value)}: expected a tensor")
    if len(value.shape) != 2:
        raise CheckpointError(f"{key!r} has shape {list(value.shape)}: expected two axes, [out, in]")
    if value.numel > MAX_WEIGHT_ELEMENTS or not (value.numel or options.as_reference):
        raise CheckpointError(
            f"{key!r} has shape {list(value.shape)}: loaders take 1 to {MAX_WEIGHT_ELEMENTS} elements"
        )
    return value


def _build_linear(selection: TensorSelection, keys: TensorsByKey, name: str, options: ConvertOptions) -> LinearBlock:
    weight = _get_weight(keys, name, options)
    if f"{name}.bias" not in keys:
        return LinearBlock(name, weight, None)
    bias = keys[f"{name}.bias"]
    if not isinstance(bias, TorchTensor):
        raise CheckpointError(f"'{name}.bias' is {_describe_kind(bias)}: expected a tensor")
    if bias.numel != weight.shape[0]:
        selection.mismatched_biases[name] = bias.numel, weight.shape[0]
        return LinearBlock(name, weight, None)
    return LinearBlock(name, weight, bias)


def _describe_kind(value: object) -> str:
    descriptions = {"Unknown": "a value that is not looked at", "TorchTensor": "a bare tensor", "NoneType": "None"}
    name = type(value).__name__
    return descriptions.get(name, f"{'an' if name[0] in 'aeiou' else 'a'} {name}")
