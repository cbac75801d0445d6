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
from ...arrays.layers import sort
from ...checks import whole
from ...dense import Rotary
from ...dtypes import Bytes
from ...errors import KvmnnError
from ...files.output import DirectoryOutput, StagedFile, failures
from ...packed import cache_info
from ...packed.cache import PackedCache
from ...packed.cache_info import SIDE_SUFFIX, CacheInfo, LayerInfo, Ranges
from ...packed.reserve import as_pairs, check_reserve
from ...packed.summary import cache_document, cache_summary, live_share
from ...text import LOSSY, UNCHANGED
from ...threads.pipeline import Progress
from ..row_rotation import Rerotated, rerotation_document
from .compaction_plans import CompactionPlan
from .describing import Described
from .packing import prefix_name
from .positions import holds_gaps, position_warnings, warning_lines, warning_sentences
from .prefix import check_leftovers, check_name, file_names
from .rerotation import Rerotation, plan_rerotation


@dataclass(frozen=True, kw_only=True)
class Compacted:
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
    rerotated: Rerotated | None = None

    @property
    def warnings(self) -> list[str]:
        """Lines about what goes wrong when MNN loads the files; none where nothing does."""
        return position_warnings(self.after)

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
            **rerotation_document(self.rerotated),
            "warnings": warning_sentences(self.warnings),
            "cache": cache_document(self.after),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.output}: prefix {self.after.name!r}, {cache_summary(self.after)}",
            f"  {live_share(self.after)}",
            f"  {self.label}: {self.tokens_after:,} of {self.tokens_before:,} tokens of all layers stay; the files "
            "keep their size (repack or pack --capacity makes them smaller)",
        ]
        lines += [f"  {self.rerotated}"] if self.rerotated else []
        return "\n".join([*lines, *warning_lines(self.warnings)])


def apply(layer: LayerInfo, plan: CompactionPlan) -> LayerInfo:
    """What a layer holds after a plan.

    Raises
    ------
    KvmnnError
        For a plan that the engine would not apply in full, or that leaves nothing.
    """
    remove = layer.tokens if plan.remove is None else plan.remove
    where = f"layer {layer.layer}"
    try:
        pairs = as_pairs(plan.reserve)
        check_reserve(layer.tokens, whole(remove, "remove", 0), pairs, quantised=False)
    except KvmnnError as exc:
        raise KvmnnError(f"{where}: {exc}") from None
    start = layer.tokens - remove
    kept = [(0, start), *((start + begin, size) for begin, size in pairs)]
    tokens = start + sum(size for _, size in pairs)
    if not tokens:
        raise KvmnnError(f"{where}: nothing would stay of its {layer.tokens} tokens")
    text_positions = None if layer.text_positions is None else _select(layer.text_positions, kept)
    return replace(layer, tokens=tokens, positions=_select(layer.positions, kept), text_positions=text_positions)


def _select(positions: Ranges, kept: Sequence[tuple[int, int]]) -> Ranges:
    return cache_info.joined(run for begin, size in kept for run in _slice(positions, begin, size))


def _slice(positions: Ranges, begin: int, size: int) -> Iterator[tuple[int, int]]:
    """The runs of the tokens ``[begin, begin + size)``, counted in stored tokens."""
    passed = 0
    for first, length in positions:
        low, high = max(begin - passed, 0), min(begin + size - passed, length)
        if low < high:
            yield first + low, high - low
        passed += length


def compact(
    described: Described,
    plans: Sequence[CompactionPlan],
    output: str,
    *,
    name: str | None = None,
    dialect: str = "fork",
    rerotate: bool = False,
    rope: Rotary | str | None = None,
    model: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Compacted:
    """Copy packed files into a directory and compact the copies, all or none.

    Parameters
    ----------
    described
        The files: `describe_packed`.
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
    started = time.perf_counter()
    info = described.info
    name = prefix_name(name, info)
    with DirectoryOutput(output, force=force, protect=described.files.opened, index=name + SIDE_SUFFIX) as directory:
        each = _each_layer(described, plans, dialect)
        layers = tuple(apply(layer, plan) for layer, plan in zip(info.layers, each, strict=True))
        after = replace(info, kind="prefix", name=check_name(name), layers=layers, next_position=None)
        if info.continues_at > after.continues_at and holds_gaps(after):
            after = replace(after, next_position=info.continues_at)
        rerotation = _plan_rerotation(described, after, rope, model) if rerotate else None
        after = rerotation.info if rerotation else after
        _write_files(described, each, after, directory, dialect, rerotation, progress)
        directory.commit()
    return Compacted(
        input=described.files.path,
        output=output,
        before=info,
        after=after,
        seconds=time.perf_counter() - started,
        notes=(*described.notes, *(rerotation.rope.notes if rerotation else ())),
        rerotated=rerotation.result if rerotation else None,
    )


def _plan_rerotation(
    described: Described, after: CacheInfo, rope: Rotary | str | None, model: str | None
) -> Rerotation:
    keys = [entry for entry in sort(described.to_source().arrays) if entry.part == "key"]
    return plan_rerotation(after, keys, rope, model, where=described.files.path, before=described.info)


def _each_layer(described: Described, plans: Sequence[CompactionPlan], dialect: str) -> list[CompactionPlan]:
    """A plan for each layer, checked as far as it can be without applying it."""
    info = described.info
    require_complete(described.completeness, described.files.path, "a compacted cache")
    if info.layout.quantised:
        raise KvmnnError(f"{described.files.path}: an int8 cache: the engine keeps no part of a window of those")
    if len(plans) not in (1, len(info.layers)):
        raise KvmnnError(f"{len(plans)} plans for {len(info.layers)} layers: expected one, or one for each")
    each = list(plans) if len(plans) == len(info.layers) else list(plans) * len(info.layers)
    if dialect == "upstream":
        _check_upstream(info, each)
    return each


def _write_files(
    described: Described,
    plans: Sequence[CompactionPlan],
    after: CacheInfo,
    output: DirectoryOutput,
    dialect: str,
    rerotation: Rerotation | None,
    progress: Progress | None,
) -> None:
    info = described.info
    names = file_names(after)
    output.check_names(names)
    check_leftovers(output.target, after, names)
    for files, before, layer, plan in zip(described.files.layers, info.layers, after.layers, plans, strict=True):
        key, value = (
            _copied(path, output.file(target))
            for path, target in zip((files.key, files.value), names[2 * layer.layer :], strict=False)
        )
        _compact_layer(key, value, info, before, plan, layer.tokens, dialect)
        if rerotation:
            with _mapped(key) as keys:
                rerotation.rotate_file(layer.layer, keys, info.layout_of(layer), layer.capacity)
        if progress:
            progress(files.key_bytes + files.value_bytes)
    for file_name in names[2 * len(after.layers) :]:
        file = output.file(file_name)
        if file_name.endswith(SIDE_SUFFIX):
            file.write((cache_info.to_json(after) + "\n").encode())


def _check_upstream(info: CacheInfo, plans: Sequence[CompactionPlan]) -> None:
    for layer, plan in zip(info.layers, plans, strict=True):
        if plan.remove in (None, layer.tokens):
            raise KvmnnError(
                f"layer {layer.layer}: MNN 3.6.1 drops the cache where remove is all {layer.tokens} tokens: "
                "remove fewer, or choose the fork's dialect"
            )


def _copied(path: str, file: StagedFile) -> StagedFile:
    with failures(file.target):
        shutil.copyfile(path, file.path)
    return file


def _compact_layer(
    key: StagedFile,
    value: StagedFile,
    info: CacheInfo,
    layer: LayerInfo,
    plan: CompactionPlan,
    tokens: int,
    dialect: str,
) -> None:
    with _mapped(key) as keys, _mapped(value) as values:
        cache = PackedCache.from_buffers(
            info.layout_of(layer), keys, values, layer.tokens, capacity=layer.capacity, copy=False, dialect=dialect
        )
        cache.realloc(layer.tokens if plan.remove is None else plan.remove, plan.reserve)
        if len(cache) != tokens:
            raise KvmnnError(f"layer {layer.layer}: {len(cache)} tokens stayed, the plan keeps {tokens}")
        del cache


@contextmanager
def _mapped(file: StagedFile) -> Iterator[Bytes]:
    with failures(file.target), open(file.path, "r+b") as handle:
        mapping = mmap.mmap(handle.fileno(), 0)
    yield np.frombuffer(mapping, np.uint8)
    mapping.flush()
