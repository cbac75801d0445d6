"""Which tokens of its text a cache holds, and their ids, wherever its source says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays.source import Source
from ..bundle.beside import TOKEN_IDS_NAME
from ..dtypes import Positions
from ..errors import SourceError
from ..formats.beside import read_sidecar
from ..formats.mnn.token_ids import parse_token_ids
from ..formats.noted_positions import read_positions_sidecar
from ..packed.cache_info import PositionRuns
from ..text import pluralize
from .documents import Ids


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTokensInfo:
    """What a cache holds of its text.

    Attributes
    ----------
    positions
        Of each layer, int64 ``[token]``, or ``[kv_head, token]`` where heads hold different ones.
    num_seen
        Tokens of the text; None where nothing says it.
    ids
        Their ids; None where nothing says them.
    """

    positions: tuple[Positions, ...]
    num_seen: int | None = None
    ids: Ids | None = None

    @property
    def end(self) -> int:
        """The position behind the last token that is held."""
        return 1 + max(int(layer_positions.max()) for layer_positions in self.positions)

    @property
    def is_whole_text(self) -> bool:
        """Whether every layer holds all tokens up to its last, and there are no more."""
        tokens = self.end
        holds_all = all(
            layer_positions.shape[-1] == tokens and (np.sort(layer_positions, axis=-1) == np.arange(tokens)).all()
            for layer_positions in self.positions
        )
        return holds_all and self.num_seen in (None, tokens)

    def __str__(self) -> str:
        min_tokens = min(layer_positions.shape[-1] for layer_positions in self.positions)
        return f"a layer holds {min_tokens:,} of {pluralize(self.num_seen or self.end, 'token')}"


def read_stored_tokens(source: Source, tokens_by_layer: Sequence[int]) -> StoredTokensInfo:
    """What a source says, else that each layer holds the first tokens of a text.

    Parameters
    ----------
    tokens_by_layer
        Stored in each layer.

    Raises
    ------
    SourceError
        For positions that are not of these layers.
    """
    _check_not_rerotated(source, tokens_by_layer)
    sidecar_info = _read_sidecar_info(source, tokens_by_layer)
    if sidecar_info is not None:
        return sidecar_info
    ids = source.engine_cache.token_ids if source.engine_cache is not None else None
    ids = None if ids is None else np.asarray(ids, np.int64)
    positions_by_layer = _read_source_positions(source)
    if positions_by_layer is None:
        positions_by_layer = [np.arange(number, dtype=np.int64) for number in tokens_by_layer]
    if [len(layer_positions) for layer_positions in positions_by_layer] != list(tokens_by_layer):
        raise SourceError(
            f"{' '.join(source.inputs)}: says the positions of "
            f"{[len(layer_positions) for layer_positions in positions_by_layer]} tokens, its layers "
            f"hold {list(tokens_by_layer)}"
        )
    return StoredTokensInfo(positions=tuple(positions_by_layer), ids=ids)


def _check_not_rerotated(source: Source, tokens_by_layer: Sequence[int]) -> None:
    """Raise `SourceError` for K that is rotated to other positions than its tokens have in the text."""
    sidecar = read_positions_sidecar(source, tokens_by_layer)
    layers = source.cache.layers if source.cache is not None else ()
    if any(layer.text_positions is not None for layer in layers) or (sidecar is not None and sidecar.is_rerotated):
        raise SourceError(
            f"{' '.join(source.inputs)}: its K was rotated to the first positions, and a text continues at its own: "
            "start from the cache before --rerotate"
        )


def _read_source_positions(source: Source) -> list[Positions] | None:
    engine, cache = source.engine_cache, source.cache
    if cache is not None:
        return [_expand_runs(layer.positions) for layer in cache.layers]
    if engine is None:
        return None
    if engine.layer_positions is not None:
        return [np.asarray(layer_positions, np.int64) for layer_positions in engine.layer_positions]
    if engine.positions is None:
        return None
    return [np.asarray(engine.positions, np.int64)] * engine.layers


def _expand_runs(runs: PositionRuns) -> Positions:
    return np.concatenate([np.arange(begin, begin + size, dtype=np.int64) for begin, size in runs])


def _read_sidecar_info(source: Source, tokens_by_layer: Sequence[int]) -> StoredTokensInfo | None:
    """What `kvmnn dump-kv` writes beside the arrays."""
    sidecar = read_positions_sidecar(source, tokens_by_layer)
    if sidecar is None:
        return None
    ids_text = read_sidecar(source, TOKEN_IDS_NAME)
    ids = None if ids_text is None else parse_token_ids(*ids_text)
    return StoredTokensInfo(positions=sidecar.positions, num_seen=sidecar.tokens_seen, ids=ids)
