"""Find the files below folders that a kind of work reads, in a stable order."""

from __future__ import annotations

import contextvars
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from .._util.text import pluralize
from ..errors import OptionError, SourceError


@dataclass(frozen=True)
class InputKinds:
    """What a kind of work takes.

    Parameters
    ----------
    arrays
        Files of arrays and caches of engines; folders that are a dump, a prefix cache, live cache files or vLLM's.
    frames
        Frames, and folders of them with their manifest.
    weights
        Weight files of KV compressors.
    match
        Instead of all these: files whose names match this pattern (``*``, ``?``, ``[abc]``), whatever they hold.
    """

    arrays: bool = False
    frames: bool = False
    weights: bool = False
    match: str | None = None

    def accepts_file(self, path: str) -> bool:
        """Whether a file counts."""
        if self.match is not None:
            return fnmatchcase(os.path.basename(path), self.match)
        from .recognition import accepts_file

        return accepts_file(path, arrays=self.arrays, frames=self.frames, weights=self.weights)

    def accepts_folder(self, path: str, names: Iterable[str]) -> bool | None:
        """Whether a folder with these names in it counts as one; None where what is in it does, each by itself."""
        if self.match is not None:
            return None
        from .recognition import accepts_folder

        return accepts_folder(path, set(names), arrays=self.arrays, frames=self.frames)


class InputPath(NamedTuple):
    """A file or folder that counts.

    Parameters
    ----------
    path
        As it is reached from what was named.
    name
        The same below what was named; of what was named itself, the last part of its name.
    """

    path: str
    name: str


@dataclass
class DiscoveryResult:
    """What `find_inputs` found.

    Parameters
    ----------
    inputs
        What counts, in order.
    num_ignored, first_ignored
        How many other files there are that are not hidden, and the first of them.
    num_links
        Links to folders, which are not followed.
    """

    inputs: list[InputPath] = field(default_factory=list)
    num_ignored: int = 0
    first_ignored: str = ""
    num_links: int = 0

    def describe_ignored(self, work_name: str) -> Iterator[str]:
        """What was left out, a line each; `work_name` names the work."""
        if self.num_ignored:
            ignored_text = pluralize(self.num_ignored, "file") + (
                " or folder" if self.num_ignored == 1 else " or folders"
            )
            yield (
                f"{ignored_text} left out that {work_name} does not look for, such as {self.first_ignored} (--match "
                f"does)"
            )
        if self.num_links:
            yield f"{pluralize(self.num_links, 'link')} to folders not followed"

    def add_ignored(self, path: str) -> None:
        """Count what is left out."""
        self.num_ignored += 1
        self.first_ignored = self.first_ignored or path


def find_inputs(roots: Sequence[str], kinds: InputKinds, exclude: Iterable[str] = ()) -> DiscoveryResult:
    """What counts of `roots` and below them.

    A file in `roots` counts whatever it is. Below a folder count the files and folders that `kinds` takes: not hidden
    ones (their names begin with a dot), and nothing behind a link to a folder; a link to a file is that file. Names of
    a folder are in the order of their bytes, and files stand where folders of that name would. A folder that cannot be
    listed counts, so that reading it says why.

    Parameters
    ----------
    exclude
        Files or folders that do not count: outputs.

    Raises
    ------
    SourceError
        For a root that is not there.
    OptionError
        For a root that is given twice, or lies in another one.
    """
    _check_disjoint(roots)
    excluded = {os.path.realpath(path) for path in exclude}
    # In a context of its own: what is looked at here is not what is read, and may change before it is.
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
    """What counts in a folder, and folders to look into; a folder that counts as one, or not at all, has none."""
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
    excluded_names = {os.path.basename(path) for path in excluded}
    for entry in entries:
        child = InputPath(os.path.join(folder.path, entry.name), os.path.join(folder.name, entry.name))
        if entry.name in excluded_names and os.path.realpath(child.path) in excluded:
            continue
        kind = _classify_entry(entry)
        if kind == "folder" or (kind == "file" and kinds.accepts_file(child.path)):
            children.append((child, kind == "folder"))
        elif kind == "link":
            result.num_links += 1
        elif not (entry.name.endswith(".json") and entry.name.removesuffix(".json") in names):  # said of that file
            result.add_ignored(child.path)
    return children


def _classify_entry(entry: os.DirEntry[str]) -> str:
    """``"file"`` (a link to nothing included), ``"folder"``, ``"link"`` to a folder, or ``"other"``."""
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
