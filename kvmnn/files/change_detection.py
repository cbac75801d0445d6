"""Detect files that change while they are read, by their state when they were opened."""

from __future__ import annotations

import os
import weakref
from contextvars import ContextVar
from types import TracebackType

from ..errors import KvmnnError, SourceError
from ._file_mapping import DamageMonitor, FileMapping

# An engine that rewrites its dump cuts files that are being read, and touching a mapped page that is gone is SIGBUS.
# `_file_mapping` handles that signal for its own mappings: zero pages take the place of what is gone, the mapping
# remembers it, and all other faults go where they went before. Before an output gets its name, or a result is printed,
# every file that was read is checked (the guard, size, time of the last change); if it changed the error is "changed
# while it was read". Reading with `pread` costs a copy of everything; the guard's cost is within the noise
# (benchmarks/mapped_input.md).


class FileState:
    """State of a regular file when it was opened: its name in messages, its path, and its ``os.stat``."""

    def __init__(self, label: str, path: str, initial_stat: os.stat_result) -> None:
        self.label = label
        self.path = path
        self._initial_stat = initial_stat
        self._mapping: weakref.ref[FileMapping] | None = None
        self._watch: DamageMonitor | None = None
        self._is_replaced = False

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> FileState:
        """Return the state of the file at a path; `OSError` if there is none."""
        return cls(os.fspath(path), os.fspath(path), os.stat(path))

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return self._initial_stat.st_size

    def track_mapping(self, mapping: FileMapping) -> None:
        """Ask this mapping for the file's state from now on, as long as it exists."""
        self._mapping = weakref.ref(mapping)
        self._watch = mapping.monitor

    def verify_opened(self, current_stat: os.stat_result) -> None:
        """Raise `SourceError` unless `current_stat` is of this same, unchanged file."""
        self._is_replaced = not os.path.samestat(self._initial_stat, current_stat) or self._is_modified(current_stat)
        if self._is_replaced:
            raise self.build_error()

    @property
    def has_changed(self) -> bool:
        """Return whether the file was truncated or written to since it was opened.

        A file that was removed or replaced does not count: the opened one stays readable.
        """
        if self._is_replaced or (self._watch is not None and self._watch.is_damaged):
            return True
        mapping = self._mapping() if self._mapping else None
        try:
            current_stat = os.stat(self.path) if mapping is None else os.fstat(mapping.fileno())
        except OSError:
            return False
        return os.path.samestat(self._initial_stat, current_stat) and self._is_modified(current_stat)

    def verify(self) -> None:
        """Raise `SourceError` if it `has_changed`."""
        if self.has_changed:
            raise self.build_error()

    def build_error(self) -> SourceError:
        """Return the error about a file that changed."""
        return SourceError(f"{self.label}: changed while it was read")

    def _is_modified(self, current_stat: os.stat_result) -> bool:
        return (current_stat.st_size, current_stat.st_mtime_ns) != (
            self._initial_stat.st_size,
            self._initial_stat.st_mtime_ns,
        )


class InputGuard:
    """Check at the end of a ``with`` block that the inputs it read have not changed.

    If the block fails with a `KvmnnError` and an input has changed, the error about the change replaces it.
    """

    def __init__(self) -> None:
        self._states: dict[int, FileState] = {}

    def record(self, state: FileState) -> None:
        """Record that a file is being read."""
        self._states.setdefault(id(state), state)

    def verify(self) -> None:
        """Raise `SourceError` if a file that was read has changed; unchanged files are not checked again."""
        for state in list(self._states.values()):
            state.verify()
        self._states.clear()

    def begin(self) -> None:
        """Start to record the inputs that are read."""
        _active_guards.set((*_active_guards.get(), self))

    def end(self, error: BaseException | None) -> None:
        """Stop recording; an `error` that a changed input explains is replaced."""
        _active_guards.set(tuple(guard for guard in _active_guards.get() if guard is not self))
        if isinstance(error, KvmnnError):
            for state in list(self._states.values()):
                if state.has_changed:
                    raise state.build_error() from None

    def __enter__(self) -> InputGuard:
        self.begin()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)
        if error is None:
            self.verify()


_active_guards: ContextVar[tuple[InputGuard, ...]] = ContextVar("kvmnn_readings", default=())
"""Guards in a context variable, so that each thread has its own and work on a pool belongs to its caller's."""


def record_input(state: FileState) -> None:
    """Record in the active guards that a file is being read."""
    for guard in _active_guards.get():
        guard.record(state)


def verify_inputs() -> None:
    """Raise `SourceError` if a file has changed that an active `InputGuard` recorded."""
    for guard in _active_guards.get():
        guard.verify()
