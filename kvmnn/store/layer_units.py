"""Units with one stream for K and V of each layer, coded by a model's profile: losslessly, or lossily.

A unit is decoded alone: its streams refer to the decoded layers below them in the same unit, and to no rows before it.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.parallel import parallel_map, resolve_threads
from .._util.text import format_layers
from ..arrays.layer_cache import LayerCache
from ..dtypes import Bytes
from ..errors import KvmnnError, OptionError
from ..formats.layer_streams.codecs import decode_cache, find_largest_below
from ..formats.layer_streams.document import LayerCodec
from ..linear import encode_layer as encode_linear_layer
from ..linear import encode_layers as encode_linear_layers
from ..linear.model import check_below
from ..profiles import Profile
from ..transform import (
    StepPlan,
    TransformOptions,
    choose_layer_exponents,
    get_tables,
    is_stream_of_plan,
    measure_bits_factor,
    plan_steps,
)
from ..transform import encode_layer as encode_transform_layer
from ..transform.header import read_header
from ..transform.steps import DEFAULT_KL, is_loss_doubtful
from .namespace import Namespace, TokenSequence
from .unit import LAYER_CODECS, DamagedUnitError, LayerUnitInfo, ReadyUnits, TokenSpan, Unit, UnitFrame

_NUM_LOWER_LAYERS = 2
_CHECKSUM_OFFSETS = {b"KVML": 26, b"KVMX": 72}
"""Where streams have their checksums, of the words that they decode to as well, by their first bytes."""
_CHECKSUM_STRUCT = struct.Struct("<Q")
_OPTION_NAMES = {"profile": ("below",), "transform": ("kl", "ratio", "bits", "below", "first")}

_OPTION_HINTS = {
    "recent": " (what comes next in a text follows its last tokens)",
    "attention": " (store put --attention: it is of a text, not of the store)",
}


def check_options(codec: str, options: Mapping[str, float], profile: Profile) -> dict[str, float]:
    """Return the options of a codec of a store; `OptionError` for others, and for a profile without its tables."""
    names = _OPTION_NAMES[codec]
    for name in options:
        if name not in names:
            raise OptionError(
                f"{name}: no option of a store of {codec} streams: expected {', '.join(names)}"
                + _OPTION_HINTS.get(name, "")
            )
    if codec == "transform":
        options_of_streams = TransformOptions(**options)  # type: ignore[arg-type]
        plan_steps(get_tables(profile), options_of_streams, 1)
    else:
        check_below(profile, int(options.get("below", find_largest_below(profile))))
    return dict(options)


def get_default_options(codec: str, profile: Profile) -> dict[str, float]:
    """Return what a codec of a store does by a profile where its options say nothing, but for the loss."""
    if codec == "transform":
        return {"below": get_tables(profile).belows[-1], "first": TransformOptions.first}
    return {"below": find_largest_below(profile)}


def add_default_options(codec: str, options: Mapping[str, float]) -> dict[str, float]:
    """Return the options of a codec of a store, with the loss that is the default where they name none."""
    has_loss = codec != "transform" or any(name in options for name in ("kl", "ratio", "bits"))
    return dict(options) if has_loss else {"kl": DEFAULT_KL, **options}


class LayerUnitEncoder:
    """Encodes units of a sequence as streams by a profile.

    Attributes
    ----------
    predicted_kl : float or None
        Nats a token that lossy units are expected to cost; None where nothing says it, or `bits_factor` belies it.
    bits_factor : float or None
        Largest factor of the bits of a lossy unit over those that the profile predicts, where its losses do not hold.
    """

    tables = None

    def __init__(
        self,
        layers: Sequence[LayerCache],
        profile: Profile,
        codec: str,
        options: Mapping[str, float],
        attention: npt.NDArray[Any] | None,
        threads: int | None,
        ready_units: ReadyUnits | None = None,
    ) -> None:
        for cache in layers:
            profile.check_layer(cache)
        self._layers, self._profile, self._codec = layers, profile, codec
        self._options, self._threads = dict(options), threads
        # over the whole text: of a unit alone they would be relative to its own mean
        self._exponents = (
            None if attention is None else [choose_layer_exponents(attention, cache, "attention") for cache in layers]
        )
        self.predicted_kl: float | None = None
        self.bits_factor: float | None = None
        self.info = LayerUnitInfo(codec, profile.key)
        # layers with windows are not in a unit: those above them are encoded without them
        numbers = [cache.layer for cache in layers]
        if numbers != list(range(len(layers))):
            self._options["below"] = 0
            try:
                check_options(codec, self._options, profile)
            except KvmnnError as error:
                raise type(error)(
                    f"{error}; units of {format_layers(numbers)} need them, as other layers are not in them"
                ) from None
        self._plans: dict[int, StepPlan] = {}
        self._ready_units = ready_units

    def encode_batch(
        self,
        batch: Sequence[TokenSpan],
        sequence: TokenSequence,
        on_unit: Callable[[int, tuple[UnitFrame, ...], LayerUnitInfo], object],
    ) -> list[tuple[int, ...]]:
        """Encode units; return for each the checksums of the preceding blocks that it refers to: of none."""
        if self._codec == "transform":
            self._plan_steps(batch)

        def encode_unit(unit_index: int) -> None:
            streams = self.encode_span(batch[unit_index])
            on_unit(unit_index, streams, self.info)

        parallel_map(encode_unit, range(len(batch)), resolve_threads(self._threads))
        if self.bits_factor is not None:
            self.predicted_kl = None
        return [()] * len(batch)

    def encode_span(self, span: TokenSpan) -> tuple[UnitFrame, ...]:
        """Encode the tokens of a unit, or return its streams as they are."""
        if self._ready_units is not None:
            ready_streams = self._ready_units.streams.get(span, ())
            if ready_streams and self._lost_as_much(ready_streams, span):
                self._judge_ready_streams(ready_streams, span)
                return ready_streams
            self._ready_units.encoded_spans.add(span)
        caches = [_take_tokens(cache, span) for cache in self._layers]
        streams = self._encode_lossily(caches, span) if self._codec == "transform" else self._encode(caches)
        return tuple(UnitFrame(stream, read_checksum(stream), 0) for stream in streams)

    def _encode(self, caches: Sequence[LayerCache]) -> list[bytes]:
        below = int(self._options.get("below", find_largest_below(self._profile)))
        if not below:
            return [encode_linear_layer(cache, self._profile, below=0) for cache in caches]
        return list(encode_linear_layers(caches, self._profile, below=below))

    def _plan_steps(self, batch: Sequence[TokenSpan]) -> None:
        tables = get_tables(self._profile)
        for begin_token, end_token in batch:
            tokens = end_token - begin_token
            if tokens not in self._plans:
                options = self._make_options(begin_token)
                self._plans[tokens] = plan_steps(
                    tables, options, tokens, self._exponents is not None, begin_token=begin_token
                )
        plans = [self._plans[end_token - begin_token] for begin_token, end_token in batch]
        self.predicted_kl = plans[-1].kl if all(plan.is_measured for plan in plans) else None

    def _lost_as_much(self, frames: Sequence[UnitFrame], span: TokenSpan) -> bool:
        """Return whether lossy streams, of one profile, are those of the options of the store."""
        if self._codec != LAYER_CODECS[1]:
            return False
        options, tables = self._make_options(span[0]), get_tables(self._profile)
        plans = [plan_steps(tables, options, span[1] - span[0], has_attention) for has_attention in (False, True)]
        return any(
            all(is_stream_of_plan(frame.data, self._profile.key, plan, options.first) for frame in frames)
            for plan in plans
        )

    def _make_options(self, begin_token: int) -> TransformOptions:
        options = TransformOptions(**self._options)  # type: ignore[arg-type]
        return replace(options, first=max(options.first - begin_token, 0))

    def _encode_lossily(self, caches: Sequence[LayerCache], span: TokenSpan) -> list[bytes]:
        options, tokens = self._make_options(span[0]), span[1] - span[0]
        plan = self._plans.get(tokens) or plan_steps(
            get_tables(self._profile), options, tokens, self._exponents is not None, begin_token=span[0]
        )
        streams = self._encode_by_plan(caches, span, options, plan)
        factor = measure_bits_factor(plan, streams, caches, min(options.first, tokens))
        if plan.is_measured and is_loss_doubtful(factor, tokens):
            self._record_bits_factor(factor)
            streams = self._encode_by_plan(caches, span, options, replace(plan, is_measured=False))  # says no loss
        return streams

    def _record_bits_factor(self, factor: float) -> None:
        self.bits_factor = max(factor, self.bits_factor or 0.0)

    def _judge_ready_streams(self, frames: Sequence[UnitFrame], span: TokenSpan) -> None:
        """Record the bits of streams that say no loss though the profile predicts one: of numbers unlike its texts."""
        options, tokens = self._make_options(span[0]), span[1] - span[0]
        plan = plan_steps(get_tables(self._profile), options, tokens, begin_token=span[0])
        streams = [bytes(frame.data) for frame in frames]
        if plan.is_measured and any(math.isnan(read_header(stream)[0].kl) for stream in streams):
            caches = [_take_tokens(cache, span) for cache in self._layers]
            self._record_bits_factor(measure_bits_factor(plan, streams, caches, min(options.first, tokens)))

    def _encode_by_plan(
        self, caches: Sequence[LayerCache], span: TokenSpan, options: TransformOptions, plan: StepPlan
    ) -> list[bytes]:
        lower: deque[LayerCache] = deque(maxlen=_NUM_LOWER_LAYERS)
        streams = []
        for index, cache in enumerate(caches):
            exponents = None if self._exponents is None else self._exponents[index][slice(*span)]
            encoding = encode_transform_layer(
                cache, self._profile, list(lower)[::-1], options, exponents=exponents, plan=plan
            )
            lower.append(encoding.decoded)
            streams.append(encoding.data)
        return streams


def _take_tokens(cache: LayerCache, span: TokenSpan) -> LayerCache:
    begin_token, end_token = span
    return LayerCache(
        layer=cache.layer,
        keys=cache.keys[:, begin_token:end_token],
        values=cache.values[:, begin_token:end_token],
        positions=np.arange(begin_token, end_token),
    )


def read_checksum(stream: Bytes | bytes) -> int:
    """Return the checksum of a stream, of its bytes and of the words that it decodes to; 0 for anything else."""
    data = memoryview(stream)  # type: ignore[arg-type]
    offset = _CHECKSUM_OFFSETS.get(bytes(data[:4]))
    if offset is None or len(data) < offset + _CHECKSUM_STRUCT.size:
        return 0
    (checksum,) = _CHECKSUM_STRUCT.unpack_from(data, offset)
    return int(checksum)


def iter_unit_layers(unit: Unit, namespace: Namespace, profile: Profile) -> Iterator[LayerCache]:
    """Yield the layers of a unit in order, decoded and compared with its checksums.

    Raises
    ------
    DamagedUnitError
        For streams that are not those that were put; the message begins with the layer.
    """
    assert unit.layer_info is not None
    info, tokens = unit.layer_info, unit.ids.size
    codec: LayerCodec = "transform" if info.codec == "transform" else "profile"
    itemsize = namespace.element_dtype.itemsize
    max_bytes = max(shape.kv_heads * sum(shape.dims) for shape in namespace.layers) * tokens * itemsize
    decoded = decode_cache((frame.data for frame in unit.frames), profile, codec, max_bytes=max_bytes)
    positions = np.arange(unit.start, unit.start + tokens)
    for shape, frame in zip(namespace.layers, unit.frames, strict=True):
        try:
            if read_checksum(frame.data) != frame.checksum:
                raise DamagedUnitError("is another stream than was put")
            cache = next(decoded)
        except KvmnnError as error:
            raise DamagedUnitError(f"layer {shape.layer}: {error}") from None
        sizes = (cache.layer, cache.kv_heads, cache.head_dim, cache.value_dim)
        if sizes != tuple(shape) or cache.dtype != namespace.dtype or not np.array_equal(cache.positions, positions):
            raise DamagedUnitError(f"layer {shape.layer}: its stream holds another layer, or other tokens")
        yield cache
