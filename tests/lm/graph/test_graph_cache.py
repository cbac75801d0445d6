"""Rewritten graphs: cached next to the model, reused, replaced when the model changes, never partly written."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from tiny_decoders import Numpy, Tiny

from kvmnn.lm.onnx import decoder_loader
from kvmnn.lm.onnx import decoder_loader as operating
from kvmnn.lm.session import DecoderSession

IDS, POSITIONS = np.arange(3, 48, 5), np.arange(9)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Models that were operated on, in order."""
    found: list[Path] = []
    real = decoder_loader._rewrite_graph

    def operate(model, interface, **options):
        found.append(Path(interface.label))
        return real(model, interface, **options)

    monkeypatch.setattr(operating, "_rewrite_graph", operate)
    return found


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kvmnn-*.onnx"))


def logits(session: DecoderSession) -> np.ndarray:
    return session.run_step(IDS, POSITIONS, session.create_empty_past()).logits


def test_graph_cache_is_next_to_model_and_reused(tmp_path: Path, made: list[Path]) -> None:
    path = Tiny().save(tmp_path / "model.onnx")
    first = DecoderSession.open(path, attentions=True)
    assert len(made) == 1 and len(kept(tmp_path)) == 1
    again = DecoderSession.open(path, attentions=True)
    assert len(made) == 1
    assert again.has_bias and again.has_attentions and again.query_heads == 4
    np.testing.assert_array_equal(logits(first), logits(again))
    DecoderSession.open(path)
    assert len(made) == 2 and len(kept(tmp_path)) == 2
    assert DecoderSession.open(tmp_path).interface.label == str(path)


def test_graph_cache_reuses_merged_graphs(tmp_path: Path, made: list[Path]) -> None:
    path = Tiny(merged=True).save(tmp_path / "decoder_model_merged.onnx")
    first, again = (DecoderSession.open(path, attentions=True) for _ in range(2))
    assert len(made) == 1
    np.testing.assert_array_equal(logits(first), logits(again))


def test_graph_cache_changed_model_is_rewritten_again(tmp_path: Path, made: list[Path]) -> None:
    path = Tiny().save(tmp_path / "model.onnx")
    DecoderSession.open(path)
    before = kept(tmp_path)
    Tiny(layers=3).save(path)
    assert DecoderSession.open(path).interface.layers == 3
    assert len(made) == 2 and len(kept(tmp_path)) == 1 and kept(tmp_path) != before


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign", "other model"])
def test_graph_cache_damaged_file_is_replaced(damage: str, tmp_path: Path, made: list[Path]) -> None:
    path = Tiny().save(tmp_path / "model.onnx")
    expected = logits(DecoderSession.open(path))
    (graph,) = kept(tmp_path)
    if damage == "empty":
        graph.write_bytes(b"")
    elif damage == "cut":
        os.truncate(graph, graph.stat().st_size // 2)
    elif damage == "foreign":
        graph.write_bytes(b"\x89PNG" * 100)
    else:
        Tiny(layers=3).save(graph)
    np.testing.assert_array_equal(logits(DecoderSession.open(path)), expected)
    assert len(made) == 2
    DecoderSession.open(path)
    assert len(made) == 2


def test_graph_cache_read_only_folder_uses_user_cache(tmp_path: Path, made: list[Path]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = Tiny().save(folder / "model.onnx")
    folder.chmod(0o555)
    try:
        DecoderSession.open(path)
        assert not kept(folder) and len(kept(Path(os.environ["XDG_CACHE_HOME"]) / "kvmnn" / "graphs")) == 1
        DecoderSession.open(path)
    finally:
        folder.chmod(0o755)
    assert len(made) == 1


def test_graph_cache_unwritable_folders_still_run(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = Tiny().save(folder / "model.onnx", location="weights.bin")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder.chmod(0o555)
    try:
        for _ in range(2):
            assert DecoderSession.open(path).has_bias
    finally:
        folder.chmod(0o755)
    assert len(made) == 2 and not kept(folder)


def test_graph_cache_disabled_writes_nothing(tmp_path: Path) -> None:
    DecoderSession.open(Tiny().save(tmp_path / "model.onnx"), attentions=True, cache=False)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_graph_cache_external_weights_are_not_copied(tmp_path: Path, made: list[Path]) -> None:
    tiny = Tiny(vocab=5000)
    path = tiny.save(tmp_path / "model.onnx", location="weights.bin")
    first, again = (DecoderSession.open(path, attentions=True) for _ in range(2))
    (graph,) = kept(tmp_path)
    assert graph.stat().st_size < 30_000 < (tmp_path / "weights.bin").stat().st_size
    np.testing.assert_array_equal(logits(first), logits(again))
    assert len(made) == 1


def test_graph_cache_follows_hub_snapshot_links(tmp_path: Path, made: list[Path]) -> None:
    """Names in one folder are links to files side by side in another, under names of their own."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    tiny = Tiny()
    tiny.save(tmp_path / "model.onnx", location="weights.bin")
    for name, blob in (("model.onnx", "aa"), ("weights.bin", "bb")):
        shutil.move(tmp_path / name, blobs / blob)
        (snapshot / name).symlink_to(Path("../..") / "blobs" / blob)
    for _ in range(2):
        session = DecoderSession.open(snapshot, attentions=True)
        assert session.has_bias and session.has_attentions
    assert len(made) == 1


def test_graph_cache_name_with_glob_characters(tmp_path: Path, made: list[Path]) -> None:
    other = Tiny().save(tmp_path / "model.onnx")
    path = Tiny(layers=3).save(tmp_path / "m*[o].onnx")
    DecoderSession.open(other)
    DecoderSession.open(path)
    DecoderSession.open(other)
    assert made == [other, path] and len(kept(tmp_path)) == 2


def test_graph_cache_never_reads_gigabytes_of_weights(tmp_path: Path) -> None:
    """More than protobuf can hold, in a file of zeros that takes no room."""
    tiny = Tiny()
    model = tiny.model()
    rows = 20_000_000
    ballast = TensorProto(name="ballast", data_type=TensorProto.FLOAT, dims=[rows, tiny.width])
    ballast.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", str(rows * tiny.width * 4))):
        ballast.external_data.add(key=key, value=value)
    model.graph.initializer.append(ballast)
    embedding = model.graph.node[0]
    model.graph.node.insert(1, helper.make_node("Gather", ["ballast", "input_ids"], ["zeros"]))
    model.graph.node.insert(2, helper.make_node("Add", ["plain", "zeros"], [embedding.output[0]]))
    embedding.output[0] = "plain"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with open(tmp_path / "weights.bin", "wb") as file:
        file.truncate(rows * tiny.width * 4)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    session = DecoderSession.open(tmp_path, attentions=True)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert session.has_bias and grown < 500e6 < 2**31 < (tmp_path / "weights.bin").stat().st_size
    np.testing.assert_allclose(logits(session), Numpy(tiny).step(IDS, POSITIONS, Numpy(tiny).empty())[0], atol=5e-6)
    assert kept(tmp_path)[0].stat().st_size < 200_000
