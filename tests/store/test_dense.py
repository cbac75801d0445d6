"""Stores of dense streams: history rows, shared tables, and the guarantees of frames."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dense_texts import DIMS, ROTARY, layers_of, mixed_layers_of, same, text, units
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefixes import MODEL, checksum_model

from kvmnn import KvmnnError, LayerCache, dense
from kvmnn.dense import encoder as dense_encoder
from kvmnn.dense.header import METHOD_FRAME, read_method
from kvmnn.errors import OptionError, SourceError
from kvmnn.store import PrefixStore, read_exported
from kvmnn.store.backend import StoreSettings, encode_settings
from kvmnn.store.namespace import build_namespace
from kvmnn.store.unit import MAX_CHAIN_UNITS, MIN_TABLE_TOKENS, DamagedUnitError, parse_unit
from kvmnn.store.unit_codec import LoadedSlice, decode_slices
from kvmnn.store.write_path import DenseStreamEncoder


@pytest.mark.parametrize("dtype", ["<f2", "<f4"])
def test_dense_store_texts_round_trip_in_fewer_bytes(tmp_path: Path, dtype: str) -> None:
    """Whole, cut anywhere, branched, grown by tails; and in fewer bytes than frames."""
    ids = text(1300)
    branch = [*ids[:333], *text(200, 1)]
    sizes = {}
    for codec in ("frames", "dense"):
        with PrefixStore(tmp_path / codec, codec=codec, block_tokens=16) as store:
            for each in (ids[:50], ids, branch, [*branch, 1, 2, 3]):
                store.put(each, layers_of(each, dtype), model=MODEL)
            for asked, tokens in (
                (ids, 1300),
                (ids[:700], 700),
                (branch, 533),
                ([*ids[:350], (ids[350] + 1) % 97], 350),
                (ids[:3], 3),
            ):
                found = store.get(asked, model=MODEL)
                assert (found.tokens, found.notes) == (tokens, ())
                assert same(found.layers, layers_of(asked, dtype), tokens)
            verified = store.verify()
            assert (verified.damaged, verified.units) == ((), store.stats().units)
            sizes[codec] = store.stats().bytes
    assert sizes["dense"] < 0.9 * sizes["frames"]
    assert max(unit.dense.history_rows for unit in units(tmp_path / "dense") if unit.dense) == 256


def test_dense_unit_bytes_of_hand_decoding(tmp_path: Path) -> None:
    """Taken apart by hand, for the second of two units of a text."""
    ids = text(40)
    layers = layers_of(ids)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        store.put(ids[:16], layers_of(ids[:16]), model=MODEL)
        store.put(ids, layers, model=MODEL)
        space = store._backend.list_namespaces()[0].key
    data = (tmp_path / "s" / "units" / "000" / "00000002.unit").read_bytes()
    parent = hashlib.blake2b(space + np.array(ids[:16], "<u4").tobytes(), digest_size=16).digest()
    assert data[:52] == b"KVMNNPU2" + struct.pack("<III", 24, 4, 16) + space + parent
    assert data[52:80] == struct.pack("<III", 16, 1, 1) + bytes(16)
    assert np.frombuffer(data, "<u4", 24, 80).tolist() == ids[16:]
    sums = []
    for words in (words for cache in layers for words in (cache.keys, cache.values)):
        found = 0
        for head in words[:, 16:32]:
            found = checksum_model(head.tobytes(), found)
        sums.append(found)
    assert struct.unpack_from("<Q", data, 176)[0] == checksum_model(struct.pack("<4Q", *sums))
    table = np.frombuffer(data, "<u8", 8, 184).reshape(4, 2)
    assert struct.unpack_from("<Q", data, 248)[0] == checksum_model(data[:248])
    at = 256
    for number, (size, checksum) in enumerate(table.tolist()):
        stream = data[at : at + size]
        words = (layers[number // 2].keys, layers[number // 2].values)[number % 2]
        assert dense.decode(stream, history=words[:, :16]).tobytes() == words[:, 16:].tobytes()
        assert struct.unpack_from("<Q", stream, 20)[0] == checksum
        at += size
    assert at == len(data)


@pytest.mark.slow
def test_dense_unit_flipped_byte_is_detected(tmp_path: Path) -> None:
    ids = text(24)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        store.put(ids, layers_of(ids), model=MODEL)
    good = next(tmp_path.glob("s/units/*/*.unit")).read_bytes()
    space = build_namespace(layers_of(ids), MODEL)

    def read(data: bytes) -> list[LayerCache]:
        unit = parse_unit(np.frombuffer(data, np.uint8))
        if unit.namespace_key != space.key or unit.ids.tolist() != ids:
            raise DamagedUnitError("of another text")
        return decode_slices(space, [LoadedSlice(unit, 0, unit.ids.size)], 1)

    assert same(read(good), layers_of(ids), 24)
    for at in range(len(good)):
        with pytest.raises(DamagedUnitError):
            read(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])


def test_dense_store_differently_rounded_rows_use_no_history(tmp_path: Path) -> None:
    """Another machine rounds differently: units that it puts after stored blocks use no history rows."""
    ids = text(300)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        store.put(ids[:160], layers_of(ids[:160]), model=MODEL)
        others = layers_of(ids, shift=0.5)
        store.put(ids, others, model=MODEL)
        found = store.get(ids, model=MODEL)
        assert found.tokens == 300
        for got, first, second in zip(found.layers, layers_of(ids), others, strict=True):
            assert got.keys.tobytes() == np.concatenate([first.keys[:, :160], second.keys[:, 160:]], 1).tobytes()
        assert store.verify().damaged == ()
    assert [unit.dense and unit.dense.history_rows for unit in units(tmp_path / "s")] == [0, 0]


def test_dense_store_other_process_wins_race_for_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process puts the history unit, with other rows, between encoding and recording."""
    ids = text(1100)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        units_ = store._backend
        add = units_.add_units

        def late(*arguments):
            monkeypatch.setattr(units_, "add_units", add)
            with PrefixStore(tmp_path / "s") as other:
                other.put(ids[:512], layers_of(ids[:512], shift=0.5), model=MODEL)
            return add(*arguments)

        monkeypatch.setattr(units_, "add_units", late)
        store.put(ids, layers_of(ids), model=MODEL)
        found = store.get(ids, model=MODEL)
        assert (found.tokens, found.notes) == (1100, ())
        assert store.verify().damaged == ()


def test_dense_store_uses_frames_where_streams_gain_little(tmp_path: Path) -> None:
    """A store of dense streams has frames of what does not repeat, and after it; short units are tried as streams."""
    rng = np.random.default_rng(3)
    noise = [LayerCache(layer=0, keys=words, values=words) for words in [rng.standard_normal((2, 400, 16), np.float32)]]
    cut = [LayerCache(layer=0, keys=each.keys[:, :300], values=each.values[:, :300]) for each in noise]
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        store.put(text(300), cut, model=MODEL)
        store.put(text(400), noise, model=MODEL)
        assert same(store.get(text(400), model=MODEL).layers, noise, 400)
    assert [unit.dense is None for unit in units(tmp_path / "s")] == [True, True]


@pytest.mark.parametrize("dtype", ["<f2", "<f4"])
@pytest.mark.parametrize("first", [64, 100, 255])
def test_dense_store_frames_after_streams_round_trip(tmp_path: Path, first: int, dtype: str) -> None:
    """Rows of streams lie token by token in what is returned, and those of frames come to their places in it."""
    rng = np.random.default_rng(first)
    keys, values = rng.standard_normal((2, 700, 64)).astype(dtype), rng.standard_normal((2, 700, 48)).astype(dtype)
    ids = text(700)
    with PrefixStore(tmp_path / "s", codec="dense") as store:
        for end in (first, 700):
            store.put(ids[:end], [LayerCache(layer=0, keys=keys[:, :end], values=values[:, :end])], model=MODEL)
        for end in (first - 1, first, 320, 576, 700):
            assert same(store.get(ids[:end], model=MODEL).layers, [LayerCache(layer=0, keys=keys, values=values)], end)
        store.export(ids, tmp_path / "one.prefix", model=MODEL)
    assert {unit.dense is None for unit in units(tmp_path / "s")} == {True, False}
    with PrefixStore(tmp_path / "t") as store:
        store.import_file(tmp_path / "one.prefix")
        assert same(store.get(ids, model=MODEL).layers, [LayerCache(layer=0, keys=keys, values=values)], 700)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_dense_store_any_units_round_trip(tmp_path: Path, data: st.DataObject) -> None:
    """Texts that begin alike, of rows that repeat and rows that do not, in any order and of any length."""
    dtype = data.draw(st.sampled_from(["<f2", "<f4"]))
    parts = st.tuples(st.integers(0, 2), st.sampled_from([1, 15, 16, 60, 130, 256, 300]), st.booleans())
    texts: list[list[int]] = []
    with PrefixStore(tmp_path / secrets.token_hex(8), block_tokens=data.draw(st.sampled_from([16, 64]))) as store:
        for _ in range(data.draw(st.integers(1, 6))):
            before = data.draw(st.sampled_from([[], *texts]))
            ids = before[: data.draw(st.integers(0, len(before)))]
            for seed, tokens, is_noise in data.draw(st.lists(parts, min_size=1, max_size=3)):
                ids = ids + [each + 97 * is_noise for each in text(tokens, seed)]
            store.put(ids, mixed_layers_of(ids, dtype), model=MODEL)
            texts.append(ids)
            for asked in texts:
                found = store.get(asked, model=MODEL)
                assert found.tokens == len(asked) and same(found.layers, mixed_layers_of(asked, dtype), len(asked))


def test_dense_store_chains_are_bounded(tmp_path: Path) -> None:
    ids = text(16 * 2 * (MAX_CHAIN_UNITS + 3))
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        for end in range(32, len(ids) + 1, 32):
            store.put(ids[:end], layers_of(ids[:end]), model=MODEL)
    chains = [unit.dense.chain_length for unit in units(tmp_path / "s") if unit.dense]
    assert chains == [*range(MAX_CHAIN_UNITS + 1), 0, 1]
    with PrefixStore(tmp_path / "s") as store:
        assert store.verify().damaged == ()
        assert same(store.get(ids, model=MODEL).layers, layers_of(ids), len(ids))


def test_dense_store_short_units_share_tables(tmp_path: Path) -> None:
    """The tables are built once from the first long text, kept as long as there are units, checked, and exported."""
    ids = text(400)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense", rotary=ROTARY) as store:
        store.put(ids[:100], layers_of(ids[:100]), model=MODEL)
        assert not list(tmp_path.glob("s/tables/*"))
        store.put(ids[:330], layers_of(ids[:330]), model=MODEL)
        store.put(ids, layers_of(ids), model=MODEL)
        (tables,) = tmp_path.glob("s/tables/*")
        store.export(ids, tmp_path / "f", model=MODEL)
    assert [bool(unit.dense and unit.dense.tables_key) for unit in units(tmp_path / "s")] == [False, True, True]
    model, named, layers = read_exported(tmp_path / "f")
    assert model == MODEL and named.tolist() == ids and same(layers, layers_of(ids), 400)
    data = bytearray((tmp_path / "f").read_bytes())
    data[-1] ^= 1
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(SourceError, match=r"unit \d: its tables are damaged"):
        read_exported(tmp_path / "f")
    with PrefixStore(tmp_path / "s") as store:
        assert store.gc().other_files == 0 and tables.exists()
        assert store.get(ids, model=MODEL).tokens == 400
    good = tables.read_bytes()
    tables.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with PrefixStore(tmp_path / "s", read_only=True) as store:
        found = store.get(ids, model=MODEL)
        assert found.tokens == 100 and "its tables are damaged" in found.notes[0]
        assert same(found.layers, layers_of(ids), found.tokens)
    with PrefixStore(tmp_path / "s", rotary=ROTARY) as store:
        assert "its tables are damaged" in store.verify().damaged[0]
        store.put(ids[:330], layers_of(ids[:330]), model=MODEL)
        assert tables.read_bytes() == good
        cleaned = store.gc(max_bytes=0)
        assert (cleaned.other_files, cleaned.other_bytes) == (1, len(good))
    assert not tables.exists()


def test_match_of_lost_tables_equals_get(tmp_path: Path) -> None:
    ids = text(640)
    with PrefixStore(tmp_path / "s", codec="dense", block_tokens=16) as store:
        store.put(ids[:100], layers_of(ids[:100]), model=MODEL)  # with tables of its own
        store.put(ids, layers_of(ids), model=MODEL)
    (tables,) = tmp_path.glob("s/tables/*")
    tables.unlink()
    with PrefixStore(tmp_path / "s", read_only=True) as store:
        found, prefix = store.find(ids, model=MODEL), store.get(ids, model=MODEL)
    assert found.tokens == prefix.tokens < 640
    assert "its tables are gone" in found.notes[0] and prefix.notes == ()


def test_dense_store_unsuitable_shared_tables_are_not_used(tmp_path: Path) -> None:
    """Tables of a first text whose rows are all but equal fit no other: units have their own then, but the shortest; a
    store that is opened again finds it out by its first short text, or by a long one.
    """
    ids, other, short = text(600), text(600, 1), text(240, 2)
    near = [LayerCache(layer=at, keys=words, values=words) for at, words in enumerate(np.ones((2, 2, 600, 16), "<f2"))]
    for name, first in (("good", layers_of(other)), ("bad", near)):
        with PrefixStore(tmp_path / name, block_tokens=16, codec="dense") as store:
            store.put(other, first, model=MODEL)
            store.put(ids, layers_of(ids), model=MODEL)
            found = store.get(ids, model=MODEL)
            assert same(found.layers, layers_of(ids), 600)
            assert found.layers[0].keys.transpose(1, 0, 2).flags.c_contiguous  # decoded in their places
    long = {
        name: [unit for unit in units(tmp_path / name) if unit.ids.size >= MIN_TABLE_TOKENS and unit.ids[0] == ids[0]]
        for name in ("good", "bad")
    }
    assert [bool(unit.dense and unit.dense.tables_key) for unit in long["good"]] == [True]
    assert [bool(unit.dense and unit.dense.tables_key) for unit in long["bad"]] == [False]
    for name in ("good", "bad"):
        with PrefixStore(tmp_path / name) as store:
            for end in (200, 240):
                store.put(short[:end], layers_of(short[:end]), model=MODEL)
            store.put([*ids, *short], layers_of([*ids, *short]), model=MODEL)
            store.put([96, *short], layers_of([96, *short]), model=MODEL)
            for each in ([*ids, *short], short, [96, *short]):
                found = store.get(each, model=MODEL)
                assert found.tokens == len(each) and same(found.layers, layers_of(each), found.tokens)
            assert store.verify().damaged == ()
    shared = {
        name: {unit.ids.size: bool(unit.dense and unit.dense.tables_key) for unit in units(tmp_path / name)[2:]}
        for name in ("good", "bad")
    }
    assert set(shared["good"].values()) == {True}
    assert shared["bad"] == {size: size < 64 for size in shared["good"]} and min(shared["bad"]) < 64


def test_dense_store_one_unit_in_sixteen_tries_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts of two units the one after that of which tables were made, every eighth, each after one of frames."""
    tried = []
    frames_of_layer = DenseStreamEncoder.measure_layer_frames

    def noted(*arguments):
        tried.append(number)
        return frames_of_layer(*arguments)

    monkeypatch.setattr(DenseStreamEncoder, "measure_layer_frames", noted)
    words = np.random.default_rng(3).integers(0, 1 << 15, (2, 2, 1000, 16), np.uint16).view("<f2")
    noise = [LayerCache(layer=at, keys=each, values=each) for at, each in enumerate(words)]
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        for number in range(20):
            ids = text(1000, number)
            layers = noise if number in (11, 17) else layers_of(ids)
            put = store.put(ids, layers, model=MODEL)
            assert put.stored_bytes < 1.01 * put.raw_bytes
            assert same(store.get(ids, model=MODEL).layers, layers, 1000)
        assert store.verify().damaged == ()
    assert tried == [0, 1, 9, 17, 18]


@pytest.mark.parametrize("how", ["by token, read-only", "not aligned", "big-endian"])
def test_dense_store_strided_and_big_endian_rows(tmp_path: Path, how: str) -> None:
    ids = text(600)
    plain = layers_of(ids)

    def moved(words):
        if how == "big-endian":
            return words.astype(">f2")
        if how == "not aligned":
            room = np.zeros(words.nbytes + 1, np.uint8)
            found = room[1:].view("<f2").reshape(600, 2, 16)
        else:
            found = np.empty((600, 2, 16), "<f2")
        found[:] = words.transpose(1, 0, 2)
        found.flags.writeable = False
        return found.transpose(1, 0, 2)

    layers = [LayerCache(layer=each.layer, keys=moved(each.keys), values=moved(each.values)) for each in plain]
    for name, rows in (("plain", plain), ("moved", layers)):
        with PrefixStore(tmp_path / name, block_tokens=16, codec="dense") as store:
            store.put(ids, rows, model=MODEL)
            assert same(store.get(ids, model=MODEL).layers, plain, 600)
    files = [sorted(tmp_path.glob(f"{name}/units/*/*.unit")) for name in ("plain", "moved")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]] and len(files[0]) == 2


def test_dense_store_larger_frames_are_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next trial, but for streams that are larger themselves."""
    tried: list[int] = []
    encode_next = dense_encoder.encode_next

    def noted(rows, before, reference_hints, *, frame_trial_min_bytes, **more):
        data, found = encode_next(rows, before, reference_hints, frame_trial_min_bytes=frame_trial_min_bytes, **more)
        tried[-1] += len(data) > frame_trial_min_bytes or read_method(data) == METHOD_FRAME
        return data, found

    monkeypatch.setattr(dense_encoder, "encode_next", noted)
    noise = np.random.default_rng(3).standard_normal((2, 512, 16)).astype(np.float16)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        for number in range(5):
            ids = text(1000, number)
            layers = layers_of(ids)
            if number == 4:
                layers[0].values[:, :512] = noise
            tried.append(0)
            store.put(ids, layers, model=MODEL)
            assert same(store.get(ids, model=MODEL).layers, layers, 1000)
    assert tried[1] >= 4 and tried[2:] == [0, 0, 1]


def test_dense_store_lost_index_is_rebuilt_with_tables(tmp_path: Path) -> None:
    ids = text(700)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        for end in (300, 330, 700):
            store.put(ids[:end], layers_of(ids[:end]), model=MODEL)
    for file in tmp_path.glob("s/index*"):
        file.unlink()
    with PrefixStore(tmp_path / "s") as store:
        assert store.codec == "dense"
        assert same(store.get(ids, model=MODEL).layers, layers_of(ids), 700)
        assert store.verify().damaged == ()


def test_dense_store_damaged_unit_loses_its_dependents(tmp_path: Path) -> None:
    ids = text(1200)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        store.put(ids, layers_of(ids), model=MODEL)
    files = sorted(tmp_path.glob("s/units/*/*.unit"))
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    with PrefixStore(tmp_path / "s") as store:
        found = store.get(ids, model=MODEL)
        assert found.tokens == 512 and "V of layer 1: " in found.notes[0]
        assert same(found.layers, layers_of(ids), 512)
        assert store.stats().units == 1 and store.verify().damaged == ()


def test_dense_store_keeps_its_codec(tmp_path: Path) -> None:
    """One of frames, one that does not say it, and units of both kinds in one store."""
    ids = text(500)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="frames") as store:
        store.put(ids[:200], layers_of(ids[:200]), model=MODEL)
    about = tmp_path / "s" / "store.json"
    settings = json.loads(about.read_text())
    assert settings.pop("codec") == "frames" and len(settings.pop("checksum")) == 16
    with pytest.raises(OptionError, match="is a store of frames, not of dense streams"):
        PrefixStore(tmp_path / "s", codec="dense")
    about.write_text(json.dumps(settings))
    with PrefixStore(tmp_path / "s") as store:
        assert store.codec == "frames"
    about.write_text(json.dumps({**settings, "codec": "dense"}))
    with PrefixStore(tmp_path / "s") as store:
        store.put(ids, layers_of(ids), model=MODEL)
        assert same(store.get(ids, model=MODEL).layers, layers_of(ids), 500)
        assert store.verify().damaged == ()
    assert [unit.dense is None for unit in units(tmp_path / "s")] == [True, False]
    about.write_text(json.dumps({**settings, "codec": "zip"}))
    with pytest.raises(KvmnnError, match='codec: found "zip", expected one of dense, frames'):
        PrefixStore(tmp_path / "s")
    with pytest.raises(OptionError, match="codec is 'zip': expected one of dense, frames"):
        PrefixStore(tmp_path / "t", codec="zip")


@pytest.mark.parametrize("codec", ["dense", "frames"])
def test_dense_store_settings_are_rebuilt(tmp_path: Path, codec: str) -> None:
    ids = text(400)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec=codec) as store:
        store.put(ids, layers_of(ids), model=MODEL)
    path = tmp_path / "s" / "store.json"
    settings = path.read_bytes()
    for damaged in (None, b"", settings[:-9], b"\xff" * 50, b'{"schema": "kvmnn-store", "schema_version": 1}'):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with PrefixStore(tmp_path / "s", read_only=True) as store:
            assert (store.codec, store.match(ids, model=MODEL)) == (codec, 400)
            assert "store.json: " in store.notes[0] and "those that the index and units say" in store.notes[0]
            assert store.verify().rebuilt_parts == store.notes, "as with writing, below"
        assert (path.read_bytes() if path.exists() else None) == damaged, "a reader changes nothing"
        with PrefixStore(tmp_path / "s") as store:
            assert store.codec == codec and same(store.get(ids, model=MODEL).layers, layers_of(ids), 400)
            assert "store.json: " in store.notes[0] and "is made again by what the index" in store.notes[0]
            assert store.verify().rebuilt_parts == store.notes
        assert path.read_bytes() == settings


@pytest.mark.parametrize("url", ["directory", "file"])
@pytest.mark.parametrize("change", [{"codec": "frames"}, {"policy": "benefit"}, {"checksum": "0" * 16}, {"new": 1}])
def test_edited_settings_are_not_obeyed(tmp_path: Path, url: str, change: dict[str, object]) -> None:
    """An edit that contradicts no unit: dense streams and frames may be in one store."""
    ids = text(400)
    name, path = tmp_path / "s", tmp_path / "s" / "store.json"
    if url == "file":
        pytest.importorskip("fsspec")
        name, path = f"file://{tmp_path}/s", tmp_path / "s" / "store" / "about"
    with PrefixStore(name, block_tokens=16, codec="dense") as store:
        store.put(ids, layers_of(ids), model=MODEL)
    settings = path.read_bytes()
    path.write_text(json.dumps(json.loads(settings), indent=2))  # the same values
    with PrefixStore(name) as store:
        assert store.notes == ()
    path.write_text(json.dumps(json.loads(settings) | change))
    with PrefixStore(name) as store:
        assert (store.codec, store.policy) == ("dense", "lru")
        assert "was changed by other means than kvmnn, as its checksum shows" in store.notes[0]
        assert same(store.get(ids, model=MODEL).layers, layers_of(ids), 400) and store.verify().rebuilt_parts
    assert path.read_bytes() == settings


def test_settings_of_frames_are_not_obeyed_where_the_index_was_lost(tmp_path: Path) -> None:
    """The units say that they are dense streams."""
    ids = text(400)
    with PrefixStore(tmp_path / "s", block_tokens=16, codec="dense") as store:
        store.put(ids, layers_of(ids), model=MODEL)
    (tmp_path / "s" / "store.json").write_bytes(encode_settings(StoreSettings(16, "frames")))
    for path in (tmp_path / "s").glob("index.sqlite*"):
        path.unlink()
    with PrefixStore(tmp_path / "s") as store:
        assert store.codec == "dense" and store.match(ids, model=MODEL) == 400
        assert "says that units are frames, and the units are dense streams" in store.notes[1]
        assert store.verify().rebuilt_parts == store.notes


@pytest.mark.parametrize("url", ["directory", "file"])
@pytest.mark.parametrize("tokens", [9, 400])
@pytest.mark.parametrize(
    "change",
    [{"block_tokens": 16}, {"policy": "benefit"}, {"block_tokens": 16, "codec": "frames"}, {"codec": "frames"}],
)
def test_settings_of_another_store_are_not_obeyed(
    tmp_path: Path, url: str, tokens: int, change: dict[str, object]
) -> None:
    """A document that matches its checksum; of a text shorter than a block no record says how many tokens one has."""
    ids = text(tokens)
    name, path = tmp_path / "s", tmp_path / "s" / "store.json"
    if url == "file":
        pytest.importorskip("fsspec")
        name, path = f"file://{tmp_path}/s", tmp_path / "s" / "store" / "about"
    with PrefixStore(name, codec="dense") as store:
        store.put(ids, layers_of(ids), model=MODEL)
    settings = path.read_bytes()
    others = encode_settings(StoreSettings(64, "dense")._replace(**change))
    for read_only in (True, False):
        path.write_bytes(others)
        with PrefixStore(name, read_only=read_only) as store:
            assert (store.block_tokens, store.codec, store.policy) == (64, "dense", "lru")
            assert "says that " in store.notes[0] and store.match(ids, model=MODEL) == tokens
            assert store.notes[0] in str(store.verify())
        assert path.read_bytes() == (others if read_only else settings)
    with PrefixStore(name) as store:
        assert store.notes == () and store.verify().rebuilt_parts == ()


@pytest.mark.parametrize("damaged", [None, b"{"])
def test_lost_settings_of_an_empty_store_are_not_guessed(tmp_path: Path, damaged: bytes | None) -> None:
    with PrefixStore(tmp_path, codec="frames") as store:
        store.put(text(40), layers_of(text(40)), model=MODEL)
        store.gc(max_bytes=0)
    path = tmp_path / "store.json"
    path.unlink() if damaged is None else path.write_bytes(damaged)
    with pytest.raises(KvmnnError, match=r"no unit says what its codec is: write what the store was made with into"):
        PrefixStore(tmp_path, create=False)
    with PrefixStore(tmp_path, codec="frames") as store:
        assert store.codec == "frames" and len(store.notes) == 1


def test_process_killed_before_it_wrote_settings_leaves_a_store_to_create(tmp_path: Path) -> None:
    PrefixStore(tmp_path, codec="frames").close()
    (tmp_path / "store.json").unlink()
    with PrefixStore(tmp_path, create=False) as store:
        assert (store.verify().units, store.notes) == (0, ())
    with PrefixStore(tmp_path, codec="frames") as store:
        assert (store.codec, store.notes) == ("frames", ())


def test_dense_store_remote_round_trips(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    ids, url = text(1000), f"file://{tmp_path}/r"
    with PrefixStore(url, block_tokens=16, codec="dense", rotary=ROTARY) as store:
        for end in (300, 340, 1000):
            store.put(ids[:end], layers_of(ids[:end]), model=MODEL)
        assert store.verify().damaged == ()
    with PrefixStore(url) as store:
        assert store.codec == "dense"
        found = store.get(ids, model=MODEL)
        assert found.notes == () and same(found.layers, layers_of(ids), 1000)
        assert store.gc().other_files == 0 and store.verify().units == 4
        assert list((tmp_path / "r" / "tables").iterdir())
        store.gc(max_bytes=0)
        (tables,) = (tmp_path / "r" / "tables").iterdir()
        assert store.gc().young_files == 1 and tables.exists()
        os.utime(tables, (0, 0))
        assert store.gc().other_files == 1 and not tables.exists()
    with pytest.raises(OptionError, match="is a store of dense streams, not of frames"):
        PrefixStore(url, codec="frames")


def test_dense_store_rope_too_wide_for_heads_is_refused(tmp_path: Path) -> None:
    """More words than any head has are refused; a layer whose heads have fewer than others is coded without."""
    ids = text(300)
    with PrefixStore(tmp_path / "s", rotary=dense.RopeConfig(dims=2 * DIMS)) as store:
        with pytest.raises(OptionError, match="rotary has 32 dims: expected at most the head_dim, 16"):
            store.put(ids, layers_of(ids), model=MODEL)
        assert store.stats().units == 0
    small = [LayerCache(layer=9, keys=each.keys[..., :4], values=each.values[..., :4]) for each in layers_of(ids)[:1]]
    with PrefixStore(tmp_path / "s", block_tokens=64, rotary=ROTARY) as store:
        for end in (100, 300):
            put = [
                *layers_of(ids[:end]),
                LayerCache(layer=9, keys=small[0].keys[:, :end], values=small[0].values[:, :end]),
            ]
            store.put(ids[:end], put, model=MODEL)
        assert same(store.get(ids, model=MODEL).layers, [*layers_of(ids), *small], 300)


def test_dense_store_rope_none_disables_search(tmp_path: Path) -> None:
    ids = text(600)
    turns = np.arange(600)[:, None] * 10000.0 ** (-2 * np.arange(DIMS // 2) / DIMS)
    layers = []
    for cache in layers_of(ids):
        one, other = np.split(cache.keys.astype(np.float64), 2, axis=-1)
        keys = [one * np.cos(turns) - other * np.sin(turns), other * np.cos(turns) + one * np.sin(turns)]
        layers.append(replace(cache, keys=np.concatenate(keys, axis=-1).astype(np.float16)))
    sizes = {}
    for said in (ROTARY, None, "none"):
        with PrefixStore(tmp_path / str(said), rotary=said) as store:
            store.put(ids, layers, model=MODEL)
            assert same(store.get(ids, model=MODEL).layers, layers, 600)
            sizes[said] = store.stats().bytes
    assert sizes[ROTARY] == sizes[None] < 0.95 * sizes["none"]
    with pytest.raises(OptionError, match=r"rotary is 'no': expected a kvmnn\.Rotary, \"none\" or None"):
        PrefixStore(tmp_path / "other", rotary="no")


def test_dense_store_too_wide_layers_are_frames(tmp_path: Path) -> None:
    words = np.ones((1, 3, 1 << 17), np.float16)
    caches = [LayerCache(layer=0, keys=words, values=words)]
    with PrefixStore(tmp_path / "s", codec="dense") as store:
        store.put([1, 2, 3], caches, model=MODEL)
        assert store.get([1, 2, 3], model=MODEL).layers[0].keys.tobytes() == words.tobytes()
    assert units(tmp_path / "s")[0].dense is None
