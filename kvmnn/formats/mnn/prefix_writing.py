"""Arrays into prefix-cache files that the engine loads: data, markers, and the document kvmnn leaves beside them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...arrays.casting import Cast, sum_of
from ...arrays.layers import LayerArray, common_geometry
from ...arrays.named_array import NamedArray
from ...arrays.undoing import Undo, rounded
from ...dtypes import PART_LETTERS, PARTS, Part
from ...errors import KvmnnError
from ...files.mapped import MappedFile
from ...files.names import with_contents
from ...files.output import DirectoryOutput, StagedFile, failures
from ...packed import cache_info
from ...packed.cache_info import SIDE_SUFFIX, CacheInfo, LayerInfo, StateLayer
from ...packed.layout import PackLayout
from ...packed.summary import cache_document, cache_summary, live_share
from ...text import LOSSLESS, LOSSY, at_rate, count
from ...threads.pipeline import Progress
from ...threads.pool import map_pulled, resolve_threads
from ..rereading import ReadBackError
from ..row_rotation import Rerotated, rerotation_document
from .packed_writing import PackedPart
from .positions import position_warnings, warning_lines, warning_sentences
from .prefix import check_leftovers, check_name, data_name, file_names

_STEP = 8 << 20
_AGAIN = 1 << 20
"""Bytes of what is in memory that are compared at once."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A prefix cache that was written.

    Parameters
    ----------
    output
        The directory.
    info
        What its files hold.
    cast
        What converting the words changed; nothing where they kept their dtype.
    seconds
        Time that writing and reading back took.
    notes
        One line for each thing about the input that was inferred.
    dequantised
        Types of another engine whose blocks the words were made from.
    undone
        What llama.cpp had done to K and V and was undone first.
    rerotated
        How K was rotated to the first positions; None where that was not asked for.
    proof
        What was compared, for people.
    left_out
        What of the files that are restored was not kept, as a sentence; empty where nothing is known to lack.
    """

    output: str
    info: CacheInfo
    cast: Cast
    seconds: float
    notes: tuple[str, ...] = ()
    dequantised: tuple[str, ...] = ()
    undone: tuple[Undo, ...] = ()
    rerotated: Rerotated | None = None
    proof: str = "every file read back and compared"
    left_out: str = ""

    @property
    def warnings(self) -> list[str]:
        """Lines about what goes wrong when MNN loads the files; none where nothing does."""
        return position_warnings(self.info)

    @property
    def label(self) -> str | None:
        """``LOSSLESS`` if every number came back from the files as it went in; ``LOSSY`` if some were rounded before.

        None where blocks were read as the numbers that they stand for, and nothing was rounded since.
        """
        rerotated = self.rerotated is not None and self.rerotated.label == LOSSY
        if rounded(self.undone) or self.left_out or rerotated:
            return LOSSY
        return None if self.dequantised and self.cast.label == LOSSLESS else self.cast.label

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "output": self.output,
            "label": self.label,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "cast": self.cast.to_dict(),
            "dequantised": list(self.dequantised),
            "undone": list(self.undone),
            **rerotation_document(self.rerotated),
            "warnings": warning_sentences(self.warnings),
            "proof": self.proof,
            "left_out": self.left_out,
            "cache": cache_document(self.info),
        }

    def __str__(self) -> str:
        same = self.cast.source == self.cast.target
        proof = self.proof if same else str(self.cast)
        proof = f"not all of the files that were encoded is kept: {self.left_out}" if self.left_out else proof
        made = f"dequantised from {', '.join(self.dequantised)}" if self.dequantised else ""
        turned = f"undone: {', '.join(self.undone)}" if self.undone else ""
        rotated = "K rotated" if self.rerotated and self.rerotated.tokens else ""
        proof = ", ".join(filter(None, [made, turned, rotated, proof]))
        lines = [
            f"{self.output}: prefix {self.info.name!r}, {cache_summary(self.info)}",
            f"  {live_share(self.info)}",
            f"  {f'{self.label} ({proof})' if self.label else proof}{at_rate(self.info.live_bytes, self.seconds)}",
        ]
        lines += [f"  {self.rerotated}"] if self.rerotated else []
        return "\n".join([*lines, *warning_lines(self.warnings)])


def prefix_info(
    arrays: Sequence[LayerArray],
    layout: PackLayout,
    name: str,
    *,
    capacity: int | None = None,
    like: CacheInfo | None = None,
    states: tuple[StateLayer, ...] = (),
) -> CacheInfo:
    """What a prefix cache of `arrays` in `layout` will be.

    Parameters
    ----------
    capacity
        Tokens to leave room for; None for the capacity of `like`, or for the number of tokens.
    like
        Where positions, token ids and model come from, if it has the same layers and tokens.
    states
        Layers without K and V, where `like` does not say them.

    Raises
    ------
    KvmnnError
        When arrays and layout do not agree, layers are missing, the capacity is too small, or the name is none.
    """
    heads, dims = (layout.kv_heads, layout.head_dim) if like and not like.is_uniform else common_geometry(arrays)[:2]
    if (heads, dims) != (layout.kv_heads, layout.head_dim):
        raise KvmnnError(
            f"the arrays have {count(heads, 'kv head')} x {dims} dims, the layout {layout.kv_heads} x {layout.head_dim}"
        )
    keys = arrays[::2]
    states = like.states if like else states
    numbers = sorted([*(entry.layer for entry in keys), *(state.layer for state in states)])
    if numbers != list(range(len(numbers))):
        raise KvmnnError(f"a prefix cache has all layers from 0 on, these are {numbers[:20]}")
    if like and [each.tokens for each in like.layers] != [entry.geometry[1] for entry in keys]:
        raise KvmnnError("the description of the cache names other layers or numbers of tokens than the arrays have")
    layers = []
    for number, entry in enumerate(keys):
        tokens = entry.geometry[1]
        known = like.layers[number] if like else None
        layers.append(
            LayerInfo(
                layer=entry.layer,
                tokens=tokens,
                capacity=capacity or (known.capacity if known else tokens),
                positions=known.positions if known else ((0, tokens),),
                text_positions=known.text_positions if known else None,
                heads=known.heads if known else None,
            )
        )
    for layer in layers:
        layout.check_capacity(layer.capacity)
    return CacheInfo(
        kind="prefix",
        name=check_name(name),
        layout=layout,
        layers=tuple(layers),
        token_ids=like.token_ids if like else None,
        model=like.model if like else None,
        next_position=like.next_position if like else None,
        states=states,
    )


@dataclass(frozen=True, kw_only=True)
class Making:
    """How the files of a prefix cache are made, and what of them is proved with.

    Parameters
    ----------
    durable
        Bring the files to the disk before they get their names. What can be made again at any time needs it not.
    again
        The arrays are in memory: what reads back is compared with their words, and nothing is hashed.
    hashes
        SHA-256 of arrays by their names, of what has to read back; of arrays that are not named what goes in is hashed.
    rooms
        For K or V of a layer what its file holds besides rows of tokens; zero for those that are not named.
    file_hashes
        SHA-256 that the file of K or V of a layer must have as it reads back; then nothing else of it is compared.
    threads
        Files that are worked on at once; None for as many as there are processors. Only without `durable`.
    """

    durable: bool = True
    again: bool = False
    hashes: Mapping[str, str] = field(default_factory=dict)
    rooms: Mapping[tuple[int, Part], NamedArray] = field(default_factory=dict)
    file_hashes: Mapping[tuple[int, Part], str] = field(default_factory=dict)
    threads: int | None = 1


def write_prefix(
    arrays: Sequence[LayerArray],
    info: CacheInfo,
    output: str,
    *,
    force: bool = False,
    protect: Iterable[str] = (),
    notes: Sequence[str] = (),
    progress: Progress | None = None,
    making: Making | None = None,
) -> Packed:
    """Write the files of a prefix cache into a directory, all or none, and read every file back.

    Parameters
    ----------
    arrays
        K and V of every layer by turns, as `kvmnn.arrays.layers.sort` gives them.
    info
        What the files will hold: `prefix_info`.
    force
        Replace files that exist.
    protect
        Files and directories that are read: never replaced.
    notes
        For the result.
    progress
        Called with bytes of arrays.
    making
        How; None for files on the disk, one after another, hashed before and behind.

    Raises
    ------
    ReadBackError
        When a file does not give back what was put into it.
    OutputError
        When files exist, or files of more layers of the same name would stay beside the new ones.
    """
    started = time.perf_counter()
    making = making or Making()
    directory = DirectoryOutput(
        output, force=force, protect=with_contents(protect), index=info.name + SIDE_SUFFIX, durable=making.durable
    )
    with directory:
        cast = _write_files(arrays, info, directory, progress, making)
        directory.commit()
    seconds = time.perf_counter() - started
    return Packed(output=output, info=info, cast=cast, seconds=seconds, notes=tuple(notes))


def _write_files(
    arrays: Sequence[LayerArray], info: CacheInfo, output: DirectoryOutput, progress: Progress | None, making: Making
) -> Cast:
    names = file_names(info)
    output.check_names(names)
    check_leftovers(output.target, info, names)
    dtype = common_geometry(arrays)[2] if info.is_uniform else arrays[0].array.dtype
    lock = threading.Lock()

    def one(job: tuple[int, LayerArray]) -> Cast:
        number, entry = job
        with lock:
            file = output.file(data_name(info.name, entry.layer, PART_LETTERS[entry.part]))
        cast = Cast(dtype, info.layout.dtype)
        if not _write_part(entry, info, file, cast, making, partial(_tell, progress, lock)):
            raise ReadBackError(f"{file.target}: does not give back what was packed into it", number)
        return cast

    cores = 1 if making.durable else resolve_threads(making.threads)
    casts = map_pulled(one, enumerate(arrays), cores)
    for state in info.states:
        for part in PARTS:
            file = output.file(data_name(info.name, state.layer, PART_LETTERS[part]))
            _write_state(making.rooms[state.layer, part], file, making.file_hashes[state.layer, part])
    for name in names[len(arrays) + 2 * len(info.states) :]:
        file = output.file(name)
        if name.endswith(SIDE_SUFFIX):
            file.write((cache_info.to_json(info) + "\n").encode())
    return sum_of(casts)


def _tell(progress: Progress | None, lock: threading.Lock, nbytes: int) -> None:
    if progress:
        with lock:
            progress(nbytes)


def _write_state(array: NamedArray, file: StagedFile, expected: str) -> None:
    """Write a file of state as it was, and compare its hash."""
    with failures(file.target), open(file.path, "r+b") as handle:
        for run in array.pieces(_STEP):
            handle.write(run.data)
    if _hash_file(file.path) != expected:
        raise ReadBackError(f"{file.target}: does not give back what was written to it", 0)


def _hash_file(path: Path) -> str:
    file, digest = MappedFile(path), hashlib.sha256()
    for run in file.runs(0, file.size, _STEP):
        digest.update(run.data)
    return digest.hexdigest()


def _write_part(
    entry: LayerArray, info: CacheInfo, file: StagedFile, cast: Cast, making: Making, progress: Progress
) -> bool:
    """Whether the file gives back what was written to it."""
    layer = next(each for each in info.layers if each.layer == entry.layer)
    part = PackedPart(
        file.target,
        file.path,
        info.layout_of(layer),
        entry.part,
        capacity=layer.capacity,
        tokens=layer.tokens,
        order="token" if entry.token_major else "head",
    )
    place = (entry.layer, entry.part)
    whole = making.file_hashes.get(place)
    again = making.again or entry.token_major
    expected = None if cast.source != cast.target else making.hashes.get(entry.array.name)
    went_in = None if again or expected or whole else hashlib.sha256()
    for run in making.rooms[place].pieces(_STEP) if place in making.rooms else ():
        part.fill(run)
        del run
    for run in entry.array.pieces(_STEP):
        words = cast.run(run)
        if went_in:
            went_in.update(words.data)
        part.write(words)
        progress(run.size)
        del run, words
    part.rewind()
    if whole:
        proved = _hash_file(file.path) == whole
    elif again:
        once_more = Cast(cast.source, cast.target)
        proved = all(part.holds(once_more.run(run)) for run in entry.array.pieces(_AGAIN))
    else:
        came_out = hashlib.sha256()
        for run in part.runs():
            came_out.update(run.data)
        proved = came_out.hexdigest() == (went_in.hexdigest() if went_in else expected)
    part.close()
    return proved
