"""Bytes of running engines: `mnn-real-kv-1` (live caches), `mnn-h2o-live-1` (an eviction), `mnn-prefix-1` (files).

A live cache must decode to its logical arrays, these must pack into every live element, and the operations that led to
it, replayed from the rows of its run, must give the file byte for byte, rows that are no longer live included.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmnn import CacheDroppedWarning, KVMeta, PackedCache, PackLayout

from . import h2o_live
from .common import CaseResult, Checker, run_list, sha256, unknown_lists
from .layout import check_repacked, read_sections

Arrays = list[npt.NDArray[Any]]

# -- live caches ------------------------------------------------------------------------------------------------------

_FIELDS = {
    *("name", "file", "file_sha256", "engine", "model", "heads", "head_dim", "layers", "kind", "lP", "hP", "fa"),
    *("max_len", "past", "engine_history", "ops", "config", "snap", "max_abs_err_vs_torch", "sections"),
}


def run_snapshots(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    cases = index.get("cases", ())
    yield from run_list(cases, "cases", lambda case, check: _snapshot(folder, case, _before(case, cases), check))
    yield from unknown_lists(index, ("cases",))


def _before(case: dict[str, Any], cases: Any) -> dict[str, Any] | None:
    """The nearest snapshot of the same run that comes before this one and is there."""
    names = [op[1] for op in case["ops"] if op[0] == "snap"]
    stem = case["name"].removesuffix(case["snap"])
    run = {other["snap"]: other for other in cases if other["name"] == stem + other["snap"]}
    earlier = [run[name] for name in names[: names.index(case["snap"])] if name in run]
    return earlier[-1] if earlier else None


def _steps(case: dict[str, Any], before: dict[str, Any] | None) -> list[Any]:
    first = 0 if before is None else case["ops"].index(["snap", before["snap"]]) + 1
    steps = case["ops"][first : case["ops"].index(["snap", case["snap"]])]
    return [op for op in steps if op[0] != "snap"]


def _keeps_what_it_adds(steps: list[Any]) -> bool:
    """Whether all rows added are still there at the end: nothing is dropped after something was added."""
    kinds = [op[0] for op in steps]
    return "forward" not in kinds or all(kind == "forward" for kind in kinds[kinds.index("forward") :])


def _snapshot(folder: Path, case: dict[str, Any], before: dict[str, Any] | None, check: Checker) -> None:
    check.known_fields(_FIELDS)
    sections = read_sections(folder, case, check, {"name", "offset", "bytes", "sha256"})
    flash = case["config"].get("attention_mode", 8) // 8 == 1
    layout = PackLayout(
        kv_heads=case["heads"],
        head_dim=case["head_dim"],
        dtype=case["kind"],
        lP=case["lP"],
        hP=case["hP"],
        flash_block=64 if flash else None,
    )
    check.field("fa", layout.value_block(case["max_len"]))
    earlier = (
        None
        if before is None
        else read_sections(folder, before, Checker(before), {"name", "offset", "bytes", "sha256"})
    )
    if before is not None:
        check.equal("operations of the snapshot before", before["ops"], case["ops"])
    names = []
    for layer in range(case["layers"]):
        part = {name: sections[f"layer{layer}_{name}"] for name in ("k", "v", "k_logical", "v_logical")}
        names += [f"layer{layer}_{name}" for name in part]
        label = f"layer {layer}"
        live = PackedCache.from_buffers(layout, part["k"], part["v"], case["past"], capacity=case["max_len"])
        arrays = live.to_arrays()
        check.equal(f"{label} K", sha256(arrays[0].tobytes()), sha256(part["k_logical"]))
        check.equal(f"{label} V", sha256(arrays[1].tobytes()), sha256(part["v_logical"]))
        check_repacked(layout, live, arrays, check, label)
        start = None
        if before is not None and earlier is not None:
            start = PackedCache.from_buffers(
                layout,
                earlier[f"layer{layer}_k"],
                earlier[f"layer{layer}_v"],
                before["past"],
                capacity=before["max_len"],
                dialect=_dialect(case),
            )
        steps = _steps(case, before)
        if not _keeps_what_it_adds(steps):
            continue  # some rows are in no snapshot
        cache, history = _replay(layout, case, steps, before, start, list(arrays))
        check.equal(f"{label} replayed, K", sha256(cache.key_buffer), sha256(part["k"]))
        check.equal(f"{label} replayed, V", sha256(cache.value_buffer), sha256(part["v"]))
        check.field("past", cache.past_length)
        check.field("max_len", cache.capacity)
        check.field("engine_history", history)
    check.equal("sections", sorted(sections), sorted(names))


def _dialect(case: dict[str, Any]) -> str:
    return "fork" if case["engine"].startswith("fork") else "upstream"


def _replay(
    layout: PackLayout,
    case: dict[str, Any],
    steps: list[Any],
    before: dict[str, Any] | None,
    start: PackedCache | None,
    arrays: Arrays,
) -> tuple[PackedCache, int]:
    """`steps` on the snapshot before, with the rows that they added taken from the end of this snapshot."""
    cache = start if start is not None else PackedCache(layout, dialect=_dialect(case))
    meta = KVMeta(dialect=_dialect(case))
    if before is not None:
        meta.previous = before["engine_history"]
    row = case["past"] - sum(len(op[1]) for op in steps if op[0] == "forward")
    for op in steps:
        if op[0] == "forward":
            end = row + len(op[1])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CacheDroppedWarning)
                cache.step(meta, *(array[:, row:end] for array in arrays))
            meta.sync()
            row = end
        elif op[0] == "erase":
            meta.erase(op[1], op[2])
        elif op[0] == "reserve":
            meta.set_info(0, op[1], [(begin, size) for begin, size in op[2]])
        else:
            raise ValueError(f"unknown op {op[0]!r}")
    return cache, meta.previous


# -- an eviction ------------------------------------------------------------------------------------------------------


def run_h2o(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    yield from run_list(
        index.get("snapshots", ()), "snapshots", lambda case, check: _h2o_files(folder, index, case, check)
    )
    yield from run_list(index.get("cases", ()), "cases", lambda case, check: _h2o_case(folder, index, case, check))
    yield from unknown_lists(index, ("snapshots", "cases"))


def _geometry(index: dict[str, Any]) -> PackLayout:
    return PackLayout(
        kv_heads=index["kv_heads"],
        head_dim=index["head_dim"],
        dtype={2: "fp16", 4: "fp32"}[index["element_bytes"]],
        lP=index["lP"],
        hP=index["hP"],
        flash_block=index["flash_block"],
    )


def _h2o_read(folder: Path, snapshot: dict[str, Any], layer: int) -> tuple[bytes, bytes]:
    k, v = ((folder / snapshot["files"][f"layer{layer}_{letter}"]["path"]).read_bytes() for letter in "kv")
    return k, v


def _h2o_files(folder: Path, index: dict[str, Any], case: dict[str, Any], check: Checker) -> None:
    """Each snapshot's files; and each decode step after a step without an eviction, replayed."""
    check.known_fields({"step", "past", "files"})
    layout = _geometry(index)
    for name, entry in case["files"].items():
        check.equal(f"sha256 of {name}", sha256((folder / entry["path"]).read_bytes()), entry["sha256"])
    h2o_live.check_length(index, case, check)
    evicted = {entry["after_step"] for entry in index["cases"]}
    for layer in range(len(case["files"]) // 2):
        k, v = _h2o_read(folder, case, layer)
        live = PackedCache.from_buffers(layout, k, v, case["past"], capacity=index["capacity"])
        arrays = live.to_arrays()
        check_repacked(layout, live, arrays, check, f"layer {layer}")
        earlier = [other for other in index["snapshots"] if other["step"] == case["step"] - 1]
        if case["step"] in evicted:
            continue
        if earlier:
            cache = PackedCache.from_buffers(
                layout, *_h2o_read(folder, earlier[0], layer), earlier[0]["past"], capacity=index["capacity"]
            )
        else:
            cache = PackedCache(layout)
        cache.append(*(array[:, cache.past_length :] for array in arrays))
        check.equal(f"layer {layer} replayed, K", sha256(cache.key_buffer), sha256(k))
        check.equal(f"layer {layer} replayed, V", sha256(cache.value_buffer), sha256(v))
        check.field("past", cache.past_length)


def _h2o_case(folder: Path, index: dict[str, Any], case: dict[str, Any], check: Checker) -> None:
    check.known_fields(
        {"name", "layer", "before_step", "after_step", "past_before", "remove", "reserve", "past_after", "ignored_row"}
    )
    layout = _geometry(index)
    before, after = (
        next(entry for entry in index["snapshots"] if entry["step"] == case[f"{when}_step"])
        for when in ("before", "after")
    )
    check.field("past_before", before["past"])
    h2o_live.check_plan(index, case, check)
    cache = PackedCache.from_buffers(
        layout,
        *_h2o_read(folder, before, case["layer"]),
        case["past_before"],
        capacity=index["capacity"],
        dialect=index["dialect"],
    )
    rows = cache.to_arrays()
    cache.realloc(case["remove"], case["reserve"])
    check.field("past_after", cache.past_length)
    kept = [token for begin, size in case["reserve"] for token in range(begin, begin + size)]
    for letter, left, all_rows in zip("KV", cache.to_arrays(), rows, strict=True):
        check.equal(f"rows that stay, {letter}", sha256(left.tobytes()), sha256(all_rows[:, kept].tobytes()))
    expected = _h2o_read(folder, after, case["layer"])
    row = case["ignored_row"]
    appended = layout.gather(*expected, row, 1, past_length=row + 1, capacity=index["capacity"])
    layout.scatter(
        *appended, cache.key_buffer, cache.value_buffer, row, past_length=cache.capacity, capacity=cache.capacity
    )
    check.equal("K", sha256(cache.key_buffer), sha256(expected[0]))
    check.equal("V", sha256(cache.value_buffer), sha256(expected[1]))


# -- prefix files -----------------------------------------------------------------------------------------------------


def run_prefix(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    cases = index.get("cases", ())
    yield from run_list(cases, "cases", lambda case, check: _prefix_case(folder, index, case, check))
    yield from unknown_lists(index, ("cases",))


def _prefix_case(folder: Path, index: dict[str, Any], case: dict[str, Any], check: Checker) -> None:
    """Files as listed, markers empty, and every layer's live rows as close to the first folder's as the index says."""
    check.known_fields({"name", "folder", "files"})
    layout, place, name = _geometry(index), folder / case["folder"], index["name"]
    found = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes())} for path in place.iterdir()}
    check.field("files", found)
    layers = range(index["layers"])
    markers = {f"{name}_{layer}_sync.{letter}" for layer in layers for letter in "kv"}
    check.equal("empty files", {file for file, entry in found.items() if entry["bytes"] == 0}, markers)
    first = folder / index["cases"][0]["folder"]
    for layer in layers:
        k, v = ((place / f"{name}_{layer}.{letter}").read_bytes() for letter in "kv")
        live = PackedCache.from_buffers(layout, k, v, index["tokens"])
        arrays = live.to_arrays()
        check_repacked(layout, live, arrays, check, f"layer {layer}")
        other = (np.fromfile(first / f"{name}_{layer}.{letter}", np.uint8) for letter in "kv")
        for letter, found_rows, expected in zip("KV", arrays, layout.unpack(*other, index["tokens"]), strict=True):
            distance = float(np.abs(found_rows - expected).max())
            check.equal(f"layer {layer} {letter} within 1e-4 of {first.name} ({distance})", distance <= 1e-4, True)
