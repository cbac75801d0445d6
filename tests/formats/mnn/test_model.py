"""Geometry from a model's directory: its settings, and its graph where the settings lack it."""

from __future__ import annotations

import json

import packed_samples
import pytest
from conformance import unpack
from repository import FIXTURES

from kvmnn.errors import SourceError
from kvmnn.formats.mnn.model import (
    OP_TYPE_CONST,
    OP_TYPE_RESHAPE,
    GraphGeometry,
    GraphOp,
    _find_reshape_axes,
    read_graph_geometry,
    read_model_geometry,
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model as MNN 3.6.1 exports it: two layers, two kv heads, 16 dimensions."""
    folder = tmp_path_factory.mktemp("exported")
    unpack(FIXTURES / "mnn_engine" / "model.tar.xz", folder)
    return next(folder.rglob("llm.mnn")).parent


def test_read_model_geometry_completes_settings_by_graph(exported):
    settings = json.loads((exported / "llm_config.json").read_text())
    assert "key_value_shape" not in settings and "head_dim" not in settings
    found = read_model_geometry(str(exported))
    assert (found.num_layers, found.kv_heads, found.head_dim) == (2, 2, 16)


def test_read_model_geometry_prefers_settings_and_their_graph(exported, tmp_path):
    (tmp_path / "other.mnn").write_bytes((exported / "llm.mnn").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"llm_model": "other.mnn", "head_dim": 8}))
    found = read_model_geometry(str(tmp_path))
    assert (found.num_layers, found.kv_heads, found.head_dim) == (2, 2, 8)
    (tmp_path / "config.json").write_text(json.dumps({"llm_model": "../other.mnn"}))
    assert read_model_geometry(str(tmp_path)).kv_heads is None


def test_read_model_geometry_of_graph_alone(exported, tmp_path):
    (tmp_path / "llm.mnn").write_bytes((exported / "llm.mnn").read_bytes())
    assert read_model_geometry(str(tmp_path)).head_dim == 16
    (tmp_path / "llm.mnn").unlink()
    with pytest.raises(SourceError, match=r"has neither llm_config\.json nor config\.json"):
        read_model_geometry(str(tmp_path))


def test_encode_prefix_with_model_needs_no_heads(exported, tmp_path, run):
    sample = packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(2, 2, 64, 16), capacity=64)
    arguments = ("encode", sample.path, "--valid-tokens", 64, "--backend", "x86-avx2", "-o", tmp_path / "f/")
    run(*arguments, "--model", exported)
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "llm_config.json").write_text('{"layer_nums": 2, "hidden_size": 64}')
    said = run(*arguments, "-f", "--model", tmp_path / "silent", code=2).err
    assert "neither its files nor those of the model in" in said
    assert "say kv_heads (--kv-heads) and head_dim (--head-dim)" in said


@pytest.mark.parametrize("verb", ["encode", "mnn unpack", "inspect", "mnn pack", "measure"])
def test_commands_geometry_that_differs_from_model_is_refused(exported, tmp_path, run, verb):
    sample = packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(2, 2, 20, 16), capacity=64)
    target = {"encode": "f/", "mnn unpack": "k.npz", "mnn pack": "q/"}.get(verb)
    more = ("-o", tmp_path / target) if target else ()
    arguments = (*verb.split(), sample.path, "--valid-tokens", 20, "--backend", "x86-avx2", "--model", exported, *more)
    said = run(*arguments, "--kv-heads", 4, "--head-dim", 8, code=2).err
    assert f"kv heads: 4 for the cache, but the model in {exported} has 2" in said
    said = run(*arguments, "--head-dim", 8, code=2).err
    assert f"head_dim: 8 for the cache, but the model in {exported} has 16" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]
    run(*arguments, "--kv-heads", 2, "--head-dim", 16)


def test_pack_arrays_of_other_model_are_refused(exported, tmp_path, run):
    sample = packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(2, 4, 20, 8), capacity=64)
    run("mnn", "unpack", sample.path, *sample.options, "--backend", "x86-avx2", "-o", tmp_path / "k.npz")
    to_pack = ("mnn", "pack", tmp_path / "k.npz", "--backend", "x86-avx2", "--name", "sys", "-o", tmp_path / "q/")
    assert "kv heads: 4 for the cache, but the model" in run(*to_pack, "--model", exported, code=2).err
    assert not (tmp_path / "q").exists()


def test_encode_ambiguous_layout_lists_candidates(tmp_path, run):
    sample = packed_samples.write_prefix(tmp_path / "p", packed_samples.arrays(1, 2, 64, 8), capacity=64)
    said = run("encode", sample.path, *sample.options, "-o", tmp_path / "f/", code=2).err
    assert "say which (--backend" in said and "generic/x86-sse/x86-avx2/" in said and "x86-avx512/arm64-fp32" in said
    run("mnn", "unpack", sample.path, *sample.options, "--backend", "x86-avx2", "-o", tmp_path / "k/")
    said = run("mnn", "pack", tmp_path / "k", "--name", "sys", "-o", tmp_path / "q/", code=2).err
    assert "generic/x86-sse/x86-avx2/arm32-fp32/arm32-bf16/riscv-rvv: lP 1, hP 4, fp32; x86-avx512" in said


def test_read_graph_geometry_damaged_is_none_or_equal(exported, tmp_path):
    graph = (exported / "llm.mnn").read_bytes()
    whole = GraphGeometry(2, 2, 16)
    file = tmp_path / "llm.mnn"
    for length in (0, 1, 4, 60, *range(1000, len(graph), 1999)):
        file.write_bytes(graph[:length])
        assert read_graph_geometry(file) in (None, whole)
    for place in range(0, len(graph) - 4, 997):
        file.write_bytes(graph[:place] + b"\xff\xff\xff\xff" + graph[place + 4 :])
        found = read_graph_geometry(file)
        assert found is None or found.num_layers <= 2
    file.write_bytes(b"\x04\0\0\0" * 5000)
    assert read_graph_geometry(file) is None


def test_read_model_geometry_ignores_nonpositive_values(tmp_path):
    for value, expected in ((1, 1), (0, None), (-1, None), (True, None)):
        settings = {"layer_nums": value, "num_key_value_heads": value, "head_dim": value}
        (tmp_path / "llm_config.json").write_text(json.dumps(settings))
        found = read_model_geometry(str(tmp_path))
        assert (found.num_layers, found.kv_heads, found.head_dim) == (expected,) * 3


@pytest.mark.parametrize(
    ("shape", "expected"), [((-1, 4, 8), (4, 8)), ((4, 8), (None, None)), ((2, 0, 8), (None, None))]
)
def test_find_reshape_axes_are_last_two_of_three_or_more(shape, expected):
    makers = {5: GraphOp(OP_TYPE_RESHAPE, (1, 2), (5,), (), None), 2: GraphOp(OP_TYPE_CONST, (), (2,), shape, None)}
    assert _find_reshape_axes(5, makers) == expected
