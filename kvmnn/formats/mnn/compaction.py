"""Compaction of packed files as the engine compacts its caches: in place, stale rows and all, the files keeping their
size. What the engine forgets, the true position of every kept token, goes into the document beside the files."""

from __future__ import annotations

import mmap
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...arrays.completeness import require_complete
from ...arrays.layers import collect_layer_arrays
from ...checks import validate_int
from ...dense import RopeConfig
from ...dtypes import Bytes
from ...errors import KvmnnError
from ...files.output import DirectoryOutput, StagedFile, wrap_os_errors
from ...packed import cache_info
from ...packed.cache import PackedCache
from ...packed.cache_info import CACHE_SIDECAR_SUFFIX, CacheInfo, LayerInfo, PositionRuns
from ...packed.reserve import check_reserve, parse_pairs
from ...packed.summary import build_cache_document, format_cache_summary, format_utilisation
from ...text import LOSSY, UNCHANGED
from ...threads.pipeline import Progress
from ..row_rotation import RerotationResult, build_rerotation_document
from .compaction_plans import CompactionPlan
from .describing import PackedCacheReader
from .packing import resolve_prefix_name
from .positions import format_warning_lines, has_gaps, join_warnings, list_position_warnings
from .prefix import check_leftover_layers, list_prefix_files, validate_prefix_name
from .rerotation import RerotationPlan, plan_rerotation


@dataclass(frozen=True, kw_only=True)
class CompactResult:
    """A prefix cache that was compacted into a directory.

    Parameters
    ----------
    input, output
        Paths.
    before, after
        What the files held, and what they hold.
    seconds
        Time that it took.
    notes
        One line for each thing about the input that was inferred.
    rerotated
        How K was rotated to the first positions; None where that was not asked for.
    """

    input: str
    output: str
    before: CacheInfo
    after: CacheInfo
    seconds: float
    notes: tuple[str, ...] = ()
    rerotated: RerotationResult | None = None

    @property
    def warnings(self) -> list[str]:
        """Lines about what goes wrong when MNN loads the files; none where nothing does."""
        return list_position_warnings(self.after)

    @property
    def tokens_before(self) -> int:
        """Tokens of all layers before."""
        return sum(layer.tokens for layer in self.before.layers)

    @property
    def tokens_after(self) -> int:
        """Tokens of all layers that stay."""
        return sum(layer.tokens for layer in self.after.layers)

    @property
    def label(self) -> str:
        """``LOSSY`` if any token went or any K was rotated, else ``UNCHANGED``."""
        is_rounded = self.rerotated is not None and self.rerotated.label == LOSSY
        return LOSSY if self.tokens_after < self.tokens_before or is_rounded else UNCHANGED

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "input": self.input,
            "output": self.output,
            "label": self.label,
            "tokens_before": self.tokens_before,
            "tokens_after": self.tokens_after,
            "seconds": self.seconds,
            "notes": list(self.notes),
            **build_rerotation_document(self.rerotated),
            "warnings": join_warnings(self.warnings),
            "cache": build_cache_document(self.after),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.output}: prefix {self.after.name!r}, {format_cache_summary(self.after)}",
            f"  {format_utilisation(self.after)}",
            f"  {self.label}: {self.tokens_after:,} of {self.tokens_before:,} tokens of all layers stay; the files "
            "keep their size (repack or pack --capacity makes them smaller)",
        ]
        lines += [f"  {self.rerotated}"] if self.rerotated else []
        return "\n".join([*lines, *format_warning_lines(self.warnings)])


def apply_plan(layer: LayerInfo, plan: CompactionPlan) -> LayerInfo:
    """What a layer holds after a plan.

    Raises
    ------
    KvmnnError
        For a plan that the engine would not apply in full, or that leaves nothing.
    """
    remove = layer.tokens if plan.remove is None else plan.remove
    label = f"layer {layer.layer}"
    try:
        pairs = parse_pairs(plan.reserve)
        check_reserve(layer.tokens, validate_int(remove, "remove", 0), pairs, is_quantised=False)
    except KvmnnError as exc:
        raise KvmnnError(f"{label}: {exc}") from None
    start = layer.tokens - remove
    kept_ranges = [(0, start), *((start + start_token, size) for start_token, size in pairs)]
    tokens = start + sum(size for _, size in pairs)
    if not tokens:
        raise KvmnnError(f"{label}: nothing would stay of its {layer.tokens} tokens")
    text_positions = None if layer.text_positions is None else _select_runs(layer.text_positions, kept_ranges)
    return replace(
        layer, tokens=tokens, positions=_select_runs(layer.positions, kept_ranges), text_positions=text_positions
    )


def _select_runs(positions: PositionRuns, kept_ranges: Sequence[tuple[int, int]]) -> PositionRuns:
    return cache_info.merge_runs(run for begin, size in kept_ranges for run in _iter_run_slices(positions, begin, size))


def _iter_run_slices(positions: PositionRuns, begin: int, size: int) -> Iterator[tuple[int, int]]:
    """The runs of the tokens ``[begin, begin + size)``, counted in stored tokens."""
    num_passed = 0
    for first, length in positions:
        slice_start, slice_end = max(begin - num_passed, 0), min(begin + size - num_passed, length)
        if slice_start < slice_end:
            yield first + slice_start, slice_end - slice_start
        num_passed += length


def compact(
    reader: PackedCacheReader,
    plans: Sequence[CompactionPlan],
    output: str,
    *,
    name: str | None = None,
    dialect: str = "fork",
    rerotate: bool = False,
    rope: RopeConfig | str | None = None,
    model: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> CompactResult:
    """Copy packed files into a directory and compact the copies, all or none.

    Parameters
    ----------
    reader
        The files: `open_packed`.
    plans
        One for each layer, or one for all.
    output
        The directory; it is made if it is not there.
    name
        Of the prefix that is written; None keeps the name there is.
    dialect
        Whose rules decide (`kvmnn.PackedCache`).
    rerotate
        Rotate K to the positions 0, 1, 2 ..., from which MNN counts on after loading.
    rope, model
        How K is rotated: `kvmnn.Rotary`, or a model that has it; where neither has, it is found by trial.
    force
        Replace files that exist; the inputs are never replaced.
    progress
        Called with bytes of packed files.

    Raises
    ------
    OptionError
        When there is no name.
    KvmnnError
        For plans that cannot be applied as they stand; nothing is written then.
    """
    start_time = time.perf_counter()
    info = reader.info
    name = resolve_prefix_name(name, info)
    with DirectoryOutput(
        output, force=force, exclude=reader.files.opened_files, index=name + CACHE_SIDECAR_SUFFIX
    ) as directory:
        layer_plans = _expand_plans(reader, plans, dialect)
        layers = tuple(apply_plan(layer, plan) for layer, plan in zip(info.layers, layer_plans, strict=True))
        after = replace(info, kind="prefix", name=validate_prefix_name(name), layers=layers, next_position=None)
        if info.next_token_position > after.next_token_position and has_gaps(after):
            after = replace(after, next_position=info.next_token_position)
        rerotation = _plan_reader_rerotation(reader, after, rope, model) if rerotate else None
        after = rerotation.info if rerotation else after
        _write_compacted_files(reader, layer_plans, after, directory, dialect, rerotation, progress)
        directory.commit()
    return CompactResult(
        input=reader.files.path,
        output=output,
        before=info,
        after=after,
        seconds=time.perf_counter() - start_time,
        notes=(*reader.notes, *(rerotation.rope.notes if rerotation else ())),
        rerotated=rerotation.result if rerotation else None,
    )


def _plan_reader_rerotation(
    reader: PackedCacheReader, after: CacheInfo, rope: RopeConfig | str | None, model: str | None
) -> RerotationPlan:
    keys = [entry for entry in collect_layer_arrays(reader.to_source().arrays) if entry.part == "key"]
    return plan_rerotation(after, keys, rope, model, label=reader.files.path, evidence_info=reader.info)


def _expand_plans(reader: PackedCacheReader, plans: Sequence[CompactionPlan], dialect: str) -> list[CompactionPlan]:
    """A plan for each layer, checked as far as it can be without applying it."""
    info = reader.info
    require_complete(reader.completeness, reader.files.path, "a compacted cache")
    if info.layout.is_quantised:
        raise KvmnnError(f"{reader.files.path}: an int8 cache: the engine keeps no part of a window of those")
    if len(plans) not in (1, len(info.layers)):
        raise KvmnnError(f"{len(plans)} plans for {len(info.layers)} layers: expected one, or one for each")
    layer_plans = list(plans) if len(plans) == len(info.layers) else list(plans) * len(info.layers)
    if dialect == "upstream":
        _check_upstream(info, layer_plans)
    return layer_plans


def _write_compacted_files(
    reader: PackedCacheReader,
    plans: Sequence[CompactionPlan],
    after: CacheInfo,
    output_folder: DirectoryOutput,
    dialect: str,
    rerotation: RerotationPlan | None,
    progress: Progress | None,
) -> None:
    info = reader.info
    names = list_prefix_files(after)
    output_folder.check_names(names)
    check_leftover_layers(output_folder.target, after, names)
    for files, before, layer, plan in zip(reader.files.layers, info.layers, after.layers, plans, strict=True):
        key, value = (
            _copy_file(path, output_folder.open_file(target))
            for path, target in zip((files.key, files.value), names[2 * layer.layer :], strict=False)
        )
        _compact_layer(key, value, info, before, plan, layer.tokens, dialect)
        if rerotation:
            with _open_mapped(key) as keys:
                rerotation.rotate_file(layer.layer, keys, info.get_layer_layout(layer), layer.capacity)
        if progress:
            progress(files.key_bytes + files.value_bytes)
    for file_name in names[2 * len(after.layers) :]:
        file = output_folder.open_file(file_name)
        if file_name.endswith(CACHE_SIDECAR_SUFFIX):
            file.write((cache_info.dump_cache_info(after) + "\n").encode())


def _check_upstream(info: CacheInfo, plans: Sequence[CompactionPlan]) -> None:
    for layer, plan in zip(info.layers, plans, strict=True):
        if plan.remove in (None, layer.tokens):
            raise KvmnnError(
                f"layer {layer.layer}: MNN 3.6.1 drops the cache where remove is all {layer.tokens} tokens: "
                "remove fewer, or choose the fork's dialect"
            )


def _copy_file(path: str, file: StagedFile) -> StagedFile:
    with wrap_os_errors(file.target):
        shutil.copyfile(path, file.path)
    return file


def _compact_layer(
    key: StagedFile,
    value: StagedFile,
    info: CacheInfo,
    layer: LayerInfo,
    plan: CompactionPlan,
    expected_tokens: int,
    dialect: str,
) -> None:
    with _open_mapped(key) as keys, _open_mapped(value) as values:
        cache = PackedCache.from_buffers(
            info.get_layer_layout(layer),
            keys,
            values,
            layer.tokens,
            capacity=layer.capacity,
            copy=False,
            dialect=dialect,
        )
        cache.realloc(layer.tokens if plan.remove is None else plan.remove, plan.reserve)
        if len(cache) != expected_tokens:
            raise KvmnnError(f"layer {layer.layer}: {len(cache)} tokens stayed, the plan keeps {expected_tokens}")
        del cache


@contextmanager
def _open_mapped(file: StagedFile) -> Iterator[Bytes]:
    with wrap_os_errors(file.target), open(file.path, "r+b") as handle:
        mapping = mmap.mmap(handle.fileno(), 0)
    yield np.frombuffer(mapping, np.uint8)
    mapping.flush()
