"""Plan a compression: segments, groups and lengths; check that the weight file has the weights for it.

The rules are those of the runtime that loads KVCM files; docs/compressor-forward.md states them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ..._util.validation import validate_int
from ...dtypes import PARTS, Part
from ...errors import KvmnnError
from ...files.schema import Record, json_key
from ..kvcm import DEFAULT_PREFIXES, SLOTS_PER_PREFIX, WeightFile

Precision = Literal["fp32", "fp16"]
EngineName = Literal["numpy", "onnx"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
ENGINES: tuple[EngineName, ...] = ("numpy", "onnx")


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """Options of a compression.

    Parameters
    ----------
    image_len
        Tokens at the front that belong to the image; more than there are means all.
    factor
        Tokens that become one; 0 and 1 take the value of the weight file's header.
    min_seq_len
        Minimum of complete groups (not tokens) for a segment to be compressed; 0 takes the header's value.
    seq_len
        Tokens of the cache that are live; None or more than there are means all.
    enabled
        False leaves the cache as it is.
    precision
        ``"fp32"`` computes in float32 and rounds the result once, to the type of the cache. ``"fp16"`` computes what a
        runtime with an fp16 cache does: tokens and weights in fp16, the result of every Linear rounded to fp16.
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


SegmentKind = Literal["image", "text"]
NoCompressionReason = Literal["disabled", "empty", "factor", "no_text_mlp", "too_short", "factor_not_trained"]

_PREFIX_INDEX: dict[tuple[SegmentKind, Part], int] = {
    ("text", "key"): 0,
    ("text", "value"): 1,
    ("image", "key"): 2,
    ("image", "value"): 3,
}
_NUM_TEXT_BLOCKS = 2 * SLOTS_PER_PREFIX
_NUM_IMAGE_BLOCKS = 4 * SLOTS_PER_PREFIX


@dataclass(frozen=True, kw_only=True)
class CompressionSegment(Record):
    """A run of tokens that is compressed independently."""

    #: ``"image"`` or ``"text"``.
    kind: SegmentKind
    #: First token in the cache, and number of tokens.
    begin: int
    tokens: int
    #: Tokens that the compressor makes; 0 if the segment is not compressed.
    groups: int
    #: Tokens in a group.
    factor: int

    @property
    def grouped_tokens(self) -> int:
        """Return the number of tokens in whole groups; the tokens after them are kept."""
        return self.groups * self.factor

    @property
    @json_key()
    def new_tokens(self) -> int:
        """Return the number of tokens after compression."""
        return self.groups + self.tokens - self.grouped_tokens

    def prefix_index(self, part: Part) -> int:
        """Return the index of the compressor prefix for its K or V."""
        return _PREFIX_INDEX[self.kind, part]

    def __str__(self) -> str:
        return (
            f"{self.kind}: {pluralize(self.tokens, 'token')} -> {self.new_tokens:,} "
            f"({pluralize(self.groups, 'group')} of {self.factor}, {self.tokens - self.grouped_tokens} kept)"
        )


@dataclass(frozen=True, kw_only=True)
class CompressionPlan(Record):
    """Segments of a compression, and the lengths before and after."""

    #: Live tokens before and after; `new_len` is the cache slot of the next token.
    seq_len: int
    new_len: int
    #: The applied options.
    factor: int
    min_seq_len: int
    image_len: int
    #: In order, without gaps; none is empty.
    segments: tuple[CompressionSegment, ...]
    #: Why nothing is compressed, or None.
    reason: NoCompressionReason | None

    @property
    def ratio(self) -> float:
        """Return tokens before over tokens after."""
        return self.seq_len / self.new_len if self.new_len else 1.0

    @property
    def explanation(self) -> str:
        """Return `reason` as a sentence; empty if there is none."""
        groups = ", ".join(f"{s.kind} {s.tokens // self.factor if self.factor else 0}" for s in self.segments)
        texts: dict[NoCompressionReason, str] = {
            "disabled": "compression is switched off",
            "empty": "the cache is empty",
            "factor": f"the factor is {self.factor}, which leaves every token alone",
            "no_text_mlp": "the weight file has no compressor for text",
            "too_short": f"no segment with a compressor has {self.min_seq_len} groups of {self.factor} ({groups})",
            "factor_not_trained": f"no compressor in the weight file takes groups of {self.factor} tokens",
        }
        return texts[self.reason] if self.reason else ""


def plan_compression(
    weights: WeightFile, layers: list[int], batch: int, tokens: int, head_dim: int, options: ForwardOptions
) -> CompressionPlan:
    """Plan the compression of a cache; check that the weight file has the weights of every layer."""
    header = weights.header
    seq_len = tokens if options.seq_len is None else min(options.seq_len, tokens)
    factor = options.factor if options.factor > 1 else header.compression_factor
    min_groups = options.min_seq_len or header.min_seq_len
    image_len = min(options.image_len, seq_len)
    has_text = header.weight_count_per_layer >= _NUM_TEXT_BLOCKS
    has_image = header.weight_count_per_layer >= _NUM_IMAGE_BLOCKS
    reason: NoCompressionReason | None = None
    if not options.enabled:
        reason = "disabled"
    elif seq_len == 0 or batch == 0:
        reason = "empty"
    elif factor <= 1:
        reason = "factor"
    elif not has_text:
        reason = "no_text_mlp"

    def count_groups(kind: SegmentKind, length: int) -> int:
        if reason or (kind == "image" and not has_image):
            return 0
        return length // factor if length // factor >= min_groups else 0

    spans: list[tuple[SegmentKind, int, int]] = [("image", 0, image_len), ("text", image_len, seq_len - image_len)]
    segments = tuple(
        CompressionSegment(kind=kind, begin=begin, tokens=length, groups=count_groups(kind, length), factor=factor)
        for kind, begin, length in spans
        if length
    )
    plan = CompressionPlan(
        seq_len=seq_len,
        new_len=sum(segment.new_tokens for segment in segments),
        factor=factor,
        min_seq_len=min_groups,
        image_len=image_len,
        segments=segments,
        reason=reason or (None if any(segment.groups for segment in segments) else "too_short"),
    )
    if plan.reason:
        return plan
    first_linears, last_linears = (
        [
            weights.get_placement(layer, prefix * SLOTS_PER_PREFIX + slot)
            for layer in range(header.num_layers)
            for prefix in range(4 if has_image else 2)
        ]
        for slot in (0, SLOTS_PER_PREFIX - 1)
    )
    # The runtime compresses nothing where no compressor takes groups of this factor. Where all outputs are right, a
    # wrong number of inputs is due to the factor.
    if all(linear.cols != factor * head_dim for linear in first_linears) and all(
        linear.rows == head_dim for linear in last_linears
    ):
        unchanged_segments = tuple(replace(segment, groups=0) for segment in segments)
        return replace(plan, segments=unchanged_segments, new_len=seq_len, reason="factor_not_trained")
    _check_weights(weights, layers, head_dim, plan)
    return plan


def _check_weights(weights: WeightFile, layers: list[int], head_dim: int, plan: CompressionPlan) -> None:
    num_layers = weights.header.num_layers
    if layers and max(layers) >= num_layers:
        raise KvmnnError(
            f"{weights.label}: has weights for {num_layers} layers, the cache has a layer {max(layers)}: "
            f"expected at least {max(layers) + 1}"
        )
    prefixes = [prefix for segment in plan.segments if segment.groups for prefix in map(segment.prefix_index, PARTS)]
    for layer in layers:
        for prefix in prefixes:
            _check_chain(weights, layer, prefix, head_dim, plan.factor)


def _check_chain(weights: WeightFile, layer: int, prefix: int, head_dim: int, factor: int) -> None:
    """Check that each Linear takes what the one before it returns, from a group of tokens to one token."""
    location = f"{weights.label}: layer {layer}, {DEFAULT_PREFIXES[prefix]}"
    width, source = factor * head_dim, f"factor {factor} x head_dim {head_dim}"
    for slot in range(SLOTS_PER_PREFIX):
        placement = weights.get_placement(layer, prefix * SLOTS_PER_PREFIX + slot)
        if placement.cols != width:
            raise KvmnnError(f"{location}: linear {slot} takes {placement.cols} inputs, expected {width} ({source})")
        width, source = placement.rows, f"the outputs of linear {slot}"
    if width != head_dim:
        raise KvmnnError(f"{location}: makes {width} outputs, expected {head_dim} (head_dim)")
