"""What a kind of work takes of the files and folders below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


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
        from .recognising import accepts_file  # and all formats: not where nothing is looked for, as in a worker

        return accepts_file(path, arrays=self.arrays, frames=self.frames, weights=self.weights)

    def accepts_folder(self, path: str, names: Iterable[str]) -> bool | None:
        """Whether a folder with these names in it counts as one; None where what is in it does, each by itself."""
        if self.match is not None:
            return None
        from .recognising import accepts_folder

        return accepts_folder(path, set(names), arrays=self.arrays, frames=self.frames)
