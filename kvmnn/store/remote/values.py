"""What a store past one machine needs of another engine: values by name, many in one round trip."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from ...errors import KvmnnError

T = TypeVar("T")

_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT)
RETRY_PAUSES_SECONDS = (0.05, 0.2)
"""Seconds before each further try."""
MIN_REST_SECONDS, MAX_REST_SECONDS = 1.0, 60.0
"""After an outage nothing is tried for so long, so that callers do not wait for every time-out: after time-outs, one
behind the other, for twice as long each time, up to the second.
"""


class BackendUnavailableError(KvmnnError):
    """An engine that does not answer: a miss for whoever gets, and nothing stored for whoever puts."""


class KeyValueStore(Protocol):
    """Values by names ``folder/name``; each call is one round trip, or as few as the engine allows.

    Calls raise whatever the engine's client raises; `CircuitBreaker` makes an `BackendUnavailableError` of it.
    """

    has_cheap_use_counts: bool
    """Whether a small value more for each use costs next to nothing."""

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """What the client raises where the engine has answered that it will not: to ask again would change nothing."""

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """The values; None for those that are not there."""

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """Whether values are there, without reading them; True where that is not known at once."""

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """Store values, each whole or not at all."""

    def put_if_absent(self, dependencies: Mapping[str, bytes], new_items: Mapping[str, bytes]) -> set[str]:
        """Store the values of `dependencies`, and then those of `new_items` that are not there yet; the names of those
        that were.

        Two that store the same name at once: one of them is told.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Remove values; those that are not there are gone already."""

    def delete_if_unchanged(self, names: Sequence[str], folder: str, expected_names: Collection[str]) -> bool:
        """Remove values, unless the names in a folder are not those that are `expected_names` any more; whether that
        is so.
        """

    def list_names(self, folder: str) -> list[str]:
        """The names in a folder, without it."""

    def list_neighbours(self, folder: str, name: str, max_per_side: int) -> list[str]:
        """Of the names in a folder at most so many on each side of this one, sorted."""

    def list_tree(self, prefix: str) -> list[str]:
        """The names of all values in folders that begin so."""

    def select_settled(self, names: Sequence[str]) -> list[str]:
        """Of the names those of values that no running put can be about to refer to."""

    def remove_stale(self) -> int:
        """Remove values that were on their way in when their processes ended; how many."""

    def list_foreign(self) -> list[str]:
        """The names of what no store has written, as far as the engine tells them apart by type."""

    def close(self) -> None:
        """Let go of connections."""


class CircuitBreaker:
    """Values whose failures are tried again, and then an `BackendUnavailableError`.

    Parameters
    ----------
    key_values
        The engine.
    label
        What messages call it.
    """

    def __init__(self, key_values: KeyValueStore, label: str) -> None:
        self._key_values = key_values
        self.label = label
        self.has_cheap_use_counts = key_values.has_cheap_use_counts
        self._rest_until = 0.0
        self._num_timeouts = 0
        self._is_closed = False
        self._last_problem = ""
        self._lock = threading.Lock()

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """As `KeyValueStore`."""
        return self._with_retry(lambda: self._key_values.get_many(names)) if names else []

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """As `KeyValueStore`."""
        if items:
            self._with_retry(lambda: self._key_values.put_many(items))

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """As `KeyValueStore`."""
        return self._with_retry(lambda: self._key_values.contains_many(names)) if names else []

    def put_if_absent(self, dependencies: Mapping[str, bytes], new_items: Mapping[str, bytes]) -> set[str]:
        """As `KeyValueStore`; what an answer that was lost had stored is said to have been there."""
        return self._with_retry(lambda: self._key_values.put_if_absent(dependencies, new_items))

    def delete(self, names: Sequence[str]) -> None:
        """As `KeyValueStore`."""
        if names:
            self._with_retry(lambda: self._key_values.delete(names))

    def delete_if_unchanged(self, names: Sequence[str], folder: str, expected_names: Collection[str]) -> bool:
        """As `KeyValueStore`."""
        return self._with_retry(lambda: self._key_values.delete_if_unchanged(names, folder, expected_names))

    def list_names(self, folder: str) -> list[str]:
        """As `KeyValueStore`."""
        return self._with_retry(lambda: self._key_values.list_names(folder))

    def list_neighbours(self, folder: str, name: str, max_per_side: int) -> list[str]:
        """As `KeyValueStore`."""
        return self._with_retry(lambda: self._key_values.list_neighbours(folder, name, max_per_side))

    def list_tree(self, prefix: str) -> list[str]:
        """As `KeyValueStore`."""
        return self._with_retry(lambda: self._key_values.list_tree(prefix))

    def select_settled(self, names: Sequence[str]) -> list[str]:
        """As `KeyValueStore`."""
        return self._with_retry(lambda: self._key_values.select_settled(names)) if names else []

    def remove_stale(self) -> int:
        """As `KeyValueStore`."""
        return self._with_retry(self._key_values.remove_stale)

    def list_foreign(self) -> list[str]:
        """As `KeyValueStore`."""
        return self._with_retry(self._key_values.list_foreign)

    def close(self) -> None:
        """As `KeyValueStore`; an engine that is gone has let go already. Nothing more is asked."""
        self._is_closed = True
        try:
            self._key_values.close()
        except Exception:
            return

    def check_open(self) -> None:
        """`KvmnnError` for what was closed."""
        if self._is_closed:
            raise KvmnnError(f"{self.label}: the store is closed")

    def _with_retry(self, call: Callable[[], T]) -> T:
        self.check_open()
        with self._lock:
            is_resting, last_problem = time.monotonic() < self._rest_until, self._last_problem
        if is_resting:
            raise BackendUnavailableError(f"{self.label}: {last_problem}")
        timed_out = False
        for pause in (*RETRY_PAUSES_SECONDS, None):
            try:
                result = call()
                self._num_timeouts = 0
                return result
            except KvmnnError:
                raise
            except self._key_values.refusals as error:  # a server that is full still reads
                raise BackendUnavailableError(f"{self.label}: refuses: {_format_error(error)}") from None
            except Exception as error:  # clients have no common class for what an outage makes of them
                if isinstance(error, OSError) and error.errno in _DISK_FULL_CODES:  # what is there can still be read
                    raise BackendUnavailableError(f"{self.label}: cannot be written: {error.strerror}") from None
                failure = "refuses" if isinstance(error, PermissionError | FileNotFoundError) else "does not answer"
                last_problem = f"{failure}: {_format_error(error)}"
                timed_out = "timeout" in type(error).__name__.lower()
                if timed_out:  # who has waited that long does not wait again
                    break
                if pause is not None:
                    time.sleep(pause)
        with self._lock:
            rest_seconds = (
                min(MIN_REST_SECONDS * 2**self._num_timeouts, MAX_REST_SECONDS) if timed_out else MIN_REST_SECONDS
            )
            self._num_timeouts = min(self._num_timeouts + 1, 16) if timed_out else 0
            self._rest_until, self._last_problem = time.monotonic() + rest_seconds, last_problem
        raise BackendUnavailableError(f"{self.label}: {last_problem}")


def _format_error(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
