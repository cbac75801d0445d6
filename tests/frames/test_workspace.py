"""Memory kept between calls: which of it goes when there is too much."""

import ctypes
import sys
from collections.abc import Callable

import numpy as np
import pytest

import kvmnn
from kvmnn.frames import _decoder
from kvmnn.frames._workspace import clear_workspaces, set_resize_function
from kvmnn.frames.options import RLE_BIT, ZSTD_BIT

counts_faults = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults as Linux does")


def faults(job: Callable[[], None]) -> int:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    job()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@counts_faults
def test_workspace_last_used_memory_is_reused() -> None:
    raw = np.zeros(24 << 20, np.uint8)
    frame = kvmnn.encode(raw, dtype="fp16", threads=1)
    clear_workspaces()

    opened = [_decoder.ParsedFrame(frame, 2, RLE_BIT | ZSTD_BIT) for _ in range(4)]
    new = [faults(one.decode) for one in opened]  # 96 MiB: more than is kept
    for one in opened:
        one.close()
    again = _decoder.ParsedFrame(frame, 2, RLE_BIT | ZSTD_BIT)
    assert faults(again.decode) < min(new) / 2
    assert again.equals(raw)
    clear_workspaces()


@counts_faults
def test_workspace_large_call_does_not_evict_small_ones() -> None:
    raw = np.zeros(12 << 20, np.uint8)
    frame = kvmnn.encode(raw, dtype="fp16", threads=1)
    clear_workspaces()
    kvmnn.encode(np.zeros(48 << 20, np.uint8), dtype="fp16", threads=1)  # 72 MiB and more, of 80 that are kept
    found = []
    for _ in range(3):
        opened = [_decoder.ParsedFrame(frame, 2, RLE_BIT | ZSTD_BIT) for _ in range(2)]
        found.append([faults(one.decode) for one in opened])
        assert opened[1].equals(raw)
        for one in reversed(opened):
            one.close()
    assert max(found[2]) < max(found[0]) / 2
    clear_workspaces()


def test_workspace_result_is_shortened_by_copy() -> None:
    raw = np.arange(1 << 16, dtype=np.uint16)
    frame = kvmnn.encode(raw, dtype="bf16")
    address = ctypes.cast(ctypes.pythonapi._PyBytes_Resize, ctypes.c_void_p).value or 0
    set_resize_function(0)
    try:
        assert kvmnn.encode(raw, dtype="bf16") == frame
        assert kvmnn.encode(np.zeros(1 << 20, np.uint8), dtype="bf16", threads=2)[:4] == (1 << 19).to_bytes(4, "little")
    finally:
        set_resize_function(address)
    assert kvmnn.encode(raw, dtype="bf16") == frame
