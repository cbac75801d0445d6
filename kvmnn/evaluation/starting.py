"""Evaluations that go on from K and V of elsewhere: what they take, and what is said of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..dtypes import PARTS
from ..errors import KvmnnError, OptionError
from ..lm.documents import Document
from ..lm.runner import why_not_behind
from ..lm.start import Start
from ..lm.tokenizer import Tokenizer
from ..reports.start import FAR, StartFacts, relative
from ..text import count
from .measuring.cells import ScoreCell
from .setup.configurations import FULL, Configuration
from .setup.settings import Settings

_DOUBT = "rotated by a Hadamard matrix"
"""Of a note of the reader, which cannot know it: the distances tell."""


def check_settings(settings: Settings, configurations: Sequence[Configuration]) -> None:
    """Refuse, with `OptionError`, what cannot be measured behind a start."""
    if settings.prefix_store is not None:
        raise OptionError("a start and a prefix store both say what texts begin with: expected one of the two")
    for entry in configurations:
        if entry.preset is not None or entry.definition is not None:
            raise OptionError(
                f"{entry.label}: a preset measures texts from their beginning: expected policies with a start"
            )
        why = why_not_behind(entry.make())
        if why is not None:
            raise OptionError(f"{entry.policy} {why}: expected policies that go by position or by keys")


def begun_configurations(start: Start, configurations: Sequence[Configuration]) -> list[Configuration]:
    """The full cache, the start alone, and the start under every policy."""
    behind = f"from {start.name}"
    cut = [entry for entry in configurations if entry.policy != FULL]
    under = [replace(entry, label=f"{entry.label} {behind}", begun=True) for entry in cut]
    return [Configuration(FULL), Configuration(behind, begun=True), *under]


def begun_documents(start: Start, documents: Sequence[Document], tokenizer: str | os.PathLike[str]) -> list[Document]:
    """The texts, each of which must begin with the tokens of the start; `OptionError` for one that does not.

    Bytes of what is scored are counted where there is a tokenizer.
    """
    try:
        decoding = Tokenizer.open(tokenizer)
    except KvmnnError:  # documents that were read before need none
        decoding = None
    return [start.begun(document, decoding) for document in documents]


def start_facts(start: Start, full: ScoreCell) -> StartFacts:
    """What results say of a start; `full` is a cell of the full cache, which compared it."""
    return StartFacts(
        name=start.name,
        about=start.about,
        dtype=start.dtype,
        tokens=start.tokens,
        tokens_seen=start.tokens_seen,
        sha256=start.sha256,
        distances=full.distances or (),
    )


def start_notes(start: StartFacts, notes: Sequence[str]) -> Iterator[str]:
    """Sentences about what rows go on from."""
    yield (
        f"Rows from {start.name} begin with its K and V of the first {count(start.tokens_seen, 'token')} "
        f"({start.about}), the full cache with the model's own. All score what follows but its first token, which no "
        "cache has logits for."
    )
    found = start.distances
    yield from (note for note in notes if not found or _DOUBT not in note)
    if not found:
        return
    if all(each.equal == each.words for each in found):
        yield f"K and V of {start.name} are bit for bit what the model computes of the same tokens."
        return
    parts = {part: [each for each in found if each.part == part] for part in PARTS}
    worst = max(found, key=lambda each: each.relative)
    yield (
        f"Distance to the model's own (root mean square of the difference over that of the numbers): K "
        f"{relative(parts['key']):.2g}, V {relative(parts['value']):.2g}; furthest {worst.part}s of layer "
        f"{worst.layer}: {worst.relative:.2g}."
    )
    far = [part for part in PARTS if relative(parts[part]) > FAR]
    undo = [parts[part][0].undo for part in far]
    if any(undo) and all(len({each.undo for each in parts[part]}) == 1 for part in far):
        names = ",".join(name for found in undo for name in found or ())
        yield (
            f"{' and '.join(part[0].upper() for part in far)} of {start.name} lie otherwise than this model's, so its "
            f"numbers mean nothing: --undo {names} makes them roundings of the model's own (docs/other-engines.md)."
        )
    elif far:
        yield (
            f"The {' and '.join(f'{part}s' for part in far)} of {start.name} are no roundings of this model's, so its "
            "numbers mean nothing: another model, other positions, or another order of a head's dimensions."
        )
