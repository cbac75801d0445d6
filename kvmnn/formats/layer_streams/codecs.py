"""The codecs of layer streams, with one interface."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.layer_cache import LayerCache
from ...errors import OptionError, SourceError
from ...linear import decode_layers as decode_linear_layers
from ...linear import encode_layers as encode_linear_layers
from ...profiles import Profile
from ...transform import StepPlan, TransformOptions, choose_layer_exponents, get_tables, plan_steps
from ...transform import decode_layer as decode_transform_layer
from ...transform import encode_layer as encode_transform_layer
from ..npy import MAX_NPY_HEADER_BYTES, NpyHeader
from .document import LayerCodec

_NUM_LOWER_LAYERS = 2
_SETTING_NAMES = {"profile": ("below",), "transform": tuple(entry.name for entry in fields(TransformOptions))}


@dataclass(frozen=True, kw_only=True)
class LayerStreamOptions:
    """How a cache becomes layer streams.

    Parameters
    ----------
    codec
        ``"profile"``: lossless. ``"transform"``: lossy.
    profile
        Path of the profile.
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
    profile: str
    settings: dict[str, Any] = field(default_factory=dict)
    verify: bool = True
    attention: str | None = None

    def __post_init__(self) -> None:
        if self.attention is not None and self.codec != "transform":
            raise OptionError("attention is about the steps of lossy streams: expected codec 'transform'")
        names = _SETTING_NAMES[self.codec]
        for name in self.settings:
            if name not in names:
                raise OptionError(f"settings has {name!r}: expected {', '.join(names)} of codec {self.codec!r}")

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
        After the first layer: nats a token that lossy streams are expected to cost; None where nothing says it.
    """

    def __init__(self, profile: Profile, options: LayerStreamOptions) -> None:
        self._profile, self._options = profile, options
        self.predicted_kl: float | None = None

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
        for stream in encode_linear_layers(iter_layers(), self._profile, **settings):
            yield EncodedLayer(stream, pending.popleft())

    def _encode_lossily(self, layers: Iterable[LayerCache]) -> Iterator[EncodedLayer]:
        options, plan = TransformOptions(**self._options.settings), None
        path = self._options.attention
        attention = None if path is None else read_attention(path)
        lower: deque[LayerCache] = deque(maxlen=_NUM_LOWER_LAYERS)
        for cache in layers:
            plan = plan or self._plan(options, cache.tokens)
            exponents = None if attention is None else choose_layer_exponents(attention, cache, str(path))
            encoding = encode_transform_layer(
                cache, self._profile, list(lower)[::-1], options, exponents=exponents, plan=plan
            )
            lower.append(encoding.decoded)
            yield EncodedLayer(encoding.data, encoding.decoded)

    def _plan(self, options: TransformOptions, tokens: int) -> StepPlan:
        plan = plan_steps(get_tables(self._profile), options, tokens, self._options.attention is not None)
        self.predicted_kl = plan.kl if plan.is_measured else None
        return plan


def read_attention(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Map a file of attention, ``[layer, kv_head, position]``; `SourceError` for anything else."""
    label = os.fspath(path)
    try:
        with open(path, "rb") as file:
            header = NpyHeader(file.read(MAX_NPY_HEADER_BYTES), label)
            data_bytes = os.fstat(file.fileno()).st_size - header.header_bytes
    except (OSError, SourceError) as error:
        raise SourceError(f"{label}: not an array of attention (.npy): {error}") from None
    if len(header.shape) != 3 or header.dtype.kind != "f" or not header.nbytes or data_bytes != header.nbytes:
        raise SourceError(f"{label}: expected one array of floats [layer, kv_head, position]")
    attention: npt.NDArray[Any] = np.memmap(
        path, header.dtype, "r", offset=header.header_bytes, shape=header.shape, order=header.order
    )
    return attention


def find_largest_below(profile: Profile) -> int:
    """Return the largest number of lower layers for which a profile has linear tables."""
    fields = (name.split("/") for name in profile.select("linear"))
    return max((int(parts[2]) for parts in fields if len(parts) > 2 and parts[2].isdigit()), default=0)


def decode_cache(
    streams: Iterable[Any], profile: Profile, codec: LayerCodec, *, max_bytes: int | None = None
) -> Iterator[LayerCache]:
    """Yield the layers of a cache, from layer 0 up; `LimitError` for one of more than `max_bytes` bytes of K and V."""
    if codec == "profile":
        yield from decode_linear_layers(streams, profile, max_bytes=max_bytes)
        return
    lower: deque[LayerCache] = deque(maxlen=_NUM_LOWER_LAYERS)
    for stream in streams:
        lower.append(decode_transform_layer(stream, profile, list(lower)[::-1], max_bytes=max_bytes))
        yield lower[-1]
