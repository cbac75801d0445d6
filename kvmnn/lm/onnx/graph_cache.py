"""Graphs that were operated on, kept for the next time.

They lie beside the model, because the weights in other files are found from there, or in the user's cache directory
where the model's folder cannot be written to. A graph is found by a digest of the model file and of what was done to
it, so a model that changed is operated on anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..._util.packages import import_optional
from ...errors import OutputError, SourceError
from ...files.atomic import FileOutput
from .graph_rewrite import REWRITE_VERSION, RewrittenGraph
from .model_files import CACHED_GRAPH_MARK, resolve_dir

_METADATA_KEY = "kvmnn"  # entry in the metadata of a kept graph


class GraphCache:
    """Where the operated graph of one model is kept.

    Parameters
    ----------
    graph
        The model's file.
    variant
        What is to be added to it, e.g. ``"attentions+bias"``; part of the key.
    """

    def __init__(self, graph: Path, variant: str) -> None:
        self._graph = graph
        self._variant = variant
        self._key = _compute_key(graph, variant)

    def find(self) -> tuple[Path, RewrittenGraph] | None:
        """The kept graph and what was added to it, if it is there and undamaged."""
        onnx = import_optional("onnx")
        for path in self._list_candidate_paths():
            if not path.is_file():
                continue
            with suppress(Exception):  # whatever is wrong with it, it is made anew
                model = onnx.load(str(path), load_external_data=False)
                metadata = next(json.loads(entry.value) for entry in model.metadata_props if entry.key == _METADATA_KEY)
                if metadata["key"] == self._key:
                    return path, RewrittenGraph(
                        _to_name_tuple(metadata["attentions"]),
                        _to_name_tuple(metadata["biases"]),
                        metadata["unmerged"],
                        metadata["query_heads"],
                    )
        return None

    @contextmanager
    def stage_graph(self, graph: bytes, *, has_external: bool) -> Iterator[StagedGraph | None]:
        """Write a graph where it will be kept, under a temporary name; None where no place is writable.

        Unless `StagedGraph.commit` is called, nothing is left of it. Running the file needs less memory than its bytes.
        """
        paths = self._list_candidate_paths()
        for path in paths[:1] if has_external else paths:
            with ExitStack() as stack:
                try:
                    if not _is_writable(path.parent):
                        continue
                    output = stack.enter_context(FileOutput(path, force=True))
                    output.file.write(graph)
                    output.file.flush()
                except (OSError, OutputError):
                    continue
                del graph
                # in the user's cache directory other models have the same name
                yield StagedGraph(output, self._key, self._remove_stale if path == paths[0] else None)
                return
        yield None

    def _list_candidate_paths(self) -> list[Path]:
        name = f"{self._graph.stem}{CACHED_GRAPH_MARK}{self._variant}-{self._key[:16]}.onnx"
        return [resolve_dir(self._graph) / name, get_user_cache() / name]

    def _remove_stale(self, current_path: Path) -> None:
        """Remove what was kept of earlier contents of the same model file."""
        for path in current_path.parent.glob(
            f"{_escape_glob(self._graph.stem)}{CACHED_GRAPH_MARK}{self._variant}-{'?' * 16}.onnx"
        ):
            if path != current_path:
                with suppress(OSError):
                    path.unlink()


class StagedGraph:
    """A changed graph that is written and can be run, but not kept yet.

    Parameters
    ----------
    output
        Its file.
    key
        Of the graph, as `GraphCache` finds it.
    remove_stale
        Called with the kept file's path, to remove graphs of earlier contents of the model file; None for not at all.
    """

    def __init__(self, output: FileOutput, key: str, remove_stale: Callable[[Path], None] | None) -> None:
        self._output, self._key, self._remove_stale = output, key, remove_stale
        self.path = output.file.path

    def commit(self, rewritten: RewrittenGraph) -> None:
        """Give the file its name, with what was added to the graph in its metadata; not possible: it is not kept."""
        onnx = import_optional("onnx")
        metadata = onnx.StringStringEntryProto(
            key=_METADATA_KEY, value=json.dumps({"key": self._key, **vars(rewritten)})
        )
        with suppress(OSError, OutputError):
            # fields appended to the bytes of a message are added to its lists
            self._output.file.write(onnx.ModelProto(metadata_props=[metadata]).SerializeToString())
            self._output.commit()
            if self._remove_stale is not None:
                self._remove_stale(self._output.target)


def _to_name_tuple(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def strip_metadata(model: Any) -> None:
    """Remove from a graph what an earlier change noted in its metadata: it may be a kept one that was renamed."""
    other_entries = [entry for entry in model.metadata_props if entry.key != _METADATA_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(other_entries)


def get_user_cache() -> Path:
    """The user's cache directory for graphs (``XDG_CACHE_HOME``, by default ``~/.cache``)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "kvmnn" / "graphs"


def _is_writable(folder: Path) -> bool:
    """Whether files may be made in a folder; a folder marked read-only is left alone also by root."""
    if folder == get_user_cache():
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def _compute_key(graph: Path, variant: str) -> str:
    try:
        with open(graph, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SourceError(f"{graph}: cannot be read: {error.strerror or error}") from error
    # Which operators can be opened depends on onnxruntime.
    tool_versions = (
        f"{REWRITE_VERSION} {import_optional('onnxruntime').__version__} {import_optional('onnx').__version__}"
    )
    return hashlib.sha256(f"{content} {variant} {tool_versions}".encode()).hexdigest()


def _escape_glob(name: str) -> str:
    """A name in which a glob sees no pattern."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
