"""What a store does, in figures: as Prometheus text, served over HTTP, and for OpenTelemetry."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .._util.packages import import_optional
from ..errors import KvmnnError, OptionError
from .results import COUNTER_DESCRIPTIONS, LATENCY_BOUNDS, StoreStats, StoreUsage
from .store import PrefixStore

_STATS_SECONDS = 1.0
"""Gauges of one collection are read within this time."""
_LATENCY_DESCRIPTIONS = {"get": "Seconds of a get.", "put": "Seconds of a put."}
_GAUGES = {
    "bytes": "Bytes of all units.",
    "raw_bytes": "Bytes of the K and V in them.",
    "tokens": "Tokens of all units; a token in several units counts in each.",
    "texts": "Stored texts.",
    "units": "Stored units.",
    "lost_units": "Units that no get finds: their bytes, or a unit before them, are gone.",
    "pinned": "Pinned texts.",
    "sessions": "Parked sessions.",
}


def format_prometheus(usage: StoreUsage, stats: StoreStats | None = None) -> str:
    """Format counts, and what is stored, in the text format of Prometheus (version 0.0.4)."""
    return "".join(f"{line}\n" for line in _iter_prometheus_lines(usage, stats))


def _iter_prometheus_lines(usage: StoreUsage, stats: StoreStats | None) -> Iterator[str]:
    def describe(name: str, kind: str, text: str) -> Iterator[str]:
        yield f"# HELP kvmnn_store_{name} {text}"
        yield f"# TYPE kvmnn_store_{name} {kind}"

    for name, text in COUNTER_DESCRIPTIONS.items():
        yield from describe(f"{name}_total", "counter", text)
        yield f"kvmnn_store_{name}_total {usage.counters[name]}"
    for call, histogram in (("get", usage.get_latency), ("put", usage.put_latency)):
        metric = f"{call}_seconds"
        yield from describe(metric, "histogram", _LATENCY_DESCRIPTIONS[call])
        num_calls = 0
        for bound, count in zip((*map(repr, LATENCY_BOUNDS), "+Inf"), histogram.counts, strict=True):
            num_calls += count
            yield f'kvmnn_store_{metric}_bucket{{le="{bound}"}} {num_calls}'
        yield f"kvmnn_store_{metric}_sum {histogram.seconds!r}"
        yield f"kvmnn_store_{metric}_count {num_calls}"
    for name, text in _GAUGES.items() if stats is not None else ():
        yield from describe(name, "gauge", text)
        yield f"kvmnn_store_{name} {getattr(stats, name)}"


def instrument_store(store: PrefixStore, meter: Any) -> None:
    """Report a store to OpenTelemetry: counters and gauges that are read when they are collected, and two histograms.

    Parameters
    ----------
    store
        The store. The counters are those of `PrefixStore.usage`, of this object alone: each process reports its own,
        and their sum is that of all. The gauges are those of `PrefixStore.stats`.
    meter
        ``opentelemetry.metrics.get_meter("kvmnn")`` (extra ``metrics``).

    Raises
    ------
    MissingDependencyError
        If opentelemetry-api is not installed.
    """
    observation_type = import_optional("opentelemetry.metrics").Observation
    read_stats = _CachedStats(store)

    def make_counter_callback(name: str) -> Callable[[object], Iterable[object]]:
        return lambda options: [observation_type(store.usage(own=True).counters[name])]

    def make_gauge_callback(name: str) -> Callable[[object], Iterable[object]]:
        return lambda options: [observation_type(getattr(stats, name)) for stats in read_stats()]

    for name, text in COUNTER_DESCRIPTIONS.items():
        unit = _guess_unit(name)
        meter.create_observable_counter(f"kvmnn.store.{name}", [make_counter_callback(name)], unit, text)
    for name, text in _GAUGES.items():  # "stored": a counter and a gauge would share a name
        unit = _guess_unit(name)
        meter.create_observable_gauge(f"kvmnn.store.stored.{name}", [make_gauge_callback(name)], unit, text)
    # the default buckets of OpenTelemetry are of milliseconds
    histograms = {
        call: meter.create_histogram(
            f"kvmnn.store.{call}.duration", "s", text, explicit_bucket_boundaries_advisory=LATENCY_BOUNDS
        )
        for call, text in _LATENCY_DESCRIPTIONS.items()
    }
    store.add_metrics_listener(lambda call, seconds: histograms[call].record(seconds))


def _guess_unit(name: str) -> str:
    last_word = name.rpartition("_")[2]
    return {"bytes": "By", "tokens": "{token}"}.get(last_word, "1")


class _CachedStats:
    """Reads the stats of a store once for all gauges of a collection."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._stats: list[StoreStats] = []
        self._read_time = -math.inf

    def __call__(self) -> list[StoreStats]:
        """Return the stats; nothing if the store is closed, or does not answer."""
        if time.monotonic() - self._read_time > _STATS_SECONDS:
            self._stats = []
            with suppress(KvmnnError):
                self._stats = [self._store.stats()]
            self._read_time = time.monotonic()
        return self._stats


_LOOPBACK = "127.0.0.1"
"""There is no password: only who types another address serves figures to other machines."""


def make_metrics_server(read_text: Callable[[], str], address: str) -> ThreadingHTTPServer:
    """Make an HTTP server that answers ``GET /metrics``; call its `serve_forever`.

    Parameters
    ----------
    read_text
        Returns the text, such as that of `format_prometheus`.
    address
        ``HOST:PORT``; ``:PORT`` is ``127.0.0.1:PORT``: all addresses of the machine are ``0.0.0.0``. Port 0 takes a
        free one.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise OptionError(f"{address!r}: expected HOST:PORT, such as 127.0.0.1:9464")

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # a client that sends nothing

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/metrics", "/"):
                self.send_error(404)
                return
            try:
                body = read_text().encode()
            except Exception as error:  # the next scrape may find the store again
                self.send_error(503, explain=str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a scrape every few seconds says nothing new."""

    try:
        return ThreadingHTTPServer((host.strip("[]") or _LOOPBACK, int(port)), Handler)
    except OSError as error:
        raise KvmnnError(f"{address}: cannot listen there: {error.strerror or error}") from error
