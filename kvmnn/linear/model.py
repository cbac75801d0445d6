"""The linear model of a profile, by which lossless streams predict K and V (docs/format-linear.md).

`list_blocks` defines what predicts a side (K or V of a layer): its own K, and K and V of up to two layers below.
`get_model` returns the model of a `Profile`, which checks the tables of each side at their first use and converts them
to `_coder.Side` of the compiled code. Models are cached by profile, and threads share them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.validation import validate_int
from ..arrays.layer_cache import LayerCache
from ..dense.header import DTYPES
from ..dtypes import PARTS, Bytes, Part, parse_dtype
from ..errors import KvmnnError
from ..profiles.geometry import LayerGeometry
from ..profiles.profile import Profile
from . import _coder
from .regressors import Regressors

MAX_BELOW = 2
_UNIT_LIMIT = 1 << 30
_MAX_EXPONENT = 1 << 10
_NO_FREQUENCIES = np.zeros(0, np.uint64)


@dataclass(frozen=True)
class Predictor:
    """Rows that predict others: K or V of a layer, and their name in statistics."""

    name: str
    layer: int
    part: Part
    elements: int


def list_blocks(layers: Sequence[LayerGeometry], layer: int, part: Part, below: int) -> list[Predictor]:
    """Return what predicts K or V of a layer, in order: its own K for V, then K and V of the layers below."""
    blocks = [Predictor("key", layer, "key", layers[layer].get_row_elements("key"))] if part == "value" else []
    for distance in range(1, min(below, layer) + 1):
        lower = layer - distance
        blocks += [Predictor(f"{name}-{distance}", lower, name, layers[lower].get_row_elements(name)) for name in PARTS]
    return [block for block in blocks if layers[block.layer].get_dim(block.part) % 2 == 0]


def name_table(layer: int, part: Part, below: int, name: str) -> str:
    """Return the name of a table in a profile."""
    return f"linear/{layer}/{part}/{below}/{name}"


class LinearModel:
    """The sides of a profile for one `below`, made when they are needed; shared by threads."""

    def __init__(self, profile: Profile, below: int) -> None:
        self._profile = weakref.ref(profile)
        self.layers, self.below = profile.layers, below
        self._sides: dict[tuple[int, Part], _coder.Side | None] = {}
        self._lock = threading.Lock()

    def get_side(self, layer: int, part: Part) -> _coder.Side | None:
        """Return the side; None where the profile has no tables for it."""
        with self._lock:
            if (layer, part) not in self._sides:
                profile = self._profile()
                assert profile is not None
                self._sides[layer, part] = _build_side(profile, layer, part, self.below)
            return self._sides[layer, part]

    def compute_regressors(self, cache: LayerCache, part: Part, words: Bytes) -> Regressors | None:
        """Return the regressors of a side of a cache; None where there are none."""
        side = self.get_side(cache.layer, part)
        if side is None or cache.positions.ndim != 1:
            return None
        regressors = np.empty((cache.tokens, side.elements), np.int16)
        side.compute_regressors(
            DTYPES.index(parse_dtype(cache.dtype)), words, np.ascontiguousarray(cache.positions), regressors
        )
        return regressors


_MODELS: weakref.WeakKeyDictionary[Profile, dict[int, LinearModel]] = weakref.WeakKeyDictionary()
_MODELS_LOCK = threading.Lock()


def get_model(profile: Profile, below: int) -> LinearModel:
    """Return the model of a profile, which is made once."""
    with _MODELS_LOCK:
        models = _MODELS.setdefault(profile, {})
        if below not in models:
            models[below] = LinearModel(profile, below)
        return models[below]


def check_below(profile: Profile, below: int) -> int:
    """Return `below`; `KvmnnError` where the profile has no tables of linear streams for it."""
    validate_int(below, "below", 0, MAX_BELOW)
    numbers = {name.split("/")[-2] for name in profile.select("linear") if name.endswith("/means")}
    choices = [choice for choice in range(MAX_BELOW + 1) if str(choice) in numbers]
    if below not in choices:
        if not choices:
            raise KvmnnError(
                "the profile has no sections linear/* (tables of lossless streams): make one with kvmnn profile make "
                "without --for lossy"
            )
        raise KvmnnError(
            f"the profile has no sections linear/*/{below} (tables of lossless streams, below={below}), only of "
            f"below={', '.join(map(str, choices))}: make one with kvmnn profile make --below {below}"
        )
    return below


def _build_side(profile: Profile, layer: int, part: Part, below: int) -> _coder.Side | None:
    geometry = profile.layers[layer]
    if name_table(layer, part, below, "means") not in profile.arrays or geometry.get_dim(part) % 2:
        return None
    n = geometry.get_row_elements(part)
    num_regressors = sum(block.elements for block in list_blocks(profile.layers, layer, part, below))

    def read(name: str, dtype: str, *shape: int) -> npt.NDArray[np.generic]:
        array = profile.get_array(name_table(layer, part, below, name), dtype, shape)
        return np.ascontiguousarray(array)

    tables = {
        "exponents": read("exponents", "int16", n // 2),
        "means": read("means", "int32", n),
        "deviations": read("deviations", "int32", n),
        "sigmas": read("sigmas", "int32", n),
        "correlations": read("correlations", "int16", n // 2),
        "base": read("base", "int8", n, num_regressors),
        "base_factors": read("base_factors", "int32", n),
        "chain": read("chain", "int8", n * (n - 2) // 2),
        "chain_factors": read("chain_factors", "int32", n),
    }
    limits = {
        "exponents": (-_MAX_EXPONENT, _MAX_EXPONENT),
        "means": (-_UNIT_LIMIT + 1, _UNIT_LIMIT - 1),
        "deviations": (1024, _UNIT_LIMIT),
        "sigmas": (256, (1 << 18) - 1),
        "correlations": (-(1 << 14), 1 << 14),
    }
    for name, (low, high) in limits.items():
        array = tables[name]
        if array.min() < low or array.max() > high:
            raise KvmnnError(
                f"section {name_table(layer, part, below, name)!r} of the profile has values from {array.min()} to "
                f"{array.max()}: expected {low} to {high}"
            )
    dim = geometry.get_dim(part)
    order = (np.arange(geometry.kv_heads)[:, None] * dim + geometry.get_order(part)).reshape(-1).astype(np.int32)
    frequencies = geometry.rope
    turns = _NO_FREQUENCIES if part == "value" or frequencies is None else np.ascontiguousarray(frequencies.turns)
    return _coder.Side(dim, order, turns, **tables)  # type: ignore[arg-type]
