"""All that counts below folders, in an order that does not change."""

from __future__ import annotations

import contextvars
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import OptionError, SourceError
from ..text import count
from .kinds import Kinds


class Named(NamedTuple):
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
class Found:
    """What `find` found.

    Parameters
    ----------
    taken
        What counts, in order.
    passed, passed_first
        How many other files there are that are not hidden, and the first of them.
    links
        Links to folders, which are not followed.
    """

    taken: list[Named] = field(default_factory=list)
    passed: int = 0
    passed_first: str = ""
    links: int = 0

    def notes(self, what: str) -> Iterator[str]:
        """What was left out, a line each; `what` names the work."""
        if self.passed:
            files = count(self.passed, "file") + (" or folder" if self.passed == 1 else " or folders")
            yield f"{files} left out that {what} does not look for, such as {self.passed_first} (--match does)"
        if self.links:
            yield f"{count(self.links, 'link')} to folders not followed"

    def pass_over(self, path: str) -> None:
        """Count what is left out."""
        self.passed += 1
        self.passed_first = self.passed_first or path


def find(roots: Sequence[str], kinds: Kinds, leave_out: Iterable[str] = ()) -> Found:
    """What counts of `roots` and below them.

    A file in `roots` counts whatever it is. Below a folder count the files and folders that `kinds` takes: not hidden
    ones (their names begin with a dot), and nothing behind a link to a folder; a link to a file is that file. Names of
    a folder are in the order of their bytes, and files stand where folders of that name would. A folder that cannot be
    listed counts, so that reading it says why.

    Parameters
    ----------
    leave_out
        Files or folders that do not count: outputs.

    Raises
    ------
    SourceError
        For a root that is not there.
    OptionError
        For a root that is given twice, or lies in another one.
    """
    _check_apart(roots)
    left = {os.path.realpath(path) for path in leave_out}
    # In a context of its own: what is looked at here is not what is read, and may change before it is.
    return contextvars.Context().run(_find, roots, kinds, left)


def _find(roots: Sequence[str], kinds: Kinds, left: set[str]) -> Found:
    found = Found()
    for root in roots:
        if not os.path.lexists(root):
            raise SourceError(f"{root}: no such file or directory")
        base = os.path.basename(os.path.abspath(root))
        if not os.path.isdir(root):
            found.taken.append(Named(root, base))
            continue
        todo = [(Named(root, ""), True)]
        while todo:
            here, is_folder = todo.pop()
            if is_folder:
                todo.extend(reversed(_inside(here, base, kinds, left, found)))
            else:
                found.taken.append(here)
    return found


def _inside(folder: Named, base: str, kinds: Kinds, left: set[str], found: Found) -> list[tuple[Named, bool]]:
    """What counts in a folder, and folders to look into; a folder that counts as one, or not at all, has none."""
    itself = Named(folder.path, folder.name or base)
    try:
        with os.scandir(folder.path) as scanned:
            entries = sorted(scanned, key=lambda entry: os.fsencode(entry.name))
    except OSError:
        return [(itself, False)]
    entries = [entry for entry in entries if not entry.name.startswith(".")]
    names = {entry.name for entry in entries}
    takes = kinds.takes_folder(folder.path, names)
    if takes:
        return [(itself, False)]
    if takes is False:
        found.pass_over(folder.path)
        return []
    inside = []
    left_names = {os.path.basename(path) for path in left}
    for entry in entries:
        named = Named(os.path.join(folder.path, entry.name), os.path.join(folder.name, entry.name))
        if entry.name in left_names and os.path.realpath(named.path) in left:
            continue
        kind = _kind(entry)
        if kind == "folder" or (kind == "file" and kinds.takes_file(named.path)):
            inside.append((named, kind == "folder"))
        elif kind == "link":
            found.links += 1
        elif not (entry.name.endswith(".json") and entry.name.removesuffix(".json") in names):  # said of that file
            found.pass_over(named.path)
    return inside


def _kind(entry: os.DirEntry[str]) -> str:
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


def _check_apart(roots: Sequence[str]) -> None:
    real = {}
    for root in roots:
        path = os.path.realpath(root)
        if path in real:
            raise OptionError(f"{root}: is given twice")
        real[path] = root
    for path, root in real.items():
        above = os.path.dirname(path)
        while above != os.path.dirname(above):
            if above in real:
                raise OptionError(f"{root}: lies in {real[above]}, and would count twice")
            above = os.path.dirname(above)
