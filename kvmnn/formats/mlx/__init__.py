"""Prompt caches of mlx-lm: ``.safetensors`` files with the states of its cache classes (docs/other-engines.md)."""

from .keeping import NAME, keep
from .reading import read
from .states import holds_prompt_cache, is_prompt_cache

__all__ = ["NAME", "holds_prompt_cache", "is_prompt_cache", "keep", "read"]
