"""`mnn-packed-kv-layout-vectors-1`: packed caches through allocation, growth, reserve plans and int8, byte for byte."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvmnn import PackedCache, PackLayout
from kvmnn.packed.compaction import KVMeta

from .common import CaseResult, Checker, run_list, sha256, unknown_lists

_FILL = 0xA5  # what the second run of the reference found in memory that nobody had cleared


def run(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    yield from run_list(index.get("cases", ()), "cases", lambda case, check: _case(folder, case, check))
    yield from unknown_lists(index, ("cases",))


_FIELDS = {
    *("id", "file", "name", "mode", "kind", "eP", "lP", "hP", "eP8", "lP8", "hP8", "heads", "head_dim", "flash"),
    *("quant_key", "quant_value", "disk", "expand_chunk", "data", "ops", "tokens_total", "file_codec", "raw_bytes"),
    *("raw_sha256", "file_sha256", "sections", "steps"),
}
_SECTION_FIELDS = {"name", "offset", "bytes", "sha256", "undefined_bytes", "sha256_if_fresh_memory_is_0xA5"}
_STEP_FIELDS = {
    *("op", "name", "tokens", "past", "max_len", "fa", "key_bytes_per_head", "value_bytes_per_head", "errors"),
    *("past_before", "past_after", "sync_previous_after"),
}


def _case(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_FIELDS)
    sections = read_sections(folder, case, check, _SECTION_FIELDS)
    layout = PackLayout(
        kv_heads=case["heads"],
        head_dim=case["head_dim"],
        dtype=case["kind"],
        lP=case["lP"],
        hP=case["hP"],
        flash_block=64 if case["flash"] else None,
        lP8=case["lP8"] or None,
        hP8=case["hP8"] or None,
        int8_keys=case["quant_key"],
        int8_values=case["quant_value"],
        eP=case["eP"] or None,
        eP8=case["eP8"] or None,
    )
    replay = Replay(layout, case, sections, check)
    replay.run()
    entries = {entry["name"]: entry for entry in case["sections"]}
    for name, data in replay.dumps.items():
        check.equal(name, sha256(data), sha256(sections[name]))
        if name.rsplit("_", 1)[-1] in ("k", "v"):
            _check_undefined(name, entries[name], data, replay.filled[name], case["disk"], check)
    check.equal("sections", sorted(sections), sorted(["input_k", "input_v", *replay.dumps]))
    check.field("tokens_total", replay.pushed)


def read_sections(folder: Path, case: dict[str, Any], check: Checker, known: set[str]) -> dict[str, bytes]:
    """The sections of a case's file, after checking that they are the ones the index describes."""
    packed = (folder / case["file"]).read_bytes()
    check.equal("sha256 of the file", sha256(packed), case["file_sha256"])
    if case.get("file_codec", "zlib") != "zlib":
        check.problems.append(f"unknown file_codec {case['file_codec']!r}")
    data = zlib.decompress(packed)
    if "raw_bytes" in case:
        check.equal("bytes of all sections", len(data), case["raw_bytes"])
        check.equal("sha256 of all sections", sha256(data), case["raw_sha256"])
    sections = {}
    for entry in case["sections"]:
        for name in sorted(set(entry) - known):
            check.problems.append(f"section field {name!r} is not known to this runner")
        sections[entry["name"]] = data[entry["offset"] : entry["offset"] + entry["bytes"]]
        check.equal(f"bytes of {entry['name']}", len(sections[entry["name"]]), entry["bytes"])
        check.equal(f"sha256 of {entry['name']}", sha256(sections[entry["name"]]), entry["sha256"])
    return sections


def _check_undefined(name: str, entry: dict[str, Any], data: bytes, filled: bytes, disk: bool, check: Checker) -> None:
    """Bytes the engine leaves as it finds them are those that differ between memory full of 0 and of 0xA5."""
    undefined = int(np.count_nonzero(np.frombuffer(data, np.uint8) != np.frombuffer(filled, np.uint8)))
    check.equal(f"undefined_bytes of {name}", undefined, entry["undefined_bytes"])
    if "sha256_if_fresh_memory_is_0xA5" in entry:
        check.equal(f"{name} in memory of 0xA5", sha256(filled), entry["sha256_if_fresh_memory_is_0xA5"])
    elif not disk and undefined:
        check.problems.append(f"{name}: undefined bytes, but no hash for memory of 0xA5")


class Replay:
    """A case's operations on a cache, and on one that finds 0xA5 in its memory."""

    def __init__(self, layout: PackLayout, case: dict[str, Any], sections: dict[str, bytes], check: Checker) -> None:
        self.case, self.check, self.layout = case, check, layout
        total = case["tokens_total"]
        words = np.dtype(f"<u{layout.itemsize}") if not layout.is_quantized else np.dtype("<f4")
        shape = (case["heads"], total, case["head_dim"])
        self.inputs = [np.frombuffer(sections[f"input_{letter}"], words).reshape(shape) for letter in "kv"]
        options: dict[str, Any] = {"on_invalid": "engine", "expand_chunk": case["expand_chunk"]}
        self.caches = [PackedCache(layout, fill_byte=byte, **options) for byte in (0, 0 if case["disk"] else _FILL)]
        self.tokens: list[int] = []
        self.pushed = 0
        self.dumps: dict[str, bytes] = {}
        self.filled: dict[str, bytes] = {}

    def run(self) -> None:
        self.check.equal("steps", [step["op"] for step in self.case["steps"]], [op[0] for op in self.case["ops"]])
        for number, (op, step) in enumerate(zip(self.case["ops"], self.case["steps"], strict=True)):
            for name in sorted(set(step) - _STEP_FIELDS):
                self.check.problems.append(f"step field {name!r} is not known to this runner")
            computed = self._apply(op)
            computed |= {"op": op[0], **self._sizes()}
            if "fa" in step:
                computed["fa"] = self.layout.value_block(self.caches[0].capacity)
            self.check.equal(f"step {number}", computed, step)
        if self.layout.is_quantized:
            sums = self.caches[0].int8_sums
            if sums is None:
                raise ValueError("an int8 cache without its sums")
            self.dumps["keysum"] = sums.key_sum.tobytes()
            self.dumps["keymax"] = sums.key_max.tobytes()
            if sums.value_sum is not None:
                self.dumps["valuesum"] = sums.value_sum.tobytes()

    def _sizes(self) -> dict[str, int]:
        cache = self.caches[0]
        return {
            "past": cache.past_length,
            "max_len": cache.capacity,
            "key_bytes_per_head": len(cache.key_buffer) // self.layout.kv_heads,
            "value_bytes_per_head": len(cache.value_buffer) // self.layout.kv_heads,
        }

    def _apply(self, op: list[Any]) -> dict[str, Any]:
        kind = op[0]
        if kind == "prefill":
            for cache in self.caches:
                cache.append(*self._rows(op[1]))
            self._note(op[1])
            return {}
        if kind == "append":
            messages = [cache.realloc(add=op[1]) for cache in self.caches]
            self._push(op[1])
            return {"errors": len(messages[0])}
        if kind == "push":
            self._push(op[1])
            return {}
        if kind == "realloc":
            return self._realloc(*op[1:])
        if kind == "dump":
            for dumps, cache in zip((self.dumps, self.filled), self.caches, strict=True):
                dumps[f"{op[1]}_k"], dumps[f"{op[1]}_v"] = cache.key_buffer.tobytes(), cache.value_buffer.tobytes()
            self._check_arrays(op[1])
            return {"name": op[1], "tokens": list(self.tokens)}
        raise ValueError(f"unknown op {kind!r}")

    def _realloc(self, remove: int, pairs: list[list[int]], add: int) -> dict[str, Any]:
        meta = KVMeta(self.caches[0].past_length, add, remove, tuple((begin, size) for begin, size in pairs))
        before = self.caches[0].past_length
        messages = [cache.realloc(remove, pairs, add) for cache in self.caches]
        start = max(0, before - remove)
        after = self.caches[0].past_length
        kept = [token for begin, size in pairs for token in self.tokens[start + begin : start + begin + size]]
        self.tokens = (self.tokens[:start] + (kept if after > start else []))[:after]
        return {
            "errors": len(messages[0]),
            "past_before": before,
            "past_after": after,
            "sync_previous_after": meta.sync(),
        }

    def _rows(self, count: int) -> list[Any]:
        return [array[:, self.pushed : self.pushed + count] for array in self.inputs]

    def _push(self, count: int) -> None:
        for cache in self.caches:
            cache.push(*self._rows(count))
        self._note(count)

    def _note(self, count: int) -> None:
        self.tokens += range(self.pushed, self.pushed + count)
        self.pushed += count

    def _check_arrays(self, name: str) -> None:
        """What comes back is what went in, and packing it again gives every live element."""
        cache, layout = self.caches[0], self.layout
        if layout.is_quantized or not self.tokens:
            return
        arrays = cache.to_arrays()
        for letter, array, pushed in zip("KV", arrays, self.inputs, strict=True):
            expected = pushed[:, self.tokens]
            self.check.equal(f"arrays of {name}, {letter}", sha256(array.tobytes()), sha256(expected.tobytes()))
        check_repacked(layout, cache, arrays, self.check, name)


def check_repacked(layout: PackLayout, cache: PackedCache, arrays: Any, check: Checker, name: str) -> None:
    """Packing `arrays` over the cache's own buffers changes nothing; over zeroes it gives its live elements and no
    other."""
    kept = cache.key_buffer.copy(), cache.value_buffer.copy()
    layout.pack(*arrays, capacity=cache.capacity, out=kept, padding="keep")
    check.equal(f"{name} packed over itself, K", sha256(kept[0]), sha256(cache.key_buffer))
    check.equal(f"{name} packed over itself, V", sha256(kept[1]), sha256(cache.value_buffer))
    fresh = layout.pack(*arrays, capacity=cache.capacity)
    live = layout.pack(*(np.full_like(a.view(f"<u{layout.itemsize}"), -1 % (1 << 8 * layout.itemsize)) for a in arrays),
                       capacity=cache.capacity)  # fmt: skip
    buffers = cache.key_buffer, cache.value_buffer
    for letter, made, buffer, mask in zip("KV", fresh, buffers, live, strict=True):
        check.equal(f"{name} packed again, {letter}", sha256(made), sha256(buffer & mask))
