"""A cache of transformers packed for MNN equals the prefix that the engine writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import unpack
from hf_files import dynamic_cache, save, static_cache
from repository import FIXTURES

import kvmnn
from kvmnn.formats import PackedOptions
from kvmnn.packed.inference import PackedGeometry

LAYOUT = ("--backend", "lp=1", "--backend", "hp=4", "--name", "sys")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    for name in ("model", "prefix"):
        unpack(FIXTURES / "mnn_engine" / f"{name}.tar.xz", tmp_path / name)
    return tmp_path


def pairs_of(engine: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    geometry = PackedGeometry(kv_heads=2, head_dim=16, lP=1, hP=4, dtype="fp32")
    source = kvmnn.open(engine / "prefix", packed=PackedOptions(geometry=geometry, valid_tokens=(50,)))
    arrays = [source[name].to_numpy()[None] for name in source]
    return list(zip(arrays[::2], arrays[1::2], strict=True))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_pack_transformers_cache_equals_engine_prefix(engine: Path, run: Any, kind: str) -> None:
    pairs = pairs_of(engine)
    path = save(engine / "c.pt", dynamic_cache(pairs) if kind == "dynamic" else static_cache(pairs, 64))
    said = ("--backend", "lp=1", "--backend", "hp=4", "--kv-heads", "2", "--head-dim", "16", "--valid-tokens", "50")
    run("mnn", "pack", path, *LAYOUT, "--model", engine / "model", "--capacity", "114", "-o", engine / "ours/")
    run("diff", engine / "prefix", engine / "ours", *said)
    assert sorted(file.name for file in (engine / "ours").iterdir() if file.suffix in (".k", ".v")) == sorted(
        file.name for file in (engine / "prefix").iterdir()
    )
    run("diff", path, engine / "ours", "--atol", "0")


def test_pack_transformers_cache_of_other_geometry_is_refused(engine: Path, run: Any) -> None:
    pairs = pairs_of(engine)
    heads = [tuple(np.concatenate([part, part], axis=1) for part in pair) for pair in pairs]
    path = save(engine / "c.pt", dynamic_cache(heads))
    said = run("mnn", "pack", path, *LAYOUT, "--model", engine / "model", "-o", engine / "ours/", code=2).err
    assert "kv heads: 4 for the cache, but the model in" in said and not (engine / "ours").exists()
    path = save(engine / "d.pt", dynamic_cache([*pairs, pairs[0]]))
    said = run("mnn", "pack", path, *LAYOUT, "--model", engine / "model", "-o", engine / "ours/", code=2).err
    assert "layers: 3 for the cache, but the model in" in said and not (engine / "ours").exists()
    both = [tuple(np.concatenate([part, part]) for part in pair) for pair in pairs]
    path = save(engine / "e.pt", dynamic_cache(both))
    run("mnn", "pack", path, *LAYOUT, "--model", engine / "model", "-o", engine / "ours/", code=2)
    run("mnn", "pack", path, *LAYOUT, "--model", engine / "model", "--part", "batch=1", "-o", engine / "ours/")
    run("diff", save(engine / "f.pt", dynamic_cache(pairs)), engine / "ours")
