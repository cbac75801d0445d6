"""Arrays into prefix-cache files that the engine loads: data, markers, and the document kvmnn leaves beside them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...arrays.casting import Cast
from ...arrays.layers import LayerArray, common_geometry
from ...dtypes import PART_LETTERS, Part
from ...errors import KvmnnError
from ...files.names import with_contents
from ...files.output import DirectoryOutput
from ...packed import cache_info
from ...packed.cache_info import SIDE_SUFFIX, CacheInfo, LayerInfo
from ...packed.layout import PackLayout
from ...packed.summary import cache_document, cache_summary, live_share
from ...text import at_rate
from ...threads.pipeline import Progress
from .packed_reading import packed_runs
from .packed_writing import PackedPart
from .prefix import check_leftovers, check_name, data_name, file_names

_STEP = 8 << 20


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
    """

    output: str
    info: CacheInfo
    cast: Cast
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """``LOSSLESS`` if every word came back from the files as it went in; ``LOSSY`` if words were narrowed."""
        return self.cast.label

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "output": self.output,
            "label": self.label,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "cast": self.cast.to_dict(),
            "cache": cache_document(self.info),
        }

    def __str__(self) -> str:
        same = self.cast.source == self.cast.target
        proof = "every file read back and compared" if same else str(self.cast)
        return (
            f"{self.output}: prefix {self.info.name!r}, {cache_summary(self.info)}\n"
            f"  {live_share(self.info)}\n"
            f"  {self.label} ({proof}){at_rate(self.info.live_bytes, self.seconds)}"
        )


def prefix_info(
    arrays: Sequence[LayerArray],
    layout: PackLayout,
    name: str,
    *,
    capacity: int | None = None,
    like: CacheInfo | None = None,
) -> CacheInfo:
    """What a prefix cache of `arrays` in `layout` will be.

    Parameters
    ----------
    capacity
        Tokens to leave room for; None for the capacity of `like`, or for the number of tokens.
    like
        Where positions, token ids and model come from, if it has the same layers and tokens.

    Raises
    ------
    KvmnnError
        When arrays and layout do not agree, layers are missing, the capacity is too small, or the name is none.
    """
    heads, dims, _ = common_geometry(arrays)
    if (heads, dims) != (layout.kv_heads, layout.head_dim):
        raise KvmnnError(
            f"the arrays have {heads} kv heads x {dims} dims, the layout {layout.kv_heads} x {layout.head_dim}"
        )
    keys = arrays[::2]
    if [entry.layer for entry in keys] != list(range(len(keys))):
        raise KvmnnError(f"a prefix cache has all layers from 0 on, these are {[entry.layer for entry in keys][:20]}")
    if like and [each.tokens for each in like.layers] != [entry.geometry[1] for entry in keys]:
        raise KvmnnError("the description of the cache names other layers or numbers of tokens than the arrays have")
    layers = []
    for number, entry in enumerate(keys):
        tokens = entry.geometry[1]
        known = like.layers[number] if like else None
        layers.append(
            LayerInfo(
                layer=number,
                tokens=tokens,
                capacity=capacity or (known.capacity if known else tokens),
                positions=known.positions if known else ((0, tokens),),
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
    )


def write_prefix(
    arrays: Sequence[LayerArray],
    info: CacheInfo,
    output: str,
    *,
    force: bool = False,
    protect: Iterable[str] = (),
    notes: Sequence[str] = (),
    progress: Progress | None = None,
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

    Raises
    ------
    KvmnnError
        When a file does not give back what was put into it.
    OutputError
        When files exist, or files of more layers of the same name would stay beside the new ones.
    """
    started = time.perf_counter()
    directory = DirectoryOutput(output, force=force, protect=with_contents(protect), index=info.name + SIDE_SUFFIX)
    with directory:
        cast = _write_files(arrays, info, directory, progress)
        directory.commit()
    seconds = time.perf_counter() - started
    return Packed(output=output, info=info, cast=cast, seconds=seconds, notes=tuple(notes))


def _write_files(
    arrays: Sequence[LayerArray], info: CacheInfo, output: DirectoryOutput, progress: Progress | None
) -> Cast:
    names = file_names(info)
    output.check_names(names)
    check_leftovers(output.target, info, names)
    cast = Cast(common_geometry(arrays)[2], info.layout.dtype)
    for entry in arrays:
        _write_part(entry, info, output, cast, progress)
    for name in names[len(arrays) :]:
        file = output.file(name)
        if name.endswith(SIDE_SUFFIX):
            file.write((cache_info.to_json(info) + "\n").encode())
    return cast


def _write_part(
    entry: LayerArray, info: CacheInfo, output: DirectoryOutput, cast: Cast, progress: Progress | None
) -> None:
    layer = info.layers[entry.layer]
    file = output.file(data_name(info.name, entry.layer, PART_LETTERS[entry.part]))
    part = PackedPart(
        file.target,
        file.path,
        info.layout,
        entry.part,
        capacity=layer.capacity,
        tokens=layer.tokens,
        order="token" if entry.token_major else "head",
    )
    went_in = hashlib.sha256()
    for run in entry.array.pieces(_STEP):
        words = cast.run(run)
        went_in.update(words.data)
        part.write(words)
        if progress:
            progress(run.size)
        del run, words
    part.rewind()
    if entry.token_major:
        again = Cast(cast.source, cast.target)
        proved = all(part.holds(again.run(run)) for run in entry.array.pieces(_STEP))
    else:
        proved = went_in.digest() == _digest(str(file.path), info, layer, entry.part)
    part.close()
    if not proved:
        raise KvmnnError(f"{file.target}: does not give back what was packed into it (please report this)")


def _digest(path: str, info: CacheInfo, layer: LayerInfo, part: Part) -> bytes:
    digest = hashlib.sha256()
    for run in packed_runs(path, info.layout, part, layer, _STEP):
        digest.update(run.data)
        del run
    return digest.digest()
