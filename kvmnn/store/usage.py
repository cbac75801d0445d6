"""Counts and latencies of the calls of a store.

The counts of a directory are those of all processes that used it, for each namespace: each adds its own to a file every
second and when it closes the store. Those of a remote store are of one process.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path

from .results import (
    COUNTER_DESCRIPTIONS,
    LATENCY_BOUNDS,
    CallLatency,
    LayerwisePrefix,
    PutResult,
    StoredPrefix,
    StoreUsage,
)

COUNTERS_FILE = "counters.sqlite"
_TENANT_SEPARATOR = ":"
"""In names of rows, between the tenant and the counter; counts of no namespace have neither."""
_MAX_ROWS = 1 << 18
"""More than 4,096 namespaces have counters."""
_FLUSH_INTERVAL_SECONDS = 1.0
_CLOSE_TIMEOUT_SECONDS = 1.0
_MAX_VALUE = 2**62


class StoreMetrics:
    """Counts the calls of a store; threads may share it.

    Parameters
    ----------
    path
        The file that collects the counts of all processes; None for none.
    read_only
        Read the file, and never write it.
    tenant
        Whose calls these are, as the file names it; empty for no namespace.
    """

    def __init__(self, path: Path | None, *, read_only: bool = False, tenant: str = "") -> None:
        self._path, self._is_writable, self._tenant = path, path is not None and not read_only, tenant
        self._pending: dict[str, int] = {}
        self._own: dict[str, int] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._last_flush_time = time.monotonic()
        self._listeners: list[Callable[[str, float], object]] = []

    def record_get(self, prefix: StoredPrefix | LayerwisePrefix, seconds: float) -> None:
        """Count a get; of one by layers, the seconds are those until it returns, and the bytes are not counted."""
        changes = {"gets": 1, "requested_tokens": prefix.requested_tokens}
        if prefix.tokens:
            nbytes = sum(cache.nbytes for cache in prefix.layers) if isinstance(prefix, StoredPrefix) else 0
            changes |= {"hits": 1, "hit_tokens": prefix.tokens, "hit_bytes": nbytes}
        if prefix.outage:
            changes["outages"] = 1
        elif prefix.notes:
            changes["damages"] = len(prefix.notes)
        self._add(changes, "get", seconds)

    def record_put(self, result: PutResult) -> None:
        """Count a put."""
        changes = {"puts": 1}
        if result.outage:
            changes["outages"] = 1
        else:
            new_tokens = max(result.stored_tokens - result.known_tokens, 0)
            changes |= {"put_tokens": new_tokens, "put_raw_bytes": result.raw_bytes, "put_bytes": result.stored_bytes}
        if result.removed_bytes:
            changes |= {"evictions": 1, "evicted_bytes": result.removed_bytes}
        self._add(changes, "put", result.seconds)

    def record_damages(self, number: int) -> None:
        """Count damaged units that were removed by other calls than a get."""
        if number:
            self._count({"damages": number})

    def add_listener(self, listener: Callable[[str, float], object]) -> None:
        """Call `listener` with ``"get"`` or ``"put"`` and the seconds of each call from now on."""
        self._listeners.append(listener)

    def _add(self, changes: dict[str, int], call: str, seconds: float) -> None:
        changes[f"{call}_le_{bisect_left(LATENCY_BOUNDS, seconds)}"] = 1
        changes[f"{call}_microseconds"] = round(seconds * 1e6)
        self._count(changes)
        for listener in self._listeners:
            listener(call, seconds)
        if self._is_writable and time.monotonic() - self._last_flush_time >= _FLUSH_INTERVAL_SECONDS:
            self.flush(0.0)

    def _count(self, changes: Mapping[str, int]) -> None:
        with self._lock:
            if self._process != os.getpid():  # forked: the parent writes what it counted
                self._process = os.getpid()
                self._pending = {}
            for counts in (self._pending, self._own):
                for name, number in changes.items():
                    counts[name] = counts.get(name, 0) + number

    def flush(self, timeout: float = _CLOSE_TIMEOUT_SECONDS) -> None:
        """Add what was counted to the file; what cannot be written now is written later, or lost."""
        if not self._is_writable or self._path is None:
            return
        with self._lock:
            self._last_flush_time = time.monotonic()
            if not self._pending or self._process != os.getpid():
                return
            # a full disk, or a file of another process that is locked or damaged, must not stop anything
            with suppress(sqlite3.Error, OSError):
                _add_to_file(self._path, self._tenant, self._pending, timeout)
                self._pending = {}

    def read(self, *, own: bool = False, all_namespaces: bool = False) -> StoreUsage:
        """Return the counts of all processes; of this one with `own`, or if there is no file."""
        with self._lock:
            counts = dict(self._own)
            if self._path is not None and not own:
                with suppress(sqlite3.Error, OSError):
                    counts = _read_file(self._path, None if all_namespaces else self._tenant)
                    for name, number in self._pending.items():
                        counts[name] = counts.get(name, 0) + number
        return StoreUsage(
            counters={name: counts.get(name, 0) for name in COUNTER_DESCRIPTIONS},
            get_latency=_build_histogram(counts, "get"),
            put_latency=_build_histogram(counts, "put"),
        )


def _build_histogram(counts: Mapping[str, int], call: str) -> CallLatency:
    return CallLatency(
        counts=tuple(counts.get(f"{call}_le_{index}", 0) for index in range(len(LATENCY_BOUNDS) + 1)),
        seconds=counts.get(f"{call}_microseconds", 0) / 1e6,
    )


def _add_to_file(path: Path, tenant: str, changes: Mapping[str, int], timeout: float) -> None:
    """Add counts to a file; one that is damaged is replaced by an empty one the next time."""
    prefix = f"{tenant}{_TENANT_SEPARATOR}" if tenant else ""
    try:
        with closing(sqlite3.connect(path, timeout=timeout, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS counter (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID"
            )
            connection.executemany(
                "INSERT INTO counter VALUES (?, ?) ON CONFLICT (name) "
                f"DO UPDATE SET value = min(value + excluded.value, {_MAX_VALUE})",
                [(prefix + name, number) for name, number in changes.items()],
            )
            connection.execute("COMMIT")
    except sqlite3.DatabaseError as error:
        if not isinstance(error, sqlite3.OperationalError):
            path.unlink(missing_ok=True)
        raise


def _read_file(path: Path, tenant: str | None) -> dict[str, int]:
    """Return the counts of a tenant; of all of them for None."""
    if not path.exists():
        return {}
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as connection:
        rows = connection.execute("SELECT name, value FROM counter LIMIT ?", (_MAX_ROWS,)).fetchall()
    counts: dict[str, int] = {}
    for name, value in rows:
        if type(name) is str and type(value) is int and 0 <= value <= _MAX_VALUE:
            owner, _, counter = name.rpartition(_TENANT_SEPARATOR)
            if tenant in (None, owner):
                counts[counter] = counts.get(counter, 0) + value
    return counts
