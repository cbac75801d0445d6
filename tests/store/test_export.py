"""An exported text in one file: imported bit for bit, and refused if a byte of it is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from prefixes import MODEL, layers_of, same

from kvmnn import KvmnnError, LayerCache
from kvmnn.errors import OutputError, SourceError
from kvmnn.frames.buffers import integrity_checksum
from kvmnn.store import PrefixStore, read_exported

BEGIN, IDS = list(range(10)), [*range(8), 50, 51, 52, 53, 54, 55, 56, 57, 58]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A text whose blocks lie in two units, of which the first has a tail that is not its own."""
    with PrefixStore(tmp_path / "s", block_tokens=4) as store:
        for ids in (BEGIN, IDS):
            store.put(ids, layers_of(ids), model=MODEL)
        made = store.export(IDS, tmp_path / "text", model=MODEL)
        assert made.bytes == (tmp_path / "text").stat().st_size
        assert made.tokens == 17
        with pytest.raises(OutputError, match="exists already"):
            store.export(IDS, tmp_path / "text", model=MODEL)
        store.export(IDS, tmp_path / "text", model=MODEL, force=True)
    return tmp_path / "text"


def test_export_of_more_than_is_stored_names_the_stored_text(exported: Path, tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s") as store:
        (key,) = [entry.key for entry in store.ls().texts if entry.tokens == len(IDS)]
        for ids, num_stored in (([*IDS, 1], len(IDS)), ([*IDS[:9], 1], 9)):
            message = f"holds {num_stored} tokens of this text of {len(ids)} .* of the text {key[:6]} of 17: name that"
            with pytest.raises(KvmnnError, match=message):
                store.export(ids, tmp_path / "more", model=MODEL)
        store.export(store.resolve(key[:6]).ids, tmp_path / "more", model=MODEL)
        with pytest.raises(KvmnnError, match=r"holds 0 tokens of this text of 1 under this model \(kvmnn store ls"):
            store.export([1], tmp_path / "none", model=MODEL)


def test_import_file_round_trips_between_stores(exported: Path, tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "t", block_tokens=16) as store:
        assert store.import_file(exported).known_tokens == 0
        assert store.import_file(exported).known_tokens == 17
        assert same(store.get(IDS, model=MODEL).layers, IDS, 17)


@pytest.mark.parametrize("key", [None, bytes(range(32))])
def test_export_carries_the_label(tmp_path: Path, key: bytes | None) -> None:
    if key is not None:
        pytest.importorskip("cryptography")
    with PrefixStore(tmp_path / "s", namespace="team", key=key) as store:
        store.put(BEGIN, layers_of(BEGIN), model=MODEL, label="another")
        store.put(IDS, layers_of(IDS), model=MODEL, label="the prompt")
        store.export(IDS, tmp_path / "text", model=MODEL)
        store.delete(BEGIN, model=MODEL)
        store.put([7], layers_of([7]), model=MODEL)
        store.export([7], tmp_path / "bare", model=MODEL)
    for label, expected in ((None, "the prompt"), ("mine", "mine"), (None, "mine")):
        with PrefixStore(tmp_path / "t", key=key) as store:
            result = store.import_file(tmp_path / "text", label=label)
            assert result.notes == (("its label was 'the prompt', and is 'mine' now",) if label else ())
            assert [entry.label for entry in store.ls().texts] == [expected]
            assert store.resolve(expected).ids.tolist() == IDS
    with PrefixStore(tmp_path / "u", key=key) as store:
        store.import_file(tmp_path / "bare")
        assert [entry.label for entry in store.ls().texts] == [""]


def test_import_of_unprintable_label_is_refused(exported: Path, tmp_path: Path) -> None:
    data = exported.read_bytes()
    (size,) = struct.unpack_from("<I", data, 8)
    document = json.dumps({**json.loads(data[20 : 20 + size]), "label": "a\nb"}).encode()
    head = data[:8] + struct.pack("<IQ", len(document), integrity_checksum(document))
    exported.write_bytes(head + document + data[20 + size :])
    with PrefixStore(tmp_path / "t") as store:
        with pytest.raises(SourceError, match=r"text: its label is 'a\\nb': expected 1 to 256 printable characters"):
            store.import_file(exported)
        assert store.ls().texts == ()


@pytest.mark.slow
def test_read_exported_flipped_byte_is_refused(exported: Path) -> None:
    """Whatever is changed, it is refused in one line."""
    good = exported.read_bytes()
    for at in range(0, len(good), 3):
        exported.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        with pytest.raises(KvmnnError) as refused:
            read_exported(exported, 1)
        assert str(exported) in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", ["take", "order"])
def test_read_exported_units_of_other_order_are_refused(exported: Path, wrong: str) -> None:
    """Rows of later tokens are never returned for earlier ones."""
    good = exported.read_bytes()
    (size,) = struct.unpack_from("<I", good, 8)
    document, units = json.loads(good[20 : 20 + size]), good[20 + size :]
    first = document["units"][0]
    if wrong == "take":
        first["take"] -= 4
    else:
        document["units"].reverse()
        units = units[first["bytes"] :] + units[: first["bytes"]]
    changed = json.dumps(document).encode()
    exported.write_bytes(good[:8] + struct.pack("<IQ", len(changed), integrity_checksum(changed)) + changed + units)
    with pytest.raises(SourceError, match=r"unit . holds tokens from 8 on: those from [04] on are missing"):
        read_exported(exported)


def test_read_exported_first_version_is_accepted(exported: Path) -> None:
    """As kvmnn wrote them at first."""
    good = exported.read_bytes()
    exported.write_bytes(b"KVMNNPX1" + good[8:12] + good[20:])
    model, ids, layers = read_exported(exported)
    assert (model, ids.tolist()) == (MODEL, IDS) and same(layers, IDS, 17)


@pytest.mark.parametrize("cut", [0, 5, 11, 12, 100, 400, -1])
def test_read_exported_truncated_file_is_refused(exported: Path, cut: int) -> None:
    exported.write_bytes(exported.read_bytes()[:cut])
    with pytest.raises(SourceError):
        read_exported(exported)
    exported.write_bytes(exported.read_bytes() + b"x")
    with pytest.raises(SourceError):
        read_exported(exported)


def test_export_damaged_text_is_refused(tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s", block_tokens=4) as store:
        store.put(IDS, layers_of(IDS), model=MODEL)
        (file,) = tmp_path.glob("s/units/*/*.unit")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        with pytest.raises(SourceError, match="damaged, was removed"):
            store.export(IDS, tmp_path / "text", model=MODEL)
    assert not (tmp_path / "text").exists()


@pytest.mark.parametrize("codec", ["dense", "frames"])
@pytest.mark.parametrize("tokens", [1, 7, 128, 300, 512, 515, 1000])
def test_export_contains_exactly_the_requested_text(tmp_path: Path, codec: str, tokens: int) -> None:
    """Also where another text continues it in the same unit, from stores and from files."""
    rng = np.random.default_rng(1)
    ids = rng.integers(1 << 16, 1 << 24, 1100).tolist()
    other = [*ids[:300], *rng.integers(1 << 16, 1 << 24, 400).tolist()]
    keys = np.repeat(np.cumsum(rng.normal(size=(2, 1100, 8)).astype("<f4"), 1), 2, 2)
    layers = [LayerCache(layer=0, keys=keys, values=keys[::-1])]
    asked = other[:tokens] if tokens < 700 else ids[:tokens]
    rows = [LayerCache(layer=0, keys=keys[:, :700], values=keys[::-1, :700])]
    with PrefixStore(tmp_path / "s", codec=codec) as store:
        for text, caches in ((ids, layers), (other, rows)):
            store.put(text, caches, model=MODEL)
        made = store.export(asked, tmp_path / "text", model=MODEL)
        wanted = store.get(asked, model=MODEL).layers
        whole = store.export(ids, tmp_path / "whole", model=MODEL).bytes
    data = (tmp_path / "text").read_bytes()
    assert made.bytes == len(data) < whole
    for text in (ids, other):
        for token in text[tokens:] if text[:tokens] == asked else text[300:]:
            assert np.array([token], "<u4").tobytes() not in data or token in asked
    for _ in range(2):
        model, found, caches = read_exported(tmp_path / "text")
        assert (model, found.tolist()) == (MODEL, asked)
        assert all(np.array_equal(getattr(caches[0], part), getattr(wanted[0], part)) for part in ("keys", "values"))
        with PrefixStore(tmp_path / "t") as store:
            store.import_file(tmp_path / "text")
            store.export(asked, tmp_path / "text", model=MODEL, force=True)
