"""Caches larger than any memory budget pass through in little: anonymous memory, mapped file pages left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from process_memory import anonymous_peak

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

# 160 MiB in pieces of 4 MiB, and a limit below that: encode takes 88 MiB, diff 109, and one that kept every layer, or
# 16 MiB of each file, would exceed it. Larger files and pieces took twice the time and found nothing else.
LAYERS, LAYER_BYTES = 2, 40 << 20  # of K and of V
HEADS = 8
MAX_ANONYMOUS_BYTES = 140 << 20
MAX_BYTES_OF_ONE_LAYER = 60 << 20
PIECES = ["--effort", "fast", "--chunk-bytes", "4M"]
QUIET = ("-q",)
GEOMETRY = [
    "--backend",
    "x86-avx2",
    "--kv-heads",
    str(HEADS),
    "--head-dim",
    "128",
    "--valid-tokens",
    str(LAYER_BYTES >> 12),
]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A prefix cache of 160 MiB: holes, and at the beginning of each head what is hard to compress."""
    folder = tmp_path_factory.mktemp("large") / "p"
    folder.mkdir()
    noise = np.random.default_rng(0).standard_normal((HEADS, 1 << 16)).astype(np.float32)
    for layer in range(LAYERS):
        for part in "kv":
            with open(folder / f"sys_{layer}.{part}", "wb") as file:
                for head, rows in enumerate(noise):
                    file.seek(head * (LAYER_BYTES // HEADS))
                    file.write(rows.tobytes())
                    file.seek((head + 1) * (LAYER_BYTES // HEADS) - 4)
                    file.write(np.float32(1).tobytes())  # the last row of no head is empty
            (folder / f"sys_{layer}_sync.{part}").touch()
    return folder


@pytest.mark.slow
def test_encode_and_diff_of_packed_files_memory_is_bounded(large):
    bundle = large.with_name("frames")
    assert sum(path.stat().st_size for path in large.iterdir()) == 2 * LAYERS * LAYER_BYTES
    assert anonymous_peak("encode", str(large), *GEOMETRY, *PIECES, "-o", f"{bundle}/") < MAX_ANONYMOUS_BYTES
    assert anonymous_peak("diff", str(large), str(bundle), *GEOMETRY, options=QUIET) < MAX_ANONYMOUS_BYTES


@pytest.mark.slow
def test_unpack_and_pack_memory_is_bounded_by_one_layer(large):
    one = large / "sys_0.k"
    arrays, back = large.with_name("a.safetensors"), large.with_name("back")
    assert (
        anonymous_peak("mnn", "unpack", str(one), *GEOMETRY, "-o", str(arrays), options=QUIET) < MAX_BYTES_OF_ONE_LAYER
    )
    packing = ["mnn", "pack", str(arrays), "--name", "sys", "--backend", "x86-avx2", "-o", str(back)]
    assert anonymous_peak(*packing, options=QUIET) < MAX_BYTES_OF_ONE_LAYER
    assert (back / "sys_0.v").read_bytes() == (large / "sys_0.v").read_bytes()
