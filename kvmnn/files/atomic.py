"""Atomic output: complete, or absent.

Everything is written under a temporary name next to its target, synced (unless it can be recreated; all files at once,
which is faster) and then renamed. If anything fails before that, an interrupt included, nothing remains. Nothing that
exists is replaced unless the caller forces it. Files of a killed process are removed by the next one that writes to the
same folder, except those that show a mixture (`kvmnn.files.temporary`). Devices and pipes (``/dev/null``, a FIFO)
cannot be renamed onto and are written directly.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from .._util.parallel import parallel_map
from ..errors import REPLACE_HINT, KvmnnError, OutputError, SourceError
from . import change_detection
from .file_info import file_id
from .file_names import FRAME_SUFFIX, LAYER_STREAM_SUFFIXES
from .schema import parse_document, read_bounded
from .temporary import TemporaryPath, remove_superseded

_LINK_UNSUPPORTED_ERRNOS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES}

_SYNC_OPEN_FLAGS = os.O_RDWR if os.name == "nt" else os.O_RDONLY
_MAX_PARALLEL_SYNCS = 8
"""Number of files and folders that are synced in parallel."""


class BinaryStream(Protocol):
    """A buffered binary stream, such as ``sys.stdout.buffer``."""

    def write(self, data: bytes | memoryview, /) -> int: ...
    def flush(self) -> None: ...


class StagedFile:
    """A file being written; every failure is an `OutputError` that names the target.

    Parameters
    ----------
    target
        The path that the caller requested.
    path
        The path that is written until then; equal to `target` for a device.
    is_new
        Whether the file must not exist yet.
    """

    def __init__(self, target: Path, path: Path, *, is_new: bool = False) -> None:
        self.target = target
        self.path = path
        with self._wrap_errors():
            self._file: io.BufferedWriter = open(path, "xb" if is_new else "wb")  # noqa: SIM115

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of `data`."""
        with self._wrap_errors():
            return self._file.write(data)

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to `position` (bytes)."""
        with self._wrap_errors():
            return self._file.seek(position, whence)

    def tell(self) -> int:
        """Return the current position (bytes)."""
        with self._wrap_errors():
            return self._file.tell()

    def rewrite(self) -> None:
        """Truncate the file to start again, even if it was closed."""
        with self._wrap_errors():
            self._file.close()
            self._file = open(self.path, "wb")  # noqa: SIM115

    def flush(self) -> None:
        """Hand buffered bytes to the system."""
        with self._wrap_errors():
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._wrap_errors():
            self._file.close()

    def discard(self) -> None:
        """Close the file in any state, and ignore errors."""
        with suppress(OSError):
            self._file.close()

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        with wrap_os_errors(self.target):
            yield


@contextmanager
def wrap_os_errors(target: str | os.PathLike[str]) -> Iterator[None]:
    """Turn operating system errors into an `OutputError` about `target`."""
    try:
        yield
    except OSError as exc:
        folder, reason = Path(target).parent, exc.strerror or str(exc)
        if exc.errno == errno.ENOENT and not folder.exists():
            reason = f"its folder {folder} does not exist"
        raise OutputError(f"{os.fspath(target)}: cannot be written: {reason}") from exc


class _StagedOutput:
    """Base of both kinds of output: discarded on leaving the ``with`` block unless committed."""

    def __init__(self, target: str | os.PathLike[str], *, force: bool, exclude: Iterable[str]) -> None:
        self.target = Path(target)
        self.force = force
        self._excluded_ids = {input_id for path in exclude if (input_id := file_id(path))}
        self._files: list[StagedFile] = []
        self._input_guard = change_detection.InputGuard()
        self._temporaries: list[TemporaryPath] = []
        self._durable = True

    def commit(self) -> None:
        """Move everything that was written to its target; `SourceError` if an input changed while it was read."""
        raise NotImplementedError

    def _discard(self) -> None:
        raise NotImplementedError

    def _close_all(self) -> None:
        for file in self._files:
            file.close()

    def _make_temporary(self, target: Path, *, parent: Path | None = None, is_folder: bool = False) -> TemporaryPath:
        with wrap_os_errors(target):
            self._temporaries.append(TemporaryPath(target, parent=parent, is_folder=is_folder))
        return self._temporaries[-1]

    def _close_and_sync(self, folders: Iterable[Path] = ()) -> None:
        """Close and sync all files, and new folders with them."""
        change_detection.verify_inputs()
        self._close_all()
        if self._durable:
            targets = {file.path: file.target for file in self._files if file.path != file.target}
            parallel_map(lambda path: _sync(path, targets.get(path)), [*targets, *folders], _MAX_PARALLEL_SYNCS)

    def _check_available(self, target: Path) -> None:
        """Raise `OutputError` for a target that is an input, or that exists and must not be replaced."""
        if not os.path.lexists(target):
            return
        if file_id(target) in self._excluded_ids:
            raise OutputError(f"{target}: is the input itself; choose another output")
        if target.is_dir():
            raise OutputError(f"{target}: is a directory")
        if not self.force:
            raise OutputError(f"{target}: exists already ({REPLACE_HINT} replaces it)")

    def _move_into_place(self, staged_path: Path, target: Path) -> None:
        """Rename to the target; unless forced, never replace a file that appeared in the meantime."""
        with wrap_os_errors(target):
            if not self.force:
                try:
                    os.link(staged_path, target)
                except FileExistsError:
                    raise OutputError(f"{target}: exists already ({REPLACE_HINT} replaces it)") from None
                except OSError as exc:
                    if exc.errno not in _LINK_UNSUPPORTED_ERRNOS:
                        raise
                else:
                    os.unlink(staged_path)
                    return
            os.replace(staged_path, target)

    def __enter__(self) -> Self:
        self._input_guard.begin()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.discard()
        self._discard()
        for temporary in self._temporaries:
            temporary.release()
        self._input_guard.end(error)


class FileOutput(_StagedOutput):
    """A file and its sidecars, which appear together.

    Use as a context manager: write to `file` (and to `open_sidecar`), then `commit`.

    Parameters
    ----------
    target
        The file to make. A symbolic link is followed: the file it leads to is replaced, the link stays.
    force
        Replace what exists.
    exclude
        Inputs, which are never replaced, even with `force`.
    """

    def __init__(self, target: str | os.PathLike[str], *, force: bool = False, exclude: Iterable[str] = ()) -> None:
        super().__init__(os.path.realpath(target), force=force, exclude=exclude)
        self.is_device = is_device(self.target)
        self.file = self._stage_file(self.target)

    def open_sidecar(self, suffix: str) -> StagedFile:
        """Open another file, named as the first with `suffix` appended."""
        return self._stage_file(self.target.with_name(self.target.name + suffix))

    def check_sidecar(self, suffix: str) -> None:
        """Raise `OutputError` early if the file with `suffix` appended cannot be created."""
        self._check_available(self.target.with_name(self.target.name + suffix))

    def commit(self) -> None:
        self._close_and_sync()
        for file in self._files:
            if file.path != file.target:
                self._move_into_place(file.path, file.target)
        _sync(self.target.parent, None)

    def _stage_file(self, target: Path) -> StagedFile:
        if self.is_device:
            file = StagedFile(target, target)
        else:
            self._check_available(target)
            file = StagedFile(target, self._make_temporary(target).path)
        self._files.append(file)
        return file

    def _discard(self) -> None:
        for file in self._files:
            if file.path != file.target:
                with suppress(OSError):
                    file.path.unlink()


ENCODING_INDEXES: Final = ("manifest.json", "layers.json")
"""Files that describe a folder of frames and one of layer streams: a folder is one of them, never both."""


def refuse_two_encodings(folder: str | os.PathLike[str]) -> None:
    """Raise `SourceError` for a folder with several of `ENCODING_INDEXES`, as a copy of one into another has."""
    names = [name for name in ENCODING_INDEXES if os.path.isfile(os.path.join(folder, name))]
    if len(names) > 1:
        raise SourceError(
            f"{os.fspath(folder)}: has both {' and '.join(names)}: two encodings, perhaps of different texts; remove "
            f"one, or name the file ({os.path.join(folder, names[0])})"
        )


def _list_indexed_files(folder: Path, indexes: Iterable[str]) -> list[str]:
    """List frames and streams in `folder` that an index of it names; a damaged index names none."""
    names: dict[str, None] = {}
    suffixes = (FRAME_SUFFIX, *LAYER_STREAM_SUFFIXES.values())  # an index that somebody else wrote may name any file
    for index in indexes:
        with suppress(OSError, KvmnnError):
            root = parse_document(read_bounded(folder / index), index)
            arrays, layers = (root.get(key).read_list() if key in root.value else [] for key in ("arrays", "layers"))
            entries = [*chain.from_iterable(array.get("frames").read_list() for array in arrays), *layers]
            names |= dict.fromkeys(entry.get("file").read_file_name() for entry in entries)
    return [name for name in names if name.endswith(suffixes) and (folder / name).is_file()]


def refuse_input_folder(output: str | os.PathLike[str], inputs: Iterable[str]) -> None:
    """Raise `OutputError` for an output that is a folder of the input: what reads it would find two caches in it."""
    folder = os.path.realpath(output)
    if os.path.isdir(folder) and any(os.path.realpath(path) == folder for path in inputs):
        raise OutputError(f"{os.fspath(output)}: is the input itself; choose another output")


class DirectoryOutput(_StagedOutput):
    """A directory of files that is first written elsewhere.

    A new directory appears with all its files, by one rename. Into an existing one the files are moved one by one in
    the order in which they were opened; its other files stay unchanged.

    Parameters
    ----------
    target, force, exclude
        As for `FileOutput`.
    index
        Name of the file that describes the others, if there is one: an old one is removed before the first file is
        moved and the new one is moved last, so that no index ever describes missing files. If it is one of
        `ENCODING_INDEXES`, another of these that is there exists already, and is removed with `force`, as are files
        that only the old one lists: they would be copied with the new ones, and are K and V of another text.
    durable
        Sync the files before they are renamed; False for output that can be recreated: after a power cut, files may be
        incomplete.
    replace_existing
        Replace an existing directory as a whole with `force`; without it, one that is not empty is an error. The caller
        ensures that it is of the same kind.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        force: bool = False,
        exclude: Iterable[str] = (),
        index: str | None = None,
        durable: bool = True,
        replace_existing: bool = False,
    ) -> None:
        exclude = list(exclude)
        super().__init__(os.path.realpath(target), force=force, exclude=exclude)
        self._index = index
        self._indexes = [] if index is None else [index]
        if index in ENCODING_INDEXES:  # readers would take the other one
            self._indexes += [name for name in ENCODING_INDEXES if name != index]
            for name in self._indexes[1:]:
                self._check_available(self.target / name)
        self._replaced_names: list[str] = []
        self._durable = durable
        self._is_merging = self.target.is_dir() and not replace_existing
        self._is_replacing = replace_existing and self.target.is_dir() and any(self.target.iterdir())
        if self._is_replacing:
            self._check_replaceable(exclude)
        if not self.target.is_dir() and os.path.lexists(self.target):
            raise OutputError(f"{self.target}: exists already and is not a directory")
        parent = self.target if self._is_merging else self.target.parent
        self._staging = self._make_temporary(self.target, parent=parent, is_folder=True)
        self._is_mixture = False

    @property
    def staging_folder(self) -> Path:
        """Return the folder that contains the files until they are renamed."""
        return self._staging.path

    def finish_files(self) -> None:
        """Close the files opened so far, so that they can be read in `staging_folder`."""
        self._close_all()

    def _check_replaceable(self, exclude: Iterable[str]) -> None:
        if any(Path(os.path.realpath(path)).is_relative_to(self.target) for path in exclude):
            raise OutputError(f"{self.target}: is the input itself, or holds it; choose another output")
        if not self.force:
            raise OutputError(f"{self.target}: exists already ({REPLACE_HINT} replaces it)")

    def check_names(self, names: Iterable[str]) -> None:
        """Raise `OutputError` early if a file called one of `names` cannot be created."""
        if self._is_merging:
            for name in names:
                self._check_available(self.target / name)

    def replace_files(self, names: Iterable[str]) -> None:
        """With `force`, remove files called `names` when this is committed: they describe what it replaces."""
        self._replaced_names += names

    def open_file(self, name: str) -> StagedFile:
        """Open a file called `name`, which may contain folders, and close the previous one."""
        self.check_names([name])
        for previous_file in self._files[-1:]:
            previous_file.close()
        target, staged_path = self.target / name, self.staging_folder / name
        if staged_path.parent != self.staging_folder:
            with wrap_os_errors(target):
                staged_path.parent.mkdir(parents=True, exist_ok=True)
        file = StagedFile(target, staged_path, is_new=True)
        self._files.append(file)
        return file

    def commit(self) -> None:
        if not self._is_merging:
            self._close_and_sync({self.staging_folder, *(file.path.parent for file in self._files)})
            with wrap_os_errors(self.target):
                self._move_folder()
            if self._durable:
                _sync(self.target.parent, None)
            return
        self._close_and_sync()
        self._publish_files()
        if self._durable:
            _sync(self.target, None)

    def _publish_files(self) -> None:
        """Move the files into place; `kvmnn.cli.signals` delays signals meanwhile, which would leave a mixture."""
        names = [file.target.relative_to(self.target).as_posix() for file in self._files]
        shows_mixture = self._index in ENCODING_INDEXES  # frames without their manifest are refused
        if not shows_mixture:
            with wrap_os_errors(self.target):
                self._staging.mark_as_moving()
        for file, name in zip(self._files, names, strict=True):
            file.path = self.staging_folder / name
        superseded_names = [
            name
            for name in (_list_indexed_files(self.target, self._indexes) if self.force and shows_mixture else ())
            if name not in names
        ]
        for name in (*self._indexes, *self._replaced_names, *superseded_names) if self.force else ():
            with wrap_os_errors(self.target / name), suppress(FileNotFoundError):
                (self.target / name).unlink()
                self._is_mixture = not shows_mixture
        for file in sorted(self._files, key=lambda f: f.target.name == self._index):
            with wrap_os_errors(file.target):
                file.target.parent.mkdir(parents=True, exist_ok=True)
            self._move_into_place(file.path, file.target)
            self._is_mixture = not shows_mixture
        self._is_mixture = False
        remove_superseded(self.target, names)

    def _move_folder(self) -> None:
        if not self._is_replacing:
            os.rename(self.staging_folder, self.target)
            return
        # The old one keeps a name of its own until the new one has its: no sweep removes it if we are killed meanwhile.
        replaced_folder = self.target.with_name(f".{self.target.name}.kvmnn-replaced-{os.getpid()}")
        os.rename(self.target, replaced_folder)
        try:
            os.rename(self.staging_folder, self.target)
        except OSError:
            os.rename(replaced_folder, self.target)
            raise
        shutil.rmtree(replaced_folder, ignore_errors=True)

    def _discard(self) -> None:
        if not self._is_mixture:
            shutil.rmtree(self.staging_folder, ignore_errors=True)


def is_device(target: str | os.PathLike[str]) -> bool:
    """Return whether a path is neither a file nor a directory: what is written to it cannot be read again."""
    return os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target)


def _sync(path: Path, target: Path | None) -> None:
    """Sync a file, which errors call `target`; or a folder (None), if the system can."""
    with wrap_os_errors(target) if target is not None else suppress(OSError):
        handle = os.open(path, _SYNC_OPEN_FLAGS)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
