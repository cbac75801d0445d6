"""Frequencies of rotary position embedding (RoPE), by which rows of K at different positions are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.validation import repr_short, validate_int
from ..errors import KvmnnError
from . import _stream, tuning

PAIRINGS = ("half", "interleaved")
SCALINGS = ("linear", "ntk", "yarn", "llama3")

_PI_DECIMAL = Decimal("3.14159265358979323846264338327950288419716939937510")
_DECIMAL_CONTEXT = Context(prec=40)
_INTERLEAVED_MODELS = (
    *("gptj", "codegen", "cohere", "cohere2", "glm", "glm4", "chatglm", "llama4", "llama4_text"),
    *("ernie4_5", "ernie4_5_moe", "helium", "glm_ocr"),
)
"""Values of `model_type` whose pairs are interleaved."""


@dataclass(frozen=True)
class RopeConfig:
    """How a model rotates K (RoPE). Wrong parameters make a dense stream longer, and change nothing else.

    Parameters
    ----------
    theta
        Base of the frequencies: pair i turns by ``theta ** (-2 * i / dims)`` radians a position.
    dims
        Words of each head that are rotated, the first ones; even.
    pairing
        ``"half"``: word i and word i + dims / 2 are a pair (Llama, Qwen, GPT-NeoX). ``"interleaved"``: words 2 i and
        2 i + 1 (GPT-J).
    scaling
        None, or as models' config.json have it: ``rope_type`` ``"linear"`` (`factor`), ``"ntk"`` (`factor`), ``"yarn"``
        (`factor`, `original_max_position_embeddings`, and `beta_fast`, `beta_slow`, `truncate`, which have defaults) or
        ``"llama3"`` (`factor`, `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`).

    Raises
    ------
    KvmnnError
        For values outside of these.

    Notes
    -----
    The scalings are those of transformers (modeling_rope_utils.py), from the papers and posts that it names: linear
    position interpolation, NTK-aware scaling of theta, YaRN, Llama 3.1.
    """

    theta: float = 10000.0
    dims: int = 64
    pairing: str = "half"
    scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.theta, bool) or not isinstance(self.theta, int | float) or not 1 < self.theta <= 1e12:
            raise KvmnnError(f"theta is {repr_short(self.theta)}: expected a number above 1, up to 1e12")
        if validate_int(self.dims, "dims", 2, 65534) % 2:
            raise KvmnnError(f"dims is {self.dims}: expected an even number")
        if self.pairing not in PAIRINGS:
            raise KvmnnError(f"pairing is {repr_short(self.pairing)}: expected one of {', '.join(PAIRINGS)}")
        if self.scaling is not None and _get_scaling_type(self.scaling) not in SCALINGS:
            raise KvmnnError(
                f"scaling is {repr_short(_get_scaling_type(self.scaling))}: expected one of {', '.join(SCALINGS)}"
            )
        _ = self.frequencies

    def __str__(self) -> str:
        parts = [f"theta={self.theta:.12g}", f"dims={self.dims}"]
        parts += ["pairing=interleaved"] * (self.pairing == "interleaved")
        if self.scaling is not None:
            parts.append(
                f"scaling={_get_scaling_type(self.scaling)} with factor {_read_parameter(self.scaling, 'factor'):g}"
            )
        return ",".join(parts)

    @cached_property
    def frequencies(self) -> npt.NDArray[np.uint64]:
        """Return for each pair the turns per position, times 2^64; identical on every machine."""
        context = _DECIMAL_CONTEXT
        turns = []
        for radians in _scale_frequencies(self):
            exact_turns = context.divide(context.multiply(radians, Decimal(1 << 63)), _PI_DECIMAL)
            turns.append(int(context.to_integral_value(exact_turns)) & ((1 << 64) - 1))
        return np.array(turns, np.uint64)

    @property
    def rotation(self) -> _stream.Rotation:
        """Return dims, pairing and frequencies in the form of the compiled code."""
        return self.dims, int(self.pairing == "interleaved"), self.frequencies

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RopeConfig | None:
        """Return the parameters in a model's config.json, given as a mapping; None for a model without RoPE.

        Raises
        ------
        KvmnnError
            If a value is not valid, or the scaling is unknown.
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"config must be a mapping, such as json.load gives, not {type(config).__name__}")
        if isinstance(config.get("text_config"), Mapping):
            config = config["text_config"]
        rope_parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
        scaling = rope_parameters if isinstance(rope_parameters, Mapping) else {}
        theta = scaling.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base")))
        if theta is None and "rotary_dim" not in config:
            return None
        dims = config.get("rotary_dim")
        if dims is None:
            rotated_fraction = scaling.get(
                "partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
            )
            dims = int(_read_head_dim(config) * _parse_number(rotated_fraction, "partial_rotary_factor"))
        scaling_type = _get_scaling_type(scaling)
        return cls(
            theta=float(_parse_number(10000.0 if theta is None else theta, "rope_theta")),
            dims=dims,
            pairing="interleaved" if config.get("model_type") in _INTERLEAVED_MODELS else "half",
            scaling=None if scaling_type in ("default", "dynamic") else scaling,
        )


@lru_cache(64)
def describe_frequencies(dims: int, pairing: str, frequencies: tuple[int, ...]) -> str:
    """Describe frequencies (turns a position, times 2^64): by the theta that gives them, else by the first and last."""
    turns = [frequency / 2**64 for frequency in frequencies]
    if 2 < dims <= tuning.MAX_DESCRIBED_DIMS and turns[1] > 0:
        log = -math.log(2 * math.pi * turns[1]) * dims / 2
        theta = float(f"{math.exp(min(log, 28)):.12g}")
        if 1 < theta <= 1e12 and frequencies == tuple(RopeConfig(theta, dims, pairing).frequencies.tolist()):
            return str(RopeConfig(theta, dims, pairing))
    return f"dims={dims},pairing={pairing}, {turns[0]:.6g} to {turns[-1]:.6g} turns a position"


def _get_scaling_type(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _read_head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return validate_int(config["head_dim"], "head_dim", 1, 65535)
    heads = validate_int(config.get("num_attention_heads", 0), "num_attention_heads", 1)
    return validate_int(config.get("hidden_size", 0), "hidden_size", 1) // heads


def _parse_number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise KvmnnError(f"{name} is {repr_short(value)}: expected a number above 0")
    return float(value)


def _read_parameter(scaling: Mapping[str, Any], name: str, default: float | None = None) -> float:
    if name not in scaling and default is None:
        raise KvmnnError(f"scaling {_get_scaling_type(scaling)!r} has no {name}")
    return _parse_number(scaling.get(name, default), name)


def _scale_frequencies(config: RopeConfig) -> list[Decimal]:
    """Return radians a position for each pair."""
    scaling, theta, dims = config.scaling, Decimal(config.theta), config.dims
    context = _DECIMAL_CONTEXT
    if scaling is None:
        return _compute_unscaled_frequencies(theta, dims)
    scaling_type, factor = _get_scaling_type(scaling), Decimal(_read_parameter(scaling, "factor"))
    if scaling_type == "ntk":
        power = Decimal(dims) / Decimal(max(dims - 2, 1))
        return _compute_unscaled_frequencies(context.multiply(theta, context.power(factor, power)), dims)
    unscaled = _compute_unscaled_frequencies(theta, dims)
    if scaling_type == "linear":
        return [context.divide(radians, factor) for radians in unscaled]
    if scaling_type == "yarn":
        return _apply_yarn(unscaled, scaling, factor, config)
    return _apply_llama3(unscaled, scaling, factor)


def _compute_unscaled_frequencies(theta: Decimal, dims: int) -> list[Decimal]:
    return [
        _DECIMAL_CONTEXT.power(theta, _DECIMAL_CONTEXT.divide(Decimal(-2 * i), Decimal(dims))) for i in range(dims // 2)
    ]


def _interpolate(scaled_frequency: Decimal, unscaled_frequency: Decimal, unscaled_fraction: Decimal) -> Decimal:
    """Return the mean of both frequencies, weighted by `unscaled_fraction`."""
    return _DECIMAL_CONTEXT.add(
        _DECIMAL_CONTEXT.multiply(scaled_frequency, 1 - unscaled_fraction),
        _DECIMAL_CONTEXT.multiply(unscaled_frequency, unscaled_fraction),
    )


def _apply_yarn(
    unscaled: list[Decimal], scaling: Mapping[str, Any], factor: Decimal, config: RopeConfig
) -> list[Decimal]:
    length = Decimal(_read_parameter(scaling, "original_max_position_embeddings"))

    def find_pair(turns: float) -> float:
        """Return the pair that turns that often over the original length."""
        ratio = _DECIMAL_CONTEXT.divide(length, Decimal(turns) * 2 * _PI_DECIMAL)
        return float(
            _DECIMAL_CONTEXT.divide(
                config.dims * _DECIMAL_CONTEXT.ln(ratio), 2 * _DECIMAL_CONTEXT.ln(Decimal(config.theta))
            )
        )

    low, high = (
        find_pair(_read_parameter(scaling, "beta_fast", 32.0)),
        find_pair(_read_parameter(scaling, "beta_slow", 1.0)),
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dims - 1)
    span = Decimal(high - low) if high != low else Decimal("0.001")
    frequencies = []
    for i, radians in enumerate(unscaled):
        ramp = min(max((Decimal(i) - Decimal(low)) / span, Decimal(0)), Decimal(1))
        frequencies.append(_interpolate(_DECIMAL_CONTEXT.divide(radians, factor), radians, 1 - ramp))
    return frequencies


def _apply_llama3(unscaled: list[Decimal], scaling: Mapping[str, Any], factor: Decimal) -> list[Decimal]:
    length = Decimal(_read_parameter(scaling, "original_max_position_embeddings"))
    low, high = (
        Decimal(_read_parameter(scaling, "low_freq_factor")),
        Decimal(_read_parameter(scaling, "high_freq_factor")),
    )
    if low >= high:
        raise KvmnnError(f"low_freq_factor is {low}: expected less than high_freq_factor, {high}")
    frequencies = []
    for radians in unscaled:
        turns = _DECIMAL_CONTEXT.divide(_DECIMAL_CONTEXT.multiply(length, radians), 2 * _PI_DECIMAL)
        unscaled_fraction = min(max((turns - low) / (high - low), Decimal(0)), Decimal(1))
        frequencies.append(_interpolate(_DECIMAL_CONTEXT.divide(radians, factor), radians, unscaled_fraction))
    return frequencies


_FULL_TURN = 1 << 64
_PI_FRACTION = Fraction("3.14159265358979323846264338327950288419716939937510")


@dataclass(frozen=True, eq=False)
class RopeFrequencies:
    """Rotation of K of one layer by explicit frequencies."""

    #: Elements of each head that are rotated, the first ones; even.
    dims: int
    #: ``"half"`` or ``"interleaved"``, as of `RopeConfig`.
    pairing: str
    #: uint64 ``[dims / 2]``: turns a position of each pair, times 2^64.
    turns: npt.NDArray[np.uint64]
    #: A description such as ``"theta=10000,dims=64"``.
    label: str

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS or self.dims < 2 or self.turns.shape != (self.dims // 2,) or self.dims % 2:
            raise KvmnnError(f"{self.turns.size} frequencies and {self.dims} dims ({self.pairing}) do not fit")

    @classmethod
    def from_config(cls, config: RopeConfig) -> RopeFrequencies:
        """Return the frequencies for a model's RoPE parameters."""
        return cls(config.dims, config.pairing, config.frequencies, str(config))

    @classmethod
    def from_radians(cls, radians: Sequence[float], pairing: str) -> RopeFrequencies:
        """Return frequencies given in radians a position for each pair; the label contains the theta that fits them."""
        turns = [round(Fraction(angle) * (_FULL_TURN // 2) / _PI_FRACTION) % _FULL_TURN for angle in radians]
        return cls(2 * len(turns), pairing, np.array(turns, np.uint64), _format_label(radians, pairing))

    def divide_by(self, factors: Sequence[float]) -> RopeFrequencies:
        """Return the frequencies, each divided by its factor."""
        turns = [
            round(int(turn) / Fraction(factor)) % _FULL_TURN for turn, factor in zip(self.turns, factors, strict=True)
        ]
        label = f"{self.label},frequencies divided by {min(factors):.4g} to {max(factors):.4g}"
        return RopeFrequencies(self.dims, self.pairing, np.array(turns, np.uint64), label)

    @property
    def radians(self) -> npt.NDArray[np.float32]:
        """Radians a position of each pair, float32 ``[dims / 2]``."""
        return np.asarray(self.turns * (2 * np.pi / 2.0**64), np.float32)

    @property
    def rotation(self) -> _stream.Rotation:
        """Return dims, pairing and frequencies in the form of the compiled code."""
        return self.dims, int(self.pairing == "interleaved"), self.turns

    def to_config(self) -> RopeConfig | None:
        """Return the parameters whose theta gives these frequencies without scaling; None if there are none."""
        theta = _infer_theta((self.turns * (2 * np.pi / 2.0**64)).astype(np.float64), self.dims)
        return None if theta is None else RopeConfig(theta=theta, dims=self.dims, pairing=self.pairing)

    def is_equivalent(self, rope: RopeFrequencies) -> bool:
        """Return whether both rotations are the same up to the rounding of float32 frequencies."""
        if (self.dims, self.pairing) != (rope.dims, rope.pairing):
            return False
        distance = np.minimum(self.turns - rope.turns, rope.turns - self.turns)  # wraps around: a turn is a circle
        return bool((distance.astype(np.float64) <= 1e-6 * np.minimum(self.turns, rope.turns)).all())


def _format_label(radians: Sequence[float], pairing: str) -> str:
    dims = 2 * len(radians)
    parts = [f"dims={dims}"] + ["pairing=interleaved"] * (pairing == "interleaved")
    theta = _infer_theta(np.asarray(radians, np.float64), dims)
    if theta is not None:
        return ",".join([f"theta={theta:.12g}", *parts])
    return ",".join(parts) + f", frequencies {max(radians):.6g} to {min(radians):.6g} radians a position"


def _infer_theta(radians: npt.NDArray[np.float64], dims: int) -> float | None:
    """Return the theta that gives these frequencies without scaling; None if there is none."""
    if len(radians) < 2 or not (radians > 0).all():
        return None
    exponents = -2.0 * np.arange(1, len(radians)) / dims
    logs = np.log(radians)
    if abs(logs[0]) > tuning.MAX_THETA_ERROR:
        return None
    theta = float(f"{np.exp(np.median(logs[1:] / exponents)):.4g}")
    return theta if np.abs(logs[1:] - exponents * np.log(theta)).max() < tuning.MAX_THETA_ERROR else None
