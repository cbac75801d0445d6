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

from ...errors import OutputError, SourceError
from ...files.output import FileOutput
from ...optional import package
from .graph_file import home
from .model_files import OPERATED
from .surgery import VERSION, Operated

_FACTS = "kvmnn"  # entry in the metadata of a kept graph


class GraphCache:
    """Where the operated graph of one model is kept.

    Parameters
    ----------
    graph
        The model's file.
    wanted
        What is to be added to it, e.g. ``"attentions+bias"``; part of the key.
    """

    def __init__(self, graph: Path, wanted: str) -> None:
        self._graph = graph
        self._wanted = wanted
        self._key = _digest(graph, wanted)

    def find(self) -> tuple[Path, Operated] | None:
        """The kept graph and what was added to it, if it is there and undamaged."""
        onnx = package("onnx")
        for path in self._places():
            if not path.is_file():
                continue
            with suppress(Exception):  # whatever is wrong with it, it is made anew
                model = onnx.load(str(path), load_external_data=False)
                facts = next(json.loads(entry.value) for entry in model.metadata_props if entry.key == _FACTS)
                if facts["key"] == self._key:
                    return path, Operated(
                        _names(facts["attentions"]), _names(facts["biases"]), facts["unmerged"], facts["query_heads"]
                    )
        return None

    @contextmanager
    def stage(self, graph: bytes, *, has_external: bool) -> Iterator[StagedGraph | None]:
        """Write a graph where it will be kept, under a temporary name; None where no place is writable.

        Unless `StagedGraph.keep` is called, nothing is left of it. Running the file needs less memory than its bytes.

        Parameters
        ----------
        graph
            The bytes of a model.
        has_external
            Its weights lie in other files, located as seen from `home`, so that it can be kept there only.
        """
        places = self._places()
        for path in places[:1] if has_external else places:
            with ExitStack() as stack:
                try:
                    if not _writable(path.parent):
                        continue
                    output = stack.enter_context(FileOutput(path, force=True))
                    output.file.write(graph)
                    output.file.flush()
                except (OSError, OutputError):
                    continue
                del graph
                # in the user's cache directory other models have the same name
                yield StagedGraph(output, self._key, self._forget_others if path == places[0] else None)
                return
        yield None

    def _places(self) -> list[Path]:
        name = f"{self._graph.stem}{OPERATED}{self._wanted}-{self._key[:16]}.onnx"
        return [home(self._graph) / name, user_cache() / name]

    def _forget_others(self, kept: Path) -> None:
        """Remove what was kept of earlier contents of the same model file."""
        for path in kept.parent.glob(f"{_literal(self._graph.stem)}{OPERATED}{self._wanted}-{'?' * 16}.onnx"):
            if path != kept:
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
    forget_others
        Called with the kept file's path, to remove graphs of earlier contents of the model file; None for not at all.
    """

    def __init__(self, output: FileOutput, key: str, forget_others: Callable[[Path], None] | None) -> None:
        self._output, self._key, self._forget_others = output, key, forget_others
        self.path = output.file.path

    def keep(self, operated: Operated) -> None:
        """Give the file its name, with what was added to the graph in its metadata; not possible: it is not kept."""
        onnx = package("onnx")
        facts = onnx.StringStringEntryProto(key=_FACTS, value=json.dumps({"key": self._key, **vars(operated)}))
        with suppress(OSError, OutputError):
            # fields appended to the bytes of a message are added to its lists
            self._output.file.write(onnx.ModelProto(metadata_props=[facts]).SerializeToString())
            self._output.commit()
            if self._forget_others is not None:
                self._forget_others(self._output.target)


def _names(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def forget_facts(model: Any) -> None:
    """Remove from a graph what an earlier change noted in its metadata: it may be a kept one that was renamed."""
    others = [entry for entry in model.metadata_props if entry.key != _FACTS]
    del model.metadata_props[:]
    model.metadata_props.extend(others)


def user_cache() -> Path:
    """The user's cache directory for graphs (``XDG_CACHE_HOME``, by default ``~/.cache``)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "kvmnn" / "graphs"


def _writable(folder: Path) -> bool:
    """Whether files may be made in a folder; a folder marked read-only is left alone also by root."""
    if folder == user_cache():
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def _digest(graph: Path, wanted: str) -> str:
    try:
        with open(graph, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SourceError(f"{graph}: cannot be read: {error.strerror or error}") from error
    # Which operators can be opened depends on onnxruntime.
    made_by = f"{VERSION} {package('onnxruntime').__version__} {package('onnx').__version__}"
    return hashlib.sha256(f"{content} {wanted} {made_by}".encode()).hexdigest()


def _literal(name: str) -> str:
    """A name in which a glob sees no pattern."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
