"""The shipped model in torch: transformers' GPTNeoXForCausalLM with eager attention in float32, on a cache given to it.

The peer that kvmnn's model steps are compared with; needs torch and transformers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, GPTNeoXForCausalLM
from transformers.utils import logging
from unexport import unexport

Floats: TypeAlias = npt.NDArray[np.float32]
KVPair: TypeAlias = tuple[Floats, Floats]


@dataclass
class TorchStep:
    """What torch gives for some tokens.

    Attributes
    ----------
    logits
        float32 ``[token, vocab]``.
    present
        Keys and values of each layer, ``[1, head, past + token, head_dim]``.
    attentions
        Probabilities of each layer, ``[head, token, past + token]``.
    """

    logits: Floats
    present: list[KVPair]
    attentions: list[Floats]


def load_model(folder: Path) -> GPTNeoXForCausalLM:
    """The model of a folder with model.onnx and config.json, its weights taken from the ONNX file."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as checkpoint:
        unexport(folder, Path(checkpoint))
        model = GPTNeoXForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


class TorchDecoder:
    """Steps of a model on caches whose layers may differ in length, with positions as they are given.

    transformers makes one mask, from the length of layer 0's cache, and eager attention fails on other layers' lengths;
    so every layer is handed its own: what is in the cache is visible, the new tokens are causal.
    """

    def __init__(self, model: GPTNeoXForCausalLM) -> None:
        self.model = model
        self.layers: int = model.config.num_hidden_layers
        self.heads: int = model.config.num_attention_heads
        self.head_dim: int = model.config.hidden_size // self.heads

    def empty(self) -> list[KVPair]:
        """A past of no tokens."""
        nothing = np.zeros((1, self.heads, 0, self.head_dim), np.float32)
        return [(nothing, nothing)] * self.layers

    @torch.no_grad()
    def step(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], past: Sequence[KVPair]) -> TorchStep:
        """Feed tokens ``[token]`` with their true positions."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(torch.tensor(keys), torch.tensor(values), layer)
        masks = [causal_mask(keys.shape[2], len(ids)) for keys, _ in past]
        hooks = [
            layer.attention.register_forward_pre_hook(_with_mask(mask), with_kwargs=True)
            for layer, mask in zip(self.model.gpt_neox.layers, masks, strict=True)
        ]
        try:
            result = self.model(
                input_ids=torch.tensor(ids)[None],
                position_ids=torch.tensor(positions)[None],
                past_key_values=cache,
                use_cache=True,
                output_attentions=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        present = [(layer.keys.numpy(), layer.values.numpy()) for layer in cache.layers]
        return TorchStep(result.logits[0].numpy(), present, [weights[0].numpy() for weights in result.attentions])


def causal_mask(past: int, tokens: int) -> torch.Tensor:
    """What is added to the scores, ``[1, 1, tokens, past + tokens]``."""
    later = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)
    return torch.cat([torch.zeros(tokens, past), later], dim=1)[None, None]


def _with_mask(mask: torch.Tensor) -> Any:
    def replace(module: torch.nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {**options, "attention_mask": mask}

    return replace
