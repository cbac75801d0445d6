"""Behaviour that directory, Redis and fsspec stores share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefixes import MODEL, layers_of, same

from kvmnn import KvmnnError, LayerCache
from kvmnn.arrays.opaque_state import make_state
from kvmnn.store import PrefixStore, write_prefix
from kvmnn.store.directory.backend import DirectoryBackend
from kvmnn.store.metrics import format_prometheus
from kvmnn.store.remote.records import make_unit_name

pytest.importorskip("fsspec")


@pytest.fixture(params=["directory", "redis", "file", "memory"])
def url(request: pytest.FixtureRequest, new_url: Callable[[str], str]) -> str:
    return new_url(request.param)


def put(store: PrefixStore, ids, **options):
    return store.put(ids, layers_of(ids, **options), model=MODEL)


def test_put_beyond_max_bytes_is_noted(url: str) -> None:
    """Of the same text put again with a smaller bound, too."""
    ids = list(range(40))
    with PrefixStore(url, max_bytes=10) as store:
        made = put(store, ids)
        said = "the size limit (max_bytes, --size-limit) has no room for more: "
        said += "at least {} bytes are needed, 10 are allowed"
        (note,) = made.notes
        assert (made.stored_tokens, made.removed_bytes, made.stored_bytes) == (0, 0, 0)
        assert store.match(ids, model=MODEL) == 0
    with PrefixStore(url, max_bytes=1 << 20) as store:
        made = put(store, ids)
        assert (made.stored_tokens, made.notes) == (40, ())
        assert note == said.format(f"{made.stored_bytes:,}")
        assert put(store, ids).stored_tokens == 40
    with PrefixStore(url, max_bytes=10) as store:
        again = put(store, ids)
        said = "the size limit (max_bytes, --size-limit) has no room for more: 10 bytes are allowed"
        assert (again.known_tokens, again.stored_tokens, again.notes) == (40, 0, (said,))
        assert (again.removed_bytes, store.stats().bytes) == (made.stored_bytes, 0)


@pytest.mark.parametrize(("bound", "said"), [(0, "max_bytes is 0: expected at least 1"), (-5, "max_bytes is -5")])
def test_open_max_bytes_must_be_positive(url: str, bound: int, said: str) -> None:
    with pytest.raises(KvmnnError, match=said):
        PrefixStore(url, max_bytes=bound)


def test_closed_store_refuses_every_call(url: str) -> None:
    """Every call raises the same error."""
    store = PrefixStore(url)
    ids = list(range(8))
    put(store, ids)
    store.park("chat", ids, layers_of(ids), model=MODEL)
    store.close()
    store.close()
    texts: tuple[Callable, ...] = (store.match, store.find, store.get, store.pin, store.unpin, store.delete)
    calls: list[Callable[[], object]] = [lambda call=call: call(ids, model=MODEL) for call in texts]
    calls += [store.sessions, store.gc, store.verify, store.stats, store.ls, lambda: store.models]
    calls += [lambda: put(store, ids), lambda: put(store, [1, 2]), lambda: store.export(ids, "none", model=MODEL)]
    calls += [lambda: store.resume("chat"), lambda: store.forget("chat")]
    calls += [lambda: store.park("chat", ids, layers_of(ids), model=MODEL), store.__enter__]
    for call in calls:
        with pytest.raises(KvmnnError, match=r": the store is closed$"):
            call()
    store.close()


def test_put_other_shape_of_same_model_is_refused(url: str) -> None:
    """The stored shape applies; once nothing of it is left, another may be put."""
    ids = list(range(8))
    with PrefixStore(url, block_tokens=4) as store:
        put(store, ids)
        with pytest.raises(KvmnnError) as error:
            put(store, [*ids, 9], layers=3)
        said = "under the model a model it holds 2 layers, 2 kv heads x 4 dims, fp16, these are 3 layers, "
        assert said in str(error.value) and "another model needs a fingerprint of its own" in str(error.value)
        one, two = layers_of(ids)
        others = [one, LayerCache(layer=5, keys=two.keys, values=two.values)]
        with pytest.raises(KvmnnError, match="it holds a layer 1 of 2 kv heads x 4, V 4, these are a layer 5 of 2 kv"):
            store.put(ids, others, model=MODEL)
        with pytest.raises(KvmnnError, match=r"these are 2 layers, 2 kv heads x 4 dims \(V 3\), fp16: another"):
            narrow = [LayerCache(layer=c.layer, keys=c.keys, values=c.values[:, :, :3].copy()) for c in layers_of(ids)]
            store.put(ids, narrow, model=MODEL)
        assert put(store, ids, layers=2, dtype="<f4").stored_tokens == 8
        assert same(store.get([*ids, 9], model=MODEL).layers, ids, 8)
        store.put(ids, others, model="another")
        store.delete(ids, model=MODEL)
        assert (store.models, store.stats().models) == (("another",), ("another",))
        put(store, ids, layers=3)
        assert same(store.get(ids, model=MODEL).layers, ids, 8, layers=3)


def test_get_equal_precisions_prefer_the_first_put(url: str) -> None:
    ids = list(range(8))
    for model, types in (("one", ("<f4", "<f2")), ("two", ("<f2", "<f4"))):
        with PrefixStore(url) as store:
            for dtype in types:
                store.put(ids, layers_of(ids, dtype=dtype), model=model)
    with PrefixStore(url) as store:
        caches = [LayerCache(layer=0, keys=np.ones((1, 8, 4), "<u2"), values=np.ones((1, 8, 4), "<u2"))]
        store.put(ids, caches, model="two")
        assert [store.get(ids, model=model).dtype for model in ("one", "two")] == ["fp32", "fp16"]


def files_of(url: str, store: PrefixStore) -> list[str]:
    """Names of units, in the order of their puts."""
    if "://" not in url:
        return sorted(str(path) for path in Path(url).glob("units/*/*.unit"))
    known = sorted(store._backend.list_valid_records(), key=lambda record: (record.start, -record.ids.size))
    return [make_unit_name(record.unit) for record in known]


def damage(url: str, store: PrefixStore, name: str) -> None:
    if "://" not in url:
        data = Path(name).read_bytes()
        Path(name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return
    (data,) = store._backend.key_values.get_many([name])
    store._backend.key_values.put_many({name: data[:-1] + bytes([data[-1] ^ 1])})


def made(url: str) -> list[list[int]]:
    """Texts of which the second and third go on from the first, in a store."""
    texts = [[*range(8)], [*range(16)], [*range(8), 50, 51, 52], [90, 91]]
    with PrefixStore(url, block_tokens=4) as store:
        for ids in texts:
            put(store, ids)
    return texts


def test_verify_reports_sound_and_lost_units(url: str) -> None:
    texts = made(url)
    with PrefixStore(url) as store:
        whole = store.verify()
        assert (whole.units, whole.tokens, whole.lost, len(whole.damaged)) == (4, 21, 0, 0)
        damage(url, store, files_of(url, store)[0])
        found = store.verify()
        assert (found.units, found.tokens, found.lost, len(found.damaged)) == (1, 2, 2, 1)
        assert str(found).splitlines()[1] == "1 more unit damaged, and 2 units lost that went on from them:"
        assert [store.match(ids, model=MODEL) for ids in texts] == [0, 0, 0, 2]
        assert (store.stats().units, store.verify().units) == (1, 1)


@pytest.mark.parametrize("codec", ["dense", "frames"])
def test_get_exchanged_units_of_same_ids_are_not_used(url: str, codec: str) -> None:
    """Two units of the same ids that changed places: each is sound, and its rows are those of another text."""
    one, two = [*range(4), 50, 51, 52, 53], [*range(10, 14), 50, 51, 52, 53]
    with PrefixStore(url, block_tokens=4, codec=codec) as store:
        for ids in (one[:4], two[:4], one, two):
            put(store, ids)
        swap(url, store, *files_of(url, store)[2:])
    with PrefixStore(url) as store:
        found = store.get(one, model=MODEL)
        assert same(found.layers, one, 4)
        assert "follows other tokens than the index says" in found.notes[0]
        counted = store.usage(own=True).counters["damages"]
        assert len(store.verify().damaged) == 1
        assert store.usage(own=True).counters["damages"] == counted + 1
        assert [store.get(ids, model=MODEL).notes for ids in (one, two)] == [(), ()]
        put(store, one)
        assert same(store.get(one, model=MODEL).layers, one, 8)


def swap(url: str, store: PrefixStore, one: str, two: str) -> None:
    if "://" not in url:
        first, second = Path(one).read_bytes(), Path(two).read_bytes()
        Path(one).write_bytes(second)
        Path(two).write_bytes(first)
        return
    first, second = store._backend.key_values.get_many([one, two])
    store._backend.key_values.put_many({one: second, two: first})


def test_get_notes_what_a_damaged_unit_loses(url: str) -> None:
    texts = made(url)
    with PrefixStore(url, ram_bytes=0) if "://" in url else PrefixStore(url) as store:
        damage(url, store, files_of(url, store)[0])
        (note,) = store.get(texts[0], model=MODEL).notes
        said = (
            "(tokens 0 to 7 of a text, with 2 units after them)" if "://" not in url else ", with what goes on from it:"
        )
        assert said in note
        store.gc()
        assert (store.stats().units, store.ls().texts[0].tokens) == (1, 2)


def test_gc_directory_names_foreign_files(tmp_path: Path) -> None:
    """In every folder of a store; what processes that were killed have left is removed."""
    made(str(tmp_path / "s"))
    names = [
        "letter",
        "spaces/x.json",
        "staging/mine",
        "units/000/00000001.unit.bak",
        "units/1/00000001.unit",
        "units/a",
    ]
    for name in names:
        (tmp_path / "s" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "s" / name).write_text("x")
    left = [tmp_path / "s" / name for name in (".store.json.kvmnn-1-0123abcd.tmp", "spaces/.x.kvmnn-1-0123abcd.tmp")]
    for path in left:
        path.write_text("x")
    with PrefixStore(tmp_path / "s") as store:
        store.park("chat", [1], layers_of([1]), model=MODEL)
        store.pin([1], model=MODEL)
        cleaned = store.gc()
        assert cleaned.foreign == ("letter", "spaces/x.json", "staging/mine", *names[3:4], "units/1/", "units/a")
        assert "not kvmnn's, and left where they are: 6 files (letter, " in str(cleaned)
        assert not any(path.exists() for path in left)
        assert store.gc().foreign == cleaned.foreign
        store.gc(max_bytes=0)


def test_gc_file_system_keeps_recent_uploads(tmp_path: Path) -> None:
    """As in a directory; unfinished uploads have no lock, and stay for an hour."""
    made(f"file://{tmp_path}/s")
    units = tmp_path / "s" / "units"
    names = ["letter", f"{5:032x}.0123abcd.tmp", f"{6:032x}.0123abcd.tmp", f"{7:032x}", f"{8:032x}"]
    for name in names:
        (units / name).write_text("x")
    for name in (names[1], names[3]):
        os.utime(units / name, (0, 0))
    with PrefixStore(f"file://{tmp_path}/s") as store:
        cleaned = store.gc()
        assert (cleaned.foreign, cleaned.other_files, cleaned.units) == (("units/letter",), 2, 0)
        assert cleaned.young_files == 1
        assert "left as a put may be at work: 1 file younger than an hour\n" in str(cleaned)
        assert [(units / name).exists() for name in names] == [True, False, True, False, True]


def test_pin_survives_loss_of_its_text(url: str) -> None:
    """Once the text is put again the pin applies, until `unpin`."""
    text, other = [*range(11)], [*range(60, 75)]
    for look in (lambda store: store.verify(), lambda store: store.get(text, model=MODEL)):
        with PrefixStore(url, block_tokens=4, ram_bytes=0) if "://" in url else PrefixStore(url, block_tokens=4) as s:
            put(s, text)
            s.pin(text, model=MODEL)
            (name,) = files_of(url, s)
            damage(url, s, name)
            look(s)
            assert (s.match(text, model=MODEL), s.stats().pinned) == (0, 1)
            put(s, other)
            s.gc()
        with PrefixStore(url) as s:
            assert put(s, text).known_tokens == 0
            assert {(entry.tokens, entry.pinned) for entry in s.ls().texts} == {(11, True), (15, False)}
            s.gc(max_bytes=0)
            assert (s.match(text, model=MODEL), s.match(other, model=MODEL), s.stats().pinned) == (11, 0, 1)
            assert s.pin(text, model=MODEL).was_pinned
            assert s.unpin(text, model=MODEL).was_pinned
            assert s.stats().pinned == 0
            s.gc(max_bytes=0)
            assert s.match(text, model=MODEL) == 0


def test_pin_applies_again_in_a_longer_text(url: str) -> None:
    text = [*range(11)]
    longer = [*text, 7, 7, 7]
    with PrefixStore(url, block_tokens=4, ram_bytes=0) if "://" in url else PrefixStore(url, block_tokens=4) as store:
        put(store, text)
        store.pin(text, model=MODEL)
        damage(url, store, files_of(url, store)[0])
        store.verify()
        put(store, [*text[:10], 9, 9])
        store.gc(max_bytes=0)
        assert store.match(longer, model=MODEL) == 0
        put(store, longer)
        store.gc(max_bytes=0)
        assert store.match(longer, model=MODEL) == 14
        assert store.unpin(text, model=MODEL).was_pinned
        store.gc(max_bytes=0)
        assert store.match(longer, model=MODEL) == 0


def lose(url: str, store: PrefixStore, name: str) -> None:
    if "://" not in url:
        Path(name).unlink()
    else:
        store._backend.key_values.delete([name])


@pytest.mark.parametrize("how", [damage, lose])
def test_pin_keeps_the_beginning_of_a_damaged_text(url: str, how: Callable[[str, PrefixStore, str], None]) -> None:
    text, other = [*range(75)], [*range(32), *range(100, 150)]
    with PrefixStore(url, block_tokens=4, ram_bytes=0) if "://" in url else PrefixStore(url, block_tokens=4) as store:
        for tokens in (32, 64, 75):
            put(store, text[:tokens])
        store.pin(text, model=MODEL)
        how(url, store, files_of(url, store)[2])
        assert store.get(text, model=MODEL).tokens == 64
        put(store, other)
        with_other = store.stats().bytes
        store.gc(max_bytes=with_other - 1)
        assert (store.match(text, model=MODEL), store.match(other, model=MODEL)) == (64, 32)
        how(url, store, files_of(url, store)[1])
        assert store.get(text, model=MODEL).tokens == 32
        assert "above the limit, of texts that are pinned" in store.gc(max_bytes=0).kept
        assert [(entry.tokens, entry.pinned) for entry in store.ls().texts] == [(32, True)]
        assert store.delete(text[:32], model=MODEL).is_refused
        assert (store.stats().pinned, store.verify().damaged) == (1, ())
    with PrefixStore(url) as store:
        assert put(store, text).known_tokens == 32
        put(store, other)
        assert {(entry.tokens, entry.pinned) for entry in store.ls().texts} == {(75, True), (82, False)}
        store.gc(max_bytes=0)
        assert (store.match(text, model=MODEL), store.stats().units, store.verify().damaged) == (75, 2, ())
        assert store.unpin(text, model=MODEL).was_pinned
        store.gc(max_bytes=0)
        assert store.stats().units == store.stats().pinned == 0


def test_pin_of_state_keeps_the_beginning_without_it(url: str) -> None:
    text = [*range(38)]
    state = [make_state(3, "recurrent_states", bytes(64), dtype="float32", shape=(4, 4))]
    with PrefixStore(url, block_tokens=4, ram_bytes=0) if "://" in url else PrefixStore(url, block_tokens=4) as store:
        store.put(text, layers_of(text), model=MODEL, states=state)
        store.pin(text, model=MODEL)
        lose(url, store, files_of(url, store)[1])
        assert len(store.verify().damaged) == 1
        assert store.gc(max_bytes=0).units == 0
        assert store.get(text, model=MODEL, partial=True).tokens == 38
        store.put(text, layers_of(text), model=MODEL, states=state)
        store.gc(max_bytes=0)
        assert store.get(text, model=MODEL).tokens == 38
        assert store.unpin(text, model=MODEL).was_pinned
        store.gc(max_bytes=0)
        assert store.stats().units == store.stats().states == 0


def test_unpin_lost_text(url: str) -> None:
    text = [*range(11)]
    with PrefixStore(url, ram_bytes=0) if "://" in url else PrefixStore(url) as store:
        put(store, text)
        store.pin(text, model=MODEL)
        damage(url, store, files_of(url, store)[0])
        store.verify()
        assert store.unpin(text, model=MODEL).was_pinned
        put(store, text)
        store.gc(max_bytes=0)
        assert store.stats().units == store.stats().pinned == 0


def test_delete_explains_why_a_text_stays(url: str) -> None:
    text, longer = [*range(8)], [*range(16)]
    with PrefixStore(url, block_tokens=4) as store:
        put(store, text)
        store.pin(text, model=MODEL)
        assert store.delete(text, model=MODEL).kept == "it is pinned"
        store.unpin(text, model=MODEL)
        put(store, longer)
        assert store.delete(text, model=MODEL).kept == "other texts go on from it"
        store.put(text, layers_of(text), model=MODEL, label="a story")
        kept = store.delete(text, model=MODEL).kept
        assert kept == "other texts go on from it; only the label 'a story' was removed"
        assert store.count_labelled("a story") == 0


def test_write_prefix_checks_token_ids(url: str, tmp_path: Path) -> None:
    with PrefixStore(url) as store:
        put(store, [*range(8)])
        found = store.get([*range(9)], model=MODEL)
    for ids in ([*range(7), 9], [*range(7)]):
        with pytest.raises(KvmnnError, match="the token ids are not those of the prefix of 8 tokens"):
            write_prefix(found, ids, str(tmp_path / "out.npz"), where="s")
    assert write_prefix(found, [*range(8), 77], str(tmp_path / "out.npz"), where="s").tokens == 8


def test_ls_texts_have_distinct_ends(url: str) -> None:
    with PrefixStore(url, block_tokens=4) as store:
        for ids in ([*range(20)], [*range(12), 99], [5, 6]):
            put(store, ids)
        ends = {tuple(entry["last_ids"]) for entry in store.ls().to_dict()["texts"]}
        assert len(ends) == 3 and {ids[-1] for ids in ends} == {19, 99, 6}


def test_match_32_bit_ids_are_found_to_the_token(url: str) -> None:
    """Placeholders of pictures are hashes of 30 to 32 bits: two pictures share the text before them alone."""
    rng = np.random.default_rng(8)
    text = list(range(100, 140))
    pictures = [rng.integers(1 << 24, 1 << 32, 40).tolist() for _ in range(3)]
    one, two, three = ([*text, *picture, 7, 8] for picture in pictures)
    two[40:60] = one[40:60]
    with PrefixStore(url, block_tokens=32) as store:
        for ids in (one, two):
            store.put(ids, layers_of(ids), model=MODEL)
        for ids, tokens in ((one, 82), (two, 82), (three, 40), (two[:61], 61), ([*one[:70], 5], 70)):
            found = store.get(ids, model=MODEL)
            assert found.tokens == tokens
            assert same(found.layers, ids, tokens)
        assert not store.verify().damaged
    with PrefixStore(url) as store:
        assert store.match(two, model=MODEL) == 82


def test_park_of_lossy_layers_says_so(url: str) -> None:
    ids = list(range(40))
    with PrefixStore(url) as store:
        store.park("chat", ids, layers_of(ids), model=MODEL, loss="rounded by a cast")
        assert store.resume("chat").prefix.label == "LOSSY"


@pytest.mark.parametrize("engine", ["directory", "redis", "file"])
def test_rm_counts_what_stays_in_shared_units(
    engine: str, new_url: Callable[[str], str], run: Callable[..., Any]
) -> None:
    """Of the text alone, as far as it shares a unit; it goes with the sharers and what is left, by its handle."""
    url = new_url(engine)
    begin = [*range(100)]
    texts = {"alice": [*begin, *range(1000, 1300)], "bob": [*begin, *range(2000, 2300)]}
    with PrefixStore(url) as store:
        for label, ids in texts.items():
            store.put(ids, layers_of(ids), model=MODEL, label=label)
    removed = json.loads(run("store", "rm", url, "alice", "--json").out)
    assert (removed["units"], removed["unshared_tokens"]) == (0, 300)
    assert removed["kept"].startswith(
        "its first 400 tokens stay: 100 that other texts have or a pin keeps, and 300 of this text alone, in a unit"
    )
    with PrefixStore(url) as store:
        assert store.match(texts["alice"], model=MODEL) == 400
    removed = json.loads(run("store", "rm", url, "bob", "--json").out)
    assert "unshared_tokens" not in removed
    assert removed["kept"] == "its first 100 tokens stay, which other texts have or a pin keeps"
    (entry,) = json.loads(run("store", "ls", url, "--json").out)["texts"]
    assert run("store", "rm", url, entry["key"][:6]).out.startswith("removed 1 unit, ")
    with PrefixStore(url) as store:
        assert (store.match(texts["alice"], model=MODEL), store.stats().units) == (0, 0)


def test_delete_counts_what_stays_in_a_part(url: str) -> None:
    text = [*range(700)]
    others = [[*text[:456], *range(1000, 1100)], [*text[:300], *range(3000, 3020)]]
    with PrefixStore(url) as store:
        for ids in (text, *others):
            put(store, ids)
        removed = store.delete(text, model=MODEL)
        assert (removed.units, removed.unshared_tokens) == (1, 56)
        assert removed.kept.startswith("its first 512 tokens stay: 456 that other texts have or a pin keeps, and 56 of")
        for ids in others:
            assert same(store.get(ids, model=MODEL).layers, ids, len(ids))


def test_delete_counts_what_stays_with_a_pinned_beginning(url: str) -> None:
    text = [*range(400)]
    with PrefixStore(url) as store:
        store.put(text, layers_of(text), model=MODEL, label="long")
        store.pin(text[:100], model=MODEL)
        removed = store.delete(text, model=MODEL)
        assert (removed.units, removed.unshared_tokens, removed.is_refused) == (0, 300, False)
        assert store.count_labelled("long") == 0
        store.unpin(text[:100], model=MODEL)
        assert store.delete(text, model=MODEL).kept == ""


@pytest.mark.parametrize("sizes", [(200, 203), (121, 213, 913), (128, 256)])
def test_delete_takes_shorter_texts_along(url: str, sizes: tuple[int, ...]) -> None:
    """Also those that end within a block, which they have in units of their own; up to a pinned one."""
    text = [*range(max(sizes))]
    with PrefixStore(url) as store:
        for size in sizes:
            store.put(text[:size], layers_of(text[:size]), model=MODEL, label=f"turn {size}")
        num_units, num_bytes = store.stats().units, store.stats().bytes
        removed = store.delete(text, model=MODEL)
        assert (removed.units, removed.bytes, removed.unshared_tokens, removed.kept) == (num_units, num_bytes, 0, "")
        assert removed.lost_labels == tuple(f"turn {size}" for size in sizes[:-1])
        assert (store.match(text, model=MODEL), store.ls().texts) == (0, ())
        for size in sizes:
            put(store, text[:size])
        store.pin(text[: sizes[0]], model=MODEL)
        removed = store.delete(text, model=MODEL)
        assert removed.kept == f"its first {sizes[0]} tokens stay, which other texts have or a pin keeps"
        assert [entry.tokens for entry in store.ls().texts] == [sizes[0]]
        assert same(store.get(text, model=MODEL).layers, text, sizes[0])


def test_stats_count_units_that_no_get_finds(url: str) -> None:
    """One that the server took, or whose file is lost, and both that go on from it."""
    begin = [*range(8)]
    texts = [begin, [*begin, *range(60, 71)], [*begin, *range(80, 90)], [5, *begin]]
    state = [make_state(3, "recurrent_states", bytes(64), dtype="float32", shape=(4, 4))]
    with PrefixStore(url, block_tokens=4, namespace="a") as store, PrefixStore(url, namespace="b") as other:
        for ids in texts:
            put(store, ids)
        other.put(begin, layers_of(begin), model=MODEL, states=state)
        assert store.stats().lost_units == 0 and "damaged" not in str(store.stats())
        backend = store._backend
        if isinstance(backend, DirectoryBackend):
            min(backend.folder.rglob("*.unit")).unlink()
        else:
            (own,) = (namespace for namespace in backend.list_namespaces() if namespace.tenant == "a")
            (unit,) = [
                record.unit
                for record in backend.list_valid_records()
                if record.parent == own.key and record.ids.tolist() == begin
            ]
            backend.key_values.delete([make_unit_name(unit)])
        stats = store.stats()
        assert stats.to_dict()["lost_units"] == stats.lost_units == 3
        lost_text = "\n  damaged: 3 units without bytes, or after such a unit: no get finds them (store verify)\n"
        assert lost_text in str(stats)
        assert other.stats().lost_units == 0 and store.stats(all_namespaces=True).lost_units == 3
        assert "\nkvmnn_store_lost_units 3\n" in format_prometheus(store.usage(), stats)
        store.verify()
        assert (store.stats().lost_units, store.stats().units) == (0, 1)


def test_stats_say_that_tokens_are_summed_over_units(url: str) -> None:
    """Two texts of 400 tokens that part after 100 have 700, of which units have 736."""
    texts = [[*range(100), *range(first, first + 300)] for first in (1000, 2000)]
    with PrefixStore(url) as store:
        put(store, texts[0])
        assert ", 400 tokens\n" in str(store.stats()) and ", 400 tokens, " in str(store.verify())
        put(store, texts[1])
        assert store.stats().tokens == store.verify().tokens == 736
        assert ", 736 tokens summed over units\n" in str(store.stats())
        assert ", 736 tokens summed over units, " in str(store.verify())
        assert ", 736 tokens summed over units, " in str(store.namespaces()[0])
        assert "# HELP kvmnn_store_tokens Tokens of all units; a token in several units counts in each.\n" in (
            format_prometheus(store.usage(), store.stats())
        )


def test_delete_names_sessions_that_have_the_ids(url: str) -> None:
    """Their ids are what was said; `forget` removes them."""
    ids, others = list(range(40)), list(range(100, 120))
    with PrefixStore(url) as store:
        store.park("longer", [*ids, 7], layers_of([*ids, 7]), model=MODEL)
        store.park("shorter", ids[:8], layers_of(ids[:8]), model=MODEL)
        store.park("another", others, layers_of(others), model=MODEL)
        put(store, ids)
        result = store.delete(ids, model=MODEL)
        assert sorted(result.sessions) == result.to_dict()["sessions"] == ["longer", "shorter"]
        assert "stay in sessions (store rm STORE NAME removes one): longer, shorter" in str(result)
        for name in ("longer", "shorter"):
            store.forget(name)
        put(store, ids)
        assert store.delete(ids, model=MODEL).sessions == ()


def test_find_session_texts_are_those_that_have_its_ids(url: str) -> None:
    """The text that goes on from its own, or what is left of it; none that parts from it, or of another model."""
    ids = list(range(100))
    with PrefixStore(url) as store:
        put(store, [*ids[:70], *range(300, 330)])
        store.park("chat", ids, layers_of(ids), model=MODEL)
        store.put(ids, layers_of(ids), model="another")
        assert [text.ids.tolist() for text in store.find_session_texts("chat")] == [ids]
        put(store, [*ids, 7, 8])
        assert [text.ids.tolist() for text in store.find_session_texts("chat")] == [[*ids, 7, 8]]
        store.delete([*ids, 7, 8], model=MODEL)
        assert store.find_session_texts("chat") == []
        put(store, ids[:8])
        assert store.match(ids, model=MODEL) == 70
        with pytest.raises(KvmnnError, match="no session"):
            store.find_session_texts("gone")


def test_ls_counts_namespaces_that_hold_something(url: str) -> None:
    ids = list(range(40))
    with PrefixStore(url, namespace="tenant") as store:
        put(store, ids)
        with PrefixStore(url) as plain:
            assert "no texts outside of the 1 namespace" in str(plain.ls())
        store.delete(ids, model=MODEL)
    with PrefixStore(url) as plain:
        assert str(plain.ls()) == "no texts"


def open_uncached(url: str) -> PrefixStore:
    return PrefixStore(url, ram_bytes=0) if "://" in url else PrefixStore(url)


def test_delete_removes_what_is_left_of_a_damaged_text(url: str) -> None:
    """With units that no search reaches any more; what another text needs stays."""
    text, other, bare = [*range(1400)], [*range(64), *range(5000, 5050)], [*range(7000, 7010)]
    with open_uncached(url) as store:
        store.put(text, layers_of(text), model=MODEL, label="long")
        put(store, other)
        lose(url, store, files_of(url, store)[2 if "://" in url else 1])
        result = store.delete(text, model=MODEL)
        assert (result.missing_tokens, result.unshared_tokens) == (888, 448)
        assert "\n  888 tokens of it were damaged or evicted before (store gc" in str(result)
        assert (store.stats().units, store.count_labelled("long"), store._backend.list_label_keys()) == (2, 0, [])
        assert same(store.get(other, model=MODEL).layers, other, 114)
        store.delete(other, model=MODEL)
        store.delete(text[:512], model=MODEL)
        assert store.stats().units == 0 and not files_of(url, store)
        store.put(bare, layers_of(bare), model=MODEL, label="bare")
        (name,) = files_of(url, store)
        lose(url, store, name)
        result = store.delete(bare, model=MODEL)
        assert (result.units, result.missing_tokens) == (0, 10)
        assert result.kept == "only the label 'bare' was removed"
        put(store, bare)
        with pytest.raises(KvmnnError, match=r"holds 10 tokens of this text of 11"):
            store.delete([*bare, 7], model=MODEL)


@pytest.mark.parametrize("engine", ["redis", "file"])
def test_delete_removes_damaged_records_and_their_units(engine: str, new_url: Callable[[str], str]) -> None:
    text = [*range(1400)]
    with PrefixStore(new_url(engine), ram_bytes=0) as store:
        store.put(text, layers_of(text), model=MODEL, label="long")
        store.put(text[:100], layers_of(text[:100]), model=MODEL)
        backend = store._backend
        (record,) = [record for record in backend.list_valid_records() if record.start == 512]
        backend.key_values.put_many({record.make_name(64): b"damaged"})
        result = store.delete(text, model=MODEL)
        assert (result.units, result.missing_tokens, list(backend.iter_records())) == (
            {"redis": 3, "file": 2}[engine],  # it leaves young units without a record to gc, as a put may be at work
            888,
            [],
        )
        assert len(backend.key_values.list_names("units")) == 3 - result.units
        state = [make_state(3, "recurrent_states", bytes(64), dtype="float32", shape=(4, 4))]
        store.put(text[:100], layers_of(text[:100]), model=MODEL, states=state, label="state")
        (record,) = [record for record in backend.list_valid_records() if record.make_name(64).startswith("states-")]
        backend.key_values.put_many({record.make_name(64): b"damaged"})
        assert store.delete(text[:100], model=MODEL).units == {"redis": 2, "file": 1}[engine]
        assert list(backend.iter_records()) == []


def test_delete_counts_no_text_without_bytes_as_going_on(url: str) -> None:
    text, longer = [*range(64)], [*range(700)]
    with open_uncached(url) as store:
        put(store, text)
        put(store, longer)
        for name in files_of(url, store)[1:]:
            lose(url, store, name)
        result = store.delete(text, model=MODEL)
        assert (result.units >= 1, result.kept, store.match(text, model=MODEL)) == (True, "", 0)


def test_stats_count_a_block_of_two_units_once(url: str) -> None:
    text = [*range(1400)]
    with open_uncached(url) as store:
        put(store, text)
        lose(url, store, files_of(url, store)[0])
        assert store.get(text, model=MODEL).tokens == 0
        for num_tokens in (100, 1400):
            put(store, text[:num_tokens])
        assert store.stats().blocks == 1400 // 64


def test_gc_removes_labels_that_cannot_be_read(url: str) -> None:
    """The error about a name says that there are some; a handle names their texts."""
    text, other = [*range(40)], [*range(50, 80)]
    with PrefixStore(url) as store:
        for ids, label in ((text, "one"), (other, "two")):
            store.put(ids, layers_of(ids), model=MODEL, label=label)
        key = store.resolve("one").key
        backend = store._backend
        if isinstance(backend, DirectoryBackend):
            path = backend.folder / "texts" / f"{key.hex()}.label"
            path.write_bytes(path.read_bytes()[:-9] + b"?" + path.read_bytes()[-8:])
        else:
            backend.key_values.put_many({f"labels/{key.hex()}": b"{"})
        said = r"no text with this label or handle \(kvmnn store ls\); 1 label cannot be read: use the handle"
        with pytest.raises(KvmnnError, match=said):
            store.resolve("one")
        assert store.resolve(key.hex()[:6]).ids.tolist() == text
        (note,) = store.verify().damaged_files
        assert f"the label of the text {key.hex()[:6]} cannot be read (gc removes it)" in note
        store.gc()
        assert store.verify().damaged_files == () and store.has_label("two")
        assert len(backend.list_label_keys()) == 1


@pytest.mark.parametrize("engine", ["directory", "redis"])
def test_rm_removes_a_session_that_ls_shows(
    engine: str, new_url: Callable[[str], str], run: Callable[..., Any]
) -> None:
    """A text whose label is equal goes first, and then the session, whatever handles begin so."""
    url, ids = new_url(engine), [*range(40)]
    with PrefixStore(url) as store:
        store.park("chat", ids, layers_of(ids), model=MODEL)
        handle = store.ls().texts[0].key[:6]
        store.park(handle, ids, layers_of(ids), model=MODEL)
        store.put(ids, layers_of(ids), model=MODEL, label="chat")
    names = ", ".join(sorted(["chat", handle]))
    assert run("store", "ls", url).out.endswith(f"\n2 sessions (store rm STORE NAME removes one): {names}\n")
    assert json.loads(run("store", "ls", url, "--json").out)["sessions"] == sorted(["chat", handle])
    said = f"removed 0 units, 0 bytes: only the session '{handle}' was removed, with its token ids"
    assert run("store", "rm", url, handle).out == f"{said}; these texts with K and V of it stay: {handle} (40 tokens)\n"
    assert run("store", "rm", url, "chat").out.endswith("stay in sessions (store rm STORE NAME removes one): chat\n")
    said = "removed 0 units, 0 bytes: only the session 'chat' was removed, with its token ids\n"
    assert run("store", "rm", url, "chat").out == said
    assert run("store", "ls", url).out == "no texts\n"
    run("store", "rm", url, "chat", code=1)
