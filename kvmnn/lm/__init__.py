"""A language model with its KV cache in our hands: cut by any policy, measured, and handed on."""

from .decoder import Step
from .session import DecoderSession
from .tokenizer import Tokenizer

__all__ = ["DecoderSession", "Step", "Tokenizer"]
