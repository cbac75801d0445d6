"""``positions.json`` next to plain arrays: pack records its true positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvmnn
from kvmnn import KvmnnError
from kvmnn.formats.mnn import pack
from kvmnn.packed.inference import PackedGeometry
from kvmnn.store import read_layer_caches

TOKENS = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kv").mkdir()
    for layer in range(2):
        for part in ("key", "value"):
            rows = np.random.default_rng(layer).standard_normal((2, TOKENS, 16)).astype(np.float32)
            np.save(tmp_path / "kv" / f"layer_{layer}.{part}.npy", rows)
    return tmp_path / "kv"


def packed(folder: Path, said: Any) -> Any:
    (folder / "positions.json").write_text(json.dumps(said))
    return pack(kvmnn.open(str(folder)), str(folder.parent / "p"), PackedGeometry(backend="x86-avx2"), name="p")


def layers(*positions: Any) -> dict[str, Any]:
    return {"layers": [{"layer": number, "positions": each} for number, each in enumerate(positions)]}


def test_pack_records_position_runs(folder: Path) -> None:
    found = packed(folder, layers([0, 1, 2, 90, 91, 95], [4, 6, 8, 10, 12, 14]))
    assert found.info.layers[0].positions == ((0, 3), (90, 2), (95, 1))
    assert found.info.layers[1].positions == tuple((place, 1) for place in (4, 6, 8, 10, 12, 14))
    assert found.notes == ("true positions are as positions.json next to the arrays has them",)
    assert found.warnings[0] == "K has positions up to 95, and after loading MNN continues at 6:"
    again = kvmnn.open(str(folder.parent / "p"))
    assert again.cache is not None and again.cache.layers == found.info.layers


def test_pack_heads_with_different_tokens_are_recorded_as_cut(folder: Path) -> None:
    """As the first six tokens, a store would take them for the beginning of a text."""
    first, cut = [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 9]
    found = packed(folder, layers([cut, cut], [first, cut]))
    assert [layer.positions for layer in found.info.layers] == [((0, 5), (9, 1))] * 2
    differ = (
        "heads of layer 1 hold different tokens of the text, and a prefix cache says those of a layer: noted are those "
        "of the head that goes furthest"
    )
    assert found.notes[:2] == (differ, "true positions are as positions.json next to the arrays has them")
    with pytest.raises(KvmnnError, match="layer 0 was cut"):
        read_layer_caches(kvmnn.open(str(folder.parent / "p")))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (layers([0, 1, 2, 3, 4, 5]), "has positions of 1 layers: the arrays are of 2"),
        (layers([0, 1, 2], [0, 1, 2]), "expected 6 ascending positions"),
        (layers([0, 1, 2, 3, 5, 4], [0, 1, 2, 3, 4, 5]), "expected 6 ascending positions"),
        (layers([0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]), "expected 6 ascending positions"),
        (layers([-1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]), "expected a list of positions"),
        (layers([0, 1, 2, 3, 4, 2**31], [0, 1, 2, 3, 4, 5]), "expected a list of positions"),
        (layers([0, 1, 2, 3, 4, True], [0, 1, 2, 3, 4, 5]), "expected a list of positions"),
        (layers("012345", [0, 1, 2, 3, 4, 5]), "expected a list of positions"),
        ({}, "layers: is missing"),
        ([], "found [], expected an object"),
    ],
)
def test_pack_mismatched_positions_are_refused(folder: Path, said: Any, message: str) -> None:
    with pytest.raises(KvmnnError) as refused:
        packed(folder, said)
    assert "positions.json: " in str(refused.value) and message in str(refused.value)
    assert not (folder.parent / "p").exists()
