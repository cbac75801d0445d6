"""How much memory this process takes."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PEAK_DESCRIPTION = (
    "highest resident memory, in a process of its own, while the first document was scored: interpreter, onnxruntime, "
    "model, cache and logits, but not what opening the model took for a moment (Linux; elsewhere it is included)"
)
"""What `process_peak_bytes` of a row means."""

_STATUS_PATH = Path("/proc/self/status")
_RESET_PATH = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryBaseline:
    """Where a measurement of memory begins.

    Attributes
    ----------
    resident_bytes : int or None
        Bytes resident then; None where the system does not say.
    """

    resident_bytes: int | None

    def read_peak(self) -> int | None:
        """Highest resident memory since then, in bytes; since the process began where the system cannot forget."""
        return _read_status("VmHWM") or _read_rusage_peak()


def start_measurement() -> MemoryBaseline:
    """Give back what is free already, and let the system forget the peak so far."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc
    with suppress(OSError):
        _RESET_PATH.write_text("5")
    return MemoryBaseline(_read_status("VmRSS"))


def _read_status(name: str) -> int | None:
    """A size that Linux tells; VmHWM belongs to the program that runs, which getrusage's peak does not."""
    try:
        text = _STATUS_PATH.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _read_rusage_peak() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
