"""Caches compared with a tolerance, layer by layer, across types and orders of axes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvmnn.arrays import EngineCacheInfo, Source, compare_allclose, compare_bitwise
from kvmnn.arrays.array import from_numpy
from kvmnn.errors import SourceError


def source(arrays: dict[str, np.ndarray], **more: object) -> Source:
    return Source([from_numpy(name, words) for name, words in arrays.items()], **more)


def numbers(layers: int = 2, shape: tuple[int, ...] = (2, 5, 4)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    names = [f"layer_{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    return {name: rng.standard_normal(shape).astype(np.float16) for name in names}


def test_compare_allclose_reports_largest_error_of_each_layer() -> None:
    one = numbers()
    two = {name: words.astype(np.float32) for name, words in one.items()}
    two["layer_1.value"][1, 3, 2] += 0.25
    two["layer_1.value"][0, 0, 0] += 0.125
    found = compare_allclose(source(one), source(two), 0.2)
    assert [(each.layer, each.part, each.above, each.words) for each in found.errors] == [
        *((0, "key", 0, 40), (0, "value", 0, 40), (1, "key", 0, 40), (1, "value", 1, 40))
    ]
    last = found.errors[3]
    assert (last.head, last.token, last.dim) == (1, 3, 2)
    assert last.largest == pytest.approx(0.25, abs=1e-3)
    assert not found.equal
    assert compare_allclose(source(one), source(two), 0.26).equal
    assert "1 of 160 numbers are further apart than 0.2" in str(found)
    assert found.to_dict()["layers"][3]["above"] == 1


def test_compare_allclose_ignores_axis_order() -> None:
    one = numbers()
    two = {name: np.ascontiguousarray(words.transpose(1, 0, 2)) for name, words in one.items()}
    assert compare_allclose(source(one), source(two, token_major=True), 0).equal


def test_compare_allclose_nan_and_infinity_differ_unless_equal() -> None:
    one, two = numbers(1), numbers(1)
    one["layer_0.key"][0, 0] = [np.nan, np.inf, np.nan, np.inf]
    two["layer_0.key"][0, 0] = [np.nan, np.inf, 1, -np.inf]
    found = compare_allclose(source(one), source(two), 1e30)
    key = found.errors[0]
    assert (found.above, key.not_finite, str(key.largest)) == (2, 2, "nan")
    assert (key.head, key.token, key.dim) == (0, 0, 2)
    assert (found.to_dict()["layers"][0]["largest"], found.to_dict()["layers"][0]["not_finite"]) == (None, 2)
    two["layer_0.key"][0, 0, 2] = np.nan
    found = compare_allclose(source(one), source(two), 1e30)
    assert (found.above, found.errors[0].largest, found.errors[0].dim) == (1, np.inf, 3)
    assert "1         inf  0, 0, 3" in str(found)


@pytest.mark.parametrize(
    ("change", "least", "most"),
    [
        ("fp16", 1e-4, 4e-4),
        ("bf16", 1e-3, 3e-3),
        ("axes", 1.2, 1.6),
        ("pairs", 1.2, 1.6),
        ("heads", 1.2, 1.6),
        ("nothing", 0, 0),
    ],
)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_compare_allclose_relative_error_separates_rounding_from_reordering(change, least, most, scale) -> None:
    words = np.random.default_rng(3).standard_normal((4, 64, 64), np.float32) * np.float32(scale)
    changed = {
        "fp16": (words / np.float32(scale)).astype(np.float16).astype(np.float32) * np.float32(scale),
        "bf16": (words.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32),
        "axes": np.ascontiguousarray(words.transpose(0, 2, 1)),
        "pairs": np.ascontiguousarray(words.reshape(4, 64, 32, 2).swapaxes(2, 3).reshape(4, 64, 64)),
        "heads": words[::-1].copy(),
        "nothing": words.copy(),
    }[change]
    found = compare_allclose(source({"layer_0.key": words}), source({"layer_0.key": changed}), 1e30)
    assert least <= found.errors[0].relative <= most
    assert found.to_dict()["relative"] == found.to_dict()["layers"][0]["relative"] == found.errors[0].relative
    assert ("which is no rounding" in str(found)) == (least > 1) and "a lossy codec" not in str(found)
    assert ("relative error" in str(found)) == (change != "nothing")
    assert max(map(len, str(found).splitlines()[:2])) <= 80


def test_compare_allclose_of_lossy_codec_is_no_reordering() -> None:
    words = np.random.default_rng(3).standard_normal((4, 64, 64), np.float32)
    first, second = source({"layer_0.key": words}), source({"layer_0.key": words * 0.3})
    report = compare_allclose(first, second, 1e30)
    assert report.relative is not None and 0.5 < report.relative < 1.2
    assert "which is no rounding of numbers: a lossy codec, another" in str(report)
    second.metadata["kvmnn.lossy"] = "K and V are rounded"
    marked = compare_allclose(first, second, 1e30)
    assert "another order" not in str(marked) and str(marked).endswith(": an input is LOSSY") and marked.is_lossy
    unrelated = source({"layer_0.key": words[::-1].copy()}, metadata={"kvmnn.lossy": "K and V are rounded"})
    assert "another order of axes" in str(compare_allclose(first, unrelated, 1e30))


def test_compare_allclose_relative_error_ignores_non_finite_values() -> None:
    one, two = numbers(1), numbers(1)
    one["layer_0.key"][0, 0] = two["layer_0.key"][0, 0] = [np.nan, np.inf, 1, -np.inf]
    two["layer_0.key"][0, 0, 2] = np.nan
    assert compare_allclose(source(one), source(two), 0).errors[0].relative == 0
    zeros = {"layer_0.key": np.zeros((2, 5, 4), np.float16)}
    assert compare_allclose(source(zeros), source(zeros), 0).errors[0].relative is None


def test_compare_allclose_missing_layers_and_tokens_are_reported() -> None:
    one, two = numbers(2), numbers(1, (2, 4, 4))
    for name in two:
        two[name][:] = one[name][:, :4]
    found = compare_allclose(source(one), source(two), 0)
    assert found.unlike[0] == "layer 0, K: 5 and 4 tokens; the first 4 are compared"
    assert "layer 1, K: only in the first" in found.unlike
    assert (found.above, found.words, found.equal) == (0, 64, False)
    with pytest.raises(SourceError, match="a tolerance is about K and V of layers"):
        compare_allclose(source(one), source({"weights": one["layer_0.key"]}), 0)


def test_compare_allclose_different_positions_are_reported() -> None:
    cache = EngineCacheInfo(engine="a", kind="b", layers=1, kv_heads=2, head_dim=4, tokens=5, types=("f16", "f16"))
    one, two = (replace(cache, positions=np.arange(5) + shift) for shift in (0, 2))
    found = compare_allclose(source(numbers(1), engine_cache=one), source(numbers(1), engine_cache=two), 0)
    assert found.unlike == ("token 0 stands at 0 and 2 of the text, and 4 more differ: not compared",)
    assert not found.errors
    assert compare_allclose(source(numbers(1), engine_cache=one), source(numbers(1), engine_cache=cache), 0).equal
    found = compare_bitwise(source(numbers(1), engine_cache=one), source(numbers(1), engine_cache=two))
    assert found.unlike == ("token 0 stands at 0 and 2 of the text, and 4 more differ",)
    assert (found.equal, found.words, found.differing) == (False, 80, 0)
    assert compare_bitwise(source(numbers(1), engine_cache=one), source(numbers(1), engine_cache=cache)).equal


def test_compare_allclose_rows_of_different_tokens_are_not_compared() -> None:
    whole = EngineCacheInfo(engine="a", kind="b", layers=2, kv_heads=2, head_dim=4, tokens=5, types=("f16",) * 4)
    whole = replace(whole, positions=np.arange(5))
    cut = replace(whole, positions=None, layer_positions=(np.arange(5), np.arange(3, 5)))
    few = {name: words[:, 3:] if "1" in name else words for name, words in numbers().items()}
    found = compare_allclose(source(few, engine_cache=cut), source(numbers(), engine_cache=whole), 0)
    assert found.unlike == ("layer 1: token 0 stands at 3 and 0 of the text, and 1 more differ: not compared",)
    assert [(each.layer, each.above) for each in found.errors] == [(0, 0), (0, 0)] and not found.equal


def test_diff_close_reports_distance(tmp_path, run) -> None:
    one, two = numbers(), {name: words.astype(np.float32) for name, words in numbers().items()}
    np.savez(tmp_path / "a.npz", **one)
    np.savez(tmp_path / "b.npz", **two)
    assert "fp16 and fp32" in run("diff", tmp_path / "a.npz", tmp_path / "b.npz", code=1).out
    assert "160 numbers within 0" in run("diff", tmp_path / "a.npz", tmp_path / "b.npz", "--atol", 0).out
    two["layer_1.key"] += 1
    np.savez(tmp_path / "b.npz", **two)
    said = run("diff", tmp_path / "a.npz", tmp_path / "b.npz", "--atol", "1e-3", code=1).out
    assert "40 of 160 numbers are further apart than 0.001" in said
    assert "is no tolerance" in run("diff", tmp_path / "a.npz", tmp_path / "b.npz", "--atol", "-1", code=2).err
