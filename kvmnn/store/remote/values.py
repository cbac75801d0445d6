"""What a store past one machine needs of another engine: values by name, many in one round trip."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from ...errors import KvmnnError

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
PAUSES = (0.05, 0.2)
"""Seconds before each further try."""
REST_SECONDS, MOST_REST_SECONDS = 1.0, 60.0
"""After an outage nothing is tried for so long, so that callers do not wait for every time-out: after time-outs, one
behind the other, for twice as long each time, up to the second.
"""


class OutageError(KvmnnError):
    """An engine that does not answer: a miss for whoever gets, and nothing stored for whoever puts."""


class Values(Protocol):
    """Values by names ``folder/name``; each call is one round trip, or as few as the engine allows.

    Calls raise whatever the engine's client raises; `Patient` makes an `OutageError` of it.
    """

    counts_uses: bool
    """Whether a small value more for each use costs next to nothing."""

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """What the client raises where the engine has answered that it will not: to ask again would change nothing."""

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """The values; None for those that are not there."""

    def there(self, names: Sequence[str]) -> list[bool]:
        """Whether values are there, without reading them; True where that is not known at once."""

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """Store values, each whole or not at all."""

    def put_new(self, first: Mapping[str, bytes], then: Mapping[str, bytes]) -> set[str]:
        """Store the values of `first`, and then those of `then` that are not there yet; the names of those that were.

        Two that store the same name at once: one of them is told.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Remove values; those that are not there are gone already."""

    def delete_if(self, names: Sequence[str], folder: str, known: Collection[str]) -> bool:
        """Remove values, unless the names in a folder are not those that are `known` any more; whether that is so."""

    def names_in(self, folder: str) -> list[str]:
        """The names in a folder, without it."""

    def near(self, folder: str, name: str, most: int) -> list[str]:
        """Of the names in a folder at most so many on each side of this one, sorted."""

    def tree(self, begin: str) -> list[str]:
        """The names of all values in folders that begin so."""

    def settled(self, names: Sequence[str]) -> list[str]:
        """Of the names those of values that no running put can be about to refer to."""

    def sweep(self) -> int:
        """Remove values that were on their way in when their processes ended; how many."""

    def foreign(self) -> list[str]:
        """The names of what no store has written, as far as the engine tells them apart by type."""

    def close(self) -> None:
        """Let go of connections."""


class Patient:
    """Values whose failures are tried again, and then an `OutageError`.

    Parameters
    ----------
    values
        The engine.
    label
        What messages call it.
    """

    def __init__(self, values: Values, label: str) -> None:
        self._values = values
        self.label = label
        self.counts_uses = values.counts_uses
        self._rest_until = 0.0
        self._timeouts = 0
        self._closed = False
        self._last = ""
        self._lock = threading.Lock()

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """As `Values`."""
        return self._tried(lambda: self._values.get_many(names)) if names else []

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """As `Values`."""
        if items:
            self._tried(lambda: self._values.put_many(items))

    def there(self, names: Sequence[str]) -> list[bool]:
        """As `Values`."""
        return self._tried(lambda: self._values.there(names)) if names else []

    def put_new(self, first: Mapping[str, bytes], then: Mapping[str, bytes]) -> set[str]:
        """As `Values`; what an answer that was lost had stored is said to have been there."""
        return self._tried(lambda: self._values.put_new(first, then))

    def delete(self, names: Sequence[str]) -> None:
        """As `Values`."""
        if names:
            self._tried(lambda: self._values.delete(names))

    def delete_if(self, names: Sequence[str], folder: str, known: Collection[str]) -> bool:
        """As `Values`."""
        return self._tried(lambda: self._values.delete_if(names, folder, known))

    def names_in(self, folder: str) -> list[str]:
        """As `Values`."""
        return self._tried(lambda: self._values.names_in(folder))

    def near(self, folder: str, name: str, most: int) -> list[str]:
        """As `Values`."""
        return self._tried(lambda: self._values.near(folder, name, most))

    def tree(self, begin: str) -> list[str]:
        """As `Values`."""
        return self._tried(lambda: self._values.tree(begin))

    def settled(self, names: Sequence[str]) -> list[str]:
        """As `Values`."""
        return self._tried(lambda: self._values.settled(names)) if names else []

    def sweep(self) -> int:
        """As `Values`."""
        return self._tried(self._values.sweep)

    def foreign(self) -> list[str]:
        """As `Values`."""
        return self._tried(self._values.foreign)

    def close(self) -> None:
        """As `Values`; an engine that is gone has let go already. Nothing more is asked."""
        self._closed = True
        try:
            self._values.close()
        except Exception:
            return

    def check_open(self) -> None:
        """`KvmnnError` for what was closed."""
        if self._closed:
            raise KvmnnError(f"{self.label}: the store is closed")

    def _tried(self, call: Callable[[], T]) -> T:
        self.check_open()
        with self._lock:
            resting, last = time.monotonic() < self._rest_until, self._last
        if resting:
            raise OutageError(f"{self.label}: {last}")
        timed_out = False
        for pause in (*PAUSES, None):
            try:
                found = call()
                self._timeouts = 0
                return found
            except KvmnnError:
                raise
            except self._values.refusals as error:  # a server that is full still reads
                raise OutageError(f"{self.label}: refuses: {_line(error)}") from None
            except Exception as error:  # clients have no common class for what an outage makes of them
                if isinstance(error, OSError) and error.errno in _FULL:  # what is there can still be read
                    raise OutageError(f"{self.label}: cannot be written: {error.strerror}") from None
                how = "refuses" if isinstance(error, PermissionError | FileNotFoundError) else "does not answer"
                last = f"{how}: {_line(error)}"
                timed_out = "timeout" in type(error).__name__.lower()
                if timed_out:  # who has waited that long does not wait again
                    break
                if pause is not None:
                    time.sleep(pause)
        with self._lock:
            rest = min(REST_SECONDS * 2**self._timeouts, MOST_REST_SECONDS) if timed_out else REST_SECONDS
            self._timeouts = min(self._timeouts + 1, 16) if timed_out else 0
            self._rest_until, self._last = time.monotonic() + rest, last
        raise OutageError(f"{self.label}: {last}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
