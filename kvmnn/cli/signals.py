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

EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED = 129, 130, 143
"""Exit codes: 128 and the number of the signal, as shells have it."""

_RETRY_SECONDS = 0.01
_CLEANUP_SECONDS = 2.0
"""After the first signal what was begun is removed, and further interrupts are not heard for so long."""


class TerminationSignal(BaseException):
    """A signal that ends the process."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message, self.code = message, code


@contextmanager
def unwind_on_signals(*, is_last: bool = False) -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the stack, as SIGINT does, instead of killing the process.

    A signal that is ignored (``nohup``) or has a handler is not changed. No exception is raised while a compiled module
    is being loaded, but right after: raised in the middle of that, it can crash the process. Nor is one raised in a
    callback of imports, where it would be lost. With `is_last` the process ends after this block, and later signals are
    ignored until then.
    """
    handling_by_name: dict[str, tuple[object, Callable[[], BaseException]]] = {
        "SIGINT": (signal.default_int_handler, KeyboardInterrupt),
        "SIGTERM": (signal.SIG_DFL, lambda: TerminationSignal("terminated", EXIT_TERMINATED)),
        "SIGHUP": (signal.SIG_DFL, lambda: TerminationSignal("the terminal was closed", EXIT_HUNG_UP)),
    }
    errors = {getattr(signal, name): error for name, (_, error) in handling_by_name.items() if hasattr(signal, name)}
    old_handlers: dict[int, Any] = {}
    first: float | None = None
    is_delayed = False  # once the block has ended, a delayed signal has nothing left to end

    def handle_signal(signal_number: int, frame: FrameType | None) -> None:
        nonlocal first, is_delayed
        if first is not None and time.monotonic() - first < _CLEANUP_SECONDS:
            return
        if _must_delay(frame):
            is_delayed = True
            _thread.start_new_thread(
                _raise_again, (signal_number,)
            )  # a Thread's own start takes locks, which may be held here
            return
        first = time.monotonic()
        for other_signal in old_handlers:
            if other_signal != signal.SIGINT:
                signal.signal(other_signal, signal.SIG_IGN)  # what is being removed is removed to the end
        raise errors[signal_number]()

    if threading.current_thread() is threading.main_thread():
        for name, (default_handler, _) in handling_by_name.items():
            signal_number = getattr(signal, name, None)
            if signal_number is not None and signal.getsignal(signal_number) is default_handler:
                old_handlers[signal_number] = default_handler
                signal.signal(signal_number, handle_signal)
    try:
        yield
    finally:
        for signal_number, handler in old_handlers.items():
            signal.signal(signal_number, signal.SIG_IGN if is_last and (first is not None or is_delayed) else handler)


def _raise_again(signal_number: int) -> None:
    time.sleep(_RETRY_SECONDS)
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, signal_number)  # ends a call that waits as well
    else:
        _thread.interrupt_main(signal.Signals(signal_number))


def _must_delay(frame: FrameType | None) -> bool:
    """Return whether a module is loaded or files are moved into place below this frame, or it loses exceptions."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_publish_files" and frame.f_globals.get("__name__") == "kvmnn.files.atomic":
            return True
        if code.co_name == "cb" and code.co_filename == "<frozen importlib._bootstrap>":  # of a weak reference
            return True
        if code.co_name in ("create_module", "exec_module") and isinstance(
            frame.f_locals.get("self"), ExtensionFileLoader
        ):
            return True
        frame = frame.f_back
    return False
