"""Models whose cache kvmnn cannot manage, and files that are no models: one clear line of error each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tiny_decoders import Tiny

from kvmnn.errors import KvmnnError, MissingDependencyError, ModelError, SourceError
from kvmnn.lm.session import DecoderSession


def refused(path: Path, message: str | None, kind: type[KvmnnError] = ModelError, **options: object) -> None:
    with pytest.raises(kind, match=message) as caught:
        DecoderSession.open(path, cache=False, **options)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    assert str(path.parent if path.suffix else path) in text


def changed(folder: Path, change: Callable[[onnx.ModelProto], None], tiny: Tiny | None = None) -> Path:
    model = (tiny or Tiny()).model()
    change(model)
    path = folder / "model.onnx"
    onnx.save(model, str(path))
    return path


def drop(values: list[onnx.ValueInfoProto], *words: str) -> None:
    for place in reversed(range(len(values))):
        if any(word in values[place].name for word in words):
            del values[place]


def dims(model: onnx.ModelProto, name: str) -> list[onnx.TensorShapeProto.Dimension]:
    return next(value for value in model.graph.input if value.name == name).type.tensor_type.shape.dim


def test_model_without_cache_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda model: drop(model.graph.input, "past"))
    refused(path, r"no inputs past_key_values\.\{i\}\.key and \.value.*text-generation-with-past")
    path = changed(tmp_path, lambda model: drop(model.graph.output, "present"))
    refused(path, r"no outputs present\.\{i\}\.key.*export with a cache.*outputs: logits")


def test_model_unmatched_cache_names_are_refused(tmp_path: Path) -> None:
    refused(changed(tmp_path, lambda model: drop(model.graph.input, "0.value")), "past value of layer 0 is missing")
    refused(changed(tmp_path, lambda model: drop(model.graph.output, "1.")), "2 layers of past inputs but 1 of present")
    refused(changed(tmp_path, lambda model: drop(model.graph.output, "logits")), "no output logits; outputs: present")
    refused(changed(tmp_path, lambda model: drop(model.graph.input, "input_ids")), "no input input_ids; inputs: atten")
    foreign = Tiny(past="cache_{kind}_{i}", present="new_{kind}_{i}").save(tmp_path / "model.onnx")
    refused(foreign, "no inputs past_key_values.*inputs: input_ids, attention_mask, position_ids, cache_key_0")


def test_model_unknown_inputs_are_refused(tmp_path: Path) -> None:
    refused(Tiny(extra=("conv_state",)).save(tmp_path / "model.onnx"), "inputs that kvmnn does not know: conv_state")
    refused(Tiny(extra=("inputs_embeds",)).save(tmp_path / "model.onnx"), "takes inputs_embeds instead of tokens")
    refused(Tiny(extra=("encoder_hidden_states",)).save(tmp_path / "model.onnx"), "an encoder-decoder model")
    names = Tiny(past="past_key_values.{i}.decoder.{kind}", extra=("encoder_attention_mask",))
    refused(names.save(tmp_path / "model.onnx"), "an encoder-decoder model; kvmnn runs decoders only")


def test_model_unsupported_cache_shape_is_refused(tmp_path: Path) -> None:
    def unequal(model: onnx.ModelProto) -> None:
        dims(model, "past_key_values.1.value")[3].dim_value = 16

    def fixed(model: onnx.ModelProto) -> None:
        dims(model, "past_key_values.0.key")[2].dim_value = 1024

    def batched(model: onnx.ModelProto) -> None:
        dims(model, "past_key_values.0.key")[0].dim_value = 4

    def flat(model: onnx.ModelProto) -> None:
        del dims(model, "past_key_values.0.key")[3]

    def unnamed(model: onnx.ModelProto) -> None:
        for value in model.graph.input:
            if "past" in value.name:
                value.type.tensor_type.shape.dim[1].dim_param = "heads"

    refused(changed(tmp_path, unequal), r"unequal shape or dtype: 2 heads of 16 \(float32\), 2 heads of 8 \(float32\)")
    refused(changed(tmp_path, fixed), "holds exactly 1024 tokens; export with an axis of free length")
    refused(changed(tmp_path, batched), "made for a batch of 4")
    refused(changed(tmp_path, flat), r"has 3 axes; expected \[batch, kv_heads, token, head_dim\]")
    refused(changed(tmp_path, unnamed), "does not say its heads and head_dim, and no config.json")
    (tmp_path / "config.json").write_text(json.dumps({"num_key_value_heads": 2, "vocab_size": 48}))
    assert DecoderSession.open(changed(tmp_path, unnamed), cache=False).interface.kv_heads == 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TensorProto.BFLOAT16, "is bfloat16; export with fp16 or fp32"),
        (TensorProto.INT8, "the cache is int8; export with fp16 or fp32"),
        (TensorProto.UNDEFINED, "has an element type that kvmnn does not know: 0"),
        (TensorProto.STRING, "the cache is object; export with fp16 or fp32"),
    ],
)
def test_model_unsupported_cache_type_is_refused(kind: int, message: str, tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        for value in model.graph.input:
            if "past" in value.name:
                value.type.tensor_type.elem_type = kind

    refused(changed(tmp_path, change), message)


def test_model_gqa_deriving_positions_is_refused(tmp_path: Path) -> None:
    path = Tiny(form="gqa", rotary="counted").save(tmp_path / "model.onnx")
    refused(path, r"GroupQueryAttention .*do_rotary=1\) derives positions from the length.*export with position_ids")


def test_model_shared_past_present_buffer_is_refused(tmp_path: Path) -> None:
    Tiny().save(tmp_path / "model.onnx")
    settings = {"model": {"decoder": {"filename": "model.onnx"}}, "search": {"past_present_share_buffer": True}}
    (tmp_path / "genai_config.json").write_text(json.dumps(settings))
    refused(tmp_path, "past and present are one buffer of fixed length.*export with separate past and present")
    settings["search"]["past_present_share_buffer"] = False
    (tmp_path / "genai_config.json").write_text(json.dumps(settings))
    assert DecoderSession.open(tmp_path, cache=False).interface.layers == 2


def test_model_last_token_logits_are_refused(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        head = model.graph.node[-1]
        index = helper.make_tensor("last", TensorProto.INT64, [1], [-1])
        model.graph.initializer.append(index)
        model.graph.node.insert(
            len(model.graph.node) - 1, helper.make_node("Gather", [head.input[0], "last"], ["end"], axis=1)
        )
        model.graph.node[-1].input[0] = "end"

    refused(changed(tmp_path, change), r"logits has shape \[1, 1, 48\] for 6 tokens; export with the logits of every")


def test_model_requiring_past_is_refused(tmp_path: Path) -> None:
    """One half of an export in two graphs needs a past."""

    def change(model: onnx.ModelProto) -> None:
        shape = helper.make_tensor("shape", TensorProto.INT64, [4], [1, 2, 5, 8])
        model.graph.initializer.append(shape)
        model.graph.node.insert(0, helper.make_node("Reshape", ["past_key_values.0.key", "shape"], ["five"]))
        next(node for node in model.graph.node if node.op_type == "Concat").input[0] = "five"

    refused(changed(tmp_path, change), r"\(a prompt with an empty past\); export one graph for prompt and past")


# Damaged and foreign files


def test_model_non_onnx_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    refused(path, "does not exist", SourceError)
    path.write_bytes(b"")
    refused(path, "is empty, expected an ONNX model", SourceError)
    for content in (
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b'{"a": 1}',
        b"PK\x03\x04" + bytes(50),
        bytes(1000),
        b"\x08\x08",
    ):
        path.write_bytes(content)
        refused(path, "is not an ONNX model", SourceError)


def test_model_truncated_file_is_refused(tmp_path: Path) -> None:
    whole = Tiny().model().SerializeToString()
    path = tmp_path / "model.onnx"
    for length in [*range(1, len(whole), len(whole) // 40), len(whole) - 1, len(whole) - 30]:
        path.write_bytes(whole[:length])
        refused(path, None, KvmnnError)


def test_model_flipped_bytes_raise_only_kvmnn_errors(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    whole = np.frombuffer(Tiny(layers=1, head_dim=2, vocab=8).model().SerializeToString(), np.uint8)
    path, refusals = tmp_path / "model.onnx", 0
    for _ in range(60):
        damaged = whole.copy()
        damaged[rng.integers(0, len(whole), 6)] ^= rng.integers(1, 256, 6).astype(np.uint8)
        path.write_bytes(damaged.tobytes())
        try:
            DecoderSession.open(path, cache=False)
        except KvmnnError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 10


def test_model_newer_than_onnxruntime_is_refused(tmp_path: Path) -> None:
    refused(replace(Tiny(), opset=99).save(tmp_path / "model.onnx"), r"made with opset 99; .* takes up to \d+; export")

    def newer(model: onnx.ModelProto) -> None:
        model.ir_version = 99

    refused(changed(tmp_path, newer), r"written in ONNX IR version 99; the installed onnxruntime takes up to \d+")


def test_model_unknown_operator_is_refused(tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node[0].op_type = "Unheard"

    refused(changed(tmp_path, change), "onnxruntime does not take this graph: .*Unheard")


def test_model_folder_without_one_graph_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "no .onnx file in this folder or in its subfolder onnx/", SourceError)
    refused(tmp_path / "absent", "does not exist", SourceError)
    (tmp_path / "decoder_model.onnx").touch()
    refused(tmp_path, "a decoder without past inputs; export with a cache")
    (tmp_path / "model_q4.onnx").touch()
    refused(tmp_path, "several graphs, name one of them: decoder_model.onnx, model_q4.onnx")
    (tmp_path / "encoder_model.onnx").touch()
    refused(tmp_path, "holds an encoder-decoder model")


@pytest.mark.parametrize(
    ("settings", "message", "kind"),
    [
        ("{", "is not JSON", SourceError),
        ("[]", "holds no JSON object", SourceError),
        ('{"model": {"decoder": {"filename": "../model.onnx"}}}', "is no file name: '../model.onnx'", ModelError),
        ('{"model": {"decoder": {"filename": 7}}}', "is no file name: 7", ModelError),
        ('{"model": {"decoder": {"filename": ""}}}', "is no file name: ''", ModelError),
        ('{"model": {"decoder": {"filename": "/model.onnx"}}}', "is no file name: '/model.onnx'", ModelError),
        ('{"model": {"decoder": {"filename": "other.onnx"}}}', "other.onnx: does not exist", SourceError),
        ('{"model": {"decoder": {"pipeline": []}}}', "a pipeline of several graphs", ModelError),
        (
            '{"model": {"decoder": {"inputs": {"past_key_names": "p.%d.k", "past_value_names": "p.%d.v"}}}}',
            "genai_config.json names input p.0.k, which the graph does not have",
            ModelError,
        ),
    ],
)
def test_model_invalid_genai_config_is_refused(
    settings: str, message: str, kind: type[KvmnnError], tmp_path: Path
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    Tiny().save(folder / "model.onnx")
    (folder / "genai_config.json").write_text(settings)
    refused(folder, message, kind)


# Weights in other files


def test_model_missing_weights_are_refused(tmp_path: Path) -> None:
    path = Tiny().save(tmp_path / "model.onnx", location="weights.bin")
    assert DecoderSession.open(path, attentions=True, cache=False).has_bias
    (tmp_path / "weights.bin").unlink()
    refused(path, "its weights are missing: no file .*weights.bin", SourceError)


def test_model_truncated_weights_are_refused(tmp_path: Path) -> None:
    path = Tiny().save(tmp_path / "model.onnx", location="weights.bin")
    os.truncate(tmp_path / "weights.bin", 100)
    refused(path, "onnxruntime does not take this graph")


@pytest.mark.parametrize(
    "location", ["../weights.bin", "{folder}/weights.bin", "sub/../../weights.bin", "link.bin", ""]
)
def test_model_weights_outside_folder_are_refused(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = Tiny().save(folder / "model.onnx", location="weights.bin")
    (folder / "weights.bin").rename(tmp_path / "weights.bin")
    (folder / "link.bin").symlink_to(tmp_path / "weights.bin")
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location.format(folder=tmp_path)
    path.write_bytes(model.SerializeToString())
    refused(path, "external data must lie in the model's own folder")


# Settings of onnxruntime


def test_session_unsatisfiable_options_are_refused(tmp_path: Path) -> None:
    path = Tiny().save(tmp_path / "model.onnx")
    for options, message in (
        ({"providers": ["NoProvider"]}, "has no provider NoProvider; installed here: .*CPUExecutionProvider"),
        ({"providers": []}, r"providers: expected a list of names, found \[\]"),
        ({"providers": "CPUExecutionProvider"}, "providers: expected a list of names"),
        ({"threads": -1}, "threads: expected 0"),
    ):
        with pytest.raises(KvmnnError, match=message):
            DecoderSession.open(path, **options)


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_session_missing_package_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Tiny().save(tmp_path / "model.onnx")
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    with pytest.raises(MissingDependencyError, match=f"package {missing}: pip install onnxruntime onnx tokenizers"):
        DecoderSession.open(path)
