"""How much memory this process takes."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

WHAT = (
    "highest resident memory, in a process of its own, while the first document was scored: interpreter, onnxruntime, "
    "model, cache and logits, but not what opening the model took for a moment (Linux; elsewhere it is included)"
)
"""What `process_peak_bytes` of a row means."""

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Start:
    """Where a measurement of memory begins.

    Attributes
    ----------
    resident : int or None
        Bytes resident then; None where the system does not say.
    """

    resident: int | None

    def peak(self) -> int | None:
        """Highest resident memory since then, in bytes; since the process began where the system cannot forget."""
        return _status("VmHWM") or _from_usage()


def begin() -> Start:
    """Give back what is free already, and let the system forget the peak so far."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc
    with suppress(OSError):
        _RESET.write_text("5")
    return Start(_status("VmRSS"))


def _status(name: str) -> int | None:
    """A size that Linux tells; VmHWM belongs to the program that runs, which getrusage's peak does not."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _from_usage() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
