"""Read-only file systems, and clocks that jump."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefixes import MODEL, layers_of

from kvmnn.store import PrefixStore

IDS = [*range(20)]
_READING = """
import sys
sys.path[:0] = sys.argv[2:]
from prefixes import MODEL, layers_of, same
from kvmnn.errors import OutputError
from kvmnn.store import PrefixStore, load_key
ids = [*range(20)]
for number in range(2):
    with PrefixStore(sys.argv[1], read_only=True, key=load_key()) as store:
        assert same(store.get([*ids, 9], model=MODEL).layers, ids, 20)
        assert store.match(ids[:7], model=MODEL) == 7 and store.verify().damaged == () and store.ls().texts
try:
    with PrefixStore(sys.argv[1], key=load_key()) as store:
        store.put([5, 6, 7], layers_of([5, 6, 7]), model=MODEL)
except OutputError as error:
    assert "cannot be written" in str(error), error
else:
    raise AssertionError("something was put into a file system that is read only")
print("served")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "in use"])
def test_open_read_only_file_system(tmp_path: Path, is_open: bool, encryption: str) -> None:
    """A read-only mount in a namespace of its own: for root as well nothing can be written there."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    folder = tmp_path / "s"
    store = PrefixStore(folder, block_tokens=4)
    store.put(IDS, layers_of(IDS), model=MODEL)
    if not is_open:
        store.close()
    mount = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"'
    argv = ["unshare", "-rm", "sh", "-c"]
    if subprocess.run([*argv, mount, "sh", str(folder)], capture_output=True, check=False).returncode:
        store.close()
        pytest.skip("no file system can be mounted here")
    places = [path for path in sys.path if path]
    run = f'{mount} && shift && exec "$@"'
    reading = [sys.executable, "-P", "-c", _READING, str(folder), *places]
    done = subprocess.run([*argv, run, "sh", str(folder), *reading], capture_output=True, text=True, check=False)
    store.close()
    assert done.stdout == "served\n", done.stderr


@pytest.mark.parametrize("limit", ["max_bytes", "quota"])
def test_eviction_order_does_not_depend_on_clock(
    tmp_path: Path, encryption: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used text is evicted, independently of the clock and of file times."""
    texts = [[first, *range(7)] for first in range(10, 60, 10)]
    with PrefixStore(tmp_path / "s", block_tokens=4) as store:
        size = max(store.put(ids, layers_of(ids), model=MODEL).stored_bytes for ids in texts)
        store.gc(max_bytes=0)
    hours = iter([0, -50, 900, -4000, 3, -1, 0, 0, 0, 0] * 50)
    monkeypatch.setattr(time, "time", lambda: 1e9 + 3600 * next(hours))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e18 + 3600e9 * next(hours)))
    with PrefixStore(tmp_path / "s", namespace="a", **{limit: 3 * size}) as store:  # type: ignore[arg-type]
        for number, ids in enumerate(texts[:3]):
            store.put(ids, layers_of(ids), model=MODEL)
            for file in (tmp_path / "s").glob("units/*/*"):
                os.utime(file, (4e9 - number * 1e8,) * 2)
        assert store.get(texts[0], model=MODEL).tokens == 8
        for ids in texts[3:]:
            store.put(ids, layers_of(ids), model=MODEL)
        assert [store.match(ids, model=MODEL) for ids in texts] == [8, 0, 0, 8, 8]
        assert store.verify().damaged == ()
        assert all(entry.unused_for is not None and entry.unused_for >= 0 for entry in store.ls().texts)
