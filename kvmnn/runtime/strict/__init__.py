"""The lossless runtime, correct: every cold token is stored once, and nothing is ever lost."""

from .runtime import StrictRuntime
from .step_guard import StrictCallResult

__all__ = ["StrictCallResult", "StrictRuntime"]
