"""State files of llama.cpp: sessions and sequences (docs/other-engines.md)."""

from typing import TYPE_CHECKING

from ..._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from .gguf import is_gguf, read_rotations
    from .gguf import read_gguf_rotary as read_gguf_rotary
    from .reader import ENGINE, FORMAT_NAME, LLAMA_STATE
    from .state import NO_TOKEN
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            "gguf": "is_gguf read_rotations read_gguf_rotary",
            "reader": "ENGINE FORMAT_NAME LLAMA_STATE",
            "state": "NO_TOKEN",
        },
    )

__all__ = [
    "ENGINE",
    "FORMAT_NAME",
    "LLAMA_STATE",
    "NO_TOKEN",
    "is_gguf",
    "read_gguf_rotary",
    "read_rotations",
]
