"""Which tokens of its text a cache holds, and their ids, wherever its source says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays.source import Source
from ..bundle.beside import TOKEN_IDS
from ..dtypes import Positions
from ..errors import SourceError
from ..formats.beside import text_beside
from ..formats.mnn.token_ids import parsed_token_ids
from ..formats.noted_positions import noted_positions
from ..packed.cache_info import Ranges
from ..text import count
from .documents import Ids


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """What a cache holds of its text.

    Attributes
    ----------
    positions
        Of each layer, int64 ``[token]``, or ``[kv_head, token]`` where heads hold different ones.
    seen
        Tokens of the text; None where nothing says it.
    ids
        Their ids; None where nothing says them.
    """

    positions: tuple[Positions, ...]
    seen: int | None = None
    ids: Ids | None = None

    @property
    def end(self) -> int:
        """The position behind the last token that is held."""
        return 1 + max(int(places.max()) for places in self.positions)

    @property
    def is_whole(self) -> bool:
        """Whether every layer holds all tokens up to its last, and there are no more."""
        tokens = self.end
        whole = all(
            places.shape[-1] == tokens and (np.sort(places, axis=-1) == np.arange(tokens)).all()
            for places in self.positions
        )
        return whole and self.seen in (None, tokens)

    def __str__(self) -> str:
        least = min(places.shape[-1] for places in self.positions)
        return f"a layer holds {least:,} of {count(self.seen or self.end, 'token')}"


def held_positions(source: Source, tokens: Sequence[int]) -> Held:
    """What a source says, else that each layer holds the first tokens of a text.

    Parameters
    ----------
    tokens
        Stored in each layer.

    Raises
    ------
    SourceError
        For positions that are not of these layers.
    """
    _refuse_rerotated(source, tokens)
    noted = _noted(source, tokens)
    if noted is not None:
        return noted
    ids = source.engine_cache.token_ids if source.engine_cache is not None else None
    ids = None if ids is None else np.asarray(ids, np.int64)
    known = _known(source)
    if known is None:
        known = [np.arange(number, dtype=np.int64) for number in tokens]
    if [len(places) for places in known] != list(tokens):
        raise SourceError(
            f"{' '.join(source.inputs)}: says the positions of {[len(places) for places in known]} tokens, its layers "
            f"hold {list(tokens)}"
        )
    return Held(positions=tuple(known), ids=ids)


def _refuse_rerotated(source: Source, tokens: Sequence[int]) -> None:
    """Raise `SourceError` for K that is rotated to other positions than its tokens have in the text."""
    noted = noted_positions(source, tokens)
    layers = source.cache.layers if source.cache is not None else ()
    if any(layer.text_positions is not None for layer in layers) or (noted is not None and noted.is_rerotated):
        raise SourceError(
            f"{' '.join(source.inputs)}: its K was rotated to the first positions, and a text continues at its own: "
            "start from the cache before --rerotate"
        )


def _known(source: Source) -> list[Positions] | None:
    engine, cache = source.engine_cache, source.cache
    if cache is not None:
        return [_places(layer.positions) for layer in cache.layers]
    if engine is None:
        return None
    if engine.layer_positions is not None:
        return [np.asarray(places, np.int64) for places in engine.layer_positions]
    if engine.positions is None:
        return None
    return [np.asarray(engine.positions, np.int64)] * engine.layers


def _places(runs: Ranges) -> Positions:
    return np.concatenate([np.arange(begin, begin + size, dtype=np.int64) for begin, size in runs])


def _noted(source: Source, tokens: Sequence[int]) -> Held | None:
    """What `kvmnn dump-kv` writes beside the arrays."""
    noted = noted_positions(source, tokens)
    if noted is None:
        return None
    found = text_beside(source, TOKEN_IDS)
    ids = None if found is None else parsed_token_ids(*found)
    return Held(positions=noted.positions, seen=noted.tokens_seen, ids=ids)
