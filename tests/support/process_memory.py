"""Memory that a run of the command takes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def anonymous_peak(*argv: str, options: tuple[str, ...] = ("-q", "--threads", "2")) -> int:
    """Bytes of anonymous memory that a run of the command held at its highest, interpreter and libraries included."""
    options = () if argv == ("--version",) else options
    process = subprocess.Popen([sys.executable, "-m", "kvmnn", *argv, *options], stdout=subprocess.DEVNULL)
    status = Path(f"/proc/{process.pid}/status")
    peak = 0
    while process.poll() is None:
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon"):
                peak = max(peak, int(line.split()[1]) << 10)
        time.sleep(0.002)
    assert process.returncode == 0
    return peak
