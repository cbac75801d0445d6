"""State files of llama.cpp: sessions and sequences (docs/other-engines.md)."""

from .gguf import is_gguf
from .reading import is_state, read

__all__ = ["is_gguf", "is_state", "read"]
