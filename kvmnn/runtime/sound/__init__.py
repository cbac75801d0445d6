"""The lossless runtime as it should be: every cold token is stored once, and nothing is ever lost."""

from .report import StrictCallResult
from .runtime import StrictRuntime

__all__ = ["StrictCallResult", "StrictRuntime"]
