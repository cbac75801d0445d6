"""Encrypted stores: refusals, what can be read without the key, values in wrong places; vectors of another program."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encrypted_stores import KEY
from prefixes import DIMS, HEADS, MODEL, agreeing, layers_of, same
from repository import DOCS

from kvmnn import KvmnnError
from kvmnn.arrays.opaque_state import make_state
from kvmnn.errors import MissingDependencyError, MissingFileError, OptionError, SourceError
from kvmnn.store import PrefixStore, StoreKey, load_key, read_exported
from kvmnn.store.backend import StoreSettings, encode_settings
from kvmnn.store.directory.files import RecoveryFiles
from kvmnn.store.encryption import AeadCipher, UnsealError, Xaes256Gcm, make_cipher, read_key
from kvmnn.store.namespace import build_namespace, to_token_ids

pytest.importorskip("cryptography")
pytest.importorskip("fsspec")

OTHER_KEY = bytes(range(1, 33))
IDS = [70_000 + 257 * number for number in range(150)]
"""Ids whose bytes occur nowhere by chance."""
OTHER = [*IDS[:100], *range(90_000, 90_030)]
SECRETS = ("a model", "my label", "tenant-x", "a chat")
LAYERS = [[0, HEADS, DIMS], [1, HEADS, DIMS]]


@pytest.fixture(params=["directory", "redis", "file", "memory"])
def url(request: pytest.FixtureRequest, new_url: Callable[[str], str]) -> str:
    return new_url(request.param)


def fill(url: str | Path, **options: Any) -> None:
    with PrefixStore(url, key=KEY, namespace="tenant-x", **options) as store:
        store.put(IDS, layers_of(IDS), model=MODEL, label="my label")
        store.put(OTHER, layers_of(OTHER), model=MODEL)
        store.park("a chat", IDS, layers_of(IDS), model=MODEL)
        store.pin(OTHER, model=MODEL)


def stored_bytes(url: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of all that a store consists of."""
    if url.startswith("redis"):
        import redis

        with redis.Redis.from_url(url) as client:
            for key in client.scan_iter():
                kind = client.type(key)
                name = key.decode()
                if kind == b"string":
                    yield name, client.get(key)
                elif kind == b"hash":
                    for field, value in client.hgetall(key).items():
                        yield f"{name}/{field.decode()}", value
                else:
                    yield name, b"".join(client.zrange(key, 0, -1))
    elif url.startswith("memory"):
        import fsspec

        fs, root = fsspec.core.url_to_fs(url)
        for path in fs.find(root):
            yield path, fs.cat_file(path)
    else:
        for path in Path(url.removeprefix("file://")).rglob("*"):
            if path.is_file():
                yield str(path), path.read_bytes()


def test_put_stores_nothing_that_can_be_read(url: str) -> None:
    fill(url)
    rows = b"".join(part.tobytes() for cache in layers_of(IDS) for part in (cache.keys, cache.values))
    wanted = [word.encode() for word in (*SECRETS, "KVMNNPU", "KVMNNPT", "KVMNNPB1", '"layers"')]
    wanted += [np.array(IDS[at : at + 2], kind).tobytes() for at in (0, 64, 148) for kind in ("<u4", ">u4")]
    wanted += [b"".join(one.to_bytes(3, "big") for one in IDS[at : at + 2]) for at in (0, 64, 148)]
    wanted += [rows[at : at + 32] for at in range(0, len(rows), 4096)]
    wanted += [word.hex().encode() for word in wanted]
    for name, data in stored_bytes(url):
        for word in wanted:
            assert word not in data, (name, word)
            assert word not in name.rpartition("/store")[2].encode(), (name, word)


def test_plain_store_can_be_read(tmp_path: Path) -> None:
    """The search above finds what is there."""
    with PrefixStore(tmp_path / "s", namespace="tenant-x") as store:
        store.put(IDS, layers_of(IDS), model=MODEL, label="my label")
        store.park("a chat", IDS, layers_of(IDS), model=MODEL)
    data = b"".join(data for _, data in stored_bytes(str(tmp_path / "s")))
    assert all(word.encode() in data for word in (*SECRETS, "KVMNNPU"))


def test_encrypted_store_supports_all_calls(url: str, tmp_path: Path) -> None:
    fill(url)
    with PrefixStore(url, key=StoreKey(KEY, "a test"), namespace="tenant-x", create=False) as store:
        assert store.match(IDS, model=MODEL) == store.find(IDS, model=MODEL).tokens == 150
        asked = [*IDS[:77], 5]
        assert same(store.get(asked, model=MODEL).layers, asked, 77)
        assert same(list(store.get_by_layer(OTHER, model=MODEL).layers), OTHER, 130)
        by_label = {entry.label: entry for entry in store.ls().texts}
        assert sorted((entry.tokens, entry.pinned) for entry in by_label.values()) == [(130, True), (150, False)]
        assert store.resolve("my label").ids.tolist() == IDS
        assert store.resolve(by_label["my label"].key[:8]).ids.tolist() == IDS
        assert store.describe(IDS, model=MODEL) == by_label["my label"]
        assert store.sessions() == ["a chat"]
        assert store.resume("a chat").token_ids == IDS
        stats = store.stats()
        assert (stats.texts, stats.pinned, stats.sessions, store.models) == (2, 1, 1, (MODEL,))
        assert stats.is_encrypted and "\n  encrypted\n" in str(stats)
        verified = store.verify()
        assert (verified.damaged, verified.damaged_files, verified.rebuilt_parts, verified.lost) == ((), (), (), 0)
        assert verified.bytes == stats.bytes
        store.export(IDS, tmp_path / "text", model=MODEL)
        store.forget("a chat")
        assert store.unpin(OTHER, model=MODEL).was_pinned
        assert store.delete(OTHER, model=MODEL).units > 0
        assert store.match(OTHER, model=MODEL) == 100
        assert store.gc().foreign == ()
        store.gc(0)
        assert (store.ls().texts, store.sessions()) == ((), [])
        assert store.import_file(tmp_path / "text").stored_tokens == 150
        assert same(store.get(IDS, model=MODEL).layers, IDS, 150)


@pytest.mark.parametrize("fixed", [1, 4, 64])
def test_random_texts_match_to_the_token(tmp_path: Path, fixed: int) -> None:
    """As in a store without a key: ids in the index are masked, their common beginnings are not."""
    rng = random.Random(fixed)
    texts = [[rng.choice((0, 1, 2**32 - 1)) for _ in range(rng.randrange(1, 40))] for _ in range(16)]
    with (
        PrefixStore(tmp_path / "a", block_tokens=fixed, codec="frames", key=KEY) as sealed,
        PrefixStore(tmp_path / "b", block_tokens=fixed, codec="frames") as plain,
    ):
        for ids in texts:
            for store in (sealed, plain):
                store.put(ids, layers_of(ids), model=MODEL)
            for asked in rng.choices(texts, k=10):
                assert sealed.match(asked, model=MODEL) == plain.match(asked, model=MODEL)
        assert sealed.stats().blocks == plain.stats().blocks
        assert sealed.verify().damaged == ()


@pytest.mark.slow
def test_random_operations_never_cross_namespaces(tmp_path: Path) -> None:
    """8,400 look-ups between random puts, deletions and evictions, with quotas; each by the query of `get`."""
    rng = random.Random(44)
    tenants = ["a", "b", "c", None]
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 40))] for _ in range(60)]
    common = np.array([[agreeing(one, other) for other in texts] for one in texts])
    options = {"block_tokens": 8, "codec": "frames", "key": KEY}
    stores = {tenant: PrefixStore(tmp_path, namespace=tenant, quota=200_000, **options) for tenant in tenants}
    secret = stores[None]._backend.cipher.secret
    spaces = {tenant: build_namespace(layers_of([0]), MODEL, tenant=tenant or "", secret=secret) for tenant in tenants}
    asked = {tenant: [space.make_sequence(to_token_ids(ids), 8) for ids in texts] for tenant, space in spaces.items()}
    stored = {tenant: np.zeros(60, bool) for tenant in tenants}
    lookups = hits = 0
    for step in range(420):
        tenant, number = rng.choice(tenants), rng.randrange(len(texts))
        store, ids = stores[tenant], texts[number]
        if rng.random() < 0.6:
            store.put(ids, layers_of(ids, seed=repr(tenant).encode()), model=MODEL)
            stored[tenant][number] = True
        elif store.match(ids, model=MODEL) == len(ids):
            store.delete(ids, model=MODEL)
            stored[tenant] &= np.array([text != ids for text in texts])
        if step % 40 == 39:
            stores[None].gc(60_000)
        found = store.get(ids, model=MODEL)
        assert same(found.layers, ids, found.tokens, seed=repr(tenant).encode()) or not found.tokens
        if step % 12:  # all of them are looked up after every twelfth operation
            continue
        with stores[None]._backend.index.begin_reading() as cursor:
            lookup = stores[None]._backend.make_lookup(cursor)
            lookup = replace(lookup, read_header=cache(lookup.read_header))
            for other, sequences in asked.items():
                possible = np.where(stored[other], common, 0).max(axis=1)
                for sequence, most in zip(sequences, possible, strict=True):
                    tokens = lookup.find_prefix(sequence).tokens
                    assert tokens <= most
                    lookups += 1
                    hits += tokens > 0
    assert (lookups, hits > lookups // 4) == (8_400, True)
    assert stores[None].verify().damaged == ()
    for opened in stores.values():
        opened.close()


def test_get_any_changed_byte_is_a_noted_miss(tmp_path: Path) -> None:
    """Of a sealed unit; the texts before it are found."""
    folder, ids = tmp_path / "s", list(range(11))
    with PrefixStore(folder, key=KEY, block_tokens=4) as store:
        store.put(ids[:4], layers_of(ids[:4]), model=MODEL)
        store.put(ids, layers_of(ids), model=MODEL)
    (_, file) = sorted(folder.glob("units/*/*"))
    good = file.read_bytes()
    with PrefixStore(folder, key=KEY, read_only=True) as store:
        for at in range(0, len(good), 5):
            file.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            found = store.get(ids, model=MODEL)
            assert (found.tokens, same(found.layers, ids, 4)) == (4, True)
            assert "does not decrypt" in found.notes[0]
            store._backend._damaged_units.clear()
        file.write_bytes(good)
        assert same(store.get(ids, model=MODEL).layers, ids, 11)


@pytest.mark.parametrize("engine", ["directory", "file"])
def test_get_damaged_sealed_unit_says_which_damage(new_url: Callable[[str], str], engine: str) -> None:
    """A changed unit does not decrypt; an empty file of a directory has 0 bytes."""
    url, ids = new_url(engine), range(8)
    with PrefixStore(url, key=KEY, block_tokens=4) as store:
        store.put(ids, layers_of(ids), model=MODEL)
    (file,) = (path for path in Path(url.removeprefix("file://")).glob("units/**/*") if path.is_file())
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    for data, reason in ((bytes(changed), "does not decrypt"), (b"", "has 0 bytes: too few for a header")):
        file.write_bytes(data)
        with PrefixStore(url, key=KEY, read_only=True) as store:
            (note,) = store.get(ids, model=MODEL).notes
        assert note.endswith(reason if engine == "directory" else ": does not decrypt")


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_open_wrong_key_is_refused(url: str) -> None:
    fill(url)
    before = sorted(stored_bytes(url))
    for key, message in (
        (OTHER_KEY, r"is encrypted with another key than that of key="),
        (StoreKey(OTHER_KEY, "/run/key"), r"is encrypted with another key than that of /run/key"),
        (None, r"is encrypted: its key is needed \(--key-file FILE, or KVMNN_STORE_KEY\)"),
    ):
        for options in ({}, {"read_only": True}, {"create": False}):
            with pytest.raises(OptionError, match=re.escape(url) + ".*" + message) as raised:
                PrefixStore(url, key=key, **options)
            assert OTHER_KEY.hex() not in str(raised.value)
    if url.startswith(("file", "redis")):  # SQLite changes its own files
        assert sorted(stored_bytes(url)) == before
    with PrefixStore(url, key=KEY, namespace="tenant-x") as store:
        assert store.match(IDS, model=MODEL) == 150


def test_open_plain_store_with_key_is_refused(url: str) -> None:
    with PrefixStore(url) as store:
        store.put(IDS, layers_of(IDS), model=MODEL)
    for options in ({}, {"read_only": True}):
        with pytest.raises(OptionError, match=r"is not encrypted, and there is a key \(key=\): leave it out"):
            PrefixStore(url, key=KEY, **options)
    with PrefixStore(url) as store:
        assert store.match(IDS, model=MODEL) == 150


@pytest.mark.parametrize("settings", [None, b"", b"{"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_open_lost_settings_needs_the_same_key(tmp_path: Path, settings: bytes | None, is_sealed: bool) -> None:
    """What is stored says whether it is encrypted, and the settings are written again."""
    folder, right = tmp_path / "s", KEY if is_sealed else None
    with PrefixStore(folder, key=right) as store:
        store.put(IDS, layers_of(IDS), model=MODEL)
    before = (folder / "store.json").read_text()
    (folder / "store.json").unlink()
    if settings is not None:
        (folder / "store.json").write_bytes(settings)
    for wrong in {KEY, OTHER_KEY, None} - {right}:
        with pytest.raises(OptionError, match="encrypted"):
            PrefixStore(folder, key=wrong)
    with PrefixStore(folder, key=right) as store:
        assert same(store.get(IDS, model=MODEL).layers, IDS, 150)
    after = (folder / "store.json").read_text()
    assert ("encryption" in after) == is_sealed
    assert after == before


PLAIN_SETTINGS = '{"schema":"kvmnn-store","schema_version":1,"block_tokens":64,"codec":"dense"}'


def read_all(folder: Path) -> list[tuple[str, bytes]]:
    """What a store consists of, without the files that SQLite changes when it opens an index."""
    return sorted((name, data) for name, data in stored_bytes(str(folder)) if not name.endswith(("-wal", "-shm")))


@pytest.mark.parametrize("others_key", [None, OTHER_KEY], ids=["plain", "other key"])
def test_open_settings_of_another_store_keeps_encrypted_store(tmp_path: Path, others_key: bytes | None) -> None:
    """What is stored says what the key is: nothing is made again or removed without it; with it the file is."""
    folder, other = tmp_path / "s", tmp_path / "other"
    fill(folder)
    with PrefixStore(other, key=others_key) as store:
        store.put(OTHER, layers_of(OTHER), model=MODEL)
    own_settings = (folder / "store.json").read_bytes()
    (folder / "store.json").write_bytes((other / "store.json").read_bytes())
    before = read_all(folder)
    for key, message in ((None, "is encrypted: its key is needed"), (OTHER_KEY, "is encrypted with another key")):
        for options in ({}, {"read_only": True}, {"create": False}):
            with pytest.raises(OptionError, match=message):
                PrefixStore(folder, key=key, **options)
    assert read_all(folder) == before
    with PrefixStore(folder, key=KEY, namespace="tenant-x") as store:
        assert "store.json: says that the store is " in (note := store._backend.notes[0]), note
        assert same(store.get(IDS, model=MODEL).layers, IDS, 150)
        assert (store.stats().pinned, store.sessions(), store.gc().units) == (1, ["a chat"], 0)
    assert (folder / "store.json").read_bytes() == own_settings


def test_open_settings_of_encrypted_store_keeps_plain_store(tmp_path: Path) -> None:
    folder, sealed = tmp_path / "s", tmp_path / "sealed"
    fill(sealed)
    with PrefixStore(folder) as store:
        store.put(IDS, layers_of(IDS), model=MODEL)
        store.pin(IDS, model=MODEL)
    (folder / "store.json").write_bytes((sealed / "store.json").read_bytes())
    before = read_all(folder)
    for key in (None, KEY, OTHER_KEY):
        for options in ({}, {"read_only": True}, {"create": False}):
            with pytest.raises(OptionError, match=r"says that the store is encrypted, and its units are not"):
                PrefixStore(folder, key=key, **options)
    assert read_all(folder) == before
    (folder / "store.json").unlink()  # as the message advises
    with PrefixStore(folder) as store:
        assert same(store.get(IDS, model=MODEL).layers, IDS, 150)
        assert store.stats().pinned == 1


def test_gc_without_any_readable_unit_removes_nothing(tmp_path: Path) -> None:
    folder, sealed = tmp_path / "s", tmp_path / "sealed"
    fill(sealed)
    with PrefixStore(folder) as store:
        shutil.copytree(sealed / "units", folder / "units")
        before = read_all(folder / "units")
        with pytest.raises(SourceError, match=r"can be read as a unit of this store, .*: nothing is removed"):
            store.gc()
        assert before == read_all(folder / "units") != []


@pytest.mark.parametrize("kind", ["redis", "file"])
@pytest.mark.parametrize("others_key", [None, OTHER_KEY], ids=["plain", "other key"])
def test_open_remote_settings_of_another_store_keeps_encrypted_store(
    kind: str, others_key: bytes | None, new_url: Callable[[str], str]
) -> None:
    """No put without the key adds anything that can be read; with the key the document is made again."""
    url = new_url(kind)
    fill(url)
    others = encode_settings(StoreSettings(64, "dense", key_check=make_cipher(others_key).key_check))
    with PrefixStore(url, key=KEY) as store:
        key_values = store._backend.key_values
        (own_settings,) = key_values.get_many(["store/about"])
        key_values.put_many({"store/about": others})
    before = sorted(stored_bytes(url))
    for key, message in ((None, "is encrypted: its key is needed"), (OTHER_KEY, "is encrypted with another key")):
        for options in ({}, {"read_only": True}, {"create": False}):
            with pytest.raises(OptionError, match=message):
                PrefixStore(url, key=key, **options)
    assert sorted(stored_bytes(url)) == before
    with PrefixStore(url, key=KEY, namespace="tenant-x") as store:
        assert "store/about: says that the store is " in store.notes[0]
        assert same(store.get(IDS, model=MODEL).layers, IDS, 150)
        assert (store.stats().pinned, store.sessions(), store.gc().units) == (1, ["a chat"], 0)
        assert store._backend.key_values.get_many(["store/about"]) == [own_settings]


def test_open_remote_store_without_settings_and_namespaces_needs_its_key(new_url: Callable[[str], str]) -> None:
    """Redis may evict both: units say that the store is encrypted."""
    url = new_url("redis")
    fill(url)
    with PrefixStore(url, key=KEY) as store:
        key_values = store._backend.key_values
        key_values.delete(["store/about", *(f"spaces/{name}" for name in key_values.list_names("spaces"))])
    with pytest.raises(OptionError, match="is encrypted: its key is needed"):
        PrefixStore(url)


@pytest.mark.parametrize("kind", ["redis", "file"])
def test_open_remote_settings_of_encrypted_store_keeps_plain_store(kind: str, new_url: Callable[[str], str]) -> None:
    url = new_url(kind)
    with PrefixStore(url) as store:
        store.put(IDS, layers_of(IDS), model=MODEL)
        key_values = store._backend.key_values
        sealed = encode_settings(StoreSettings(64, "dense", key_check=make_cipher(KEY).key_check))
        key_values.put_many({"store/about": sealed})
        for key in (None, KEY):
            with pytest.raises(
                OptionError, match="store/about: says that the store is encrypted, and its values are not"
            ):
                PrefixStore(url, key=key)
        key_values.delete(["store/about"])  # as the message advises
    with PrefixStore(url) as store:
        assert same(store.get(IDS, model=MODEL).layers, IDS, 150)


def test_open_reads_each_namespace_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "s")
    calls, real = [], RecoveryFiles._iter_samples
    monkeypatch.setattr(RecoveryFiles, "_iter_samples", lambda files: calls.append(files) or real(files))
    PrefixStore(tmp_path / "s", key=KEY).close()
    assert len(calls) == 1


def test_open_unknown_cipher_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    settings = (tmp_path / "store.json").read_text()
    (tmp_path / "store.json").write_text(settings.replace("XAES-256-GCM", "ROT13"))
    with pytest.raises(SourceError, match=r"store\.json: encryption\.cipher"):
        PrefixStore(tmp_path, key=KEY)


def test_create_at_once_by_two_keys_makes_one_store(tmp_path: Path) -> None:
    program = (
        "import sys; from kvmnn.store import PrefixStore\n"
        "input()\n"
        "try: PrefixStore(sys.argv[1], key=bytes([int(sys.argv[2])]) * 32).close(); print('made')\n"
        "except Exception as error: print(error)\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "s"), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    answers = sorted(child.communicate(timeout=60)[0].strip() for child in children)
    assert answers.count("made") == 1, answers
    assert "with another key than that of key=" in answers[0]


# -- damage and exchange ----------------------------------------------------------------------------------------------


def test_get_exchanged_values_are_no_wrong_hit(tmp_path: Path) -> None:
    """Each two files of one kind change places: nothing wrong is returned, and what is left can be read."""
    texts = [list(range(at, at + 9)) for at in range(0, 60, 20)]
    first = tmp_path / "first"
    with PrefixStore(first, key=KEY, block_tokens=4) as store:
        for ids in texts:
            store.put(ids, layers_of(ids), model=MODEL, label=f"label {ids[0]}")
            store.park(f"chat {ids[0]}", ids, layers_of(ids), model=MODEL)
    kinds = ("units/*/*", "texts/*.session", "texts/*.label")
    pairs = [pair for kind in kinds for pair in itertools.combinations(sorted(first.glob(kind)), 2)]
    assert len(pairs) == 9
    for one, other in pairs:
        data, other_data = one.read_bytes(), other.read_bytes()
        one.write_bytes(other_data)
        other.write_bytes(data)
        with PrefixStore(first, key=KEY, read_only=True) as store:
            for ids in texts:
                found = store.get(ids, model=MODEL)
                assert found.tokens in (0, 9)
                assert found.tokens == 0 or same(found.layers, ids, 9)
                if one.suffix != ".unit":
                    assert found.tokens == 9
            labels = {entry.label for entry in store.ls().texts} - {""}
            if one.suffix != ".unit":
                assert all(store.resolve(label).ids[0] == int(label.split()[1]) for label in labels)
            if one.suffix == ".label":
                assert len(labels) == 1
        one.write_bytes(data)
        other.write_bytes(other_data)


def test_remote_exchanged_values_are_no_wrong_hit(new_url: Callable[[str], str]) -> None:
    url = new_url("file")
    texts = [list(range(at, at + 9)) for at in range(0, 40, 20)]
    with PrefixStore(url, key=KEY, block_tokens=4) as store:
        for ids in texts:
            store.put(ids, layers_of(ids), model=MODEL, label=f"label {ids[0]}")
            store.park(f"chat {ids[0]}", ids, layers_of(ids), model=MODEL)
            store.pin(ids, model=MODEL)
    root = Path(url.removeprefix("file://"))
    for folder in ("units", "sessions", "labels", "pins", "after-*"):
        one, other = sorted(root.glob(f"{folder}/*"))
        data, other_data = one.read_bytes(), other.read_bytes()
        one.write_bytes(other_data)
        other.write_bytes(data)
        with PrefixStore(url, key=KEY, read_only=True) as store:
            for ids in texts:
                found = store.get(ids, model=MODEL)
                if folder in ("units", "after-*"):
                    assert found.tokens == 0
                if folder == "units":
                    assert "damaged, is passed over, with what goes on from it: does not decrypt" in str(found.notes)
                if folder == "sessions":
                    with pytest.raises(KvmnnError, match="session 'chat"):
                        store.resume(f"chat {ids[0]}")
            if folder == "labels":
                assert {entry.label for entry in store.ls().texts} == {""}
        one.write_bytes(data)
        other.write_bytes(other_data)


def test_unseal_any_changed_byte_is_detected() -> None:
    cipher = AeadCipher(StoreKey(KEY))
    pieces = [b"a head", b"and", np.arange(5, dtype=np.uint8), b""]
    data = b"".join(bytes(piece) for piece in cipher.seal_pieces(pieces, "a name"))
    plain = b"".join(bytes(piece) for piece in pieces)
    assert cipher.unseal_array(np.frombuffer(data, np.uint8), "a name").tobytes() == plain
    assert cipher.unseal_head(np.frombuffer(data, np.uint8), "a name").tobytes() == b"a head"
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with pytest.raises(UnsealError):
                cipher.unseal_array(np.frombuffer(bytes(changed), np.uint8), "a name")
    one_part = len(data) - 40 - 8
    for size in range(len(data)):
        if size != one_part:
            with pytest.raises(UnsealError):
                cipher.unseal_array(np.frombuffer(data[:size], np.uint8), "a name")
    for name in ("", "another"):
        with pytest.raises(UnsealError):
            cipher.unseal_head(np.frombuffer(data, np.uint8), name)
    sealed_name = cipher.seal_name("chat")
    assert (cipher.seal_name("chat"), cipher.unseal_name(sealed_name)) == (sealed_name, "chat")
    for text in ("", "chat", sealed_name[:-2], "0" * len(sealed_name)):
        with pytest.raises(UnsealError):
            cipher.unseal_name(text)


def test_unseal_foreign_bytes_raises_its_own_error() -> None:
    """Sizes of a head that no file has, bodies of all lengths, and noise."""
    cipher, rng = AeadCipher(StoreKey(KEY)), random.Random(1)
    (only_head, *empty_body) = cipher.seal_pieces([b"head"], "a name")
    data = b"".join(map(bytes, (only_head, *empty_body)))
    assert len(data) == cipher.unit_overhead_bytes + 4
    assert cipher.unseal_array(np.frombuffer(data, np.uint8), "a name").tobytes() == b"head"
    foreign = [b"KVMNNPE1" + size.to_bytes(8, "little") + bytes(200) for size in (0, 5, 160, 161, 1 << 40, 2**64 - 1)]
    foreign += [rng.randbytes(rng.randrange(300)) for _ in range(100)]
    foreign += [bytes(only_head) + rng.randbytes(size) for size in range(1, 90)]
    for each in foreign:
        array = np.frombuffer(each, np.uint8)
        for call in (
            lambda each=each: cipher.unseal(each, "a name"),
            lambda array=array: cipher.unseal_array(array, "a name"),
            lambda each=each: cipher.unseal_text(each.hex(), "a name"),
            lambda each=each: cipher.unseal_name(each.hex()),
        ):
            with pytest.raises(UnsealError):
                call()


def test_seal_pieces_gives_other_bytes_each_time() -> None:
    cipher = AeadCipher(StoreKey(KEY))
    sealed = {b"".join(map(bytes, cipher.seal_pieces([b"head", b"body"], "units"))) for _ in range(50)}
    nonces = {data[begin : begin + 24] for data in sealed for begin in (16, 16 + 40 + 4)}
    assert (len(sealed), len(nonces)) == (50, 100)


def test_open_without_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "s")
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(MissingDependencyError, match="this needs the package cryptography: pip install cryptography"):
        PrefixStore(tmp_path / "s", key=KEY)
    with pytest.raises(OptionError, match="is encrypted: its key is needed"):
        PrefixStore(tmp_path / "s")


# -- another implementation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("byte", "associated", "expected"),
    [
        (1, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (3, b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
    ],
)
def test_xaes_gives_the_vectors_of_its_specification(byte: int, associated: bytes, expected: str) -> None:
    nonce = b"ABCDEFGHIJKLMNOPQRSTUVWX"
    sealed = Xaes256Gcm(bytes([byte]) * 32).encrypt(b"XAES-256-GCM", associated, nonce)
    assert sealed == nonce + bytes.fromhex(expected)


def test_unseal_value_of_a_vector() -> None:
    """Sealed once by tests/support/sealed_model.py's ciphers, with nonces of 24 times a letter."""
    data = bytes.fromhex(VECTOR)
    found = AeadCipher(StoreKey(KEY)).unseal_array(np.frombuffer(data, np.uint8), "units").tobytes()
    assert found == b"the head of a unitits frames"


def test_sealed_store_is_read_by_another_implementation(tmp_path: Path) -> None:
    import sealed_model as model

    fill(tmp_path, block_tokens=8)
    space = model.space_key(KEY, MODEL, LAYERS, "tenant-x")
    files = [path for path in sorted(tmp_path.glob("*/**/*")) if path.is_file()]
    for path in files:
        name = "units" if path.suffix == ".unit" else path.relative_to(tmp_path).as_posix()
        value = model.open_value(KEY, path.read_bytes(), name)
        if path.suffix == ".unit":
            assert value[20:36] == space
            assert value.startswith((b"KVMNNPU1", b"KVMNNPU2"))
    assert model.key_check(KEY) in (tmp_path / "store.json").read_text()
    names = {path.name for path in files}
    assert f"{space.hex()}.json" in names
    assert f"{model.text_key(KEY, space, IDS)}.label" in names
    assert f"{model.text_key(KEY, space, OTHER)}.pin" in names
    assert f"{model.hashed(KEY, b'tenant-x' + bytes([31]) + b'a chat').hex()}.session" in names
    index = sqlite3.connect(tmp_path / "index.sqlite")
    try:
        keys = {key for (key,) in index.execute("SELECT key FROM block")}
        branches = set(index.execute("SELECT parent, text FROM branch"))
    finally:
        index.close()
    blocks = {ids: model.block_keys(KEY, space, ids, 8) for ids in (tuple(IDS), tuple(OTHER))}
    assert keys == {key for found in blocks.values() for key in found}
    expected = {(space, sort_key(model.masked(KEY, space, IDS[:8])))}
    parent = blocks[tuple(IDS)][11]
    expected.add((parent, sort_key(model.masked(KEY, parent, OTHER[96:104]))))
    assert expected <= branches


def sort_key(ids: list[int]) -> bytes:
    return b"".join(one.to_bytes(3, "big") if one < 0xFF0000 else b"\xff" + one.to_bytes(4, "big") for one in ids)


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [KEY, KEY.hex().encode(), b" " + KEY.hex().upper().encode() + b"\r\n"])
def test_key_file_forms_are_equal(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "key").write_bytes(data)
    key = load_key(tmp_path / "key")
    assert key is not None
    assert (key.secret, key.source) == (KEY, str(tmp_path / "key"))
    assert KEY.hex() not in repr(key)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "found 0 bytes"),
        (KEY + b"\n", "found 33 bytes"),
        (KEY[:31], "found 31 bytes"),
        (KEY.hex()[:-1].encode() + b"g", "found 64 bytes"),
        (b"0123456789abcdef" * 2, "found 32 hexadecimal digits, half a key"),
        (b"x" * 5000, "found more than 4,096 bytes"),
    ],
)
def test_key_file_of_other_form_is_refused(tmp_path: Path, data: bytes, found: str) -> None:
    (tmp_path / "key").write_bytes(data)
    with pytest.raises(OptionError) as raised:
        read_key(tmp_path / "key")
    assert str(raised.value).endswith(f"key: is no key: expected 32 bytes or 64 hexadecimal digits, {found}")


def test_key_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFileError, match="none: cannot be read: No such file"):
        load_key(tmp_path / "none")
    monkeypatch.delenv("KVMNN_STORE_KEY", raising=False)
    assert load_key() is None
    monkeypatch.setenv("KVMNN_STORE_KEY", "secret")
    with pytest.raises(OptionError, match=r"KVMNN_STORE_KEY: is no key: .* found 6 characters"):
        load_key()
    monkeypatch.setenv("KVMNN_STORE_KEY", KEY.hex())
    key = load_key()
    assert key is not None
    assert (key.secret, key.source) == (KEY, "KVMNN_STORE_KEY")
    for wrong, kind in ((b"x" * 31, OptionError), ("x" * 32, TypeError)):
        with pytest.raises(kind, match="key"):
            PrefixStore(tmp_path / "s", key=wrong)
    assert not (tmp_path / "s").exists()


# -- export and the command -------------------------------------------------------------------------------------------


def test_export_is_sealed_with_the_key_of_the_store(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    with PrefixStore(tmp_path / "s", key=KEY, namespace="tenant-x") as store:
        result = store.export(IDS, tmp_path / "text", model=MODEL)
    data = (tmp_path / "text").read_bytes()
    assert result.bytes == len(data)
    assert b"a model" not in data
    assert read_exported(tmp_path / "text", key=KEY)[1].tolist() == IDS
    for target, key, message in (
        ("plain", None, "is encrypted: the key of its store is needed"),
        ("other", OTHER_KEY, "does not decrypt: it is damaged, or of a store with another key"),
    ):
        with PrefixStore(tmp_path / target, key=key) as store, pytest.raises(KvmnnError, match=message):
            store.import_file(tmp_path / "text")
    with PrefixStore(tmp_path / "plain") as store:
        store.put(IDS, layers_of(IDS), model=MODEL)
        store.export(IDS, tmp_path / "open", model=MODEL)
    with PrefixStore(tmp_path / "s", key=KEY) as store, pytest.raises(OptionError, match="open: is not encrypted"):
        store.import_file(tmp_path / "open")
    for at in range(0, len(data), 97):
        (tmp_path / "text").write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(SourceError):
            read_exported(tmp_path / "text", key=KEY)


@pytest.mark.parametrize("engine", ["directory", "redis"])
def test_copy_texts_to_a_store_with_another_key_keeps_all(
    engine: str, new_url: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lines of docs/operations.md; labels and pins of beginnings that no list shows, too."""
    lines = (DOCS / "operations.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    for name, key in (("key", KEY), ("new-key", OTHER_KEY)):
        Path(name).write_bytes(key)
        Path(name).chmod(0o600)
    url = new_url(engine)
    begin, cast = IDS[:70], [9, 8, *range(100)]
    for tenant in (None, "tenant-x"):
        with PrefixStore(url, key=KEY, namespace=tenant) as store:
            store.put(IDS, layers_of(IDS), model=MODEL, label="all")
            store.put(begin, layers_of(begin), model=MODEL, label=f"beginning of {tenant}")
            store.pin(begin, model=MODEL)
            store.put(cast, layers_of(cast, dtype="<f4"), model="another", loss="rounded by a cast")
            hybrid = [make_state(5, "s", bytes(64), dtype="float32", shape=(4, 4))]
            store.put(IDS, layers_of(IDS), model="hybrid", states=hybrid)
    exec(lines.replace('"old"', repr(url)), {})
    for tenant in (None, "tenant-x"):
        with PrefixStore("new", key=OTHER_KEY, namespace=tenant) as store:
            assert same(store.get(IDS, model=MODEL).layers, IDS, 150)
            assert not store.get(IDS, model=MODEL).loss
            assert store.resolve("all").ids.tolist() == IDS
            assert store.resolve(f"beginning of {tenant}").ids.tolist() == begin
            prefix = store.get(cast, model="another")
            assert (prefix.dtype, prefix.loss, prefix.label) == ("fp32", "rounded by a cast", "LOSSY")
            assert store.verify().label == "LOSSY"
            assert store.stats().pinned == 1 and store.unpin(begin, model=MODEL).was_pinned
            with PrefixStore(url, key=KEY, namespace=tenant) as old:
                assert not {entry.key for entry in old.ls().texts} & {entry.key for entry in store.ls().texts}
                result = old.copy_texts(store)
            assert (result.texts, result.labels, result.pins) == (3, 2, 1)
            (note,) = (note for note in result.notes if "not copied" in note)
            assert "windows or state" in note and "150 tokens" in note


def test_copy_texts_names_what_it_leaves_out(tmp_path: Path) -> None:
    texts = [[number, *range(100)] for number in range(3)]
    with PrefixStore(tmp_path / "old") as old:
        for ids in texts:
            size = old.put(ids, layers_of(ids), model=MODEL).stored_bytes
        old.pin(texts[0], model=MODEL)
        min((tmp_path / "old").rglob("*.unit")).unlink()  # of the pinned text
        with PrefixStore(tmp_path / "new", max_bytes=size + 10) as new:
            result = old.copy_texts(new)
            assert (result.texts, result.pins, len(new.ls().texts)) == (1, 0, 1)
        notes = "\n".join(result.notes)
        assert "evicted again for later ones: 1 text" in notes and "as their texts are not: 1 pin" in notes
        assert "not copied, as they are damaged: 1 text" in notes
        assert str(result).startswith("1 text copied, 0 labels, 0 pins\n")


def test_command_takes_key_of_file_and_environment(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVMNN_STORE_KEY", raising=False)
    store, key_file = str(tmp_path / "s"), tmp_path / "key"
    key_file.write_text(KEY.hex())
    key_file.chmod(0o600)
    np.savez(
        tmp_path / "kv.npz",
        **{f"layer_0.{name}": np.ones((2, 20, 4), np.float16) for name in ("key", "value")},
    )
    ids = ",".join(map(str, range(20)))
    place = ["--token-ids", ids, "--fingerprint", "m"]
    assert run("store", "put", store, tmp_path / "kv.npz", *place, "--key-file", key_file).err == ""
    assert run("store", "match", store, "--token-ids", ids, "--key-file", key_file).out.strip() == "20"
    refused = run("store", "ls", store, code=2)
    assert f"{store}: is encrypted: its key is needed (--key-file FILE, or KVMNN_STORE_KEY)" in refused.err
    monkeypatch.setenv("KVMNN_STORE_KEY", KEY.hex())
    for action in ("ls", "stat", "verify", "gc"):
        run("store", action, store)
    run("store", "export", store, "--token-ids", ids, "-o", tmp_path / "x")
    run("store", "import", store, tmp_path / "x")
    monkeypatch.setenv("KVMNN_STORE_KEY", OTHER_KEY.hex())
    for action in ("ls", "stat", "verify", "gc"):
        refused = run("store", action, store, code=2)
        assert "is encrypted with another key than that of KVMNN_STORE_KEY" in refused.err
        assert OTHER_KEY.hex() not in refused.out + refused.err
    key_file.chmod(0o644)
    warned = run("store", "ls", store, "--key-file", key_file)
    if os.name == "posix":
        assert f"{key_file}: others can read the key (mode 0644): chmod 600" in warned.err


VECTOR = (
    "4b564d4e4e50453112000000000000006868686868686868686868686868686868686868686868681b278726f30ac3ab2806"
    "c40931093e0a9c5cdbebd4cbc08116255944f4b19be96477626262626262626262626262626262626262626262626262fc04"
    "44f260a5250df8c22253b18c7fa1471f2501c60bc1fef8e0"
)
