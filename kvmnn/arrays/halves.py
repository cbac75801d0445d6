"""K and V of an encoder-decoder model: those of the decoder's own tokens, and those of the encoder's output."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, Literal, get_args

from ..errors import MissingOptionError, OptionError
from .completeness import Completeness, LayerStateInfo
from .engine_cache import EngineCacheInfo
from .source import Source, strip_internal_metadata

ModelHalf = Literal["decoder", "encoder"]
MODEL_HALVES: Final[tuple[ModelHalf, ...]] = get_args(ModelHalf)

_HALF_REGEX = re.compile(r"(?<![A-Za-z])(decoder|encoder)(?![A-Za-z])")
_HALF_COMPONENT_REGEX = re.compile(r"[._/](decoder|encoder)(?=[._/])")


def parse_half(name: str) -> ModelHalf | None:
    """Return which half an array is of, by the last word of its name that tells; None where none does."""
    half_words = _HALF_REGEX.findall(name)
    return next((half for half in MODEL_HALVES if half_words and half == half_words[-1]), None)


def has_halves(names: Iterable[str]) -> bool:
    """Whether arrays of these names are of both halves."""
    return {parse_half(name) for name in names} >= set(MODEL_HALVES)


def check_one_half(names: Iterable[str], where: str) -> None:
    """Raise `MissingOptionError` for arrays of both halves; `where` begins the message."""
    if has_halves(names):
        raise MissingOptionError(
            f"{where}holds K and V of a decoder and of an encoder: --part decoder or --part encoder takes one of them"
        )


def select_half(source: Source, half: ModelHalf, where: str) -> Source:
    """Return the source with the arrays of one half, under names without it.

    Raises
    ------
    OptionError
        For arrays that are not of two halves.
    """
    if not has_halves(source):
        raise OptionError(f"{where}: its arrays are not of a decoder and an encoder: leave --part out")
    arrays = [replace(array, name=_strip_half(array.name)) for array in source.arrays if parse_half(array.name) == half]
    opposite_half = next(candidate for candidate in MODEL_HALVES if candidate != half)
    return replace(
        source,
        arrays=arrays,
        metadata=strip_internal_metadata(source.metadata),
        engine_cache=source.engine_cache and _select_half_of_info(source.engine_cache, half, arrays[0].shape),
        completeness=_select_half_completeness(
            source, half, f"K and V of the {opposite_half}, which the model needs too, are left out"
        ),
    )


def _strip_half(name: str) -> str:
    """Return the name without its half: ``layer_0.decoder.key`` is ``layer_0.key`` then."""
    matches = list(_HALF_COMPONENT_REGEX.finditer(name))
    return name[: matches[-1].start()] + name[matches[-1].end() :] if matches else name


def _select_half_of_info(cache: EngineCacheInfo, half: ModelHalf, shape: tuple[int, ...]) -> EngineCacheInfo:
    """Return what is known of one half; a cache of engines describes its decoder."""
    if half == "decoder":
        return cache
    return replace(
        cache,
        tokens=int(shape[-2]),
        positions=None,
        layer_positions=None,
        positions_unknown=False,
        token_ids=None,
        texts=(),
    )


def _select_half_completeness(source: Source, half: ModelHalf, missing_text: str) -> Completeness:
    completeness = source.completeness or Completeness()
    layers = completeness.layers
    if half == "encoder":
        layers = tuple(LayerStateInfo(layer=state.layer, kind="cross") for state in layers)
        return Completeness(layers=layers, other=(missing_text,))
    return replace(completeness, other=(*completeness.other, missing_text))
