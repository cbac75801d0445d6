"""What a decoder's inputs and outputs are, read from its graph.

The names are those that optimum and transformers.js exports share: ``past_key_values.{i}.key`` and ``.value`` come in,
``present.{i}.key`` and ``.value`` go out. A ``genai_config.json`` may name others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import ModelError
from ...optional import package
from .graph_file import subgraphs
from .model_files import ModelFiles, section

_PAST = re.compile(r"(?:past_key_values|past_key_value|past|past_kv)[._](\d+)[._](key|value|k|v)")
_PRESENT = re.compile(r"(?:present_key_values|present_key_value|present|present_kv)[._](\d+)[._](key|value|k|v)")
_ATTENTION = re.compile(r"attentions?[._](\d+)")
_COUNTING = {"GroupQueryAttention", "SparseAttention", "PagedAttention", "DecoderMaskedMultiHeadAttention"}
_BRANCH = "use_cache_branch"
_ALL_LOGITS = ("num_logits_to_keep", "logits_to_keep")  # 0 asks for the logits of all tokens
_SLOTS = "cache_position"
_WITH_PAST = "optimum-cli export onnx --task text-generation-with-past"


@dataclass(frozen=True)
class DecoderInterface:
    """A decoder's inputs and outputs.

    Attributes
    ----------
    label
        What messages call the model: its path.
    layers, kv_heads, head_dim
        Sizes of the cache.
    dtype
        Of the cache: ``float16`` or ``float32``.
    vocab
        Number of logits of a token.
    query_heads
        Where the settings or the graph say it.
    has_positions
        Whether positions are an input, and used. Where they are not, the graph counts them itself and its cache cannot
        be cut.
    counts_length
        Whether attention takes the length of every layer's past from the mask, so that layers must be equally long.
    merged
        Whether one graph holds a branch with a past and one without.
    max_positions
        How many positions the model was made for, where ``config.json`` says so.
    ids, logits
        Names of the token input and of the logits.
    mask, positions, branch, slots, all_logits
        Names of inputs that a graph may have.
    past, present
        Names of (key, value) for each layer.
    attentions
        Names of the outputs that hold attention probabilities, if the graph has them for every layer.
    types
        Numpy dtype of each input.
    ranks
        Number of axes of each input.
    """

    label: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: type[np.float16] | type[np.float32]
    vocab: int
    query_heads: int | None
    has_positions: bool
    counts_length: bool
    merged: bool
    max_positions: int | None
    ids: str
    logits: str
    mask: str | None
    positions: str | None
    branch: str | None
    slots: str | None
    all_logits: str | None
    past: tuple[tuple[str, str], ...]
    present: tuple[tuple[str, str], ...]
    attentions: tuple[str, ...] | None
    types: dict[str, type[np.generic]] = field(repr=False)
    ranks: dict[str, int] = field(repr=False)


def read_interface(model: Any, files: ModelFiles) -> DecoderInterface:
    """The interface of a decoder.

    Parameters
    ----------
    model
        An ``onnx.ModelProto``; weights are not looked at.
    files
        Where it came from, with its settings.

    Raises
    ------
    ModelError
        When the graph is no decoder whose cache can be held outside it. The message says what to export instead.
    """
    return _Reader(model, files).read()


class _Reader:
    def __init__(self, model: Any, files: ModelFiles) -> None:
        self.model, self.files, self.label = model, files, files.label
        stored = {tensor.name for tensor in model.graph.initializer}
        self.inputs = {value.name: value for value in model.graph.input if value.name not in stored}
        self.outputs = {value.name: value for value in model.graph.output}
        self.decoder = section(files.genai, "model", "decoder")

    def read(self) -> DecoderInterface:
        self._refuse_shared_buffer()
        ids = self._required("input_ids", "input_ids")
        past = self._layers(self.inputs, "inputs", "past", _PAST)
        present = self._layers(self.outputs, "outputs", "present", _PRESENT)
        if len(past) != len(present):
            raise self._error(f"{len(past)} layers of past inputs but {len(present)} of present outputs")
        self._refuse_own_positions()
        mask = self._optional("attention_mask")
        positions = self._optional("position_ids")
        branch = _BRANCH if _BRANCH in self.inputs else None
        slots = _SLOTS if _SLOTS in self.inputs else None
        all_logits = next((name for name in _ALL_LOGITS if name in self.inputs), None)
        known = {ids, mask, positions, branch, slots, all_logits, *(name for pair in past for name in pair)}
        self._refuse_others(known)
        kv_heads, head_dim, dtype = self._cache_shape(past, self.inputs)
        logits = self._logits()
        names = [name for name in self.inputs if name in known]
        return DecoderInterface(
            label=self.label,
            layers=len(past),
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            vocab=self._vocab(logits),
            query_heads=self._setting("num_attention_heads", "num_attention_heads", "n_head", "num_heads"),
            has_positions=positions is not None and self._is_used(positions),
            counts_length=self._counts_length(),
            merged=branch is not None,
            max_positions=self._setting("context_length", "max_position_embeddings", "n_positions", "max_seq_len"),
            ids=ids,
            logits=logits,
            mask=mask,
            positions=positions,
            branch=branch,
            slots=slots,
            all_logits=all_logits,
            past=past,
            present=present,
            attentions=self._attentions(len(past)),
            types={name: self._dtype(self.inputs[name]) for name in names},
            ranks={name: len(_dims(self.inputs[name])) for name in names},
        )

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self.label}: {message}")

    # What cannot work

    def _refuse_shared_buffer(self) -> None:
        if section(self.files.genai, "search").get("past_present_share_buffer") is True:
            raise self._error(
                "genai_config.json says past_present_share_buffer: past and present are one buffer of fixed length, "
                f"from which nothing can be cut; export with separate past and present ({_WITH_PAST})"
            )

    def _refuse_own_positions(self) -> None:
        onnx = package("onnx")
        for node in (node for node in self._nodes() if node.op_type == "GroupQueryAttention"):
            settings = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
            if settings.get("do_rotary", 0) and not (len(node.input) > 9 and node.input[9]):
                raise self._error(
                    f"GroupQueryAttention {node.name!r} (do_rotary=1) derives positions from the length of the cache, "
                    f"which cutting changes; export with position_ids ({_WITH_PAST})"
                )

    def _refuse_others(self, known: set[str | None]) -> None:
        others = [name for name in self.inputs if name not in known]
        if not others:
            return
        if any("encoder" in name for name in others):
            raise self._error(f"takes {others[0]}: an encoder-decoder model; kvmnn runs decoders only")
        if "inputs_embeds" in others:
            raise self._error("takes inputs_embeds instead of tokens; export the decoder with input_ids")
        raise self._error(f"inputs that kvmnn does not know: {', '.join(others[:8])}; export with {_WITH_PAST}")

    def _counts_length(self) -> bool:
        return any(node.op_type in _COUNTING for node in self._nodes())

    def _is_used(self, name: str) -> bool:
        return any(name in node.input for node in self._nodes())

    def _nodes(self) -> Iterator[Any]:
        for graph in (self.model.graph, *subgraphs(self.model.graph)):
            yield from graph.node

    # Names

    def _required(self, key: str, default: str) -> str:
        name = self._named("inputs", key, default)
        if name not in self.inputs:
            raise self._error(f"no input {name}; inputs: {_some(self.inputs)}")
        return name

    def _optional(self, name: str) -> str | None:
        named = self._named("inputs", name, name)
        return named if named in self.inputs else None

    def _named(self, group: str, key: str, default: str) -> str:
        name = section(self.decoder, group).get(key, default)
        return name if isinstance(name, str) else default

    def _layers(
        self, values: dict[str, Any], group: str, word: str, pattern: re.Pattern[str]
    ) -> tuple[tuple[str, str], ...]:
        """Names of (key, value) of layers 0, 1, ...; by the settings' templates, else by what exporters write."""
        templates = [section(self.decoder, group).get(f"{word}_{kind}_names") for kind in ("key", "value")]
        if all(isinstance(template, str) and template.count("%d") == 1 for template in templates):
            key, value = (str(template) for template in templates)
            pairs: list[tuple[str, str]] = []
            while key.replace("%d", str(len(pairs))) in values:
                pairs.append((key.replace("%d", str(len(pairs))), value.replace("%d", str(len(pairs)))))
            missing = [name for pair in pairs for name in pair if name not in values]
            if not pairs or missing:
                name = missing[0] if missing else key.replace("%d", "0")
                raise self._error(f"genai_config.json names {group[:-1]} {name}, which the graph does not have")
            return tuple(pairs)
        found: dict[tuple[int, str], str] = {}
        for name in values:
            match = pattern.fullmatch(name)
            if match:
                found[int(match[1]), match[2][0]] = name
        layers = 1 + max((layer for layer, _ in found), default=-1)
        if not layers:
            raise self._no_cache(values, group, word)
        for layer in range(layers):
            for kind in "kv":
                if (layer, kind) not in found:
                    which = "key" if kind == "k" else "value"
                    raise self._error(
                        f"{group[:-1]} {word} {which} of layer {layer} is missing although layer {layers - 1} is there"
                    )
        return tuple((found[layer, "k"], found[layer, "v"]) for layer in range(layers))

    def _no_cache(self, values: dict[str, Any], group: str, word: str) -> ModelError:
        default = "past_key_values.{i}.key" if word == "past" else "present.{i}.key"
        if any(name.startswith("encoder") or ".encoder." in name for name in self.inputs):
            return self._error("an encoder-decoder model; kvmnn runs decoders only")
        return self._error(
            f"no {group} {default} and .value, so the cache is not in kvmnn's hands; "
            f"export with a cache ({_WITH_PAST}); {group}: {_some(values)}"
        )

    def _logits(self) -> str:
        name = self._named("outputs", "logits", "logits")
        if name not in self.outputs:
            raise self._error(f"no output {name}; outputs: {_some(self.outputs)}")
        return name

    def _attentions(self, layers: int) -> tuple[str, ...] | None:
        found = {int(match[1]): name for name in self.outputs if (match := _ATTENTION.fullmatch(name))}
        return tuple(found[layer] for layer in range(layers)) if set(range(layers)) <= set(found) else None

    # Sizes and types

    def _cache_shape(
        self, past: tuple[tuple[str, str], ...], values: dict[str, Any]
    ) -> tuple[int, int, type[np.float16] | type[np.float32]]:
        heads = self._setting("num_key_value_heads", "num_key_value_heads")
        head_dim = self._setting("head_size", "head_dim")
        kinds = set()
        for pair in past:
            for name in pair:
                dims = _dims(values[name])
                if len(dims) != 4:
                    raise self._error(
                        f"{name} has {len(dims)} axes; expected [batch, kv_heads, token, head_dim]; "
                        f"export with {_WITH_PAST}"
                    )
                if isinstance(dims[0], int) and dims[0] != 1:
                    raise self._error(f"{name} is made for a batch of {dims[0]}; kvmnn runs one text at a time")
                if isinstance(dims[2], int):
                    raise self._error(
                        f"{name} holds exactly {dims[2]} tokens; export with an axis of free length for the past"
                    )
                kinds.add((dims[1], dims[3], self._dtype(values[name])))
        if len(kinds) > 1:
            shown = sorted({f"{h} heads of {d} ({np.dtype(t).name})" for h, d, t in kinds})
            raise self._error(f"keys and values of unequal shape or dtype: {', '.join(shown[:4])}; not supported")
        ((found_heads, found_dim, kind),) = kinds
        heads = found_heads if isinstance(found_heads, int) else heads
        head_dim = found_dim if isinstance(found_dim, int) else head_dim
        if not heads or not head_dim:
            raise self._error(f"{past[0][0]} does not say its heads and head_dim, and no config.json beside it does")
        if kind not in (np.float16, np.float32):
            raise self._error(f"the cache is {np.dtype(kind).name}; export with fp16 or fp32 keys and values")
        return heads, head_dim, np.float16 if kind == np.float16 else np.float32

    def _vocab(self, logits: str) -> int:
        dims = _dims(self.outputs[logits])
        if dims and isinstance(dims[-1], int):
            return dims[-1]
        vocab = self._setting("vocab_size", "vocab_size")
        if not vocab:
            raise self._error(f"{logits} does not say how large the vocabulary is, and no config.json beside it does")
        return vocab

    def _setting(self, genai: str, *names: str) -> int | None:
        sources = [
            (self.files.config, names),
            (self.decoder, (genai,)),
            (section(self.files.genai, "model"), (genai,)),
        ]
        for settings, keys in sources:
            for key in keys:
                value = settings.get(key)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    def _dtype(self, value: Any) -> type[np.generic]:
        onnx = package("onnx")
        kind = value.type.tensor_type.elem_type
        if kind == onnx.TensorProto.BFLOAT16:
            raise self._error(f"{value.name} is bfloat16; export with fp16 or fp32")
        try:
            found: type[np.generic] = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)).type
        except Exception as error:  # unknown numbers raise KeyError or ValueError, by version
            raise self._error(f"{value.name} has an element type that kvmnn does not know: {kind}") from error
        return found


def _dims(value: Any) -> list[int | str | None]:
    """Sizes of the axes: a number, a name, or nothing known."""
    shape = value.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in shape]


def _some(values: dict[str, Any]) -> str:
    names = list(values)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"
