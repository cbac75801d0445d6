"""`l2_compress` and `fix_size_l2_compress`: on numpy arrays, on tensors, on caches, against the rule in plain numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvmnn.errors import KvmnnError
from kvmnn.policies import fix_size_l2_compress, l2_compress


class Tensor:
    """What is used of another library's tensors: shape, indexing by arrays, and the way to numpy by float32."""

    def __init__(self, array: np.ndarray, looked_at: list[str] | None = None) -> None:
        self._array, self.shape, self.looked_at = array, array.shape, [] if looked_at is None else looked_at

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self._array[index], self.looked_at)

    def detach(self) -> Tensor:
        self.looked_at.append("detach")
        return self

    def float(self) -> Tensor:
        return Tensor(self._array.astype(np.float32), self.looked_at)

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return self._array


@dataclass
class Exposed:
    """Tensors that give themselves as arrays."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, index: Any) -> Exposed:
        return Exposed(self.array[index])

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array


def made(dtype: Any = np.float32, layers: int = 4, batch: int = 2, heads: int = 3, tokens: int = 50) -> list[Any]:
    rng = np.random.default_rng(tokens + layers)
    shape = (batch, heads, tokens, 8)
    return [tuple(rng.standard_normal(shape).astype(dtype) for _ in range(2)) for _ in range(layers)]


def by_rule(pairs: list[Any], cut: Callable[[np.ndarray], np.ndarray], skip: tuple[int, ...]) -> list[Any]:
    """Each head of each sequence by itself; `cut` takes the norms of its keys and gives the tokens that stay."""
    found = []
    for layer, (keys, values) in enumerate(pairs):
        if layer in skip:
            found.append((keys, values))
            continue
        norms = np.linalg.norm(keys.astype(np.float64), axis=-1)
        rows = np.apply_along_axis(cut, -1, norms)
        found.append(tuple(np.take_along_axis(part, rows[..., None], axis=2) for part in (keys, values)))
    return found


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = [(a, b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)]
    return all(np.asarray(a).dtype == b.dtype and np.array_equal(np.asarray(a), b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("keep_ratio", [0.8, 0.31, 0.0, 1.0, 2])
def test_l2_compress_equals_the_rule(dtype: Any, keep_ratio: float) -> None:
    pairs = made(dtype)
    size = min(50, math.ceil(min(keep_ratio, 1) * 50))
    expected = by_rule(pairs, lambda norms: np.sort(np.argsort(norms, kind="stable")[:size]), (0, 1))
    assert equal(l2_compress(pairs, keep_ratio=keep_ratio, prune_after=49, skip_layers=[0, 1]), expected)
    untouched = l2_compress(pairs, keep_ratio, 50)
    assert all(a is b for mine, given in zip(untouched, pairs, strict=True) for a, b in zip(mine, given, strict=True))


@pytest.mark.parametrize(("strategy", "sign"), [("keep_low", 1), ("keep_high", -1)])
@pytest.mark.parametrize("keep_ratio", [0.0, 0.29, 0.5, 1.0])
def test_fix_size_l2_compress_equals_the_rule(strategy: Any, sign: int, keep_ratio: float) -> None:
    pairs = made()
    protected = int(20 * keep_ratio)

    def cut(norms: np.ndarray) -> np.ndarray:
        best = np.sort(np.argsort(sign * norms[: 50 - protected], kind="stable")[: 20 - protected])
        return np.concatenate([best, np.arange(50 - protected, 50)])

    ours = fix_size_l2_compress(pairs, fix_kv_size=20, keep_ratio=keep_ratio, strategy=strategy, skip_layers=[2])
    assert equal(ours, by_rule(pairs, cut, (2,)))
    assert equal(fix_size_l2_compress(pairs, 50, keep_ratio, strategy), pairs)


def test_fix_size_l2_compress_random_is_reproducible() -> None:
    pairs = made()
    first, again, other = (
        fix_size_l2_compress(pairs, 20, 0.25, "random", generator=np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert equal(first, again) and not equal(first, other)
    for mine, given in zip(first[2:], pairs[2:], strict=True):
        assert mine[0].shape == (2, 3, 20, 8) and np.array_equal(mine[0][:, :, 15:], given[0][:, :, 45:])
    assert fix_size_l2_compress(pairs, 20, strategy="random")[3][0].shape == (2, 3, 20, 8)


@pytest.mark.parametrize("kind", [Tensor, Exposed])
def test_l2_compress_tensors_stay_tensors(kind: Any) -> None:
    pairs = made(np.float16)
    tensors = [(kind(keys), kind(values)) for keys, values in pairs]
    for cut in (
        lambda given: l2_compress(given, keep_ratio=0.5, prune_after=10),
        lambda given: fix_size_l2_compress(given, fix_kv_size=9, keep_ratio=0.4, skip_layers=()),
    ):
        for mine, expected in zip(cut(tensors), cut(pairs), strict=True):
            for a, b in zip(mine, expected, strict=True):
                array = a._array if kind is Tensor else a.array
                assert isinstance(a, kind) and array.dtype == b.dtype and np.array_equal(array, b)


def test_l2_compress_reads_only_keys_of_cut_layers() -> None:
    looked_at: list[str] = []
    tensors = [(Tensor(keys, looked_at), Tensor(values)) for keys, values in made()]
    l2_compress(tensors, keep_ratio=0.5, prune_after=50)
    l2_compress(tensors, keep_ratio=0.5, prune_after=10, skip_layers=range(4))
    fix_size_l2_compress(tensors, 20, 0.0, "random")
    assert not looked_at
    l2_compress(tensors, keep_ratio=0.5, prune_after=10, skip_layers=(0, 1))
    assert len(looked_at) == 2 * 2  # two layers of two sequences


def test_l2_compress_accepts_transformers_caches() -> None:
    pairs = made()
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=keys, values=values) for keys, values in pairs])
    assert equal(l2_compress(cache, 0.5, 10), l2_compress(pairs, 0.5, 10))
    three = [(keys, values, None) for keys, values in pairs]  # as DynamicCache iterates
    assert equal(l2_compress(iter(three), 0.5, 10), l2_compress(pairs, 0.5, 10))
    assert l2_compress([]) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([np.zeros((1, 2, 3, 4))], "layer 0: found a ndarray, expected a pair"),
        ([(np.zeros((2, 3, 4)), np.zeros((2, 3, 4)))], r"layer 0: shapes \[2, 3, 4\] and \[2, 3, 4\]: expected"),
        ([(np.zeros((1, 2, 3, 4)), np.zeros((1, 2, 3)))], r"layer 0: shapes \[1, 2, 3, 4\] and \[1, 2, 3\]: expected"),
        ([(np.zeros((1, 2, 3)), np.zeros((1, 2, 3, 4)))], r"layer 0: shapes \[1, 2, 3\] and \[1, 2, 3, 4\]: expected"),
        ([(np.zeros((1, 2, 3, 4)), np.zeros((1, 2, 5, 4)))], r"layer 0: shapes \[1, 2, 3, 4\] and \[1, 2, 5, 4\]: exp"),
        ([(np.zeros((1, 2, 3, 4)), np.zeros((1, 2, 4, 4)))], "layer 0: shapes"),
        ([("a", "b")], "layer 0: shapes"),
        ([5], "layer 0: found a int"),
    ],
)
def test_l2_compress_other_objects_are_refused(given: Any, message: str) -> None:
    for cut in (l2_compress, fix_size_l2_compress):
        with pytest.raises(KvmnnError, match=message):
            cut(given)


def test_l2_compress_invalid_options_are_refused() -> None:
    pairs = made()
    for call in (
        lambda: l2_compress(pairs, keep_ratio=-0.1),
        lambda: l2_compress(pairs, keep_ratio=float("nan")),
        lambda: l2_compress(pairs, skip_layers=[-1]),
        lambda: fix_size_l2_compress(pairs, fix_kv_size=-1),
        lambda: fix_size_l2_compress(pairs, strategy="keep_none"),  # type: ignore[arg-type]
    ):
        with pytest.raises(KvmnnError):
            call()
    with pytest.raises(TypeError):
        l2_compress([(np.zeros((1, 2, 30, 4), int),) * 2], 0.5, 10, ())
