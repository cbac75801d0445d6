"""The store over Redis and fsspec: found to the token, checked, and never an obstacle when the server fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefixes import MODEL, agreeing, layers_of, same
from redis_server import Server

from kvmnn import KvmnnError
from kvmnn.errors import ManifestError, OptionError, OutputError, SourceError
from kvmnn.store import BackendUnavailableError, PrefixStore
from kvmnn.store.remote.backend import MemoryCache
from kvmnn.store.remote.records import UnitRecord, parse_record

pytest.importorskip("fsspec")


@pytest.fixture(params=["redis", "file", "memory"])
def url(request: pytest.FixtureRequest, new_url: Callable[[str], str]) -> str:
    return new_url(request.param)


def put(store: PrefixStore, ids):
    return store.put(ids, layers_of(ids), model=MODEL)


def test_remote_store_round_trips(url: str) -> None:
    one, two = [*range(20)], [*range(12), 99, 98, 97]
    with PrefixStore(url, block_tokens=4) as store:
        assert put(store, one).stored_bytes > 0
        made = put(store, two)
        assert (made.known_tokens, made.raw_bytes) == (12, 3 * 64)
    with PrefixStore(url, create=False, ram_bytes=0) as store:
        assert store.block_tokens == 4
        for ids in (one, two):
            assert same(store.get(ids, model=MODEL).layers, ids, len(ids))
            assert put(store, ids).known_tokens == len(ids)
        for cut in range(20):
            assert store.match([*one[:cut], 777], model=MODEL) == cut
        assert store.models == (MODEL,)
        stats = store.stats()
        assert (stats.texts, stats.units, stats.tokens) == (2, 2, 23)
        assert sorted(entry.tokens for entry in store.ls().texts) == [15, 20]
        assert store.verify().damaged == ()
        assert store.gc().other_files == 0
        removed = store.delete(two, model=MODEL)
        assert (removed.units, removed.kept) == (1, "its first 12 tokens stay, which other texts have or a pin keeps")
        assert store.match(two, model=MODEL) == 12
        assert store.delete(one[:12], model=MODEL).kept
        assert store.delete(one, model=MODEL).units == 1
        assert (store.match(one, model=MODEL), store.stats().units) == (0, 0)


@pytest.mark.parametrize("engine", ["redis", "file", "memory"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_remote_store_equals_dictionary_model(engine: str, new_url: Callable[[str], str], data: st.DataObject) -> None:
    texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
    stored: list[list[int]] = []
    with PrefixStore(new_url(engine), block_tokens=data.draw(st.sampled_from([1, 3, 8]))) as store:
        for ids in data.draw(st.lists(texts, min_size=1, max_size=9)):
            assert put(store, ids).known_tokens == max((agreeing(ids, other) for other in stored), default=0)
            stored.append(ids)
        for ids in [*data.draw(st.lists(texts, max_size=6)), *stored]:
            wanted = max(agreeing(ids, other) for other in stored)
            found = store.get(ids, model=MODEL)
            assert (store.match(ids, model=MODEL), found.tokens) == (wanted, wanted)
            assert same(found.layers, ids, wanted) if wanted else not found.layers
        assert store.verify().damaged == ()
        assert store.gc(max_bytes=0).bytes > 0
        assert store.stats().units == 0


@pytest.mark.parametrize("engine", ["redis", "memory"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_remote_evictions_never_yield_other_rows(engine: str, new_url: Callable[[str], str], data) -> None:
    texts = st.lists(st.integers(0, 1), min_size=1, max_size=24)
    with PrefixStore(new_url(engine), max_bytes=1500, block_tokens=3, ram_bytes=0) as store:
        stored: list[list[int]] = []
        for ids in data.draw(st.lists(texts, min_size=1, max_size=12)):
            put(store, ids)
            stored.append(ids)
            if data.draw(st.booleans()) and store.match(ids, model=MODEL) == len(ids):
                store.delete(ids, model=MODEL)
            assert store.stats().bytes <= 1500
            asked = data.draw(texts)
            found = store.get(asked, model=MODEL)
            assert found.notes == () and found.tokens <= max(agreeing(asked, other) for other in stored)
            assert found.tokens == 0 or same(found.layers, asked, found.tokens)
        assert store.verify().damaged == ()
        cleaned = store.gc()
        assert (cleaned.units, cleaned.other_files) == (0, 0)


def test_remote_park_and_resume_sessions(url: str) -> None:
    ids = list(range(10))
    with PrefixStore(url) as store:
        store.park("chat äöü", ids, layers_of(ids), model=MODEL)
        assert store.sessions() == ["chat äöü"]
        assert same(store.resume("chat äöü").prefix.layers, ids, 10)
        store.forget("chat äöü")
        with pytest.raises(KvmnnError, match="there is no session"):
            store.resume("chat äöü")


def test_remote_pin_without_its_first_units_is_read(url: str) -> None:
    """As the first versions wrote it; a put of the text completes it."""
    ids = list(range(19))
    with PrefixStore(url, block_tokens=4) as store:
        for tokens in (8, 19):
            put(store, ids[:tokens])
        store.pin(ids, model=MODEL)
        values = store._backend.key_values
        (name,) = values.list_tree("pins")
        document = json.loads(values.get_many([name])[0])
        assert len(document.pop("before")) == 1
        values.put_many({name: json.dumps(document).encode()})
        store.gc(max_bytes=0)
        assert store.match(ids, model=MODEL) == 19
        put(store, [*ids, 7])
        assert json.loads(values.get_many([name])[0])["before"]


def test_remote_damaged_session_can_be_removed(url: str) -> None:
    with PrefixStore(url) as store:
        store.park("chat", [1, 2], layers_of([1, 2]), model=MODEL)
        (name,) = store._backend.key_values.list_tree("sessions")
        store._backend.key_values.put_many({name: b"{"})
        assert len(store.verify().damaged_files) == 1
        store.forget("chat")
        assert (store.sessions(), store.verify().damaged_files) == ([], ())


def test_remote_full_server_reads_and_frees_space(server: Server, new_url: Callable[[str], str]) -> None:
    """It answers at once that it takes nothing, and then even refuses to remove in a transaction."""
    redis = pytest.importorskip("redis")
    ids, more = [*range(200)], [*range(900, 1900)]
    with redis.Redis.from_url(new_url("redis")) as client, PrefixStore(server.url) as store:
        put(store, ids)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 1000)
        try:
            refused = put(store, more)
            assert refused.outage
            (note,) = refused.notes
            assert note.endswith(": the server refuses the write: " + note.rpartition("write: ")[2][:100])
            assert "maxmemory" in note and note.isprintable() and "SET" not in note
            assert same(store.get(ids, model=MODEL).layers, ids, 200), "and is not left alone for a second"
            assert store.gc(0).units == 1
            assert store.match(ids, model=MODEL) == 0
        finally:
            client.config_set("maxmemory", 0)


def test_remote_eviction_removes_least_recently_used(url: str) -> None:
    texts = [[first, *range(7)] for first in (10, 20, 30, 40)]
    with PrefixStore(url, block_tokens=4) as store:
        size = put(store, texts[0]).stored_bytes
    with PrefixStore(url, max_bytes=3 * size + 60, ram_bytes=0) as store:
        for ids in texts[:3]:
            put(store, ids)
        store.get(texts[0], model=MODEL)
        assert put(store, texts[3]).removed_bytes > 0
        assert [store.match(ids, model=MODEL) for ids in texts] == [8, 0, 8, 8]
        assert store.stats().bytes <= 3 * size + 60
        assert [entry.unused_for is not None for entry in store.ls().texts] == [True] * 3


def test_remote_gc_keeps_prefixes_and_pinned_texts(url: str) -> None:
    with PrefixStore(url, block_tokens=4) as store:
        for ids in (range(8), range(16), [9, 9, 9]):
            put(store, ids)
        assert store.gc(max_bytes=store.stats().bytes - 1).units == 1
        assert store.match(range(8), model=MODEL) == 8
        put(store, range(16))
        assert not store.pin(range(8), model=MODEL).was_pinned
        assert store.pin(range(8), model=MODEL).was_pinned
        assert store.ls().texts and store.stats().pinned == 1
        result, nbytes = store.gc(max_bytes=7), store.stats().bytes
        assert result.kept == f"{nbytes:,} bytes are left, {nbytes - 7:,} above the limit, of texts that are pinned"
        assert result.excess_bytes == nbytes - 7
        assert store.match(range(16), model=MODEL) == 8
        assert store.ls().texts[0].pinned
        assert "it is pinned" in store.delete(range(8), model=MODEL).kept
        assert store.unpin(range(8), model=MODEL).was_pinned
        assert not store.unpin(range(8), model=MODEL).was_pinned
        assert (store.gc(max_bytes=0).kept, store.stats().bytes) == ("", 0)
        with pytest.raises(KvmnnError, match=r"holds 0 tokens of this text of 8"):
            store.pin(range(8), model=MODEL)


def test_remote_growing_text_leaves_no_tails(url: str) -> None:
    with PrefixStore(url, block_tokens=4) as store:
        for tokens in range(8, 12):
            put(store, range(tokens))
        assert store.stats().units == 2
        assert same(store.get(range(11), model=MODEL).layers, range(11), 11)
        assert store.gc().other_files == 0


def test_remote_get_finds_longest_of_many_branches(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks longer than what names of records say of them, and more of them than are looked at."""
    monkeypatch.setattr("kvmnn.store.remote.backend._MAX_NEIGHBOURS", 3)
    begin = list(range(40))
    with PrefixStore(url, block_tokens=40) as store:
        put(store, begin)
        for last in range(24):
            put(store, [*begin, 50, last, *([last] * (33 if last % 2 else 2))])
        for asked, wanted in (([50, 17, 17, 3], 3), ([50, 22, 22, 3], 3), ([50, *([23] * 34), 3], 35), ([51], 0)):
            found = store.get([*begin, *asked], model=MODEL)
            assert found.tokens == 40 + wanted
            assert same(found.layers, [*begin, *asked], found.tokens)


def test_remote_put_restores_units_evicted_by_server(server: Server) -> None:
    """A record without its unit does not count, also for `match`."""
    with PrefixStore(server.url, ram_bytes=0) as store:
        put(store, [7, 7, 1])
        store._backend.key_values.delete(units_of(store))
        assert store.match([7, 7, 1], model=MODEL) == 0
        assert put(store, [7, 7, 1]).stored_bytes > 0
        assert same(store.get([7, 7, 1], model=MODEL).layers, [7, 7, 1], 3)


def test_remote_options_for_local_store_are_refused(url: str, tmp_path: Path) -> None:
    with PrefixStore(url):
        pass
    with pytest.raises(OptionError, match="ram_bytes and timeout are for stores past this machine"):
        PrefixStore(tmp_path / "s", ram_bytes=5)
    with pytest.raises(OptionError, match="has blocks of 64 tokens, not of 32"):
        PrefixStore(url, block_tokens=32)


def test_remote_open_missing_or_other_store_is_refused(url: str) -> None:
    with pytest.raises(SourceError, match="holds no prefix store"):
        PrefixStore(url, create=False)
    with PrefixStore(url) as store:
        values = store._backend.key_values
        values.put_many({"store/about": json.dumps({"schema": "kvmnn-store", "schema_version": 3}).encode()})
    with pytest.raises(SourceError, match="another version"):
        PrefixStore(url)


def test_remote_read_only_refuses_writes(url: str) -> None:
    with PrefixStore(url) as store:
        put(store, [1, 2, 3])
    with PrefixStore(url, read_only=True) as store:
        assert same(store.get([1, 2, 3], model=MODEL).layers, [1, 2, 3], 3)
        for call in (lambda: put(store, [4]), lambda: store.delete([1, 2, 3], model=MODEL), lambda: store.gc()):
            with pytest.raises(OutputError, match="is open for reading only"):
                call()


def units_of(store: PrefixStore) -> list[str]:
    return [f"units/{name}" for name in store._backend.key_values.list_names("units")]


def test_remote_damaged_unit_is_a_noted_miss(url: str) -> None:
    one, two = [*range(8)], [*range(8), 50, 51, 52]
    with PrefixStore(url, block_tokens=4) as store:
        put(store, one)
        (first,) = units_of(store)
        put(store, two)
    with PrefixStore(url) as store:
        values = store._backend.key_values
        (second,) = set(units_of(store)) - {first}
        (data,) = values.get_many([second])
        values.put_many({second: data[:-1] + bytes([data[-1] ^ 1])})
        found = store.get(two, model=MODEL)
        assert same(found.layers, two, 8)
        assert "damaged, was removed, with what goes on from it: V of layer 1" in found.notes[0]
        assert store.get(two, model=MODEL).notes == ()
        assert units_of(store) == [first]
        assert put(store, two).known_tokens == 8
        assert same(store.get(two, model=MODEL).layers, two, 11)
        values.put_many({second: data[:100]})
    with PrefixStore(url) as store:
        assert len(store.verify().damaged) == 1
        assert store.verify().damaged == ()


def test_remote_unit_evicted_by_server_is_a_miss(url: str) -> None:
    ids = list(range(8))
    with PrefixStore(url, block_tokens=4) as store:
        put(store, ids)
    with PrefixStore(url) as store:
        store._backend.key_values.delete(units_of(store))
        found = store.get(ids, model=MODEL)
        assert (found.tokens, found.notes) == (0, ())
        assert put(store, ids).known_tokens == 0
        assert same(store.get(ids, model=MODEL).layers, ids, 8)
        store._backend.key_values.put_many({f"units/{255:032x}": b"x"})
        cleaned = store.gc()
        assert (cleaned.other_files, cleaned.young_files) == ((1, 0) if url.startswith("redis") else (0, 1))


def test_remote_hostile_values_are_misses(url: str) -> None:
    """Records of other texts or namespaces and truncated ones yield no rows that were not put."""
    ids = list(range(8))
    with PrefixStore(url, block_tokens=4) as store:
        put(store, ids)
        put(store, range(30, 38))
        values = store._backend.key_values
        records = values.list_tree("after-")
        one, two = values.get_many(records)
        values.put_many({records[0]: two, records[1]: one})
        found = store.get(ids, model=MODEL)
        assert found.tokens == 0 or same(found.layers, ids, found.tokens)
        for wrong in (b"", b"KVMNNPB1", one[:-1], one[:60], one[:80] + b"\xff" * (len(one) - 80)):
            values.put_many(dict.fromkeys(records, wrong))
            assert store.match(ids, model=MODEL) == 0
        (space,) = values.list_tree("spaces")
        values.put_many(dict(zip(records, (one, two), strict=True)))
        values.put_many({space: b'{"model": 5'})
    with PrefixStore(url) as store:
        assert store.match(ids, model=MODEL) == 0
        assert put(store, ids).known_tokens == 8, "it is there, and its space is noted down again"


def test_remote_outage_is_a_miss(server: Server) -> None:
    ids = list(range(8))
    with PrefixStore(server.url, timeout=1) as store:
        put(store, ids)
        server.stop()
        try:
            found = store.get(ids, model=MODEL)
            assert found.tokens == 0
            assert "redis://127.0.0.1" in found.notes[0] and "does not answer" in found.notes[0]
            assert found.outage
            assert store.match(ids, model=MODEL) == 0
            matched = store.find(ids, model=MODEL)
            assert matched.outage and "does not answer" in matched.notes[0]
            for made in (put(store, ids), store.park("chat", ids, layers_of(ids), model=MODEL)):
                assert (made.stored_bytes, made.known_tokens, made.stored_tokens, made.outage) == (0, 0, 0, True)
                assert "nothing was stored" in str(made)
            assert "the session was not noted down" in made.notes[1]
            with pytest.raises(BackendUnavailableError, match="does not answer"):
                store.resume("chat")
            began = time.monotonic()
            for _ in range(20):
                assert store.get(ids, model=MODEL).tokens == 0
            assert time.monotonic() - began < 1, "an engine that was just gone is not waited for again and again"
            with PrefixStore(server.url, timeout=1) as late:
                assert late.match(ids, model=MODEL) == 0
                with pytest.raises(KvmnnError, match="does not answer"):
                    late.stats()
        finally:
            server.start()
        store._backend.key_values._rest_until = 0.0
        assert put(store, ids).stored_bytes > 0
        assert same(store.get(ids, model=MODEL).layers, ids, 8)


class Slow:
    """Values that answer some calls only."""

    has_cheap_touch = True
    refusals = ()

    def __init__(self, failures: int, error: type[Exception] = ConnectionError) -> None:
        self.error = error
        self.failures = failures
        self.calls = 0
        self.held: dict[str, bytes] = {}

    def _call(self) -> None:
        self.calls += 1
        if self.failures:
            self.failures -= 1
            raise self.error("too slow")

    def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        self._call()
        return [self.held.get(name) for name in names]

    def put_many(self, items: Mapping[str, bytes]) -> None:
        self._call()
        self.held |= items


def test_circuit_breaker_retries_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmnn.store.backend import BackendUnavailableError
    from kvmnn.store.remote.key_values import CircuitBreaker

    monkeypatch.setattr("kvmnn.store.remote.key_values.RETRY_PAUSES_SECONDS", (0.0, 0.0))
    slow = Slow(failures=2)
    assert CircuitBreaker(slow, "slow").get_many(["a/b"]) == [None]
    assert slow.calls == 3
    slow.failures = 3
    patient = CircuitBreaker(slow, "slow")
    for _ in range(5):
        with pytest.raises(BackendUnavailableError, match="slow: does not answer: too slow"):
            patient.get_many(["a/b"])
    assert slow.calls == 6, "while it rests nothing is tried"


def test_circuit_breaker_pauses_longer_after_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no second wait for a dead server; an answer ends the pause."""
    from kvmnn.store.remote.key_values import CircuitBreaker

    now = 100.0
    monkeypatch.setattr("kvmnn.store.remote.key_values.time.monotonic", lambda: now)
    slow = Slow(failures=9, error=type("ReadTimeoutError", (Exception,), {}))
    patient = CircuitBreaker(slow, "slow")
    for rest in (1, 2, 4, 8, 16, 32, 60, 60):
        calls = slow.calls
        for step in (0, rest - 0.5):
            now += step
            with pytest.raises(BackendUnavailableError, match="does not answer"):
                patient.get_many(["a/b"])
        assert slow.calls == calls + 1
        now += 0.6
    slow.failures = 0
    assert patient.get_many(["a/b"]) == [None]
    slow.failures = 1
    with pytest.raises(BackendUnavailableError):
        patient.get_many(["a/b"])
    now += 1.1
    assert patient.get_many(["a/b"]) == [None]


@pytest.mark.parametrize("codec", ["dense", "frames"])
def test_remote_damaged_settings_are_rebuilt_from_units(url: str, codec: str) -> None:
    from kvmnn.store.remote.backend import SETTINGS_NAME

    ids = list(range(30))
    with PrefixStore(url, block_tokens=7, codec=codec) as store:
        put(store, [1, 2])
        put(store, ids)
        values = store._backend.key_values
        (good,) = values.get_many([SETTINGS_NAME])
        for read_only in (True, False):
            values.put_many({SETTINGS_NAME: good[:-9]})
            with PrefixStore(url, read_only=read_only) as other:
                assert (other.block_tokens, other.codec) == (7, codec)
                assert "is made again" in other.notes[0] and len(other.verify().rebuilt_parts) == 1
                assert same(other.get(ids, model=MODEL).layers, ids, 30)
        assert values.get_many([SETTINGS_NAME]) == [good]
        store.delete(ids, model=MODEL)
        values.put_many({SETTINGS_NAME: b"{"})
        with PrefixStore(url) as other:  # a text of one block: its namespace says the settings
            assert (other.block_tokens, other.codec, other.match([1, 2], model=MODEL)) == (7, codec, 2)
        values.put_many({SETTINGS_NAME: b"{"})
        values.delete([f"spaces/{name}" for name in values.list_names("spaces")])
        with pytest.raises(
            ManifestError, match=r"store/about.*; write what the store was made with into store/about, such as "
        ):
            PrefixStore(url)


@pytest.mark.parametrize("error", [PermissionError("Access Denied"), FileNotFoundError("there is no such bucket")])
def test_circuit_breaker_refusal_is_no_outage(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    from kvmnn.store.remote.key_values import CircuitBreaker

    monkeypatch.setattr("kvmnn.store.remote.key_values.RETRY_PAUSES_SECONDS", ())
    slow = Slow(failures=0)
    monkeypatch.setattr(slow, "_call", lambda: (_ for _ in ()).throw(error))
    with pytest.raises(BackendUnavailableError, match=f"s3: refuses: {error}"):
        CircuitBreaker(slow, "s3").get_many(["a/b"])


def test_remote_round_trips_do_not_depend_on_length(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of round trips does not grow with the text."""
    with PrefixStore(url, block_tokens=4) as store:
        counts: dict[int, int] = {}
        put(store, range(1200))
        calls: list[str] = []
        for name in ("get_many", "put_many", "list_names", "list_neighbours", "contains_many", "list_tree"):
            real = getattr(store._backend.key_values._key_values, name)

            def counted(*arguments, real: Callable = real, name: str = name):
                calls.append(name)
                return real(*arguments)

            monkeypatch.setattr(store._backend.key_values._key_values, name, counted)
        for tokens in (6, 1200):
            calls.clear()
            assert store.match(range(tokens), model=MODEL) == tokens
            counts[tokens] = len(calls)
        assert counts[1200] <= counts[6] <= 5


def test_memory_cache_is_bounded() -> None:
    ram = MemoryCache(100)
    for unit in range(10):
        ram.put(unit, bytes(30))
        assert ram.nbytes <= 100
    assert [unit for unit in range(10) if ram.get(unit) is not None] == [7, 8, 9]
    ram.get(7)
    ram.put(20, bytes(30))
    assert ram.get(7) is not None and ram.get(8) is None
    ram.put(21, bytes(101))
    assert ram.get(21) is None and ram.nbytes == 90
    ram.put(20, bytes(10))
    assert ram.nbytes == 70


def test_remote_get_uses_memory_cache(server: Server) -> None:
    ids = list(range(100, 140))
    with PrefixStore(server.url) as store:
        put(store, ids)
        store._backend.key_values.delete(units_of(store))
        assert same(store.get(ids, model=MODEL).layers, ids, 40)
    with PrefixStore(server.url) as store:
        assert store.get(ids, model=MODEL).tokens == 0


def test_parse_record_flipped_byte_is_refused() -> None:
    import numpy as np

    good = UnitRecord(b"s" * 16, b"p" * 16, 77, 1000, 4, np.arange(5, dtype="<u4")).to_bytes()
    found = parse_record(good)
    assert found is not None and found.ids.tolist() == [0, 1, 2, 3, 4]
    assert all(parse_record(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]) is None for at in range(len(good)))
    assert all(parse_record(good[:at]) is None for at in range(len(good)))
