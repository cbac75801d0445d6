"""Encode a cache losslessly with a profile that is learned from this cache alone (docs/profile.md).

A `Source` comes in. The output is a folder of linear streams with their profile, or of dense streams if these are
smaller; the bytes of the profile count as part of the output.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .._util.named_tuple import NamedTuple
from .._util.parallel import Progress
from ..arrays.array import Chunk
from ..arrays.layer_cache import LayerCache
from ..arrays.source import Source
from ..bench import BenchCodec, CacheSample, GetRope, join_layers
from ..bundle import DenseOptions, EncodeOptions, EncodeResult, encode_source
from ..bundle.dense import plan_arrays
from ..bundle.manifest import Manifest
from ..errors import KvmnnError
from ..formats.layer_streams.codecs import LayerStreamOptions
from ..formats.layer_streams.document import ADAPTED_NAME
from ..formats.layer_streams.writer import EncodeLayersResult, LayerReader, encode_layers
from ..linear import build_layer_tables
from ..linear import decode_layers as decode_linear_layers
from ..linear import encode_layers as encode_linear_layers
from ..linear.tables import Arrays, count_weights
from ..profiles import LayerGeometry, Profile, ProfileInfo, Statistics, TextOrigin

ADAPTATION_PASSES = 7
"""How often a cache is read at most: for dense streams, to learn, for two candidates of each kind, for the best one."""
_BELOW_CHOICES = (0, 1)
"""Tables of two layers below are larger than what they save up to some 8,000 tokens, and a third slower to make."""
_MAX_TABLE_FRACTION = 0.2
"""Of a layer's raw bytes: larger tables save nothing, as streams with tables for free save less against dense ones."""


class AdaptedEncoding(NamedTuple):
    """What a cache became, and a sentence about what was compared."""

    result: EncodeResult | EncodeLayersResult
    note: str


class _Candidate(NamedTuple):
    profile: Profile
    below: int
    layer_bytes: list[int]

    @property
    def nbytes(self) -> int:
        """Return the bytes of streams and tables."""
        return sum(self.layer_bytes) + self.profile.nbytes


def encode_adapted(
    source: Source,
    output: str | os.PathLike[str],
    options: EncodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> AdaptedEncoding:
    """Encode a cache losslessly by tables that are learned from it, or as dense streams if these are smaller.

    Tables of the own layer and of the layer below are tried. Layers whose tables are larger than what they save have
    none. The smallest output counts, all tables included: it is never larger than dense streams.

    Parameters
    ----------
    source
        A cache: `kvmnn.open`.
    output
        A folder. It gets layer streams, ``layers.json`` and ``adapted.kvmp``, which every reader finds there, or dense
        streams and ``manifest.json``.
    options
        Of the dense streams; their rotation of K is also that of the tables. `verify` applies to both.
    force
        Replace files that exist.
    progress
        Called with raw bytes, of up to `ADAPTATION_PASSES` times the source.

    Raises
    ------
    OptionError
        When no array can be a dense stream.
    OutputError
        For an output that exists.
    KvmnnError
        As `kvmnn.bundle.encode_source`. Nothing is written then.
    """
    options = options or EncodeOptions()
    options = replace(options, dense=options.dense or DenseOptions())
    dense_options = options.dense
    assert dense_options is not None
    path = os.path.join(os.fspath(output), "")
    best: _Candidate | None = None
    note = ""

    def is_dense_smallest(manifest: Manifest) -> bool:
        nonlocal best, note
        try:
            layer_bytes = _sum_by_layer(source, dense_options, manifest)
            reader = LayerReader(source)
            candidates = _measure_candidates(
                lambda: _iter_caches(reader, progress),
                dense_options.get_rotary,
                layer_bytes,
                Path(source.inputs[0] if source.inputs else "cache").name,
                reader.dtype,
            )
        except KvmnnError as error:
            candidates, note = [], f"tables cannot be learned: {error}"
        else:
            note = _describe(manifest, candidates)
        best = min(candidates, key=lambda candidate: candidate.nbytes, default=None)
        if best is not None and best.nbytes >= manifest.stored_bytes:
            best = None
        return best is None

    encode_result = encode_source(source, path, options, force=force, progress=progress, accept=is_dense_smallest)
    if best is None:
        return AdaptedEncoding(encode_result, note)
    stream_options = LayerStreamOptions(
        codec="profile", profile=ADAPTED_NAME, settings={"below": best.below}, verify=options.verify
    )
    layers_result = encode_layers(source, output, stream_options, adapted=best.profile, force=force, progress=progress)
    return AdaptedEncoding(layers_result, note)


def _sum_by_layer(source: Source, options: DenseOptions, manifest: Manifest) -> Mapping[int, int]:
    """Return the bytes of the dense streams of each layer."""
    plans = plan_arrays(source, options)
    layer_bytes: dict[int, int] = {}
    for array in manifest.arrays:
        for number, frame in enumerate(array.frames):
            plan = plans.get(array.name)
            layer = number if plan is None or plan.layer is None else plan.layer
            layer_bytes[layer] = layer_bytes.get(layer, 0) + frame.bytes
    return layer_bytes


def make_adapted_codec(sample: CacheSample, dense_codec: BenchCodec, get_rope: GetRope) -> BenchCodec:
    """Make a codec that learns tables of a sample each time, as `encode_adapted` does; stored tables count.

    Parameters
    ----------
    dense_codec
        Makes a dense stream of K and one of V of each layer of the sample, in order.
    get_rope
        How K is rotated.
    """

    def encode(words: Chunk) -> _AdaptedStreams:
        layers = list(sample.split(words))
        streams = dense_codec.encode(words)
        dense_bytes = {
            layer.layer: len(key) + len(value)
            for layer, key, value in zip(layers, streams[::2], streams[1::2], strict=True)
        }
        candidates = _measure_candidates(lambda: iter(layers), get_rope, dense_bytes, "cache", sample.dtype)
        best = min(candidates, key=lambda candidate: candidate.nbytes, default=None)
        if best is None or best.nbytes >= sum(dense_bytes.values()):
            return _AdaptedStreams(streams, None)
        return _AdaptedStreams(list(encode_linear_layers(layers, best.profile, below=best.below)), best.profile)

    def decode(adapted: _AdaptedStreams) -> Any:
        if adapted.profile is None:
            return dense_codec.decode(adapted.streams)
        return join_layers(list(decode_linear_layers(adapted.streams, adapted.profile)))

    return replace(
        dense_codec, name="kvmnn dense, adapted", encode=encode, decode=decode, count_bytes=_AdaptedStreams.count_bytes
    )


class _AdaptedStreams(NamedTuple):
    streams: list[bytes]
    #: None for dense streams.
    profile: Profile | None

    def count_bytes(self) -> int:
        return sum(map(len, self.streams)) + (0 if self.profile is None else self.profile.nbytes)


def _measure_candidates(
    get_caches: Callable[[], Iterator[LayerCache]],
    get_rope: GetRope,
    dense_bytes: Mapping[int, int],
    name: str,
    dtype: str,
) -> list[_Candidate]:
    """Learn tables of each number of layers below, and measure them: all, and without those that do not pay."""
    layers, tables_by_below, num_tokens = _learn_tables(get_caches(), get_rope)
    info = ProfileInfo(
        model=name,
        fingerprint=None,
        dtype=dtype,
        texts=(TextOrigin(name="the cache itself", sha256=None, tokens=num_tokens),),
        layers=tuple(layers),
    )
    candidates: list[_Candidate] = []
    for below, tables in tables_by_below.items():
        if not any(tables):
            continue
        candidate = _measure(info, tables, below, get_caches())
        candidates.append(candidate)
        paying = [
            arrays if _count_bytes(arrays) < dense_bytes.get(layer, 0) - candidate.layer_bytes[layer] else {}
            for layer, arrays in enumerate(tables)
        ]
        if any(paying) and list(map(len, paying)) != list(map(len, tables)):
            candidates.append(_measure(info, paying, below, get_caches()))
    return candidates


def _iter_caches(reader: LayerReader, progress: Progress | None) -> Iterator[LayerCache]:
    for cache, _ in reader:
        yield cache
        if progress is not None:
            progress(cache.nbytes)


def _measure(info: ProfileInfo, tables: Sequence[Arrays], below: int, caches: Iterable[LayerCache]) -> _Candidate:
    profile = Profile(info, {name: array for arrays in tables for name, array in arrays.items()})
    return _Candidate(profile, below, list(map(len, encode_linear_layers(caches, profile, below=below))))


def _learn_tables(
    caches: Iterable[LayerCache], get_rope: GetRope
) -> tuple[list[LayerGeometry], dict[int, list[Arrays]], int]:
    """Return the layers, tables by number of layers below and layer, and the tokens; two layers are in memory."""
    layers: list[LayerGeometry] = []
    tables: dict[int, list[Arrays]] = {below: [] for below in _BELOW_CHOICES}
    num_tokens = 0
    lower: LayerCache | None = None
    for cache in caches:
        layers.append(LayerGeometry.from_cache(cache, get_rope(cache.layer)))
        pair = [cache] if lower is None or lower.positions.ndim != 1 else _select_common_tokens(lower, cache)
        geometries = layers[-len(pair) :]
        chosen = [below for below in _BELOW_CHOICES if _can_pay(cache, geometries, below)]
        statistics = Statistics(geometries)
        if chosen:
            statistics.add(pair)
        for below, by_layer in tables.items():
            is_learned = below in chosen and statistics.num_tokens > 0
            by_layer.append(
                build_layer_tables(statistics, len(pair) - 1, below, name_layer=cache.layer) if is_learned else {}
            )
        num_tokens, lower = max(num_tokens, cache.tokens), cache
    return layers, tables, num_tokens


def _select_common_tokens(lower: LayerCache, cache: LayerCache) -> list[LayerCache]:
    """Return two layers with the tokens that both contain; the upper one alone where there are none."""
    if np.array_equal(lower.positions, cache.positions) or cache.positions.ndim != 1:
        return [lower, cache]
    _, *places = np.intersect1d(lower.positions, cache.positions, return_indices=True)
    if len(places[0]) < cache.tokens // 2:
        return [cache]
    return [
        LayerCache(layer=c.layer, keys=c.keys[:, p], values=c.values[:, p], positions=c.positions[p])
        for c, p in zip((lower, cache), places, strict=True)
    ]


def _can_pay(cache: LayerCache, layers: Sequence[LayerGeometry], below: int) -> bool:
    """Return whether tables of a layer, the last one, are small enough; streams of heads' own tokens have none."""
    own_weights = count_weights(tuple(layers), below) - count_weights(tuple(layers[:-1]), below)
    return cache.positions.ndim == 1 and own_weights <= _MAX_TABLE_FRACTION * cache.nbytes


def _count_bytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def _describe(manifest: Manifest, candidates: Sequence[_Candidate]) -> str:
    names = ("each layer alone", "by the layer below")
    smallest = {c.below: c for c in sorted(candidates, key=lambda c: c.nbytes, reverse=True)}
    texts = [
        f"{names[below]} {smallest[below].nbytes:,} ({smallest[below].profile.nbytes:,} of tables)"
        for below in sorted(smallest)
    ]
    if not texts:
        return "--adapt: the cache is too small for tables: dense streams"
    return f"--adapt compared dense streams {manifest.stored_bytes:,} bytes, {', '.join(texts)}: the smallest is stored"
