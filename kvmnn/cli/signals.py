"""Signals that end the command: they unwind the stack, so that temporary files are removed."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any

HUNG_UP, INTERRUPTED, TERMINATED = 129, 130, 143
"""Exit codes: 128 and the number of the signal, as shells have it."""

_LATER_SECONDS = 0.01
_REMOVING_SECONDS = 2.0
"""Behind the first signal what was begun is removed, and further interrupts are not heard for so long."""


class SignalledError(BaseException):
    """A signal that ends the process."""

    def __init__(self, said: str, code: int) -> None:
        super().__init__(said)
        self.said, self.code = said, code


@contextmanager
def unwinding(*, last: bool = False) -> Iterator[None]:
    """While active, SIGTERM and SIGHUP unwind the stack as SIGINT does, instead of killing the process where it stands.

    A signal that is ignored (``nohup``) or has a handler stays as it is. None is raised while a compiled module is
    being loaded, but as soon as it is: an exception in the midst of that can end the process in a crash. Nor is one
    in a callback of imports, where it would be lost. With `last` the process ends behind this, and signals behind the
    first are ignored until it has.
    """
    ways: dict[str, tuple[object, Callable[[], BaseException]]] = {
        "SIGINT": (signal.default_int_handler, KeyboardInterrupt),
        "SIGTERM": (signal.SIG_DFL, lambda: SignalledError("terminated", TERMINATED)),
        "SIGHUP": (signal.SIG_DFL, lambda: SignalledError("the terminal was closed", HUNG_UP)),
    }
    errors = {getattr(signal, name): error for name, (_, error) in ways.items() if hasattr(signal, name)}
    old: dict[int, Any] = {}
    first: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first < _REMOVING_SECONDS:
            return
        if _must_wait(frame):
            _thread.start_new_thread(_again, (number,))  # a Thread's own start takes locks, which may be held here
            return
        first = time.monotonic()
        for other in old:
            if other != signal.SIGINT:
                signal.signal(other, signal.SIG_IGN)  # what is being removed is removed to the end
        raise errors[number]()

    if threading.current_thread() is threading.main_thread():
        for name, (usual, _) in ways.items():
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is usual:
                old[number] = usual
                signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, signal.SIG_IGN if last and first is not None else handler)


def _again(number: int) -> None:
    time.sleep(_LATER_SECONDS)
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, number)  # ends a call that waits as well
    else:
        _thread.interrupt_main(signal.Signals(number))


def _must_wait(frame: FrameType | None) -> bool:
    """Whether a compiled module is being loaded somewhere below this frame, or an exception would be lost in it."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "cb" and code.co_filename == "<frozen importlib._bootstrap>":  # of a weak reference
            return True
        if code.co_name in ("create_module", "exec_module") and isinstance(
            frame.f_locals.get("self"), ExtensionFileLoader
        ):
            return True
        frame = frame.f_back
    return False
