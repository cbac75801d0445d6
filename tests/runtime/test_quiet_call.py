"""A call at which nothing is due does next to nothing: the calls that it makes are counted, not timed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from store_options import store_options

from kvmnn.runtime import LosslessRuntime

STORE = store_options(front_n=1, block_tokens=64)


def calls_of(function: Any, *arguments: Any, **options: Any) -> int:
    """Functions called, Python's and built-in ones, the call itself included."""
    found = 0

    def count(frame: Any, event: str, what: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(*arguments, **options)
    finally:
        sys.setprofile(None)
    return found - 1  # `setprofile` itself


@pytest.mark.parametrize(
    ("options", "read", "blocks"),
    [({}, False, 2), ({"mode": "probe"}, False, 0), ({"scope": "none"}, True, 0), ({"async_threads": 2}, False, 2)],
    ids=["stored", "probe", "out of scope", "threads"],
)
def test_append_call_without_work_calls_few_functions(options: dict[str, Any], read: bool, blocks: int) -> None:
    rows = np.ones((2, 200, 8), np.float16)
    with LosslessRuntime(replace(STORE, **options), layers=1, kv_heads=2, head_dim=8, dtype="fp16") as runtime:
        call = runtime.begin_call if read else runtime.append_call

        def step(tokens: int) -> int:
            made = calls_of(call, 0, rows[:, :tokens], rows[:, :tokens])
            return made + calls_of(runtime.end_call) + calls_of(runtime.end_step)

        step(180)
        step(1)
        runtime.flush()
        before = runtime.collect_metrics().layers[0]
        found = [step(1) for _ in range(20)]
        after = runtime.collect_metrics().layers[0]
        assert after.updates == before.updates and after.blocks == blocks
    assert max(found) <= 50, found  # one of them lets the tail grow
