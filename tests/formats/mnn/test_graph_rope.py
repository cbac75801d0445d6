"""RoPE of MNN graphs: of an exported model, and of graphs as other exporters write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conformance import unpack
from mnn_graphs import Graph
from repository import FIXTURES
from rope_model import plain_frequencies

from kvmnn.dense import RopeConfig
from kvmnn.dense.rope import RopeFrequencies
from kvmnn.errors import SourceError
from kvmnn.formats.mnn.rope import read_graph_rope, read_graph_rotary, read_model_rope

PLAIN, WINDOW = plain_frequencies(1e6, 16), plain_frequencies(1e4, 16)
LLAMA3 = PLAIN / np.linspace(1, 8, 8)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as MNN 3.6.1 exports it: two layers, theta 10000, 16 dimensions."""
    folder = tmp_path_factory.mktemp("exported")
    unpack(FIXTURES / "mnn_engine" / "model.tar.xz", folder)
    return next(folder.rglob("llm.mnn")).parent


def read(tmp_path: Path, graph: Graph) -> list[RopeFrequencies | None] | None:
    (tmp_path / "llm.mnn").write_bytes(graph.to_bytes())
    found = read_graph_rope(tmp_path / "llm.mnn")
    return None if found is None else list(found)


def radians(rope: RopeFrequencies | None) -> np.ndarray:
    assert rope is not None
    return rope.turns.astype(np.float64) * 2 * np.pi / 2.0**64


def test_graph_rope_of_exported_model(exported: Path) -> None:
    found = read_model_rope(str(exported), 2, 16, 100)
    assert found is not None and found.label == "theta=10000,dims=16"
    assert found.origin == f"as {exported / 'llm.mnn'} has it"
    for rope in found.layers:
        np.testing.assert_allclose(radians(rope), plain_frequencies(1e4, 16), atol=5e-7)  # written with six digits
        assert rope is not None and rope.pairing == "half"
    with pytest.raises(SourceError, match="has 2 layers, the cache has 3"):
        read_model_rope(str(exported), 3, 16, 100)
    with pytest.raises(SourceError, match="rotates more elements than heads of 8 have"):
        read_model_rope(str(exported), 2, 8, 100)


@pytest.mark.parametrize("frequencies", [PLAIN, LLAMA3], ids=["plain", "scaled"])
@pytest.mark.parametrize(("step", "pairing"), [(1, "half"), (2, "interleaved")])
def test_graph_rope_frequencies_times_positions(tmp_path, frequencies, step, pairing) -> None:
    graph = Graph()
    angles = graph.angles(frequencies)
    for _ in range(3):
        graph.layer(angles, step=step)
    ropes = read(tmp_path, graph)
    assert ropes is not None and len(ropes) == 3
    for rope in ropes:
        np.testing.assert_allclose(radians(rope), frequencies, rtol=1e-7)
        assert rope is not None and (rope.pairing, rope.dims) == (pairing, 16)


@pytest.mark.parametrize("rows", [64, 2048])
@pytest.mark.parametrize("upper", [3, 3000])
def test_graph_rope_frequencies_in_sine_tables(tmp_path, rows, upper) -> None:
    """Whichever of the tables has more rows."""
    graph = Graph()
    graph.layer(graph.tables(LLAMA3, rows, upper))
    (rope,) = read(tmp_path, graph) or [None]
    np.testing.assert_allclose(radians(rope), LLAMA3, rtol=1e-6)


def test_graph_rope_layers_may_differ(tmp_path) -> None:
    """Windows with another theta, layers without rotation, and the operator that does all of it."""
    graph = Graph()
    window, full = graph.angles(WINDOW), graph.tables(PLAIN)
    for rotation in (window, window, full, None):
        graph.layer(rotation, fused=rotation == full)
    ropes = read(tmp_path, graph)
    assert ropes is not None and ropes[3] is None and ropes[0] is ropes[1]
    assert ropes[0] is not None and ropes[0].label == "theta=10000,dims=16"
    assert ropes[2] is not None and ropes[2].label == "theta=1000000,dims=16"
    (tmp_path / "llm_config.json").write_text(json.dumps({"model_type": "gemma3"}))
    found = read_model_rope(str(tmp_path), 4, 16, 100)
    assert found is not None
    assert found.label == (
        "theta=10000,dims=16 in 2 layers and theta=1000000,dims=16 in 1 layer and no rotation in 1 layer"
    )


def test_graph_rope_part_of_a_head(tmp_path) -> None:
    graph = Graph()
    graph.layer(graph.angles(plain_frequencies(1e4, 8)))
    (rope,) = read(tmp_path, graph) or [None]
    assert rope is not None and rope.is_equivalent(RopeFrequencies.from_config(RopeConfig(theta=1e4, dims=8)))


def test_graph_rope_unclear_graph_is_none(tmp_path) -> None:
    for odd in (np.stack([PLAIN, PLAIN]).reshape(2, 8), np.array([np.nan] * 8)):
        graph = Graph()
        graph.layer(graph.angles(odd) if odd.ndim == 1 else graph.tables(odd[0] + 1))  # a turn more each position
        ropes = read(tmp_path, graph)
        if odd.ndim == 1:
            assert ropes is None
        else:
            np.testing.assert_allclose(radians(ropes[0]) % (2 * np.pi), (PLAIN + 1) % (2 * np.pi), rtol=1e-6)
    graph = Graph()
    graph.layer(graph.add(9, 0))  # of positions, but neither angles nor tables
    assert read(tmp_path, graph) is None
    assert read(tmp_path, Graph()) is None
    (tmp_path / "llm.mnn").write_bytes(b"")
    assert read_graph_rope(tmp_path / "llm.mnn") is None
    two = Graph()
    two.layer(two.add(10, two.angles(PLAIN), two.angles(WINDOW)))
    assert read(tmp_path, two) is None


def test_graph_rope_special_position_ids_are_refused(tmp_path, exported) -> None:
    for name in ("llm.mnn",):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    (tmp_path / "llm_config.json").write_text(json.dumps({"attention_mask": "glm"}))
    with pytest.raises(SourceError, match="MNN gives tokens of this kind of model positions of their own"):
        read_model_rope(str(tmp_path), 2, 16, 100)
    (tmp_path / "llm_config.json").write_text(json.dumps({"is_mrope": True}))
    found = read_model_rope(str(tmp_path), 2, 16, 100)
    assert found is not None and found.notes == (f"{tmp_path}: right for tokens of text only (mrope)",)


def test_graph_rope_damaged_graph_is_none_or_equal(exported, tmp_path) -> None:
    graph, file = (exported / "llm.mnn").read_bytes(), tmp_path / "llm.mnn"
    for length in (0, 1, 4, 60, *range(1000, len(graph), 1999)):
        file.write_bytes(graph[:length])
        assert read_graph_rope(file) is None or length > 30_000
    for place in range(0, len(graph) - 4, 499):
        file.write_bytes(graph[:place] + b"\xff\xff\xff\xff" + graph[place + 4 :])
        read_graph_rope(file)
    file.write_bytes(b"\x04\0\0\0" * 5000)
    assert read_graph_rope(file) is None


def test_graph_rope_large_graph_ends_soon(tmp_path) -> None:
    graph = Graph()
    far = 0
    for _ in range(3000):
        far = graph.add(9, far, 1)
    for _ in range(200):
        graph.layer(far)
    assert read(tmp_path, graph) is None


def test_graph_rotary_is_the_theta_that_all_layers_have(exported: Path, tmp_path: Path) -> None:
    assert read_graph_rotary(str(exported)) == RopeConfig(theta=10000.0, dims=16)
    assert read_graph_rotary(str(tmp_path)) is None and read_graph_rotary(str(exported / "llm.mnn")) is None
