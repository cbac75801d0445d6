"""The frequencies by which RoPE rotates K of one layer, wherever they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..errors import KvmnnError
from . import _stream
from .rotary import PAIRINGS, RopeConfig

_FULL_TURN = 1 << 64
_PI_FRACTION = Fraction("3.14159265358979323846264338327950288419716939937510")
_MAX_THETA_ERROR = 1e-3
"""Relative: exporters write frequencies with few digits, which still name the theta that they were made of."""


@dataclass(frozen=True, eq=False)
class RopeFrequencies:
    """How K of one layer is rotated.

    Parameters
    ----------
    dims
        Elements of each head that are rotated, the first ones; even.
    pairing
        ``"half"`` or ``"interleaved"``, as of `RopeConfig`.
    turns
        uint64 ``[dims / 2]``: turns a position of each pair, times 2^64.
    label
        How people know it: ``"theta=10000,dims=64"``.

    Raises
    ------
    KvmnnError
        For a pairing or a number of frequencies that does not fit.
    """

    dims: int
    pairing: str
    turns: npt.NDArray[np.uint64]
    label: str

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS or self.dims < 2 or self.turns.shape != (self.dims // 2,) or self.dims % 2:
            raise KvmnnError(f"{self.turns.size} frequencies and {self.dims} dims ({self.pairing}) do not fit")

    @classmethod
    def from_config(cls, config: RopeConfig) -> RopeFrequencies:
        """Return the frequencies of the parameters of a model's configuration."""
        return cls(config.dims, config.pairing, config.frequencies, str(config))

    @classmethod
    def from_radians(cls, radians: Sequence[float], pairing: str) -> RopeFrequencies:
        """Return frequencies given as radians a position, of each pair; the label names the theta that fits them."""
        turns = [round(Fraction(angle) * (_FULL_TURN // 2) / _PI_FRACTION) % _FULL_TURN for angle in radians]
        return cls(2 * len(turns), pairing, np.array(turns, np.uint64), _format_label(radians, pairing))

    def divide_by(self, factors: Sequence[float]) -> RopeFrequencies:
        """Return each frequency divided by a factor of its own."""
        turns = [
            round(int(turn) / Fraction(factor)) % _FULL_TURN for turn, factor in zip(self.turns, factors, strict=True)
        ]
        label = f"{self.label},frequencies divided by {min(factors):.4g} to {max(factors):.4g}"
        return RopeFrequencies(self.dims, self.pairing, np.array(turns, np.uint64), label)

    @property
    def rotation(self) -> _stream.Rotation:
        """Dims, whether pairs are interleaved, and frequencies, as the compiled code takes them."""
        return self.dims, int(self.pairing == "interleaved"), self.turns

    def is_equivalent(self, rope: RopeFrequencies) -> bool:
        """Return whether both rotate alike, but for the rounding of float32 frequencies."""
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
    """The theta whose unscaled frequencies these are; None where none is."""
    if len(radians) < 2 or not (radians > 0).all():
        return None
    exponents = -2.0 * np.arange(1, len(radians)) / dims
    logs = np.log(radians)
    if abs(logs[0]) > _MAX_THETA_ERROR:
        return None
    theta = float(f"{np.exp(np.median(logs[1:] / exponents)):.4g}")
    return theta if np.abs(logs[1:] - exponents * np.log(theta)).max() < _MAX_THETA_ERROR else None
