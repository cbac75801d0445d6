"""An interrupt while the command is imported, when no output has to be removed yet.

Only modules that every Python has loaded by then are imported: others would be interrupted with a traceback themselves.
"""

import os
import sys
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]


def exit_on_interrupt() -> None:
    """Let an interrupt end the process at once, in one line, until `raise_on_interrupt` is called."""
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _exit_interrupted)


def raise_on_interrupt() -> None:
    """Let an interrupt raise KeyboardInterrupt again, if `exit_on_interrupt` had changed that."""
    if getsignal(SIGINT) is _exit_interrupted:
        signal(SIGINT, default_int_handler)


def is_command() -> bool:
    """Whether this process is the command, and no program or worker that imports the package."""
    words = sys.orig_argv[1:3]
    return words == ["-m", "kvmnn"] or os.path.basename("".join(words[:1])) in ("kvmnn", "kvmnn.exe")


def _exit_interrupted(signal_number: int, frame: object) -> None:
    try:
        os.write(2, b"kvmnn: error: interrupted\n")
    finally:
        os._exit(130)


if is_command():
    exit_on_interrupt()
