"""Caches larger than any memory budget pass through in little: anonymous memory, mapped file pages left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from process_memory import anonymous_peak

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

# Half a gibibyte, and a limit of less than half of that: a run takes 165 MiB, and one that kept every layer, or 40 MiB
# of each, would exceed it. Twice the layers took twice the time (106 s) and found nothing else.
LAYERS, LAYER_BYTES = 2, 128 << 20  # of K and of V
HEADS = 8
MAX_ANONYMOUS_BYTES = 240 << 20
MAX_BYTES_OF_ONE_LAYER = 100 << 20
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
    """A prefix cache of 512 MiB: holes, and at the beginning of each head what is hard to compress."""
    folder = tmp_path_factory.mktemp("large") / "p"
    folder.mkdir()
    noise = np.random.default_rng(0).standard_normal((HEADS, 1 << 17)).astype(np.float32)
    for layer in range(LAYERS):
        for part in "kv":
            with open(folder / f"sys_{layer}.{part}", "wb") as file:
                for head, rows in enumerate(noise):
                    file.seek(head * (LAYER_BYTES // HEADS))
                    file.write(rows.tobytes())
                file.truncate(LAYER_BYTES)
            (folder / f"sys_{layer}_sync.{part}").touch()
    return folder


@pytest.mark.slow
def test_encode_and_diff_of_packed_files_memory_is_bounded(large):
    bundle = large.with_name("frames")
    assert sum(path.stat().st_size for path in large.iterdir()) == 1 << 29
    assert anonymous_peak("encode", str(large), *GEOMETRY, "--effort", "fast", "-o", f"{bundle}/") < MAX_ANONYMOUS_BYTES
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
