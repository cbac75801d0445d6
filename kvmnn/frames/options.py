"""What an encoder may do: predictors, codecs, effort."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..dtypes import FP16, DType
from ..errors import KvmnnError
from .predictors import resolve_predictors, to_mode_bits

CODECS = ("rle", "zstd")
"""Stream codecs by their number in the header."""

EFFORTS = ("exact", "balanced", "fast", "max")

MIN_PARALLEL_BYTES = 1 << 20
"""Raw bytes from which the streams of a frame are shared out over threads."""

RLE_BIT, ZSTD_BIT = 1, 2


class LaneOptions(NamedTuple):
    """Options of the compiled encoder for words of one size."""

    itemsize: int
    """Bytes of a word, and so the number of lanes."""
    modes: tuple[int, ...]
    """Predictor bits for each lane."""
    allowed_codecs: int
    """Codec bits."""
    effort: str


@dataclass(frozen=True, kw_only=True)
class CodecOptions:
    """Options of `kvmnn.encode` that do not depend on the data; described there."""

    predictors: str | Iterable[str] | None = None
    hi_predictors: str | Iterable[str] | None = None
    codecs: Iterable[str] = CODECS
    effort: str = "exact"

    def check(self, dtype: DType = FP16) -> None:
        """`KvmnnError` or `TypeError` for options that do not exist, or not for words of `dtype`."""
        self.to_lane_options(dtype)

    def to_lane_options(self, dtype: DType) -> LaneOptions:
        """The options of the compiled encoder for words of `dtype`; errors as `check`."""
        if self.effort not in EFFORTS:
            raise KvmnnError(f"unknown effort {self.effort!r}: expected {', '.join(EFFORTS)}")
        modes = [to_mode_bits(resolve_predictors(self.predictors))] * dtype.itemsize
        if self.hi_predictors is not None:
            if dtype.itemsize != 2:
                raise KvmnnError(f"hi_predictors is for two-byte words: {dtype.name} frames have one predictor set")
            modes[1] = to_mode_bits(resolve_predictors(self.hi_predictors))
        return LaneOptions(dtype.itemsize, tuple(modes), to_codec_bits(self.codecs), self.effort)


def to_codec_bits(codecs: Iterable[str]) -> int:
    """Codec names as bits."""
    if codecs is CODECS:
        return RLE_BIT | ZSTD_BIT
    if isinstance(codecs, str):
        raise TypeError(f"codecs must be a tuple of names such as ({codecs!r},), not a string")
    bits = 0
    for name in codecs:
        if name not in CODECS:
            raise KvmnnError(f"unknown codec {name!r}: expected {' or '.join(CODECS)}")
        bits |= 1 << CODECS.index(name)
    if not bits:
        raise KvmnnError(f"no codec allowed: expected at least one of {', '.join(CODECS)}")
    return bits
