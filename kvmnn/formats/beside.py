"""Files that lie beside the arrays of a folder: they travel with the arrays, and are written with them again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from ..arrays.completeness_notes import MAX_BYTES as MAX_COMPLETENESS_BYTES
from ..arrays.source import BESIDE_KEY, COMPLETENESS_KEY, Source
from ..bundle.beside import MAX_BYTES, NAMES, files_beside, to_json
from ..errors import OutputError, SourceError
from ..files.json_document import read_bounded
from ..files.names import COMPLETENESS
from ..files.output import DirectoryOutput


def note_down(source: Source, folder: str) -> None:
    """Add what lies beside its arrays to the metadata of a source of arrays of `folder`.

    What cannot be read, or is larger than `MAX_BYTES`, is left out with a note; but not the completeness of the arrays.

    Raises
    ------
    SourceError
        Where the completeness cannot be read.
    """
    _read_completeness(source, folder)
    found = {}
    for name in NAMES:
        path = Path(folder, name)
        if path.is_file():
            try:
                found[name] = read_bounded(path, MAX_BYTES)
            except (SourceError, FileNotFoundError) as error:
                source.notes.append(f"frames of these arrays will be without {name}: {error}")
    if found:
        source.metadata[BESIDE_KEY] = _document(tuple(found.items()))
        source.opened += tuple(str(Path(folder, name)) for name in found)


def _read_completeness(source: Source, folder: str) -> None:
    """Add the text of ``completeness.json`` to the metadata, where the folder has one."""
    path = Path(folder, COMPLETENESS)
    if not path.is_file():
        return
    try:
        text = read_bounded(path, MAX_COMPLETENESS_BYTES)
    except FileNotFoundError:
        return
    source.metadata[COMPLETENESS_KEY] = text.decode("utf-8", "replace")
    source.opened += (str(path),)


@lru_cache(maxsize=1)
def _document(files: tuple[tuple[str, bytes], ...]) -> str:
    """Compressed once for all arrays of a folder."""
    return to_json(dict(files))


def text_beside(source: Source, name: str) -> tuple[bytes, str] | None:
    """The bytes of such a file, and what messages call it, where an input has it or was made of what had it.

    Raises
    ------
    ManifestError, SourceError
        Where it cannot be read.
    """
    if not source.inputs:
        return None
    path = source.inputs[0]
    kept = files_beside(source.metadata, path).get(name)
    if kept is None and len(source.inputs) > 1:
        return None
    file = Path(path, name)
    if kept is not None:
        return kept, str(file) if file.is_file() else f"{path}: its {name}"
    try:
        return read_bounded(file, MAX_BYTES), str(file)
    except (FileNotFoundError, NotADirectoryError):
        return None


def folder_files(metadata: Mapping[str, str], where: str) -> dict[str, bytes]:
    """Return the files that a folder of arrays gets for this metadata, by name; errors as for `files_beside`."""
    text = metadata.get(COMPLETENESS_KEY)
    return files_beside(metadata, where) | ({} if text is None else {COMPLETENESS: text.encode()})


def write_beside(directory: DirectoryOutput, metadata: Mapping[str, str] | None) -> list[str]:
    """Write such files into a directory of arrays, and read them back; their names. The caller commits."""
    files = folder_files(metadata or {}, str(directory.target))
    for name, data in files.items():
        file = directory.file(name)
        file.write(data)
        file.close()
        if read_bounded(file.path, max(MAX_BYTES, len(data))) != data:
            raise OutputError(f"{file.target}: does not read back as it was written")
    return list(files)
