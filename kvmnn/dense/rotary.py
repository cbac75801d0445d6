"""Rotary parameters of a model, as frequencies: what makes rows of K alike at different positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks import shown, whole
from ..errors import KvmnnError
from . import _stream

PAIRINGS = ("half", "interleaved")
_MOST_NAMED = 1024
"""Dims of which `named` makes all frequencies: above any model's."""
SCALINGS = ("linear", "ntk", "yarn", "llama3")

_PI = Decimal("3.14159265358979323846264338327950288419716939937510")
_EXACT = Context(prec=40)
_INTERLEAVED_MODELS = (
    *("gptj", "codegen", "cohere", "cohere2", "glm", "glm4", "chatglm", "llama4", "llama4_text"),
    *("ernie4_5", "ernie4_5_moe", "helium", "glm_ocr"),
)
"""Values of `model_type` whose pairs lie side by side."""


@dataclass(frozen=True)
class Rotary:
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
            raise KvmnnError(f"theta is {shown(self.theta)}: expected a number above 1, up to 1e12")
        if whole(self.dims, "dims", 2, 65534) % 2:
            raise KvmnnError(f"dims is {self.dims}: expected an even number")
        if self.pairing not in PAIRINGS:
            raise KvmnnError(f"pairing is {shown(self.pairing)}: expected one of {', '.join(PAIRINGS)}")
        if self.scaling is not None and _kind(self.scaling) not in SCALINGS:
            raise KvmnnError(f"scaling is {shown(_kind(self.scaling))}: expected one of {', '.join(SCALINGS)}")
        _ = self.frequencies

    def __str__(self) -> str:
        parts = [f"theta={self.theta:.12g}", f"dims={self.dims}"]
        parts += ["pairing=interleaved"] * (self.pairing == "interleaved")
        if self.scaling is not None:
            parts.append(f"scaling={_kind(self.scaling)} with factor {_parameter(self.scaling, 'factor'):g}")
        return ",".join(parts)

    @cached_property
    def frequencies(self) -> npt.NDArray[np.uint64]:
        """Turns a position, times 2^64, of each pair: the same on every machine."""
        context = _EXACT
        turns = []
        for radians in _scaled(self):
            exact = context.divide(context.multiply(radians, Decimal(1 << 63)), _PI)
            turns.append(int(context.to_integral_value(exact)) & ((1 << 64) - 1))
        return np.array(turns, np.uint64)

    @property
    def rotation(self) -> _stream.Rotation:
        """Dims, whether pairs are interleaved, and frequencies, as the compiled code takes them."""
        return self.dims, int(self.pairing == "interleaved"), self.frequencies

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Rotary | None:
        """The parameters in a model's config.json, as a mapping; None for a model without rotary embedding.

        Raises
        ------
        KvmnnError
            For values that are no parameters, and for a scaling that is not known.
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"config must be a mapping, such as json.load gives, not {type(config).__name__}")
        if isinstance(config.get("text_config"), Mapping):
            config = config["text_config"]
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        scaling = given if isinstance(given, Mapping) else {}
        theta = scaling.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base")))
        if theta is None and "rotary_dim" not in config:
            return None
        dims = config.get("rotary_dim")
        if dims is None:
            share = scaling.get(
                "partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
            )
            dims = int(_head_dim(config) * _number(share, "partial_rotary_factor"))
        kind = _kind(scaling)
        return cls(
            theta=float(_number(10000.0 if theta is None else theta, "rope_theta")),
            dims=dims,
            pairing="interleaved" if config.get("model_type") in _INTERLEAVED_MODELS else "half",
            scaling=None if kind in ("default", "dynamic") else scaling,
        )


@lru_cache(64)
def named(dims: int, pairing: str, frequencies: tuple[int, ...]) -> str:
    """What gives these frequencies (turns a position, times 2^64), in the words of `Rotary`: theta, where there is one
    for all of them, else the first and the last.
    """
    turns = [frequency / 2**64 for frequency in frequencies]
    if 2 < dims <= _MOST_NAMED and turns[1] > 0:
        log = -math.log(2 * math.pi * turns[1]) * dims / 2
        theta = float(f"{math.exp(min(log, 28)):.12g}")
        if 1 < theta <= 1e12 and frequencies == tuple(Rotary(theta, dims, pairing).frequencies.tolist()):
            return str(Rotary(theta, dims, pairing))
    return f"dims={dims},pairing={pairing}, {turns[0]:.6g} to {turns[-1]:.6g} turns a position"


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return whole(config["head_dim"], "head_dim", 1, 65535)
    heads = whole(config.get("num_attention_heads", 0), "num_attention_heads", 1)
    return whole(config.get("hidden_size", 0), "hidden_size", 1) // heads


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise KvmnnError(f"{name} is {shown(value)}: expected a number above 0")
    return float(value)


def _parameter(scaling: Mapping[str, Any], name: str, default: float | None = None) -> float:
    if name not in scaling and default is None:
        raise KvmnnError(f"scaling {_kind(scaling)!r} has no {name}")
    return _number(scaling.get(name, default), name)


def _scaled(rotary: Rotary) -> list[Decimal]:
    """Radians a position of each pair."""
    scaling, theta, dims = rotary.scaling, Decimal(rotary.theta), rotary.dims
    context = _EXACT
    if scaling is None:
        return _plain(theta, dims)
    kind, factor = _kind(scaling), Decimal(_parameter(scaling, "factor"))
    if kind == "ntk":
        power = Decimal(dims) / Decimal(max(dims - 2, 1))
        return _plain(context.multiply(theta, context.power(factor, power)), dims)
    plain = _plain(theta, dims)
    if kind == "linear":
        return [context.divide(radians, factor) for radians in plain]
    if kind == "yarn":
        return _yarn(plain, scaling, factor, rotary)
    return _llama3(plain, scaling, factor)


def _plain(theta: Decimal, dims: int) -> list[Decimal]:
    return [_EXACT.power(theta, _EXACT.divide(Decimal(-2 * i), Decimal(dims))) for i in range(dims // 2)]


def _mixed(scaled: Decimal, plain: Decimal, share: Decimal) -> Decimal:
    """`share` of the plain frequency, the rest of the scaled one."""
    return _EXACT.add(_EXACT.multiply(scaled, 1 - share), _EXACT.multiply(plain, share))


def _yarn(plain: list[Decimal], scaling: Mapping[str, Any], factor: Decimal, rotary: Rotary) -> list[Decimal]:
    length = Decimal(_parameter(scaling, "original_max_position_embeddings"))

    def pair_of(turns: float) -> float:
        """Which pair turns that often over the original length."""
        ratio = _EXACT.divide(length, Decimal(turns) * 2 * _PI)
        return float(_EXACT.divide(rotary.dims * _EXACT.ln(ratio), 2 * _EXACT.ln(Decimal(rotary.theta))))

    low, high = pair_of(_parameter(scaling, "beta_fast", 32.0)), pair_of(_parameter(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dims - 1)
    span = Decimal(high - low) if high != low else Decimal("0.001")
    made = []
    for i, radians in enumerate(plain):
        ramp = min(max((Decimal(i) - Decimal(low)) / span, Decimal(0)), Decimal(1))
        made.append(_mixed(_EXACT.divide(radians, factor), radians, 1 - ramp))
    return made


def _llama3(plain: list[Decimal], scaling: Mapping[str, Any], factor: Decimal) -> list[Decimal]:
    length = Decimal(_parameter(scaling, "original_max_position_embeddings"))
    low, high = Decimal(_parameter(scaling, "low_freq_factor")), Decimal(_parameter(scaling, "high_freq_factor"))
    if low >= high:
        raise KvmnnError(f"low_freq_factor is {low}: expected less than high_freq_factor, {high}")
    made = []
    for radians in plain:
        turns = _EXACT.divide(_EXACT.multiply(length, radians), 2 * _PI)
        share = min(max((turns - low) / (high - low), Decimal(0)), Decimal(1))
        made.append(_mixed(_EXACT.divide(radians, factor), radians, share))
    return made
