"""What a compressor will do to a cache: segments, groups, lengths; and whether its weights can. It computes no K or V.

The rules are those of the runtime that loads KVCM files; docs/compressor-forward.md states them.
"""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ...errors import KvmnnError
from ..kvcm.header import PREFIXES, SLOTS_PER_PREFIX
from ..kvcm.weight_file import WeightFile

Kind = Literal["image", "text"]
Reason = Literal["disabled", "empty", "factor", "no_text_mlp", "too_short", "factor_not_trained"]

Precision = Literal["fp32", "fp16"]
EngineName = Literal["numpy", "onnx"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
ENGINES: tuple[EngineName, ...] = ("numpy", "onnx")

_KIND_PREFIXES: dict[Kind, tuple[int, int]] = {"text": (0, 1), "image": (2, 3)}
_TEXT_BLOCKS = 2 * SLOTS_PER_PREFIX
_IMAGE_BLOCKS = 4 * SLOTS_PER_PREFIX


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """What the caller asks of a compression.

    Parameters
    ----------
    image_len
        Tokens at the front that belong to the image; more than there are means all of them.
    factor
        Tokens that become one; 0 and 1 mean what the weights' header says.
    min_seq_len
        Least number of whole groups (not tokens) for a segment to be compressed; 0 means what the header says.
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
        For numbers that are not whole.
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
            if value is None and name == "seq_len":
                continue
            if isinstance(value, bool):
                raise TypeError(f"{name} must be a number, not {value}")
            if operator.index(value) < 0:
                raise KvmnnError(f"{name} is {value}: expected 0 or more")
            object.__setattr__(self, name, operator.index(value))
        for name, known in (("precision", PRECISIONS), ("engine", ENGINES)):
            if getattr(self, name) not in known:
                raise KvmnnError(f"unknown {name} {getattr(self, name)!r}: expected one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of tokens that is compressed by itself.

    Parameters
    ----------
    kind
        ``"image"`` or ``"text"``.
    begin, tokens
        Its place in the cache and its length.
    groups
        Tokens made by the compressor; 0 where the segment stays as it is.
    factor
        Tokens in a group.
    """

    kind: Kind
    begin: int
    tokens: int
    groups: int
    factor: int

    @property
    def grouped(self) -> int:
        """Tokens that go into groups; those behind them are kept."""
        return self.groups * self.factor

    @property
    def new_tokens(self) -> int:
        """Tokens that remain of it."""
        return self.groups + self.tokens - self.grouped

    @property
    def prefixes(self) -> tuple[int, int]:
        """Which compressors of a layer take its K and its V."""
        return _KIND_PREFIXES[self.kind]


@dataclass(frozen=True, kw_only=True)
class Plan:
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
    segments: tuple[Segment, ...]
    reason: Reason | None

    @property
    def ratio(self) -> float:
        """Tokens before over tokens after."""
        return self.seq_len / self.new_len if self.new_len else 1.0

    @property
    def explanation(self) -> str:
        """`reason` as a sentence; empty where there is none."""
        return _explain(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        segments = [{**asdict(segment), "new_tokens": segment.new_tokens} for segment in self.segments]
        return {**asdict(self), "segments": segments}


def make_plan(
    weights: WeightFile, layers: list[int], batch: int, tokens: int, head_dim: int, options: ForwardOptions
) -> Plan:
    """Decide what happens to a cache, and check that the weights can do it to every layer.

    Parameters
    ----------
    weights
        Their header gives factor and least number of groups where `options` do not.
    layers
        The cache's layers, which are those of the weights with the same numbers.
    batch, tokens, head_dim
        Shape of the cache.

    Raises
    ------
    KvmnnError
        When the weights have fewer layers than the cache, or a compressor that is needed does not fit the cache or
        itself. Nothing has been computed then.
    """
    header = weights.header
    seq_len = tokens if options.seq_len is None else min(options.seq_len, tokens)
    factor = options.factor if options.factor > 1 else header.compression_factor
    least = options.min_seq_len or header.min_seq_len
    image_len = min(options.image_len, seq_len)
    has_text = header.weight_count_per_layer >= _TEXT_BLOCKS
    has_image = header.weight_count_per_layer >= _IMAGE_BLOCKS
    reason = _no_op(options, seq_len, batch, factor, has_text)

    def groups(kind: Kind, length: int) -> int:
        if reason or (kind == "image" and not has_image):
            return 0
        return length // factor if length // factor >= least else 0

    spans: list[tuple[Kind, int, int]] = [("image", 0, image_len), ("text", image_len, seq_len - image_len)]
    segments = tuple(
        Segment(kind=kind, begin=begin, tokens=length, groups=groups(kind, length), factor=factor)
        for kind, begin, length in spans
        if length
    )
    plan = Plan(
        seq_len=seq_len,
        new_len=sum(segment.new_tokens for segment in segments),
        factor=factor,
        min_seq_len=least,
        image_len=image_len,
        segments=segments,
        reason=reason or (None if any(segment.groups for segment in segments) else "too_short"),
    )
    if plan.reason:
        return plan
    if not _trained_for(weights, factor * head_dim) and _makes(weights, head_dim):
        kept = tuple(replace(segment, groups=0) for segment in segments)
        return replace(plan, segments=kept, new_len=seq_len, reason="factor_not_trained")
    _check_weights(weights, layers, head_dim, plan)
    return plan


def _no_op(options: ForwardOptions, seq_len: int, batch: int, factor: int, has_text: bool) -> Reason | None:
    if not options.enabled:
        return "disabled"
    if seq_len == 0 or batch == 0:
        return "empty"
    if factor <= 1:
        return "factor"
    return None if has_text else "no_text_mlp"


def _compressors(weights: WeightFile) -> list[tuple[int, int]]:
    """``(layer, prefix)`` of every compressor that the runtime may use."""
    prefixes = 4 if weights.header.weight_count_per_layer >= _IMAGE_BLOCKS else 2
    return [(layer, prefix) for layer in range(weights.header.num_layers) for prefix in range(prefixes)]


def _trained_for(weights: WeightFile, inputs: int) -> bool:
    """Whether any compressor takes that many inputs; the runtime compresses nothing where none does."""
    return any(
        weights.place(layer, prefix * SLOTS_PER_PREFIX).cols == inputs for layer, prefix in _compressors(weights)
    )


def _makes(weights: WeightFile, outputs: int) -> bool:
    """Whether every compressor makes that many outputs, so that a wrong number of inputs is the factor's doing."""
    last = SLOTS_PER_PREFIX - 1
    return all(
        weights.place(layer, prefix * SLOTS_PER_PREFIX + last).rows == outputs
        for layer, prefix in _compressors(weights)
    )


def _check_weights(weights: WeightFile, layers: list[int], head_dim: int, plan: Plan) -> None:
    have = weights.header.num_layers
    if layers and max(layers) >= have:
        raise KvmnnError(
            f"{weights.label}: has weights for {have} layers, the cache has a layer {max(layers)}: "
            f"expected at least {max(layers) + 1}"
        )
    used = [prefix for segment in plan.segments if segment.groups for prefix in segment.prefixes]
    for layer in layers:
        for prefix in used:
            _check_chain(weights, layer, prefix, head_dim, plan.factor)


def _check_chain(weights: WeightFile, layer: int, prefix: int, head_dim: int, factor: int) -> None:
    """Each Linear must take what the one before it makes; the first takes a group, the last makes a token."""
    where = f"{weights.label}: layer {layer}, {PREFIXES[prefix]}"
    width, source = factor * head_dim, f"factor {factor} x head_dim {head_dim}"
    for slot in range(SLOTS_PER_PREFIX):
        place = weights.place(layer, prefix * SLOTS_PER_PREFIX + slot)
        if place.cols != width:
            raise KvmnnError(f"{where}: linear {slot} takes {place.cols} inputs, expected {width} ({source})")
        width, source = place.rows, f"the outputs of linear {slot}"
    if width != head_dim:
        raise KvmnnError(f"{where}: makes {width} outputs, expected {head_dim} (head_dim)")


def _explain(plan: Plan) -> str:
    whole = ", ".join(f"{s.kind} {s.tokens // plan.factor if plan.factor else 0}" for s in plan.segments)
    texts: dict[Reason, str] = {
        "disabled": "compression is switched off",
        "empty": "the cache is empty",
        "factor": f"the factor is {plan.factor}, which leaves every token alone",
        "no_text_mlp": "the weights have no compressor for text",
        "too_short": f"no segment with weights for it has {plan.min_seq_len} whole groups of {plan.factor} ({whole})",
        "factor_not_trained": f"no compressor in the weights takes groups of {plan.factor} tokens",
    }
    return texts[plan.reason] if plan.reason else ""
