"""What the caller asks of a compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...checks import validate_int
from ...errors import KvmnnError

Precision = Literal["fp32", "fp16"]
EngineName = Literal["numpy", "onnx"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
ENGINES: tuple[EngineName, ...] = ("numpy", "onnx")


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """What the caller asks of a compression.

    Parameters
    ----------
    image_len
        Tokens at the front that belong to the image; more than there are means all of them.
    factor
        Tokens that become one; 0 and 1 mean what the header of the weight file says.
    min_seq_len
        Least number of complete groups (not tokens) for a segment to be compressed; 0 means what the header says.
    seq_len
        Tokens of the cache that are live; None or more than there are means all of them.
    enabled
        False leaves the cache as it is.
    precision
        ``"fp32"`` computes in float32 and rounds the result once, to the type of the cache. ``"fp16"`` gives what a
        runtime with an fp16 cache computes: tokens and weights in fp16, the result of every Linear rounded to fp16.
    engine
        ``"numpy"``, or ``"onnx"`` for onnxruntime.

    Raises
    ------
    KvmnnError
        For negative numbers and unknown names.
    TypeError
        For numbers that are no integers.
    """

    image_len: int = 0
    factor: int = 0
    min_seq_len: int = 0
    seq_len: int | None = None
    enabled: bool = True
    precision: Precision = "fp32"
    engine: EngineName = "numpy"

    def __post_init__(self) -> None:
        for name in ("image_len", "factor", "min_seq_len", "seq_len"):
            value = getattr(self, name)
            if value is not None or name != "seq_len":
                object.__setattr__(self, name, validate_int(value, name, 0))
        for name, choices in (("precision", PRECISIONS), ("engine", ENGINES)):
            if getattr(self, name) not in choices:
                raise KvmnnError(f"unknown {name} {getattr(self, name)!r}: expected one of {', '.join(choices)}")
