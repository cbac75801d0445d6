"""Options of the encoder: predictors, codecs and effort; the engine's strings for predictors (format.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from ..dtypes import FP16, DType
from ..errors import KvmnnError

CODECS = ("rle", "zstd")
"""Stream codecs by their number in the header."""

Effort = Literal["exact", "balanced", "fast", "max"]

EFFORTS: tuple[Effort, ...] = get_args(Effort)
"""Names of the strategies of `encoder`, the engine's own first."""

PREDICTORS = ("raw", "delta_seq", "xor_seq")
"""Predictors by mode number, in the order in which the encoder tries them."""

DEFAULT_PREDICTORS = frozenset(PREDICTORS)
"""The predictors that the engine's default strings for K and V enable."""

ACCEPTED_PREDICTORS = (*PREDICTORS, "pair_delta", "pair_delta_delta_seq")
"""Names that the engine's own strings contain; its codec has no modes for the last two, and ignores them."""

RLE_BIT, ZSTD_BIT = 1, 2
RAW_MODE_BIT = 1

MAX_ELEMENTS = (1 << 32) - 1
"""The element count in the header of a frame has 32 bits."""


class LaneOptions(NamedTuple):
    """Options of the compiled encoder for elements of one size."""

    itemsize: int
    """Bytes of an element, which is also the number of lanes."""
    modes: tuple[int, ...]
    """Predictor bits of each lane."""
    allowed_codecs: int
    """Codec bits."""
    effort: str

    def supports_fast_path(self, nbytes: int) -> bool:
        """Return whether the options permit the fast path for that many bytes (zstd and the raw predictor allowed)."""
        num_elements, remainder = divmod(nbytes, self.itemsize)
        is_allowed = self.allowed_codecs & ZSTD_BIT and all(bits & RAW_MODE_BIT for bits in self.modes)
        return bool(is_allowed) and 0 < num_elements <= MAX_ELEMENTS and not remainder


@dataclass(frozen=True, kw_only=True)
class CodecOptions:
    """Options of `kvmnn.encode` that do not depend on the data; described there."""

    predictors: str | Iterable[str] | None = None
    hi_predictors: str | Iterable[str] | None = None
    codecs: Iterable[str] = CODECS
    effort: Effort = "exact"

    def check(self, dtype: DType = FP16) -> None:
        """Raise `KvmnnError` or `TypeError` for options that do not exist, or not for elements of `dtype`."""
        self.to_lane_options(dtype)

    def to_lane_options(self, dtype: DType) -> LaneOptions:
        """Return the options of the compiled encoder for elements of `dtype`; errors as `check`."""
        if self.effort not in EFFORTS:
            raise KvmnnError(f"unknown effort {self.effort!r}: expected {', '.join(EFFORTS)}")
        modes = [to_mode_bits(resolve_predictors(self.predictors))] * dtype.itemsize
        if self.hi_predictors is not None:
            if dtype.itemsize != 2:
                raise KvmnnError(f"hi_predictors is for two-byte words: {dtype.name} frames have one predictor set")
            modes[1] = to_mode_bits(resolve_predictors(self.hi_predictors))
        return LaneOptions(dtype.itemsize, tuple(modes), to_codec_bits(self.codecs), self.effort)


def to_codec_bits(codecs: Iterable[str]) -> int:
    """Return codec names as bits."""
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


def parse_spec(spec: str, default_raw: bool = True) -> frozenset[str]:
    """Return the predictors that the engine enables for a spec string such as ``"raw,delta_seq"``.

    Names are separated by commas, stripped of spaces and tabs, and compared exactly. Unknown names are ignored; if none
    remains, raw is enabled. For the empty string `default_raw` decides: raw, or nothing (the encoder then uses raw).
    """
    if spec == "":
        return frozenset({"raw"} if default_raw else ())
    tokens = {token.strip(" \t") for token in spec.split(",")}
    return frozenset(tokens.intersection(PREDICTORS)) or frozenset({"raw"})


def resolve_predictors(predictors: str | Iterable[str] | None) -> frozenset[str]:
    """Return the predictor set that an API caller specifies: None for all three, a spec string, or names."""
    if predictors is None:
        return DEFAULT_PREDICTORS
    if isinstance(predictors, str):
        return parse_spec(predictors)
    names = tuple(predictors)
    for name in names:
        if name not in ACCEPTED_PREDICTORS:
            raise KvmnnError(f"unknown predictor {name!r}: expected {', '.join(PREDICTORS)}")
    valid_names = frozenset(name for name in names if name in PREDICTORS)
    if not valid_names:
        raise KvmnnError(f"no predictor among {names!r}: expected at least one of {', '.join(PREDICTORS)}")
    return valid_names


def to_mode_bits(names: frozenset[str]) -> int:
    """Return the set as bits: 1 raw, 2 delta_seq, 4 xor_seq; raw for the empty set, as the engine does."""
    return sum(1 << mode for mode, name in enumerate(PREDICTORS) if name in names) or 1
