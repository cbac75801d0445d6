"""Read a decoder's inputs and outputs from its graph.

The names are those that optimum and transformers.js exports share: ``past_key_values.{i}.key`` and ``.value`` come in,
``present.{i}.key`` and ``.value`` go out. A ``genai_config.json`` may name others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.packages import import_optional
from ..._util.patterns import declare_pattern
from ...errors import ModelError
from ..windows import list_windows
from .model_files import ModelFiles, get_section, iter_subgraphs

_PAST = declare_pattern(r"(?:past_key_values|past_key_value|past|past_kv)[._](\d+)[._](key|value|k|v)")
_PRESENT = declare_pattern(r"(?:present_key_values|present_key_value|present|present_kv)[._](\d+)[._](key|value|k|v)")
_ATTENTION = declare_pattern(r"attentions?[._](\d+)")
_QUERIES = declare_pattern(r"queries[.](\d+)")
_BIAS = declare_pattern(r"attention_bias[.](\d+)")
_KEY_POSITIONS = declare_pattern(r"key_positions[.](\d+)")
_LENGTH_COUNTING_OPERATORS = {
    "GroupQueryAttention",
    "SparseAttention",
    "PagedAttention",
    "DecoderMaskedMultiHeadAttention",
}
_BRANCH_INPUT = "use_cache_branch"
_ALL_LOGITS_INPUTS = ("num_logits_to_keep", "logits_to_keep")  # 0 asks for the logits of all tokens
_SLOTS_INPUT = "cache_position"
_EXPORT_WITH_PAST_COMMAND = "optimum-cli export onnx --task text-generation-with-past"


@dataclass(frozen=True)
class DecoderInterface:
    """A decoder's inputs and outputs."""

    #: Name of the model in messages: its path.
    label: str
    #: Sizes of the cache.
    layers: int
    kv_heads: int
    head_dim: int
    #: Element type of the cache: ``float16`` or ``float32``.
    dtype: type[np.float16] | type[np.float32]
    #: Number of logits of a token.
    vocab_size: int
    #: Number of query heads, if the settings or the graph specify it.
    query_heads: int | None
    #: Whether positions are an input, and used. Where they are not, the graph counts them itself and its cache cannot
    #: be cut.
    has_positions: bool
    #: Whether attention takes the length of every layer's past from the mask, so that layers must be equally long.
    derives_positions_from_length: bool
    #: Whether the graph contains one branch with a past and one without.
    is_merged: bool
    #: Maximum number of positions of the model according to ``config.json``; None if not specified.
    max_positions: int | None
    #: Names of the token input and of the logits.
    ids_input: str
    logits_output: str
    #: Names of inputs that a graph may have.
    mask_input: str | None
    positions_input: str | None
    branch_input: str | None
    slots_input: str | None
    all_logits_input: str | None
    #: Names of (key, value) for each layer.
    past_inputs: tuple[tuple[str, str], ...]
    present_outputs: tuple[tuple[str, str], ...]
    #: Names of the outputs with attention probabilities, if the graph has one for every layer.
    attention_outputs: tuple[str, ...] | None
    #: Names of the outputs with rotated queries, if the graph has one for every layer.
    query_outputs: tuple[str, ...] | None
    #: Names of the inputs that are added to the scores, if the graph has one for every layer.
    bias_inputs: tuple[str, ...] | None
    #: Names of the inputs with the true positions of all keys, for layers whose window depends on them.
    key_position_inputs: dict[int, str]
    #: Latest tokens that these layers attend to, as far as the graph takes windows by true positions.
    windows: dict[int, int]
    #: Numpy dtype of each input.
    types: dict[str, type[np.generic]] = field(repr=False)
    #: Number of axes of each input.
    ranks: dict[str, int] = field(repr=False)


def read_interface(model: Any, files: ModelFiles) -> DecoderInterface:
    """Read the interface of a decoder."""
    return _InterfaceReader(model, files).read_interface()


class _InterfaceReader:
    def __init__(self, model: Any, files: ModelFiles) -> None:
        self.model, self.files, self.label = model, files, files.label
        initializer_names = {tensor.name for tensor in model.graph.initializer}
        self.inputs = {value.name: value for value in model.graph.input if value.name not in initializer_names}
        self.outputs = {value.name: value for value in model.graph.output}
        self.decoder = get_section(files.genai, "model", "decoder")

    def read_interface(self) -> DecoderInterface:
        if get_section(self.files.genai, "search").get("past_present_share_buffer") is True:
            raise self._build_error(
                "genai_config.json says past_present_share_buffer: past and present are one buffer of fixed length, "
                f"from which nothing can be cut; export with separate past and present ({_EXPORT_WITH_PAST_COMMAND})"
            )
        ids = self._get_tensor_name("inputs", "input_ids", "input_ids")
        if ids not in self.inputs:
            raise self._build_error(f"no input {ids}; inputs: {_format_names(self.inputs)}")
        past = self._list_layer_tensors(self.inputs, "inputs", "past", _PAST)
        present = self._list_layer_tensors(self.outputs, "outputs", "present", _PRESENT)
        if len(past) != len(present):
            raise self._build_error(f"{len(past)} layers of past inputs but {len(present)} of present outputs")
        self._check_own_positions()
        mask = self._find_optional_input("attention_mask")
        positions = self._find_optional_input("position_ids")
        branch = _BRANCH_INPUT if _BRANCH_INPUT in self.inputs else None
        slots = _SLOTS_INPUT if _SLOTS_INPUT in self.inputs else None
        bias_names = {int(match[1]): name for name in self.inputs if (match := _BIAS.fullmatch(name))}
        key_positions = {int(match[1]): name for name in self.inputs if (match := _KEY_POSITIONS.fullmatch(name))}
        has_biases = set(bias_names) == set(range(len(past)))
        all_logits = next((name for name in _ALL_LOGITS_INPUTS if name in self.inputs), None)
        known_inputs = {ids, mask, positions, branch, slots, all_logits, *(name for pair in past for name in pair)}
        known_inputs |= {*(bias_names.values() if has_biases else ()), *key_positions.values()}
        self._check_unknown_inputs(known_inputs)
        kv_heads, head_dim, dtype = self._read_cache_shape(past, self.inputs)
        logits = self._get_tensor_name("outputs", "logits", "logits")
        if logits not in self.outputs:
            raise self._build_error(f"no output {logits}; outputs: {_format_names(self.outputs)}")
        names = [name for name in self.inputs if name in known_inputs]
        return DecoderInterface(
            label=self.label,
            layers=len(past),
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            vocab_size=self._read_vocab_size(logits),
            query_heads=self._read_setting("num_attention_heads", "num_attention_heads", "n_head", "num_heads"),
            has_positions=positions is not None and any(positions in node.input for node in self._iter_nodes()),
            derives_positions_from_length=any(
                node.op_type in _LENGTH_COUNTING_OPERATORS for node in self._iter_nodes()
            ),
            is_merged=branch is not None,
            max_positions=self._read_setting("context_length", "max_position_embeddings", "n_positions", "max_seq_len"),
            ids_input=ids,
            logits_output=logits,
            mask_input=mask,
            positions_input=positions,
            branch_input=branch,
            slots_input=slots,
            all_logits_input=all_logits,
            past_inputs=past,
            present_outputs=present,
            attention_outputs=self._find_layer_outputs(_ATTENTION, len(past)),
            query_outputs=self._find_layer_outputs(_QUERIES, len(past)),
            bias_inputs=tuple(bias_names[layer] for layer in range(len(past))) if has_biases else None,
            key_position_inputs=key_positions,
            windows=self._read_windows(len(past), key_positions),
            types={name: self._read_dtype(self.inputs[name]) for name in names},
            ranks={name: len(_read_dims(self.inputs[name])) for name in names},
        )

    def _read_windows(self, num_layers: int, layers: Iterable[int]) -> dict[int, int]:
        try:
            windows = list_windows(self.files.config, num_layers, self.label)
        except ModelError:  # nothing here needs them to run the graph
            return {}
        return {layer: window for layer in layers if layer < num_layers and (window := windows[layer]) is not None}

    def _build_error(self, message: str) -> ModelError:
        return ModelError(f"{self.label}: {message}")

    # What cannot work

    def _check_own_positions(self) -> None:
        onnx = import_optional("onnx")
        for node in (node for node in self._iter_nodes() if node.op_type == "GroupQueryAttention"):
            settings = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
            if settings.get("do_rotary", 0) and not (len(node.input) > 9 and node.input[9]):
                raise self._build_error(
                    f"GroupQueryAttention {node.name!r} (do_rotary=1) derives positions from the length of the cache, "
                    f"which cutting changes; export with position_ids ({_EXPORT_WITH_PAST_COMMAND})"
                )

    def _check_unknown_inputs(self, known_inputs: set[str | None]) -> None:
        unknown_inputs = [name for name in self.inputs if name not in known_inputs]
        if not unknown_inputs:
            return
        if any("encoder" in name for name in unknown_inputs):
            raise self._build_error(f"takes {unknown_inputs[0]}: an encoder-decoder model; kvmnn runs decoders only")
        if "inputs_embeds" in unknown_inputs:
            raise self._build_error("takes inputs_embeds instead of tokens; export the decoder with input_ids")
        raise self._build_error(
            f"inputs that kvmnn does not know: {', '.join(unknown_inputs[:8])}; export with {_EXPORT_WITH_PAST_COMMAND}"
        )

    def _iter_nodes(self) -> Iterator[Any]:
        for graph in (self.model.graph, *iter_subgraphs(self.model.graph)):
            yield from graph.node

    # Names

    def _find_optional_input(self, name: str) -> str | None:
        tensor_name = self._get_tensor_name("inputs", name, name)
        return tensor_name if tensor_name in self.inputs else None

    def _find_layer_outputs(self, pattern: re.Pattern[str], layers: int) -> tuple[str, ...] | None:
        """Return the names of the outputs of layers 0, 1, ...; None unless every layer has one."""
        names = {int(match[1]): name for name in self.outputs if (match := pattern.fullmatch(name))}
        return tuple(names[layer] for layer in range(layers)) if set(range(layers)) <= set(names) else None

    def _get_tensor_name(self, group: str, key: str, default: str) -> str:
        name = get_section(self.decoder, group).get(key, default)
        return name if isinstance(name, str) else default

    def _list_layer_tensors(
        self, values: dict[str, Any], group: str, role: str, pattern: re.Pattern[str]
    ) -> tuple[tuple[str, str], ...]:
        """List the (key, value) names of layers 0, 1, ...: by the settings' templates or exporters' names."""
        templates = [get_section(self.decoder, group).get(f"{role}_{kind}_names") for kind in ("key", "value")]
        if all(isinstance(template, str) and template.count("%d") == 1 for template in templates):
            key, value = (str(template) for template in templates)
            pairs: list[tuple[str, str]] = []
            while key.replace("%d", str(len(pairs))) in values:
                pairs.append((key.replace("%d", str(len(pairs))), value.replace("%d", str(len(pairs)))))
            missing_names = [name for pair in pairs for name in pair if name not in values]
            if not pairs or missing_names:
                name = missing_names[0] if missing_names else key.replace("%d", "0")
                raise self._build_error(f"genai_config.json names {group[:-1]} {name}, which the graph does not have")
            return tuple(pairs)
        names_by_layer: dict[tuple[int, str], str] = {}
        for name in values:
            match = pattern.fullmatch(name)
            if match:
                names_by_layer[int(match[1]), match[2][0]] = name
        layers = 1 + max((layer for layer, _ in names_by_layer), default=-1)
        if not layers:
            raise self._build_no_cache_error(values, group, role)
        for layer in range(layers):
            for kind in "kv":
                if (layer, kind) not in names_by_layer:
                    part_name = "key" if kind == "k" else "value"
                    raise self._build_error(
                        f"{group[:-1]} {role} {part_name} of layer {layer} is missing although layer {layers - 1} is "
                        f"there"
                    )
        return tuple((names_by_layer[layer, "k"], names_by_layer[layer, "v"]) for layer in range(layers))

    def _build_no_cache_error(self, values: dict[str, Any], group: str, role: str) -> ModelError:
        default = "past_key_values.{i}.key" if role == "past" else "present.{i}.key"
        if any(name.startswith("encoder") or ".encoder." in name for name in self.inputs):
            return self._build_error("an encoder-decoder model; kvmnn runs decoders only")
        return self._build_error(
            f"no {group} {default} and .value, so the cache is not in kvmnn's hands; "
            f"export with a cache ({_EXPORT_WITH_PAST_COMMAND}); {group}: {_format_names(values)}"
        )

    # Sizes and types

    def _read_cache_shape(
        self, past: tuple[tuple[str, str], ...], values: dict[str, Any]
    ) -> tuple[int, int, type[np.float16] | type[np.float32]]:
        heads = self._read_setting("num_key_value_heads", "num_key_value_heads")
        head_dim = self._read_setting("head_size", "head_dim")
        cache_types = set()
        for pair in past:
            for name in pair:
                dims = _read_dims(values[name])
                if len(dims) != 4:
                    raise self._build_error(
                        f"{name} has {len(dims)} axes; expected [batch, kv_heads, token, head_dim]; "
                        f"export with {_EXPORT_WITH_PAST_COMMAND}"
                    )
                if isinstance(dims[0], int) and dims[0] != 1:
                    raise self._build_error(f"{name} is made for a batch of {dims[0]}; kvmnn runs one text at a time")
                if isinstance(dims[2], int):
                    raise self._build_error(
                        f"{name} holds exactly {dims[2]} tokens; export with an axis of free length for the past"
                    )
                cache_types.add((dims[1], dims[3], self._read_dtype(values[name])))
        if len(cache_types) > 1:
            shape_texts = sorted({f"{h} heads of {d} ({np.dtype(t).name})" for h, d, t in cache_types})
            raise self._build_error(
                f"keys and values of unequal shape or dtype: {', '.join(shape_texts[:4])}; not supported"
            )
        ((graph_heads, graph_head_dim, dtype),) = cache_types
        heads = graph_heads if isinstance(graph_heads, int) else heads
        head_dim = graph_head_dim if isinstance(graph_head_dim, int) else head_dim
        if not heads or not head_dim:
            raise self._build_error(
                f"{past[0][0]} does not say its heads and head_dim, and no config.json next to it does"
            )
        if dtype not in (np.float16, np.float32):
            raise self._build_error(f"the cache is {np.dtype(dtype).name}; export with fp16 or fp32 keys and values")
        return heads, head_dim, np.float16 if dtype == np.float16 else np.float32

    def _read_vocab_size(self, logits: str) -> int:
        dims = _read_dims(self.outputs[logits])
        if dims and isinstance(dims[-1], int):
            return dims[-1]
        vocab = self._read_setting("vocab_size", "vocab_size")
        if not vocab:
            raise self._build_error(
                f"{logits} does not say how large the vocabulary is, and no config.json next to it does"
            )
        return vocab

    def _read_setting(self, genai: str, *names: str) -> int | None:
        sources = [
            (self.files.config, names),
            (self.decoder, (genai,)),
            (get_section(self.files.genai, "model"), (genai,)),
        ]
        for settings, keys in sources:
            for key in keys:
                value = settings.get(key)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    def _read_dtype(self, value: Any) -> type[np.generic]:
        onnx = import_optional("onnx")
        onnx_type = value.type.tensor_type.elem_type
        if onnx_type == onnx.TensorProto.BFLOAT16:
            raise self._build_error(f"{value.name} is bfloat16; export with fp16 or fp32")
        try:
            numpy_type: type[np.generic] = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(onnx_type)).type
        except Exception as error:  # unknown numbers raise KeyError or ValueError, by version
            raise self._build_error(
                f"{value.name} has an element type that kvmnn does not know: {onnx_type}"
            ) from error
        return numpy_type


def _read_dims(value: Any) -> list[int | str | None]:
    """Return the size of each axis: a number, a symbolic name, or None."""
    shape = value.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in shape]


def _format_names(values: dict[str, Any]) -> str:
    names = list(values)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"
