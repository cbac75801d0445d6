"""Foreign entries in a store's folder or database stop no verb; `gc` names them and leaves them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from prefixes import MODEL, layers_of, same

from kvmnn.errors import KvmnnError
from kvmnn.store import BackendUnavailableError, PrefixStore

IDS, OTHER = [*range(11)], [*range(8), 60, 61]
KEY = "0" * 32


def fill(url: str) -> None:
    """Two texts, one of them pinned, and a session."""
    with PrefixStore(url, block_tokens=4) as store:
        for ids in (IDS, OTHER):
            store.put(ids, layers_of(ids), model=MODEL)
        store.pin(IDS, model=MODEL)
        store.park("chat", IDS, layers_of(IDS), model=MODEL)


@pytest.mark.parametrize("kind", ["folder", "full folder", "pipe", "link to itself"])
@pytest.mark.parametrize(
    "name",
    [
        f"tables/{KEY}-{KEY}",
        "tables/a-b",
        f"texts/{KEY}.pin",
        f"texts/{KEY}.session",
        f"spaces/{KEY}.json",
        "units/000/000000ff.unit",
        "units/0ff",
        "units/mine",
        "staging/mine",
        "mine",
    ],
)
def test_store_foreign_entry_in_folder_is_ignored(tmp_path: Path, name: str, kind: str) -> None:
    fill(str(tmp_path / "s"))
    path = tmp_path / "s" / name
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    else:
        path.mkdir()
        if kind == "full folder":
            (path / "letter").write_text("dear")
    with PrefixStore(tmp_path / "s") as store:
        for ids in (IDS, OTHER):
            assert same(store.get(ids, model=MODEL).layers, ids, len(ids))
        assert len(store.ls().texts) == store.stats().texts == 2
        cleaned = store.gc()
        assert (cleaned.units, store.verify().damaged) == (0, ())
        assert store.delete(OTHER, model=MODEL).units == 1
        assert store.gc(max_bytes=0).kept
    assert os.path.lexists(path)
    if kind == "folder" and name in ("tables/a-b", "mine", "units/mine", f"texts/{KEY}.pin"):
        assert cleaned.foreign == (f"{name}/",)


def test_put_foreign_file_in_place_of_folder_is_named(tmp_path: Path) -> None:
    fill(str(tmp_path / "s"))
    for path in (tmp_path / "s" / "spaces").iterdir():
        path.unlink()
    (tmp_path / "s" / "spaces").rmdir()
    (tmp_path / "s" / "spaces").write_text("x")
    with PrefixStore(tmp_path / "s") as store, pytest.raises(KvmnnError, match=r"spaces/[0-9a-f]+\.json: cannot be"):
        store.put([1, 2], layers_of([1, 2]), model=MODEL)


KEYS = ["order:after", "after", "units/", "pins", "sessions", "spaces", "tables", "uses", "foreign"]


@pytest.mark.parametrize("begin", KEYS)
def test_store_redis_key_of_other_type_is_ignored(new_url: Callable[[str], str], begin: str) -> None:
    """Its value counts as missing; texts under other keys are found."""
    url = new_url("redis")
    fill(url)
    with PrefixStore(url) as store:
        client = store._backend.key_values._key_values._client
        prefix = "kvmnn:" + begin
        names = [key.decode() for key in client.keys(prefix + "*")] or [prefix]
        for name in names:
            client.delete(name)
            client.rpush(name, b"a", b"b")
        for operation in (store.ls, store.gc, store.verify, store.stats, store.sessions):
            operation()
        for ids in (IDS, OTHER):
            found = store.get(ids, model=MODEL)
            assert not found.outage
            assert found.tokens == 0 or same(found.layers, ids, found.tokens)
        left = {name.removeprefix("kvmnn:") for name in names if client.exists(name)}
        assert set(store.gc().foreign) == {name for name in left if client.type(f"kvmnn:{name}") == b"list"}
        named = store.verify().damaged_files
        assert len(named) == len(left & set(store.gc().foreign))
        assert all(
            any(line.startswith(f"kvmnn:{name} is of another type") for line in named) for name in store.gc().foreign
        )
        if begin == "order:after":
            assert found.tokens == len(OTHER)  # the order is made again from the records
        else:
            assert left or begin == "units/"


def test_put_redis_key_of_other_type_is_named(new_url: Callable[[str], str]) -> None:
    url = new_url("redis")
    fill(url)
    with PrefixStore(url) as store:
        client = store._backend.key_values._key_values._client
        client.delete("kvmnn:pins")
        client.set("kvmnn:pins", b"x")
        with pytest.raises(BackendUnavailableError, match=r"refuses: HSET kvmnn:pins: WRONGTYPE"):
            store.pin(OTHER, model=MODEL)


def test_open_redis_settings_of_other_type_are_named(new_url: Callable[[str], str]) -> None:
    url = new_url("redis")
    fill(url)
    with PrefixStore(url) as store:
        client = store._backend.key_values._key_values._client
        client.delete("kvmnn:store")
        client.rpush("kvmnn:store", b"a")
    with (
        pytest.raises(KvmnnError, match="holds no prefix store: its key kvmnn:store is of another type"),
        PrefixStore(url, read_only=True) as store,
    ):
        store.ls()
