"""State files of llama.cpp: sessions and sequences (docs/other-engines.md)."""

from .gguf import is_gguf, read_rotations
from .gguf import read_gguf_rotary as read_gguf_rotary
from .reader import ENGINE, FORMAT_NAME, LLAMA_STATE
from .state import NO_TOKEN

__all__ = [
    "ENGINE",
    "FORMAT_NAME",
    "LLAMA_STATE",
    "NO_TOKEN",
    "is_gguf",
    "read_gguf_rotary",
    "read_rotations",
]
