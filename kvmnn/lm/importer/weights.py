"""Weights of a decoder under the names of its graph, read from a GGUF file a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...dtypes import Floats
from ...errors import ModelError
from ...formats.llama.gguf_tensors import GgufModel, GgufTensor
from .config import DecoderConfig

_BLOCK_NAMES: Final = {
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
}
"""Parts of a block, by their names in the graph: their names in GGUF files."""


@dataclass(frozen=True)
class WeightSource:
    """A weight of the graph, and where it comes from."""

    name: str
    shape: tuple[int, ...]
    #: Float32 in chunks of whole rows, in order.
    read: Callable[[], Iterator[Floats]]


def list_gguf_weights(model: GgufModel, config: DecoderConfig) -> list[WeightSource]:
    """List all weights of a GGUF model in the order of the graph.

    Raises
    ------
    ModelError
        Where a tensor is missing, has another shape, or is one that the block does not have.
    """
    return _GgufWeights(model, config).list_sources()


class _GgufWeights:
    def __init__(self, model: GgufModel, config: DecoderConfig) -> None:
        self._model, self._config = model, config
        self._unused = set(model.tensors) - {
            "rope_freqs.weight",
            "rope_factors_short.weight",
            "rope_factors_long.weight",
        }

    def list_sources(self) -> list[WeightSource]:
        config, features = self._config, self._config.features
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_rows, kv_rows = config.num_heads * head_dim, config.kv_heads * head_dim
        sources = [self._take("embed_tokens.weight", "token_embd.weight", (config.vocab_size, hidden))]
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
        fused = {
            "attn_qkv": {"attention.q": q_rows, "attention.k": kv_rows, "attention.v": kv_rows},
            "ffn_up": {"mlp.gate": inner, "mlp.up": inner},
        }
        for layer in range(config.num_layers):
            prefix = f"blk.{layer}."
            pending = dict(shapes)
            if features.has_fused_projections:
                for tensor_name, parts in fused.items():
                    begin = 0
                    for part, rows in parts.items():
                        shape = pending.pop(part)
                        sources.append(
                            self._take(
                                f"layers.{layer}.{part}.weight",
                                f"{prefix}{tensor_name}.weight",
                                shape,
                                rows=slice(begin, begin + rows),
                                num_tensor_rows=sum(parts.values()),
                            )
                        )
                        begin += rows
            for part, shape in pending.items():
                heads = {"attention.q": config.num_heads, "attention.k": config.kv_heads}.get(part, 0)
                permuted_heads = heads if features.has_permuted_qk else 0
                tensor_name = f"{prefix}{_BLOCK_NAMES[part]}"
                target = f"layers.{layer}.{part}"
                sources.append(
                    self._take(f"{target}.weight", f"{tensor_name}.weight", shape, permuted_heads=permuted_heads)
                )
                if f"{tensor_name}.bias" in self._model.tensors:
                    sources.append(
                        self._take(f"{target}.bias", f"{tensor_name}.bias", shape[:1], permuted_heads=permuted_heads)
                    )
        sources.append(self._take("norm.weight", "output_norm.weight", (hidden,)))
        if "output.weight" in self._model.tensors:
            sources.append(self._take("lm_head.weight", "output.weight", (config.vocab_size, hidden)))
        if self._unused:
            names = ", ".join(sorted(self._unused)[:4])
            raise ModelError(
                f"{self._model.label}: has tensors that a decoder of the architecture {config.architecture} does not "
                f"have: {names}{' ...' if len(self._unused) > 4 else ''}"
            )
        return sources

    def _take(
        self,
        name: str,
        tensor_name: str,
        shape: tuple[int, ...],
        *,
        permuted_heads: int = 0,
        rows: slice | None = None,
        num_tensor_rows: int = 0,
    ) -> WeightSource:
        tensor = self._model.tensors.get(tensor_name)
        if tensor is None:
            raise ModelError(f"{self._model.label}: has no tensor {tensor_name}")
        tensor_shape = shape if rows is None else (num_tensor_rows, *shape[1:])
        if tensor.shape != tensor_shape:
            raise ModelError(
                f"{self._model.label}: {tensor_name} has the shape {list(tensor.shape)}: expected {list(tensor_shape)}"
            )
        self._unused.discard(tensor_name)
        if permuted_heads:
            return WeightSource(name, shape, lambda: iter([_unpermute_rows(self._model, tensor, permuted_heads)]))
        if rows is not None:
            return WeightSource(name, shape, lambda: _select_rows(self._model.read_rows(tensor), rows))
        return WeightSource(name, shape, lambda: self._model.read_rows(tensor))


def _unpermute_rows(model: GgufModel, tensor: GgufTensor, heads: int) -> Floats:
    """Rows of Q or K of llama.cpp, whose pairs are neighbours, in the order of checkpoints: pairs half a head apart."""
    values = model.read_tensor(tensor.name)
    by_pair = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(values.shape)


def _select_rows(chunks: Iterator[Floats], rows: slice) -> Iterator[Floats]:
    begin = 0
    for chunk in chunks:
        part = chunk[max(0, rows.start - begin) : max(0, rows.stop - begin)]
        if len(part):
            yield part
        begin += len(chunk)
