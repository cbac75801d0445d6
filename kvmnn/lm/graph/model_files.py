"""Which file of a model folder is the decoder, and what the files beside it say."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ModelError, SourceError
from ...files.json_document import read_object_or_empty

CACHED_GRAPH_MARK = ".kvmnn-"  # part of the names of the graphs that kvmnn keeps beside a model
_PREFERRED_NAMES = ("model.onnx", "decoder_model_merged.onnx", "model_merged.onnx", "decoder_with_past_model.onnx")
_NO_CACHE_NAME = "decoder_model.onnx"


@dataclass(frozen=True)
class ModelFiles:
    """A decoder's graph and its settings.

    Attributes
    ----------
    graph
        The ``.onnx`` file.
    config
        ``config.json`` of the model; for models with several parts, that of the text part. Empty where absent.
    genai
        ``genai_config.json`` of onnxruntime-genai; empty where absent.
    """

    graph: Path
    config: dict[str, Any] = field(default_factory=dict)
    genai: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return str(self.graph)


def find_model(path: str | os.PathLike[str]) -> ModelFiles:
    """The decoder at `path`.

    Parameters
    ----------
    path
        An ``.onnx`` file, or a folder: the graph that its ``genai_config.json`` names, else a decoder with a cache
        under one of the names that exporters use, in the folder or in its subfolder ``onnx``, else its only graph.

    Raises
    ------
    SourceError
        When there is nothing to read, or a settings file is not JSON.
    ModelError
        When the folder holds an encoder-decoder, only a decoder without a cache, or several graphs to choose from.
    """
    model_path = Path(path)
    if not model_path.exists():
        raise SourceError(f"{model_path}: does not exist")
    if not model_path.is_dir():
        return _read_settings(model_path)
    genai = read_object_or_empty(model_path / "genai_config.json")
    if genai:
        return _read_settings(model_path / _read_genai_filename(genai, model_path), genai)
    for folder in (model_path, model_path / "onnx"):
        graph = _select_graph(folder)
        if graph is not None:
            return _read_settings(graph)
    raise SourceError(f"{model_path}: no .onnx file in this folder or in its subfolder onnx/")


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
        raise SourceError(f"{folder / name}: does not exist (genai_config.json names it)")
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
    """A nested object of settings; empty where it is absent or something else."""
    for name in names:
        nested = settings.get(name)
        if not isinstance(nested, dict):
            return {}
        settings = nested
    return settings
