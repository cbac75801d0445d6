"""K and V of several layers that are encoded together: how groups are planned, the round trip, and threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense_samples import rotated, to_dtype

import kvmnn
from kvmnn import RopeConfig, bundle, dense
from kvmnn.arrays.array import LazyArray, from_numpy
from kvmnn.bundle import DenseOptions, EncodeOptions
from kvmnn.bundle import dense as bundle_dense
from kvmnn.bundle.dense import DensePlan, compute_num_workers, map_in_order, plan_groups

LAYERS, TOKENS, DIM = 6, 300, 32
ROTARY = RopeConfig(dims=DIM)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def cache() -> dict[str, np.ndarray]:
    """Layers whose rows come again at the same places."""
    random = np.random.default_rng(8)
    places = random.integers(0, 60, TOKENS)
    found = {}
    for number in range(LAYERS):
        for part in ("key", "value"):
            rows = random.standard_normal((2, 60, DIM))[:, places] + 0.2 * random.standard_normal((2, TOKENS, DIM))
            rows = rows.astype(np.float32)
            rows = rotated(rows, DIM, 10000.0, np.arange(TOKENS), "half") if part == "key" else rows
            found[f"layer_{number}.{part}"] = to_dtype(rows, "fp16")
    return found


def plan(layer: int | None = 0, part: Any = "key", tokens: int = 64, dim: int = 8, **others: Any) -> DensePlan:
    return DensePlan(axes="htd", shape=(2, tokens, dim), dtype="fp16", part=part, layer=layer, **others)


def arrays_of(plans: list[DensePlan | None], layers: int = 1) -> list[tuple[LazyArray, DensePlan | None]]:
    """Arrays whose values are never read."""
    found = []
    for number, one in enumerate(plans):
        shape = (layers, *one.shape) if one and layers > 1 else one.shape if one else (3,)
        array = LazyArray(name=str(number), dtype="fp16", shape=shape, array_dtype="<f2", reader=lambda step: iter(()))
        found.append((array, one))
    return found


def sizes(plans: list[DensePlan | None], layers: int = 1) -> list[int]:
    return list(plan_groups(arrays_of(plans, layers)).sizes)


def both(layers: range, **others: Any) -> list[DensePlan | None]:
    return [plan(layer, part, **others) for layer in layers for part in ("key", "value")]


def test_encode_source_layer_groups_share_rope_search(cache):
    np.savez("kv.npz", **cache)
    made = bundle.encode_source(kvmnn.open("kv.npz"), "d/", EncodeOptions(dense=DenseOptions(rotary=ROTARY)))
    assert made.label == "LOSSLESS"
    names = list(cache)
    together: list[bytes] = []
    for at in range(0, len(names), 3):
        rotaries = [ROTARY if name.endswith("key") else None for name in names[at : at + 3]]
        together += dense.encode_many([cache[name] for name in names[at : at + 3]], rotary=rotaries)
    assert [Path("d", f"{name}.frame").read_bytes() for name in names] == together
    alone = [dense.encode(kv, rotary=ROTARY if name.endswith("key") else None) for name, kv in cache.items()]
    assert sum(map(len, together)) < sum(map(len, alone))
    for name, stream in zip(names, together, strict=True):
        assert np.array_equal(dense.decode(stream), cache[name])
    document = bundle.open_frames("d").document
    assert document and not any(array.shared for array in document.arrays)


def test_encode_source_layer_groups_do_not_depend_on_threads(cache):
    np.savez("kv.npz", **cache, mask=np.ones(7, np.float16))
    made = {}
    for threads in (1, 2, 5):
        options = EncodeOptions(dense=DenseOptions(rotary=ROTARY), threads=threads)
        document = bundle.encode_source(kvmnn.open("kv.npz"), f"{threads}/", options).manifest
        made[threads] = [array.frames[0].sha256 for array in document.arrays]
    assert made[1] == made[2] == made[5]


def test_encode_source_layer_group_gets_token_ids_once(cache, monkeypatch):
    np.savez("kv.npz", **cache)
    given: list[Any] = []
    real = dense.encode_many

    def encode_many(arrays: Any, **options: Any) -> list[bytes]:
        given.append((len(arrays), options["token_ids"].tolist()))
        return real(arrays, **options)

    monkeypatch.setattr(bundle_dense.dense, "encode_many", encode_many)
    ids = np.arange(TOKENS + 5)
    bundle.encode_source(kvmnn.open("kv.npz"), "d/", EncodeOptions(dense=DenseOptions(token_ids=ids), threads=1))
    assert given == [(3, list(range(TOKENS)))] * 4


# -- which are together ------------------------------------------------------------------------------------------------


def test_plan_groups_sizes_by_number_of_arrays():
    assert [sizes(both(range(count))) for count in (1, 2, 3, 6, 12)] == [[1, 1], [2, 2], [3, 3], [3] * 4, [4] * 6]
    assert sizes(both(range(1))[:1]) == [1]
    assert sizes([]) == []
    many = sizes(both(range(80)))
    assert len(many) == 16 and sum(many) == 160 and max(many) == 10


def test_plan_groups_large_arrays_are_bounded_by_group_bytes():
    tokens = (8 << 20) // 32
    found = plan_groups(arrays_of(both(range(8), tokens=tokens)))
    assert (list(found.sizes), found.max_group_bytes) == ([4] * 4, bundle_dense.GROUP_BYTES)
    assert sizes(both(range(8), tokens=5 * tokens)) == [1] * 16


def test_plan_groups_different_token_ids_are_separate():
    assert sizes([*both(range(2)), *both(range(2, 4), tokens=65)]) == [2, 2, 2, 2]
    assert sizes([*both(range(2)), None, *both(range(2, 4))]) == [2, 2, 2, 2]
    assert sizes([*both(range(2)), *both(range(2))]) == [2, 2, 2, 2]  # another text: its layers begin again
    one, other = np.arange(64), np.arange(64) + 1
    ids = [*both(range(2), token_ids=one), *both(range(2, 4), token_ids=other)]
    assert sizes(ids) == [2, 2, 2, 2]
    assert sizes(both(range(4), token_ids=one)) == [4, 4]
    places = [plan(n, "key", rotary=ROTARY, positions=one if n < 4 else other) for n in range(8)]
    assert sizes([*places]) == [2, 2, 2, 2]
    assert sizes([each and plan(each.layer, each.part, positions=None) for each in both(range(4))]) == [4, 4]


def test_plan_groups_batches_are_single_and_layers_are_grouped():
    assert sizes([plan(None)], layers=8) == [4, 4]
    assert sizes([plan(0, is_batch=True)], layers=8) == [1] * 8
    keys = np.random.default_rng(1).standard_normal((4, 2, 50, 8)).astype(np.float16)
    for name, is_batch in (("layer_0.key", True), ("k", False)):
        source = kvmnn.formats.registry.Source([from_numpy(name, keys)])
        assert [each.is_batch for each in bundle_dense.plan_arrays(source, DenseOptions()).values()] == [is_batch]


# -- threads -----------------------------------------------------------------------------------------------------------


def test_compute_num_workers_runs_two_large_groups():
    assert compute_num_workers(200 << 20, 2) == 1
    assert [
        compute_num_workers(128 << 20, 8),
        compute_num_workers(32 << 20, 2),
        compute_num_workers(0, 3),
        compute_num_workers(1, 1),
    ] == [2, 2, 3, 1]
    meeting = threading.Barrier(2, timeout=30)
    found = list(map_in_order(lambda item: (meeting.wait() >= 0, item), range(4), 2))
    assert found == [(item, (True, item)) for item in range(4)]


@pytest.mark.parametrize("workers", [1, 2])
def test_map_in_order_takes_items_lazily(workers):
    taken: list[int] = []

    def items() -> Any:
        for item in range(50):
            taken.append(item)
            yield item

    for done, _ in map_in_order(str, items(), workers):
        assert len(taken) <= done + 1 + (workers if workers > 1 else 0)
    assert len(taken) == 50


def test_map_in_order_error_ends_iteration():
    def work(item: int) -> int:
        if item == 3:
            raise ValueError("three")
        return item

    for workers in (1, 2):
        found = []
        with pytest.raises(ValueError, match="three"):
            for item, _ in map_in_order(work, iter(range(100)), workers):
                found.append(item)
        assert found == [0, 1, 2]
