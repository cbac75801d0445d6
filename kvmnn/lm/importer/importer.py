"""A GGUF model or a checkpoint as a folder that verbs take as MODEL: graph, weights, tokenizer, settings."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ..._util.dataclass import dataclass
from ..._util.packages import get_version, import_optional
from ...dense import RopeConfig
from ...dtypes import Floats
from ...errors import MissingFileError, ModelError, SourceError
from ...files.atomic import DirectoryOutput, StagedFile
from ...files.mapped_file import read_head
from ...formats.llama import gguf
from ...formats.llama.gguf_tensors import GgufModel
from .checkpoint import DecoderCheckpoint, read_checkpoint_config
from .config import DecoderConfig, read_gguf_config
from .graph import INT8_BLOCK, GraphBuilder, build_decoder_graph
from .import_result import (
    GRAPH_FILE,
    RESULT_FILE,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
    ImportResult,
    WeightCheck,
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
    start_stage: Callable[[str, int], object] | None = None,
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
        ``"int8"``: symmetric blocks of 32 with a float32 scale each, which stay so in memory (the table of token
        embeddings float16); a text is read with these and with float32 weights, and the result has both losses.
    overwrite
        Replace a model that was imported into `output` earlier. A folder with other files is never replaced.
    catalog_name, sha256
        Of a model of the catalog, for the result.
    progress
        Called with the bytes of weights that are written since the last call.
    start_stage
        Called with ``"import"`` and all bytes of weights before the first is written.

    Raises
    ------
    MissingDependencyError
        Where onnx is not installed.
    SourceError
        When the source cannot be read, or is damaged.
    ModelError
        When its architecture, its tokenizer or one of its tensors is not supported; the message names it.
    OutputError
        When the output cannot be written, or contains other files. Nothing remains then.
    OptionError
        For another `dtype`.
    """
    import_optional("onnx")
    validate_weight_dtype(dtype)
    check_replaceable(Path(output), overwrite=overwrite)
    source = str(path)
    if not Path(source).exists():
        raise MissingFileError(f"{source}: cannot be read: No such file or directory")
    parts = _read_checkpoint_parts(source) if Path(source).is_dir() else _read_gguf_parts(source)
    config = parts.config
    with DirectoryOutput(output, force=overwrite, exclude=[source], replace_existing=True) as folder:
        stored_tensors = _list_stored_tensors(parts.weights, dtype)
        if start_stage is not None:
            start_stage("import", sum(tensor.nbytes for tensor in stored_tensors))
        weights_file = folder.open_file(WEIGHTS_FILE)
        initializers, weight_bytes = _write_weights(weights_file, stored_tensors, progress)
        folder.open_file(GRAPH_FILE).write(_build_graph(config, parts.weights, initializers, dtype))
        for name, data in parts.files.items():
            folder.open_file(name).write(data)
        folder.finish_files()
        check = _check_weights(source, folder.staging_folder, config) if dtype == "int8" else None
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
            check=check,
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


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor of the file of weights."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    #: Its rows, in order, in chunks of any number.
    read: Callable[[], Iterator[npt.NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


_EMBEDDING_NAME: Final = "embed_tokens.weight"
_OUTPUT_NAME: Final = "lm_head.weight"


def _list_int8_shapes(weights: Sequence[WeightSource], dtype: WeightDtype) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices whose products are with int8 weights."""
    if dtype != "int8":
        return {}
    is_tied = all(weight.name != _OUTPUT_NAME for weight in weights)
    return {
        weight.name: weight.shape
        for weight in weights
        if len(weight.shape) == 2 and (is_tied or weight.name != _EMBEDDING_NAME)
    }


def _list_stored_tensors(weights: Sequence[WeightSource], dtype: WeightDtype) -> list[_StoredTensor]:
    """List the tensors of the file: norms and biases in float32, matrices as requested."""
    tensors, int8_shapes = [], _list_int8_shapes(weights, dtype)
    for weight in weights:
        is_halved = len(weight.shape) > 1 and (dtype == "fp16" or (dtype == "int8" and weight.name == _EMBEDDING_NAME))
        if is_halved or weight.name not in int8_shapes:
            name = f"{weight.name}.fp16" if is_halved else weight.name
            tensors.append(_StoredTensor(name, np.dtype("<f2" if is_halved else "<f4"), weight.shape, weight.read))
        if weight.name in int8_shapes:
            num_rows, num_blocks = weight.shape[0], -(-weight.shape[1] // INT8_BLOCK)
            shape = (num_rows, num_blocks, INT8_BLOCK)
            numbers, scales = (partial(_read_int8_blocks, weight, part) for part in (0, 1))
            tensors.append(_StoredTensor(f"{weight.name}.int8", np.dtype(np.uint8), shape, numbers))
            tensors.append(_StoredTensor(f"{weight.name}.scales", np.dtype("<f4"), shape[:2], scales))
    return tensors


def _read_int8_blocks(weight: WeightSource, part: Literal[0, 1]) -> Iterator[npt.NDArray[Any]]:
    for rows in weight.read():
        yield quantize_int8(rows)[part]


def quantize_int8(rows: Floats) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Round rows ``[row, column]`` as MatMulNBits reads them: 128 is 0, and a number is ``(q - 128) * scale``.

    Returns
    -------
    tuple of ndarray
        uint8 ``[row, block, INT8_BLOCK]``, with zeros after the last column, and the scales, float32 ``[row, block]``.
    """
    padded = np.pad(rows, [(0, 0), (0, -rows.shape[1] % INT8_BLOCK)]).reshape(len(rows), -1, INT8_BLOCK)
    scales = np.abs(padded).max(axis=-1) / np.float32(127)
    steps = np.where(scales > 0, scales, np.float32(1))[..., np.newaxis]
    return (np.clip(np.rint(padded / steps), -127, 127) + 128).astype(np.uint8), scales.astype(np.float32)


def _write_weights(
    file: StagedFile, tensors: Sequence[_StoredTensor], progress: Callable[[int], object] | None
) -> tuple[list[Any], int]:
    """Write all weights; the graph's entries of them, and the size of the file."""
    onnx = import_optional("onnx")
    entries, position = [], 0
    for tensor in tensors:
        padding = -position % _ALIGNMENT
        file.write(bytes(padding))
        begin = position = position + padding
        for chunk in tensor.read():
            data = np.ascontiguousarray(chunk, tensor.dtype).tobytes()
            file.write(data)
            position += len(data)
            if progress is not None:
                progress(len(data))
        entry = onnx.TensorProto(
            name=tensor.name,
            data_type=onnx.helper.np_dtype_to_tensor_dtype(tensor.dtype.newbyteorder("=")),
            dims=tensor.shape,
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
    if dtype == "fp16":
        for weight in weights:
            if len(weight.shape) > 1:
                builder.add_node("Cast", f"{weight.name}.fp16", output=weight.name, to=onnx.TensorProto.FLOAT)
    names = frozenset(weight.name for weight in weights)
    inputs, outputs = build_decoder_graph(config, builder, names, _list_int8_shapes(weights, dtype))
    model = builder.build_model(inputs, outputs, initializers, get_version())
    return bytes(model.SerializeToString())


def _check_weights(source: str, folder: Path, config: DecoderConfig) -> WeightCheck:
    """Let the model in `folder`, and one of the same source with float32 weights, read a text."""
    tokenizer = import_optional("tokenizers").Tokenizer.from_file(str(folder / TOKENIZER_FILES[0]))
    ids = np.array(tokenizer.encode(_CHECK_TEXT).ids[:_MAX_CHECK_TOKENS], np.int64)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".kvmnn-check-") as temporary:
        reference = Path(temporary) / "fp32"
        import_model(source, reference)
        (nll, best), (reference_nll, reference_best) = (
            _read_check_text(path / GRAPH_FILE, config, ids) for path in (folder, reference)
        )
    equal_best = float((best == reference_best).mean())
    return WeightCheck(tokens=len(ids) - 1, nll=nll, reference_nll=reference_nll, equal_best=equal_best)


def _read_check_text(graph: Path, config: DecoderConfig, ids: npt.NDArray[np.int64]) -> tuple[float, Any]:
    """Return the mean loss of a text, and the most probable token after each but the last."""
    # `DecoderSession` opens models of the catalog, whose module imports this one.
    runtime = import_optional("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    positions = np.arange(len(ids) - 1, dtype=np.int64)
    feed: dict[str, Any] = {"input_ids": ids[None, :-1], "attention_mask": np.ones_like(positions)[None]}
    feed["position_ids"] = positions[None]
    for layer in range(config.num_layers):
        for part in ("key", "value"):
            feed[f"past_key_values.{layer}.{part}"] = np.zeros((1, config.kv_heads, 0, config.head_dim), np.float32)
        feed[f"attention_bias.{layer}"] = np.zeros((1, 1, 1, len(positions)), np.float32)
        if config.layers[layer].window:
            feed[f"key_positions.{layer}"] = positions[None, None]
    logits = session.run(["logits"], feed)[0][0].astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[positions, ids[1:]]
    return float(losses.mean()), logits.argmax(axis=1)


_MAX_CHECK_TOKENS: Final = 256
_CHECK_TEXT: Final = """\
The harbour wakes before the town does. At five the first boats come in with their lamps still burning, and the men on
the quay count the boxes by touch, because the light is not good enough to count them by eye. A box of mackerel weighs
about thirty kilograms, ice included; the price is made before the ice has melted, in a hall that smells of salt and
diesel. Nobody shouts. The auctioneer reads the numbers from a board, the buyers raise a finger, and a clerk writes down
who has bought what, at which price, and for which van. By seven the hall is empty and somebody hoses the floor.

What is left belongs to the gulls. They know the hours of the harbour better than the tourists do: they sit on the roof
of the hall from six on, all facing the wind, and come down only when the hose is turned off. In winter there are two
hundred of them, in summer fewer, since the cliffs to the north have everything that a gull needs. The harbour master
keeps a list. He began it when he was a boy, in a school notebook with squared paper, and he has never missed a Sunday,
not even in the year of the great storm, when the notebook got wet and the ink of the first three pages ran together.
"""


def _build_settings(config: DecoderConfig) -> dict[str, Any]:
    """Return ``config.json`` with the keys of transformers, as far as verbs of kvmnn read it."""
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
    """Return the rotation with the keys of transformers; empty if frequencies have factors of their own (a tensor)."""
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
