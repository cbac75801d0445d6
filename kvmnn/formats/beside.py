"""Files that lie beside the arrays of a folder: they travel with the arrays, and are written with them again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from ..arrays.completeness_notes import MAX_COMPLETENESS_BYTES as MAX_COMPLETENESS_BYTES
from ..arrays.source import COMPLETENESS_KEY, SIDECAR_KEY, Source
from ..bundle.beside import MAX_SIDECAR_BYTES, SIDECAR_NAMES, dump_sidecars, parse_sidecars
from ..errors import OutputError, SourceError
from ..files.json_document import read_bounded
from ..files.names import COMPLETENESS_FILE
from ..files.output import DirectoryOutput


def add_sidecars(source: Source, folder: str) -> None:
    """Add what lies beside its arrays to the metadata of a source of arrays of `folder`.

    What cannot be read, or is larger than `MAX_SIDECAR_BYTES`, is left out with a note; but not the completeness of the
    arrays.

    Raises
    ------
    SourceError
        Where the completeness cannot be read.
    """
    _add_completeness(source, folder)
    sidecars = {}
    for name in SIDECAR_NAMES:
        path = Path(folder, name)
        if path.is_file():
            try:
                sidecars[name] = read_bounded(path, MAX_SIDECAR_BYTES)
            except (SourceError, FileNotFoundError) as error:
                source.notes.append(f"frames of these arrays will be without {name}: {error}")
    if sidecars:
        source.metadata[SIDECAR_KEY] = _dump_sidecars_cached(tuple(sidecars.items()))
        source.opened_files += tuple(str(Path(folder, name)) for name in sidecars)


def _add_completeness(source: Source, folder: str) -> None:
    """Add the text of ``completeness.json`` to the metadata, where the folder has one."""
    path = Path(folder, COMPLETENESS_FILE)
    if not path.is_file():
        return
    try:
        data = read_bounded(path, MAX_COMPLETENESS_BYTES)
    except FileNotFoundError:
        return
    source.metadata[COMPLETENESS_KEY] = data.decode("utf-8", "replace")
    source.opened_files += (str(path),)


@lru_cache(maxsize=1)
def _dump_sidecars_cached(files: tuple[tuple[str, bytes], ...]) -> str:
    """Compressed once for all arrays of a folder."""
    return dump_sidecars(dict(files))


def read_sidecar(source: Source, name: str) -> tuple[bytes, str] | None:
    """The bytes of such a file, and what messages call it, where an input has it or was made of what had it.

    Raises
    ------
    ManifestError, SourceError
        Where it cannot be read.
    """
    if not source.inputs:
        return None
    path = source.inputs[0]
    embedded_data = parse_sidecars(source.metadata, path).get(name)
    if embedded_data is None and len(source.inputs) > 1:
        return None
    file_path = Path(path, name)
    if embedded_data is not None:
        return embedded_data, str(file_path) if file_path.is_file() else f"{path}: its {name}"
    try:
        return read_bounded(file_path, MAX_SIDECAR_BYTES), str(file_path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def collect_folder_sidecars(metadata: Mapping[str, str], label: str) -> dict[str, bytes]:
    """Return the files that a folder of arrays gets for this metadata, by name; errors as for `parse_sidecars`."""
    completeness_text = metadata.get(COMPLETENESS_KEY)
    return parse_sidecars(metadata, label) | (
        {} if completeness_text is None else {COMPLETENESS_FILE: completeness_text.encode()}
    )


def write_sidecars(directory: DirectoryOutput, metadata: Mapping[str, str] | None) -> list[str]:
    """Write such files into a directory of arrays, and read them back; their names. The caller commits."""
    files = collect_folder_sidecars(metadata or {}, str(directory.target))
    for name, data in files.items():
        file = directory.open_file(name)
        file.write(data)
        file.close()
        if read_bounded(file.path, max(MAX_SIDECAR_BYTES, len(data))) != data:
            raise OutputError(f"{file.target}: does not read back as it was written")
    return list(files)
