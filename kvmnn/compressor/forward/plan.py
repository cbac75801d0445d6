"""What the caller asks of a compression.

What a KV compressor will do to a cache: segments, groups, lengths; and whether its weight file can. No K or V here.

The rules are those of the runtime that loads KVCM files; docs/compressor-forward.md states them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..._util.text import pluralize
from ..._util.validation import validate_int
from ...dtypes import PARTS, Part
from ...errors import KvmnnError
from ...files.schema import Record, json_key
from ..kvcm import DEFAULT_PREFIXES, SLOTS_PER_PREFIX, WeightFile, WeightFileHeader

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
    """A run of tokens that is compressed by itself."""

    #: ``"image"`` or ``"text"``.
    kind: SegmentKind
    #: Its place in the cache and its length.
    begin: int
    tokens: int
    #: Tokens made by the compressor; 0 where the segment stays as it is.
    groups: int
    #: Tokens in a group.
    factor: int

    @property
    def grouped_tokens(self) -> int:
        """Tokens that go into groups; those behind them are kept."""
        return self.groups * self.factor

    @property
    @json_key()
    def new_tokens(self) -> int:
        """Tokens that remain of it."""
        return self.groups + self.tokens - self.grouped_tokens

    def prefix_index(self, part: Part) -> int:
        """Which compressor of a layer takes its K or V."""
        return _PREFIX_INDEX[self.kind, part]

    def __str__(self) -> str:
        return (
            f"{self.kind}: {pluralize(self.tokens, 'token')} -> {self.new_tokens:,} "
            f"({pluralize(self.groups, 'group')} of {self.factor}, {self.tokens - self.grouped_tokens} kept)"
        )


@dataclass(frozen=True, kw_only=True)
class CompressionPlan(Record):
    """Lengths before and after, and the segments between.

    Parameters
    ----------
    seq_len, new_len
        Live tokens before and after; `new_len` is the place in the cache of the next token.
    factor, min_seq_len, image_len
        As they are applied.
    segments
        In order, without gaps; none is empty.
    reason
        Why nothing is compressed, or None.
    """

    seq_len: int
    new_len: int
    factor: int
    min_seq_len: int
    image_len: int
    segments: tuple[CompressionSegment, ...]
    reason: NoCompressionReason | None

    @property
    def ratio(self) -> float:
        """Tokens before over tokens after."""
        return self.seq_len / self.new_len if self.new_len else 1.0

    @property
    def explanation(self) -> str:
        """`reason` as a sentence; empty where there is none."""
        return _explain_reason(self)


def plan_compression(
    weights: WeightFile, layers: list[int], batch: int, tokens: int, head_dim: int, options: ForwardOptions
) -> CompressionPlan:
    """Decide what happens to a cache, and check that the weight file has what every layer needs."""
    header = weights.header
    seq_len = tokens if options.seq_len is None else min(options.seq_len, tokens)
    factor, min_groups = _resolve_factor(header, options), _resolve_min_groups(header, options)
    image_len = min(options.image_len, seq_len)
    has_text = header.weight_count_per_layer >= _NUM_TEXT_BLOCKS
    has_image = header.weight_count_per_layer >= _NUM_IMAGE_BLOCKS
    reason = _find_no_op_reason(options, seq_len, batch, factor, has_text)

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
    if not _has_compressor_for(weights, factor * head_dim) and _is_output_uniform(weights, head_dim):
        unchanged_segments = tuple(replace(segment, groups=0) for segment in segments)
        return replace(plan, segments=unchanged_segments, new_len=seq_len, reason="factor_not_trained")
    _check_weights(weights, layers, head_dim, plan)
    return plan


def _resolve_factor(header: WeightFileHeader, options: ForwardOptions) -> int:
    return options.factor if options.factor > 1 else header.compression_factor


def _resolve_min_groups(header: WeightFileHeader, options: ForwardOptions) -> int:
    return options.min_seq_len or header.min_seq_len


def _find_no_op_reason(
    options: ForwardOptions, seq_len: int, batch: int, factor: int, has_text: bool
) -> NoCompressionReason | None:
    if not options.enabled:
        return "disabled"
    if seq_len == 0 or batch == 0:
        return "empty"
    if factor <= 1:
        return "factor"
    return None if has_text else "no_text_mlp"


def _list_compressors(weights: WeightFile) -> list[tuple[int, int]]:
    """``(layer, prefix)`` of every compressor that the runtime may use."""
    prefixes = 4 if weights.header.weight_count_per_layer >= _NUM_IMAGE_BLOCKS else 2
    return [(layer, prefix) for layer in range(weights.header.num_layers) for prefix in range(prefixes)]


def _has_compressor_for(weights: WeightFile, inputs: int) -> bool:
    """Whether any compressor takes `inputs` inputs; the runtime compresses nothing where none does."""
    return any(
        weights.get_placement(layer, prefix * SLOTS_PER_PREFIX).cols == inputs
        for layer, prefix in _list_compressors(weights)
    )


def _is_output_uniform(weights: WeightFile, outputs: int) -> bool:
    """Whether every compressor makes `outputs` outputs, so that a wrong number of inputs is due to the factor."""
    last_slot = SLOTS_PER_PREFIX - 1
    return all(
        weights.get_placement(layer, prefix * SLOTS_PER_PREFIX + last_slot).rows == outputs
        for layer, prefix in _list_compressors(weights)
    )


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
    """Each Linear must take what the one before it makes; the first takes a group, the last makes a token."""
    location = f"{weights.label}: layer {layer}, {DEFAULT_PREFIXES[prefix]}"
    width, source = factor * head_dim, f"factor {factor} x head_dim {head_dim}"
    for slot in range(SLOTS_PER_PREFIX):
        placement = weights.get_placement(layer, prefix * SLOTS_PER_PREFIX + slot)
        if placement.cols != width:
            raise KvmnnError(f"{location}: linear {slot} takes {placement.cols} inputs, expected {width} ({source})")
        width, source = placement.rows, f"the outputs of linear {slot}"
    if width != head_dim:
        raise KvmnnError(f"{location}: makes {width} outputs, expected {head_dim} (head_dim)")


def _explain_reason(plan: CompressionPlan) -> str:
    groups = ", ".join(f"{s.kind} {s.tokens // plan.factor if plan.factor else 0}" for s in plan.segments)
    texts: dict[NoCompressionReason, str] = {
        "disabled": "compression is switched off",
        "empty": "the cache is empty",
        "factor": f"the factor is {plan.factor}, which leaves every token alone",
        "no_text_mlp": "the weight file has no compressor for text",
        "too_short": f"no segment with a compressor has {plan.min_seq_len} groups of {plan.factor} ({groups})",
        "factor_not_trained": f"no compressor in the weight file takes groups of {plan.factor} tokens",
    }
    return texts[plan.reason] if plan.reason else ""
