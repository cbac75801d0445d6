"""Whether K and V of a start lie as the model's own do: the model computes the first tokens, and they are compared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..arrays.undoing import ways
from ..dtypes import PARTS, Part
from ..errors import OptionError, SourceError
from ..lm.documents import Ids
from ..lm.runner import Runner
from ..lm.session import DecoderSession
from ..lm.start import AS_STORED, AUTO, Start
from ..lm.start_files import REVERSED
from ..reports.start import FAR, relative
from ..text import count
from .measuring.scoring import feed_unscored
from .measuring.start_distances import distance_of
from .setup.settings import Settings

PROBED_TOKENS = 64
"""Tokens of the text that are computed to compare them; more where a layer holds fewer than `_MIN_ROWS` of these."""

_MIN_ROWS = 8
_CHUNK = 64


@dataclass(frozen=True)
class _Trial:
    """K or V after something was undone: the names of that, and its distance to the model's own."""

    names: tuple[str, ...]
    distance: float


def settle_order(start: Start, model: str | os.PathLike[str], ids: Ids, settings: Settings) -> Start:
    """Return the start with K and V as the model's own lie.

    Parameters
    ----------
    start
        What texts begin with. With ``undo=("none",)`` it is taken as it is.
    model
        The model.
    ids
        Token ids of a text that begins with those of the start: int64 ``[token]``.
    settings
        How the model runs.

    Returns
    -------
    Start
        The same one, or with ``undo=("auto",)`` and where something has to be undone another one, which the caller
        closes.

    Raises
    ------
    OptionError
        For K or V in an order that is not the model's where nobody asked to undo it, and where what was asked for does
        not make them the model's.
    SourceError
        For K or V that nothing makes roundings of the model's own.
    """
    if start.undo == AS_STORED:
        return start
    tokens = _probed_tokens(start)
    held = [_first_rows(layer, tokens) for layer in start.layers()]
    session = DecoderSession.open(model, threads=settings.threads, providers=settings.providers)
    runner = Runner(session)
    feed_unscored(runner, ids, tokens, _CHUNK)
    own = runner.cache.layers()
    as_stored = {part: _trial(held, own, part, ()) for part in PARTS}
    if all(trial.distance <= FAR for trial in as_stored.values()) and start.undo != AUTO:
        return start
    best = {part: min(_trials(held, own, part), key=lambda trial: trial.distance) for part in PARTS}
    where = f"{start.name}: compared on the first {count(tokens, 'token')}"
    if any(trial.distance > FAR for trial in best.values()):
        far = [part for part, trial in best.items() if trial.distance > FAR]
        raise SourceError(
            f"{where} its {_letters(far)} {'is no rounding' if len(far) == 1 else 'are no roundings'} of this model's "
            f"({_distances(as_stored)}): expected a cache of the same model, text and positions (--undo none goes on "
            "with it as it is)"
        )
    names = tuple(dict.fromkeys(name for part in PARTS for name in best[part].names))
    if start.undo == AUTO:
        if not names:
            return start
        note = (
            f"Undone in {start.name}: {', '.join(names)}. Found by comparing its first {count(tokens, 'token')} with "
            f"the model's own: distance {_distances(best)}, as they lay {_distances(as_stored)}."
        )
        settled = start.with_undone(names)
        return replace(settled, notes=(*settled.notes, note))
    far = [part for part, trial in as_stored.items() if trial.distance > FAR]
    said = f"{where} its {_letters(far)} {'lies' if len(far) == 1 else 'lie'} otherwise than this model's"
    if start.undo:
        raise OptionError(
            f"{said} after --undo {','.join(start.undo)} ({_distances(as_stored)}): expected --undo auto, which tries "
            "all"
        )
    named = "" if REVERSED in names else f"--undo {','.join(names)}, or "
    raise OptionError(
        f"{said} ({_distances(as_stored)}; undone: {_distances(best)}): expected {named}--undo auto, which finds it"
    )


def _probed_tokens(start: Start) -> int:
    """Return how many tokens of the text have to be computed."""
    tokens = min(PROBED_TOKENS, start.tokens_seen)
    for layer in start.layers():
        for row in np.atleast_2d(layer.positions):
            tokens = max(tokens, int(row[min(_MIN_ROWS, len(row)) - 1]) + 1)
    return tokens


def _first_rows(layer: LayerCache, tokens: int) -> LayerCache:
    """Return the rows of the first `tokens` tokens of the text; of all heads as many as the head that has fewest."""
    rows = int(min((row < tokens).sum() for row in np.atleast_2d(layer.positions)))
    return LayerCache(
        layer=layer.layer,
        keys=layer.keys[:, :rows],
        values=layer.values[:, :rows],
        positions=layer.positions[..., :rows],
        tokens_seen=layer.tokens_seen,
    )


def _trials(held: Sequence[LayerCache], own: Sequence[LayerCache], part: Part) -> Iterator[_Trial]:
    """Try everything that may have to be undone, the shortest first."""
    dims = held[0].head_dim
    reversed_order = [(REVERSED,)] if part == "key" and dims % 2 == 0 else []
    for names in ((), *ways(part, dims), *reversed_order):
        yield _trial(held, own, part, names)


def _trial(held: Sequence[LayerCache], own: Sequence[LayerCache], part: Part, names: tuple[str, ...]) -> _Trial:
    found = [distance_of(*pair, part, names) for pair in zip(held, own, strict=True)]
    return _Trial(names, relative(found))


def _letters(parts: Sequence[Part]) -> str:
    return " and ".join(part[0].upper() for part in parts)


def _distances(trials: dict[Part, _Trial]) -> str:
    return ", ".join(f"{part[0].upper()} {trial.distance:.2g}" for part, trial in trials.items())
