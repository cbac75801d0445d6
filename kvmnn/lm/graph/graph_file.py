"""An ONNX graph read without its weights, as far as they lie in other files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

from ...errors import ModelError, SourceError
from ...optional import import_optional

_ERROR_NOISE = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/\S+\.(?:h|cc):\d+ ")


def read_onnx_graph(path: Path) -> Any:
    """The model in `path`.

    External data is not opened, only checked: every file must be there, inside the model's folder.

    Returns
    -------
    An ``onnx.ModelProto``.

    Raises
    ------
    MissingDependencyError
        Where the package onnx is not installed.
    SourceError
        When the file cannot be read, is no ONNX model, is cut short, or its external data is missing.
    ModelError
        When external data lies outside the folder, or the graph is made for a newer onnxruntime.
    """
    onnx = import_optional("onnx")
    try:
        if path.stat().st_size == 0:
            raise SourceError(f"{path}: is empty, expected an ONNX model")
        model = onnx.load(str(path), load_external_data=False)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except SourceError:
        raise
    except Exception as error:  # protobuf's DecodeError, and ValueErrors of other layers
        raise SourceError(f"{path}: is not an ONNX model, or is cut short ({format_error(error)})") from error
    if not model.graph.node or not model.opset_import:
        raise SourceError(f"{path}: is not an ONNX model: it has no graph")
    locate_weights(model, path)
    return model


def serialize_model(model: Any, label: str) -> bytes:
    """A model as the bytes of its file.

    Raises
    ------
    ModelError
        When it is larger than one file can be.
    """
    try:
        return bytes(model.SerializeToString())
    except Exception as error:  # protobuf's own class, by version
        raise ModelError(
            f"{label}: too large to be changed ({format_error(error)}); save it with its weights in another file "
            "(onnx.save with save_as_external_data)"
        ) from error


def get_opset(model: Any) -> int:
    """The version of the standard operators that a model uses; 0 where it uses none."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def iter_subgraphs(graph: Any) -> Iterator[Any]:
    """All graphs inside the nodes of `graph`, at any depth."""
    for node in graph.node:
        for attribute in node.attribute:
            nested_graphs = [attribute.g] if attribute.HasField("g") else []
            for subgraph in [*nested_graphs, *attribute.graphs]:
                yield subgraph
                yield from iter_subgraphs(subgraph)


def iter_external_tensors(model: Any) -> Iterator[Any]:
    """All tensors of a model whose bytes lie in other files."""
    external = import_optional("onnx").TensorProto.EXTERNAL
    for graph in [model.graph, *iter_subgraphs(model.graph)]:
        attributes = [attribute for node in graph.node for attribute in node.attribute]
        sparse = [part for tensor in graph.sparse_initializer for part in (tensor.values, tensor.indices)]
        inline = [tensor for attribute in attributes for tensor in [attribute.t, *attribute.tensors]]
        yield from (tensor for tensor in [*graph.initializer, *sparse, *inline] if tensor.data_location == external)


def format_error(error: object, max_characters: int = 200) -> str:
    """The text of an exception of another package, on one line."""
    text = _ERROR_NOISE.sub("", " ".join(str(error).split()))
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."


def resolve_dir(path: Path) -> Path:
    """The folder that a graph really lies in: hubs keep links to files that lie side by side elsewhere."""
    return Path(os.path.realpath(path)).parent


def locate_weights(model: Any, path: Path) -> dict[str, str]:
    """Where the weights of a model lie: locations as the graph says them, and as seen from `resolve_dir`.

    Raises
    ------
    SourceError
        When a file is missing.
    ModelError
        When one lies outside the model's folder.
    """
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
    """Let `model`, read from `path`, find its weights from `resolve_dir`, in place."""
    location_by_name = locate_weights(model, path)
    for tensor in iter_external_tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location_by_name[entry.value]
