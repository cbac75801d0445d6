"""Plans for caches in files: which arrays are read, and the order of tokens and layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from odd_caches import ENGINES
from policy_models import floats, norm, ranked
from slow_cases import mark_most_slow

import kvmnn
from kvmnn import dtypes
from kvmnn.arrays import Source
from kvmnn.errors import KvmnnError, MissingOptionError, OptionError, SourceError
from kvmnn.formats.plan_files import plan_cache
from kvmnn.policies import create_policy


@pytest.mark.parametrize("seed", mark_most_slow(range(12), 3))
@pytest.mark.parametrize("engine", ENGINES)
def test_plan_cache_of_any_shape_equals_policy(tmp_path: Path, engine: str, seed: int) -> None:
    odd = ENGINES[engine](Random(77 * seed), tmp_path)
    source = kvmnn.open(odd.path, odd.options)
    keys = {int(name[6:].partition(".")[0]): words for name, words in odd.arrays.items() if name.endswith("key")}
    some = next(iter(keys.values()))
    details = source.engine_cache.details if source.engine_cache else {}
    if some.ndim == 4 and some.shape[0] > 1:
        with pytest.raises(SourceError, match="--part batch=N"):
            plan_cache(source, create_policy("knorm", keep_ratio=0.5))
        return
    if len(details.get("sequences", ())) > 1:
        with pytest.raises(
            MissingOptionError, match="sequences, and a policy keeps those of one text: --part sequence=N"
        ):
            plan_cache(source, create_policy("knorm", keep_ratio=0.5))
        return
    plan = plan_cache(source, create_policy("knorm", keep_ratio=0.5))
    assert [layer.layer for layer in plan.layers] == list(keys)
    for layer, words in zip(plan.layers, keys.values(), strict=True):
        dtype = dtypes.parse_dtype(source[f"layer_{layer.layer}.key"].dtype).numpy_dtype
        values = floats(words.view(dtype).reshape(words.shape[-3:]))
        size = words.shape[-2] // 2
        expected = [sorted(ranked([norm(row) for row in head])[:size]) for head in values]
        kept = np.arange(layer.tokens) if layer.kept_indices is None else layer.kept_indices
        assert np.broadcast_to(kept, (len(expected), size)).tolist() == expected
        assert layer.nbytes == sum(source[f"layer_{layer.layer}.{part}"].nbytes for part in ("key", "value"))


def source_of(*shapes: tuple[int, ...], **more: object) -> Source:
    rng = np.random.default_rng(3)
    names = [f"layer_{n // 2}.{('key', 'value')[n % 2]}" for n in range(len(shapes))]
    found = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]
    return Source([kvmnn.arrays.array.from_numpy(name, each) for name, each in zip(names, found, strict=True)])


def unreadable(source: Source) -> Source:
    def never(step: int) -> None:
        raise AssertionError(f"{step} bytes were asked for")

    return replace(source, arrays=[replace(array, reader=never) for array in source.arrays])


@pytest.mark.parametrize(
    ("name", "options"),
    [("streaming", {"budget": 9}), ("l2_fixed", {"budget": 5, "strategy": "random", "skip_layers": ()})],
)
def test_plan_cache_reads_keys_only_if_needed(name: str, options: dict[str, object]) -> None:
    if "strategy" in options:
        options = {**options, "generator": np.random.default_rng(0)}
    plan = plan_cache(unreadable(source_of((2, 20, 4), (2, 20, 4))), create_policy(name, **options))
    assert plan.layers[0].tokens_after == options["budget"]


def test_plan_cache_never_reads_values() -> None:
    source = source_of((2, 20, 4), (2, 20, 8))
    source.arrays = [source.arrays[0], *unreadable(source).arrays[1:]]
    assert plan_cache(source, create_policy("knorm", budget=5)).bytes_after == 2 * 5 * (4 + 8) * 2


def test_plan_cache_accepts_token_major_arrays() -> None:
    source = source_of((2, 20, 4), (2, 20, 4))
    turned = [np.ascontiguousarray(array.to_numpy().transpose(1, 0, 2)) for array in source.arrays]
    other = Source(
        [kvmnn.arrays.array.from_numpy(a.name, t) for a, t in zip(source.arrays, turned, strict=True)],
        token_major=True,
    )
    policy = create_policy("knorm", budget=5)
    assert plan_cache(source, policy).to_plan_entries() == plan_cache(other, policy).to_plan_entries()
    assert plan_cache(replace(other, token_major=False), policy, token_major=True).to_plan_entries() == (
        plan_cache(source, policy).to_plan_entries()
    )


def test_plan_cache_accepts_keys_only() -> None:
    source = source_of((1, 20, 4))
    assert plan_cache(source, create_policy("knorm", budget=5)).bytes_after == 5 * 4 * 2


def test_plan_cache_invalid_inputs_are_refused(tmp_path: Path) -> None:
    policy = create_policy("streaming", budget=9)
    with pytest.raises(KvmnnError, match="expected the same heads and tokens"):
        plan_cache(source_of((2, 20, 4), (2, 19, 4)), policy)
    with pytest.raises(OptionError, match="needs attention"):
        plan_cache(source_of((2, 20, 4)), create_policy("h2o_tokens", budget=9))
    with pytest.raises(OptionError, match="skip_layers names layer 3"):
        plan_cache(source_of((2, 20, 4)), create_policy("streaming", budget=9, skip_layers=(3,)))
    with pytest.raises(MissingOptionError, match="attention and scores are planned without --policy"):
        np.save(tmp_path / "attention.npy", np.ones((4, 8, 8), np.float16))
        plan_cache(kvmnn.open(tmp_path / "attention.npy"), policy)
