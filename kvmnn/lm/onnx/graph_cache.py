"""Cache of rewritten graphs on disk.

They are next to the model, because external weights are located relative to it, or in the user's cache directory if the
model's folder is read-only. The key is a digest of the model file and of the rewrite, so that a changed model is
rewritten again.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..._util.packages import import_optional
from ...errors import OutputError, build_read_error
from ...files.atomic import FileOutput
from .graph_rewrite import REWRITE_VERSION, RewrittenGraph
from .model_files import CACHED_GRAPH_MARK, resolve_dir

_METADATA_KEY = "kvmnn"  # entry in the metadata of a kept graph


class GraphCache:
    """Storage of the rewritten graph of one model; `variant` names the additions, e.g. ``"attentions+bias"``."""

    def __init__(self, graph: Path, variant: str) -> None:
        self._graph = graph
        self._variant = variant
        self._key = _compute_key(graph, variant)

    def find(self) -> tuple[Path, RewrittenGraph] | None:
        """Return the stored graph and its additions; None if it is missing or damaged."""
        onnx = import_optional("onnx")
        for path in self._list_candidate_paths():
            if not path.is_file():
                continue
            with suppress(Exception):  # whatever is wrong with it, it is made again
                model = onnx.load(str(path), load_external_data=False)
                metadata = next(json.loads(entry.value) for entry in model.metadata_props if entry.key == _METADATA_KEY)
                if metadata["key"] == self._key:
                    names = [metadata["attentions"], metadata["biases"]]
                    attentions, biases = (None if entry is None else tuple(entry) for entry in names)
                    return path, RewrittenGraph(attentions, biases, metadata["unmerged"], metadata["query_heads"])
        return None

    @contextmanager
    def stage_graph(self, graph: bytes, *, has_external: bool) -> Iterator[StagedGraph | None]:
        """Write a graph under a temporary name, until `StagedGraph.commit`; yield None if no folder is writable."""
        # Running the file needs less memory than running its bytes.
        paths = self._list_candidate_paths()
        for path in paths[:1] if has_external else paths:
            with ExitStack() as stack:
                try:
                    if path.parent == get_user_cache():
                        path.parent.mkdir(parents=True, exist_ok=True)
                    # A folder marked read-only is left alone also by root.
                    if not os.access(path.parent, os.W_OK) or not path.parent.stat().st_mode & 0o222:
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
        """Remove graphs that were stored for earlier contents of the model file."""
        pattern = f"{glob.escape(self._graph.stem)}{CACHED_GRAPH_MARK}{self._variant}-{'?' * 16}.onnx"
        for path in current_path.parent.glob(pattern):
            if path != current_path:
                with suppress(OSError):
                    path.unlink()


class StagedGraph:
    """A rewritten graph that can run and is not stored yet."""

    def __init__(self, output: FileOutput, key: str, remove_stale: Callable[[Path], None] | None) -> None:
        # `remove_stale` removes graphs of earlier contents of the model file, given the path of the stored one.
        self._output, self._key, self._remove_stale = output, key, remove_stale
        self.path = output.file.path

    def commit(self, rewritten: RewrittenGraph) -> None:
        """Store the file, with the additions to the graph in its metadata, if that is possible."""
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


def strip_metadata(model: Any) -> None:
    """Remove kvmnn's metadata of an earlier rewrite, because the model may be a stored graph that was renamed."""
    other_entries = [entry for entry in model.metadata_props if entry.key != _METADATA_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(other_entries)


def get_user_cache() -> Path:
    """Return the user's cache directory for graphs (``XDG_CACHE_HOME``, by default ``~/.cache``)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "kvmnn" / "graphs"


def _compute_key(graph: Path, variant: str) -> str:
    try:
        with open(graph, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise build_read_error(graph, error) from error
    # Which operators can be opened depends on onnxruntime.
    tool_versions = (
        f"{REWRITE_VERSION} {import_optional('onnxruntime').__version__} {import_optional('onnx').__version__}"
    )
    return hashlib.sha256(f"{content} {variant} {tool_versions}".encode()).hexdigest()
