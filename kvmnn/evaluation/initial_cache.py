"""Evaluations that continue from a saved cache: checks, comparison with the model's own K and V, and labels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import pluralize
from ..arrays.layer_cache import LayerCache
from ..arrays.llama_transforms import iter_transform_combinations
from ..dtypes import PARTS, Part
from ..errors import KvmnnError, OptionError, SourceError
from ..lm.documents import Document, Ids
from ..lm.runner import Runner, explain_no_warm_start
from ..lm.session import DecoderSession
from ..lm.tokenizer import Tokenizer
from ..lm.warm_start import REVERSED_K_ORDER, UNDO_AUTO, UNDO_NONE, InitialCache
from ..reports.records import MIN_NON_ROUNDING_DISTANCE, InitialCacheInfo, compute_relative_distance
from .measure import measure_distance_to_model
from .records import ScoreCell
from .scoring import feed_unscored
from .settings import FULL_POLICY, Configuration, EvaluationSettings

# In `eval --initial-cache` the cache is never the reference. The first row is the model's own full cache, computed from
# the beginning of the text in the same steps and scored on the same tokens; what another engine rounded, quantised or
# cut is in the difference. While it is computed it is compared with the cache word by word, which costs nothing and
# tells rounding from another layout. Policies that judge by attention are refused, as no cache keeps the queries of its
# tokens. Processes get K and V as files in a temporary directory, in the model's dtype, which they map.

NUM_PROBE_TOKENS = 64
"""Tokens of the text that are computed to compare them; more where a layer contains fewer than `_MIN_ROWS` of these."""

_MIN_ROWS = 8
_CHUNK_TOKENS = 64


@dataclass(frozen=True)
class _TransformTrial:
    """K or V with transforms inverted: their names, and the distance to the model's own."""

    names: tuple[str, ...]
    distance: float


def match_layout(
    start: InitialCache, model: str | os.PathLike[str], ids: Ids, settings: EvaluationSettings
) -> InitialCache:
    """Return the initial cache with K and V in the layout of the model's own.

    Parameters
    ----------
    ids
        Token ids of a text that begins with those of the start: int64 ``[token]``.
    """
    if start.inverted_transforms == UNDO_NONE:
        return start
    tokens = _count_probe_tokens(start)
    start_layers = [_take_first_tokens(layer, tokens) for layer in start.load_layers()]
    session = DecoderSession.open(model, threads=settings.threads, providers=settings.providers)
    runner = Runner(session)
    feed_unscored(runner, ids, tokens, _CHUNK_TOKENS)
    model_layers = runner.cache.copy_layers()
    as_stored = {part: _try_transforms(start_layers, model_layers, part, ()) for part in PARTS}
    if (
        all(trial.distance <= MIN_NON_ROUNDING_DISTANCE for trial in as_stored.values())
        and start.inverted_transforms != UNDO_AUTO
    ):
        return start
    best = {
        part: min(_iter_trials(start_layers, model_layers, part), key=lambda trial: trial.distance) for part in PARTS
    }
    location = f"{start.name}: compared on the first {pluralize(tokens, 'token')}"
    if any(trial.distance > MIN_NON_ROUNDING_DISTANCE for trial in best.values()):
        distant_parts = [part for part, trial in best.items() if trial.distance > MIN_NON_ROUNDING_DISTANCE]
        raise SourceError(
            f"{location} its {_format_parts(distant_parts)} "
            f"{'is no rounding' if len(distant_parts) == 1 else 'are no roundings'} of this model's "
            f"({_format_distances(as_stored)}): expected a cache of the same model, text and "
            "positions (--invert none goes on with it as it is)"
        )
    names = tuple(dict.fromkeys(name for part in PARTS for name in best[part].names))
    if start.inverted_transforms == UNDO_AUTO:
        if not names:
            return start
        note = (
            f"Undone in {start.name}: {', '.join(names)}. Found by comparing its first {pluralize(tokens, 'token')} "
            f"with the model's own: distance {_format_distances(best)}, as they lay {_format_distances(as_stored)}."
        )
        transformed = start.with_transforms_inverted(names)
        return replace(transformed, notes=(*transformed.notes, note))
    distant_parts = [part for part, trial in as_stored.items() if trial.distance > MIN_NON_ROUNDING_DISTANCE]
    problem = (
        f"{location} its {_format_parts(distant_parts)} {'lies' if len(distant_parts) == 1 else 'lie'} otherwise than "
        f"this model's"
    )
    if start.inverted_transforms:
        raise OptionError(
            f"{problem} after --invert {','.join(start.inverted_transforms)} ({_format_distances(as_stored)}): "
            "expected --invert auto, which tries all"
        )
    suggestion = "" if REVERSED_K_ORDER in names else f"--invert {','.join(names)}, or "
    raise OptionError(
        f"{problem} ({_format_distances(as_stored)}; undone: {_format_distances(best)}): expected {suggestion}--invert "
        f"auto, which finds it"
    )


def _count_probe_tokens(start: InitialCache) -> int:
    """Return how many tokens of the text must be computed."""
    tokens = min(NUM_PROBE_TOKENS, start.tokens_seen)
    for layer in start.load_layers():
        for row in np.atleast_2d(layer.positions):
            tokens = max(tokens, int(row[min(_MIN_ROWS, len(row)) - 1]) + 1)
    return tokens


def _take_first_tokens(layer: LayerCache, tokens: int) -> LayerCache:
    """Return the rows of the first `tokens` tokens of the text; as many in each head as in the head with the fewest."""
    rows = int(min((row < tokens).sum() for row in np.atleast_2d(layer.positions)))
    return LayerCache(
        layer=layer.layer,
        keys=layer.keys[:, :rows],
        values=layer.values[:, :rows],
        positions=layer.positions[..., :rows],
        tokens_seen=layer.tokens_seen,
    )


def _iter_trials(
    start_layers: Sequence[LayerCache], model_layers: Sequence[LayerCache], part: Part
) -> Iterator[_TransformTrial]:
    """Try all combinations of transforms to invert, the shortest first."""
    head_dim = start_layers[0].head_dim
    reversed_order = [(REVERSED_K_ORDER,)] if part == "key" and head_dim % 2 == 0 else []
    for names in ((), *iter_transform_combinations(part, head_dim), *reversed_order):
        yield _try_transforms(start_layers, model_layers, part, names)


def _try_transforms(
    start_layers: Sequence[LayerCache], model_layers: Sequence[LayerCache], part: Part, names: tuple[str, ...]
) -> _TransformTrial:
    distances = [measure_distance_to_model(*pair, part, names) for pair in zip(start_layers, model_layers, strict=True)]
    return _TransformTrial(names, compute_relative_distance(distances))


def _format_parts(parts: Sequence[Part]) -> str:
    return " and ".join(part[0].upper() for part in parts)


def _format_distances(trials: dict[Part, _TransformTrial]) -> str:
    return ", ".join(f"{part[0].upper()} {trial.distance:.2g}" for part, trial in trials.items())


_HADAMARD_NOTE_FRAGMENT = "rotated by a Hadamard matrix"
"""Part of a note of the reader, which the measured distances replace."""


def check_start_settings(settings: EvaluationSettings, configurations: Sequence[Configuration]) -> None:
    """Raise `OptionError` for settings that cannot be measured with an initial cache."""
    if settings.prefix_store is not None:
        raise OptionError("a start and a prefix store both say what texts begin with: expected one of the two")
    for entry in configurations:
        if entry.preset is not None or entry.definition is not None:
            raise OptionError(
                f"{entry.label}: a preset measures texts from their beginning: expected policies with a start"
            )
        reason = explain_no_warm_start(entry.create_policy())
        if reason is not None:
            raise OptionError(f"{entry.policy} {reason}: expected policies that go by position or by keys")


def build_start_configurations(start: InitialCache, configurations: Sequence[Configuration]) -> list[Configuration]:
    """Return the full cache, the initial cache without eviction, and the initial cache under every policy."""
    suffix = f"from {start.name}"
    policy_configurations = [
        replace(entry, label=f"{entry.label} {suffix}", uses_initial_cache=True)
        for entry in configurations
        if entry.policy != FULL_POLICY or entry.codec is not None
    ]
    return [Configuration(FULL_POLICY), Configuration(suffix, uses_initial_cache=True), *policy_configurations]


def trim_documents(
    start: InitialCache, documents: Sequence[Document], tokenizer: str | os.PathLike[str]
) -> list[Document]:
    """Return the texts, each of which must begin with the tokens of the initial cache; raise `OptionError` otherwise.

    Bytes of the scored text are counted if there is a tokenizer.
    """
    try:
        text_tokenizer = Tokenizer.open_for_model(tokenizer)
    except KvmnnError:  # documents that were read before need none
        text_tokenizer = None
    return [start.trim_document(document, text_tokenizer) for document in documents]


def build_start_info(start: InitialCache, full_cell: ScoreCell) -> InitialCacheInfo:
    """Describe an initial cache for results; `full_cell` is a cell of the full cache, which compared it."""
    model = full_cell.model
    return InitialCacheInfo(
        name=start.name,
        about=start.description,
        dtype=start.dtype,
        tokens=start.tokens,
        tokens_seen=start.tokens_seen,
        bits=None
        if start.token_bytes is None
        else 8 * sum(start.token_bytes) / (2 * model.layers * model.kv_heads * model.head_dim),
        sha256=start.sha256,
        distances=full_cell.distances or (),
    )


def format_start_notes(start: InitialCacheInfo, notes: Sequence[str]) -> Iterator[str]:
    """Format notes about the initial cache that rows continue from."""
    size_text = (
        "Their bytes are counted in the type of --frame-dtype, whatever the file's."
        if start.bits is None
        else f"Its tokens are counted as its file stores them, {start.bits:.4g} bits a number, also in LOSSLESS ratio, "
        "and later ones in the type of --frame-dtype; a row with a codec counts all of them in the codec's format."
    )
    yield (
        f"Rows from {start.name} begin with its K and V of the first {pluralize(start.tokens_seen, 'token')} "
        f"({start.about}), the full cache with the model's own. All score what follows but its first token, which no "
        f"cache has logits for. {size_text}"
    )
    distances = start.distances
    yield from (note for note in notes if not distances or _HADAMARD_NOTE_FRAGMENT not in note)
    if not distances:
        return
    if all(distance.equal == distance.words for distance in distances):
        yield f"K and V of {start.name} are bit for bit what the model computes of the same tokens."
        return
    parts = {part: [distance for distance in distances if distance.part == part] for part in PARTS}
    worst_distance = max(distances, key=lambda distance: distance.relative_distance)
    yield (
        "Distance to the model's own (root mean square of the difference over that of the numbers): K "
        f"{compute_relative_distance(parts['key']):.2g}, V {compute_relative_distance(parts['value']):.2g}; furthest "
        f"{worst_distance.part}s of layer {worst_distance.layer}: {worst_distance.relative_distance:.2g}."
    )
    distant_parts = [part for part in PARTS if compute_relative_distance(parts[part]) > MIN_NON_ROUNDING_DISTANCE]
    transforms_by_part = [parts[part][0].undo for part in distant_parts]
    if any(transforms_by_part) and all(len({distance.undo for distance in parts[part]}) == 1 for part in distant_parts):
        names = ",".join(name for distances in transforms_by_part for name in distances or ())
        yield (
            f"{' and '.join(part[0].upper() for part in distant_parts)} of {start.name} lie otherwise than this "
            f"model's, so its "
            f"numbers mean nothing: --invert {names} makes them roundings of the model's own (docs/other-engines.md)."
        )
    elif distant_parts:
        yield (
            f"The {' and '.join(f'{part}s' for part in distant_parts)} of {start.name} are no roundings of this "
            f"model's, so its "
            "numbers mean nothing: another model, other positions, or another order of a head's dimensions."
        )
