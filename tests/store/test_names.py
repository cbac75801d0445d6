"""Labels and handles of texts: found by either, on every backend, and gone with the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prefixes import MODEL, layers_of

from kvmnn import KvmnnError
from kvmnn.store import PrefixStore
from kvmnn.store.directory.backend import DirectoryBackend
from kvmnn.store.remote.backend import MemoryCache
from kvmnn.store.remote.records import make_unit_name

pytest.importorskip("fsspec")

SYSTEM = list(range(70))
CHAT = [*SYSTEM, 5, 6, 7]


@pytest.fixture(params=["directory", "redis", "file"])
def store(request: pytest.FixtureRequest, new_url: Callable[[str], str]):
    with PrefixStore(new_url(request.param)) as opened:
        yield opened


def test_label_and_handle_name_a_text(store: PrefixStore) -> None:
    store.put(SYSTEM, layers_of(SYSTEM), model=MODEL, label="the system prompt")
    store.put([9, 9], layers_of([9, 9]), model=MODEL)
    listing = store.ls()
    labels = {entry.label: entry for entry in listing.texts}
    assert {label: entry.tokens for label, entry in labels.items()} == {"the system prompt": 70, "": 2}
    handles = listing.make_handles()
    assert len(set(handles)) == 2
    assert {len(handle) for handle in handles} == {6}
    for entry, handle in zip(listing.texts, handles, strict=True):
        text = store.resolve(handle)
        assert (text.key.hex(), text.ids.size, text.namespace.model) == (entry.key, entry.tokens, MODEL)
        assert str(entry).startswith(handle)
    assert store.resolve("the system prompt").ids.tolist() == SYSTEM
    with pytest.raises(KvmnnError, match="there is no text with this label or handle"):
        store.resolve("the system")
    assert store.resolve(listing.texts[0].key[:4]).key.hex() == listing.texts[0].key
    with pytest.raises(KvmnnError, match="a handle has at least 4 letters"):
        store.resolve(listing.texts[0].key[:3])


def test_ls_reads_each_unit_of_a_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = list(range(40))
    with PrefixStore(tmp_path / "s", block_tokens=4) as store:
        for tokens in (8, 16, 24, 32, 33):
            store.put(ids[:tokens], layers_of(ids[:tokens]), model=MODEL)
        files, calls = store._backend.files, list[int]()
        read_head = files.read_head
        monkeypatch.setattr(files, "read_head", lambda unit: calls.append(unit) or read_head(unit))
        (entry,) = store.ls().texts
        assert (entry.tokens, entry.last_ids, len(calls)) == (33, tuple(range(25, 33)), store.stats().units)


def test_label_stays_when_a_longer_text_goes_on(store: PrefixStore) -> None:
    store.put(SYSTEM, layers_of(SYSTEM), model=MODEL, label="system")
    store.put(CHAT, layers_of(CHAT), model=MODEL, label="chat")
    assert next(entry.label for entry in store.ls().texts) == "chat"
    assert store.resolve("system").ids.tolist() == SYSTEM
    note = "its label was 'system', and is 'renamed' now"
    assert store.put(SYSTEM, layers_of(SYSTEM), model=MODEL, label="renamed").notes == (note,)
    assert store.put(SYSTEM, layers_of(SYSTEM), model=MODEL, label="renamed").notes == ()
    assert store.put(SYSTEM, layers_of(SYSTEM), model=MODEL, label="x", keep_label=True).notes == ()
    assert store.resolve("renamed").ids.tolist() == SYSTEM
    with pytest.raises(KvmnnError, match="no text"):
        store.resolve("system")
    store.put([1], layers_of([1]), model=MODEL, label="chat")
    with pytest.raises(KvmnnError, match="2 texts are called so"):
        store.resolve("chat")


def test_labels_go_with_their_texts(store: PrefixStore) -> None:
    store.put(CHAT, layers_of(CHAT), model=MODEL, label="chat")
    store.put([1], layers_of([1]), model=MODEL, label="one")
    store.delete(CHAT, model=MODEL)
    with pytest.raises(KvmnnError, match="no text"):
        store.resolve("chat")
    assert store.gc().foreign == ()
    assert store.resolve("one").ids.tolist() == [1]
    store.gc(0)
    with pytest.raises(KvmnnError, match="no text"):
        store.resolve("one")


def test_gc_removes_labels_of_all_namespaces(new_url: Callable[[str], str]) -> None:
    for kind in ("directory", "file"):
        url = new_url(kind)
        with PrefixStore(url, namespace="a") as tenant:
            tenant.put(CHAT, layers_of(CHAT), model=MODEL, label="chat")
        with PrefixStore(url) as store:
            store.gc(0)
            assert store._backend.list_label_keys() == []


def test_evicted_text_has_no_label(store: PrefixStore) -> None:
    """Its beginning, which another text has, stays."""
    for ids, label in ((SYSTEM, None), (CHAT, "chat")):
        store.put(ids, layers_of(ids), model=MODEL, label=label)
    longer = [*SYSTEM, *range(500, 600)]
    store.put(longer, layers_of(longer), model=MODEL, label="longer")
    backend = store._backend
    if isinstance(backend, DirectoryBackend):
        sequence = backend.list_namespaces()[0].make_sequence(np.array(CHAT, "<u4"), 64)
        last_unit = backend.find_prefix(sequence).slices[-1].unit
        backend.remove_units(lambda _: [last_unit])
    else:
        backend.delete_records([record for record in backend.list_valid_records() if 5 in record.ids[-3:]])
    assert 64 <= store.match(CHAT, model=MODEL) < len(CHAT)
    with pytest.raises(KvmnnError, match=r"'chat': its text is damaged, or was evicted: \d\d of 73 tokens are left"):
        store.resolve("chat")
    assert (store.count_labelled("chat"), store.resolve("longer").ids.tolist()) == (0, longer)
    store.gc()
    assert len(store._backend.list_label_keys()) == 1


def test_label_of_a_damaged_text_names_what_is_left(store: PrefixStore) -> None:
    for ids, label in ((SYSTEM[:64], None), (CHAT, "a")):
        store.put(ids, layers_of(ids), model=MODEL, label=label)
    store.put([1, 2], layers_of([1, 2]), model=MODEL, label="b")
    handle = store.resolve("a").key.hex()[:6]
    store.pin(CHAT, model=MODEL)
    backend = store._backend
    if isinstance(backend, DirectoryBackend):
        for unit in (2, 3):
            backend.files.make_path(unit).unlink()
    else:
        lost = [record for record in backend.list_valid_records() if record.start == 64 or record.ids.size == 2]
        backend.key_values.delete([make_unit_name(record.unit) for record in lost])
        backend._memory_cache = MemoryCache(0)
    with pytest.raises(KvmnnError, match=r"stored, but not listed: it is damaged|64 tokens of this text of 73"):
        store.describe(CHAT, model=MODEL)
    assert [store.get(ids, model=MODEL).tokens for ids in (CHAT, [1, 2])] == [64, 0]
    for name in ("a", handle):
        with pytest.raises(
            KvmnnError, match=f"'{name}': its text is damaged, or was evicted: 64 of 73 tokens are left"
        ):
            store.resolve(name)
        assert store.resolve(name, partial=True).ids.tolist() == CHAT
    with pytest.raises(KvmnnError, match="'b': its text is damaged, or was evicted: 0 of 2 tokens are left"):
        store.resolve("b")
    assert store.resolve("b", partial=True).ids.tolist() == [1, 2]
    assert store.delete(CHAT, model=MODEL).is_refused and store.match(CHAT, model=MODEL) == 64
    assert store.unpin(store.resolve("a", partial=True).ids, model=MODEL).was_pinned
    store.put(CHAT, layers_of(CHAT), model=MODEL)
    assert store.resolve("a").ids.tolist() == CHAT


@pytest.mark.parametrize("engine", ["directory", "redis"])
def test_puts_that_evict_leave_few_labels_of_evicted_texts(engine: str, new_url: Callable[[str], str]) -> None:
    url, texts = new_url(engine), [[number, *SYSTEM[:20]] for number in range(60)]
    with PrefixStore(url) as store:
        nbytes = store.put(texts[0], layers_of(texts[0]), model=MODEL, label="0").stored_bytes
    with PrefixStore(url, max_bytes=5 * nbytes + nbytes // 2) as store:
        for number, ids in enumerate(texts[1:], 1):
            store.put(ids, layers_of(ids), model=MODEL, label=str(number))
        num_texts, num_labels = store.stats().texts, len(store._backend.list_label_keys())
        assert 4 <= num_texts <= 6 and num_texts <= num_labels <= num_texts + 8


def test_delete_pinned_text_changes_nothing(store: PrefixStore) -> None:
    store.put(CHAT, layers_of(CHAT), model=MODEL, label="chat")
    store.pin(CHAT, model=MODEL)
    assert store.delete(CHAT, model=MODEL).is_refused
    assert store.resolve("chat").ids.tolist() == CHAT
    store.unpin(CHAT, model=MODEL)
    assert not store.delete(CHAT, model=MODEL).is_refused
    with pytest.raises(KvmnnError, match="no text"):
        store.resolve("chat")


def test_put_command_label_in_use_is_noted(tmp_path: Path, run: Callable[..., SimpleNamespace]) -> None:
    np.savez(
        tmp_path / "kv.npz", **{"layer_0.key": np.ones((1, 2, 16), "f4"), "layer_0.value": np.ones((1, 2, 16), "f4")}
    )
    put = ("store", "put", tmp_path / "s", tmp_path / "kv.npz", "--fingerprint", "m", "--label", "q")
    assert "texts are called" not in run(*put, "--token-ids", "1,2").err
    assert "texts are called" not in run(*put, "--token-ids", "1,2").err
    assert "2 texts are called 'q' now" in run(*put, "--token-ids", "3,4").err


def test_delete_names_labelled_prefixes_that_go(store: PrefixStore) -> None:
    """Those that are pinned, that others continue, or that are no prefix, stay with their labels."""
    ids = list(range(100, 112))
    for size, label in ((3, "gone"), (8, "shared"), (11, "tail"), (12, "long")):
        store.put(ids[:size], layers_of(ids[:size]), model=MODEL, label=label)
    other = [*ids[:8], 7, 7, 7]
    store.put(other, layers_of(other), model=MODEL, label="other")
    result = store.delete(ids, model=MODEL)
    assert result.lost_labels == ("tail",) and str(result).endswith("as no pin keeps them: tail")
    assert store.resolve("shared").ids.tolist() == ids[:8]
    assert store.count_labelled("tail") == 0
    store.pin(ids[:3], model=MODEL)
    result = store.delete(other, model=MODEL)
    assert "gone" not in result.lost_labels and store.resolve("gone").ids.tolist() == ids[:3]


def test_rm_command_pinned_text_is_refused(tmp_path: Path, run: Callable[..., SimpleNamespace]) -> None:
    with PrefixStore(tmp_path / "s") as store:
        store.put(CHAT, layers_of(CHAT), model=MODEL, label="chat")
        store.pin(CHAT, model=MODEL)
    assert "nothing was removed: the text is pinned" in run("store", "rm", tmp_path / "s", "chat", code=1).err
    run("store", "unpin", tmp_path / "s", "chat")
    assert "removed 1 unit" in run("store", "rm", tmp_path / "s", "chat").out


@pytest.mark.parametrize("label", ["", "a\nb", "x" * 257])
def test_put_invalid_label_is_refused(tmp_path: Path, label: str) -> None:
    with PrefixStore(tmp_path) as store, pytest.raises(KvmnnError, match="a label is"):
        store.put([1], layers_of([1]), model=MODEL, label=label)


def test_label_file_that_is_damaged_is_no_label(tmp_path: Path) -> None:
    with PrefixStore(tmp_path) as store:
        store.put(CHAT, layers_of(CHAT), model=MODEL, label="chat")
        (path,) = tmp_path.glob("texts/*.label")
        path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9)
        assert [entry.label for entry in store.ls().texts] == [""]
        assert store.verify().damaged == ()
