"""Prompt caches of mlx-lm: ``.safetensors`` files with the states of its cache classes (docs/other-engines.md)."""

from .reader import MLX_PROMPT_CACHE

__all__ = ["MLX_PROMPT_CACHE"]
