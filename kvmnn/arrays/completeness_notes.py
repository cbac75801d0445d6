"""Completeness written alongside arrays as text, so that a file made of a part of the state remembers that it is one.

The text travels in the metadata of manifests, of ``.safetensors`` and ``.npz`` files and of Zarr stores, and as a file
of its own in folders of ``.npy`` files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from ..dtypes import Part
from ..files.json_document import parse
from .completeness import Completeness, read_completeness
from .names import conventional

SCHEMA: Final = "kvmnn-completeness"
SCHEMA_VERSION: Final = 1
MAX_BYTES: Final = 16 << 20
"""Size limit of the text, in bytes."""

NOT_CHOSEN: Final = "not among the chosen arrays"
"""Location of the state of layers whose arrays were not selected."""

_MAX_NAMES = 1 << 16  # more arrays than two for each layer that a document may have


def write_note(completeness: Completeness, names: Iterable[str]) -> str:
    """Return the text for a source with this completeness and arrays of these names."""
    listed = list(names)
    document = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "arrays": listed if len(listed) <= 2 * _MAX_NAMES else [],
        **completeness.to_dict(),
    }
    return json.dumps(document, separators=(",", ":"))


def read_note(text: str | bytes, names: Iterable[str], where: str) -> Completeness:
    """Return what `write_note` wrote, for arrays of these names, which may be some of those that it wrote of.

    Raises
    ------
    ManifestError
        For malformed text; `where` begins the message.
    """
    root = parse(text, where, MAX_BYTES)
    root.check_schema(SCHEMA, SCHEMA_VERSION)
    return select_arrays(read_completeness(root), root.at("arrays").texts(), names)


def select_arrays(completeness: Completeness, names: Iterable[str], chosen: Iterable[str]) -> Completeness:
    """Return the completeness of `chosen` arrays out of those with `names`: layers that lack one are not included."""
    incomplete = {layer for layer, _ in _places(names) - _places(chosen)}
    if not incomplete:
        return completeness
    return completeness.with_selected({state.layer for state in completeness.layers} - incomplete, NOT_CHOSEN)


def _places(names: Iterable[str]) -> set[tuple[int, Part]]:
    """Return layer and part of each array whose name has both; formats spell the same name in several ways."""
    return {(place.layer, place.part) for place in map(conventional, names) if place is not None}


def join_completeness(inputs: Sequence[tuple[str, Completeness | None]]) -> Completeness | None:
    """Return the completeness of several inputs taken together, by their names; None where none of them has any.

    Nothing tells whether layers of different inputs belong to one model, so what one lacks another does not supply.
    """
    if all(completeness is None for _, completeness in inputs):
        return None
    lines = [f"{name}: {line}" for name, each in inputs if each is not None for line in each.missing]
    return Completeness(other=tuple(lines))
