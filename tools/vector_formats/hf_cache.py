"""`hf-cache-1`: caches of transformers as torch.save stored them, with their arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvmnn

from .common import CaseResult, Checker, run_list

_FIELDS = {"file", "dtype", "kind", "layers", "batch", "kv_heads", "head_dim", "tokens", "expected"}


def run(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    named = [{"name": case["file"], **case} if isinstance(case, dict) else case for case in index["cases"]]
    yield from run_list(named, "cases", lambda case, check: _case(folder, case, check))


def _case(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_FIELDS)
    source = kvmnn.open(folder / case["file"])
    said = source.engine_cache
    if said is None:
        check.problems.append("nothing is said of the cache")
        return
    check.field("kind", said.kind)
    for name in ("layers", "batch", "kv_heads", "head_dim", "tokens"):
        check.field(name, getattr(said, name))
    for array in source.arrays:
        check.field("dtype", array.dtype)
    with np.load(folder / case["expected"]) as expected:
        check.equal("names of the arrays", sorted(source), sorted(expected.files))
        for name in expected.files:
            check.equal(f"shape of {name}", source[name].shape, expected[name].shape)
            check.equal(f"type of {name}", source[name].array_dtype, expected[name].dtype.str)
            same = source[name].to_numpy().tobytes() == expected[name].tobytes()
            check.equal(f"{name}: its words are those expected", same, True)
