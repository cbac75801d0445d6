"""Results of transform streams: the contents of headers, and errors of decoded elements."""

from __future__ import annotations

import math

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import LOSSY
from ..arrays.layer_cache import LayerCache
from ..dtypes import Elements, infer_dtype
from ..files.schema import Record
from . import _codec
from .header import DTYPES, TransformHeader


@dataclass(frozen=True, kw_only=True)
class SideErrors(Record):
    """Errors of K or V of one layer, in its elements."""

    #: The largest absolute error.
    largest: float
    #: Root mean square of the errors over that of the elements.
    relative: float


@dataclass(frozen=True, kw_only=True)
class TransformInfo(Record):
    """The contents of a transform stream's header."""

    layer: int
    dtype: str
    tokens: int
    #: Tokens that are stored exactly.
    exact_tokens: int
    kv_heads: int
    head_dim: int
    value_dim: int
    below: int
    has_attention_steps: bool
    #: Key of the profile, in hexadecimal.
    profile: str
    raw_bytes: int
    stream_bytes: int
    #: Loss of this layer in nats as predicted when it was encoded; None where that is not known.
    predicted_kl: float | None
    label: str = LOSSY

    @property
    def ratio(self) -> float:
        """Return raw bytes for each byte of the stream."""
        return self.raw_bytes / self.stream_bytes

    @classmethod
    def from_header(cls, header: TransformHeader, stream_bytes: int, exact_tokens: int) -> TransformInfo:
        """Return the information of a header."""
        return cls(
            layer=header.layer,
            dtype=header.dtype.name,
            tokens=header.tokens,
            exact_tokens=exact_tokens,
            kv_heads=header.kv_heads,
            head_dim=header.head_dim,
            value_dim=header.value_dim,
            below=header.below,
            has_attention_steps=header.has_exponents,
            profile=header.profile_key.hex(),
            raw_bytes=header.raw_bytes,
            stream_bytes=stream_bytes,
            predicted_kl=None if math.isnan(header.kl) else header.kl,
        )


@dataclass(frozen=True, kw_only=True)
class TransformLayerResult(Record):
    """A transform stream and the errors of its decoded elements."""

    info: TransformInfo
    key_errors: SideErrors
    value_errors: SideErrors

    @classmethod
    def from_stream(
        cls, header: TransformHeader, stream_bytes: int, exact_tokens: int, errors: tuple[SideErrors, SideErrors]
    ) -> TransformLayerResult:
        """Return the result of a stream."""
        info = TransformInfo.from_header(header, stream_bytes, exact_tokens)
        return cls(info=info, key_errors=errors[0], value_errors=errors[1])


def measure_errors(original: LayerCache, decoded: LayerCache) -> tuple[SideErrors, SideErrors]:
    """Compare K and V of a layer with what was decoded; elements that are not finite count as 0."""
    return _measure(original.keys, decoded.keys), _measure(original.values, decoded.values)


def _measure(original: Elements, decoded: Elements) -> SideErrors:
    words = [np.ascontiguousarray(elements).view(np.uint8).reshape(-1) for elements in (original, decoded)]
    number = DTYPES.index(infer_dtype(original))
    power, error_power, largest = _codec.compare_words(words[0], words[1], number)
    return SideErrors(largest=largest, relative=math.sqrt(error_power / power) if power else 0.0)
