"""Traces of the engine's lossless store, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from conformance import run_index, unpack
from repository import FIXTURES
from vector_formats import store


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    return unpack(FIXTURES / "store" / "vectors.tar.xz", folder)


@pytest.mark.slow
def test_store_every_trace_is_reproduced(traces: Path) -> None:
    results = list(run_index(traces / "index.json", traces))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 140


PROBLEMS = 6
"""As many changes at once as a case tells apart: it stops after eight problems."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all numbers and strings of a document."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [leaf for number, item in enumerate(value) for leaf in leaves(item, (*path, number))]
    return [path]


def altered(value: Any) -> Any:
    return value + 1 if isinstance(value, int | float) else ("0" if value[:1] != "0" else "1") + value[1:]


@pytest.mark.slow
def test_store_every_field_of_an_event_is_compared(traces: Path, tmp_path: Path) -> None:
    seen: set[tuple[str, ...]] = set()
    for name in ("h2o_store_k_all_layers", "layer_nums_2_store", "cache1_full", "queue1_full_lazy"):
        check_fields(traces, tmp_path, name, seen)
    assert len(seen) > 40


def check_fields(traces: Path, tmp_path: Path, name: str, seen: set[tuple[str, ...]]) -> None:
    """A change in a field of any event of this trace is a problem; `seen`: the kinds of fields of others."""
    index = json.loads((traces / "index.json").read_text())
    (case,) = (case for case in index["cases"] if case["name"] == name)
    index["cases"] = [{**case, "part": "changed.tar"}]
    (tmp_path / "index.json").write_text(json.dumps(index))
    (tmp_path / "arrays.tar").write_bytes((traces / "arrays.tar").read_bytes())
    with tarfile.open(traces / "events.tar") as archive:
        document = json.load(archive.extractfile(case["events"]))  # type: ignore[arg-type]
    changes: dict[tuple[int, str], tuple[Any, ...]] = {}  # one in each field of an event, to tell their problems apart
    for path in leaves(document["events"]):
        kind = tuple(part for part in path if isinstance(part, str))
        if kind not in seen and kind != ("call",) and path[:2] not in changes:
            seen.add(kind)
            changes[path[:2]] = path
    for begin in range(0, len(changes), PROBLEMS):
        changed = json.loads(json.dumps(document))
        wanted = []
        for (event, field), path in [*changes.items()][begin : begin + PROBLEMS]:
            place = changed["events"]
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = altered(place[path[-1]])
            wanted.append(f"call {changed['events'][event]['call']}: {field}")
        found = problems(tmp_path, case["events"], changed)
        assert [text for text in wanted if not any(text in problem for problem in found)] == [], found
    without = json.loads(json.dumps(document))
    del without["events"][-1]
    assert problems(tmp_path, case["events"], without)


def problems(folder: Path, member: str, document: dict[str, Any]) -> list[str]:
    data = json.dumps(document).encode()
    with tarfile.open(folder / "changed.tar", "w") as archive:
        entry = tarfile.TarInfo(member)
        entry.size = len(data)
        archive.addfile(entry, BytesIO(data))
    store._archive.cache_clear()
    ((_, found),) = [(result.name, result.problems) for result in run_index(folder / "index.json", folder)]
    return found
