"""A language model with its KV cache in our hands: cut by any policy, measured, and handed on (docs/lm.md)."""

from .cache.model_cache import ModelCache
from .graph.decoder import Step
from .runner import Runner
from .session import DecoderSession
from .tokenizer import Tokenizer

__all__ = ["DecoderSession", "ModelCache", "Runner", "Step", "Tokenizer"]
