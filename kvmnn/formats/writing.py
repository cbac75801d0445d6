"""Arrays into files of the format that their names say, streamed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from ..arrays.completeness_notes import write_note
from ..arrays.engine_cache import EngineCache
from ..arrays.engine_notes import noted
from ..arrays.named_array import ArrayInfo
from ..arrays.source import BESIDE_KEY, COMPLETENESS_KEY, OF_THE_WHOLE, Source
from ..bundle.beside import NAMES, TOKEN_IDS, without_beside
from ..errors import OutputError
from ..files.names import COMPLETENESS, file_names, is_directory
from ..files.output import DirectoryOutput, FileOutput, StagedFile
from . import npy
from .array_formats import array_format
from .beside import folder_files, write_beside
from .npy_folder import SUFFIX
from .npz import comment_of
from .raw import own_bytes, write_raw
from .reading import positions_of_engine
from .rereading import Hashed, Written, read_back
from .sinks import Runs, Writer, beginnings


def metadata_for(source: Source, output: str) -> dict[str, str]:
    """What a file of this name can say of a source: all, or without token ids, or its completeness alone."""
    return _metadata_for(source, output)[0]


def _metadata_for(source: Source, output: str) -> tuple[dict[str, str], bool]:
    """Return the metadata, and whether more than the completeness fits."""
    full = noted(source)
    if _is_folder(source, output):
        return full | positions_of_engine(source), True
    if PurePath(output).suffix.lower() != ".npz" or comment_of(full) is not None:
        return full, True
    cache = source.engine_cache and replace(source.engine_cache, token_ids=None)
    fewer = noted(replace(source, engine_cache=cache, metadata=without_beside(source.metadata, TOKEN_IDS)))
    if comment_of(fewer) is not None:
        return fewer, True
    if COMPLETENESS_KEY not in full:
        return fewer, False
    texts = [full[COMPLETENESS_KEY], *([write_note(source.completeness, [])] if source.completeness else [])]
    shorter = [{COMPLETENESS_KEY: text} for text in texts]
    return next((each for each in shorter if comment_of(each) is not None), fewer), False


def lost(source: Source, output: str) -> Iterator[str]:
    """What a file or folder of this name has no place for of what is known of a cache: its engine, tokens, ids."""
    cache, suffix = source.engine_cache, PurePath(output).suffix.lower()
    is_folder = is_directory(output) or not suffix
    if suffix == ".safetensors" and not is_folder:
        return
    said, fits = _metadata_for(source, output)
    is_npz = suffix == ".npz" and not is_folder
    says = is_npz and fits
    if says and said != noted(source):
        yield f"{output} does not say the token ids, .safetensors does"
    elif not says and cache is not None and _says_more(cache):
        which = "" if is_folder and BESIDE_KEY in said else ", nor which tokens it holds"
        yield f"{output} does not say of what engine it is{which}: .safetensors and .npz do"
    elif not says and not is_folder and BESIDE_KEY in said:
        yield f"{output} does not say which tokens of which text it holds: .safetensors and folders of arrays do"
    if COMPLETENESS_KEY in noted(source) and not is_folder and not (is_npz and comment_of(said)):
        yield f"{output} does not record which state of the model it lacks: .safetensors, .npz and folders do"


def _is_folder(source: Source, output: str) -> bool:
    """Return whether the arrays are written to a folder, as `write_arrays` does."""
    return is_directory(output) or (len(source) != 1 and not PurePath(output).suffix)


def left_there(folder: str, files: Sequence[str], metadata: Mapping[str, str] | None) -> Iterator[str]:
    """A line where a folder had other arrays, or said which tokens they are: all is read with the `files` written."""
    written = {*files, *folder_files(metadata or {}, folder)}
    known = (*NAMES, COMPLETENESS)
    others = [name for name in sorted(os.listdir(folder)) if name.endswith(SUFFIX) or name in known] if files else []
    left = [name for name in others if name not in written]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        yield f"{folder}: {left[0]}{more} lay there before, and what reads the folder takes them for a part of it"


def _says_more(cache: EngineCache) -> bool:
    """Whether there is something to know of a cache that arrays do not say."""
    return bool(cache.altered or cache.perhaps_altered or cache.token_ids is not None or not cache.is_whole)


def write_arrays(
    output: str,
    arrays: Sequence[ArrayInfo],
    runs: Runs,
    metadata: dict[str, str] | None = None,
    *,
    hashes: Sequence[str] | None = None,
    force: bool = False,
    protect: Iterable[str] = (),
    threads: int | None = None,
) -> list[str]:
    """Write arrays into one file, or into a directory as one ``.npy`` file each; complete or not at all.

    What was written is read again and compared before it gets its name; a device (``/dev/null``) cannot be.

    Parameters
    ----------
    output
        A directory (ends in a slash, or is one, or has no suffix where there are several arrays), or a file in the
        format that its suffix says: ``.npy``, ``.npz``, ``.safetensors``, else the raw words of one array.
    arrays
        What they are.
    runs
        Their bytes, array after array: ``(array index, little-endian bytes in memory order)``.
    metadata
        For the formats that have a place for it; what lies beside arrays (`beside`) for a directory.
    hashes
        The SHA-256 that the bytes of each array must have; None for whatever `runs` gives.
    force
        Replace files that exist.
    protect
        Inputs, which are never replaced.
    threads
        For reading again; None for all processors.

    Returns
    -------
    The names of the files in a directory, one for each array; none for a file.

    Raises
    ------
    OutputError
        When the format cannot hold the arrays, a file exists, it cannot be written, or does not read back
        (`ReadBackError`).
    """
    if is_directory(output) or (len(arrays) != 1 and not PurePath(output).suffix):
        hashed = Hashed(runs, len(arrays))
        with DirectoryOutput(output, force=force, protect=protect) as directory:
            files = write_directory(directory, arrays, hashed if hashes is None else runs)
            format_ = array_format(files[0].target.name)
            each = zip(files, arrays, strict=True)
            written = [Written(file.path, file.target, format_, [array]) for file, array in each]
            read_back(written, hashes or hashed.hashes, threads)
            write_beside(directory, metadata)
            directory.commit()
        return [file.target.name for file in files]
    writer_for(output, arrays)  # or it cannot hold them
    with FileOutput(output, force=force, protect=protect) as out:
        text = {key: text for key, text in (metadata or {}).items() if key not in OF_THE_WHOLE}
        write_file(out, output, arrays, runs, text, hashes=hashes, threads=threads)
        out.commit()
    return []


def write_file(
    out: FileOutput,
    name: str,
    arrays: Sequence[ArrayInfo],
    runs: Runs,
    metadata: dict[str, str],
    *,
    hashes: Sequence[str] | None = None,
    threads: int | None = None,
) -> None:
    """Write arrays into `out.file`, in the format that `name` says, and read them back; not from a device.

    The file is closed then; the caller commits `out`. Parameters and errors as for `write_arrays`.
    """
    hashed = Hashed(runs, len(arrays))
    writer_for(name, arrays)(out.file, arrays, hashed if hashes is None else runs, metadata)
    out.file.close()
    if not out.is_device:
        read_back([Written(out.file.path, out.target, array_format(name), arrays)], hashes or hashed.hashes, threads)


def writer_for(name: str, arrays: Sequence[ArrayInfo]) -> Writer:
    """The writer for a file called `name`: by its suffix, raw words for all that are not known.

    Raises
    ------
    OutputError
        When there are several arrays and the format holds one.
    """
    known = array_format(name)
    if len(arrays) != 1 and not (known and known.holds_many):
        raise OutputError(
            f"{name}: cannot hold {len(arrays)} arrays: use a .npz or .safetensors file or a directory (-o DIR/)"
        )
    return known.write if known else write_raw


def write_directory(directory: DirectoryOutput, arrays: Sequence[ArrayInfo], runs: Runs) -> list[StagedFile]:
    """Write one ``.npy`` file for each array; the files, all closed. The caller commits `directory`."""
    names = file_names([array.name for array in arrays], ".npy")
    directory.check_names(names)
    files: list[StagedFile] = []
    for index, data, begins in beginnings(runs):
        if begins:
            files.append(directory.file(names[index]))
            npy.write_header(files[-1], arrays[index])
        files[-1].write(own_bytes(arrays[index], data).data)
        del data
    for file in files[-1:]:
        file.close()
    return files
