"""On a full disk stored texts are found, `gc` and `delete` free space, and failed puts leave nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixes import MODEL, layers_of, same

from kvmnn.errors import OutputError
from kvmnn.store import PrefixStore

resource = pytest.importorskip("resource")

TEXTS = [[*range(begin, begin + 60)] for begin in range(0, 500, 100)]
SCRIPT = """
import shutil, sys
from pathlib import Path
from prefixes import MODEL, layers_of, same
from kvmnn.errors import OutputError
from kvmnn.store import PrefixStore, load_key

folder, texts = Path(sys.argv[1], "s"), [[*range(begin, begin + 90)] for begin in range(0, 500, 100)]

def fill():
    with open(folder.parent / "fill", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

def put(store, ids):
    return store.put(ids, layers_of(ids, layers=100), model=MODEL)

with PrefixStore(folder, namespace="a", quota=3 << 20, key=load_key()) as store:
    for ids in texts:
        put(store, ids)
    store.pin(texts[0], model=MODEL)
    size = store.stats().bytes // len(texts)
fill()
with PrefixStore(folder, namespace="a", quota=3 << 20, key=load_key()) as store:
    assert "index.sqlite: cannot be written (" in store.notes[0], store.notes
    assert "no space is left on the disk" in store.notes[0], store.notes
    assert all(same(store.get(ids, model=MODEL).layers, ids, 90, layers=100) for ids in texts)
    assert store.verify().units == 5
    try:
        put(store, [1, 2, 3])
    except OutputError as error:
        assert "No space left" in str(error), error
    else:
        raise AssertionError("there is no room")
    assert store.delete(texts[1], model=MODEL).units == 1  # a text of a block and a tail, which its file has
fill()
with PrefixStore(folder, namespace="a", quota=3 << 20, key=load_key()) as store:
    assert store.gc(max_bytes=2 * size + size // 2).kept == ""
    found = [store.match(ids, model=MODEL) for ids in texts]
    assert (found[0], sorted(found)) == (90, [0, 0, 0, 90, 90]), found
    assert (store.stats().units, len([*folder.glob("units/*/*")])) == (2, 2)
    fill()
    assert store.gc(max_bytes=0).units == 1  # while it is open
    assert [store.match(ids, model=MODEL) for ids in texts] == [90, 0, 0, 0, 0]
with PrefixStore(folder, namespace="a", quota=3 << 20, key=load_key()) as store:
    assert (store.notes, store.verify().units, store.gc().other_files) == ((), 1, 0)
"""

FEW_BLOCKS = """
import sys
from pathlib import Path
from prefixes import MODEL, layers_of, same
from kvmnn.store import PrefixStore, load_key

folder, texts = Path(sys.argv[1], "s"), [[*range(begin, begin + 90)] for begin in range(0, 500, 100)]

def fill():
    with open(folder.parent / "fill", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

def files():
    return len([*folder.glob("units/*/*")])

with PrefixStore(folder, namespace="a", quota=3 << 20, key=load_key()) as store:
    for ids in texts:
        store.put(ids, layers_of(ids), model=MODEL)
    assert store.stats().bytes < 5 * 4400
fill()
with PrefixStore(folder, namespace="a", quota=3 << 20, key=load_key()) as store:
    assert store.delete(texts[1], model=MODEL).units == 1
    assert [store.match(ids, model=MODEL) for ids in texts] == [90, 0, 90, 90, 90]
fill()
next(folder.glob("units/*/*")).unlink()
with PrefixStore(folder, namespace="a", quota=3 << 20, key=load_key()) as store:
    assert store.gc().units == 1
    fill()
    cleaned = store.gc(max_bytes=10_000)
    assert (cleaned.units, cleaned.lost) == (1, 0) and 4000 < cleaned.bytes < 5000
    assert (files(), store.stats().units) == (2, 2)
(folder.parent / "fill").unlink()
with PrefixStore(folder, namespace="a", quota=3 << 20, key=load_key()) as store:
    assert (store.notes, store.verify().units, store.verify().rebuilt_parts) == ((), 2, ())
    with store._backend.index.begin_reading() as cursor:
        assert cursor.has_row("SELECT 1 FROM pragma_journal_mode WHERE journal_mode = 'wal'")
"""


@pytest.fixture
def full() -> Iterator[None]:
    """No file grows; what is full for all of a process is its bound for files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPT, FEW_BLOCKS], ids=["units", "units of a few blocks"])
def test_store_on_full_disk_finds_texts_and_frees_space(tmp_path: Path, script: str, encryption: str) -> None:
    """On a small file system of its own, if the user may mount one."""
    tests = Path(__file__).parents[1]
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=4m none "$0" && exec "$@"', tmp_path]
    if sys.platform != "linux" or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("needs a file system of its own")
    paths = [str(tests / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]  # an empty one: this folder
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [*mount, sys.executable, "-P", "-c", script, tmp_path]  # of a checkout's folder there may be no modules
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_open_unwritable_index_serves_texts(tmp_path: Path, encryption: str, request: pytest.FixtureRequest) -> None:
    with PrefixStore(tmp_path / "s") as store:
        store.put(TEXTS[0], layers_of(TEXTS[0]), model=MODEL)
    request.getfixturevalue("full")
    with PrefixStore(tmp_path / "s") as store:
        assert "cannot be written" in store.notes[0]
        assert same(store.get(TEXTS[0], model=MODEL).layers, TEXTS[0], 60)
        for call in (store.gc, lambda: store.pin(TEXTS[0], model=MODEL)):
            with pytest.raises(OutputError, match="cannot be written"):
                call()


def test_create_on_full_disk_leaves_nothing(tmp_path: Path, encryption: str, full: None) -> None:
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(OutputError):
            PrefixStore(tmp_path / name)
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]
