"""Whether files changed while they were read: what they were when they were opened, compared with what they are."""

from __future__ import annotations

import os
import weakref
from contextvars import ContextVar
from types import TracebackType

from ..errors import KvmnnError, SourceError
from ._mapping import Mapping, Watch


class FileState:
    """What a regular file was when it was opened.

    Parameters
    ----------
    label
        What messages call it.
    path
        Where it lies.
    seen
        ``os.stat`` of then.
    """

    def __init__(self, label: str, path: str, seen: os.stat_result) -> None:
        self.label = label
        self.path = path
        self._seen = seen
        self._mapping: weakref.ref[Mapping] | None = None
        self._watch: Watch | None = None
        self._is_another = False

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileState:
        """What lies at a path now; an `OSError` where nothing does."""
        return cls(os.fspath(path), os.fspath(path), os.stat(path))

    @property
    def size(self) -> int:
        """Bytes."""
        return self._seen.st_size

    def follow(self, mapping: Mapping) -> None:
        """From now on this mapping, as long as it lives, is asked what the file is."""
        self._mapping = weakref.ref(mapping)
        self._watch = mapping.watch

    def expect(self, now: os.stat_result) -> None:
        """Raise `SourceError` unless a file that is opened `now` is this one, as it was."""
        self._is_another = not os.path.samestat(self._seen, now) or self._is_newer(now)
        if self._is_another:
            raise self.error()

    @property
    def changed(self) -> bool:
        """Whether the file that was read was cut or written to since it was opened.

        One that was removed, or replaced by another, is what it was as long as it is read.
        """
        if self._is_another or (self._watch is not None and self._watch.damaged):
            return True
        mapping = self._mapping() if self._mapping else None
        try:
            now = os.stat(self.path) if mapping is None else os.fstat(mapping.fileno())
        except OSError:
            return False
        return os.path.samestat(self._seen, now) and self._is_newer(now)

    def check(self) -> None:
        """Raise `SourceError` if it `changed`."""
        if self.changed:
            raise self.error()

    def error(self) -> SourceError:
        """What is said of a file that changed."""
        return SourceError(f"{self.label}: changed while it was read")

    def _is_newer(self, now: os.stat_result) -> bool:
        return (now.st_size, now.st_mtime_ns) != (self._seen.st_size, self._seen.st_mtime_ns)


class Reading:
    """What is read in a ``with`` block, which fails if some of it has changed meanwhile.

    Where the block fails with a `KvmnnError` of its own, a change explains it, and is what is said instead.

    Raises
    ------
    SourceError
        On leaving the block, and from `check`.
    """

    def __init__(self) -> None:
        self._states: dict[int, FileState] = {}

    def note(self, state: FileState) -> None:
        """A file is being read."""
        self._states.setdefault(id(state), state)

    def check(self) -> None:
        """Raise `SourceError` if a file that was read has changed; what did not is not looked at again."""
        for state in list(self._states.values()):
            state.check()
        self._states.clear()

    def begin(self) -> None:
        """What is read from now on is noted."""
        _active.set((*_active.get(), self))

    def end(self, error: BaseException | None) -> None:
        """Nothing more is noted; an `error` that a change explains is replaced."""
        _active.set(tuple(reading for reading in _active.get() if reading is not self))
        if isinstance(error, KvmnnError):
            for state in list(self._states.values()):
                if state.changed:
                    raise state.error() from None

    def __enter__(self) -> Reading:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)
        if error is None:
            self.check()


_active: ContextVar[tuple[Reading, ...]] = ContextVar("kvmnn_readings", default=())
"""In the context, so that each thread has its own, and work that is handed to a pool knows whom it is done for."""


def note(state: FileState) -> None:
    """A file is being read."""
    for reading in _active.get():
        reading.note(state)


def check() -> None:
    """Raise `SourceError` if a file has changed that was read in a `Reading` that has not ended."""
    for reading in _active.get():
        reading.check()
