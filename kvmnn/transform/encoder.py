"""Encode K and V of a layer to a transform stream (docs/format-transform.md).

All steps but the rounding are linear, so the coefficients of a row follow from the row and from what a decoder will
have: errors do not add up over layers. Corrections give a text scales of its own, 0.5 to 1 % of the bytes at 1,024
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..arrays.cast import to_float32
from ..arrays.layer_cache import LayerCache
from ..dtypes import PARTS, Elements, Part, infer_dtype
from ..errors import KvmnnError
from ..profiles.geometry import LayerGeometry
from . import _codec
from .header import (
    MAX_POSITION,
    MAX_RAW_BYTES,
    MAX_TOKENS,
    TransformHeader,
    compute_checksum,
    write_runs,
    write_sections,
    write_varint,
)
from .profile_tables import ProfileTables, SideTables, TableSource, get_tables
from .results import TransformLayerResult, measure_errors
from .rows import (
    Coefficients,
    Regressors,
    allocate_coefficients,
    check_lower_layers,
    compute_token_steps,
    create_rotation,
    get_words,
    hold_same_tokens,
    load_rows,
    reconstruct,
)
from .steps import StepPlan, TransformOptions, compute_level_bits, plan_steps
from .tables import LEVEL_OF_ONE, LEVELS_PER_DOUBLING, SHAPE

_MAX_COEFFICIENT = 2047
_MAX_ROW_SUM = 1 << 18
"""Of absolute coefficients: with elements of the basis up to 2^13 no sum leaves 32 bits."""
_MAX_MAGNITUDE = 2.0**62
_MAX_CORRECTION = 24
_CORRECTION_BITS = 3.0
_BITS_OF_MISMATCH = 0.005
"""A level that is wrong by 1 costs about so many bits a coefficient."""
_DEVIATION_OF_MEAN = math.sqrt(math.gamma(1 / SHAPE) * math.gamma(3 / SHAPE)) / math.gamma(2 / SHAPE)
"""Standard deviation of coefficients over the mean of their absolute values."""
_SIDE_BITS = 3 * 20
_ROWS_PER_STEP = 256


@dataclass(frozen=True)
class LayerEncoding:
    """A stream, the layer as it will be decoded, and what was lost."""

    data: bytes
    decoded: LayerCache
    result: TransformLayerResult


def encode_layer(
    layer: LayerCache,
    profile: TableSource,
    lower: Sequence[LayerCache] = (),
    options: TransformOptions | None = None,
    *,
    exponents: npt.NDArray[np.int8] | None = None,
    plan: StepPlan | None = None,
) -> LayerEncoding:
    """Encode K and V of one layer, lossily.

    Parameters
    ----------
    layer
        The layer, with the same positions for all heads.
    profile
        The profile of its model (`kvmnn.profiles.Profile`).
    lower
        Layers l - 1 and l - 2 as decoded (`LayerEncoding.decoded`), as many as `options.below` says. Where they contain
        other tokens (sliding windows) the layer is encoded without them, if the profile has tables for that.
    options
        What may be lost.
    exponents
        Steps of the tokens relative to those of the plan, int8 ``[token]``: `choose_exponents` of the attention that
        they drew.
    plan
        `plan_steps` of these options, which depends on all layers; made here if it is not given.

    Raises
    ------
    KvmnnError
        For a layer that the profile is not of, missing lower layers, and sizes above the limits of the format.
    """
    options = options or TransformOptions()
    tables = get_tables(profile)
    geometry = _check_layer(layer, tables)
    plan = plan or plan_steps(tables, options, layer.tokens, exponents is not None)
    below = plan.below
    if 0 in tables.belows and not hold_same_tokens(layer, lower[: min(below, layer.layer)]):
        below = 0  # of layers with a sliding window, or from which other tokens were evicted
    check_lower_layers(layer.layer, below, lower, layer)
    if exponents is not None and (exponents.shape != (layer.tokens,) or exponents.dtype != np.int8):
        raise KvmnnError(
            f"exponents {exponents.dtype} {list(exponents.shape)}: expected int8 [{layer.tokens}], as many as layer "
            f"{layer.layer} has tokens"
        )
    return _LayerEncoder(layer, geometry, tables, lower, options, plan, below, exponents).encode()


class _LayerEncoder:
    def __init__(
        self,
        layer: LayerCache,
        geometry: LayerGeometry,
        tables: ProfileTables,
        lower: Sequence[LayerCache],
        options: TransformOptions,
        plan: StepPlan,
        below: int,
        exponents: npt.NDArray[np.int8] | None,
    ) -> None:
        self._layer, self._geometry, self._tables, self._plan = layer, geometry, tables, plan
        self._below, self._exponents, self._tokens = below, exponents, layer.tokens
        self._dtype = infer_dtype(layer.keys)
        self._regressors = Regressors(tables, lower)
        self._is_exact = np.zeros(layer.tokens, bool)
        self._is_exact[: options.first] = True
        self._is_exact[layer.tokens - min(options.recent, layer.tokens) :] = True
        self._positions = np.ascontiguousarray(layer.positions)

    def encode(self) -> LayerEncoding:
        layer = self._layer
        for elements in (layer.keys, layer.values):
            self._is_exact |= ~_find_codable_rows(elements, self._dtype.name)
        while True:
            num_exact = int(self._is_exact.sum())
            steps = self._plan.get_layer_steps(layer.layer)
            coded_sides = [self._encode_side(part, step) for part, step in zip(PARTS, steps, strict=True)]
            if int(self._is_exact.sum()) == num_exact:
                break  # else rows turned out to be too far off to be coded: V is predicted from other words of K
        return self._build(steps, [side for side, _ in coded_sides], [words for _, words in coded_sides])

    def _encode_side(self, part: Part, step: float) -> tuple[_CodedSide, Elements]:
        layer, tables = self._layer, self._tables
        elements = layer.keys if part == "key" else layer.values
        side = tables.get_side(layer.layer, part, self._below)
        rows = load_rows(elements, self._positions, self._geometry, part)
        prediction = self._regressors.predict(side, self._tokens)
        token_steps = compute_token_steps(side, step, self._exponents, self._tokens)
        coefficients = allocate_coefficients(self._tokens, side.elements)
        numbers = coefficients[:-1].reshape(self._tokens, side.elements)
        moments = np.zeros(side.elements)
        weights = (~self._is_exact).astype(np.float32)
        for begin in range(0, self._tokens, _ROWS_PER_STEP):
            chunk = slice(begin, begin + _ROWS_PER_STEP)
            residuals = rows[chunk]
            residuals -= side.mean
            if prediction is not None and side.gain is not None:
                residuals -= prediction[chunk, : side.elements].astype(np.float32) * side.gain
            transformed = side.transform(residuals)
            factors = side.unit / token_steps[chunk]
            absolute = np.abs(transformed)
            with np.errstate(over="ignore", invalid="ignore"):
                moments += weights[chunk] @ absolute
                largest, total = absolute.max(1) * factors, absolute.sum(1) * factors
            is_far = ~((largest <= _MAX_COEFFICIENT) & (total < _MAX_ROW_SUM))
            self._is_exact[chunk] |= is_far
            transformed *= factors[:, None]
            np.rint(transformed, out=transformed)
            transformed[self._is_exact[chunk]] = 0
            numbers[chunk] = transformed
        words = reconstruct(
            side,
            coefficients,
            prediction,
            token_steps,
            self._dtype,
            create_rotation(self._geometry, part),
            self._positions,
        )
        words[:, self._is_exact] = elements[:, self._is_exact]
        if part == "key":
            self._regressors.add(layer.layer, part, words, self._positions)
        return self._choose_levels(side, coefficients, step, moments), words

    def _choose_levels(
        self, side: SideTables, numbers: Coefficients, step: float, moments: npt.NDArray[np.float64]
    ) -> _CodedSide:
        """Return a side with corrections of its levels where they save more than they take."""
        num_coded = max(int((~self._is_exact).sum()), 1)
        step_level = round(LEVELS_PER_DOUBLING * math.log2(step))
        levels = side.levels - step_level
        with np.errstate(divide="ignore"):
            deviations = np.log2(moments / num_coded * _DEVIATION_OF_MEAN)
        measured = np.nan_to_num(LEVEL_OF_ONE + LEVELS_PER_DOUBLING * deviations, neginf=-4096.0, posinf=4096.0)
        corrections = np.clip(np.rint(measured) - side.levels, -_MAX_CORRECTION, _MAX_CORRECTION).astype(np.int16)
        bits = compute_level_bits(self._tables.frequencies)
        activity = bits[np.clip(np.maximum(levels, levels + corrections), 0, len(bits) - 1)]
        savings = num_coded * _BITS_OF_MISMATCH * np.minimum(activity, 1) * corrections.astype(np.float64) ** 2
        corrections[savings < _CORRECTION_BITS] = 0
        if savings[corrections != 0].sum() < _SIDE_BITS + _CORRECTION_BITS * side.elements:
            corrections[:] = 0
        return _CodedSide(numbers, levels, corrections, step_level)

    def _build(self, steps: tuple[float, float], sides: list[_CodedSide], decoded: list[Elements]) -> LayerEncoding:
        layer, frequencies = self._layer, self._tables.frequencies
        coded_rows = np.flatnonzero(~self._is_exact)
        has_corrections = any(side.corrections.any() for side in sides)
        exponents = None if self._exponents is None else self._exponents[coded_rows]
        lists = [side.corrections for side in sides] if has_corrections else []
        lists += [] if exponents is None else [exponents.astype(np.int16)]
        list_levels = [_choose_list_level(numbers) for numbers in lists]
        sections: list[bytes] = []
        if lists:
            levels = np.concatenate(
                [np.full(len(numbers), level, np.int32) for numbers, level in zip(lists, list_levels, strict=True)]
            )
            numbers = np.concatenate([*lists, np.zeros(1, np.int16)])
            sections += (
                _codec.encode_coefficients(numbers, np.zeros(1, np.int64), levels, None, frequencies)
                if len(levels)
                else (b"", b"")
            )
        for side in sides:
            levels = side.levels + side.corrections if has_corrections else side.levels
            if len(coded_rows):
                sections += _codec.encode_coefficients(
                    side.numbers, coded_rows, levels.astype(np.int32), exponents, frequencies
                )
        exact_rows = np.flatnonzero(self._is_exact)
        exact_words = b"".join(
            np.ascontiguousarray(elements[:, exact_rows].transpose(1, 0, 2)).tobytes()
            for elements in (layer.keys, layer.values)
        )
        payload = b"".join(
            [
                write_runs(self._positions),
                write_runs(exact_rows),
                *(write_varint(level) for level in list_levels),
                write_sections(sections),
                exact_words,
            ]
        )
        header = TransformHeader(
            dtype=self._dtype,
            below=self._below,
            has_exponents=exponents is not None,
            has_corrections=has_corrections,
            layer=layer.layer,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            tokens=layer.tokens,
            payload_bytes=len(payload),
            profile_key=self._tables.key,
            steps=(steps[0], steps[1]),
            step_levels=(sides[0].step_level, sides[1].step_level),
            kl=float(self._plan.losses[layer.layer].sum()) if self._plan.is_measured else math.nan,
        )
        checksum = compute_checksum(header.pack(), payload, *(get_words(words) for words in decoded))
        header = replace(header, checksum=checksum)
        data = header.pack() + payload
        cache = LayerCache(layer=layer.layer, keys=decoded[0], values=decoded[1], positions=self._positions)
        errors = measure_errors(layer, cache)
        return LayerEncoding(data, cache, TransformLayerResult.from_stream(header, len(data), len(exact_rows), errors))


@dataclass(frozen=True)
class _CodedSide:
    numbers: Coefficients
    levels: npt.NDArray[np.int32]
    corrections: npt.NDArray[np.int16]
    step_level: int


def _choose_list_level(numbers: npt.NDArray[np.int16]) -> int:
    """Return the level whose table suits a list of small numbers."""
    mean_square = float(np.mean(numbers.astype(np.float64) ** 2)) if len(numbers) else 0.0
    level = LEVEL_OF_ONE + round(LEVELS_PER_DOUBLING * 0.5 * math.log2(max(mean_square, 1e-6)))
    return min(max(level, 0), _codec.NUM_TABLES - 1)


def _find_codable_rows(elements: Elements, dtype: str) -> npt.NDArray[np.bool_]:
    """Return which tokens have only words that dense streams rotate: finite, and not beyond 2^62."""
    words = np.ascontiguousarray(elements)
    if dtype == "fp16":
        return np.asarray(((words.view(np.uint16) & 0x7C00) != 0x7C00).all(axis=(0, 2)))
    floats = to_float32(words.view(np.uint8).reshape(-1), dtype).reshape(words.shape)
    return np.asarray((np.abs(floats) < _MAX_MAGNITUDE).all(axis=(0, 2)))


def _check_layer(layer: LayerCache, tables: ProfileTables) -> LayerGeometry:
    where = f"layer {layer.layer}"
    if layer.layer >= len(tables.layers):
        raise KvmnnError(f"{where}: the profile is of {len(tables.layers)} layers")
    geometry = tables.layers[layer.layer]
    geometry.check_cache(layer)
    if layer.positions.ndim != 1:
        raise KvmnnError(f"{where}: its heads hold different tokens, which a transform stream does not hold")
    if not 0 < layer.tokens <= MAX_TOKENS or layer.nbytes > MAX_RAW_BYTES:
        raise KvmnnError(f"{where}: {layer.tokens} tokens, {layer.nbytes:,} bytes: expected 1 to {MAX_TOKENS:,} tokens")
    if (np.diff(layer.positions) < 1).any() or int(layer.positions[-1]) > MAX_POSITION:
        raise KvmnnError(f"{where}: positions must ascend, up to {MAX_POSITION:,}")
    return geometry
