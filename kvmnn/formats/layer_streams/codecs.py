"""The codecs of layer streams, with one interface."""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._util.dataclass import dataclass
from ..._util.named_tuple import NamedTuple
from ..._util.validation import validate_int
from ...arrays.layer_cache import LayerCache
from ...errors import OptionError, SourceError, build_read_error
from ...linear import decode_layers as decode_linear_layers
from ...linear import encode_layers as encode_linear_layers
from ...linear.header import LinearHeader, read_header
from ...profiles import Profile
from ...transform import (
    StepPlan,
    TransformOptions,
    choose_layer_exponents,
    fit_level_shifts,
    get_tables,
    measure_bits_factor,
    plan_steps,
)
from ...transform import decode_layer as decode_transform_layer
from ...transform import encode_layer as encode_transform_layer
from ...transform.steps import is_loss_doubtful, is_size_missed
from ..npy import MAX_NPY_HEADER_BYTES, NpyHeader
from .document import LayerCodec

_NUM_LOWER_LAYERS = 2
_NUM_SAMPLE_LAYERS, _MAX_TRIALS = 4, 4
"""Layers that are encoded first where a size is asked for, to see how many bits the text takes, and how many times. By
a profile of prose, source code had a ratio of 6.3 for 8 without that, and prose 8.0 to 8.8."""
_MAX_SIZE_ERROR = 0.04
_SETTING_NAMES = {"profile": ("below",), "transform": tuple(entry.name for entry in fields(TransformOptions))}


@dataclass(frozen=True, kw_only=True)
class LayerStreamOptions:
    """How a cache becomes layer streams.

    Parameters
    ----------
    codec
        ``"profile"``: lossless. ``"transform"``: lossy.
    profile
        Path of the profile, which both codecs need.
    settings
        Options of the codec by name: ``below`` (0, 1 or 2); of ``"transform"`` also those of
        `kvmnn.transform.TransformOptions`.
    verify
        Decode every stream, and compare it with what it should give.
    attention
        Of ``"transform"``: path of a .npy file, float ``[layer, kv_head, position]``: the mean attention probability
        that later tokens gave the token at each position. Tokens that drew more get smaller steps; streams carry them.
    """

    codec: LayerCodec
    profile: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    verify: bool = True
    attention: str | None = None

    def __post_init__(self) -> None:
        if self.attention is not None and self.codec != "transform":
            raise OptionError("attention is about the steps of lossy streams: expected codec 'transform'")
        if self.codec not in _SETTING_NAMES:
            raise OptionError(f"codec is {self.codec!r:.40}: expected {' or '.join(map(repr, _SETTING_NAMES))}")
        if not self.profile:
            raise OptionError(f"no profile given: codec {self.codec!r} needs the path of one (kvmnn profile make)")
        names = _SETTING_NAMES[self.codec]
        for name in self.settings:
            if name not in names:
                hint = ""
                if name == "attention" and self.codec == "transform":
                    hint = " (attention is passed as LayerStreamOptions(attention=FILE))"
                raise OptionError(f"settings has {name!r}: expected {', '.join(names)} of codec {self.codec!r}{hint}")
        try:
            if self.codec == "transform":
                TransformOptions(**self.settings)
            else:
                validate_int(self.settings.get("below", 0), "below", 0, _NUM_LOWER_LAYERS)
        except TypeError as error:
            raise OptionError(f"settings: {error}") from None

    @property
    def document(self) -> dict[str, Any]:
        """Return the settings as in ``layers.json``."""
        attention = {} if self.attention is None else {"attention": os.path.basename(self.attention)}
        return {**self.settings, **attention}


class EncodedLayer(NamedTuple):
    """A stream, and the layer that decoding it gives."""

    stream: bytes
    decoded: LayerCache


class CacheEncoder:
    """Encodes the layers of a cache, from layer 0 up.

    Attributes
    ----------
    predicted_kl : float or None
        After the last layer: nats a token that lossy streams are expected to cost; None where nothing says it, or
        `bits_factor` belies it.
    bits_factor : float or None
        After the last layer: bits of lossy streams, without exact tokens, over those that the profile predicts for the
        same steps, where they are so many that its losses do not hold; None otherwise.
    size_change : float
        After the last layer, where a size was asked for: bits of lossy streams over those, without exact tokens.
    has_sensitivities : bool
        Whether the profile predicts losses.
    unused_reason : str or None
        After the last layer: why decoding needs no profile (`explain_unused_profile`).
    """

    def __init__(
        self,
        profile: Profile,
        options: LayerStreamOptions,
        *,
        level_shifts: npt.NDArray[np.float64] | None = None,
    ) -> None:
        self._profile, self._options = profile, options
        # Of all layers, from another encoder (`create_second_try`); None takes a sample.
        self._level_shifts = level_shifts
        self._next_shifts: npt.NDArray[np.float64] | None = None
        self.size_change = 1.0
        self.predicted_kl: float | None = None
        self.bits_factor: float | None = None
        self.has_sensitivities = False
        self.unused_reason: str | None = None

    def create_second_try(self) -> CacheEncoder | None:
        """Return an encoder whose steps are chosen by the bits of all layers; None if a size is near, or not asked for.

        For use after the last layer, once: it encodes the same layers again, and may or may not come nearer.
        """
        if self._next_shifts is None or not is_size_missed(self.size_change, 1.0):
            return None
        return CacheEncoder(self._profile, self._options, level_shifts=self._next_shifts)

    def is_nearer_than(self, rival: CacheEncoder) -> bool:
        """Return whether the size is nearer to what was asked for than that of another encoder."""
        return abs(math.log(self.size_change)) < abs(math.log(rival.size_change))

    def encode(self, layers: Iterable[LayerCache]) -> Iterator[EncodedLayer]:
        """Yield the stream of each layer."""
        if self._options.codec == "transform":
            yield from self._encode_lossily(layers)
            return
        pending: deque[LayerCache] = deque()

        def iter_layers() -> Iterator[LayerCache]:
            for cache in layers:
                pending.append(cache)
                yield cache

        settings = {"below": find_largest_below(self._profile), **self._options.settings}
        headers = []
        for stream in encode_linear_layers(iter_layers(), self._profile, **settings):
            headers.append(replace(read_header(stream), stream=_NO_BYTES, payloads=(_NO_BYTES, _NO_BYTES)))
            yield EncodedLayer(stream, pending.popleft())
        self.unused_reason = explain_unused_profile(headers)

    def _encode_lossily(self, layers: Iterable[LayerCache]) -> Iterator[EncodedLayer]:
        options, tables = TransformOptions(**self._options.settings), get_tables(self._profile)
        iterator = iter(layers)
        has_size = options.ratio is not None or options.bits is not None
        needs_sample = has_size and self._level_shifts is None
        sample = list(itertools.islice(iterator, _NUM_SAMPLE_LAYERS if needs_sample else 1))
        if not sample:
            return
        tokens, has_attention = sample[0].tokens, self._options.attention is not None
        exact_bits = 8 * sample[0].keys.itemsize
        plan = plan_steps(
            tables, options, tokens, has_attention, level_shifts=self._level_shifts, exact_bits=exact_bits
        )
        num_exact, factor = min(options.first + options.recent, tokens), 1.0
        if needs_sample:
            too_low, too_high = 0.0, 0.0
            for _ in range(_MAX_TRIALS):
                streams = [encoded.stream for encoded in self._encode_by_plan(sample, options, plan)]
                change = measure_bits_factor(plan, streams, sample, num_exact)
                is_near = abs(change - 1) < _MAX_SIZE_ERROR
                too_low, too_high = (factor, too_high) if change > 1 else (too_low, factor)
                # rows that small steps make exact take bits that are not in proportion
                factor = math.sqrt(too_low * too_high) if too_low and too_high and not is_near else factor * change
                plan = plan_steps(tables, options, tokens, has_attention, bits_factor=factor, exact_bits=exact_bits)
                if is_near:
                    break
        self.has_sensitivities = plan.is_measured
        self.predicted_kl = plan.kl if plan.is_measured else None
        if options.first + options.recent >= tokens:
            self.predicted_kl = 0.0  # every token is exact
        bits_by_layer: dict[int, float] = {}
        for encoded in self._encode_by_plan(itertools.chain(sample, iterator), options, plan):
            bits_by_layer[encoded.decoded.layer] = _compute_token_bits(encoded, num_exact)
            yield encoded
        layers_seen, total_bits = list(bits_by_layer), sum(bits_by_layer.values())
        predicted_bits = float(plan.profile_bits[layers_seen].sum())
        has_coded_tokens = num_exact < tokens
        bits_factor = total_bits / predicted_bits if predicted_bits > 0 and has_coded_tokens else 1.0
        if plan.max_token_bits is not None and has_coded_tokens and total_bits > 0:
            share = float(plan.bits[layers_seen].sum()) / plan.token_bits
            self.size_change = total_bits / (share * plan.max_token_bits)
            if needs_sample:
                self._next_shifts = fit_level_shifts(tables, plan, bits_by_layer)
        if is_loss_doubtful(bits_factor, tokens):
            self.bits_factor, self.predicted_kl = bits_factor, None
        if self.predicted_kl:  # of the layers that there are: headers of streams have a loss each
            self.predicted_kl = float(plan.losses[layers_seen].sum())

    def _encode_by_plan(
        self, layers: Iterable[LayerCache], options: TransformOptions, plan: StepPlan
    ) -> Iterator[EncodedLayer]:
        path = self._options.attention
        attention = None if path is None else read_attention(path)
        lower: deque[LayerCache] = deque(maxlen=_NUM_LOWER_LAYERS)
        for cache in layers:
            exponents = None if attention is None else choose_layer_exponents(attention, cache, str(path))
            encoding = encode_transform_layer(
                cache, self._profile, list(lower)[::-1], options, exponents=exponents, plan=plan
            )
            lower.append(encoding.decoded)
            yield EncodedLayer(encoding.data, encoding.decoded)


def _compute_token_bits(encoded: EncodedLayer, num_exact: int) -> float:
    """Return the bits that a token takes in a stream, without exact tokens."""
    layer = encoded.decoded
    coded_bytes = len(encoded.stream) - layer.nbytes / layer.tokens * num_exact
    return 8 * coded_bytes / max(layer.tokens - num_exact, 1)


def read_attention(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Map a file of attention, ``[layer, kv_head, position]``; `SourceError` for anything else."""
    label = os.fspath(path)
    try:
        with open(path, "rb") as file:
            header = NpyHeader(file.read(MAX_NPY_HEADER_BYTES), label)
            data_bytes = os.fstat(file.fileno()).st_size - header.header_bytes
    except OSError as error:
        raise build_read_error(label, error) from None
    except SourceError as error:
        raise SourceError(f"{label}: not an array of attention (.npy): {error}") from None
    if len(header.shape) != 3 or header.dtype.kind != "f" or not header.nbytes or data_bytes != header.nbytes:
        raise SourceError(f"{label}: expected one array of floats [layer, kv_head, position]")
    attention: npt.NDArray[Any] = np.memmap(
        path, header.dtype, "r", offset=header.header_bytes, shape=header.shape, order=header.order
    )
    return attention


_NO_BYTES = np.zeros(0, np.uint8)


def explain_unused_profile(headers: Sequence[LinearHeader]) -> str | None:
    """Return why no linear stream of a cache was predicted, so that decoding needs no profile; None if one was."""
    if any(header.key is not None for header in headers):
        return None
    if all(header.positions.ndim == 2 for header in headers):
        return "heads hold different tokens"
    return "other streams are smaller"


def find_largest_below(profile: Profile) -> int:
    """Return the largest number of lower layers for which a profile has linear tables."""
    fields = (name.split("/") for name in profile.select("linear"))
    return max((int(parts[2]) for parts in fields if len(parts) > 2 and parts[2].isdigit()), default=0)


def decode_cache(
    streams: Iterable[Any], profile: Profile | None, codec: LayerCodec, *, max_bytes: int | None = None
) -> Iterator[LayerCache]:
    """Yield the layers of a cache, from layer 0 up; `LimitError` for one of more than `max_bytes` bytes of K and V.

    The profile may be None for streams of ``"profile"`` that need none.
    """
    if codec == "profile":
        yield from decode_linear_layers(streams, profile, max_bytes=max_bytes)
        return
    lower: deque[LayerCache] = deque(maxlen=_NUM_LOWER_LAYERS)
    assert profile is not None
    for stream in streams:
        lower.append(decode_transform_layer(stream, profile, list(lower)[::-1], max_bytes=max_bytes))
        yield lower[-1]
