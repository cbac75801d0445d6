"""Evaluations that go on from K and V of elsewhere: what they take, and what is said of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..dtypes import PARTS
from ..errors import KvmnnError, OptionError
from ..lm.documents import Document
from ..lm.runner import explain_no_warm_start
from ..lm.start import InitialCache
from ..lm.tokenizer import Tokenizer
from ..reports.start import MIN_NON_ROUNDING_DISTANCE, InitialCacheInfo, compute_relative_distance
from ..text import pluralize
from .measuring.cells import ScoreCell
from .setup.configurations import FULL_POLICY, Configuration
from .setup.settings import EvaluationSettings

_UNVERIFIED_NOTE_TEXT = "rotated by a Hadamard matrix"
"""Of a note of the reader, which cannot know it: the distances tell."""


def check_start_settings(settings: EvaluationSettings, configurations: Sequence[Configuration]) -> None:
    """Refuse, with `OptionError`, what cannot be measured behind a start."""
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
    """The full cache, the start alone, and the start under every policy."""
    suffix = f"from {start.name}"
    evicting = [entry for entry in configurations if entry.policy != FULL_POLICY]
    policy_configurations = [replace(entry, label=f"{entry.label} {suffix}", begun=True) for entry in evicting]
    return [Configuration(FULL_POLICY), Configuration(suffix, begun=True), *policy_configurations]


def trim_documents(
    start: InitialCache, documents: Sequence[Document], tokenizer: str | os.PathLike[str]
) -> list[Document]:
    """The texts, each of which must begin with the tokens of the start; `OptionError` for one that does not.

    Bytes of what is scored are counted where there is a tokenizer.
    """
    try:
        text_tokenizer = Tokenizer.open_for_model(tokenizer)
    except KvmnnError:  # documents that were read before need none
        text_tokenizer = None
    return [start.trim_document(document, text_tokenizer) for document in documents]


def build_start_info(start: InitialCache, full_cell: ScoreCell) -> InitialCacheInfo:
    """What results say of a start; `full_cell` is a cell of the full cache, which compared it."""
    return InitialCacheInfo(
        name=start.name,
        about=start.description,
        dtype=start.dtype,
        tokens=start.tokens,
        tokens_seen=start.tokens_seen,
        sha256=start.sha256,
        distances=full_cell.distances or (),
    )


def format_start_notes(start: InitialCacheInfo, notes: Sequence[str]) -> Iterator[str]:
    """Sentences about what rows go on from."""
    yield (
        f"Rows from {start.name} begin with its K and V of the first {pluralize(start.tokens_seen, 'token')} "
        f"({start.about}), the full cache with the model's own. All score what follows but its first token, which no "
        "cache has logits for."
    )
    distances = start.distances
    yield from (note for note in notes if not distances or _UNVERIFIED_NOTE_TEXT not in note)
    if not distances:
        return
    if all(distance.equal == distance.words for distance in distances):
        yield f"K and V of {start.name} are bit for bit what the model computes of the same tokens."
        return
    parts = {part: [distance for distance in distances if distance.part == part] for part in PARTS}
    worst_distance = max(distances, key=lambda distance: distance.relative_distance)
    yield (
        f"Distance to the model's own (root mean square of the difference over that of the numbers): K "
        f"{compute_relative_distance(parts['key']):.2g}, V {compute_relative_distance(parts['value']):.2g}; furthest "
        f"{worst_distance.part}s of layer "
        f"{worst_distance.layer}: {worst_distance.relative_distance:.2g}."
    )
    distant_parts = [part for part in PARTS if compute_relative_distance(parts[part]) > MIN_NON_ROUNDING_DISTANCE]
    transforms_by_part = [parts[part][0].undo for part in distant_parts]
    if any(transforms_by_part) and all(len({distance.undo for distance in parts[part]}) == 1 for part in distant_parts):
        names = ",".join(name for distances in transforms_by_part for name in distances or ())
        yield (
            f"{' and '.join(part[0].upper() for part in distant_parts)} of {start.name} lie otherwise than this "
            f"model's, so its "
            f"numbers mean nothing: --undo {names} makes them roundings of the model's own (docs/other-engines.md)."
        )
    elif distant_parts:
        yield (
            f"The {' and '.join(f'{part}s' for part in distant_parts)} of {start.name} are no roundings of this "
            f"model's, so its "
            "numbers mean nothing: another model, other positions, or another order of a head's dimensions."
        )
