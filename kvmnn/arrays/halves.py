"""K and V of an encoder-decoder model: those of the decoder's own tokens, and those of the encoder's output."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, Literal, get_args

from ..errors import MissingOptionError, OptionError
from .completeness import Completeness, LayerState
from .engine_cache import EngineCache
from .source import Source, others_metadata

Half = Literal["decoder", "encoder"]
HALVES: Final[tuple[Half, ...]] = get_args(Half)

_WORD = re.compile(r"(?<![A-Za-z])(decoder|encoder)(?![A-Za-z])")
_ALONE = re.compile(r"[._/](decoder|encoder)(?=[._/])")


def half_of(name: str) -> Half | None:
    """Return which half an array is of, by the last word of its name that tells; None where none does."""
    words = _WORD.findall(name)
    return next((half for half in HALVES if words and half == words[-1]), None)


def has_halves(names: Iterable[str]) -> bool:
    """Whether arrays of these names are of both halves."""
    return {half_of(name) for name in names} >= set(HALVES)


def check_one_half(names: Iterable[str], where: str) -> None:
    """Raise `MissingOptionError` for arrays of both halves; `where` begins the message."""
    if has_halves(names):
        raise MissingOptionError(
            f"{where}holds K and V of a decoder and of an encoder: --part decoder or --part encoder takes one of them"
        )


def select_half(source: Source, half: Half, where: str) -> Source:
    """Return the source with the arrays of one half, under names without it.

    Raises
    ------
    OptionError
        For arrays that are not of two halves.
    """
    if not has_halves(source):
        raise OptionError(f"{where}: its arrays are not of a decoder and an encoder: leave --part out")
    arrays = [replace(array, name=_name_alone(array.name)) for array in source.arrays if half_of(array.name) == half]
    other = next(each for each in HALVES if each != half)
    return replace(
        source,
        arrays=arrays,
        metadata=others_metadata(source.metadata),
        engine_cache=source.engine_cache and _describe_half(source.engine_cache, half, arrays[0].shape),
        completeness=_state_of_half(source, half, f"K and V of the {other}, which the model needs too, are left out"),
    )


def _name_alone(name: str) -> str:
    """Return the name without its half: ``layer_0.decoder.key`` is ``layer_0.key`` then."""
    words = list(_ALONE.finditer(name))
    return name[: words[-1].start()] + name[words[-1].end() :] if words else name


def _describe_half(cache: EngineCache, half: Half, shape: tuple[int, ...]) -> EngineCache:
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


def _state_of_half(source: Source, half: Half, missing: str) -> Completeness:
    known = source.completeness or Completeness()
    layers = known.layers
    if half == "encoder":
        layers = tuple(LayerState(layer=state.layer, kind="cross") for state in layers)
        return Completeness(layers=layers, other=(missing,))
    return replace(known, other=(*known.other, missing))
