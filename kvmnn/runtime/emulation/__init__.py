"""The engine's own behaviour, its defects included, reported event by event."""

from .events import CallEvent
from .runtime import EmulatedRuntime

__all__ = ["CallEvent", "EmulatedRuntime"]
