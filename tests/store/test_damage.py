"""Damaged units are misses with a note; a directory that is no store is one clear error."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from encrypted_stores import PLAIN_ONLY
from prefixes import MODEL, layers_of, same

from kvmnn import KvmnnError, LayerCache
from kvmnn.errors import OptionError, OutputError, SourceError
from kvmnn.store import PrefixStore
from kvmnn.store.namespace import build_namespace, to_token_ids
from kvmnn.store.unit import DamagedUnitError, parse_unit
from kvmnn.store.unit_codec import LoadedSlice, check_unit_matches, decode_slices

pytestmark = pytest.mark.usefixtures("encryption")


def made(folder: Path, *texts, codec: str = "dense") -> list[Path]:
    """A store of blocks of 4 tokens with these texts; its units' files in the order in which they were put."""
    with PrefixStore(folder, block_tokens=4, codec=codec) as store:
        for ids in texts:
            store.put(ids, layers_of(ids), model=MODEL)
    return sorted(folder.glob("units/*/*.unit"))


@PLAIN_ONLY
@pytest.mark.parametrize("codec", ["dense", "frames"])
def test_get_flipped_byte_of_unit_is_detected(tmp_path: Path, codec: str) -> None:
    """One flip anywhere is found."""
    ids = to_token_ids(range(11))
    (file,) = made(tmp_path / "s", ids, codec=codec)
    good = file.read_bytes()
    space = build_namespace(layers_of(ids), MODEL)

    def read(data: bytes) -> list[LayerCache]:
        unit = parse_unit(np.frombuffer(data, np.uint8))
        check_unit_matches(unit, space, ids, 0, 64)
        return decode_slices(space, [LoadedSlice(unit, 0, unit.ids.size)], 1)

    assert same(read(good), ids, 11)
    for at in range(len(good)):
        flipped = good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :]
        with pytest.raises(DamagedUnitError):
            read(flipped)


def test_get_damaged_unit_is_a_noted_miss(tmp_path: Path, encryption: str) -> None:
    """What comes before it is still returned."""
    texts = range(8), [*range(8), 50, 51, 52]
    (_, file) = made(tmp_path / "s", *texts)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for read_only, done in ((True, "is passed over"), (False, "was removed")):
        with PrefixStore(tmp_path / "s", read_only=read_only) as store:
            found = store.get(texts[1], model=MODEL)
            assert found.tokens == 8
            assert same(found.layers, texts[1], 8)
            (note,) = found.notes
            reason = "does not decrypt" if encryption == "encrypted" else "V of layer 1: "
            assert f"{file}: damaged, {done} (tokens 8 to 10 of a text): {reason}" in note
            assert store.get(texts[1], model=MODEL).notes == ()


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("damage", ["gone", "cut", "header"])
def test_match_equals_get_where_files_are_lost(tmp_path: Path, encryption: str, damage: str, read_only: bool) -> None:
    """Damage that a read of K and V alone would show is left to it."""
    folder, ids = tmp_path / "s", list(range(300))
    with PrefixStore(folder, block_tokens=16) as store:
        store.put(ids[:256], layers_of(ids[:256]), model=MODEL)
        store.put(ids, layers_of(ids), model=MODEL)
    _, file = sorted(folder.glob("units/*/*"))
    if damage == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[30] ^= 1
        file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else data)
    with PrefixStore(folder, read_only=read_only) as store:
        assert ("(damaged: store verify)" in str(store.ls())) == (damage != "cut")
        found = store.find(ids, model=MODEL)
        prefix = store.get(ids, model=MODEL)
        assert found.tokens == prefix.tokens == 256
        assert len(found.notes) == 1 and "damaged, " in found.notes[0] and prefix.notes == ()


def test_put_stores_again_what_was_lost(tmp_path: Path) -> None:
    """It says so: the index alone has all of the text."""
    ids = range(20)
    (file,) = made(tmp_path / "s", ids)
    file.unlink()
    with PrefixStore(tmp_path / "s") as store:
        put = store.put(ids, layers_of(ids), model=MODEL)
        assert (put.known_tokens, put.stored_tokens) == (0, 20)
        assert "its file is gone" in str(put)
        assert same(store.get(ids, model=MODEL).layers, ids, 20)
        assert store.put(ids, layers_of(ids), model=MODEL).known_tokens == 20
        assert store.verify().damaged == ()


@PLAIN_ONLY
def test_get_exchanged_frame_is_a_miss(tmp_path: Path) -> None:
    """Even if it decodes to the same words."""
    (file,) = made(tmp_path / "s", range(8), codec="frames")
    unit = parse_unit(np.frombuffer(file.read_bytes(), np.uint8))
    frames = (unit.frames[0]._replace(checksum=unit.frames[0].checksum ^ 1), *unit.frames[1:])
    changed = b"".join(bytes(piece) for piece in replace(unit, frames=frames).to_pieces())
    for name in ("get", "export", "verify"):
        (file,) = made(tmp_path / name, range(8), codec="frames")
        file.write_bytes(changed)
    message = "K of layer 0: the frame does not match its checksum"
    with PrefixStore(tmp_path / "get") as store:
        found = store.get(range(8), model=MODEL)
        assert found.tokens == 0
        assert message in found.notes[0]
    with PrefixStore(tmp_path / "export") as store, pytest.raises(SourceError, match=message):
        store.export(range(8), tmp_path / "one", model=MODEL)
    with PrefixStore(tmp_path / "verify") as store:
        assert message in store.verify().damaged[0]


@pytest.mark.parametrize("cut", [0, 1, 40, 60, 100, -1])
def test_get_truncated_unit_is_removed(tmp_path: Path, cut: int) -> None:
    (file,) = made(tmp_path / "s", range(8))
    file.write_bytes(file.read_bytes()[:cut])
    with PrefixStore(tmp_path / "s") as store:
        found = store.get(range(8), model=MODEL)
        assert (found.tokens, found.layers) == (0, [])
        assert "damaged, was removed (tokens 0 to 7 of a text)" in found.notes[0]
        assert cut or "has 0 bytes" in found.notes[0]
        assert not file.exists()
        assert (store.stats().units, store.stats().bytes) == (0, 0)
        assert store.put(range(8), layers_of(range(8)), model=MODEL).known_tokens == 0
        assert store.get(range(8), model=MODEL).tokens == 8


def test_get_missing_file_loses_units_after_it(tmp_path: Path) -> None:
    first, _ = made(tmp_path / "s", range(8), range(16))
    first.unlink()
    with PrefixStore(tmp_path / "s") as store:
        found = store.get(range(16), model=MODEL)
        assert found.tokens == 0
        assert "its file is gone or cannot be read" in found.notes[0]
        assert store.stats().units == 0
        assert list((tmp_path / "s").glob("units/*/*")) == []


def test_get_exchanged_unit_files_are_detected(tmp_path: Path) -> None:
    """Each is a valid unit; its ids show that it is in the wrong place."""
    one, two = made(tmp_path / "s", range(8), range(20, 28))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with PrefixStore(tmp_path / "s") as store:
        found = store.get(range(8), model=MODEL)
        assert found.tokens == 0
        assert "holds other tokens than the index says" in found.notes[0]


def test_get_unit_of_other_model_is_detected(tmp_path: Path) -> None:
    (one,) = made(tmp_path / "s", range(8))
    with PrefixStore(tmp_path / "t", block_tokens=4) as store:
        store.put(range(8), layers_of(range(8), seed=b"x"), model="another")
    (other,) = (tmp_path / "t").glob("units/*/*.unit")
    one.write_bytes(other.read_bytes())
    with PrefixStore(tmp_path / "s") as store:
        assert "holds layers of another model" in store.get(range(8), model=MODEL).notes[0]


def test_verify_reports_and_removes_damaged_units(tmp_path: Path) -> None:
    files = made(tmp_path / "s", range(8), [*range(8), 1, 1, 1, 1, 1], range(30, 40))
    data = bytearray(files[1].read_bytes())
    data[-3] ^= 1
    files[1].write_bytes(data)
    with PrefixStore(tmp_path / "s") as store:
        found = store.verify()
        assert (found.units, found.tokens, found.lost, len(found.damaged)) == (2, 18, 0, 1)
        assert f"{files[1]}: damaged, was removed (tokens 8 to 12 of a text)" in found.damaged[0]
        assert store.verify().damaged == ()
        assert store.match([*range(8), 1], model=MODEL) == 8


def test_gc_counts_the_bytes_of_files_that_were_there(tmp_path: Path) -> None:
    first, second, third = made(tmp_path / "s", range(8), range(19), [*range(19), *range(50, 60)])
    left_bytes = [path.stat().st_size for path in (first, third)]
    second.unlink()
    with PrefixStore(tmp_path / "s") as store:
        cleaned = store.gc(0)
        assert (cleaned.units, cleaned.lost, cleaned.bytes, store.stats().bytes) == (3, 2, sum(left_bytes), 0)
        assert "a unit before them was gone: 2 units" in str(cleaned)


def test_gc_removes_unreferenced_files(tmp_path: Path) -> None:
    files = made(tmp_path / "s", range(8), range(30, 40))
    other = files[0].with_name(f"{99:08x}.unit")
    other.write_bytes(b"x" * 100)
    left = tmp_path / "s" / "staging" / ".put.kvmnn-1-0123abcd.tmp"
    left.mkdir()
    (left / "0").write_bytes(b"x")
    files[1].unlink()
    with PrefixStore(tmp_path / "s") as store:
        cleaned = store.gc()
        assert (cleaned.units, cleaned.other_files, cleaned.other_bytes) == (1, 1, 100)
        assert not other.exists() and not left.exists()
        assert store.match(range(8), model=MODEL) == 8
        assert store.gc().units == 0


def changed(folder: Path, change: str) -> None:
    with sqlite3.connect(folder / "index.sqlite") as connection:
        connection.execute(change)
    connection.close()


def test_open_index_of_other_version_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "s", range(8))
    changed(tmp_path / "s", "PRAGMA user_version = 2")
    for options in ({}, {"read_only": True}, {"create": False}):
        with pytest.raises(SourceError, match="is a prefix store of version 2: expected 1"):
            PrefixStore(tmp_path / "s", **options)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("PRAGMA application_id = 7", r"index\.sqlite is another's"),
        ("CREATE VIEW more AS SELECT 1", r"index\.sqlite has other tables"),
        ("UPDATE state SET block_tokens = 0", "says that a block has 0 tokens"),
        ("UPDATE state SET block_tokens = 'x'", "a row has 'x', expected a whole number from 0 on"),
        ("DELETE FROM state", "a row of it is gone"),
    ],
)
def test_open_foreign_index_is_rebuilt(tmp_path: Path, change: str, said: str) -> None:
    made(tmp_path / "s", range(8))
    changed(tmp_path / "s", change)
    with pytest.raises(SourceError, match=said):
        PrefixStore(tmp_path / "s", read_only=True)
    with PrefixStore(tmp_path / "s", create=False) as store:
        assert re.search(said, store.notes[0])
        assert same(store.get(range(8), model=MODEL).layers, range(8), 8)
    made(tmp_path / "t", range(8))
    (tmp_path / "t" / "store.json").unlink()
    changed(tmp_path / "t", change)
    with pytest.raises(SourceError, match=said):
        PrefixStore(tmp_path / "t", create=False)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE block SET number = 'x'",
        "UPDATE block SET unit = -5",
        "UPDATE block SET number = 1000000",
        "UPDATE block SET unit = 77",
        "UPDATE unit SET tokens = 'many'",
        "UPDATE unit SET skip = 5000000000",
        "UPDATE unit SET id = 9223372036854775807 - id",
        "UPDATE space SET document = '{'",
        "UPDATE space SET document = '[1]'",
        "UPDATE space SET document = x'00'",
        "UPDATE branch SET text = ''",
        "UPDATE branch SET unit = 12345 + unit",
        "UPDATE unit SET start = -1",
        "DELETE FROM unit WHERE id = 1",
        "DELETE FROM state",
    ],
)
def test_get_forged_index_never_yields_other_rows(tmp_path: Path, change: str) -> None:
    """Stored rows may be lost; none appear that were not put, and errors are those of kvmnn."""
    ids = [*range(11)]
    made(tmp_path / "s", ids, [*range(8), 60, 61])
    changed(tmp_path / "s", change)
    for asked in (ids, [*range(8), 60, 61, 62], [0, 1, 2]):
        for read_only in (True, False):
            try:
                with PrefixStore(tmp_path / "s", read_only=read_only) as store:
                    found = store.get(asked, model=MODEL)
                    assert found.tokens == 0 or same(found.layers, asked, found.tokens)
                    store.verify()
                    store.ls()
            except KvmnnError as error:
                assert str(tmp_path / "s") in str(error)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM state",
        "DELETE FROM branch WHERE unit = 2",
        "DELETE FROM unit WHERE id = 2",
        "UPDATE unit SET children = 7 WHERE id = 1",
        "UPDATE unit SET pins = 1",
        "UPDATE unit SET tokens = 9 WHERE id = 2",
        "UPDATE state SET bytes = 5",
        "UPDATE branch SET text = x'000009' WHERE unit = 2",
        "UPDATE session SET name = x''",
        "UPDATE space SET key = 5",
        "UPDATE unit SET space = 7",
    ],
)
def test_verify_rebuilds_index_that_differs_from_units(tmp_path: Path, change: str) -> None:
    texts = [*range(8)], [*range(8), 60, 61]
    made(tmp_path / "s", *texts)
    with PrefixStore(tmp_path / "s") as store:
        store.park("chat", texts[0], layers_of(texts[0]), model=MODEL)
        assert store.verify().rebuilt_parts == ()
    changed(tmp_path / "s", change)
    with PrefixStore(tmp_path / "s") as store:
        found = store.verify()
        assert (len(found.rebuilt_parts), found.units, found.damaged) == (1, 2, ())
        assert all(same(store.get(ids, model=MODEL).layers, ids, len(ids)) for ids in texts)
        assert store.sessions() == ["chat"]
    with PrefixStore(tmp_path / "s") as store:
        assert store.verify().rebuilt_parts == ()


def test_open_other_directory_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(SourceError, match=r"mine: is not a prefix store: it holds other things and no index\.sqlite"):
        PrefixStore(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter"]
    (tmp_path / "file").write_text("x")
    for options in ({}, {"read_only": True}, {"create": False}):
        with pytest.raises(SourceError, match="file: is not a prefix store, but a file: expected a directory"):
            PrefixStore(tmp_path / "file", **options)
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "index.sqlite").write_bytes(b"no database" * 99)
    for read_only in (False, True):
        with pytest.raises(SourceError, match=r"is damaged \(file is not a database\)"):
            PrefixStore(tmp_path / "noise", read_only=read_only)


def test_store_calls_invalid_dtype_or_layer_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "s", range(8))
    with PrefixStore(tmp_path / "s") as store:
        for call in (store.match, store.get, store.pin, store.unpin, store.delete):
            with pytest.raises(OptionError, match="dtype is 'int7': expected one of fp16"):
                call(range(8), model=MODEL, dtype="int7")
        with pytest.raises(TypeError, match=r"layers are ndarray: expected kvmnn\.LayerCache"):
            store.put(range(8), [np.zeros((2, 8, 4), "<f2")], model=MODEL)


def test_store_read_only_writes_nothing(tmp_path: Path) -> None:
    made(tmp_path / "s", range(8))

    def files() -> list[tuple[Path, int]]:
        """All but what SQLite leaves next to its file."""
        names = (path for path in (tmp_path / "s").rglob("*.*") if path.suffix not in (".sqlite-shm", ".sqlite-wal"))
        return sorted((path, path.stat().st_mtime_ns) for path in names)

    before = files()
    with PrefixStore(tmp_path / "s", read_only=True) as store:
        assert same(store.get(range(9), model=MODEL).layers, range(8), 8)
        assert store.verify().damaged == ()
        assert store.match(range(5), model=MODEL) == 5
        for call in (
            lambda: store.put([1], layers_of([1]), model=MODEL),
            lambda: store.gc(),
            lambda: store.pin(range(8), model=MODEL),
            lambda: store.delete(range(8), model=MODEL),
        ):
            with pytest.raises(OutputError, match="is open for reading only"):
                call()
    assert files() == before


def test_put_full_disk_leaves_store_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "s", range(8))
    ids = [*range(8), *range(100, 200)]
    with PrefixStore(tmp_path / "s") as store:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("kvmnn.store.directory.files.os.replace", full)
            with pytest.raises(OutputError, match="No space left on device"):
                store.put(ids, layers_of(ids), model=MODEL)
        assert store.match(ids, model=MODEL) == 8
        assert store.verify().damaged == ()
        assert store.gc().other_files == 0
        assert list((tmp_path / "s" / "staging").glob("*/*")) == []
        store.put(ids, layers_of(ids), model=MODEL)
        assert store.match(ids, model=MODEL) == len(ids)


def test_put_staging_folder_is_kept_until_close(tmp_path: Path) -> None:
    """It is created again if it is removed."""
    staging = tmp_path / "s" / "staging"
    with PrefixStore(tmp_path / "s") as store:
        for ids in (range(8), range(10, 18)):
            store.put(ids, layers_of(ids), model=MODEL)
            (mine,) = staging.iterdir()
            assert list(mine.iterdir()) == []
        mine.rmdir()
        store.put(range(20, 28), layers_of(range(20, 28)), model=MODEL)
        assert len(list(staging.iterdir())) == 1
    assert list(staging.iterdir()) == []


def test_get_unwritable_usage_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has been found by then, so a full disk is no failure."""
    made(tmp_path / "s", range(8))
    refused = []

    def full(*_: object) -> None:
        refused.append(1)
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("kvmnn.store.directory.index_updates.touch", full)
    with PrefixStore(tmp_path / "s") as store:
        assert store.get(range(8), model=MODEL).tokens == 8
    assert refused


@PLAIN_ONLY
@pytest.mark.parametrize("tokens", [0, 1 << 25, 2**32 - 1])
def test_parse_unit_sizes_of_header_are_bounded(tokens: int) -> None:
    head = b"KVMNNPU1" + tokens.to_bytes(4, "little") + (4).to_bytes(4, "little") + bytes(4 + 32)
    with pytest.raises(DamagedUnitError, match=r"impossible sizes|its header alone"):
        parse_unit(np.frombuffer(head + bytes(100), np.uint8))


@PLAIN_ONLY
@pytest.mark.parametrize("codec", ["dense", "frames"])
def test_check_unit_too_many_tokens_is_refused(tmp_path: Path, codec: str) -> None:
    ids = to_token_ids(range(11))
    (file,) = made(tmp_path / "s", ids, codec=codec)
    unit, space = parse_unit(np.frombuffer(file.read_bytes(), np.uint8)), build_namespace(layers_of(ids), MODEL)
    check_unit_matches(unit, space, ids, 0, 11)
    with pytest.raises(DamagedUnitError, match="holds 11 tokens: expected at most 10"):
        check_unit_matches(unit, space, ids, 0, 10)


@pytest.mark.parametrize("codec", ["dense", "frames"])
def test_get_unit_with_more_tokens_than_blocks_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Both read paths enforce the bound."""
    made(tmp_path / "s", range(11), codec=codec)
    for blocks, has_capacity in ((1, False), (2, True)):
        monkeypatch.setattr("kvmnn.store.read_path.count_blocks_per_unit", lambda *_, blocks=blocks: blocks)
        with PrefixStore(tmp_path / "s", read_only=True) as store:
            result, damaged = store.get(range(11), model=MODEL), store.verify().damaged
        assert result.tokens == (11 if has_capacity else 0)
        for text in () if has_capacity else (*result.notes, *damaged):
            assert "holds 11 tokens: expected at most 8" in text
        assert bool(damaged) != has_capacity
