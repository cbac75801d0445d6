"""Compressors as ONNX files: what is in them, and that onnxruntime alone makes the same tokens of them."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from compressor_model import to_floats, weight_file

from kvmnn import KvmnnError, OutputError
from kvmnn.cli.entry_point import main
from kvmnn.compressor import kvcm
from kvmnn.compressor.forward.engines import NumpyEngine
from kvmnn.compressor.forward.onnx_graph import build_graph, export_onnx, list_compressor_kinds

onnx = pytest.importorskip("onnx", reason="extra lm")
onnxruntime = pytest.importorskip("onnxruntime", reason="extra lm")


def wider(layer, index, weight):
    """Another hidden width in layer 1."""
    if layer != 1:
        return weight
    return np.pad(weight, [(0, 0 if index % 3 == 2 else 1), (0, 0 if index % 3 == 0 else 1)])


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_export_onnx_graphs_equal_the_numpy_engine(tmp_path, dtype, precision):
    random = np.random.default_rng(6)
    weights = weight_file(random, layers=3, dtype=dtype, bias=lambda: random.random() < 0.5)
    names = export_onnx(weights, tmp_path / "graphs", precision=precision).files
    assert sorted(path.name for path in (tmp_path / "graphs").iterdir()) == sorted(names)
    rows = random.standard_normal((9, 12)).astype(np.float32)
    checked = set()
    for name in names:
        session = onnxruntime.InferenceSession(tmp_path / "graphs" / name, providers=["CPUExecutionProvider"])
        properties = session.get_modelmeta().custom_metadata_map
        prefix = ["compress_tk", "compress_tv", "compress_ik", "compress_iv"].index(properties["kvmnn.prefix"])
        assert properties["kvmnn.precision"] == precision
        assert (properties["kvmnn.compression_factor"], properties["kvmnn.min_seq_len"]) == ("3", "2")
        for place, layer in enumerate(map(int, properties["kvmnn.layers"].split(","))):
            (tokens,) = session.run(None, {"layer": np.array(place, np.int64), "rows": rows})
            engine = NumpyEngine(weights, precision)
            engine.load_compressor(layer, prefix)
            expected = engine.apply_compressor(
                rows.astype(np.float16).astype(np.float32) if precision == "fp16" else rows
            )
            absolute, relative = (2e-3, 1e-2) if precision == "fp16" else (1e-4, 1e-5)
            assert np.all(np.abs(tokens - expected) <= absolute + relative * np.abs(expected))
            checked.add((layer, prefix))
    assert checked == {(layer, prefix) for layer in range(3) for prefix in range(4)}


def test_list_compressor_kinds_one_graph_per_kind():
    random = np.random.default_rng(0)
    assert [kind.name for kind in list_compressor_kinds(weight_file(random, layers=3, prefixes=2))] == [
        "compress_tk",
        "compress_tv",
    ]
    kinds = list_compressor_kinds(weight_file(random, layers=3, prefixes=1, change=wider))
    assert [(kind.name, kind.layers) for kind in kinds] == [
        ("compress_tk.layer_0", (0, 2)),
        ("compress_tk.layer_1", (1,)),
    ]
    assert list_compressor_kinds(weight_file(random, prefixes=5))[-1].name == "prefix_4"
    with pytest.raises(KvmnnError, match="has 14 weights in a layer: expected a multiple of 3"):
        list_compressor_kinds(weight_file(random, extra=2))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_build_graph_stores_weights_unchanged(dtype):
    weights = weight_file(np.random.default_rng(0), layers=2, prefixes=2, dtype=dtype, change=wider)
    for kind in list_compressor_kinds(weights):
        graph = onnx.load_from_string(build_graph(weights, kind)).graph
        for tensor in graph.initializer:
            slot = int(tensor.name[-1])
            blocks = [weights.get_block(layer, 3 * kind.prefix + slot) for layer in kind.layers]
            words = [block.weight if tensor.name.startswith("weight") else block.bias for block in blocks]
            assert tensor.raw_data == np.stack(words).tobytes()
            assert list(tensor.dims) == [len(kind.layers), *words[0].shape]
            assert (
                onnx.TensorProto.DataType.Name(tensor.data_type)
                == {
                    "fp16": "FLOAT16",
                    "bf16": "BFLOAT16",
                    "fp32": "FLOAT",
                }[dtype]
            )
        assert len(graph.initializer) == 6
        assert build_graph(weights, kind) == build_graph(weights, kind)


def test_export_onnx_invalid_weights_write_nothing(tmp_path):
    def change(layer, index, weight):
        return np.pad(weight, [(0, 0), (0, 1)]) if index == 10 else weight

    broken = weight_file(np.random.default_rng(0), change=change)
    with pytest.raises(KvmnnError, match="compress_iv: linear 1 takes 5 inputs, expected 4"):
        export_onnx(broken, tmp_path / "graphs")
    assert list(tmp_path.iterdir()) == []
    good = weight_file(np.random.default_rng(0))
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "compress_ik.onnx").write_text("mine")
    with pytest.raises(OutputError, match=r"compress_ik.onnx: exists already"):
        export_onnx(good, tmp_path / "graphs")
    assert [path.name for path in (tmp_path / "graphs").iterdir()] == ["compress_ik.onnx"]
    assert len(export_onnx(good, tmp_path / "graphs", overwrite=True).files) == 4
    assert onnx.load(tmp_path / "graphs" / "compress_ik.onnx").graph.name == "compress_ik"


def test_build_graph_too_large_model_is_refused_early(monkeypatch):
    monkeypatch.setattr("kvmnn.compressor.forward.onnx_graph._MAX_PROTOBUF_BYTES", 300)
    weights = weight_file(np.random.default_rng(0), layers=2)
    with pytest.raises(KvmnnError, match="compress_tk has 736 bytes of weights, an ONNX model holds less than 2 GiB"):
        build_graph(weights, list_compressor_kinds(weights)[0])
    assert to_floats(weights.get_block(0, 0).weight).shape == (4, 12)


def test_export_command_writes_onnx_graphs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weights = weight_file(np.random.default_rng(0), prefixes=2)
    with open("w.bin", "wb") as file:
        kvcm.write_weight_file(file, weights.header, ((block.weight, block.bias) for block in weights.iter_blocks()))
    assert main(["compressor", "export", "w.bin", "--onnx", "-o", "graphs"]) == 0
    assert capsys.readouterr().out == (
        "graphs: compress_tk.onnx, compress_tv.onnx; weights of fp32, UNCHANGED (copied)\n"
    )
    kinds = list_compressor_kinds(kvcm.read_weight_file("w.bin"))
    assert (tmp_path / "graphs" / "compress_tk.onnx").read_bytes() == build_graph(weights, kinds[0])
    assert main(["compressor", "export", "w.bin", "--onnx", "-o", "graphs", "-f", "--precision", "fp16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["label"], said["files"]) == ("LOSSY", ["compress_tk.onnx", "compress_tv.onnx"])
    assert (tmp_path / "graphs" / "compress_tv.onnx").read_bytes() == build_graph(weights, kinds[1], "fp16")
    assert main(["compressor", "export", "w.bin", "--onnx", "-o", "-"]) == 2
    assert main(["compressor", "export", "w.bin", "--onnx", "-o", "graphs"]) == 1
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["compressor", "export", "w.bin", "--onnx", "-o", "others"]) == 3
    assert not (tmp_path / "others").exists()
