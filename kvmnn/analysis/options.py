"""Options of the offline analysis, with the names and error messages of the reference's tool.

The reference is the offline evaluation in the H2O work on MNN (docs/offline.md). Its defaults apply except for the
scope: the reference selects two layers, kvmnn all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.option_fields import option
from ..dtypes import PART_LETTERS, PARTS, Bytes, Part
from ..errors import KvmnnError, OptionError
from . import _stream_meter

PREDICTOR_NAMES: tuple[str, ...] = _stream_meter.PREDICTOR_NAMES
"""``raw``; ``delta_seq``, ``xor_seq``: each token minus, or exclusive-or, the one before; ``pair_delta``: odd columns
of a head minus their left neighbours; ``pair_delta_delta_seq``: the two in that order."""


def parse_predictor_list(flag: str, text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of predictors; each is returned once, in order."""
    names: list[str] = []
    for item in text.split(","):
        name = item.strip()
        if not name:
            continue
        if name not in PREDICTOR_NAMES:
            raise KvmnnError(f"{flag}: invalid predictor `{name}`")
        if name not in names:
            names.append(name)
    if not names:
        raise KvmnnError(f"{flag}: predictor list is empty")
    return tuple(names)


def apply_predictor(lane: npt.NDArray[Any], name: str) -> Bytes:
    """Apply the predictor called `name` to a lane.

    Parameters
    ----------
    lane
        uint8 ``[token, kv_head, head_dim]``.
    """
    tokens, heads, dims, predictor_id = _parse_lane_arguments(lane, name)
    if lane.size == 0:
        return lane.copy()
    stream = _stream_meter.predict(np.ascontiguousarray(lane).reshape(-1), heads, dims, predictor_id)
    return np.frombuffer(stream, np.uint8).reshape(tokens, heads, dims)


def invert_predictor(stream: npt.NDArray[Any], name: str) -> Bytes:
    """Recover the lane from a stream of `apply_predictor`."""
    tokens, heads, dims, predictor_id = _parse_lane_arguments(stream, name)
    if stream.size == 0:
        return stream.copy()
    lane = _stream_meter.unpredict(np.ascontiguousarray(stream).reshape(-1), heads, dims, predictor_id)
    return np.frombuffer(lane, np.uint8).reshape(tokens, heads, dims)


def bitshuffle(data: bytes | bytearray | memoryview | Bytes) -> bytes:
    """Transpose `data` (n bytes) to bit planes: all lowest bits first, ``n * 8`` bits packed from the lowest bit up."""
    return _stream_meter.bitshuffle(data)


def _parse_lane_arguments(lane: npt.NDArray[Any], name: str) -> tuple[int, int, int, int]:
    if lane.ndim != 3 or lane.dtype != np.uint8:
        raise TypeError(f"expected uint8 [token, kv_head, head_dim], not {lane.dtype} {list(lane.shape)}")
    if name not in PREDICTOR_NAMES:
        raise KvmnnError(f"unknown predictor {name!r}: expected one of {', '.join(PREDICTOR_NAMES)}")
    tokens, heads, dims = lane.shape
    return tokens, heads, dims, PREDICTOR_NAMES.index(name)


STAGES = ("prefill", "decode", "both")
SCOPES = ("all", "front_n", "layer_range", "layer_ids")
_SCOPE_OF_OPTION = {
    "front_n": "front_n",
    "layer_start": "layer_range",
    "layer_end": "layer_range",
    "layer_ids": "layer_ids",
}
ENTRY_MODES = ("per_meta", "aggregate", "chunked", "chunked_grouped")
CODEC_MODES = ("legacy", "adaptive_v22")
MAX_ZSTD_LEVEL = 22
"""The highest compression level of libzstd."""

LaneHalf = Literal["hi", "lo"]
"""The high or the low bytes of 16-bit words."""
LANE_HALVES: tuple[LaneHalf, LaneHalf] = ("hi", "lo")


LANES = ("k_hi", "k_lo", "v_hi", "v_lo")
"""The byte lanes, as options and documents call them."""

FP32_LANES = (0, 1, 2, 3)
"""The byte lanes of 32-bit words, the lowest byte first."""

DEFAULT_K_PREDICTORS = ("raw", "delta_seq", "xor_seq", "pair_delta", "pair_delta_delta_seq")
DEFAULT_V_PREDICTORS = ("raw", "delta_seq", "xor_seq")
"""Default predictors, those of the reference; others must be requested by name."""


class ArgumentsError(OptionError):
    """Unknown arguments, or an argument with an invalid value."""


class NothingSelectedError(KvmnnError):
    """No dump is left to measure."""


def _make_inferred_field(text: str, **settings: Any) -> Any:
    """Make a field whose value depends on the others, unless it is given."""
    return field(default=None, metadata=option(text, **settings))


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Which dumps are selected.

    Without `scope`, whichever of the options of one scope is given decides; without any of them, all layers.
    """

    stage: str = field(default="both", metadata=option("(default: both: any)", choices=STAGES))
    scope: str = _make_inferred_field("how layers are chosen (default: all; the evaluation's: front_n)", choices=SCOPES)
    front_n: int = _make_inferred_field("the first N layers (default: 2)")
    layer_start: int = _make_inferred_field("first of layer_range (default: 2)")
    layer_end: int = _make_inferred_field("last of layer_range, which it includes (default: -1: any)")
    layer_ids: tuple[int, ...] = field(
        default=(), metadata=option("the layers of layer_ids", metavar="N[,N...]", parse=str)
    )
    min_seq_len: int = field(default=0, metadata=option("tokens of a dump at least (default: 0, any)"))
    max_seq_len: int = field(default=0, metadata=option("tokens of a dump at most (default: 0, any)"))
    strict_fp16: bool = field(default=False, metadata=option("leave fp32 out"))
    #: Round fp32 to fp16 before measuring, as the reference does; otherwise fp32 is measured as fp32.
    to_fp16: bool = False

    def __post_init__(self) -> None:
        _check_choice("--stage", self.stage, STAGES)
        explicit_scope: str | None = self.scope
        defaults = {"scope": explicit_scope or self._infer_scope(), "front_n": 2, "layer_start": 2, "layer_end": -1}
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        _check_choice("--scope", self.scope, SCOPES)
        object.__setattr__(self, "layer_ids", tuple(sorted(set(self.layer_ids))))
        if self.scope == "front_n" and self.front_n <= 0:
            raise OptionError("--front-n must be > 0 when scope=front_n.")

    def _infer_scope(self) -> str:
        """Infer the scope from the options that are set."""
        scopes = {scope for name, scope in _SCOPE_OF_OPTION.items() if getattr(self, name) not in (None, ())}
        if len(scopes) > 1:
            raise OptionError(f"options of {' and '.join(sorted(scopes))}: say which with --scope")
        return scopes.pop() if scopes else "all"

    def check_layer_ids(self) -> None:
        """Raise an error for the scope ``layer_ids`` without layers."""
        if self.scope == "layer_ids" and not self.layer_ids:
            raise OptionError("--layer-ids must be non-empty when scope=layer_ids.")

    def includes_layer(self, layer: int) -> bool:
        """Return whether a layer is in the scope."""
        if self.scope == "all":
            return True
        if self.scope == "front_n":
            return 0 <= layer < self.front_n
        if self.scope == "layer_range":
            return layer >= self.layer_start and (self.layer_end < 0 or layer <= self.layer_end)
        return layer in self.layer_ids

    def includes_length(self, tokens: int) -> bool:
        """Return whether a dump of `tokens` tokens is within the length limits."""
        if self.min_seq_len > 0 and tokens < self.min_seq_len:
            return False
        return not (self.max_seq_len > 0 and tokens > self.max_seq_len)


def _make_lane_field(lane: str, names: tuple[str, ...]) -> Any:
    """Make the field of a lane, whose option is ``--k-hi-predictors`` and so on."""
    text = f"what adaptive_v22 tries on the {lane[2:]} bytes of {lane[0].upper()} (default: {','.join(names)})"
    flag = f"--{lane.replace('_', '-')}-predictors"
    return field(default=names, metadata=option(text, flag=flag, metavar="NAMES", parse=_split_names))


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclass(frozen=True, kw_only=True)
class LanePredictors:
    """Predictors to try on each byte lane of K and V, by name (`PREDICTOR_NAMES`), in order."""

    k_hi: tuple[str, ...] = _make_lane_field("k_hi", DEFAULT_K_PREDICTORS)
    k_lo: tuple[str, ...] = _make_lane_field("k_lo", DEFAULT_K_PREDICTORS)
    v_hi: tuple[str, ...] = _make_lane_field("v_hi", DEFAULT_V_PREDICTORS)
    v_lo: tuple[str, ...] = _make_lane_field("v_lo", DEFAULT_V_PREDICTORS)

    def get_lane(self, lane: str) -> tuple[str, ...]:
        """Return the predictors of a lane, one of `LANES`."""
        names: tuple[str, ...] = getattr(self, lane)
        return names

    def normalize(self) -> LanePredictors:
        """Return a copy without repetitions; raise `OptionError` for unknown names and empty lists."""
        return LanePredictors(
            **{lane: _parse_predictors(f"--{lane.replace('_', '-')}-predictors", self.get_lane(lane)) for lane in LANES}
        )


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """All options that determine the measured sizes.

    Fields with an option are described by its help.

    Raises
    ------
    OptionError
        With the message of the reference's tool, for the first option that it would refuse.
    """

    scope: Scope = field(default_factory=Scope)
    entry_mode: str = field(
        default="per_meta",
        metadata=option(
            "aggregate: the dumps of a run and layer as one; chunked: each in pieces; chunked_grouped: both (default: "
            "per_meta: each dump alone)",
            choices=ENTRY_MODES,
        ),
    )
    online_chunk_seq: int = field(default=0, metadata=option("tokens of a piece (default: 0, one piece)"))
    online_framing_bytes: int = field(default=16, metadata=option("added for each piece of K and of V (default: 16)"))
    aggregate_by_stage: bool = field(default=False, metadata=option("keep prefill and decode apart"))
    codec_mode: str = field(
        default="adaptive_v22",
        metadata=option(
            "legacy: delta_seq for the high bytes, raw for the low (default: adaptive_v22)", choices=CODEC_MODES
        ),
    )
    adaptive_block_seq: int = field(
        default=64, metadata=option("tokens for which one predictor is chosen (default: 64)")
    )
    bitshuffle: bool = field(default=False, metadata=option("sort bits by plane before compressing"))
    zstd_level: int = field(default=3, metadata=option("at most 22 (default: 3)"))
    predictors: LanePredictors = field(default_factory=LanePredictors)
    #: Count bytes for their order-0 entropy.
    limits: bool = True
    #: With `Scope.to_fp16`: also simulate the fp32 words as they are, in four byte lanes. Without it that is what is
    #: measured, and this changes nothing.
    fp32: bool = False

    def __post_init__(self) -> None:
        _check_choice("--entry-mode", self.entry_mode, ENTRY_MODES)
        _check_choice("--codec-mode", self.codec_mode, CODEC_MODES)
        if self.adaptive_block_seq <= 0:
            raise OptionError("--adaptive-block-seq must be > 0.")
        if self.online_chunk_seq < 0:
            raise OptionError("--online-chunk-seq must be >= 0.")
        if self.online_framing_bytes < 0:
            raise OptionError("--online-framing-bytes must be >= 0.")
        if self.zstd_level > MAX_ZSTD_LEVEL:
            raise OptionError(f"--zstd-level must be <= {MAX_ZSTD_LEVEL}.")
        object.__setattr__(self, "predictors", self.predictors.normalize())
        self.scope.check_layer_ids()
        if self.fp32 and self.scope.strict_fp16:
            raise OptionError("--fp32 and --strict-fp16 exclude each other.")

    @property
    def is_grouped(self) -> bool:
        """Return whether dumps are grouped."""
        return self.entry_mode in ("aggregate", "chunked_grouped")

    @property
    def is_chunked(self) -> bool:
        """Return whether dumps are split into chunks."""
        return self.entry_mode in ("chunked", "chunked_grouped")


def format_lane(part: Part, half: LaneHalf) -> str:
    """Return the name of a byte lane, one of `LANES`."""
    return f"{PART_LETTERS[part]}_{half}"


def parse_lane(lane: str) -> tuple[Part, LaneHalf]:
    """Return the part and the half of a byte lane, one of `LANES`."""
    return next((part, half) for part in PARTS for half in LANE_HALVES if format_lane(part, half) == lane)


def _parse_predictors(flag: str, names: Sequence[str]) -> tuple[str, ...]:
    try:
        return parse_predictor_list(flag, ",".join(names))
    except KvmnnError as exc:
        raise OptionError(str(exc)) from None


def parse_layer_ids(text: str) -> tuple[int, ...]:
    """Parse a list of layers such as ``"0, 2"``."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise OptionError(f"--layer-ids: {text!r:.80} is not a list of whole numbers") from None


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{flag} is {value!r}: expected one of {', '.join(choices)}")
