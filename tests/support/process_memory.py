"""Memory that a run of the command takes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress


def anonymous_peak(*argv: str, options: tuple[str, ...] = ("-q", "--threads", "2")) -> int:
    """Bytes of anonymous memory that a run of the command held at its highest, interpreter and libraries included."""
    options = () if argv == ("--version",) else options
    process = subprocess.Popen([sys.executable, "-m", "kvmnn", *argv, *options], stdout=subprocess.DEVNULL)
    status = os.open(f"/proc/{process.pid}/status", os.O_RDONLY)
    peak = 0
    try:
        while process.poll() is None:
            with suppress(ProcessLookupError):  # it ended meanwhile
                _, label, rest = os.pread(status, 1 << 13, 0).partition(b"RssAnon:")
                peak = max(peak, int(rest.split(None, 1)[0]) << 10 if label else 0)
            time.sleep(0.003)
    finally:
        os.close(status)
    assert process.returncode == 0
    return peak
