"""Counts of a store: of all its processes, as text for Prometheus, over HTTP, and for OpenTelemetry."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from kvmnn import LayerCache
from kvmnn.errors import KvmnnError, OptionError
from kvmnn.store import PrefixStore
from kvmnn.store.metrics import format_prometheus, instrument_store, make_metrics_server
from kvmnn.store.results import COUNTER_DESCRIPTIONS, LATENCY_BOUNDS, CallLatency
from kvmnn.store.usage import COUNTERS_FILE, StoreMetrics

IDS = list(range(100))


def computed(ids: list[int]) -> list[LayerCache]:
    rows = np.cumsum(np.array(ids, np.float32))[None, :, None] * np.ones((2, 1, 16), np.float32)
    return [LayerCache(layer=layer, keys=rows + layer, values=rows - layer) for layer in range(2)]


def use(folder: Path) -> None:
    """A miss, a put, a hit of 80 tokens."""
    with PrefixStore(folder) as store:
        store.get(IDS, model="m")
        store.put(IDS, computed(IDS), model="m")
        store.get([*IDS[:80], 7, 7], model="m")


def test_counts_are_those_of_all_processes(tmp_path) -> None:
    use(tmp_path / "store")
    with PrefixStore(tmp_path / "store") as store:
        found = store.get(IDS, model="m")
        usage = store.usage()
    expected = {"gets": 3, "hits": 2, "requested_tokens": 282, "hit_tokens": 180, "puts": 1, "put_tokens": 100}
    assert {name: usage.counters[name] for name in expected} == expected
    assert usage.counters["hit_bytes"] == 180 * found.layers[0].keys[:, :1].nbytes * 4
    assert usage.counters["put_raw_bytes"] > usage.counters["put_bytes"] > 0
    assert usage.hit_rate == pytest.approx(180 / 282)
    assert (usage.get_latency.calls, usage.put_latency.calls) == (3, 1)
    with PrefixStore(tmp_path / "store", read_only=True) as store:
        stats = store.stats()
        assert stats.usage is not None
        assert stats.usage.counters == usage.counters
        assert "2 of 3 gets found something: 180 of 282 tokens (63.8 %)" in str(stats)
        assert max(map(len, str(stats).splitlines())) <= 80
    assert os.listdir(tmp_path / "store").count(COUNTERS_FILE) == 1


def test_counts_of_namespaces_are_apart(tmp_path, encryption) -> None:
    for namespace, num_gets in ((None, 1), ("team-a", 2), ("team-b", 3)):
        with PrefixStore(tmp_path / "store", namespace=namespace) as store:
            store.put(IDS, computed(IDS), model="m")
            for _ in range(num_gets):
                store.get(IDS, model="m")
    for namespace, num_gets in ((None, 1), ("team-a", 2), ("team-b", 3), ("team", 0)):
        with PrefixStore(tmp_path / "store", namespace=namespace) as store:
            for usage in (store.usage(), store.stats().usage):
                assert (usage.counters["gets"], usage.get_latency.calls) == (num_gets, num_gets)
            for usage in (store.usage(all_namespaces=True), store.stats(all_namespaces=True).usage):
                assert (usage.counters["gets"], usage.counters["hit_tokens"], usage.put_latency.calls) == (6, 600, 3)
    assert (b"team-a" in (tmp_path / "store" / COUNTERS_FILE).read_bytes()) == (encryption == "plain")


def test_counters_file_is_the_stores_own_and_is_not_removed(tmp_path) -> None:
    use(tmp_path / "store")
    with PrefixStore(tmp_path / "store") as store:
        cleanup = store.gc()
    assert (cleanup.foreign, cleanup.other_files) == ((), 0)
    assert (tmp_path / "store" / COUNTERS_FILE).exists()


def test_reading_alone_writes_no_counts(tmp_path) -> None:
    use(tmp_path / "store")
    before = (tmp_path / "store" / COUNTERS_FILE).read_bytes()
    with PrefixStore(tmp_path / "store", read_only=True) as store:
        assert store.get(IDS, model="m").tokens == 100
    assert (tmp_path / "store" / COUNTERS_FILE).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"no database" * 100, b"SQLite format 3\0" + bytes(4000)])
def test_damaged_counters_cost_counts_only(content, tmp_path) -> None:
    use(tmp_path / "store")
    (tmp_path / "store" / COUNTERS_FILE).write_bytes(content)
    for _ in range(3):
        with PrefixStore(tmp_path / "store") as store:
            assert store.get(IDS, model="m").tokens == 100
    with PrefixStore(tmp_path / "store") as store:
        assert 0 < store.usage().counters["gets"] <= 3


def test_forged_counters_are_left_out(tmp_path) -> None:
    with sqlite3.connect(tmp_path / "counters") as connection:
        connection.execute("CREATE TABLE counter (name, value)")
        rows = [("gets", -1), ("hits", "many"), (b"puts", 4), ("put_tokens", 2**63 - 1), ("outages", 3)]
        connection.executemany("INSERT INTO counter VALUES (?, ?)", rows)
    connection.close()
    counters = StoreMetrics(tmp_path / "counters").read().counters
    assert counters == dict.fromkeys(COUNTER_DESCRIPTIONS, 0) | {"outages": 3}


def test_damage_and_eviction_are_counted(tmp_path) -> None:
    rng = np.random.default_rng(1)
    with PrefixStore(tmp_path / "store", 60_000) as store:
        for number in range(4):
            rows = rng.normal(size=(2, 100, 16)).astype(np.float32)
            store.put(
                [number * 1000 + token for token in IDS], [LayerCache(layer=0, keys=rows, values=rows)], model="m"
            )
        usage = store.usage()
        assert usage.counters["evictions"] > 0
        assert usage.counters["evicted_bytes"] > 0
        for path in (tmp_path / "store" / "units").rglob("*.unit"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        assert store.get([3000 + token for token in IDS], model="m").tokens == 0
        assert store.usage().counters["damages"] == 1


def test_quantiles_are_bounds_of_buckets() -> None:
    histogram = CallLatency(counts=(5, 0, 4, *[0] * (len(LATENCY_BOUNDS) - 3), 1), seconds=1.0)
    assert [histogram.estimate_quantile(fraction) for fraction in (0.5, 0.9, 1.0)] == [0.001, 0.005, float("inf")]
    assert CallLatency(counts=(0,) * 15, seconds=0.0).estimate_quantile(0.5) is None


def parse_prometheus(text: str) -> dict[str, float]:
    """Parse the text format as its description has it: HELP and TYPE before each metric, a value on each line."""
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"# TYPE (\w+) (counter|gauge|histogram)", line):
            kinds[match[1]] = match[2]
        elif not line.startswith("# HELP "):
            name, labels, value = re.fullmatch(r"(\w+)(\{le=\"[^\"]+\"\})? (\S+)", line).groups()  # type: ignore[union-attr]
            assert name in kinds or re.sub("_(bucket|sum|count)$", "", name) in kinds
            values[name + (labels or "")] = float(value)
    return values


def test_prometheus_text_has_all_counts(tmp_path) -> None:
    use(tmp_path / "store")
    with PrefixStore(tmp_path / "store") as store:
        text = format_prometheus(store.usage(), store.stats())
    values = parse_prometheus(text)
    assert values["kvmnn_store_hit_tokens_total"] == 80
    assert values['kvmnn_store_get_seconds_bucket{le="+Inf"}'] == values["kvmnn_store_get_seconds_count"] == 2
    buckets = [value for name, value in values.items() if name.startswith("kvmnn_store_get_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert len(buckets) == len(LATENCY_BOUNDS) + 1
    assert values["kvmnn_store_texts"] == 1
    assert {f"kvmnn_store_{name}_total" for name in COUNTER_DESCRIPTIONS} <= values.keys()


def test_prometheus_client_reads_the_text(tmp_path) -> None:
    use(tmp_path / "store")
    with PrefixStore(tmp_path / "store") as store:
        text = format_prometheus(store.usage(), store.stats())
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} == {"counter", "histogram", "gauge"}
    assert all(family.documentation for family in families)
    samples = {
        sample.name + "".join(f'{{{name}="{value}"}}' for name, value in sample.labels.items()): sample.value
        for family in families
        for sample in family.samples
    }
    assert samples == parse_prometheus(text)


def test_metrics_server_answers_scrapes_and_survives_errors() -> None:
    answers = iter(["kvmnn 1\n"])
    with make_metrics_server(lambda: next(answers), "127.0.0.1:0") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                assert answer.read() == b"kvmnn 1\n"
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            for path, code in (("/metrics", 503), ("/secret", 404)):
                with pytest.raises(urllib.error.HTTPError) as raised:
                    urllib.request.urlopen(f"{url}{path}", timeout=10)
                assert raised.value.code == code
                raised.value.close()
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("address", ["", "host", "host:", "host:http", "host:70000"])
def test_metrics_server_refuses_addresses(address) -> None:
    with pytest.raises(OptionError, match="expected HOST:PORT"):
        make_metrics_server(lambda: "", address)


@pytest.mark.parametrize(("address", "host"), [(":0", "127.0.0.1"), ("0.0.0.0:0", "0.0.0.0")])
def test_metrics_server_without_host_listens_on_the_loopback(address: str, host: str) -> None:
    with make_metrics_server(lambda: "", address) as server:
        assert server.server_address[0] == host


def test_metrics_server_names_the_address_in_use() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(KvmnnError, match=f"{address}: cannot listen there: Address already in use"):
            make_metrics_server(lambda: "", address)


def read_metrics(reader: Any) -> dict[str, Any]:
    """Return the metrics of an OpenTelemetry reader by their names."""
    data = reader.get_metrics_data()
    return {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def read_value(metric: Any) -> float:
    (point,) = metric.data.data_points
    return point.value


def test_opentelemetry_sdk_collects_all_figures(tmp_path) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    rng = np.random.default_rng(1)
    use(tmp_path / "store")  # by another process: it reports its own
    with PrefixStore(tmp_path / "store", 60_000) as store:
        instrument_store(store, provider.get_meter("kvmnn"))
        for number in range(4):
            rows = rng.normal(size=(2, 100, 16)).astype(np.float32)
            ids = [number * 1000 + token for token in IDS]
            store.put(ids, [LayerCache(layer=0, keys=rows, values=rows)], model="n")
        prefix = store.get(ids, model="n")
        store.get([9, 9], model="n")
        metrics = read_metrics(reader)
        values = {name: read_value(metrics[f"kvmnn.store.{name}"]) for name in COUNTER_DESCRIPTIONS}
        assert values == store.usage(own=True).counters
        expected = {"gets": 2, "hits": 1, "hit_tokens": 100, "requested_tokens": 102, "puts": 4, "outages": 0}
        assert {name: values[name] for name in expected} == expected
        assert values["hit_bytes"] == sum(cache.nbytes for cache in prefix.layers)
        assert min(values[name] for name in ("put_bytes", "evictions", "evicted_bytes")) > 0
        stats = store.stats()
        for name in ("bytes", "texts", "tokens", "pinned"):
            assert read_value(metrics[f"kvmnn.store.stored.{name}"]) == getattr(stats, name)
        for call, calls in (("get", 2), ("put", 4)):
            metric = metrics[f"kvmnn.store.{call}.duration"]
            (point,) = metric.data.data_points
            assert (metric.unit, tuple(point.explicit_bounds), point.count) == ("s", LATENCY_BOUNDS, calls)
            assert 0 < point.sum < 60
            counts = getattr(store.usage(own=True), f"{call}_latency").counts
            assert list(point.bucket_counts) == list(counts)
        for path in (tmp_path / "store" / "units").rglob("*.unit"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        assert store.get(ids, model="n").tokens == 0
        assert read_value(read_metrics(reader)["kvmnn.store.damages"]) == 1
    assert read_value(read_metrics(reader)["kvmnn.store.gets"]) == 3  # a closed store has counted what it has


def test_opentelemetry_sdk_collects_outages() -> None:
    reader = InMemoryMetricReader()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    with PrefixStore(f"redis://127.0.0.1:{port}", timeout=0.1) as store:
        instrument_store(store, MeterProvider([reader]).get_meter("kvmnn"))
        assert store.get(IDS, model="m").outage
        metrics = read_metrics(reader)
        assert read_value(metrics["kvmnn.store.outages"]) == 1
        assert "kvmnn.store.stored.bytes" not in metrics  # unknown, which is not 0


def test_counting_takes_less_than_a_hundredth_of_a_get(tmp_path) -> None:
    use(tmp_path / "store")
    with PrefixStore(tmp_path / "store") as store:
        prefix = store.get(IDS, model="m")
        get_seconds = min(_measure(lambda: store.get(IDS, model="m"), 5) for _ in range(10))
    metrics = StoreMetrics(tmp_path / "counters.sqlite")
    count_seconds = min(_measure(lambda: metrics.record_get(prefix, 0.01), 100) for _ in range(10))
    assert count_seconds < 0.02 * get_seconds  # of 100 tokens in two layers, the smallest that anybody stores


def _measure(call: Any, number: int) -> float:
    started = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - started) / number


def test_serve_metrics_command_refuses_an_address(run, tmp_path) -> None:
    use(tmp_path / "store")
    assert "expected HOST:PORT" in run("store", "serve-metrics", tmp_path / "store", "--listen", "x", code=2).err
