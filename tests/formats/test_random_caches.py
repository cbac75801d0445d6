"""Whatever the shape of a cache of another engine: its words are read as they were written, in pieces of any size, from
the file and from its frames, and the file comes back byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from odd_caches import ENGINES, Odd

import kvmnn
from kvmnn.arrays import Source
from kvmnn.arrays.engine_metadata import build_engine_document
from kvmnn.arrays.source import list_losses
from kvmnn.bundle import EncodeOptions, encode_source, open_frames
from kvmnn.formats import restore, restore_file
from kvmnn.formats.zarr import encode_store, restore_store

SEEDS = 16


def assert_same(source: Source, odd: Odd, limit: int | None = None) -> None:
    assert list(source) == list(odd.arrays)
    for name, words in odd.arrays.items():
        assert source[name].shape == words.shape, name
        if limit is None:
            assert source[name].to_numpy().tobytes() == words.tobytes(), name
        else:
            pieces = list(source[name].iter_chunks(max(limit, words.itemsize)))
            assert np.concatenate(pieces).tobytes() == words.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_caches_of_any_shape_round_trip(tmp_path: Path, engine: str, seed: int) -> None:
    rng = Random(1000 * seed + len(engine))
    odd = ENGINES[engine](rng, tmp_path)
    source = kvmnn.open(odd.path, odd.options)
    assert_same(source, odd)
    assert_same(source, odd, limit=rng.choice((4, 6, 34, 100, 4096)))
    said = source.engine_cache
    assert said is not None
    assert said.layers == len(odd.arrays) // 2
    assert said.tokens == next(iter(odd.arrays.values())).shape[-2]
    effort = rng.choice(("exact", "fast", "balanced"))
    whole = (
        replace(odd.options, engine=replace(odd.options.engine, passthrough=True, stream=None)) if odd.whole else None
    )
    encode_source(
        kvmnn.open(odd.path, whole or odd.options), f"{tmp_path}/frames/", EncodeOptions(effort=effort, threads=1)
    )
    assert_same(kvmnn.open(tmp_path / "frames", odd.options if odd.whole else None), odd)
    if odd.whole:
        back = tmp_path / "back"
        restore_file(open_frames(str(tmp_path / "frames")), str(back))
        assert back.read_bytes() == odd.path.read_bytes()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_cache_info_is_kept_in_frames_and_stores(tmp_path: Path, engine: str, seed: int) -> None:
    """In frames, Zarr stores, and files decoded from them: packing K needs its order."""
    odd = ENGINES[engine](Random(seed), tmp_path)
    source = kvmnn.open(odd.path, odd.options)
    assert source.engine_cache is not None
    said = build_engine_document(source.engine_cache)
    assert said["tokens"]
    encode_source(source, f"{tmp_path}/frames/", EncodeOptions(effort="fast", threads=1))
    encode_store(source, str(tmp_path / "x.zarr"))
    places = [tmp_path / "frames", tmp_path / "x.zarr"]
    for suffix in (".safetensors", ".npz"):
        restore(open_frames(str(tmp_path / "frames")), str(tmp_path / f"f{suffix}"))
        restore_store(str(tmp_path / "x.zarr"), str(tmp_path / f"z{suffix}"))
        places += [tmp_path / f"{name}{suffix}" for name in "fz"]
    for place in places:
        found = kvmnn.open(place)
        assert found.engine_cache is not None, place
        assert build_engine_document(found.engine_cache) == said, place
        assert found.notes == list_losses(source.metadata)
