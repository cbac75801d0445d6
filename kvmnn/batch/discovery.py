"""Find the files below folders that a kind of work reads, in a stable order."""

from __future__ import annotations

import contextvars
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from fnmatch import fnmatchcase

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.text import pluralize
from ..errors import OptionError, SourceError


@dataclass(frozen=True)
class InputKinds:
    """Kinds of inputs that a work accepts."""

    #: Files of arrays and caches of engines; folders that are a dump, a prefix cache, live cache files or of vLLM, or
    #: ``.npy`` files of one cache.
    arrays: bool = False
    #: Frames, and folders of frames with their manifest or of layer streams.
    frames: bool = False
    #: Weight files of KV compressors.
    weights: bool = False
    #: Accept files whose names match this pattern (``*``, ``?``, ``[abc]``) instead, whatever they contain.
    match: str | None = None

    def accepts_file(self, path: str) -> bool:
        """Return whether a file is an input."""
        if self.match is not None:
            return fnmatchcase(os.path.basename(path), self.match)
        from .recognition import accepts_file

        return accepts_file(path, arrays=self.arrays, frames=self.frames, weights=self.weights)

    def accepts_folder(self, path: str, names: Iterable[str]) -> bool | None:
        """Return whether a folder with these names is one input; None if its entries are inputs of their own."""
        if self.match is not None:
            return None
        from .recognition import accepts_folder

        return accepts_folder(path, set(names), arrays=self.arrays, frames=self.frames)

    def find_array_folder_files(self, names: Iterable[str]) -> set[str]:
        """Return those of the names in a folder that are one input together; empty if each is an input of its own."""
        if self.match is not None or not self.arrays:
            return set()
        from .recognition import find_array_folder_files

        return find_array_folder_files(set(names))


class InputPath(NamedTuple):
    """A file or folder that is an input.

    Parameters
    ----------
    path
        Path of the input, starting with a root.
    name
        Path relative to the root; the last part of its name for a root itself.
    """

    path: str
    name: str


@dataclass
class DiscoveryResult:
    """Result of `find_inputs`."""

    #: The inputs, in order.
    inputs: list[InputPath] = field(default_factory=list)
    #: Number of other files that are not hidden, and the first of them.
    num_ignored: int = 0
    first_ignored: str = ""
    #: Links to folders, which are not followed.
    num_links: int = 0

    def describe_ignored(self, work_name: str) -> Iterator[str]:
        """Yield a line for each kind of ignored files; `work_name` names the work."""
        if self.num_ignored:
            ignored_text = pluralize(self.num_ignored, "file") + (
                " or folder" if self.num_ignored == 1 else " or folders"
            )
            yield (
                f"{ignored_text} left out that {work_name} does not look for, such as {self.first_ignored} (--glob "
                f"does)"
            )
        if self.num_links:
            yield f"{pluralize(self.num_links, 'link')} to folders not followed"

    def add_ignored(self, path: str) -> None:
        """Count an ignored file."""
        self.num_ignored += 1
        self.first_ignored = self.first_ignored or path


def find_inputs(roots: Sequence[str], kinds: InputKinds, exclude: Iterable[str] = ()) -> DiscoveryResult:
    """Find the inputs among `roots` and below them.

    A file in `roots` is always an input. Below a folder, inputs are the files and folders that `kinds` accepts, except
    hidden ones and those below a link to a folder; a link to a file is an input. Names are sorted by their bytes, files
    among folders. A folder that cannot be listed is an input, so that reading it reports the error.

    Parameters
    ----------
    roots
        Files and folders.
    kinds
        Kinds of inputs to accept.
    exclude
        Files or folders to skip: outputs.

    Raises
    ------
    SourceError
        If a root does not exist.
    OptionError
        If a root is specified twice, or lies in another one.
    """
    _check_disjoint(roots)
    excluded = {os.path.realpath(path) for path in exclude}
    # In a separate context: files examined here may change before they are read.
    return contextvars.Context().run(_find_inputs, roots, kinds, excluded)


def _find_inputs(roots: Sequence[str], kinds: InputKinds, excluded: set[str]) -> DiscoveryResult:
    result = DiscoveryResult()
    for root in roots:
        if not os.path.lexists(root):
            raise SourceError(f"{root}: no such file or directory")
        base = os.path.basename(os.path.abspath(root))
        if not os.path.isdir(root):
            result.inputs.append(InputPath(root, base))
            continue
        pending = [(InputPath(root, ""), True)]
        while pending:
            current, is_folder = pending.pop()
            if is_folder:
                pending.extend(reversed(_list_folder(current, base, kinds, excluded, result)))
            else:
                result.inputs.append(current)
    return result


def _list_folder(
    folder: InputPath, base: str, kinds: InputKinds, excluded: set[str], result: DiscoveryResult
) -> list[tuple[InputPath, bool]]:
    """Return the inputs in a folder, and the folders to search; none if the folder itself is an input or ignored."""
    folder_input = InputPath(folder.path, folder.name or base)
    try:
        with os.scandir(folder.path) as scandir_entries:
            entries = sorted(scandir_entries, key=lambda entry: os.fsencode(entry.name))
    except OSError:
        return [(folder_input, False)]
    entries = [entry for entry in entries if not entry.name.startswith(".")]
    names = {entry.name for entry in entries}
    is_accepted = kinds.accepts_folder(folder.path, names)
    if is_accepted:
        return [(folder_input, False)]
    if is_accepted is False:
        result.add_ignored(folder.path)
        return []
    children = []
    files_of_folder = kinds.find_array_folder_files(entry.name for entry in entries if _classify_entry(entry) == "file")
    if files_of_folder:
        children.append((folder_input, False))
    excluded_names = {os.path.basename(path) for path in excluded}
    for entry in entries:
        if entry.name in files_of_folder:
            continue
        child = InputPath(os.path.join(folder.path, entry.name), os.path.join(folder.name, entry.name))
        if entry.name in excluded_names and os.path.realpath(child.path) in excluded:
            continue
        kind = _classify_entry(entry)
        if kind == "folder" or (kind == "file" and kinds.accepts_file(child.path)):
            children.append((child, kind == "folder"))
        elif kind == "link":
            result.num_links += 1
        elif not (entry.name.endswith(".json") and entry.name.removesuffix(".json") in names):  # a sidecar of that file
            result.add_ignored(child.path)
    return children


def _classify_entry(entry: os.DirEntry[str]) -> str:
    """Return ``"file"`` (also for a dangling link), ``"folder"``, ``"link"`` to a folder, or ``"other"``."""
    try:
        if entry.is_symlink():
            mode = entry.stat().st_mode
            return "link" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"
        if entry.is_dir():
            return "folder"
        return "file" if entry.is_file() else "other"
    except OSError:
        return "file"


def _check_disjoint(roots: Sequence[str]) -> None:
    root_by_path = {}
    for root in roots:
        path = os.path.realpath(root)
        if path in root_by_path:
            raise OptionError(f"{root}: is given twice")
        root_by_path[path] = root
    for path, root in root_by_path.items():
        parent = os.path.dirname(path)
        while parent != os.path.dirname(parent):
            if parent in root_by_path:
                raise OptionError(f"{root}: lies in {root_by_path[parent]}, and would count twice")
            parent = os.path.dirname(parent)
