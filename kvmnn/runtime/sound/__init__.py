"""The lossless runtime as it should be: every cold token is stored once, and nothing is ever lost."""

from .report import SoundCall
from .runtime import SoundRuntime

__all__ = ["SoundCall", "SoundRuntime"]
