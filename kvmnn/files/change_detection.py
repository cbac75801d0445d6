"""Whether files changed while they were read: what they were when they were opened, compared with what they are."""

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
    """What a regular file was when it was opened.

    Parameters
    ----------
    label
        What messages call it.
    path
        Where it lies.
    initial_stat
        ``os.stat`` of then.
    """

    def __init__(self, label: str, path: str, initial_stat: os.stat_result) -> None:
        self.label = label
        self.path = path
        self._initial_stat = initial_stat
        self._mapping: weakref.ref[FileMapping] | None = None
        self._watch: DamageMonitor | None = None
        self._is_replaced = False

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> FileState:
        """What lies at a path now; an `OSError` where nothing does."""
        return cls(os.fspath(path), os.fspath(path), os.stat(path))

    @property
    def size(self) -> int:
        """Bytes."""
        return self._initial_stat.st_size

    def track_mapping(self, mapping: FileMapping) -> None:
        """From now on this mapping, as long as it lives, is asked what the file is."""
        self._mapping = weakref.ref(mapping)
        self._watch = mapping.monitor

    def verify_opened(self, current_stat: os.stat_result) -> None:
        """Raise `SourceError` unless a file that is opened `current_stat` is this one, as it was."""
        self._is_replaced = not os.path.samestat(self._initial_stat, current_stat) or self._is_modified(current_stat)
        if self._is_replaced:
            raise self.build_error()

    @property
    def has_changed(self) -> bool:
        """Whether the file that was read was cut or written to since it was opened.

        One that was removed, or replaced by another, is what it was as long as it is read.
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
        """What is said of a file that changed."""
        return SourceError(f"{self.label}: changed while it was read")

    def _is_modified(self, current_stat: os.stat_result) -> bool:
        return (current_stat.st_size, current_stat.st_mtime_ns) != (
            self._initial_stat.st_size,
            self._initial_stat.st_mtime_ns,
        )


class InputGuard:
    """What is read in a ``with`` block, which fails if some of it has changed meanwhile.

    Where the block fails with a `KvmnnError` of its own, a change explains it, and is what is said instead.
    """

    def __init__(self) -> None:
        self._states: dict[int, FileState] = {}

    def record(self, state: FileState) -> None:
        """A file is being read."""
        self._states.setdefault(id(state), state)

    def verify(self) -> None:
        """Raise `SourceError` if a file that was read has changed; what did not is not looked at again."""
        for state in list(self._states.values()):
            state.verify()
        self._states.clear()

    def begin(self) -> None:
        """What is read from now on is noted."""
        _active_guards.set((*_active_guards.get(), self))

    def end(self, error: BaseException | None) -> None:
        """Nothing more is noted; an `error` that a change explains is replaced."""
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
"""In the context, so that each thread has its own, and work that is handed to a pool knows whom it is done for."""


def record_input(state: FileState) -> None:
    """A file is being read."""
    for guard in _active_guards.get():
        guard.record(state)


def verify_inputs() -> None:
    """Raise `SourceError` if a file has changed that was read in a `InputGuard` that has not ended."""
    for guard in _active_guards.get():
        guard.verify()
