"""Write arrays to files in the format of their names, streamed, and read them back before they are renamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path, PurePath

import numpy as np

from .._util.named_tuple import NamedTuple
from .._util.parallel import BackgroundHasher, Progress, parallel_map, resolve_threads
from ..arrays.array import ArrayInfo, Chunk, LazyArray, read_elements
from ..arrays.completeness import dump_completeness_json
from ..arrays.engine_cache import EngineCacheInfo
from ..arrays.engine_metadata import dump_metadata
from ..arrays.source import COMPLETENESS_KEY, LOSSY_KEY, SIDECAR_KEY, WHOLE_FILE_KEYS, Source, parse_cache_info
from ..bundle.passthrough import TOKEN_IDS_NAME, remove_sidecar
from ..errors import KvmnnError, OutputError, UnsuitableOptionError
from ..files.atomic import DirectoryOutput, FileOutput, StagedFile
from ..files.file_names import FOLDER_FILES, is_directory_output, is_folder_output, make_file_names
from ..files.mapped_file import MappedFile, iter_file_chunks
from . import npy
from .base import ArrayChunks, ArrayWriter, FileFormat, mark_first_chunks
from .npy import NPY, NPY_SUFFIX
from .npz import NPZ, build_comment
from .options import ReadOptions
from .raw import convert_to_declared_byte_order, write_raw
from .safetensors import SAFETENSORS
from .sidecars import collect_folder_sidecars, write_sidecars
from .tensor_selection import build_engine_positions_sidecar, build_packed_positions_sidecar

_HASH_CHUNK_BYTES = 8 << 20
_ANY_DTYPE_OPTIONS = ReadOptions(fallback_dtypes=("fp16", "fp32"), decode_frames=False, codes=True)


class ReadBackError(OutputError):
    """A file does not contain what was written to it, or the written bytes are not the expected ones.

    `index` is the number of the array.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class HashingIterator:
    """Chunks that are hashed while iterated; afterwards `hashes` has the SHA-256 of each array."""

    def __init__(self, chunks: ArrayChunks, num_arrays: int) -> None:
        self._chunks = chunks
        self._digests = [hashlib.sha256() for _ in range(num_arrays)]

    def __iter__(self) -> Iterator[tuple[int, Chunk]]:
        with BackgroundHasher() as hasher:
            for index, data in self._chunks:
                hasher.update(self._digests[index], data)
                yield index, data
                hasher.wait()  # the memory of the run is used again for the next
                del data

    @property
    def hashes(self) -> list[str]:
        """Return the hashes in hexadecimal digits."""
        return [digest.hexdigest() for digest in self._digests]


def iter_source_chunks(source: Source, progress: Progress | None) -> Iterator[tuple[int, Chunk]]:
    """Yield the bytes of all arrays as `write_arrays` takes them; `progress` is called with raw bytes."""
    for index, array in enumerate(source.arrays):
        for chunk in array.iter_chunks(_HASH_CHUNK_BYTES):
            yield index, chunk
            if progress:
                progress(chunk.size)
            del chunk


class WrittenFile(NamedTuple):
    """A file that was written but not yet renamed to its target."""

    #: Current path, and path after the commit.
    path: Path
    target: Path
    #: File format; None for raw words.
    format: FileFormat | None
    #: The expected arrays; only one for a format that stores a single array.
    arrays: Sequence[ArrayInfo]


def verify_written(
    written_files: Sequence[WrittenFile], expected: Sequence[str] | Sequence[LazyArray], threads: int | None = None
) -> None:
    """Compare written files with the expected contents: names, shapes, and every byte, by hashes or with arrays."""
    comparisons = [(file, *array_pair) for file in written_files for array_pair in _iter_array_pairs(file)]

    def compare(index: int) -> None:
        file, info, read_array = comparisons[index]
        contents = expected[index]
        try:
            is_equal = (
                _hash_array(read_array) == contents
                if isinstance(contents, str)
                else np.array_equal(read_elements(read_array), read_elements(contents))
            )
        except KvmnnError as error:
            raise _make_unreadable_error(file, error, index) from None
        if not is_equal:
            raise ReadBackError(f"{file.target}: array {info.name!r}: its bytes do not read back as written", index)

    parallel_map(compare, range(len(comparisons)), resolve_threads(threads))


def _iter_array_pairs(file: WrittenFile) -> Iterator[tuple[ArrayInfo, LazyArray]]:
    """Iterate over pairs of the expected array and the array that the file contains."""
    if file.format is None:
        (info,) = file.arrays
        info_fields = {field.name: getattr(info, field.name) for field in fields(ArrayInfo)}
        yield info, LazyArray(**info_fields, reader=partial(iter_file_chunks, file.path, None))
        return
    try:
        arrays = file.format.read_file(MappedFile(file.path), _ANY_DTYPE_OPTIONS).arrays
    except KvmnnError as error:
        raise _make_unreadable_error(file, error, 0) from None
    by_name = {array.name if file.format.is_multi_array else file.arrays[0].name: array for array in arrays}
    if len(arrays) != len(file.arrays):
        raise ReadBackError(f"{file.target}: {len(arrays)} arrays read back of {len(file.arrays)}", 0)
    for info in file.arrays:
        read_array = by_name.get(info.name)
        form = read_array and (read_array.shape, read_array.order, read_array.nbytes)
        if read_array is None or form != (info.shape, info.order, info.nbytes):
            raise ReadBackError(f"{file.target}: array {info.name!r}: does not read back as written", 0)
        yield info, read_array


def _make_unreadable_error(file: WrittenFile, error: KvmnnError, index: int) -> ReadBackError:
    reason = str(error).replace(str(file.path), file.target.name)
    return ReadBackError(f"{file.target}: does not read back: {reason}", index)


def _hash_array(array: LazyArray) -> str:
    digest = hashlib.sha256()
    for chunk in array.iter_chunks(_HASH_CHUNK_BYTES):
        digest.update(chunk.data)
        del chunk
    return digest.hexdigest()


ARRAY_FORMATS = {extension: entry for entry in (NPY, NPZ, SAFETENSORS) for extension in entry.extensions}
"""Formats for writing arrays by file suffix, in lower case."""


def find_array_format(name: str) -> FileFormat | None:
    """Return the format of a file with this name; None for all other names."""
    return ARRAY_FORMATS.get(PurePath(name).suffix.lower())


def build_output_metadata(source: Source, output: str) -> dict[str, str]:
    """Return the metadata that a file of this name can store: all, all but token ids, or the completeness alone."""
    return _fit_output_metadata(source, output)[0]


def _fit_output_metadata(source: Source, output: str) -> tuple[dict[str, str], bool]:
    """Return the metadata, and whether more than the completeness fits."""
    full_metadata = dump_metadata(source)
    if is_folder_output(output, len(source)):
        # A Zarr store has what a packed cache says of its tokens, and its arrays become plain ones.
        info = source.cache or parse_cache_info(source.metadata, " ".join(source.inputs))
        positions = {} if SIDECAR_KEY in full_metadata else build_packed_positions_sidecar(info)
        return full_metadata | build_engine_positions_sidecar(source) | positions, True
    if PurePath(output).suffix.lower() != ".npz" or build_comment(full_metadata) is not None:
        return full_metadata, True
    cache = source.engine_cache and replace(source.engine_cache, token_ids=None)
    reduced_metadata = dump_metadata(
        replace(source, engine_cache=cache, metadata=remove_sidecar(source.metadata, TOKEN_IDS_NAME))
    )
    if build_comment(reduced_metadata) is not None:
        return reduced_metadata, True
    if COMPLETENESS_KEY not in full_metadata:
        return reduced_metadata, False
    short_text = dump_completeness_json(source.completeness, []) if source.completeness else None
    loss = {key: text for key, text in full_metadata.items() if key == LOSSY_KEY}
    for text in filter(None, (full_metadata[COMPLETENESS_KEY], short_text)):
        if build_comment(loss | {COMPLETENESS_KEY: text}) is not None:
            return loss | {COMPLETENESS_KEY: text}, False
    return reduced_metadata, False


def list_lost_information(source: Source, output: str) -> Iterator[str]:
    """List what is known about a cache but cannot be stored under this name: its engine, tokens, ids."""
    cache, suffix = source.engine_cache, PurePath(output).suffix.lower()
    is_folder = is_directory_output(output) or not suffix
    if suffix == ".safetensors" and not is_folder:
        return
    stored_metadata, fits = _fit_output_metadata(source, output)
    is_npz = suffix == ".npz" and not is_folder
    is_recorded = is_directory_output(output) or (is_npz and LOSSY_KEY in stored_metadata)
    if LOSSY_KEY in source.metadata and not is_recorded:
        yield f"{output} does not record that K and V are LOSSY: .safetensors, .npz and folders do"
    is_complete = is_npz and fits
    if is_complete and stored_metadata != dump_metadata(source):
        yield f"{output} does not say the token ids, .safetensors does"
    elif not is_complete and cache is not None and _has_engine_details(cache):
        tokens_text = "" if is_folder and SIDECAR_KEY in stored_metadata else ", nor which tokens it holds"
        yield f"{output} does not say of what engine it is{tokens_text}: .safetensors and .npz do"
    elif not is_complete and not is_folder and SIDECAR_KEY in stored_metadata:
        yield f"{output} does not say which tokens of which text it holds: .safetensors and folders of arrays do"
    if COMPLETENESS_KEY in dump_metadata(source) and not is_folder and not (is_npz and build_comment(stored_metadata)):
        yield f"{output} does not record which state of the model it lacks: .safetensors, .npz and folders do"


def list_stale_files(folder: str, files: Sequence[str], metadata: Mapping[str, str] | None) -> Iterator[str]:
    """Yield a warning if the folder has other arrays, or their token sidecars, that would be read with `files`."""
    written_names = {*files, *collect_folder_sidecars(metadata or {}, folder)}
    other_names = sorted({*os.listdir(folder)} - written_names) if files else []
    stale_names = [name for name in other_names if name.endswith(NPY_SUFFIX) or name in FOLDER_FILES]
    if stale_names:
        more_text = f" and {len(stale_names) - 1} more" if len(stale_names) > 1 else ""
        yield (
            f"{folder}: {stale_names[0]}{more_text} lay there before, and what reads the folder takes them for a part "
            f"of it"
        )


def _has_engine_details(cache: EngineCacheInfo) -> bool:
    """Return whether a cache has properties that its arrays do not record."""
    return bool(cache.altered or cache.perhaps_altered or cache.token_ids is not None or not cache.is_contiguous_prefix)


def write_arrays(
    output: str,
    arrays: Sequence[ArrayInfo],
    chunks: ArrayChunks,
    metadata: dict[str, str] | None = None,
    *,
    hashes: Sequence[str] | None = None,
    compare_with: Sequence[LazyArray] | None = None,
    force: bool = False,
    exclude: Iterable[str] = (),
    threads: int | None = None,
) -> list[str]:
    """Write arrays into one file, or into a directory as one ``.npy`` file each; complete or not at all.

    Each file is read back and compared before it gets its final name; a device (``/dev/null``) cannot be read back.

    Parameters
    ----------
    output
        A directory (ends in a slash, or is one, or has no suffix for several arrays), or a file whose suffix selects
        the format: ``.npy``, ``.npz``, ``.safetensors``, else the raw words of one array.
    arrays
        Names, shapes and dtypes of the arrays.
    chunks
        Their bytes, array after array: ``(array index, little-endian bytes in memory order)``.
    metadata
        Metadata, for formats that can store it; a directory stores it in sidecar files.
    hashes
        The expected SHA-256 of the bytes of each array; None accepts any bytes from `chunks`.
    compare_with
        The arrays, if they are in memory: files are compared with these in place of hashes, which takes less time. A
        directory is not synchronised to the disk then: what is in memory can be written again.
    force
        Replace files that exist.
    exclude
        Inputs, which are never replaced.
    threads
        Number of threads for reading back; None for all processors.

    Returns
    -------
    The names of the files in a directory, one for each array; none for a file.

    Raises
    ------
    OutputError
        When the format cannot store the arrays, a file exists, a file cannot be written, or it does not read back
        (`ReadBackError`).
    """
    if is_folder_output(output, len(arrays)):
        hashing_chunks = HashingIterator(chunks, len(arrays))
        with DirectoryOutput(output, force=force, exclude=exclude, durable=not compare_with) as directory:
            files = write_npy_folder(directory, arrays, chunks if hashes or compare_with else hashing_chunks)
            file_arrays = zip(files, arrays, strict=True)
            written_files = [WrittenFile(file.path, file.target, NPY, [array]) for file, array in file_arrays]
            verify_written(written_files, compare_with or hashes or hashing_chunks.hashes, threads)
            write_sidecars(directory, metadata)
            directory.commit()
        return [file.target.name for file in files]
    select_writer(output, arrays)  # or it cannot hold them
    with FileOutput(output, force=force, exclude=exclude) as output_file:
        text = {key: text for key, text in (metadata or {}).items() if key not in WHOLE_FILE_KEYS}
        write_file(output_file, output, arrays, chunks, text, hashes=hashes, compare_with=compare_with, threads=threads)
        output_file.commit()
    return []


def write_file(
    output_file: FileOutput,
    name: str,
    arrays: Sequence[ArrayInfo],
    chunks: ArrayChunks,
    metadata: dict[str, str],
    *,
    hashes: Sequence[str] | None = None,
    compare_with: Sequence[LazyArray] | None = None,
    threads: int | None = None,
) -> None:
    """Write arrays into `output_file.file`, in the format of `name`, and read them back; not from a device.

    The file is closed then; the caller commits `output_file`. Parameters and errors as for `write_arrays`.
    """
    hashing_chunks = HashingIterator(chunks, len(arrays))
    select_writer(name, arrays)(
        output_file.file, arrays, chunks if hashes or compare_with else hashing_chunks, metadata
    )
    output_file.file.close()
    if not output_file.is_device:
        written_file = WrittenFile(output_file.file.path, output_file.target, find_array_format(name), arrays)
        verify_written([written_file], compare_with or hashes or hashing_chunks.hashes, threads)


def select_writer(name: str, arrays: Sequence[ArrayInfo]) -> ArrayWriter:
    """Select the writer for a file called `name` by its suffix; raw words for unknown suffixes."""
    array_format = find_array_format(name)
    if len(arrays) != 1 and not (array_format and array_format.is_multi_array):
        raise UnsuitableOptionError(
            f"{name}: cannot hold {len(arrays)} arrays: use a .npz or .safetensors file or a directory (-o DIR/)"
        )
    return array_format.write if array_format and array_format.write else write_raw


def write_npy_folder(directory: DirectoryOutput, arrays: Sequence[ArrayInfo], chunks: ArrayChunks) -> list[StagedFile]:
    """Write one ``.npy`` file for each array; return the closed files. The caller commits `directory`."""
    names = make_file_names([array.name for array in arrays], ".npy")
    directory.check_names(names)
    files: list[StagedFile] = []
    for index, data, is_first in mark_first_chunks(chunks):
        if is_first:
            files.append(directory.open_file(names[index]))
            npy.write_header(files[-1], arrays[index])
        files[-1].write(convert_to_declared_byte_order(arrays[index], data).data)
        del data
    for file in files[-1:]:
        file.close()
    return files
