"""Write arrays to prefix-cache files that the engine loads: data, markers, and kvmnn's JSON sidecar next to them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial

from ..._util.dataclass import dataclass
from ..._util.parallel import Progress, parallel_map, resolve_threads
from ..._util.text import LOSSLESS, LOSSY, format_rate, pluralize
from ...arrays.array import LazyArray
from ...arrays.cast import CastStats, merge_cast_stats
from ...arrays.layers import LayerArray, require_common_geometry
from ...arrays.llama_transforms import Transform, has_lossy_inverse
from ...arrays.source import CAST_TEXT, join_losses, list_losses, qualify_label
from ...dtypes import PART_LETTERS, PARTS, Part
from ...errors import KvmnnError, OptionError
from ...files.atomic import DirectoryOutput, StagedFile, wrap_os_errors
from ...files.file_names import list_with_contents
from ...files.mapped_file import MappedFile
from ...files.schema import Record, json_key
from ...packed.cache_info import (
    CACHE_SIDECAR_SUFFIX,
    CacheInfo,
    LayerInfo,
    StateLayer,
    build_cache_document,
    format_cache_summary,
    format_utilisation,
)
from ...packed.layout import PackLayout
from ..key_rotation import RerotationResult
from ..writer import ReadBackError
from .packed_files import (
    check_leftover_layers,
    format_data_name,
    format_warning_lines,
    join_warnings,
    list_loading_files,
    list_position_warnings,
    list_prefix_files,
    validate_prefix_name,
)
from .packed_io import PackedPartWriter
from .row_hashes import dump_prefix_document

_READ_CHUNK_BYTES = 8 << 20
_COMPARE_CHUNK_BYTES = 1 << 20
"""Bytes of arrays in memory that are compared at a time."""


@dataclass(frozen=True, kw_only=True)
class PackResult(Record):
    """Result of writing a prefix cache."""

    #: Output directory.
    output: str
    #: Duration of writing and reading back.
    seconds: float
    #: One line for each inferred property of the input.
    notes: tuple[str, ...] = ()
    #: Changes by the cast; none if the dtype is unchanged.
    cast: CastStats
    #: Quantised types that the words were dequantised from.
    dequantised: tuple[str, ...] = ()
    #: Transforms of llama.cpp that were inverted first.
    undone: tuple[Transform, ...] = ()
    #: Rotation of K to the first positions; None if not requested.
    rerotated: RerotationResult | None = field(default=None, metadata={"omit": True})
    #: What was compared, as text.
    proof: str = "every file read back and compared"
    #: Sentence about lost parts of the restored files; empty if none are known.
    left_out: str = ""
    #: Description of the cache.
    info: CacheInfo = field(metadata={"key": "cache", "convert": build_cache_document})

    @property
    def warnings(self) -> list[str]:
        """Return lines about problems when MNN loads the files; empty for none."""
        return list_position_warnings(self.info)

    @property
    @json_key("warnings", after="rerotated")
    def _joined_warnings(self) -> list[str]:
        return join_warnings(self.warnings)

    @property
    @json_key(after="output")
    def label(self) -> str | None:
        """Return ``LOSSLESS`` if the files contain every number unchanged; ``LOSSY`` if some were rounded before.

        ``LOSSY`` also for words of MNN's int8 caches; None for other dequantised blocks that were not rounded
        afterwards. Where K and V had lost something before, ``LOSSLESS copy of LOSSY K and V``.
        """
        is_rotation_lossy = self.rerotated is not None and self.rerotated.label == LOSSY
        is_int8 = "int8" in self.dequantised
        if has_lossy_inverse(self.undone) or self.left_out or is_rotation_lossy or is_int8:
            return LOSSY
        label = None if self.dequantised and self.cast.label == LOSSLESS else self.cast.label
        return qualify_label(label, list_losses(self.info.loss))

    def __str__(self) -> str:
        cast_text = "" if self.cast.source == self.cast.target else str(self.cast)
        left_out_text = f"not all of the files is kept: {self.left_out}" if self.left_out else ""
        texts = [
            f"dequantised from {', '.join(self.dequantised)}" if self.dequantised else "",
            f"undone: {', '.join(self.undone)}" if self.undone else "",
            "K rotated" if self.rerotated and self.rerotated.tokens else "",
            "; ".join(filter(None, [left_out_text, cast_text])) or self.proof,
        ]
        verification_text = ", ".join(filter(None, texts))
        lines = [
            f"{self.output}: prefix {self.info.name!r}, {format_cache_summary(self.info)}",
            f"  {format_utilisation(self.info)}",
            f"  {f'{self.label} ({verification_text})' if self.label else verification_text}"
            f"{format_rate(self.info.live_bytes, self.seconds)}",
            *(f"  {line}" for line in list_losses(self.info.loss)),
        ]
        if all(layer.capacity == layer.tokens for layer in self.info.layers):
            sidecar_name = f"{self.info.name}{CACHE_SIDECAR_SUFFIX}"
            lines.append(f"  for kvmnn, {sidecar_name} has what files without room do not show: copy it with them")
        lines += [f"  {self.rerotated}"] if self.rerotated else []
        return "\n".join([*lines, *format_warning_lines(self.warnings)])


def build_prefix_info(
    arrays: Sequence[LayerArray],
    layout: PackLayout,
    name: str,
    *,
    capacity: int | None = None,
    reference_info: CacheInfo | None = None,
    states: tuple[StateLayer, ...] = (),
) -> CacheInfo:
    """Return the description of a prefix cache of `arrays` in `layout`."""
    if reference_info is None or reference_info.is_uniform:
        kv_heads, head_dim, _ = require_common_geometry(arrays)
        if (kv_heads, head_dim) != (layout.kv_heads, layout.head_dim):
            raise KvmnnError(
                f"the arrays have {pluralize(kv_heads, 'kv head')} x {head_dim} dims, the layout {layout.kv_heads} x "
                f"{layout.head_dim}"
            )
    key_arrays = arrays[::2]
    states = reference_info.states if reference_info else states
    layer_numbers = sorted([*(entry.layer for entry in key_arrays), *(state.layer for state in states)])
    if layer_numbers != list(range(len(layer_numbers))):
        raise KvmnnError(f"a prefix cache has all layers from 0 on, these are {layer_numbers[:20]}")
    layers = [
        LayerInfo(layer=entry.layer, tokens=tokens, capacity=tokens, positions=((0, tokens),))
        for entry in key_arrays
        for tokens in [entry.geometry[1]]
    ]
    info = CacheInfo(kind="prefix", name="", layout=layout, layers=tuple(layers), states=states)
    if reference_info:
        if [layer.tokens for layer in reference_info.layers] != [layer.tokens for layer in layers]:
            raise KvmnnError(
                "the description of the cache names other layers or numbers of tokens than the arrays have"
            )
        layers = [
            replace(reference, layer=layer.layer)
            for reference, layer in zip(reference_info.layers, layers, strict=True)
        ]
        info = replace(reference_info, kind="prefix", layout=layout)
    if capacity:
        max_tokens = max(layer.tokens for layer in layers)
        if capacity < max_tokens:
            raise OptionError(f"capacity is {capacity}: expected at least the {max_tokens} tokens of the arrays")
        layers = [replace(layer, capacity=capacity) for layer in layers]
    for layer in layers:
        layout.check_capacity(layer.capacity)
    return replace(info, name=validate_prefix_name(name), layers=tuple(layers))


@dataclass(frozen=True, kw_only=True)
class PrefixWriteOptions:
    """Options for writing and verifying the files of a prefix cache."""

    #: Sync the files before they are renamed; unnecessary for output that can be recreated.
    is_durable: bool = True
    #: Compare the files with the arrays in memory instead of hashing.
    compare_in_memory: bool = False
    #: Expected SHA-256 by array name; arrays without one are hashed as they are written.
    array_hashes: Mapping[str, str] = field(default_factory=dict)
    #: Unused bytes of the file of K or V of a layer; zeros for those not listed.
    unused_arrays: Mapping[tuple[int, Part], LazyArray] = field(default_factory=dict)
    #: Expected SHA-256 of the file of K or V of a layer; nothing else of it is compared then.
    file_hashes: Mapping[tuple[int, Part], str] = field(default_factory=dict)
    #: Files written in parallel; None for one per processor. Only without `is_durable`.
    threads: int | None = 1


def write_prefix(
    arrays: Sequence[LayerArray],
    info: CacheInfo,
    output: str,
    *,
    force: bool = False,
    exclude: Iterable[str] = (),
    notes: Sequence[str] = (),
    progress: Progress | None = None,
    write_options: PrefixWriteOptions | None = None,
    losses: Sequence[str] = (),
) -> PackResult:
    """Write the files of a prefix cache into a directory, all or none, and read every file back.

    Parameters
    ----------
    arrays
        K and V of every layer, interleaved, in the order of the layers.
    info
        The description of the cache: `build_prefix_info`.
    force
        Replace files that exist.
    exclude
        Files and directories that are read: never replaced.
    notes
        Notes for the result.
    progress
        Called with bytes of arrays.
    write_options
        How to write; None for durable files, written sequentially, hashed before and after.
    losses
        What the document of the files is to say that K and V have lost, beyond what `info` says; a cast is added.

    Raises
    ------
    ReadBackError
        When a file does not read back as it was written.
    OutputError
        When files exist, or files of more layers of the same name would stay next to the new ones.
    KvmnnError
        When a cast makes finite numbers infinite.
    """
    start_time = time.perf_counter()
    write_options = write_options or PrefixWriteOptions()
    directory = DirectoryOutput(
        output,
        force=force,
        exclude=list_with_contents(exclude),
        durable=write_options.is_durable,
    )
    with directory:
        cast = _write_prefix_files(arrays, info, directory, progress, write_options, losses)
        directory.commit()
    seconds = time.perf_counter() - start_time
    return PackResult(output=output, info=info, cast=cast, seconds=seconds, notes=tuple(notes))


def _write_prefix_files(
    arrays: Sequence[LayerArray],
    info: CacheInfo,
    output: DirectoryOutput,
    progress: Progress | None,
    write_options: PrefixWriteOptions,
    losses: Sequence[str],
) -> CastStats:
    names = list_prefix_files(info)
    output.check_names(names)
    output.replace_files(list_loading_files(info))  # MNN loads no mixture if this is killed
    check_leftover_layers(output.target, info, names)
    dtype = require_common_geometry(arrays)[2] if info.is_uniform else arrays[0].array.dtype
    lock = threading.Lock()

    def write_array(job: tuple[int, LayerArray]) -> CastStats:
        array_index, entry = job
        with lock:
            file = output.open_file(format_data_name(info.name, entry.layer, PART_LETTERS[entry.part]))
        cast_stats = CastStats(dtype, info.layout.dtype)
        if not _write_part(entry, info, file, cast_stats, write_options, partial(_report_progress, progress, lock)):
            raise ReadBackError(f"{file.target}: does not give back what was packed into it", array_index)
        if cast_stats.overflowed:  # an engine would compute with infinities, and no number
            raise KvmnnError(
                f"layer {entry.layer}: {cast_stats.overflowed:,} numbers of its {entry.part}s are beyond "
                f"{cast_stats.target}: expected a layout of {cast_stats.source}"
            )
        return cast_stats

    num_threads = 1 if write_options.is_durable else resolve_threads(write_options.threads)
    cast = merge_cast_stats(parallel_map(write_array, enumerate(arrays), num_threads))
    for state in info.states:
        for part in PARTS:
            file = output.open_file(format_data_name(info.name, state.layer, PART_LETTERS[part]))
            _write_state_file(
                write_options.unused_arrays[state.layer, part], file, write_options.file_hashes[state.layer, part]
            )
    output.finish_files()
    for name in names[len(arrays) + 2 * len(info.states) :]:
        file = output.open_file(name)
        if name.endswith(CACHE_SIDECAR_SUFFIX):
            rounding = f"{CAST_TEXT}{cast.source} to {cast.target}" if cast.label == LOSSY else ""
            recorded_info = add_losses(info, *losses, rounding)
            file.write(dump_prefix_document(recorded_info, output.staging_folder))
    return cast


def add_losses(info: CacheInfo, *losses: str) -> CacheInfo:
    """Return the description of a cache with further sentences about what K and V have lost; empty ones are none."""
    return replace(info, loss=join_losses(info.loss, *losses))


def _report_progress(progress: Progress | None, lock: threading.Lock, nbytes: int) -> None:
    if progress:
        with lock:
            progress(nbytes)


def _write_state_file(array: LazyArray, file: StagedFile, expected_hash: str) -> None:
    """Write a file of state unchanged, and compare its hash."""
    with wrap_os_errors(file.target), open(file.path, "r+b") as handle:
        for chunk in array.iter_chunks(_READ_CHUNK_BYTES):
            handle.write(chunk.data)
    if MappedFile(file.path).compute_sha256() != expected_hash:
        raise ReadBackError(f"{file.target}: does not give back what was written to it", 0)


def _write_part(
    entry: LayerArray,
    info: CacheInfo,
    file: StagedFile,
    cast_stats: CastStats,
    write_options: PrefixWriteOptions,
    progress: Progress,
) -> bool:
    """Write K or V of a layer to its file, and return whether it reads back correctly."""
    layer = next(layer_info for layer_info in info.layers if layer_info.layer == entry.layer)
    part_writer = PackedPartWriter(
        file.target,
        file.path,
        info.get_layer_layout(layer),
        entry.part,
        capacity=layer.capacity,
        num_tokens=layer.tokens,
        order="token" if entry.token_major else "head",
    )
    file_key = (entry.layer, entry.part)
    expected_file_hash = write_options.file_hashes.get(file_key)
    is_compared = write_options.compare_in_memory or entry.token_major
    is_cast = cast_stats.source != cast_stats.target
    expected_array_hash = None if is_cast else write_options.array_hashes.get(entry.array.name)
    input_hasher = None if is_compared or expected_array_hash or expected_file_hash else hashlib.sha256()
    unused_array = write_options.unused_arrays.get(file_key)
    for chunk in unused_array.iter_chunks(_READ_CHUNK_BYTES) if unused_array else ():
        part_writer.fill_unused(chunk)
        del chunk
    for chunk in entry.array.iter_chunks(_READ_CHUNK_BYTES):
        elements = cast_stats.cast(chunk)
        if input_hasher:
            input_hasher.update(elements.data)
        part_writer.write_rows(elements)
        progress(chunk.size)
        del chunk, elements
    part_writer.rewind()
    if expected_file_hash:
        is_verified = MappedFile(file.path).compute_sha256() == expected_file_hash
    elif is_compared:
        comparison_cast = CastStats(cast_stats.source, cast_stats.target)
        is_verified = all(
            part_writer.matches_next(comparison_cast.cast(chunk))
            for chunk in entry.array.iter_chunks(_COMPARE_CHUNK_BYTES)
        )
    else:
        output_hasher = hashlib.sha256()
        for chunk in part_writer.iter_chunks():
            output_hasher.update(chunk.data)
        is_verified = output_hasher.hexdigest() == (input_hasher.hexdigest() if input_hasher else expected_array_hash)
    part_writer.close()
    return is_verified
