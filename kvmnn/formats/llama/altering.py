"""What llama.cpp does to K and V before it stores them, as far as an architecture and the types of a cache say.

`llama_model_rope_type` has an entry for every architecture: two neighbours of a head are turned together (NORM), or two
dimensions half a head apart (NEOX). Of those in `_PERMUTED_ARCHITECTURES` it is certain that others have the halves:
what llama.cpp's converter has for them (`conversion/*.py`) permutes the weights of query and key in every layer. Of
other architectures
with neighbours some were trained so, others are permuted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...arrays.undoing import Transform, list_possible_transforms
from .state import CacheTensor

_PERMUTED_ARCHITECTURES: Final = frozenset(
    ("arcee", "granite", "granitemoe", "internlm2", "llama", "minicpm", "mistral3", "olmo", "smollm3")
)
_HALF_PAIRED_ARCHITECTURES: Final = frozenset(
    (
        *("afmoe", "apertus", "bailingmoe2", "bert", "bitnet", "codeshell", "cogvlm", "dbrx", "dots1"),
        *("dream", "eurobert", "exaone", "exaone-moe", "exaone4", "falcon", "falcon-h1", "gemma"),
        *("gemma-embedding", "gemma2", "gemma3", "gemma3n", "gemma4", "glm4moe", "gpt-oss", "gptneox"),
        *("grok", "grovemoe", "hunyuan-dense", "hunyuan-moe", "jina-bert-v3", "laguna", "lfm2", "lfm2moe"),
        *("llada-moe", "maple", "mellum", "mimo2", "minicpm3", "minimax-01", "minimax-m2", "nemotron"),
        *("nomic-bert", "nomic-bert-moe", "olmo2", "olmoe", "openelm", "orion", "paddleocr"),
        *("pangu-embedded", "phi2", "phi3", "phimoe", "plamo", "plamo2", "plamo3", "qwen", "qwen2"),
        *("qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vl"),
        *("qwen3vlmoe", "rnd1", "seed_oss", "smallthinker", "spark2_5", "stablelm", "starcoder2", "step35"),
    )
)
"""Architectures of rope type NEOX, and of M-RoPE's, whose pairs are the same."""
_UNROTATED_ARCHITECTURES: Final = frozenset(
    ("bloom", "gpt2", "jais", "jamba", "jina-bert-v2", "mamba", "mamba2", "mpt", "nemotron_h", "refact", "t5")
)


def is_key_order_permuted(architecture: str | None, head_dim: int, rotary_dim: int | None) -> bool | None:
    """Whether K lies in another order than other engines have it; None where nothing says it.

    Parameters
    ----------
    rotary_dim
        Dimensions of a head that RoPE turns; None for all.
    """
    if head_dim % 2 or architecture in _HALF_PAIRED_ARCHITECTURES or architecture in _UNROTATED_ARCHITECTURES:
        return False
    return True if architecture in _PERMUTED_ARCHITECTURES and rotary_dim in (None, head_dim) else None


def list_possible_rotations(tensors: Sequence[CacheTensor], heads: Sequence[int]) -> tuple[Transform, ...]:
    """What newer builds rotate: quantised K or V, in heads of a multiple of 64 dimensions."""
    transforms = {
        transform
        for tensor in tensors
        if tensor.type.is_block
        for transform in list_possible_transforms(tensor.part, tensor.row_values // heads[tensor.layer])
        if transform != "k-order"
    }
    return tuple(sorted(transforms))
