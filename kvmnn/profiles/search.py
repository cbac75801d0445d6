"""Search of the profile that streams need: they name it by its key."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import KvmnnError, SourceError

if TYPE_CHECKING:  # stores have a finder, and most need no profile
    from .profile import Profile

SUFFIX = ".kvmp"
_MAX_PROFILES_TRIED = 64


class ProfileFinder:
    """Finds profiles by their keys; each is read once. Threads may share it.

    Parameters
    ----------
    label
        Begins messages: whose streams need a profile.
    profile
        A profile, or its file, that the caller names: no other is looked for.
    folders
        Where files of profiles may be, in order.
    """

    def __init__(
        self, label: str, profile: Profile | str | os.PathLike[str] | None = None, folders: Sequence[Path] = ()
    ) -> None:
        self._label, self._folders = label, tuple(folders)
        self._path = profile if isinstance(profile, str | os.PathLike) else None
        self._caller_profile = None if isinstance(profile, str | os.PathLike) else profile
        self._names: list[str] = []
        self._files: dict[bytes, Path] = {}
        self._profiles: dict[bytes, Profile] = (
            {} if self._caller_profile is None else {self._caller_profile.key: self._caller_profile}
        )
        self._lock = threading.Lock()

    def add_name(self, name: str) -> None:
        """Add the name, or the path from a folder, that a profile had when streams were made with it."""
        if name not in self._names:
            self._names.append(name)

    def with_folders_of(self, path: str | os.PathLike[str]) -> ProfileFinder:
        """Return a finder that also looks in the folder of a file, and in the one above."""
        folder = Path(path).absolute().parent
        finder = ProfileFinder(
            os.fspath(path), self._caller_profile or self._path, [*self._folders, folder, folder.parent]
        )
        finder._names = list(self._names)
        return finder

    def read_caller_profile(self) -> Profile | None:
        """Return the profile that the caller names; None if that is none.

        Raises
        ------
        SourceError, ManifestError
            For a file that is none.
        """
        with self._lock:
            if self._caller_profile is None and self._path is not None:
                from .profile import Profile

                self._caller_profile = Profile.read(self._path)
                self._profiles[self._caller_profile.key] = self._caller_profile
            return self._caller_profile

    def get(self, key: bytes) -> Profile:
        """Return the profile with a key.

        Raises
        ------
        SourceError
            Where it is not there, or another one was given; the message has the key.
        """
        named = self.read_caller_profile()
        with self._lock:
            if key in self._profiles:
                return self._profiles[key]
            name = f" ({Path(self._names[-1]).name})" if self._names else ""
            needed = f"{self._label}: its streams need the profile {key.hex()[:16]}{name}"
            if named is not None:
                raise SourceError(f"{needed}: the one that was given is {named.key.hex()[:16]}")
            from .profile import Profile

            named_files, damage = {Path(named_path).name for named_path in self._names}, ""
            for candidate in self._list_candidates():
                try:
                    profile = Profile.read(candidate)
                except (KvmnnError, OSError) as error:
                    damage = damage or (str(error) if candidate.name in named_files else "")
                    continue
                self._profiles[profile.key] = profile
                self._files[profile.key] = candidate
                if profile.key == key:
                    return profile
        copy = f", or copy it into {self._folders[0]}" if self._folders else ""
        state = f"which cannot be read ({damage})" if damage else "which is not there"
        raise SourceError(f"{needed}, {state}: --profile FILE says where it is{copy}")

    def find_file(self, key: bytes) -> str | None:
        """Return the file of the profile with a key, None for one that is no file; raise as `get`."""
        self.get(key)
        file = self._path or self._files.get(key)
        return None if file is None else os.fspath(file)

    def _list_candidates(self) -> list[Path]:
        """List files that may be the profile: by its name first."""
        named = [base / name for name in self._names for base in self._folders or (Path(),)]
        neighbours = [path for base in self._folders for path in sorted(base.glob(f"*{SUFFIX}"))[:_MAX_PROFILES_TRIED]]
        return [path for path in dict.fromkeys([*named, *neighbours]) if path.is_file()]
