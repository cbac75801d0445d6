"""Files of a model folder: the decoder's graph without its weights, the configuration, and the model's fingerprint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path, PureWindowsPath
from typing import Any

from ..._util.dataclass import dataclass
from ..._util.packages import import_optional
from ..._util.patterns import declare_pattern
from ...errors import MissingFileError, ModelError, SourceError, build_read_error
from ...files.mapped_file import MappedFile
from ...files.schema import read_object_or_empty
from ..importer.catalog import build_missing_error, resolve_model_path

_ERROR_NOISE = declare_pattern(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/\S+\.(?:h|cc):\d+ ")


def read_onnx_graph(path: Path) -> Any:
    """Read a model without its external data, which is only checked to be inside the model's folder."""
    onnx = import_optional("onnx")
    try:
        if path.stat().st_size == 0:
            raise SourceError(f"{path}: is empty, expected an ONNX model")
        model = onnx.load(str(path), load_external_data=False)
    except OSError as error:
        raise build_read_error(path, error) from error
    except SourceError:
        raise
    except Exception as error:  # protobuf's DecodeError, and ValueErrors of other layers
        raise SourceError(f"{path}: is not an ONNX model, or is cut short ({format_error(error)})") from error
    if not model.graph.node or not model.opset_import:
        raise SourceError(f"{path}: is not an ONNX model: it has no graph")
    locate_weights(model, path)
    return model


def serialize_model(model: Any, label: str) -> bytes:
    """Serialize a model to the bytes of its file."""
    try:
        return bytes(model.SerializeToString())
    except Exception as error:  # protobuf's own class, by version
        raise ModelError(
            f"{label}: too large to be changed ({format_error(error)}); save it with its weights in another file "
            "(onnx.save with save_as_external_data)"
        ) from error


def get_opset(model: Any) -> int:
    """Return the version of the standard operators that a model uses; 0 if it uses none."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def iter_subgraphs(graph: Any) -> Iterator[Any]:
    """Iterate over all graphs inside the nodes of `graph`, at any depth."""
    for node in graph.node:
        for attribute in node.attribute:
            nested_graphs = [attribute.g] if attribute.HasField("g") else []
            for subgraph in [*nested_graphs, *attribute.graphs]:
                yield subgraph
                yield from iter_subgraphs(subgraph)


def iter_external_tensors(model: Any) -> Iterator[Any]:
    """Iterate over all tensors of a model whose data is in other files."""
    external = import_optional("onnx").TensorProto.EXTERNAL
    for graph in [model.graph, *iter_subgraphs(model.graph)]:
        attributes = [attribute for node in graph.node for attribute in node.attribute]
        sparse = [part for tensor in graph.sparse_initializer for part in (tensor.values, tensor.indices)]
        inline = [tensor for attribute in attributes for tensor in [attribute.t, *attribute.tensors]]
        yield from (tensor for tensor in [*graph.initializer, *sparse, *inline] if tensor.data_location == external)


def format_error(error: object, max_characters: int = 200) -> str:
    """Format an exception of another package on one line."""
    text = _ERROR_NOISE.sub("", " ".join(str(error).split()))
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."


def resolve_dir(path: Path) -> Path:
    """Return the folder of the real file of a graph; model hubs store links to files elsewhere."""
    return Path(os.path.realpath(path)).parent


def locate_weights(model: Any, path: Path) -> dict[str, str]:
    """Map the location of each weight file in the graph to its location relative to `resolve_dir`."""
    folder, base = Path(os.path.realpath(path.parent)), resolve_dir(path)
    location_by_name: dict[str, str] = {}
    for tensor in iter_external_tensors(model):
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if location in location_by_name:
            continue
        windows = PureWindowsPath(location)
        file = Path(os.path.realpath(folder / location))
        is_outside = not location or windows.drive or windows.root or ".." in windows.parts or "\0" in location
        if is_outside or not (file.is_relative_to(folder) or file.is_relative_to(base)):
            raise ModelError(
                f"{path}: weights of {tensor.name!r} are said to lie at {location!r}; "
                "external data must lie in the model's own folder"
            )
        if not file.is_file():
            raise SourceError(f"{path}: its weights are missing: no file {path.parent / location}")
        location_by_name[location] = os.path.relpath(file, base)
    return location_by_name


def relocate_weights(model: Any, path: Path) -> None:
    """Rewrite the weight locations of `model`, read from `path`, relative to `resolve_dir`, in place."""
    location_by_name = locate_weights(model, path)
    for tensor in iter_external_tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location_by_name[entry.value]


CACHED_GRAPH_MARK = ".kvmnn-"  # part of the names of the graphs that kvmnn keeps next to a model
_PREFERRED_NAMES = ("model.onnx", "decoder_model_merged.onnx", "model_merged.onnx", "decoder_with_past_model.onnx")
_NO_CACHE_NAME = "decoder_model.onnx"


@dataclass(frozen=True)
class ModelFiles:
    """A decoder's graph and its settings."""

    #: The ``.onnx`` file.
    graph: Path
    #: ``config.json`` of the model; for models with several parts, that of the text part. Empty where absent.
    config: dict[str, Any] = field(default_factory=dict)
    #: ``genai_config.json`` of onnxruntime-genai; empty where absent.
    genai: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return str(self.graph)


def find_model(path: str | os.PathLike[str]) -> ModelFiles:
    """Find the decoder at `path`, or the pulled model of that name."""
    model_path = resolve_model_path(path)
    if not model_path.exists():
        raise build_missing_error(model_path)
    if not model_path.is_dir():
        if model_path.suffix == ".gguf":
            raise ModelError(f"{model_path}: is a GGUF file: kvmnn model import {model_path} makes a decoder of it")
        return _read_settings(model_path)
    genai = read_object_or_empty(model_path / "genai_config.json")
    if genai:
        return _read_settings(model_path / _read_genai_filename(genai, model_path), genai)
    for folder in (model_path, model_path / "onnx"):
        graph = _select_graph(folder)
        if graph is not None:
            return _read_settings(graph)
    hint = ""
    if (model_path / "config.json").is_file() and next(model_path.glob("*.safetensors"), None):
        hint = f": kvmnn model import {model_path} makes one of the checkpoint there"
    raise SourceError(f"{model_path}: no .onnx file in this folder or in its subfolder onnx/{hint}")


def _select_graph(folder: Path) -> Path | None:
    graphs = sorted(file for file in folder.glob("*.onnx") if CACHED_GRAPH_MARK not in file.name)
    names = [file.name for file in graphs]
    if any(name.startswith("encoder_model") for name in names):
        raise ModelError(f"{folder}: holds an encoder-decoder model (encoder_model.onnx); kvmnn runs decoders only")
    for name in _PREFERRED_NAMES:
        if name in names:
            return folder / name
    if not graphs:
        return None
    if len(graphs) > 1:
        raise ModelError(f"{folder}: several graphs, name one of them: {', '.join(names[:12])}")
    if names == [_NO_CACHE_NAME]:
        raise ModelError(
            f"{folder / _NO_CACHE_NAME}: a decoder without past inputs; export with a cache "
            "(optimum-cli export onnx --task text-generation-with-past)"
        )
    return graphs[0]


def _read_genai_filename(genai: dict[str, Any], folder: Path) -> str:
    decoder = get_section(genai, "model", "decoder")
    name = decoder.get("filename", "model.onnx")
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelError(f"{folder / 'genai_config.json'}: model.decoder.filename is no file name: {name!r}")
    if not (folder / name).is_file():
        raise MissingFileError(f"{folder / name}: does not exist (genai_config.json names it)")
    if "pipeline" in decoder:
        raise ModelError(f"{folder}: genai_config.json describes a pipeline of several graphs; export one graph")
    return name


def _read_settings(graph: Path, genai: dict[str, Any] | None = None) -> ModelFiles:
    folders = [graph.parent, graph.parent / "model", graph.absolute().parent.parent]
    config = next((settings for folder in folders if (settings := read_object_or_empty(folder / "config.json"))), {})
    text = config.get("text_config")
    if genai is None:
        genai = read_object_or_empty(graph.parent / "genai_config.json")
    return ModelFiles(graph, text if isinstance(text, dict) else config, genai)


def get_section(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a nested object of settings; empty if it is absent or no object."""
    for name in names:
        nested = settings.get(name)
        if not isinstance(nested, dict):
            return {}
        settings = nested
    return settings


_READ_BYTES = 4 << 20


def compute_fingerprint(model: str | os.PathLike[str]) -> str:
    """Compute the SHA-256 over a decoder's graph and its external weights.

    Neither the names of the files nor the tokenizer count: prefixes are found by token ids. The hash is taken over one
    line for each file, the graph first: ``<bytes> <SHA-256 of the contents>``.

    Parameters
    ----------
    model
        A file or folder, as `kvmnn.lm.DecoderSession.open` takes it.

    Raises
    ------
    MissingDependencyError
        Where the package onnx is not installed.
    SourceError, ModelError
        As `kvmnn.lm.DecoderSession.open`.
    """
    total = hashlib.sha256()
    for path in list_fingerprint_files(model):
        file, digest = MappedFile(path), hashlib.sha256()
        for chunk in file.iter_chunks(0, file.size, _READ_BYTES):
            digest.update(chunk.data)
        total.update(f"{file.size} {digest.hexdigest()}\n".encode())
    return total.hexdigest()


def list_fingerprint_files(model: str | os.PathLike[str]) -> list[Path]:
    """Return the paths of the files that `compute_fingerprint` reads, in order; errors as there.

    Links are not resolved: where one leads may change.
    """
    graph = find_model(model).graph
    location_by_name = locate_weights(read_onnx_graph(graph), graph)
    return [graph, *(graph.parent / name for name in sorted(location_by_name, key=location_by_name.__getitem__))]
