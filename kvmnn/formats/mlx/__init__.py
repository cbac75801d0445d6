"""Prompt caches of mlx-lm: ``.safetensors`` files with the states of its cache classes (docs/other-engines.md)."""

from .reader import FORMAT_NAME, capture, read
from .states import is_prompt_cache_file, is_prompt_cache_stream

__all__ = ["FORMAT_NAME", "capture", "is_prompt_cache_file", "is_prompt_cache_stream", "read"]
