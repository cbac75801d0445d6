"""Values that a server loses or has no space for: a put restores them, and nothing is left over."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefixes import MODEL, layers_of, same

from kvmnn.arrays.opaque_state import make_state
from kvmnn.errors import SourceError
from kvmnn.store import BackendUnavailableError, PrefixStore
from kvmnn.store.remote.records import make_unit_name

pytest.importorskip("fsspec")

IDS = list(range(30))


@pytest.fixture(params=["redis", "file", "memory"])
def url(request: pytest.FixtureRequest, encryption: str, new_url: Callable[[str], str]) -> str:
    return new_url(request.param)


def put(store: PrefixStore, ids):
    return store.put(ids, layers_of(ids), model=MODEL)


@pytest.mark.parametrize("how", ["gone", "damaged", "of another"])
def test_remote_namespace_lost_is_written_again(url: str, how: str) -> None:
    with PrefixStore(url, block_tokens=4) as store:
        put(store, IDS)
        values = store._backend.key_values
        (name,) = values.list_names("spaces")
        if how == "gone":
            values.delete([f"spaces/{name}"])
        else:
            values.put_many({f"spaces/{name}": b"{" if how == "damaged" else b'{"model": "other"}'})
    with PrefixStore(url) as store:
        assert store.match(IDS, model=MODEL) == 0
        assert put(store, IDS).known_tokens == 30
        assert store.match(IDS, model=MODEL) == 30
    with PrefixStore(url, ram_bytes=0) as store:
        assert same(store.get(IDS, model=MODEL).layers, IDS, 30)
        assert store.stats().units == 1


def test_remote_redis_record_order_lost_is_rebuilt(new_url: Callable[[str], str]) -> None:
    url, other = new_url("redis"), [7, *range(20)]
    with PrefixStore(url, block_tokens=4) as store:
        put(store, IDS)
        put(store, other)
        client = store._backend.key_values._key_values._client
        for at in range(2):
            client.delete(*client.keys("kvmnn:order:*"))
            if at:
                put(store, [9, 9])  # an order of one name
            assert [store.match([*ids[:3], 77], model=MODEL) for ids in (IDS, other)] == [3, 3]
        assert store.match([50, 51], model=MODEL) == 0


def test_remote_damaged_session_is_refused(url: str) -> None:
    with PrefixStore(url, block_tokens=4) as store:
        store.park("one", IDS, layers_of(IDS), model=MODEL)
        values = store._backend.key_values
        (name,) = values.list_names("sessions")
        (good,) = values.get_many([f"sessions/{name}"])
        document = json.loads(good)
        changed = [
            document | {"ids": [*IDS[:9], 99, *IDS[10:]]},
            document | {"ids": IDS[:-1]},
            document | {"checksum": "0" * 16},
        ]
        for each in changed:
            values.put_many({f"sessions/{name}": json.dumps(each).encode()})
            with pytest.raises(SourceError, match="session 'one' is damaged: it does not match its checksum"):
                store.resume("one")
            (said,) = store.verify().damaged_files
            assert "session 'one' is damaged" in said
        for wrong in (b"", b"\xff", b"[1]"):
            values.put_many({f"sessions/{name}": wrong})
            (said,) = store.verify().damaged_files
            assert "session 'one'" in said and store.verify().units == 1
        del document["checksum"]  # as kvmnn wrote them at first
        values.put_many({f"sessions/{name}": json.dumps(document).encode()})
        assert store.resume("one").prefix.tokens == 30
        assert store.verify().damaged_files == ()


def test_remote_record_in_wrong_place_is_put_again(url: str) -> None:
    """It counts as missing, and the right record is put again."""
    texts = [IDS, [*IDS[:8], 70, 71, 72, 73, 74], [80, 81, 82, 83, 84]]
    with PrefixStore(url, block_tokens=4) as store:
        for ids in texts:
            put(store, ids)
        values = store._backend.key_values
        names = values.list_tree("after-")
        records = values.get_many(names)
    assert len(names) == 3
    for name in names:
        for data in records:
            with PrefixStore(url, ram_bytes=0) as store:
                store._backend.key_values.put_many(dict(zip(names, records, strict=True)) | {name: data})
                for ids in texts:
                    put(store, ids)
                    assert same(store.get(ids, model=MODEL).layers, ids, len(ids))
                assert store.verify().damaged == ()


def test_remote_full_disk_leaves_no_files(new_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = new_url("file")
    folder = Path(url.removeprefix("file://"))
    with PrefixStore(url, block_tokens=4) as store:
        put(store, IDS)
        before = sorted(map(str, folder.rglob("*")))
        fs = store._backend.key_values._key_values._fs
        real = fs.pipe_file

        def full(path, value, **more):
            real(path, value[: len(value) // 2], **more)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(fs, "pipe_file", full)
        made = put(store, [7, *IDS])
        assert made.outage and made.notes == (f"{url}: cannot be written: No space left on device",)
        assert sorted(map(str, folder.rglob("*"))) == before
        assert store.get(IDS, model=MODEL).tokens == 30  # at once
        monkeypatch.undo()
        assert put(store, [7, *IDS]).stored_tokens == 31
    monkeypatch.setattr(type(fs), "pipe_file", lambda self, path, value, **more: full(path, value, **more))
    with pytest.raises(BackendUnavailableError):
        PrefixStore(f"{url}2").stats()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_remote_forked_child_has_own_threads(new_url: Callable[[str], str]) -> None:
    url = new_url("file")
    with PrefixStore(url, block_tokens=4) as store:
        put(store, IDS)

        def child() -> None:
            ok = store.get(IDS, model=MODEL).tokens == 30 and not put(store, [8, *IDS]).outage
            os._exit(0 if ok else 1)

        begin = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode == 0 and time.monotonic() - begin < 4
        assert store.match([8, *IDS], model=MODEL) == 31


def test_put_result_text_names_its_bytes(url: str) -> None:
    with PrefixStore(url, block_tokens=4) as store:
        assert str(put(store, IDS)).startswith("30 tokens, 30 of them new: ")
        made = put(store, [*IDS, 50, 51])
        assert (made.known_tokens, made.stored_from, made.raw_bytes) == (30, 28, 4 * 64)
        assert str(made).startswith("32 tokens, 2 of them new, stored from 28 on: 256 -> ")
        assert put(store, IDS).stored_from == 30


def take_unit(store: PrefixStore, start: int) -> None:
    """Delete the value of the unit that begins at a token, as a server does that evicts it."""
    (name,) = [make_unit_name(record.unit) for record in store._backend.list_valid_records() if record.start == start]
    store._backend.key_values.delete([name])


def test_remote_verify_names_units_the_server_took(url: str) -> None:
    texts = [IDS[:8], [*IDS[:8], *range(60, 71)], [*IDS[:8], *range(80, 90)]]
    with PrefixStore(url, block_tokens=4) as store:
        for ids in texts:
            put(store, ids)
        take_unit(store, 0)
        stats = store.stats()
        assert (stats.units, stats.tokens, store.namespaces()[0].units) == (2, 21, 2)
        listing = store.ls()
        assert {entry.key for entry in listing.texts} == {""} and listing.bytes == stats.bytes
    with PrefixStore(url, ram_bytes=0, read_only=True) as store:
        assert (len(store.verify().damaged), store.verify().lost) == (1, 2)
    with PrefixStore(url, ram_bytes=0) as store:
        checked = store.verify()
        assert (len(checked.damaged), checked.lost, checked.units, checked.label) == (1, 2, 0, None)
        assert (
            "was removed (tokens 0 to 7 of a text)" in checked.damaged[0] and "its value is gone" in checked.damaged[0]
        )
        assert store._backend.key_values.list_names("units") == store._backend.list_valid_records() == []
        assert (store.verify().damaged, str(store.verify())) == ((), "no units are stored")
        put(store, texts[1])
        assert same(store.get(texts[1], model=MODEL).layers, texts[1], 19)


def test_remote_verify_names_units_after_a_lost_record(url: str) -> None:
    """As a search leaves them that has met a unit that was taken, and a server that evicts records."""
    ids = [*IDS[:8], *range(60, 71)]
    with PrefixStore(url, block_tokens=4, ram_bytes=0) as store:
        for tokens in (8, 19):
            put(store, ids[:tokens])
        values = store._backend.key_values
        (name,) = [record.make_name(4) for record in store._backend.list_valid_records() if not record.start]
        values.delete([name])
        damaged = store.verify().damaged
        assert "tokens 8 to 18 of a text" in damaged[0] and "the unit before it is gone" in damaged[0]
        if url.startswith("redis"):  # elsewhere a put of the last hour may be about to write the record
            assert damaged[1].endswith("cannot be used: its record is gone or damaged (gc removes it)")
            assert (len(damaged), len(store.verify().damaged)) == (2, 1)
        assert store._backend.list_valid_records() == []
        store.gc()
        assert (store.verify().damaged, values.list_names("units")[1:]) == ((), [])


def test_remote_gc_names_lost_units(url: str) -> None:
    ids = [*IDS[:8], *range(60, 71)]
    with PrefixStore(url, block_tokens=4) as store:
        for tokens in (8, 19):
            put(store, ids[:tokens])
        take_unit(store, 0)
        left_bytes = store.stats().bytes
        cleaned = store.gc()
        assert (cleaned.units, cleaned.lost, cleaned.bytes) == (2, 2, left_bytes)
        assert "lost, as their bytes, their record or a unit before them was gone: 2 units" in str(cleaned)
        assert (store.gc().lost, store.stats().units) == (0, 0)


def test_remote_verify_names_states_without_their_end(url: str) -> None:
    state = [make_state(3, "recurrent_states", bytes(64), dtype="float32", shape=(4, 4))]
    with PrefixStore(url, block_tokens=4) as store:
        store.put(IDS, layers_of(IDS), model=MODEL, states=state)
        assert store.verify().states == 1
        unit_record, state_record = sorted(store._backend.list_valid_records(), key=lambda record: record.start)
        store._backend.key_values.delete([make_unit_name(unit_record.unit)])
        checked = store.verify()
        assert (len(checked.damaged), checked.lost, checked.states) == (1, 1, 0)
        store.put(IDS, layers_of(IDS), model=MODEL, states=state)
        store._backend.key_values.delete([make_unit_name(state_record.unit)])
        (note,) = store.verify().damaged
        assert "windows and state after 30 tokens of a text" in note and store.verify().units == 1
