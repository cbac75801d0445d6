"""MNN: TQ3 and TQ4 blocks of the engine's prefix caches, byte for byte.

They need SmolLM2-135M as MNN's exporter writes it (make test-peers MNN=DIR), and are skipped without.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from engine_client import needs_engine
from rotated_engine import FORMATS, PARTS, read_blocks, read_rows

from kvmnn.packed.rotated_codes import BLOCK_VALUES

MODEL = os.environ.get("MNN", "")
pytestmark = [needs_engine, pytest.mark.skipif(not MODEL, reason="no model of MNN: make test-peers MNN=DIR")]
IDS = np.random.default_rng(3).integers(100, 40_000, 300).tolist()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    keys, values = read_rows(Path(MODEL), tmp_path_factory.mktemp("exact"), IDS)
    return {"key": keys, "value": values}


@pytest.mark.parametrize("mode", [11, 12, 13, 14])
def test_quantize_makes_the_blocks_of_the_engine(rows: dict[str, np.ndarray], tmp_path: Path, mode: int) -> None:
    """K and V of the first layer are those of float32 whatever is quantised after them."""
    found = read_blocks(Path(MODEL), tmp_path, IDS, mode)
    assert tuple(found) == PARTS[mode]
    for part, blocks in found.items():
        made = FORMATS[mode].pack(*FORMATS[mode].quantize(rows[part].reshape(-1, BLOCK_VALUES)))
        assert made.size == blocks.size and made.tobytes() == blocks.tobytes()
