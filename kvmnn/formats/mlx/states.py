"""States of a prompt cache: the class of each layer's cache, the rows with tokens, and dequantisation of groups.

Newer files store every attribute of a cache as a state of its own; older ones store tensors as states, and numbers as
settings in the metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.patterns import declare_pattern
from ..._util.text import pluralize
from ...arrays.completeness import Completeness, LayerStateInfo, StateKind
from ...dtypes import Bytes, Elements, Positions
from ...errors import SourceError
from ...files.mapped_file import FileHead
from ..base import FileBytes
from ..safetensors import SafetensorsHeader, TensorEntry, read_header
from . import _groups

_MAX_DETECT_HEADER_BYTES = 4 << 20
_CACHE_CLASS_REGEX = declare_pattern(rb'"[12]\.0"\s*:\s*"\w*Cache"|"[12]\.0"\s*:\s*"CacheList"')
_STATE_ENTRY_REGEX = declare_pattern(rb'"0\.0(\.\d+)*"\s*:\s*\{')
_NUMPY_TYPE_BY_KIND = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}
FLOAT_KINDS = tuple(_NUMPY_TYPE_BY_KIND)
_MAX_LAYERS = 1 << 16
_NATURAL_REGEX = declare_pattern(r"\d{1,9}", re.ASCII)


def has_cache_entries(head: FileHead) -> bool:
    """Return whether the metadata of a ``.safetensors`` file names cache classes."""
    header_bytes = int.from_bytes(head.data[:8], "little")
    if header_bytes > _MAX_DETECT_HEADER_BYTES:
        return False
    header = head.read(8 + header_bytes)[8:]
    return bool(_CACHE_CLASS_REGEX.search(header) and _STATE_ENTRY_REGEX.search(header))


class PromptCacheStates:
    """The tensors and settings in the header of a prompt cache file."""

    def __init__(self, file: FileBytes) -> None:
        self.file = file
        self.header: SafetensorsHeader = read_header(file)
        metadata = self.header.metadata
        # Newer files have the user's metadata under 0 and classes under 1; older ones settings, metadata, classes.
        self.is_new = metadata.get("1.0", "").endswith(("Cache", "CacheList"))
        prefix = "1" if self.is_new else "2"
        self.class_names = tuple(_iter_numbered_values(metadata, prefix))

    def find_tensor(self, name: str) -> TensorEntry:
        """Return the state with this name in the file; raise `SourceError` if there is none."""
        tensor_id = self.header.tensors.find_id(name)
        if tensor_id is None:
            raise SourceError(f"{self.file.label}: has no state {name!r:.40}")
        return self.header.tensors[tensor_id]

    def check_tensor(self, tensor: TensorEntry, kinds: tuple[str, ...], num_axes: int) -> None:
        """Raise `SourceError` unless a state has one of these types, this many axes, and elements."""
        if tensor.kind not in kinds or len(tensor.shape) != num_axes or 0 in tensor.shape:
            raise SourceError(
                f"{self.file.label}: the state {tensor.name!r:.40} is {tensor.kind} {list(tensor.shape)}: expected "
                f"{' or '.join(kinds)} [batch, kv_head, token, dimension]"
            )

    def read_scalar(self, name: str) -> int:
        """Return a state that is a whole number."""
        return int(self._read_value(name, "I32", 4).view("<i4")[0])

    def read_flag(self, name: str) -> bool:
        """Return a state that is a boolean."""
        return bool(self._read_value(name, "BOOL", 1)[0])

    def _read_value(self, name: str, kind: str, nbytes: int) -> Bytes:
        tensor = self.find_tensor(name)
        if tensor.kind != kind or tensor.end - tensor.begin != nbytes:
            raise SourceError(f"{self.file.label}: the state {name!r:.40} is {tensor.kind}: expected one {kind}")
        return self._read_bytes(tensor)

    def _read_bytes(self, tensor: TensorEntry) -> Bytes:
        return self.file.view(self.header.data_start + tensor.begin, tensor.end - tensor.begin)

    def read_int_list(self, name: str, num_texts: int) -> list[int]:
        """Return a state of whole numbers, one for each of `num_texts` texts."""
        tensor = self.find_tensor(name)
        if tensor.kind != "I32" or tensor.shape != (num_texts,):
            raise SourceError(
                f"{self.file.label}: the state {name!r:.40} is {tensor.kind} {list(tensor.shape)}: expected I32 "
                f"[{num_texts}]"
            )
        return [int(value) for value in np.frombuffer(self._read_bytes(tensor), "<i4")]

    def make_layer_error(self, layer_number: int, problem: str) -> SourceError:
        """Make the error about a layer of the file."""
        return SourceError(f"{self.file.label}: layer {layer_number}: {problem}")

    def list_settings(self, layer_number: int, setting_counts: tuple[int, ...]) -> list[str]:
        """Return the settings of a layer's cache from the metadata of older files, as strings."""
        settings = list(_iter_numbered_values(self.header.metadata, f"0.{layer_number}"))
        if len(settings) not in setting_counts:
            raise SourceError(
                f"{self.file.label}: layer {layer_number}: its {self.class_names[layer_number]:.40} has "
                f"{pluralize(len(settings), 'setting')}: expected {' or '.join(map(str, setting_counts))}"
            )
        return settings

    def read_int_settings(self, layer_number: int, setting_counts: tuple[int, ...]) -> list[int]:
        """Return settings as integers; raise `SourceError` for anything but up to nine digits."""
        return [self.parse_int_setting(layer_number, text) for text in self.list_settings(layer_number, setting_counts)]

    def parse_int_setting(self, layer_number: int, text: str) -> int:
        """Parse a setting of a layer as a whole number."""
        if not _NATURAL_REGEX.fullmatch(text):
            raise SourceError(
                f"{self.file.label}: layer {layer_number}: its {self.class_names[layer_number]:.40} has the setting "
                f"{text!r:.40}: expected a whole number from 0 to 999,999,999"
            )
        return int(text)


def get_numpy_type(tensor: TensorEntry) -> str:
    """Return the numpy type in which the elements of a numeric tensor are read."""
    return _NUMPY_TYPE_BY_KIND[tensor.kind]


def _iter_numbered_values(metadata: dict[str, str], prefix: str) -> Iterator[str]:
    """Yield the strings under ``<prefix>.0``, ``<prefix>.1`` and so on."""
    for index in range(_MAX_LAYERS):
        text = metadata.get(f"{prefix}.{index}")
        if text is None:
            return
        yield text


SUPPORTED_BITS = (2, 3, 4, 5, 6, 8)
_KERNEL_DTYPE_NAMES = ("float16", "uint16", "float32")
"""Types in the order of the compiled kernels."""


def dequantize(packed_codes: Bytes, scales: Elements, biases: Elements, bits: int) -> Elements:
    """Dequantise to ``[row, value]`` in the type of the scales: float16, float32, or uint16 words of bf16.

    Parameters
    ----------
    packed_codes
        ``[row, byte]``; codes are consecutive, from the lowest bit on.
    scales, biases
        ``[row, group]``.
    """
    values = np.empty((len(packed_codes), packed_codes.shape[1] * 8 // bits), scales.dtype)
    code_bytes, scale_bytes, bias_bytes = (
        np.ascontiguousarray(array).view(np.uint8) for array in (packed_codes, scales, biases)
    )
    _groups.dequantize(
        _KERNEL_DTYPE_NAMES.index(scales.dtype.name), bits, code_bytes, scale_bytes, bias_bytes, values.view(np.uint8)
    )
    return values


_MAX_POSITION: Final = 1 << 31

RowSpans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class PromptCacheLayer:
    """The cache of one layer."""

    #: Layer number, from 0.
    number: int
    #: The tensors of K and of V: one each, or codes, scales and biases.
    keys: tuple[TensorEntry, ...]
    values: tuple[TensorEntry, ...]
    #: Number of valid tokens of each head.
    num_tokens: int
    #: Row ranges ``(begin, end)`` of the valid tokens in each head, in the order of the text.
    spans: RowSpans
    #: Positions of the valid tokens in the text.
    positions: Positions
    #: Bits and size of quantised groups; 0 without quantisation.
    bits: int = 0
    group_size: int = 0
    #: Tokens that the layer attends to; None for all.
    window: int | None = None
    #: Number of tokens of each text of a right-aligned batch; empty if unknown.
    text_lengths: tuple[int, ...] = ()
    #: Whether the file does not record how many rows are valid, so that all of them are used.
    is_end_unknown: bool = False

    @property
    def end_position(self) -> int:
        """Return the position after the last token."""
        return int(self.positions[-1]) + 1


def read_layers(states: PromptCacheStates) -> list[PromptCacheLayer]:
    """Return the validated layers that have K and V."""
    label = states.file.label
    if not states.class_names:
        raise SourceError(f"{label}: names no class of a cache")
    layers = [
        _READER_BY_CLASS[class_name](states, layer_number)
        for layer_number, class_name in enumerate(states.class_names)
        if class_name in _READER_BY_CLASS
    ]
    if not layers:
        names = ", ".join(f"{name:.40}" for name in dict.fromkeys(states.class_names[:8]))
        raise SourceError(
            f"{label}: the cache of every layer is a {names}: K and V are read of {', '.join(_READER_BY_CLASS)} "
            "(encode keeps any of them whole)"
        )
    layers = _truncate_at_known_end(layers)
    end_positions = {layer.end_position for layer in layers}
    if len(end_positions) > 1:
        raise SourceError(
            f"{label}: its layers have seen {min(end_positions):,} to {pluralize(max(end_positions), 'token')}"
        )
    if len({layer.text_lengths for layer in layers}) > 1:
        raise SourceError(f"{label}: its layers have seen texts of different lengths")
    return layers


def has_keys_and_values(states: PromptCacheStates, layer_number: int) -> bool:
    """Return whether the states of a layer are K and V by its class."""
    return layer_number < len(states.class_names) and states.class_names[layer_number] in _READER_BY_CLASS


def describe_states(states: PromptCacheStates, layers: Sequence[PromptCacheLayer]) -> Completeness:
    """Return the state of each layer of the model, and how much of it `layers` contain."""
    state_by_layer: dict[int, LayerStateInfo] = {
        layer.number: LayerStateInfo(
            layer=layer.number, kind="full" if layer.window is None else "window", window=layer.window
        )
        for layer in layers
    }
    for layer_number, class_name in enumerate(states.class_names):
        if layer_number not in state_by_layer:
            state_by_layer[layer_number] = LayerStateInfo(
                layer=layer_number,
                kind=_STATE_KIND_BY_CLASS.get(class_name, "unknown"),
                included=False,
                location=f"in the file as {class_name:.40}",
            )
    return Completeness(layers=tuple(state_by_layer[layer_number] for layer_number in sorted(state_by_layer)))


def _truncate_at_known_end(layers: list[PromptCacheLayer]) -> list[PromptCacheLayer]:
    """Leave out rows after the last token if only other layers record how many tokens were seen."""
    end_positions = {layer.end_position for layer in layers if not layer.is_end_unknown}
    if len(end_positions) != 1:
        return layers
    end_position = end_positions.pop()
    return [
        _truncate_layer(layer, end_position) if layer.is_end_unknown and layer.end_position > end_position else layer
        for layer in layers
    ]


def _truncate_layer(layer: PromptCacheLayer, end_position: int) -> PromptCacheLayer:
    """Return a layer of consecutive rows without those from position `end_position` on."""
    num_tokens = end_position - int(layer.positions[0])
    if num_tokens < 1:
        return layer
    return replace(layer, num_tokens=num_tokens, spans=((0, num_tokens),), positions=layer.positions[:num_tokens])


def _read_plain(states: PromptCacheStates, layer_number: int) -> PromptCacheLayer:
    keys, values = _find_kv_pair(states, layer_number)
    num_rows = keys.shape[2]
    num_tokens = (
        states.read_scalar(f"{layer_number}.2") if states.is_new else num_rows
    )  # older files have no row without a token
    _check_token_count(states, layer_number, num_tokens, num_rows)
    return _make_first_tokens_layer(layer_number, (keys,), (values,), num_tokens)


def _read_concatenated(states: PromptCacheStates, layer_number: int) -> PromptCacheLayer:
    keys, values = _find_kv_pair(states, layer_number)
    return _make_first_tokens_layer(layer_number, (keys,), (values,), keys.shape[2])


def _read_quantized(states: PromptCacheStates, layer_number: int) -> PromptCacheLayer:
    if states.is_new:
        num_tokens, group_size, bits = (states.read_scalar(f"{layer_number}.{state}") for state in (2, 3, 4))
    else:
        num_tokens, group_size, bits = states.read_int_settings(layer_number, (3, 4))[
            -3:
        ]  # four: the rows that a buffer grows by first
    if bits not in SUPPORTED_BITS or group_size < 1:
        raise SourceError(
            f"{states.file.label}: layer {layer_number}: groups of {group_size:,} codes of {bits:,} bits: expected "
            f"groups of at least 1 of {', '.join(map(str, SUPPORTED_BITS))} bits"
        )
    keys, values = (_read_group_tensors(states, layer_number, part_index, group_size, bits) for part_index in (0, 1))
    if keys[0].shape[:3] != values[0].shape[:3]:
        raise states.make_layer_error(layer_number, "K and V differ in shape")
    _check_token_count(states, layer_number, num_tokens, keys[0].shape[2])
    return replace(_make_first_tokens_layer(layer_number, keys, values, num_tokens), bits=bits, group_size=group_size)


def _read_group_tensors(
    states: PromptCacheStates, layer_number: int, part_index: int, group_size: int, bits: int
) -> tuple[TensorEntry, ...]:
    """Return codes, scales and biases of K or V."""
    codes, scales, biases = (
        states.find_tensor(f"{layer_number}.{part_index}.{field_index}") for field_index in range(3)
    )
    states.check_tensor(codes, ("U32",), 4)
    for tensor in (scales, biases):
        states.check_tensor(tensor, FLOAT_KINDS, 4)
    expected_shape = (*codes.shape[:3], codes.shape[3] * 32 // bits // group_size)
    is_divisible = codes.shape[3] * 32 == expected_shape[3] * group_size * bits
    if (scales.shape, biases.shape) != (expected_shape, expected_shape) or not is_divisible:
        raise SourceError(
            f"{states.file.label}: layer {layer_number}: codes {list(codes.shape)} of {bits} bits in groups of "
            f"{group_size:,} do not fit scales {list(scales.shape)}"
        )
    if scales.kind != biases.kind:
        raise states.make_layer_error(layer_number, f"scales are {scales.kind}, biases {biases.kind}")
    return codes, scales, biases


def _read_rotating(states: PromptCacheStates, layer_number: int) -> PromptCacheLayer:
    """Read a window with sinks: the first `num_sinks` tokens stay; `next_row` is the oldest row of the others."""
    keys, values = _find_kv_pair(states, layer_number)
    num_rows = keys.shape[2]
    if states.is_new:
        num_seen, num_sinks, window, next_row = (
            states.read_scalar(f"{layer_number}.{state}") for state in (2, 3, 4, 5)
        )
    else:
        settings = states.read_int_settings(layer_number, (4, 5))  # five: the rows that a buffer grows by are the third
        (num_sinks, window), (num_seen, next_row) = settings[:2], settings[-2:]
    is_wrapped = next_row < min(num_rows, num_seen)
    has_valid_rows = 0 <= next_row <= num_rows and (not is_wrapped or num_sinks <= num_rows)
    if not (0 <= num_sinks <= window and num_seen >= 1 and has_valid_rows):
        raise SourceError(
            f"{states.file.label}: layer {layer_number}: {num_seen:,} tokens, the first {num_sinks:,} kept, in a "
            f"window of {window:,}, the next at {next_row:,}: do not fit {num_rows:,} rows"
        )
    if next_row == num_rows:
        spans = [(0, num_rows)]
    elif is_wrapped:
        spans = [(0, num_sinks), (max(next_row, num_sinks), num_rows), (num_sinks, next_row)]
    else:
        spans = [(0, num_seen)]
    spans = [(begin, end) for begin, end in spans if begin < end]
    num_tokens = sum(end - begin for begin, end in spans)
    if not 1 <= num_tokens <= num_seen:
        raise states.make_layer_error(layer_number, f"{num_tokens:,} rows hold tokens, and {num_seen:,} were seen")
    num_sink_rows = min(num_sinks, num_tokens) if num_seen > num_tokens else 0
    positions = np.concatenate([np.arange(num_sink_rows), np.arange(num_seen - num_tokens + num_sink_rows, num_seen)])
    return PromptCacheLayer(layer_number, (keys,), (values,), num_tokens, tuple(spans), positions, window=window)


def _read_chunked(states: PromptCacheStates, layer_number: int) -> PromptCacheLayer:
    """Read a chunked cache: only tokens from `start_position` on are valid; earlier tokens were trimmed."""
    keys, values = _find_kv_pair(states, layer_number)
    num_rows = keys.shape[2]
    if states.is_new:
        end_position, chunk_tokens, start_position = (
            states.read_scalar(f"{layer_number}.{state}") for state in (2, 3, 4)
        )
    else:
        chunk_tokens, start_position = states.read_int_settings(layer_number, (2,))
        end_position = start_position + num_rows
    num_tokens = end_position - start_position
    if start_position < 0 or not 1 <= num_tokens <= num_rows or end_position >= _MAX_POSITION or chunk_tokens < 1:
        raise SourceError(
            f"{states.file.label}: layer {layer_number}: tokens {start_position:,} to {end_position:,} in chunks of "
            f"{chunk_tokens:,} do not fit {num_rows:,} rows"
        )
    return replace(
        _make_first_tokens_layer(layer_number, (keys,), (values,), num_tokens),
        positions=np.arange(start_position, end_position),
        window=chunk_tokens,
        is_end_unknown=not states.is_new and start_position > 0,  # such files may have empty rows after the tokens
    )


def _read_batch(states: PromptCacheStates, layer_number: int) -> PromptCacheLayer:
    keys, values = _find_kv_pair(states, layer_number)
    num_rows = keys.shape[2]
    num_filled = states.read_scalar(f"{layer_number}.4") if states.is_new else num_rows
    _check_token_count(states, layer_number, num_filled, num_rows)
    return _make_right_aligned_layer(states, layer_number, (keys, values), ((0, num_filled),))


def _read_rotating_batch(states: PromptCacheStates, layer_number: int) -> PromptCacheLayer:
    """Read the window of a batch: once the ring is full, its oldest token is at `next_row`."""
    keys, values = _find_kv_pair(states, layer_number)
    num_rows = keys.shape[2]
    if states.is_new:
        window, next_row = (states.read_scalar(f"{layer_number}.{state}") for state in (4, 6))
        is_wrapped = states.read_flag(f"{layer_number}.7")
    else:
        setting_texts = states.list_settings(layer_number, (4,))
        window, next_row = (
            states.parse_int_setting(layer_number, text) for text in (setting_texts[0], setting_texts[2])
        )
        is_wrapped = setting_texts[3] == "True"
    if not 1 <= next_row <= num_rows or window < 1:
        raise SourceError(
            f"{states.file.label}: layer {layer_number}: the next token at {next_row:,} in a window of {window:,} does "
            f"not fit {num_rows:,} rows"
        )
    spans = ((next_row, num_rows), (0, next_row)) if is_wrapped and next_row < num_rows else ((0, next_row),)
    return replace(_make_right_aligned_layer(states, layer_number, (keys, values), spans), window=window)


def _make_right_aligned_layer(
    states: PromptCacheStates, layer_number: int, tensor_pair: tuple[TensorEntry, TensorEntry], spans: RowSpans
) -> PromptCacheLayer:
    """Make a layer of a batch whose texts of different lengths end together, with padding on the left.

    Rows that are padding in every text are left out.
    """
    text_lengths = states.read_int_list(f"{layer_number}.2", tensor_pair[0].shape[0])
    num_filled = sum(end - begin for begin, end in spans)
    max_text_length = max(text_lengths)
    if min(text_lengths) < 1:
        raise SourceError(
            f"{states.file.label}: layer {layer_number}: texts of {min(text_lengths):,} to "
            f"{pluralize(max_text_length, 'token')}: expected at least 1 in each"
        )
    num_tokens = min(num_filled, max_text_length)
    return PromptCacheLayer(
        layer_number,
        (tensor_pair[0],),
        (tensor_pair[1],),
        num_tokens,
        _drop_first_rows(spans, num_filled - num_tokens),
        np.arange(max_text_length - num_tokens, max_text_length),
        text_lengths=tuple(text_lengths) if len(text_lengths) > 1 else (),
    )


def _drop_first_rows(spans: RowSpans, num_rows: int) -> RowSpans:
    """Return spans without their first `num_rows` rows."""
    remaining_spans: list[tuple[int, int]] = []
    for begin, end in spans:
        num_skipped = min(num_rows, end - begin)
        num_rows -= num_skipped
        if begin + num_skipped < end:
            remaining_spans.append((begin + num_skipped, end))
    return tuple(remaining_spans)


def _make_first_tokens_layer(
    layer_number: int, keys: tuple[TensorEntry, ...], values: tuple[TensorEntry, ...], num_tokens: int
) -> PromptCacheLayer:
    return PromptCacheLayer(layer_number, keys, values, num_tokens, ((0, num_tokens),), np.arange(num_tokens))


def _find_kv_pair(states: PromptCacheStates, layer_number: int) -> tuple[TensorEntry, TensorEntry]:
    """Return K and V of a layer without groups."""
    keys, values = states.find_tensor(f"{layer_number}.0"), states.find_tensor(f"{layer_number}.1")
    for tensor in (keys, values):
        states.check_tensor(tensor, FLOAT_KINDS, 4)
    if keys.shape[:3] != values.shape[:3] or keys.kind != values.kind:
        raise states.make_layer_error(layer_number, f"K is {list(keys.shape)}, V is {list(values.shape)}")
    return keys, values


def _check_token_count(states: PromptCacheStates, layer_number: int, num_tokens: int, capacity: int) -> None:
    if not 1 <= num_tokens <= capacity:
        raise SourceError(
            f"{states.file.label}: layer {layer_number}: {num_tokens:,} tokens: expected at least 1 and at most "
            f"{capacity:,}, for which there is room"
        )


_READER_BY_CLASS: Final[dict[str, Callable[[PromptCacheStates, int], PromptCacheLayer]]] = {
    "KVCache": _read_plain,
    "QuantizedKVCache": _read_quantized,
    "RotatingKVCache": _read_rotating,
    "ChunkedKVCache": _read_chunked,
    "ConcatenateKVCache": _read_concatenated,
    "BatchKVCache": _read_batch,
    "BatchRotatingKVCache": _read_rotating_batch,
}
_STATE_KIND_BY_CLASS: Final[dict[str, StateKind]] = {"ArraysCache": "recurrent", "MambaCache": "recurrent"}
