"""State files of llama.cpp: sessions and sequences (docs/other-engines.md)."""

from .gguf import is_gguf
from .keeping import NAME, keep
from .reading import is_state, read

__all__ = ["NAME", "is_gguf", "is_state", "keep", "read"]
