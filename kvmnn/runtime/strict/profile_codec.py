"""Encode cold rows of a layer as streams by a model's profile: lossless linear ones, or lossy transform streams."""

from __future__ import annotations

import time

import numpy as np

from ...arrays.layer_cache import LayerCache
from ...dtypes import DType, Elements, Positions
from ...errors import KvmnnError, OptionError
from ...linear import decode_layer as decode_linear_layer
from ...linear import encode_layer as encode_linear_layer
from ...linear.model import check_below
from ...profiles import Profile
from ...transform import StepPlan, TransformOptions, get_tables, plan_steps
from ...transform import decode_layer as decode_transform_layer
from ...transform import encode_layer as encode_transform_layer
from ..config import RuntimeConfig
from .codec import KVFrames, SegmentEncodeResult, compute_checksum

_NUM_EXACT_TOKENS = 4
"""Tokens at the beginning of a text that are never rounded: they are attention sinks, whose errors cost most."""


class ProfileRowCodec:
    """Encodes, verifies and decodes rows ``[2, kv_head, token, head_dim]`` of layers, each layer alone.

    Blocks of one layer become cold at other times than those of the layers below, so none is predicted from these.
    """

    needs_positions = True

    def __init__(self, config: RuntimeConfig, dtype: DType, kv_heads: int, head_dim: int) -> None:
        self._profile = config.profile if isinstance(config.profile, Profile) else Profile.read(config.profile or "")
        self._is_lossy, self._layer_numbers = config.is_lossy, config.layer_numbers
        self._shape, self._element_type = (kv_heads, head_dim), dtype.numpy_dtype
        sizes = {(geometry.kv_heads, geometry.head_dim, geometry.value_dim) for geometry in self._profile.layers}
        if sizes != {(kv_heads, head_dim, head_dim)}:
            raise OptionError(
                f"the profile is of layers of {sorted(sizes)} kv heads and dims of K and V: the cache has "
                f"{kv_heads} x {head_dim}"
            )
        self._plan: StepPlan | None = None
        self._options = TransformOptions(kl=config.kl, ratio=config.ratio, bits=config.bits, below=0)
        if self._is_lossy:
            self._plan = plan_steps(get_tables(self._profile), self._options, 1 << 20)
        else:
            check_below(self._profile, 0)

    def encode_segment(self, rows: Elements, layer: int, positions: Positions) -> SegmentEncodeResult:
        """Encode rows of a layer and verify the stream; raise `KvmnnError` if it decodes to anything else."""
        start_ns = time.perf_counter_ns()
        number = self._layer_numbers[layer] if self._layer_numbers else layer
        cache = LayerCache(layer=number, keys=rows[0], values=rows[1], positions=positions)
        expected = cache
        if self._is_lossy:
            num_exact = int((positions < _NUM_EXACT_TOKENS).sum())
            options = TransformOptions(**{**vars(self._options), "first": num_exact})
            encoding = encode_transform_layer(cache, self._profile, (), options, plan=self._plan)
            stream, expected = encoding.data, encoding.decoded
        else:
            stream = encode_linear_layer(cache, self._profile, below=0)
        encoded_ns = time.perf_counter_ns()
        decoded = self._decode_stream(stream)
        for elements, expected_elements in ((decoded.keys, expected.keys), (decoded.values, expected.values)):
            if not np.array_equal(_to_words(elements), _to_words(expected_elements)):
                raise KvmnnError("the stream decodes to other words than it was made of")
        frames = KVFrames(stream, b"", compute_checksum(stream, b""), 0) if len(stream) < rows.nbytes else None
        return SegmentEncodeResult(frames, encoded_ns - start_ns, time.perf_counter_ns() - encoded_ns)

    def decode_into(self, frames: KVFrames, out: Elements) -> None:
        """Write the rows to `out`, ``[2, kv_head, token, head_dim]``."""
        if compute_checksum(frames.key_frame, b"") != frames.checksum:
            raise KvmnnError("its stream was changed in memory")
        cache = self._decode_stream(frames.key_frame)
        out[0], out[1] = cache.keys, cache.values

    def decode(self, frames: KVFrames, count: int) -> Elements:
        """Decode the rows of `count` tokens into a new array; raise the errors of `decode_into`."""
        heads, head_dim = self._shape
        rows = np.empty((2, heads, count, head_dim), self._element_type)
        self.decode_into(frames, rows)
        return rows

    def _decode_stream(self, stream: bytes) -> LayerCache:
        if self._is_lossy:
            return decode_transform_layer(stream, self._profile)
        return decode_linear_layer(stream, self._profile)


def _to_words(elements: Elements) -> Elements:
    return np.ascontiguousarray(elements).view(f"u{elements.dtype.itemsize}")
