"""State files of llama.cpp: sessions and sequences (docs/other-engines.md)."""

from .description import ENGINE
from .gguf import is_gguf, read_rotations
from .gguf import read_gguf_rotary as read_gguf_rotary
from .reader import FORMAT_NAME, capture, is_state_file, is_state_stream, read
from .state import NO_TOKEN

__all__ = [
    "ENGINE",
    "FORMAT_NAME",
    "NO_TOKEN",
    "capture",
    "is_gguf",
    "is_state_file",
    "is_state_stream",
    "read",
    "read_gguf_rotary",
    "read_rotations",
]
