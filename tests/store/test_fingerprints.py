"""Fingerprints of models that a store remembers: the same as computed, and computed again after any change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvmnn.formats.mnn import compute_fingerprint
from kvmnn.store import PrefixStore, fingerprints
from kvmnn.store.fingerprints import MNN_METHOD, read_or_compute_fingerprint


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("llm.mnn", "llm.mnn.weight", "llm_config.json"):
        (folder / name).write_bytes(name.encode() * 9)
    PrefixStore(tmp_path / "S").close()
    monkeypatch.setattr(fingerprints, "_MIN_AGE_SECONDS", -60.0)
    return folder


def count_computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def compute(path: str) -> str:
        calls.append(path)
        return compute_fingerprint(path)

    monkeypatch.setattr(fingerprints, "MNN_METHOD", MNN_METHOD._replace(compute=compute))
    return calls


def test_remembered_fingerprint_is_the_computed_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = model.parent / "S", count_computed(monkeypatch)
    assert read_or_compute_fingerprint(str(model), store, write=False) == compute_fingerprint(str(model))
    for _ in range(3):
        assert read_or_compute_fingerprint(str(model), store) == compute_fingerprint(str(model))
    assert len(calls) == 2  # without `write` nothing was remembered
    with PrefixStore(store) as opened:
        assert opened.gc().foreign == ()


def test_fingerprint_is_not_written_into_an_encrypted_store_without_its_key(model: Path) -> None:
    folder = model.parent / "E"
    PrefixStore(folder, key=bytes(32)).close()
    assert read_or_compute_fingerprint(str(model), folder) == compute_fingerprint(str(model))
    assert not (folder / "models").exists()


def test_remembered_fingerprint_of_changed_files_is_computed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, weights = model.parent / "S", model / "llm.mnn.weight"
    before = read_or_compute_fingerprint(str(model), store)
    stat = weights.stat()
    weights.write_bytes(b"x" * stat.st_size)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the time of the contents can be set back
    assert read_or_compute_fingerprint(str(model), store) == compute_fingerprint(str(model)) != before
    (memo,) = (store / "models").iterdir()
    memo.write_bytes(b"{")
    assert read_or_compute_fingerprint(str(model), store) == compute_fingerprint(str(model))


def test_fingerprint_of_fresh_files_is_not_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "_MIN_AGE_SECONDS", 5.0)
    calls = count_computed(monkeypatch)
    for _ in range(2):
        read_or_compute_fingerprint(str(model), model.parent / "S")
    assert len(calls) == 2
    assert not (model.parent / "S" / "models").exists()
    read_or_compute_fingerprint(str(model), model.parent / "none")
    assert not (model.parent / "none").exists()
