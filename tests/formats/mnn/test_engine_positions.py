"""Evicted prefixes in the real engine: it counts on from the number of ids, and both remedies put that right.

RoPE is relative: a cache of the last tokens continues alike whether the engine is told the length of the text or K is
rotated to the first positions. A cache with gaps is compared with the engine's own eviction in a running session, which
keeps the length, and its rotated K with K that the engine computes at those positions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_client import GEOMETRY, NAME, PREFIX_IDS, QUERY_IDS, Engine, needs_engine, unpack_fixture
from rope_model import plain_frequencies, rotate

from kvmnn.cli.entry_point import main
from kvmnn.formats import open as open_any
from kvmnn.formats.options import PackedOptions, ReadOptions
from kvmnn.packed.inference import PackedGeometry

pytestmark = needs_engine

WINDOW, GAPS = [*range(26, 50)], [*range(4), *range(26, 50)]
RESERVES = {"window": ("26:24", WINDOW), "gaps": ("0:4,26:24", GAPS)}
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_fixture("model", tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_fixture("prefix", tmp_path_factory.mktemp("written"))


@pytest.fixture
def continued(model: Path, tmp_path: Path) -> Callable[..., list[int]]:
    """What the engine generates when it continues from a folder, told a length or not."""

    def generate(folder: str, tokens: int, length: int | None = None) -> list[int]:
        with Engine(model, tmp_path / f"scratch-{folder}-{length}", tmp_path / folder) as engine:
            assert engine.call("prefix", NAME) == 1
            engine.call("generate", PREFIX_IDS[:tokens], 0)
            if length is not None:
                assert engine.call("set_length", length) == tokens  # from which it would count on
            found: list[int] = engine.call("generate", QUERY_IDS, TOKENS)
        return found

    return generate


def kvmnn(*argv: object) -> None:
    assert main([str(arg) for arg in argv]) == 0


def _options(tokens: int = 50) -> ReadOptions:
    geometry = PackedGeometry(kv_heads=2, head_dim=16, backend="x86-avx2")
    return ReadOptions(packed=PackedOptions(geometry=geometry, valid_tokens=(tokens,)))


def compact(prefix: Path, which: str, output: Path, *options: object) -> int:
    reserve, kept = RESERVES[which]
    kvmnn("mnn", "compact", prefix, *GEOMETRY, "--valid-tokens", 50, "--reserve", reserve, "-o", output, *options)
    return len(kept)


@pytest.mark.slow
def test_engine_window_continues_alike_by_both_remedies(model, prefix, tmp_path, continued) -> None:
    tokens = compact(prefix, "window", tmp_path / "plain")
    compact(prefix, "window", tmp_path / "rotated", "--rerotate", "--model", model)
    told, rotated, neither = (
        continued(*each) for each in (("plain", tokens, 50), ("rotated", tokens), ("plain", tokens))
    )
    assert told == rotated
    assert neither[:3] != told[:3]


def test_engine_gaps_with_length_equal_its_own_eviction(prefix, model, tmp_path, continued):
    with Engine(model, tmp_path / "live") as engine:
        engine.call("forward", PREFIX_IDS)
        engine.call("reserve", 49, [[0, 3], [25, 24]])
        expected = engine.call("generate", QUERY_IDS, TOKENS)
    tokens = compact(prefix, "gaps", tmp_path / "plain")
    assert continued("plain", tokens, 50) == expected
    assert continued("plain", tokens)[:3] != expected[:3]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compact", "repack", "pack"])
def test_rerotated_gaps_equal_rotation_by_numpy(prefix, model, tmp_path, continued, how) -> None:
    """By an independent rotation of the engine's own K with the theta that the model was made with."""
    rerotate = ("--rerotate", "--model", model)
    tokens = compact(prefix, "gaps", tmp_path / "plain", *(rerotate if how == "compact" else ()))
    if how == "repack":
        kvmnn(
            "mnn", "repack", tmp_path / "plain", "--target-backend", "x86-avx2", "-o", tmp_path / "rotated", *rerotate
        )
    elif how == "pack":
        kvmnn("mnn", "unpack", tmp_path / "plain", "-o", tmp_path / "a.npz")
        kvmnn("mnn", "pack", tmp_path / "a.npz", "-o", tmp_path / "rotated", *rerotate)
    source = open_any(str(tmp_path / "plain" if how == "compact" else tmp_path / "rotated"))
    before = open_any(str(prefix), _options())
    arrays = {}
    for layer in range(2):
        keys = before[f"layer_{layer}.key"].to_numpy()[:, GAPS]
        arrays[f"layer_{layer}.key"] = rotate(keys, np.arange(28) - GAPS, plain_frequencies(1e4, 16)).astype("<f4")
        arrays[f"layer_{layer}.value"] = before[f"layer_{layer}.value"].to_numpy()[:, GAPS]
        found = source[f"layer_{layer}.key"].to_numpy()
        np.testing.assert_allclose(found, arrays[f"layer_{layer}.key"], atol=1e-4)  # the graph has 6 digits of theta
    np.savez(tmp_path / "numpy.npz", **arrays)
    kvmnn("mnn", "pack", tmp_path / "numpy.npz", *GEOMETRY, "--name", NAME, "-o", tmp_path / "numpy")
    assert continued("plain" if how == "compact" else "rotated", tokens) == continued("numpy", tokens)


def test_rerotated_k_equals_engine_at_those_positions(prefix, model, tmp_path) -> None:
    """K of the first layer depends on a token and its position alone."""
    compact(prefix, "gaps", tmp_path / "rotated", "--rerotate", "--model", model)
    (tmp_path / "written").mkdir()
    with Engine(model, tmp_path / "scratch", tmp_path / "written") as engine:
        engine.call("prefix", NAME)
        engine.call("generate", [PREFIX_IDS[place] for place in GAPS], 0)
    computed = open_any(str(tmp_path / "written"), _options(len(GAPS)))["layer_0.key"].to_numpy()
    rotated = open_any(str(tmp_path / "rotated"))["layer_0.key"].to_numpy()
    np.testing.assert_allclose(rotated, computed, atol=2e-6)
    plain = open_any(str(prefix), _options())["layer_0.key"].to_numpy()[:, GAPS]
    assert np.abs(plain - computed).max() > 0.1
