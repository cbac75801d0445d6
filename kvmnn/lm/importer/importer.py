"""A GGUF model or a checkpoint as a folder that verbs take as MODEL: graph, weights, tokenizer, settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..._util.packages import get_version, import_optional
from ...dense import RopeConfig
from ...errors import ModelError, SourceError
from ...files.atomic import DirectoryOutput, StagedFile
from ...files.mapped_file import read_head
from ...formats.llama import gguf
from ...formats.llama.gguf_tensors import GgufModel
from .checkpoint import DecoderCheckpoint, read_checkpoint_config
from .config import DecoderConfig, read_gguf_config
from .graph import GraphBuilder, build_decoder_graph
from .import_result import (
    GRAPH_FILE,
    RESULT_FILE,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
    ImportResult,
    WeightDtype,
    check_replaceable,
    validate_weight_dtype,
)
from .tokenizer import build_tokenizer_files
from .weights import WeightSource, get_gguf_names, list_weights

_ALIGNMENT: Final = 64
_MAX_TOKENIZER_BYTES: Final = 256 << 20


@dataclass(frozen=True, kw_only=True)
class _ModelParts:
    """All that the folder of a model is written from."""

    config: DecoderConfig
    weights: Sequence[WeightSource]
    #: Files that are written as they are, by name; ``config.json`` is one.
    files: Mapping[str, bytes]
    tensor_types: Sequence[str]


def import_model(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: WeightDtype = "fp32",
    overwrite: bool = False,
    catalog_name: str | None = None,
    sha256: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> ImportResult:
    """Make a decoder for onnxruntime of a GGUF file or of a checkpoint of transformers.

    The folder gets ``model.onnx``, ``model.onnx.data`` (the weights), ``config.json``, ``tokenizer.json``,
    ``tokenizer_config.json`` and ``import.json`` (the result). Weights are converted a few rows at a time.

    Parameters
    ----------
    path
        A ``.gguf`` file with its weights, or a folder with ``config.json``, ``tokenizer.json`` and ``.safetensors``
        files. Architectures: llama, mistral, granite, qwen2, qwen3, gemma3, phi3.
    output
        A folder that does not exist yet, or with `overwrite` one to be replaced.
    dtype
        Of the stored matrices. float16 halves the folder and rounds them; dequantized weights need float32 to be exact.
    overwrite
        Replace a model that was imported into `output` earlier. A folder with other files is never replaced.
    catalog_name, sha256
        Of a model of the catalog, for the result.
    progress
        Called with the bytes of weights that are written since the last call.

    Raises
    ------
    MissingDependencyError
        Where onnx is not installed.
    SourceError
        When the source cannot be read, or is damaged.
    ModelError
        When its architecture, its tokenizer or one of its tensors is not supported; the message names it.
    OutputError
        When the output cannot be written, or holds other files. Nothing remains then.
    OptionError
        For another `dtype`.
    """
    import_optional("onnx")
    validate_weight_dtype(dtype)
    check_replaceable(Path(output), overwrite=overwrite)
    source = str(path)
    parts = _read_checkpoint_parts(source) if Path(source).is_dir() else _read_gguf_parts(source)
    config = parts.config
    with DirectoryOutput(output, force=overwrite, exclude=[source], replace_existing=True) as folder:
        initializers, weight_bytes = _write_weights(folder.open_file(WEIGHTS_FILE), parts.weights, dtype, progress)
        folder.open_file(GRAPH_FILE).write(_build_graph(config, parts.weights, initializers, dtype))
        for name, data in parts.files.items():
            folder.open_file(name).write(data)
        result = ImportResult(
            source=catalog_name or source,
            sha256=sha256,
            output=str(output),
            architecture=config.architecture,
            dtype=dtype,
            layers=config.num_layers,
            query_heads=config.num_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            parameters=sum(int(np.prod(weight.shape)) for weight in parts.weights),
            weight_bytes=weight_bytes,
            tensor_types={name: parts.tensor_types.count(name) for name in sorted(set(parts.tensor_types))},
        )
        # without its path, as the folder may be moved
        document = {key: value for key, value in result.to_dict().items() if key != "output"}
        folder.open_file(RESULT_FILE).write(json.dumps(document, indent=2).encode())
        folder.commit()
    return result


def _read_gguf_parts(path: str) -> _ModelParts:
    magic = read_head(path, 4)
    if magic != b"GGUF":
        raise SourceError(
            f"{path}: begins with {magic!r}: expected a GGUF file (b'GGUF'), or a folder with config.json and "
            ".safetensors files"
        )
    model = GgufModel(path)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{model.label}: has no token embedding (token_embd.weight)")
    config = read_gguf_config(path, model.fields, embedding.shape[0])
    settings = {**_build_settings(config), **_build_rope_settings(path, config), **_list_token_ids(model)}
    return _ModelParts(
        config=config,
        weights=list_weights(model, config, get_gguf_names(config.architecture)),
        files={"config.json": json.dumps(settings, indent=2).encode(), **build_tokenizer_files(model)},
        tensor_types=[tensor.type_name for tensor in model.tensors.values()],
    )


def _read_checkpoint_parts(path: str) -> _ModelParts:
    checkpoint = DecoderCheckpoint(path)
    config = read_checkpoint_config(checkpoint)
    files = {"config.json": json.dumps(checkpoint.settings, indent=2).encode()}
    for name in TOKENIZER_FILES:
        file_path = Path(path) / name
        if file_path.is_file():
            if file_path.stat().st_size > _MAX_TOKENIZER_BYTES:
                raise SourceError(f"{file_path}: is larger than {_MAX_TOKENIZER_BYTES:,} bytes")
            files[name] = file_path.read_bytes()
    if TOKENIZER_FILES[0] not in files:
        raise ModelError(
            f"{path}: has no {TOKENIZER_FILES[0]}: save the tokenizer in its fast form "
            "(AutoTokenizer.from_pretrained(...).save_pretrained)"
        )
    return _ModelParts(
        config=config,
        weights=list_weights(checkpoint, config, checkpoint.names),
        files=files,
        tensor_types=[tensor.type_name.lower() for tensor in checkpoint.tensors.values()],
    )


def _is_halved(weight: WeightSource, dtype: WeightDtype) -> bool:
    """Whether a weight is stored in float16: matrices only, norms and biases are small."""
    return dtype == "fp16" and len(weight.shape) > 1


def _write_weights(
    file: StagedFile,
    weights: Sequence[WeightSource],
    dtype: WeightDtype,
    progress: Callable[[int], object] | None,
) -> tuple[list[Any], int]:
    """Write all weights; the graph's entries of them, and the size of the file."""
    onnx = import_optional("onnx")
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
                progress(len(data))
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
