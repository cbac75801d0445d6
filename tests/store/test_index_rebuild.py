"""A lost or damaged index is rebuilt from the units, and every text is found."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from encrypted_stores import PLAIN_ONLY
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixes import MODEL, agreeing, layers_of, same

from kvmnn import KvmnnError
from kvmnn.errors import ManifestError, SourceError
from kvmnn.store import PrefixStore

TEXTS = [[*range(20)], [*range(12), 99, 98, 97], [*range(8), 50, 51], [7], [*range(100, 140)]]


def put(store: PrefixStore, ids, **options):
    return store.put(ids, layers_of(ids, **options), model=MODEL)


@pytest.fixture
def folder(tmp_path: Path, encryption: str) -> Path:
    """A store with texts, of which one is pinned and two are sessions."""
    with PrefixStore(tmp_path / "s", block_tokens=4) as store:
        for ids in TEXTS:
            put(store, ids)
        put(store, [5, 6, 7], dtype="<f4")
        store.pin(TEXTS[1], model=MODEL)
        store.pin([7], model=MODEL)
        store.unpin([7], model=MODEL)
        for name in ("chat ä", "other", "gone"):
            store.park(name, TEXTS[4], layers_of(TEXTS[4]), model=MODEL)
        store.forget("gone")
    return tmp_path / "s"


def check(store: PrefixStore) -> None:
    for ids in TEXTS:
        found = store.get([*ids, 777], model=MODEL, dtype="fp16")
        assert found.tokens == len(ids) and same(found.layers, ids, len(ids))
    assert store.match([5, 6, 7], model=MODEL, dtype="fp32") == 3
    assert store.sessions() == ["chat ä", "other"]
    assert store.resume("chat ä").prefix.tokens == 40
    assert store.verify().damaged == ()
    assert store.gc().units == 0
    assert [store.stats().pinned, store.stats().texts] == [1, len(TEXTS) + 1]


def indexes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("index*") if path.suffix == ".sqlite")


@pytest.mark.parametrize("damage", ["removed", "emptied", "noise", "cut", "all removed"])
def test_rebuild_index_finds_every_text(folder: Path, damage: str) -> None:
    index = folder / "index.sqlite"
    data = index.read_bytes()
    if damage.endswith("removed"):
        for path in folder.glob("index*") if damage.startswith("all") else [index]:
            path.unlink()
    else:
        index.write_bytes({"emptied": b"", "noise": b"noise " * 5000, "cut": data[: len(data) // 2]}[damage])
    with PrefixStore(folder, create=False) as store:
        check(store)
        (note,) = store.notes
        assert "made again, with" in note and "1 pin and 2 sessions" in note
        put(store, range(200, 230))
        assert store.verify().damaged == ()
    assert indexes(folder) == ["index-1.sqlite"]
    with PrefixStore(folder) as store:
        assert store.notes == ()
        assert store.gc(max_bytes=0).units >= 5
        assert store.match(TEXTS[1], model=MODEL) == 15, "it is pinned still"
        assert store.match([7], model=MODEL) == 0


@pytest.mark.slow
def test_rebuild_index_after_random_damage(folder: Path, tmp_path: Path) -> None:
    """Random damage: found rows are those that were put, and verify repairs the rest."""
    chance = random.Random(5)
    good = (folder / "index.sqlite").read_bytes()
    for number in range(12):
        data = bytearray(good)
        for _ in range(chance.choice((1, 8, 200))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if number % 4 == 3:
            data = data[: chance.randrange(len(data))]
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        (copy / "index.sqlite").write_bytes(data)
        try:
            with PrefixStore(copy, threads=1) as store:
                for ids in TEXTS:
                    found = store.get(ids, model=MODEL, dtype="fp16")
                    assert found.tokens == 0 or same(found.layers, ids, found.tokens)
                store.verify()
                store.ls()
                put(store, range(60, 70))
                assert same(store.get(range(60, 70), model=MODEL).layers, range(60, 70), 10)
        except SourceError as error:
            assert "is a prefix store of version" in str(error) and "\n" not in str(error)
        shutil.rmtree(copy)


def test_rebuild_index_while_store_is_open(folder: Path) -> None:
    with PrefixStore(folder) as store, PrefixStore(folder) as other, PrefixStore(folder, read_only=True) as reader:
        assert store.match(TEXTS[0], model=MODEL) == 20
        for path in folder.glob("index*"):
            path.unlink()
        check(store)
        assert put(other, [*TEXTS[0], 3, 4, 5]).known_tokens == 20
        assert store.match([*TEXTS[0], 3, 4, 5], model=MODEL) == 23
        assert reader.match([*TEXTS[0], 3, 4, 5], model=MODEL) == 23
        assert len(store.notes) == 1 and other.notes == ()
    assert indexes(folder) == ["index-1.sqlite"]


def test_verify_reads_every_page_of_the_index(folder: Path) -> None:
    """A page that no query has touched."""
    with PrefixStore(folder) as store:
        data = bytearray((folder / "index.sqlite").read_bytes())
        data[3 * 4096 : -4096] = bytes(len(data) - 4 * 4096)
        (folder / "index.sqlite").write_bytes(data)
        store.verify()
        assert len(store.notes) == 1
        check(store)


def beside(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for name in ("spaces", "texts") for path in (folder / name).iterdir()}


@pytest.mark.parametrize("damage", ["cut", "removed", "changed"])
def test_verify_repairs_recovery_files(folder: Path, damage: str, encryption: str) -> None:
    long = [*range(300, 380)]
    with PrefixStore(folder) as store:
        put(store, long[:30])
        put(store, long)
        store.pin(long[:66], model=MODEL)  # of several units
    good = beside(folder)
    assert len(good) == 6
    for path, data in good.items():
        if damage == "removed":
            path.unlink()
        else:
            path.write_bytes(data[:5] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    broken = beside(folder)
    with PrefixStore(folder, read_only=True) as store:
        found = store.verify()
        assert len(found.damaged_files) == 6 and "6 files next to the index damaged:" in str(found)
        assert all("is lost or damaged: kvmnn store verify writes it again" in line for line in found.damaged_files)
        assert beside(folder) == broken
    with PrefixStore(folder) as store:
        found = store.verify()
        assert sorted(found.damaged_files) == [f"{path}: is lost or damaged: written again" for path in sorted(good)]
        assert beside(folder).keys() == good.keys()
        assert encryption == "encrypted" or beside(folder) == good
        assert store.verify().damaged_files == ()
    (folder / "index.sqlite").unlink()
    with PrefixStore(folder) as store:
        assert (store.stats().pinned, store.sessions()) == (2, ["chat ä", "other"])
        assert store.unpin(long[:66], model=MODEL).was_pinned
        assert [store.match(ids, model=MODEL) for ids in (*TEXTS, long)] == [20, 15, 10, 1, 40, 80]


@pytest.mark.parametrize("read_only", [True, False])
def test_verify_names_units_whose_namespace_is_lost(folder: Path, read_only: bool) -> None:
    """One model of two is lost; what a killed put of the other left is no damage."""
    with PrefixStore(folder) as store:
        store.put(TEXTS[0], layers_of(TEXTS[0], seed=b"x"), model="another")
    left_file = max(folder.glob("units/*/*.unit")).with_name(f"{4000:08x}.unit")
    shutil.copy(min(folder.glob("units/*/*.unit")), left_file)
    for path in [*folder.glob("index*"), *folder.glob("spaces/*.json")]:
        path.unlink()
    with PrefixStore(folder) as store:
        assert "made again, with 0 units" in store.notes[0]
        put(store, TEXTS[0])
        store.put([5], layers_of([5], dtype="<f4"), model=MODEL)
    with PrefixStore(folder, read_only=read_only) as store:
        (path,) = (line.partition(": ")[0] for line in store.verify().damaged)
        assert "1 unit damaged" in str(store.verify()) or "1 more unit damaged" in str(store.verify())
        assert store.verify().damaged == (
            f"{path}: cannot be used: is of a model whose document in spaces/ is lost (gc removes it)",
        )
        assert path != str(left_file)
    with PrefixStore(folder) as store:
        assert store.gc().other_files >= 2
        assert store.verify().damaged == ()


def test_put_writes_lost_namespace_again(folder: Path) -> None:
    """Also a put of what is stored already."""
    good = {path: path.read_bytes() for path in folder.glob("spaces/*.json")}
    for path in good:
        path.unlink()
    with PrefixStore(folder) as store:
        assert put(store, TEXTS[0]).known_tokens == 20
    (path,) = folder.glob("spaces/*.json")
    assert path in good


def test_rebuild_index_parallel_openers_make_one(folder: Path) -> None:
    (folder / "index.sqlite").unlink()
    with ThreadPoolExecutor(4) as pool:

        def one(_: int) -> int:
            with PrefixStore(folder) as store:
                return store.match(TEXTS[4], model=MODEL)

        assert list(pool.map(one, range(8))) == [40] * 8
    assert indexes(folder) == ["index-1.sqlite"]


def test_rebuild_index_skips_unusable_units(folder: Path) -> None:
    files = sorted(folder.glob("units/*/*.unit"))
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    files[0].unlink()  # what others follow
    files[-1].write_bytes(files[-1].read_bytes()[:50])
    with PrefixStore(folder) as store:
        assert "could not be used, which gc removes" in store.notes[0]
        assert store.match(TEXTS[0], model=MODEL, dtype="fp16") == 0
        assert store.match(TEXTS[4], model=MODEL) == 40
        assert store.verify().damaged == ()
        assert store.gc().other_files == len(files) - 1 - store.stats().units


def replaced(folder: Path, what: str) -> None:
    """Something else in the place of the index."""
    for path in folder.glob("index*"):
        path.unlink()
    (folder / "index.sqlite").write_bytes(b"noise " * 2000 if what == "noise" else b"")
    with closing(sqlite3.connect(folder / "index.sqlite")) as connection:
        if what == "another's":
            connection.execute("CREATE TABLE theirs (x)")
        elif what == "no tables":
            connection.execute("PRAGMA user_version = 0")
            connection.execute("VACUUM")


@pytest.mark.parametrize("what", ["empty", "no tables", "another's"])
@pytest.mark.parametrize("create", [False, True])
def test_rebuild_index_of_empty_or_foreign_file(folder: Path, what: str, create: bool) -> None:
    replaced(folder, what)
    with PrefixStore(folder, create=create) as store:
        (note,) = store.notes
        said = "index.sqlite is another's" if what == "another's" else "index.sqlite is empty"
        assert f"({said}): made again, with" in note and "1 pin and 2 sessions" in note
        check(store)


def test_rebuild_index_emptied_while_open(folder: Path) -> None:
    with PrefixStore(folder) as store:
        os.truncate(folder / "index.sqlite", 0)
        check(store)
        assert len(store.notes) == 1


def test_open_foreign_database_without_settings_is_refused(tmp_path: Path) -> None:
    """No store.json says that the folder is a store."""
    (tmp_path / "s").mkdir()
    replaced(tmp_path / "s", "another's")
    data = (tmp_path / "s" / "index.sqlite").read_bytes()
    for options in ({}, {"create": False}, {"read_only": True}):
        with pytest.raises(SourceError, match=r"s: is not a prefix store: index\.sqlite is another's$"):
            PrefixStore(tmp_path / "s", **options)
    assert (tmp_path / "s" / "index.sqlite").read_bytes() == data


@pytest.mark.parametrize("what", ["noise", "empty", "no tables", "another's"])
def test_open_read_only_damaged_index_is_refused(folder: Path, what: str) -> None:
    replaced(folder, what)
    with pytest.raises(SourceError, match=r"open the store for writing \(kvmnn store verify\), and it is made again"):
        PrefixStore(folder, read_only=True)


@pytest.mark.parametrize("settings", [None, "{"])
def test_open_without_index_and_settings_gives_all_the_same_advice(folder: Path, settings: str | None) -> None:
    replaced(folder, "noise")
    (folder / "store.json").unlink()
    if settings is not None:
        (folder / "store.json").write_text(settings)
    advices = []
    for read_only in (True, False):  # as ls and verify open it
        with pytest.raises(KvmnnError, match="write what the store was made with into") as refused:
            PrefixStore(folder, read_only=read_only, create=False)
        advices.append(str(refused.value))
    assert "kvmnn store verify" not in advices[0] and "remove the store" not in advices[1]


@PLAIN_ONLY
def test_open_damaged_settings_without_index_is_refused(folder: Path) -> None:
    (folder / "store.json").write_text('{"schema": "kvmnn-store", "schema_version": 3, "block_tokens": 4}')
    (folder / "index.sqlite").unlink()
    with pytest.raises(KvmnnError, match=r"store\.json: is of another version"):
        PrefixStore(folder)
    for text in ("{", "[]", '{"schema": "kvmnn-store", "schema_version": 1, "block_tokens": 0}', "\xff"):
        (folder / "store.json").write_text(text, encoding="latin-1")
        with pytest.raises(KvmnnError, match=r"store\.json: .*write what the store was made with into this file"):
            PrefixStore(folder)
    (folder / "store.json").write_text('{"schema": "kvmnn-store", "schema_version": 1, "block_tokens": 4}')
    with PrefixStore(folder) as store:
        check(store)


@PLAIN_ONLY
def test_rebuild_index_skips_damaged_recovery_files(folder: Path) -> None:
    """Every byte of a pin counts; a space whose document differs has another key."""
    (pin,) = folder.glob("texts/*.pin")
    good = pin.read_bytes()
    pin.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    for path in folder.glob("texts/*.session"):
        path.write_bytes(path.read_bytes()[:30])
    for path in folder.glob("spaces/*"):
        if "fp32" in path.read_text():
            path.write_text("{")
    (folder / "index.sqlite").unlink()
    with PrefixStore(folder) as store:
        assert (store.stats().pinned, store.sessions()) == (0, [])
        assert store.match(TEXTS[0], model=MODEL) == 20
        assert store.match([5, 6, 7], model=MODEL, dtype="fp32") == 0


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_rebuild_index_equals_dictionary_model(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("s")
    texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
    stored = data.draw(st.lists(texts, min_size=1, max_size=9))
    with PrefixStore(folder, block_tokens=data.draw(st.sampled_from([1, 3, 8]))) as store:
        for ids in stored:
            put(store, ids)
    (folder / "index.sqlite").unlink()
    with PrefixStore(folder) as store:
        for ids in [*data.draw(st.lists(texts, max_size=6)), *stored]:
            wanted = max(agreeing(ids, other) for other in stored)
            found = store.get(ids, model=MODEL)
            assert found.tokens == wanted
            assert same(found.layers, ids, wanted) if wanted else not found.layers
        assert store.verify().damaged == ()
        assert store.gc(max_bytes=0).bytes > 0
        assert store.stats().units == 0


def test_rebuild_index_keeps_pins_of_lost_texts(tmp_path: Path) -> None:
    """It applies again once a longer text is put."""
    with PrefixStore(tmp_path, block_tokens=4) as store:
        store.put(range(11), layers_of(range(11)), model=MODEL)
        store.pin(range(11), model=MODEL)
    (unit,) = tmp_path.glob("units/*/*.unit")
    unit.unlink()
    (tmp_path / "index.sqlite").unlink()
    with PrefixStore(tmp_path) as store:
        assert store.stats().pinned == 1
        store.put(range(30), layers_of(range(30)), model=MODEL)
        store.gc(max_bytes=0)
        assert store.match(range(11), model=MODEL) == 11


def test_rebuild_index_pins_what_is_left_of_a_text(tmp_path: Path) -> None:
    with PrefixStore(tmp_path, block_tokens=4) as store:
        for tokens in (8, 19):
            store.put(range(tokens), layers_of(range(tokens)), model=MODEL)
        store.pin(range(19), model=MODEL)
    _, unit = sorted(tmp_path.glob("units/*/*.unit"))
    unit.unlink()
    (tmp_path / "index.sqlite").unlink()
    with PrefixStore(tmp_path) as store:
        store.gc(max_bytes=0)
        assert store.match(range(19), model=MODEL) == 8
        store.put(range(19), layers_of(range(19)), model=MODEL)
        store.gc(max_bytes=0)
        assert store.match(range(19), model=MODEL) == 19


@PLAIN_ONLY
def test_open_units_without_settings_are_refused_until_written(folder: Path) -> None:
    """A number of tokens that cannot be right makes no index; the right one finds everything."""
    (folder / "index.sqlite").unlink()
    (folder / "store.json").unlink()
    for options in ({}, {"create": False}, {"read_only": True}):
        with pytest.raises(SourceError, match=r"no index\.sqlite, but units: write what .* into store\.json, such"):
            PrefixStore(folder, **options)
    document = {"schema": "kvmnn-store", "schema_version": 1, "block_tokens": 64, "codec": "dense"}
    (folder / "store.json").write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=r"a block has 64 tokens, and \d of \d units have other blocks: write"):
        PrefixStore(folder)
    assert len([*folder.glob("units/*/*")]) == 6 and not indexes(folder)
    (folder / "store.json").write_text(json.dumps(document | {"block_tokens": 4}))
    with PrefixStore(folder) as store:
        check(store)
