"""Compaction of packed files as the engine compacts its caches: in place, stale rows and all, the files keeping their
size. What the engine forgets, the true position of every kept token, goes into the document beside the files."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from ...checks import whole
from ...errors import KvmnnError
from ...files.output import DirectoryOutput, StagedFile, failures
from ...packed import cache_info
from ...packed.cache import PackedCache
from ...packed.cache_info import CacheInfo, LayerInfo, Ranges
from ...packed.reserve import Pair, as_pairs, check_reserve
from ...threads.pipeline import Progress
from .describing import Described
from .prefix import check_leftovers, check_name, file_names


@dataclass(frozen=True)
class Plan:
    """What stays of one layer.

    Parameters
    ----------
    remove
        Tokens at the tail that form the window; None for all there are.
    reserve
        Pairs ``(begin, size)`` of the window that stay, ascending; begin counts from the window's start.
    """

    remove: int | None
    reserve: tuple[Pair, ...]


def apply(layer: LayerInfo, plan: Plan) -> LayerInfo:
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
    positions = tuple(run for begin, size in kept for run in _slice(layer.positions, begin, size))
    tokens = start + sum(size for _, size in pairs)
    if not tokens:
        raise KvmnnError(f"{where}: nothing would stay of its {layer.tokens} tokens")
    return replace(layer, tokens=tokens, positions=cache_info.joined(positions))


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
    plans: Sequence[Plan],
    output: DirectoryOutput,
    *,
    name: str | None = None,
    dialect: str = "fork",
    progress: Progress | None = None,
) -> CacheInfo:
    """Copy packed files and compact the copies; the caller commits `output`.

    Parameters
    ----------
    plans
        One for each layer, or one for all.
    name
        Of the prefix that is written; None keeps the name there is.
    dialect
        Whose rules decide (`kvmnn.PackedCache`).

    Raises
    ------
    KvmnnError
        For plans that cannot be applied as they stand; nothing is written then.
    """
    info = described.info
    if info.layout.quantised:
        raise KvmnnError(f"{described.files.path}: an int8 cache: the engine keeps no part of a window of those")
    if len(plans) not in (1, len(info.layers)):
        raise KvmnnError(f"{len(plans)} plans for {len(info.layers)} layers: expected one, or one for each")
    each = list(plans) if len(plans) == len(info.layers) else list(plans) * len(info.layers)
    if dialect == "upstream":
        _check_upstream(info, each)
    after = replace(
        info,
        kind="prefix",
        name=check_name(info.name if name is None else name),
        layers=tuple(apply(layer, plan) for layer, plan in zip(info.layers, each, strict=True)),
    )
    names = file_names(after)
    output.check_names(names)
    check_leftovers(output.target, after, names)
    for files, before, layer, plan in zip(described.files.layers, info.layers, after.layers, each, strict=True):
        key, value = (
            _copied(path, output.file(target))
            for path, target in zip((files.key, files.value), names[2 * layer.layer :], strict=False)
        )
        _compact_layer(key, value, info, before, plan, layer.tokens, dialect)
        if progress:
            progress(files.key_bytes + files.value_bytes)
    for name in names[2 * len(after.layers) :]:
        file = output.file(name)
        if name.endswith(cache_info.SIDE_SUFFIX):
            file.write((cache_info.to_json(after) + "\n").encode())
    return after


def _check_upstream(info: CacheInfo, plans: Sequence[Plan]) -> None:
    for layer, plan in zip(info.layers, plans, strict=True):
        if plan.remove in (None, layer.tokens):
            raise KvmnnError(
                f"layer {layer.layer}: MNN 3.6.1 drops the whole cache where remove is all {layer.tokens} tokens: "
                "remove fewer, or choose the fork's dialect"
            )


def _copied(path: str, file: StagedFile) -> StagedFile:
    with failures(file.target):
        shutil.copyfile(path, file.path)
    return file


def _compact_layer(
    key: StagedFile, value: StagedFile, info: CacheInfo, layer: LayerInfo, plan: Plan, tokens: int, dialect: str
) -> None:
    with _mapped(key) as keys, _mapped(value) as values:
        cache = PackedCache.from_buffers(
            info.layout, keys, values, layer.tokens, capacity=layer.capacity, copy=False, dialect=dialect
        )
        cache.realloc(layer.tokens if plan.remove is None else plan.remove, plan.reserve)
        if len(cache) != tokens:
            raise KvmnnError(f"layer {layer.layer}: {len(cache)} tokens stayed, the plan keeps {tokens}")
        del cache


@contextmanager
def _mapped(file: StagedFile) -> Iterator[np.ndarray]:
    with failures(file.target), open(file.path, "r+b") as handle:
        mapping = mmap.mmap(handle.fileno(), 0)
    yield np.frombuffer(mapping, np.uint8)
    mapping.flush()
