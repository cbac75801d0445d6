"""Weights of a decoder under the names of its graph, read from a GGUF file or a checkpoint a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final, Generic, Protocol, TypeVar

import numpy as np

from ..._util.dataclass import dataclass
from ...dtypes import Floats
from ...errors import ModelError
from .config import DecoderConfig


class ShapedTensor(Protocol):
    """A tensor of a model file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes, as numpy has them."""
        ...


Tensor = TypeVar("Tensor", bound=ShapedTensor)


class TensorReader(Protocol[Tensor]):
    """The tensors of a model."""

    @property
    def label(self) -> str:
        """The model's name in messages."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors by name."""
        ...

    def read_rows(self, tensor: Tensor) -> Iterator[Floats]:
        """Read a tensor as float32 ``[row, value]``, in chunks of whole rows."""
        ...


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names that a kind of file gives the weights of a decoder, without ``.weight`` and ``.bias``."""

    embedding: str
    final_norm: str
    output: str
    #: With ``{layer}``; begins the names of a block's tensors.
    block_prefix: str
    #: By the names of a block's weights in the graph.
    parts: Mapping[str, str]
    #: Tensors that hold several weights of the graph, in order.
    fused: Mapping[str, tuple[str, ...]]
    #: Tensors that are no weights of the graph.
    ignored: frozenset[str] = frozenset()
    #: Whether rows of Q and K are in the order of neighbouring pairs.
    has_permuted_qk: bool = False
    #: Added to the weights of norms.
    norm_offset: float = 0.0


_GGUF_NAMES: Final = TensorNames(
    embedding="token_embd",
    final_norm="output_norm",
    output="output",
    block_prefix="blk.{layer}.",
    parts={
        "input_norm": "attn_norm",
        "attention.q": "attn_q",
        "attention.k": "attn_k",
        "attention.v": "attn_v",
        "attention.o": "attn_output",
        "attention.q_norm": "attn_q_norm",
        "attention.k_norm": "attn_k_norm",
        "post_attention_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
        "post_mlp_norm": "post_ffw_norm",
    },
    fused={"attn_qkv": ("attention.q", "attention.k", "attention.v"), "ffn_up": ("mlp.gate", "mlp.up")},
    ignored=frozenset({"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}),
)


# llama.cpp's converter permutes Q and K of these, whose graphs rotate neighbouring pairs.
_PERMUTED_GGUF_ARCHITECTURES: Final = frozenset({"llama", "mistral3", "granite"})


def get_gguf_names(architecture: str) -> TensorNames:
    """Return the names of GGUF files of an architecture."""
    return replace(_GGUF_NAMES, has_permuted_qk=architecture in _PERMUTED_GGUF_ARCHITECTURES)


@dataclass(frozen=True)
class WeightSource:
    """A weight of the graph, and where it comes from."""

    name: str
    shape: tuple[int, ...]
    #: Float32 in chunks of whole rows, in order.
    read: Callable[[], Iterator[Floats]]


def list_weights(model: TensorReader[Tensor], config: DecoderConfig, names: TensorNames) -> list[WeightSource]:
    """List all weights of a decoder in the order of the graph.

    Raises
    ------
    ModelError
        Where a tensor is missing, has another shape, or is one that the block does not have.
    """
    return _WeightList(model, config, names).list_sources()


class _WeightList(Generic[Tensor]):
    def __init__(self, model: TensorReader[Tensor], config: DecoderConfig, names: TensorNames) -> None:
        self._model, self._config, self._names = model, config, names
        self._unused = set(model.tensors) - names.ignored

    def list_sources(self) -> list[WeightSource]:
        config, names = self._config, self._names
        hidden = config.hidden_size
        sources = [self._take("embed_tokens.weight", f"{names.embedding}.weight", (config.vocab_size, hidden))]
        for layer in range(config.num_layers):
            sources += self._list_block(layer)
        sources.append(self._take("norm.weight", f"{names.final_norm}.weight", (hidden,)))
        if not config.has_tied_output and f"{names.output}.weight" in self._model.tensors:
            sources.append(self._take("lm_head.weight", f"{names.output}.weight", (config.vocab_size, hidden)))
        self._unused.discard(f"{names.output}.weight")
        if self._unused:
            unused_names = ", ".join(sorted(self._unused)[:4])
            raise ModelError(
                f"{self._model.label}: has tensors that a decoder of the architecture {config.architecture} does not "
                f"have: {unused_names}{' ...' if len(self._unused) > 4 else ''}"
            )
        return sources

    def _list_block(self, layer: int) -> Iterator[WeightSource]:
        names, shapes = self._names, _list_block_shapes(self._config)
        prefix = names.block_prefix.format(layer=layer)
        if self._config.features.has_fused_projections:
            for tensor_name, parts in names.fused.items():
                num_rows = sum(shapes[part][0] for part in parts)
                begin = 0
                for part in parts:
                    shape = shapes.pop(part)
                    rows = slice(begin, begin + shape[0])
                    yield self._take_rows(
                        f"layers.{layer}.{part}.weight", f"{prefix}{tensor_name}.weight", shape, rows, num_rows
                    )
                    begin += shape[0]
        for part, shape in shapes.items():
            heads = {"attention.q": self._config.num_heads, "attention.k": self._config.kv_heads}.get(part, 0)
            permuted_heads = heads if names.has_permuted_qk else 0
            target, tensor_name = f"layers.{layer}.{part}", f"{prefix}{names.parts[part]}"
            yield self._take(f"{target}.weight", f"{tensor_name}.weight", shape, permuted_heads)
            if f"{tensor_name}.bias" in self._model.tensors:
                yield self._take(f"{target}.bias", f"{tensor_name}.bias", shape[:1], permuted_heads)

    def _take(self, name: str, tensor_name: str, shape: tuple[int, ...], permuted_heads: int = 0) -> WeightSource:
        tensor = self._find_tensor(tensor_name, shape)
        if permuted_heads:
            return WeightSource(name, shape, lambda: iter([_unpermute_rows(self._model, tensor, permuted_heads)]))
        offset = self._names.norm_offset if name.endswith("norm.weight") else 0.0
        if offset:
            return WeightSource(
                name, shape, lambda: (chunk + np.float32(offset) for chunk in self._model.read_rows(tensor))
            )
        return WeightSource(name, shape, lambda: self._model.read_rows(tensor))

    def _take_rows(
        self, name: str, tensor_name: str, shape: tuple[int, ...], rows: slice, num_rows: int
    ) -> WeightSource:
        tensor = self._find_tensor(tensor_name, (num_rows, *shape[1:]))
        return WeightSource(name, shape, lambda: _select_rows(self._model.read_rows(tensor), rows))

    def _find_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._model.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._model.label}: has no tensor {name}")
        if tensor.shape != shape:
            raise ModelError(f"{self._model.label}: {name} has the shape {list(tensor.shape)}: expected {list(shape)}")
        self._unused.discard(name)
        return tensor


def _list_block_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    features, hidden, inner, head_dim = config.features, config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "attention.q": (q_rows, hidden),
        "attention.k": (kv_rows, hidden),
        "attention.v": (kv_rows, hidden),
        "attention.o": (hidden, q_rows),
        "mlp_norm": (hidden,),
        "mlp.gate": (inner, hidden),
        "mlp.up": (inner, hidden),
        "mlp.down": (hidden, inner),
    }
    if features.has_qk_norm:
        shapes |= {"attention.q_norm": (head_dim,), "attention.k_norm": (head_dim,)}
    if features.has_post_norms:
        shapes |= {"post_attention_norm": (hidden,), "post_mlp_norm": (hidden,)}
    return shapes


def _unpermute_rows(model: TensorReader[Tensor], tensor: Tensor, heads: int) -> Floats:
    """Rows of Q or K of llama.cpp, whose pairs are neighbours, in the order of checkpoints: pairs half a head apart."""
    values = np.concatenate(list(model.read_rows(tensor))).reshape(tensor.shape)
    by_pair = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(values.shape)


def _select_rows(chunks: Iterator[Floats], rows: slice) -> Iterator[Floats]:
    begin = 0
    for chunk in chunks:
        part = chunk[max(0, rows.start - begin) : max(0, rows.stop - begin)]
        if len(part):
            yield part
        begin += len(chunk)
