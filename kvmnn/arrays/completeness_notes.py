"""Completeness written alongside arrays as text, so that a file made of a part of the state remembers that it is one.

The text travels in the metadata of manifests, of ``.safetensors`` and ``.npz`` files and of Zarr stores, and as a file
of its own in folders of ``.npy`` files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from ..dtypes import Part
from ..files.json_document import parse_document
from .completeness import Completeness, parse_completeness_node
from .names import parse_conventional_name

COMPLETENESS_SCHEMA: Final = "kvmnn-completeness"
COMPLETENESS_SCHEMA_VERSION: Final = 1
MAX_COMPLETENESS_BYTES: Final = 16 << 20
"""Size limit of the text, in bytes."""

NOT_SELECTED_LOCATION: Final = "not among the chosen arrays"
"""Location of the state of layers whose arrays were not selected."""

_MAX_LISTED_NAMES = 1 << 16  # more arrays than two for each layer that a document may have


def dump_completeness_json(completeness: Completeness, names: Iterable[str]) -> str:
    """Return the text for a source with this completeness and arrays of these names."""
    name_list = list(names)
    document = {
        "schema": COMPLETENESS_SCHEMA,
        "schema_version": COMPLETENESS_SCHEMA_VERSION,
        "arrays": name_list if len(name_list) <= 2 * _MAX_LISTED_NAMES else [],
        **completeness.to_dict(),
    }
    return json.dumps(document, separators=(",", ":"))


def load_completeness_json(text: str | bytes, names: Iterable[str], where: str) -> Completeness:
    """Return what `dump_completeness_json` wrote, for arrays of these names, which may be some of those that it wrote
    of.

    Raises
    ------
    ManifestError
        For malformed text; `where` begins the message.
    """
    root = parse_document(text, where, MAX_COMPLETENESS_BYTES)
    root.check_schema(COMPLETENESS_SCHEMA, COMPLETENESS_SCHEMA_VERSION)
    return select_completeness(parse_completeness_node(root), root.get("arrays").read_str_list(), names)


def select_completeness(
    completeness: Completeness, names: Iterable[str], selected_names: Iterable[str]
) -> Completeness:
    """Return the completeness of `selected_names` arrays out of those with `names`: layers that lack one are not
    included.
    """
    incomplete = {layer for layer, _ in _parse_layer_parts(names) - _parse_layer_parts(selected_names)}
    if not incomplete:
        return completeness
    return completeness.with_selected_layers(
        {state.layer for state in completeness.layers} - incomplete, NOT_SELECTED_LOCATION
    )


def _parse_layer_parts(names: Iterable[str]) -> set[tuple[int, Part]]:
    """Return layer and part of each array whose name has both; formats spell the same name in several ways."""
    return {
        (parsed_name.layer, parsed_name.part)
        for parsed_name in map(parse_conventional_name, names)
        if parsed_name is not None
    }


def merge_completeness(inputs: Sequence[tuple[str, Completeness | None]]) -> Completeness | None:
    """Return the completeness of several inputs taken together, by their names; None where none of them has any.

    Nothing tells whether layers of different inputs belong to one model, so what one lacks another does not supply.
    """
    if all(completeness is None for _, completeness in inputs):
        return None
    lines = [
        f"{name}: {line}"
        for name, input_completeness in inputs
        if input_completeness is not None
        for line in input_completeness.missing
    ]
    return Completeness(other=tuple(lines))
