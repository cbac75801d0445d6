"""Codecs of a whole cache: layer streams by a model's profile, and the codecs of arrays on its arrays one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import dense
from .._util.dataclass import dataclass
from .._util.packages import get_version
from .._util.parallel import parallel_map, resolve_threads
from ..arrays.array import Chunk
from ..arrays.cast import to_float32
from ..arrays.layer_cache import LayerCache
from ..arrays.source import Source
from ..bundle.dense import search_rope, split_into_groups
from ..dense.rope import RopeConfig, RopeFrequencies
from ..dtypes import Elements
from ..errors import KvmnnError, OptionError
from ..formats.layer_streams.codecs import CacheEncoder, LayerStreamOptions, decode_cache
from ..formats.layer_streams.writer import LayerReader
from ..profiles import Profile
from .codecs import DENSE_CODEC_NAME, BenchCodec, LossStats


@dataclass(frozen=True)
class CacheSample:
    """The first tokens of all layers of a cache.

    Attributes
    ----------
    layers
        Contiguous arrays ``[kv_head, token, head_dim]``.
    words
        Their bytes, 1-D uint8: K and V of layer 0, then of layer 1 ...
    """

    layers: tuple[LayerCache, ...]
    words: Chunk
    dtype: str
    cache_bytes: int

    def split(self, words: Chunk) -> Iterator[LayerCache]:
        """Yield the layers that bytes in the order of `words` are, without a copy."""
        position = 0
        for layer in self.layers:
            arrays = []
            for elements in (layer.keys, layer.values):
                part = words[position : position + elements.nbytes]
                arrays.append(part.view(elements.dtype).reshape(elements.shape))
                position += elements.nbytes
            yield replace(layer, keys=arrays[0], values=arrays[1])

    def iter_arrays(self, words: Chunk) -> Iterator[Elements]:
        """Yield K and V of each layer."""
        for layer in self.split(words):
            yield layer.keys
            yield layer.values


def read_sample(source: Source, max_bytes: int) -> CacheSample:
    """Read the first tokens of all layers of a source: as many as fit into `max_bytes`, or all (0).

    Raises
    ------
    OptionError
        For arrays that are not K and V of layers, and fewer bytes than a token of all layers takes.
    """
    reader = LayerReader(source)
    caches = [cache for cache, _ in reader]
    cache_bytes = sum(cache.nbytes for cache in caches)
    num_tokens = max(cache.tokens for cache in caches)
    if max_bytes and cache_bytes > max_bytes:
        num_tokens = max_bytes * num_tokens // cache_bytes
    if not num_tokens:
        raise OptionError(f"{max_bytes:,} bytes are less than a token of all layers (--sample-bytes)")
    layers = tuple(_cut(cache, num_tokens) for cache in caches)
    arrays = [_to_bytes(elements) for layer in layers for elements in (layer.keys, layer.values)]
    return CacheSample(layers, np.concatenate(arrays), reader.dtype, cache_bytes)


def _cut(cache: LayerCache, num_tokens: int) -> LayerCache:
    return replace(
        cache,
        keys=np.ascontiguousarray(cache.keys[:, :num_tokens]),
        values=np.ascontiguousarray(cache.values[:, :num_tokens]),
        positions=cache.positions[..., :num_tokens],
        ends=cache.ends[..., :num_tokens],
    )


def _to_bytes(elements: Elements) -> Chunk:
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)


def join_layers(layers: Sequence[LayerCache]) -> Chunk:
    """Return the bytes of layers as `CacheSample.words` has them."""
    return np.concatenate([_to_bytes(elements) for layer in layers for elements in (layer.keys, layer.values)])


def apply_by_array(codec: BenchCodec, sample: CacheSample) -> BenchCodec:
    """Make a codec of arrays one of a cache: each K and each V is encoded by itself."""

    def encode(words: Chunk) -> list[Any]:
        return [codec.encode(_to_bytes(elements)) for elements in sample.iter_arrays(words)]

    def decode(payloads: Sequence[Any]) -> Chunk:
        decoded = [codec.decode(payload) for payload in payloads]
        return np.concatenate(
            [
                item.reshape(-1).view(np.uint8) if isinstance(item, np.ndarray) else np.frombuffer(item, np.uint8)
                for item in decoded
            ]
        )

    return replace(
        codec, encode=encode, decode=decode, count_bytes=lambda payloads: sum(map(codec.count_bytes, payloads))
    )


GetRope = Callable[[int], RopeConfig | RopeFrequencies | None]
"""How K of a layer is rotated."""


def make_rope_getter(source: Source, profile: Profile | None) -> GetRope:
    """Return how K is rotated: as a profile says, else as is found by trial."""
    if profile is not None:
        return lambda layer: profile.layers[layer].rope
    rope = search_rope(source)
    return lambda _: rope


def make_dense_cache_codec(sample: CacheSample, get_rope: GetRope, threads: int | None) -> BenchCodec:
    """Make a codec for dense streams of a cache: one of K and one of V of each layer, in order."""
    num_threads = resolve_threads(threads)

    def encode_group(layers: Sequence[LayerCache]) -> list[bytes]:
        has_rows = layers[0].positions.ndim == 1
        ropes = [get_rope(layer.layer) if has_rows else None for layer in layers]
        rotations: list[Any] = []
        for rope in ropes:
            rotations += [rope.rotation if isinstance(rope, RopeFrequencies) else rope, None]
        return dense.encode_many(
            [elements for layer in layers for elements in (layer.keys, layer.values)],
            dtype=sample.dtype,
            rotary=rotations,
            positions=layers[0].positions if any(rotations) else None,
        )

    def encode(words: Chunk) -> list[bytes]:
        groups = _group_layers(list(sample.split(words)))
        return [stream for streams in parallel_map(encode_group, groups, num_threads) for stream in streams]

    def decode(streams: Sequence[bytes]) -> Chunk:
        return np.concatenate([_to_bytes(elements) for elements in parallel_map(dense.decode, streams, num_threads)])

    return BenchCodec(
        DENSE_CODEC_NAME, get_version(), encode, decode, count_bytes=lambda streams: sum(map(len, streams))
    )


def _group_layers(layers: Sequence[LayerCache]) -> list[list[LayerCache]]:
    """Split layers into groups as `encode --codec dense` does; those of a group contain the same tokens."""
    remaining, groups = iter(layers), []
    for sizes in split_into_groups([layer.nbytes for layer in layers]):
        group: list[LayerCache] = []
        for layer in itertools.islice(remaining, len(sizes)):
            if group and not np.array_equal(group[0].positions, layer.positions):
                groups.append(group)
                group = []
            group.append(layer)
        groups.append(group)
    return groups


def make_layer_codec(sample: CacheSample, profile: Profile, options: LayerStreamOptions) -> BenchCodec:
    """Make a codec for layer streams, on one thread; lossy ones are compared with what the encoder promises."""
    is_lossy = options.codec == "transform"
    last_encoder: list[CacheEncoder] = []
    promised: list[LayerCache] = []

    def encode(words: Chunk) -> list[bytes]:
        encoder = CacheEncoder(profile, options)
        encoded = list(encoder.encode(sample.split(words)))
        second_encoder = encoder.create_second_try()
        if second_encoder is not None:
            second_encoded = list(second_encoder.encode(sample.split(words)))
            if second_encoder.is_nearer_than(encoder):
                encoder, encoded = second_encoder, second_encoded
        last_encoder[:], promised[:] = [encoder], [layer.decoded for layer in encoded] if is_lossy else []
        return [layer.stream for layer in encoded]

    def decode(streams: Sequence[bytes]) -> Chunk:
        return join_layers(list(decode_cache(streams, profile, options.codec)))

    def check_loss(decoded: Chunk, words: Chunk) -> LossStats:
        if not np.array_equal(decoded, join_layers(promised)):
            raise KvmnnError("the streams did not decode to what the encoder promises")
        return LossStats(last_encoder[0].predicted_kl, _find_largest_error(decoded, words, sample.dtype))

    settings = "".join(f" {name}={value:g}" for name, value in options.settings.items())
    settings += " attention" if options.attention is not None else ""
    return BenchCodec(
        f"{options.codec}{settings}",
        get_version(),
        encode,
        decode,
        count_bytes=lambda streams: sum(map(len, streams)),
        check_loss=check_loss if is_lossy else None,
    )


def _find_largest_error(decoded: Chunk, words: Chunk, dtype: str) -> float:
    """Return the largest difference of two arrays' finite numbers."""
    largest, step = 0.0, 1 << 22
    for start in range(0, words.size, step):
        restored, original = (to_float32(side[start : start + step], dtype) for side in (decoded, words))
        is_finite = np.isfinite(restored) & np.isfinite(original)
        differences = np.abs(restored[is_finite] - original[is_finite])
        largest = max(largest, float(differences.max(initial=0.0)))
    return largest
