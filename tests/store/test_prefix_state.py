"""Windows and state that are stored with a prefix, at its exact length."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from window_texts import MODEL, STATE_LAYERS, WINDOW, assert_whole, layers_of, put, states_of

from kvmnn import LayerCache
from kvmnn.errors import KvmnnError
from kvmnn.frames.buffers import integrity_checksum
from kvmnn.store import PrefixStore
from kvmnn.store.backend import UNREADABLE_LOSS

ENGINES = ("directory", "redis", "file", "memory")
SYSTEM = [*range(1000, 1200)]
CHAT = [*SYSTEM, *range(50)]
OTHER = [*SYSTEM[:130], 7, 8, 9]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"codec": "frames", "block_tokens": 16}], ids=["dense", "frames"])
def test_get_returns_the_longest_prefix_with_state(
    new_url: Callable[[str], str], engine: str, options: dict[str, object]
) -> None:
    with PrefixStore(new_url(engine), **options) as store:  # type: ignore[arg-type]
        first = put(store, SYSTEM)
        assert (first.tokens, first.known_tokens, first.stored_tokens) == (200, 0, 200)
        assert first.state_bytes and "windows and state at this length" in str(first)
        assert put(store, SYSTEM).raw_bytes == 0
        put(store, CHAT)
        assert_whole(store.get([*CHAT, 5, 6], model=MODEL), CHAT)
        assert_whole(store.get(CHAT, model=MODEL), CHAT)
        assert_whole(store.get(CHAT[:249], model=MODEL), SYSTEM)
        assert store.get(OTHER, model=MODEL).tokens == 0
        assert store.match(CHAT[:249], model=MODEL) == 200
        put(store, OTHER)
        assert_whole(store.get([*OTHER, 1], model=MODEL), OTHER)
        put(store, SYSTEM[:128])  # its rows are stored: its state alone is new
        assert_whole(store.get(SYSTEM[:140], model=MODEL), SYSTEM[:128])
        stats, verified = store.stats(), store.verify()
        assert (stats.states, verified.states, verified.damaged) == (4, 4, ())
        assert stats.bytes == verified.bytes
        assert sorted(entry.tokens for entry in store.ls().texts) == [128, 133, 200, 250]
        assert all(entry.is_complete for entry in store.ls().texts)
        assert {tuple(entry.last_ids) for entry in store.ls().texts if entry.tokens == 250} == {tuple(CHAT[-8:])}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_ls_counts_bytes_of_windows_and_state(new_url: Callable[[str], str], engine: str, block_tokens: int) -> None:
    long = [*range(5000, 6300)]  # several units, and a second text that leaves the first half-way in one
    with PrefixStore(new_url(engine), block_tokens=block_tokens) as store:
        first, other = put(store, long), put(store, OTHER)
        branch = put(store, [*long[:700], *range(50)])
        listing = store.ls()
        rows = {entry.tokens: entry.bytes for entry in listing.texts}
        assert (rows[1300], rows[133]) == (first.stored_bytes, other.stored_bytes)
        assert branch.stored_bytes < rows[750] < branch.stored_bytes + first.stored_bytes
        assert listing.bytes == listing.to_dict()["bytes"] == store.stats().bytes < sum(rows.values())
        assert f"\n3 texts, {listing.bytes:,} bytes in all (the rows have {sum(rows.values()):,}" in str(listing)
        put(store, long[:640])  # its rows are stored: its state alone is new
        sizes = {entry.tokens: entry.bytes for entry in store.ls().texts}
        assert sizes[640] < sizes[1300] == first.stored_bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_get_partial_returns_full_layers_and_notes_missing(new_url: Callable[[str], str], engine: str) -> None:
    with PrefixStore(new_url(engine)) as store:
        put(store, SYSTEM)
        found = store.get(OTHER, model=MODEL, partial=True)
        assert (found.tokens, found.is_complete, found.states) == (130, False, ())
        assert found.missing == (
            "2 of 6 layers have a window and are not stored at the length of 130 tokens",
            "2 of 6 layers have recurrent or convolution state and are not stored at the length of 130 tokens",
        )
        assert [cache.layer for cache in found.layers] == [0, 3]
        wanted = layers_of(OTHER)
        assert found.layers[1].keys.tobytes() == wanted[3].keys[:, :130].tobytes()
        assert_whole(store.get(SYSTEM, model=MODEL, partial=True), SYSTEM)


@pytest.mark.parametrize("engine", ["directory", "redis", "memory"])
def test_delete_and_gc_treat_state_like_its_text(new_url: Callable[[str], str], engine: str) -> None:
    with PrefixStore(new_url(engine)) as store:
        put(store, SYSTEM)
        put(store, CHAT)
        store.pin(SYSTEM, model=MODEL)
        store.gc(max_bytes=0)
        assert store.get(CHAT, model=MODEL).tokens == 200
        assert_whole(store.get(SYSTEM, model=MODEL), SYSTEM)
        assert store.delete(SYSTEM, model=MODEL).kept == "it is pinned"
        with pytest.raises(KvmnnError, match="holds 200 tokens of this text of 250"):
            store.delete(CHAT, model=MODEL)
        store.unpin(SYSTEM, model=MODEL)
        put(store, CHAT)
        gone = store.delete(CHAT, model=MODEL)
        assert gone.units >= 1 and gone.bytes > 0
        assert_whole(store.get(CHAT, model=MODEL), SYSTEM)
        store.delete(SYSTEM, model=MODEL)
        assert store.stats().units == store.stats().states == 0
        assert store.stats().bytes == 0


@pytest.mark.parametrize("engine", ["directory", "redis", "memory"])
def test_gc_max_bytes_keeps_whole_prefixes(new_url: Callable[[str], str], engine: str) -> None:
    with PrefixStore(new_url(engine)) as store:
        texts = [[*range(begin, begin + 100)] for begin in range(0, 3000, 300)]
        for ids in texts:
            put(store, ids)
        whole = store.stats().bytes
        store.gc(max_bytes=whole // 2)
        store.gc()
        assert store.stats().bytes <= whole // 2
        kept = 0
        for ids in texts:
            found = store.get(ids, model=MODEL)
            assert found.tokens in (0, 100)
            if found.tokens:
                assert_whole(found, ids)
                kept += 1
        assert kept >= 3
        assert store.verify().damaged == ()


@pytest.mark.parametrize("engine", ["directory", "redis"])
@pytest.mark.parametrize("place", [0.02, 0.3, 0.6, 0.99])
def test_get_damaged_state_returns_a_shorter_prefix(new_url: Callable[[str], str], engine: str, place: float) -> None:
    url = new_url(engine)
    with PrefixStore(url) as store:
        put(store, SYSTEM)
        put(store, CHAT)
        assert store.close() is None
    _flip(url, place)
    with PrefixStore(url) as store:
        found = store.get(CHAT, model=MODEL)
        assert len(found.notes) == 1 and "damaged, was removed" in found.notes[0]
        assert_whole(found, SYSTEM)
        assert store.verify().damaged == ()
        put(store, CHAT)
        assert_whole(store.get(CHAT, model=MODEL), CHAT)
    _flip(url, place)
    with PrefixStore(url) as store:
        verified = store.verify()
        assert len(verified.damaged) == 1 and verified.states == 1
        assert store.verify().damaged == ()


def _flip(url: str, place: float) -> None:
    """Change a byte of the newest state."""
    if url.startswith("redis"):
        import redis

        with redis.Redis.from_url(url) as client:
            keys = [key for key in client.scan_iter(match="kvmnn:units/*") if client.get(key)[:8] == b"KVMNNPS1"]
            key = max(keys, key=lambda each: int.from_bytes(client.get(each)[8:12], "little"))
            client.set(key, _flipped(client.get(key), place))
        return
    files = [path for path in Path(url).glob("units/*/*.unit") if path.read_bytes()[:8] == b"KVMNNPS1"]
    newest = max(files, key=lambda path: path.stem)
    newest.write_bytes(_flipped(newest.read_bytes(), place))


def _flipped(data: bytes, place: float) -> bytes:
    at = 8 + int((len(data) - 8) * place)
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize("block_tokens", [1, 16, 64])
def test_rebuild_index_finds_state(tmp_path: Path, block_tokens: int) -> None:
    texts = ([1, 2, 3], SYSTEM[:64], SYSTEM, CHAT, OTHER)
    with PrefixStore(tmp_path / "s", block_tokens=block_tokens) as store:
        for ids in texts:
            put(store, ids)
        store.pin(SYSTEM, model=MODEL)
        before = store.stats()
    for path in (tmp_path / "s").glob("index*"):
        path.unlink()
    with PrefixStore(tmp_path / "s") as store:
        assert store.notes
        for ids in texts:
            assert_whole(store.get(ids, model=MODEL), ids)
        after = store.stats()
        assert (after.states, after.bytes, after.pinned) == (before.states, before.bytes, 1)
        assert store.verify().damaged == ()
        store.gc(max_bytes=0)
        assert_whole(store.get(CHAT, model=MODEL), SYSTEM)


@pytest.mark.parametrize("engine", ["directory", "memory"])
def test_put_windows_with_every_token_are_full_layers(new_url: Callable[[str], str], engine: str) -> None:
    """What is stored of a text that is shorter than the window is complete for each of its beginnings."""
    short = SYSTEM[:WINDOW]
    with PrefixStore(new_url(engine)) as store:
        layers = layers_of(short, windows=())
        store.put(short, layers, model=MODEL, windows=(1, 2))
        assert store.get(short[:5], model=MODEL).tokens == 5
        long = [
            LayerCache(layer=each.layer, keys=each.keys, values=each.values) for each in layers_of(CHAT, windows=())
        ]
        cut = [
            each
            if each.layer not in (1, 2)
            else LayerCache(
                layer=each.layer,
                keys=each.keys[:, -WINDOW:],
                values=each.values[:, -WINDOW:],
                positions=np.arange(len(CHAT) - WINDOW, len(CHAT)),
                tokens_seen=len(CHAT),
            )
            for each in long
        ]
        store.put(CHAT, cut, model=MODEL, windows=(1, 2))
        assert store.get(CHAT, model=MODEL).tokens == len(CHAT)
        assert store.get(SYSTEM, model=MODEL).tokens == WINDOW


@pytest.mark.parametrize("windows", [range(1, 3), range(4)], ids=["some layers", "all layers"])
def test_get_loss_of_windows_outlives_its_record(tmp_path: Path, windows: range) -> None:
    with PrefixStore(tmp_path) as store:
        store.put(SYSTEM, layers_of(SYSTEM, windows=windows), model=MODEL, windows=windows)
        assert store.get(SYSTEM, model=MODEL).label is None
        store.put(CHAT, layers_of(CHAT, windows=windows), model=MODEL, windows=windows, loss="cast: fp32 to fp16")
        assert store.get(CHAT, model=MODEL).loss == "cast: fp32 to fp16"
        assert store.get(SYSTEM, model=MODEL).label is None  # put before, and exact
        for record in tmp_path.glob("spaces/*.loss"):
            record.unlink()
        assert store.get(CHAT, model=MODEL).loss == store.get_by_layer(CHAT, model=MODEL).loss == UNREADABLE_LOSS


@pytest.mark.parametrize("engine", ["directory", "redis"])
def test_get_model_without_full_attention_needs_exact_length(new_url: Callable[[str], str], engine: str) -> None:
    with PrefixStore(new_url(engine)) as store:
        for ids in (SYSTEM, CHAT):
            store.put(ids, layers_of(ids, windows=range(4)), model=MODEL, windows=range(4))
            store.put(ids, [], model="state alone", states=states_of(ids))
        found = store.get(CHAT[:-1], model=MODEL)
        assert_whole(found, SYSTEM, states=False, windows=range(4))
        found = store.get([*CHAT, 4], model="state alone")
        assert (found.tokens, found.layers, len(found.states)) == (250, [], 2 * len(STATE_LAYERS))
        assert store.models == (MODEL, "state alone")
        assert store.verify().states == 4
        store.gc()
        store.delete(CHAT, model="state alone")
        assert store.get(CHAT, model="state alone").tokens == 200


def test_put_other_shapes_or_windows_are_refused(tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s") as store:
        put(store, SYSTEM)
        with pytest.raises(KvmnnError, match="under the model a hybrid model it holds"):
            store.put(CHAT, layers_of(CHAT), model=MODEL, windows=(1, 2), states=states_of(CHAT)[:-1])
        with pytest.raises(KvmnnError, match="layer 1 has a window that ends after 250 tokens, there are 249"):
            layers = [*layers_of(CHAT[:-1])[:1], *layers_of(CHAT)[1:3], *layers_of(CHAT[:-1])[3:]]
            store.put(CHAT[:-1], layers, model=MODEL, windows=(1, 2))
        with pytest.raises(KvmnnError, match="layer 1 holds 8 tokens, there are 250"):
            store.put(CHAT, layers_of(CHAT), model=MODEL)
        with pytest.raises(KvmnnError, match="has windows or state, which the file of export has no place for"):
            store.export(SYSTEM, tmp_path / "one", model=MODEL)


def test_park_and_resume_keep_state(tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s") as store:
        store.park("a", CHAT, layers_of(CHAT), model=MODEL, windows=(1, 2), states=states_of(CHAT))
        assert_whole(store.resume("a").prefix, CHAT)


@pytest.mark.parametrize("engine", ["directory", "redis"])
def test_put_max_bytes_evicts_whole_prefixes(new_url: Callable[[str], str], engine: str) -> None:
    with PrefixStore(new_url(engine), max_bytes=40_000) as store:
        for begin in range(0, 6000, 300):
            ids = [*range(begin, begin + 120)]
            assert put(store, ids).stored_tokens == 120
            assert_whole(store.get(ids, model=MODEL), ids)
        assert store.stats().bytes <= 40_000
        assert store.verify().damaged == ()


def _states_of(folder: Path) -> list[Path]:
    return [path for path in folder.glob("units/*/*.unit") if path.read_bytes()[:8] == b"KVMNNPS1"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("windows", [8]),
        ("windows", [9, 8]),
        ("windows", [1 << 40, 8]),
        ("windows", ["8", 8]),
        ("windows", None),
        ("states", []),
        ("states", [{"dtype": "bytes", "shape": [1], "bytes": 1 << 29}] * 4),
        ("states", [{"dtype": "bytes", "shape": [1], "bytes": 1 << 62}] * 4),
        ("states", [{"dtype": "x" * 999, "shape": [1], "bytes": 96}] * 4),
        ("raw_bytes", -1),
    ],
)
def test_get_forged_state_document_is_a_miss(tmp_path: Path, key: str, value: object) -> None:
    """Its checksum matches, as that of a forger would."""
    with PrefixStore(tmp_path / "s") as store:
        put(store, SYSTEM)
        put(store, CHAT)
    path = max(_states_of(tmp_path / "s"), key=lambda each: each.stem)
    data = path.read_bytes()
    _, _, ids, size, pieces = struct.unpack_from("<8sIIII", data)
    begin, end = 56 + 4 * ids, 56 + 4 * ids + size
    document = json.dumps(json.loads(data[begin:end]) | {key: value}).encode()
    rows_end = end + 24 * pieces
    head = bytearray(data[:begin] + document + data[end:rows_end])
    struct.pack_into("<I", head, 16, len(document))
    path.write_bytes(head + struct.pack("<Q", integrity_checksum(bytes(head))) + data[rows_end + 8 :])
    with PrefixStore(tmp_path / "s") as store:
        found = store.get(CHAT, model=MODEL)
        assert len(found.notes) == 1 and "damaged, was removed" in found.notes[0]
        assert_whole(found, SYSTEM)


@pytest.mark.parametrize("engine", ["directory", "redis"])
def test_get_exchanged_state_is_a_miss(new_url: Callable[[str], str], engine: str) -> None:
    """Two states whose files were exchanged: each is whole, and of other tokens."""
    url = new_url(engine)
    with PrefixStore(url) as store:
        put(store, CHAT)
        put(store, [*SYSTEM, *range(70, 120)])
    if engine == "redis":
        import redis

        with redis.Redis.from_url(url) as client:
            keys = [key for key in client.scan_iter(match="kvmnn:units/*") if client.get(key)[:8] == b"KVMNNPS1"]
            one, other = map(client.get, keys)
            client.set(keys[0], other)
            client.set(keys[1], one)
    else:
        first, second = _states_of(Path(url))
        one, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(one)
    with PrefixStore(url) as store:
        found = store.get(CHAT, model=MODEL)
        assert found.tokens == 0 and "is of another prefix than the index says" in found.notes[0]
        assert len(store.verify().damaged) == 1


def test_namespace_without_windows_has_the_older_form(tmp_path: Path) -> None:
    """A text of full attention alone leaves the same rows and documents as ever."""
    ids = SYSTEM
    with PrefixStore(tmp_path / "s") as store:
        store.put(ids, layers_of(ids, windows=()), model=MODEL)
    with closing(sqlite3.connect(tmp_path / "s" / "index.sqlite")) as index:
        ((document,),) = index.execute("SELECT document FROM space").fetchall()
        assert index.execute("SELECT count(*) FROM unit WHERE tokens = 0").fetchone() == (0,)
    assert json.loads(document).keys() == {"model", "dtype", "layers"}
    assert not _states_of(tmp_path / "s")
