"""The model's weights are exported from ONNX to .safetensors and back to the same graph."""

from __future__ import annotations

import json

import export_onnx
import numpy as np
import onnx
import onnxruntime
import pytest
import unexport
from gpt_neox import NeoxConfig, build
from graph_writer import HALF_SUFFIX
from repository import FIXTURES
from weights import read_weights, write_weights

from kvmnn.errors import KvmnnError, OutputError, SourceError

FIXTURE = FIXTURES / "lm"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    assert unexport.main([str(FIXTURE), str(folder)]) == 0
    return folder


def run(model, tokens=40, outputs=None):
    """Some tokens in one step on an empty cache."""
    path = model if isinstance(model, bytes) else str(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {
        "input_ids": (np.arange(tokens) * 37 % 48)[None],
        "attention_mask": np.ones((1, tokens), np.int64),
        "position_ids": np.arange(tokens)[None],
    }
    for item in session.get_inputs()[3:]:
        feed[item.name] = np.zeros((1, item.shape[1], 0, item.shape[3]), np.float32)
    names = outputs or [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def test_export_of_unexported_weights_gives_the_same_graph(checkpoint, tmp_path):
    assert export_onnx.main([str(checkpoint), str(tmp_path / "model.onnx")]) == 0
    again, shipped = onnx.load(tmp_path / "model.onnx"), onnx.load(FIXTURE / "model.onnx")
    assert again == shipped
    found, expected = run(tmp_path / "model.onnx"), run(FIXTURE / "model.onnx")
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name].view(np.uint32), expected[name].view(np.uint32))


def test_unexport_writes_what_transformers_needs(checkpoint):
    assert {path.name for path in checkpoint.iterdir()} == {"model.safetensors", *unexport.BESIDE}
    tensors = read_weights(checkpoint / "model.safetensors")
    assert sum(tensor.size for tensor in tensors.values()) == 5_787_648
    assert {tensor.dtype.str for tensor in tensors.values()} == {"<f2"}
    assert tensors["gpt_neox.layers.5.mlp.dense_h_to_4h.weight"].shape == (1024, 256)
    assert list(tensors) == sorted(tensors)


def test_export_attentions_are_outputs_within_rounding(checkpoint, tmp_path):
    assert export_onnx.main([str(checkpoint), str(tmp_path / "model.onnx"), "--attentions"]) == 0
    found, expected = run(tmp_path / "model.onnx"), run(FIXTURE / "model.onnx")
    for layer in range(6):
        weights = found.pop(f"attentions.{layer}")
        assert weights.shape == (1, 4, 40, 40)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        assert not np.triu(weights[0, 0], 1).any()
    assert found.keys() == expected.keys()
    for name in expected:  # onnxruntime fuses other operators
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-4)


def small(**changes):
    """A config.json of 2 layers."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 48}
    return {"model_type": "gpt_neox", **sizes, "rotary_pct": 0.5, **changes}


def random_weights(config, *, half, bias=True):
    random = np.random.default_rng(3)
    size = config["hidden_size"]
    shapes = {
        "gpt_neox.embed_in.weight": (config["vocab_size"], size),
        "embed_out.weight": (config["vocab_size"], size),
    }
    linear = {"attention.query_key_value": (3 * size, size), "attention.dense": (size, size)}
    linear |= {"mlp.dense_h_to_4h": (4 * size, size), "mlp.dense_4h_to_h": (size, 4 * size)}
    norms = ["gpt_neox.final_layer_norm"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"gpt_neox.layers.{layer}."
        norms += [prefix + "input_layernorm", prefix + "post_attention_layernorm"]
        for name, shape in linear.items():
            shapes[prefix + name + ".weight"] = shape
            if bias:
                shapes[prefix + name + ".bias"] = shape[:1]
    shapes |= {f"{norm}.{part}": (size,) for norm in norms for part in ("weight", "bias")}
    return {
        name: (random.standard_normal(shape) / 4).astype(np.float16 if half else np.float32)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "gelu_fast"])
def test_export_gpt_neox_variants_round_trip(tmp_path, half, bias, parallel, activation):
    config = small(use_parallel_residual=parallel, hidden_act=activation)
    weights = random_weights(config, half=half, bias=bias)
    write_weights(tmp_path / "model.safetensors", weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    export_onnx.export(tmp_path, tmp_path / "model.onnx")
    stored = {item.name for item in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert ("gpt_neox.layers.0.attention.dense.weight.T" + HALF_SUFFIX in stored) is half
    assert np.isfinite(run(tmp_path / "model.onnx")["logits"]).all()
    back = unexport.unexport(tmp_path, tmp_path / "back")
    assert back.keys() == weights.keys()
    for name, value in read_weights(tmp_path / "back" / "model.safetensors").items():
        assert value.dtype == weights[name].dtype
        np.testing.assert_array_equal(value, weights[name])


def test_neox_config_old_and_new_keys_are_equal():
    old = small(rotary_pct=0.25, rotary_emb_base=500)
    new = small(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 500.0})
    assert NeoxConfig.of(old) == NeoxConfig.of(new)


def test_build_tied_embeddings_serve_as_the_head(tmp_path):
    config = NeoxConfig.of(small())
    weights = random_weights(small(), half=False)
    weights["embed_out.weight"] = weights["gpt_neox.embed_in.weight"]
    untied = run(build(config, weights).SerializeToString())["logits"]
    del weights["embed_out.weight"]
    np.testing.assert_array_equal(run(build(config, weights).SerializeToString())["logits"], untied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama': expected 'gpt_neox'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu': expected one of gelu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn': expected 'default'"),
    ],
)
def test_neox_config_other_family_is_refused(changes, message):
    with pytest.raises(KvmnnError, match=message):
        NeoxConfig.of(small(**changes))


def test_build_missing_key_or_tensor_is_named(tmp_path):
    config = small()
    del config["vocab_size"]
    with pytest.raises(KvmnnError, match="vocab_size is missing"):
        NeoxConfig.of(config)
    weights = random_weights(small(), half=True)
    del weights["gpt_neox.layers.1.attention.dense.weight"]
    with pytest.raises(KvmnnError, match=r"tensor 'gpt_neox\.layers\.1\.attention\.dense\.weight' is missing"):
        build(NeoxConfig.of(small()), weights)


@pytest.mark.parametrize("damage", ["missing", "invalid JSON", "list"])
def test_export_bad_config_is_one_line_error(tmp_path, capsys, damage):
    if damage != "missing":
        (tmp_path / "config.json").write_text("{" if damage == "invalid JSON" else "[]")
    assert export_onnx.main([str(tmp_path), str(tmp_path / "model.onnx")]) == 1
    assert unexport.main([str(tmp_path), str(tmp_path / "out")]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("export_onnx.py: error: ") and second.startswith("unexport.py: error: ")
    assert not (tmp_path / "model.onnx").exists()


def test_read_weights_malformed_file_is_refused(tmp_path):
    (tmp_path / "x").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    assert read_weights(tmp_path / "x") == {}
    (tmp_path / "x").write_bytes(b"\xff" * 20)
    with pytest.raises(SourceError, match="above the limit"):
        read_weights(tmp_path / "x")
    header = b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(SourceError, match="'a' is BF16: expected F16 or F32"):
        read_weights(tmp_path / "x")


def test_unexport_malformed_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes((FIXTURE / "config.json").read_bytes())
    with pytest.raises(SourceError, match="cannot be read"):
        unexport.unexport(tmp_path, tmp_path / "out")
    (tmp_path / "model.onnx").write_bytes((FIXTURE / "model.onnx").read_bytes()[:100_000])
    with pytest.raises(SourceError, match="is not an ONNX model"):
        unexport.unexport(tmp_path, tmp_path / "out")
    graph = onnx.helper.make_graph([], "another's", [], [])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    with pytest.raises(SourceError, match=r"expected a model that export_onnx\.py wrote"):
        unexport.unexport(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_existing_output_needs_force(checkpoint, tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"mine")
    with pytest.raises(OutputError, match="exists already"):
        export_onnx.export(checkpoint, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == b"mine"
    assert export_onnx.main([str(checkpoint), str(tmp_path / "model.onnx"), "--force"]) == 0
    with pytest.raises(OutputError, match="exists already"):
        unexport.unexport(FIXTURE, checkpoint)
