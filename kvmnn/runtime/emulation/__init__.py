"""The engine's own behaviour, its defects included: what a run of it would report, event by event."""

from .events import CallEvent
from .runtime import EmulatedRuntime

__all__ = ["CallEvent", "EmulatedRuntime"]
