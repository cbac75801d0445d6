"""State files of llama.cpp: sessions and sequences (docs/other-engines.md)."""

from .description import ENGINE
from .gguf import is_gguf
from .gguf import read_rotary as read_gguf_rotary
from .keeping import NAME, keep
from .model_layers import read_rotations
from .reading import holds_state, is_state, read
from .state import NO_TOKEN

__all__ = [
    "ENGINE",
    "NAME",
    "NO_TOKEN",
    "holds_state",
    "is_gguf",
    "is_state",
    "keep",
    "read",
    "read_gguf_rotary",
    "read_rotations",
]
