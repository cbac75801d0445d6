"""A GGUF model as a folder that every verb of kvmnn with a MODEL takes: graph, weights, tokenizer, settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from ..._util.packages import get_version, import_optional
from ...dense import RopeConfig
from ...errors import ModelError
from ...files.atomic import DirectoryOutput, StagedFile
from ...files.schema import Record
from ...formats.llama import gguf
from ...formats.llama.gguf_tensors import GgufModel
from .config import DecoderConfig, read_gguf_config
from .graph import WEIGHTS_FILE, GraphBuilder, build_decoder_graph
from .tokenizer import build_tokenizer_files
from .weights import WeightSource, list_gguf_weights

WeightDtype = Literal["fp32", "fp16"]
_ALIGNMENT: Final = 64
_GRAPH_FILE: Final = "model.onnx"


@dataclass(frozen=True, kw_only=True)
class ImportResult(Record):
    """A model that was imported."""

    #: The file, and the folder that was written.
    source: str
    output: str
    architecture: str
    #: Of the weights in the folder; arithmetic is in float32 in both cases.
    dtype: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    #: Number of weights, and their bytes in the folder.
    parameters: int
    weight_bytes: int
    #: Element types of the tensors in the file, with the number of tensors.
    tensor_types: dict[str, int]

    def __str__(self) -> str:
        types = ", ".join(f"{count} {name}" for name, count in self.tensor_types.items())
        return (
            f"{self.output}: {self.architecture}, {self.layers} layers, {self.query_heads} query and {self.kv_heads} kv "
            f"heads of {self.head_dim}, {self.parameters / 1e6:.1f} million parameters\n"
            f"weights: {types} in the file, dequantized to {self.dtype} ({self.weight_bytes / 1e6:,.0f} MB)"
        )


def import_gguf(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: WeightDtype = "fp32",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ImportResult:
    """Make a decoder for onnxruntime of a ``.gguf`` file.

    The folder gets ``model.onnx``, ``model.onnx.data`` (the dequantized weights), ``config.json``, ``tokenizer.json``
    and ``tokenizer_config.json``. Weights are converted a few rows at a time.

    Parameters
    ----------
    path
        The file. Architectures: `SUPPORTED_ARCHITECTURES`.
    output
        A folder that does not exist yet, or with `overwrite` one to be replaced.
    dtype
        Of the stored weights. float16 halves the folder and rounds them; dequantized weights need float32 to be exact.
    overwrite
        Replace `output`.
    progress
        Called with the bytes of weights that are written and those of all.

    Raises
    ------
    MissingDependencyError
        Where onnx is not installed.
    SourceError
        When the file cannot be read, or is damaged.
    ModelError
        When its architecture, its tokenizer or one of its tensors is not supported; the message names it.
    OutputError
        When the output cannot be written. Nothing remains then.
    """
    import_optional("onnx")
    source = str(path)
    model = GgufModel(source)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{model.label}: has no token embedding (token_embd.weight)")
    config = read_gguf_config(source, model.fields, embedding.shape[0])
    weights = list_gguf_weights(model, config)
    tokenizer_files = build_tokenizer_files(model)
    with DirectoryOutput(output, force=overwrite, exclude=[source], replace_existing=True) as folder:
        initializers, weight_bytes = _write_weights(folder.open_file(WEIGHTS_FILE), weights, dtype, progress)
        graph = _build_graph(config, weights, initializers, dtype)
        folder.open_file(_GRAPH_FILE).write(graph)
        settings = {**_build_settings(config), **_build_rope_settings(source, config), **_list_token_ids(model)}
        folder.open_file("config.json").write(json.dumps(settings, indent=2).encode())
        for name, data in tokenizer_files.items():
            folder.open_file(name).write(data)
        folder.commit()
    types = [tensor.type_name for tensor in model.tensors.values()]
    return ImportResult(
        source=source,
        output=str(output),
        architecture=config.architecture,
        dtype=dtype,
        layers=config.num_layers,
        query_heads=config.num_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        parameters=sum(int(np.prod(weight.shape)) for weight in weights),
        weight_bytes=weight_bytes,
        tensor_types={name: types.count(name) for name in sorted(set(types))},
    )


def _is_halved(weight: WeightSource, dtype: WeightDtype) -> bool:
    """Whether a weight is stored in float16: matrices only, norms and biases are small."""
    return dtype == "fp16" and len(weight.shape) > 1


def _write_weights(
    file: StagedFile,
    weights: Sequence[WeightSource],
    dtype: WeightDtype,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[Any], int]:
    """Write all weights; the graph's entries of them, and the size of the file."""
    onnx = import_optional("onnx")
    total = sum((2 if _is_halved(weight, dtype) else 4) * int(np.prod(weight.shape)) for weight in weights)
    entries, position = [], 0
    for weight in weights:
        halved = _is_halved(weight, dtype)
        padding = -position % _ALIGNMENT
        file.write(bytes(padding))
        begin = position = position + padding
        for chunk in weight.read():
            data = np.ascontiguousarray(chunk, "<f2" if halved else "<f4").tobytes()
            file.write(data)
            position += len(data)
            if progress is not None:
                progress(position, total)
        entry = onnx.TensorProto(
            name=f"{weight.name}.fp16" if halved else weight.name,
            data_type=onnx.TensorProto.FLOAT16 if halved else onnx.TensorProto.FLOAT,
            dims=weight.shape,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        for key, value in (("location", WEIGHTS_FILE), ("offset", begin), ("length", position - begin)):
            entry.external_data.add(key=key, value=str(value))
        entries.append(entry)
    return entries, position


def _build_graph(
    config: DecoderConfig, weights: Sequence[WeightSource], initializers: list[Any], dtype: WeightDtype
) -> bytes:
    onnx = import_optional("onnx")
    builder = GraphBuilder()
    for weight in weights:
        if _is_halved(weight, dtype):
            builder.add_node("Cast", f"{weight.name}.fp16", output=weight.name, to=onnx.TensorProto.FLOAT)
    inputs, outputs = build_decoder_graph(config, builder, frozenset(weight.name for weight in weights))
    model = builder.build_model(inputs, outputs, initializers, get_version())
    return bytes(model.SerializeToString())


def _build_settings(config: DecoderConfig) -> dict[str, Any]:
    """``config.json`` in the words of transformers, as far as verbs of kvmnn read it."""
    windows = [layer.window for layer in config.layers]
    settings: dict[str, Any] = {
        "model_type": {"gemma3": "gemma3_text", "mistral3": "mistral"}.get(config.architecture, config.architecture),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_epsilon,
    }
    if config.max_positions is not None:
        settings["max_position_embeddings"] = config.max_positions
    if any(windows):
        settings["sliding_window"] = max(window or 0 for window in windows)
        settings["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    return settings


def _build_rope_settings(path: str, config: DecoderConfig) -> dict[str, Any]:
    """The rotation in the words of transformers; nothing where frequencies have factors of their own (a tensor)."""
    rope = gguf.read_gguf_rotary(path)[0]
    by_layer = gguf.read_rotations(path)[0]
    if rope is None or (len({layer.frequencies.tobytes() for layer in config.layers}) > 1 and not by_layer):
        return {}

    def describe(rope: RopeConfig) -> dict[str, Any]:
        return {"rope_theta": rope.theta, **(rope.scaling or {"rope_type": "default"})}

    kinds = {
        "sliding_attention" if layer.window else "full_attention": by_layer.get(index) or rope
        for index, layer in enumerate(config.layers)
    }
    if len(set(map(str, kinds.values()))) == 1:
        return {"rope_theta": rope.theta, "rope_parameters": describe(rope)}
    return {"rope_parameters": {kind: describe(kind_rope) for kind, kind_rope in kinds.items()}}


def _list_token_ids(model: GgufModel) -> dict[str, int]:
    return {
        f"{name}_token_id": value
        for name in ("bos", "eos")
        if type(value := model.fields.get(f"tokenizer.ggml.{name}_token_id")) is int
    }


def find_default_output(path: str) -> str:
    """The folder that a model is imported to where none is named: the file's name without its suffix."""
    return str(Path(path).with_suffix(""))
