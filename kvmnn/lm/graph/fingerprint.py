"""What decides a model's K and V, as one hash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ...files.mapped import MappedFile
from .graph_file import locate_weights, read_onnx_graph, resolve_dir
from .model_files import find_model

_READ_BYTES = 4 << 20


def compute_fingerprint(model: str | os.PathLike[str]) -> str:
    """SHA-256 over a decoder's graph and its weights in other files.

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
    graph = find_model(model).graph
    weights = locate_weights(read_onnx_graph(graph), graph).values()
    total = hashlib.sha256()
    for path in [graph, *(resolve_dir(graph) / name for name in sorted(weights))]:
        total.update(f"{_hash_file(path)}\n".encode())
    return total.hexdigest()


def _hash_file(path: Path) -> str:
    file, digest = MappedFile(path), hashlib.sha256()
    for run in file.iter_chunks(0, file.size, _READ_BYTES):
        digest.update(run.data)
    return f"{file.size} {digest.hexdigest()}"
