"""A damaged or forged store index: kvmnn's own errors, no wrong rows, no memory beyond the file.

SQLite keeps any type in any column. Every column gets values of every type, single bits flip anywhere in the file, and
each operation meets the result first, as the one before would have made the index again.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest
from prefixes import MODEL, layers_of, same

from kvmnn.errors import KvmnnError
from kvmnn.store import PrefixStore

resource = pytest.importorskip("resource")

MORE = int(os.environ.get("KVMNN_ATTACKS", "1"))
FLIPS = 75 * MORE
TEXTS = [[*range(11)], [*range(8), 60, 61], [*range(30, 40)]]
LONGER = [*range(8), 60, 61, 62, 63, 64]
VALUES = [None, -1, 0, 2, 5_800_000_000, 2**63 - 1, 1.5, "x", "", b"", b"x" * 16, "a" * 16]
"""5.8 GB is what ``bytes`` makes of such a number."""
MEMORY = 4 << 30


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three texts, one of them pinned, and a session."""
    folder = tmp_path_factory.mktemp("index") / "s"
    with PrefixStore(folder, block_tokens=4, codec="frames") as store:
        for ids in TEXTS:
            store.put(ids, layers_of(ids), model=MODEL)
        store.pin(TEXTS[2], model=MODEL)
        store.park("chat", TEXTS[1], layers_of(TEXTS[1]), model=MODEL)
    return folder


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """No more address space than this process has and a few gigabytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def get(store: PrefixStore) -> None:
    """What is returned is what was put."""
    for ids in (*TEXTS, LONGER, [0, 1, 2]):
        prefix = store.get(ids, model=MODEL)
        assert prefix.tokens == 0 or same(prefix.layers, ids, prefix.tokens)


OPERATIONS: dict[str, Callable[[PrefixStore], object]] = {
    "get": get,
    "match": lambda store: store.match(TEXTS[1], model=MODEL),
    "ls": lambda store: str(store.ls()),
    "stats": lambda store: str(store.stats()),
    "sessions": lambda store: store.sessions(),
    "resume": lambda store: store.resume("chat"),
    "unpin": lambda store: store.unpin(TEXTS[2], model=MODEL),
    "pin": lambda store: store.pin(TEXTS[1], model=MODEL),
    "put": lambda store: store.put(LONGER, layers_of(LONGER), model=MODEL),
    "delete": lambda store: store.delete(TEXTS[1], model=MODEL),
    "gc": lambda store: store.gc(),
    "gc to a bound": lambda store: store.gc(max_bytes=2000),
    "verify": lambda store: store.verify(),
}


def operate(folder: Path, name: str, *, read_only: bool) -> None:
    """One operation first, then `get`: nothing but errors of kvmnn, in one line."""
    with suppress(KvmnnError), PrefixStore(folder, read_only=read_only) as store:
        for each in (OPERATIONS[name], get):
            try:
                each(store)
            except KvmnnError as error:
                assert "\n" not in str(error)


def forge(path: Path, table: str, column: str, value: object) -> None:
    """Put a value into a column of all rows, whatever type the schema wants; the schema is as before then."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA writable_schema = ON")
        schema = connection.execute("SELECT sql, name FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        loose = "replace(replace(sql, ' NOT NULL', ''), ' TEXT', '')"
        connection.execute(f"UPDATE sqlite_master SET sql = {loose} WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        with suppress(sqlite3.Error):  # a number of a row is a number
            connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))
        connection.execute("PRAGMA writable_schema = ON")
        connection.executemany("UPDATE sqlite_master SET sql = ? WHERE name = ?", schema)


def columns(path: Path) -> list[tuple[str, str]]:
    """All tables and their columns."""
    with closing(sqlite3.connect(path)) as connection:
        names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        tables = [name for (name,) in connection.execute(names).fetchall()]
        return [(name, row[1]) for name in tables for row in connection.execute(f"PRAGMA table_info({name})")]


@pytest.mark.slow
def test_store_index_forged_values_raise_kvmnn_errors(store: Path, tmp_path: Path) -> None:
    """A seeded half of all values in all columns, each before one operation; `make attack` has all before eight."""
    rng = Random(5)
    forged = [(*column, value) for column in columns(store / "index.sqlite") for value in VALUES]
    assert len(forged) > 200
    if MORE == 1:
        forged = rng.sample(forged, len(forged) // 2)
    for table, column, value in forged:
        for name in rng.sample(sorted(OPERATIONS), k=min(len(OPERATIONS), MORE)):
            folder = shutil.copytree(store, tmp_path / "s")
            forge(folder / "index.sqlite", table, column, value)
            print(table, column, value, name)
            operate(folder, name, read_only=rng.random() < 0.5)
            shutil.rmtree(folder)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    ("table", "column", "value"), [("space", "key", 5_800_000_000), ("unit", "skip", None), ("unit", "bytes", "x")]
)
def test_store_index_forged_value_in_each_operation(
    store: Path, tmp_path: Path, table: str, column: str, value: object, name: str
) -> None:
    for read_only in (True, False):
        folder = shutil.copytree(store, tmp_path / str(read_only))
        forge(folder / "index.sqlite", table, column, value)
        operate(folder, name, read_only=read_only)


@pytest.mark.slow
def test_store_index_flipped_bits_raise_kvmnn_errors(store: Path, tmp_path: Path) -> None:
    """A seeded sample of the bits, eight times as many in `make attack`."""
    data = (store / "index.sqlite").read_bytes()
    written = [at for at, byte in enumerate(data) if byte]
    rng = Random(6)
    for _ in range(FLIPS):
        at = rng.choice(written) if rng.random() < 0.8 else rng.randrange(len(data))
        bit, name = rng.randrange(8), rng.choice(sorted(OPERATIONS))
        print(at, bit, name)
        folder = shutil.copytree(store, tmp_path / "s")
        (folder / "index.sqlite").write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        operate(folder, name, read_only=rng.random() < 0.3)
        shutil.rmtree(folder)


def test_store_index_damaged_is_rebuilt_by_the_same_call(store: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(store, tmp_path / "s")
    forge(folder / "index.sqlite", "unit", "skip", None)
    with PrefixStore(folder) as opened:
        assert same(opened.get(TEXTS[1], model=MODEL).layers, TEXTS[1], 10)
        assert "made again" in opened.notes[0]
        assert opened.sessions() == ["chat"]
