"""Prompt caches of mlx-lm: ``.safetensors`` files with the states of its cache classes (docs/other-engines.md)."""

from .keeping import NAME, keep
from .reading import is_prompt_cache, read

__all__ = ["NAME", "is_prompt_cache", "keep", "read"]
