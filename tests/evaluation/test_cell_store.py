"""Finished cells survive the end of a run, and are never confused with others."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from kvmnn.errors import OutputError, SourceError
from kvmnn.evaluation.runner import CellStore, compute_cell_key
from kvmnn.evaluation.settings import Configuration, EvaluationSettings
from kvmnn.lm.documents import Document

DOCUMENT = Document("a.txt", np.arange(5), 9, "ab" * 32)
CONFIGURATION = Configuration("streaming 64", "streaming", {"budget": 64})
BASE = ("score", "model", CONFIGURATION, DOCUMENT, EvaluationSettings(), {"trace": False})


def test_cell_store_round_trips_records(tmp_path):
    path = tmp_path / "cells.jsonl"
    with CellStore(path) as store:
        store.put("one", {"nll": 0.1 + 0.2, "tokens": [1, None]})
        store.put("two", {})
    with CellStore(path) as store:
        assert len(store) == 2
        assert store.get("one") == {"nll": 0.1 + 0.2, "tokens": [1, None]}
        assert store.get("three") is None
        store.put("three", {"x": 1})
    assert [json.loads(line)["record"]["key"] for line in path.read_text().splitlines()] == ["one", "two", "three"]


def test_cell_store_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "cells.jsonl"
    with CellStore(path) as store:
        store.put("one", {"a": 1})
    first = path.stat().st_size
    with CellStore(path) as store:
        store.put("two", {"b": 2})
    data = path.read_bytes()
    for end in range(first, len(data)):
        path.write_bytes(data[:end])
        with CellStore(path) as store:
            assert (len(store), store.get("one")) == (1, {"a": 1})
            store.put("three", {"c": 3})
        with CellStore(path) as store:
            assert (len(store), store.get("three")) == (2, {"c": 3})
    for end in range(first):
        path.write_bytes(data[:end])
        with CellStore(path) as store:
            assert len(store) == 0


def line(record: bytes) -> bytes:
    return (
        b'{"kvmnn_cell": 3, "sha256": "'
        + hashlib.sha256(record).hexdigest().encode()
        + b'", "record": '
        + record
        + b"}\n"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"some text that somebody wants to keep", "line 1 is not a cell of an evaluation: it would be overwritten"),
        (b"import os\n", "line 1 is not a cell of an evaluation"),
        (b'{"kvmnn_cell": 1, "key": "a", "cell": {}}\n[1]\n', "line 2 is not a cell"),
        (line(b'{"key": "a"}'), "line 1 is not a cell"),
        (line(b'["a", {}]'), "line 1 is not a cell"),
        (line(b'{"key": 1, "value": {}}'), "line 1 is not a cell"),
        (line(b'{"key": "a", "value": NaN}'), "line 1 is not a cell"),
        (b'{"kvmnn_cell": 4, "key": "a", "cell": {}}\n', "line 1 is of format 4: expected 3"),
        (b'{"kvmnn_cell": 3, "key": "a", "cell": {}}\n', "line 1 is not a cell"),
        (line(b"{}").replace(b"{}", b'{"key": "a", "value": {}}'), "line 1 does not have the hash"),
        (b'{"kvmnn_cell": ' + b"[" * 100_000 + b"\n", "line 1 is not a cell"),
        (line(b"[" * 100_000), "line 1 is not a cell"),
        (line(b'{"key": "a", "value": {"x": ' + b"9" * 5000 + b"}}"), "line 1 is not a cell"),
        (b"\xff\xfe\n", "line 1 is not a cell"),
        (b"\n", "line 1 is not a cell"),
    ],
)
def test_cell_store_other_files_are_refused_and_unchanged(tmp_path, data, message):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=message):
        CellStore(path)
    assert path.read_bytes() == data


def test_cell_store_edited_numbers_are_detected(tmp_path):
    path = tmp_path / "cells.jsonl"
    with CellStore(path) as store:
        store.put("one", {"nll": 2.5, "tokens": [1, 2]})
        store.put("two", {"nll": 2.5})
    data = path.read_bytes()
    for before, after in ((b"[1, 2]", b"[1, 3]"), (b'"two"', b'"six"'), (b"2.5", b"2.4")):
        path.write_bytes(data.replace(before, after, 1))
        with pytest.raises(SourceError, match=r"cells\.jsonl: line \d does not have the hash that it names"):
            CellStore(path)
    path.write_bytes(data.split(b"\n")[1] + b"\n")  # as the message says
    with CellStore(path) as store:
        assert (len(store), store.get("two")) == (1, {"nll": 2.5})


def test_cell_store_older_format_is_ignored(tmp_path):
    path = tmp_path / "cells.jsonl"
    path.write_bytes(b'{"kvmnn_cell": 2, "key": "a", "sha256": "0", "cell": {}}\n')
    with CellStore(path) as store:
        assert store.get("a") is None
        store.put("a", {"b": 1})
    assert len(path.read_bytes().splitlines()) == 2
    with CellStore(path) as store:
        assert store.get("a") == {"b": 1}


def test_cell_store_second_writer_is_refused(tmp_path):
    path = tmp_path / "cells.jsonl"
    with CellStore(path), pytest.raises(OutputError, match="another evaluation is writing it"):
        CellStore(path)
    CellStore(path).close()


def test_cell_store_unwritable_path_is_refused(tmp_path):
    with pytest.raises(OutputError, match="cannot be written"):
        CellStore(tmp_path / "nowhere" / "cells.jsonl")
    with pytest.raises(OutputError, match="cannot be written"):
        CellStore(tmp_path)


def test_compute_cell_key_depends_on_everything_but_labels():
    assert compute_cell_key(*BASE) == compute_cell_key(*BASE)
    renamed = Configuration("other label", "streaming", {"budget": 64, "sink": 4}, preset="p")
    assert compute_cell_key(
        "score", "model", renamed, dataclasses.replace(DOCUMENT, name="b"), *BASE[4:]
    ) == compute_cell_key(*BASE)
    others = [
        ("timing", *BASE[1:]),
        ("score", "other model", *BASE[2:]),
        (*BASE[:2], Configuration("x", "streaming", {"budget": 65}), *BASE[3:]),
        (*BASE[:2], Configuration("x", "streaming", {"budget": 64}, positions="stored"), *BASE[3:]),
        (*BASE[:3], dataclasses.replace(DOCUMENT, sha256="cd" * 32), *BASE[4:]),
        (*BASE[:3], dataclasses.replace(DOCUMENT, ids=np.arange(6)), *BASE[4:]),
        (*BASE[:5], {"trace": True}),
    ]
    keys = {compute_cell_key(*BASE)} | {compute_cell_key(*other) for other in others}
    assert len(keys) == 1 + len(others)


CHANGED = {
    "tokens": 100,
    "chunk": 2,
    "prompt": 64,
    "deep_from": 3,
    "seed": 1,
    "threads": 2,
    "providers": ("other",),
    "slack": 0,
    "packed": "x86-avx2",
    "frame_dtype": "fp32",
    "lossless": {},
}


@pytest.mark.parametrize("name", [entry.name for entry in dataclasses.fields(EvaluationSettings)])
def test_compute_cell_key_depends_on_scoring_settings(name):
    current = EvaluationSettings()
    others = {"repeats": 9, "prefix_store": "prefixes"}
    value = CHANGED[name] if name in CHANGED else others.get(name, not getattr(current, name))
    changed = dataclasses.replace(current, **{name: value})
    same = compute_cell_key(*BASE[:4], changed, BASE[5]) == compute_cell_key(*BASE)
    assert same == (name not in CHANGED)
