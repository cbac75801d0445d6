"""Sidecar files of a folder of arrays, which frames contain as well: positions, ids, completeness, a loss."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import LOSSY, format_layers, format_range, pluralize
from ..arrays.completeness import MAX_COMPLETENESS_BYTES as MAX_COMPLETENESS_BYTES
from ..arrays.completeness import Completeness, dump_completeness_json, load_completeness_json
from ..arrays.layers import collect_layers
from ..arrays.naming import parse_conventional_name
from ..arrays.positions import PositionMap, read_token_positions
from ..arrays.source import CAST_TEXT, COMPLETENESS_KEY, LOSSY_KEY, SIDECAR_KEY, Source
from ..bundle.passthrough import (
    MAX_SIDECAR_BYTES,
    POSITIONS_NAME,
    SIDECAR_NAMES,
    TOKEN_IDS_NAME,
    dump_sidecars,
    parse_sidecars,
)
from ..dtypes import Part, Positions
from ..errors import ManifestError, OutputError, SourceError
from ..files.atomic import DirectoryOutput
from ..files.file_names import COMPLETENESS_FILE, FOLDER_FILES, LOSS_FILE
from ..files.schema import JsonReader, loads_strict, parse_document, read_bounded
from ..files.temporary import iter_unmoved_files

LOSS_SCHEMA: Final = "kvmnn-loss"
LOSS_SCHEMA_VERSION: Final = 1


def add_sidecars(source: Source, folder: str, *, is_whole: bool = False) -> None:
    """Add the sidecars in `folder` to the metadata of a source of its arrays.

    Tokens that the sidecars list and that are not in the arrays count as missing state; with `is_whole`, a source of
    all arrays of the folder, so do layers.

    Unreadable ones, and ones larger than `MAX_SIDECAR_BYTES`, are skipped with a note, except the completeness of the
    arrays and the record of a loss.

    Raises
    ------
    SourceError
        For a damaged record of a loss, and as `check_all_moved`.
    """
    check_all_moved(folder)
    _add_completeness(source, folder)
    _add_loss(source, folder)
    sidecars = {}
    for name in SIDECAR_NAMES:
        path = Path(folder, name)
        if path.is_file():
            try:
                sidecars[name] = read_bounded(path, MAX_SIDECAR_BYTES)
            except (SourceError, FileNotFoundError) as error:
                source.notes.append(f"frames of these arrays will be without {name}: {error}")
    loss = read_dump_loss(sidecars.get(POSITIONS_NAME, b""))
    if loss:
        source.metadata.setdefault(LOSSY_KEY, loss)
    _add_missing_state(source, sidecars, is_whole=is_whole)
    if sidecars:
        source.metadata[SIDECAR_KEY] = _dump_sidecars_cached(tuple(sidecars.items()))
        source.opened_files += tuple(str(Path(folder, name)) for name in sidecars)


def check_all_moved(folder: str) -> None:
    """Raise `SourceError` for a folder in which a command had not replaced all files when it was killed."""
    for path, names in iter_unmoved_files(folder or "."):
        if names:
            raise SourceError(
                f"{folder or '.'}: may be a mixture of old and new files: a command that writes them was killed, or "
                f"still runs, before it had moved them all: {path.name} still has {pluralize(len(names), 'file')} "
                f"({names[0]} first): run that command again with -f, or remove {path} to accept the files as they are"
            )


def _add_missing_state(source: Source, sidecars: Mapping[str, bytes], *, is_whole: bool) -> None:
    """Add to the metadata which layers and tokens that the sidecars list the arrays do not have."""
    if not sidecars:
        return
    tokens_by_layer = _count_listed_tokens(sidecars.get(POSITIONS_NAME))
    sentences = []
    if is_whole and COMPLETENESS_KEY not in source.metadata:
        sentences += _describe_missing_layers(source, tokens_by_layer)
    sentences += _describe_missing_tokens(source, sidecars, tokens_by_layer)
    if not sentences:
        return
    text = source.metadata.get(COMPLETENESS_KEY)
    completeness = Completeness() if text is None else load_completeness_json(text, source, COMPLETENESS_FILE)
    sentences = list(dict.fromkeys((*completeness.other_missing, *sentences)))  # decode restores those of the input
    completeness = replace(completeness, other_missing=tuple(sentences))
    source.metadata[COMPLETENESS_KEY] = dump_completeness_json(completeness, source)


def _count_listed_tokens(positions_json: bytes | None) -> dict[int, int]:
    """Return how many positions of each layer a document lists; empty without one, or if it is malformed."""
    if positions_json is None:
        return {}
    try:
        entries = parse_document(positions_json, POSITIONS_NAME, MAX_SIDECAR_BYTES).get("layers").read_list()
        return {parse_layer_number(entry, index): _count_positions(entry.value) for index, entry in enumerate(entries)}
    except ManifestError:
        return {}  # what reads the positions reports it


def _count_positions(entry: Any) -> int:
    """Return the number of positions of a layer, or of its first head where heads have different ones."""
    positions = entry.get("positions") if isinstance(entry, dict) else None
    if isinstance(positions, list) and positions and isinstance(positions[0], list):
        positions = positions[0]
    return len(positions) if isinstance(positions, list) else 0


def _describe_missing_layers(source: Source, listed_layers: Collection[int]) -> list[str]:
    """Return a sentence about layers of the positions that have not all the arrays that other layers have."""
    parts_by_layer: dict[int, set[Part]] = {}
    for name in filter(None, map(parse_conventional_name, source)):
        parts_by_layer.setdefault(name.layer, set()).add(name.part)
    all_parts = set[Part]().union(*parts_by_layer.values())
    missing_layers = sorted(layer for layer in listed_layers if parts_by_layer.get(layer) != all_parts)
    if not all_parts or not missing_layers:
        return []
    return [
        f"{POSITIONS_NAME} lists {pluralize(len(listed_layers), 'layer')}, and K or V of "
        f"{format_layers(missing_layers)} is missing"
    ]


def _describe_missing_tokens(
    source: Source, sidecars: Mapping[str, bytes], tokens_by_layer: Mapping[int, int]
) -> list[str]:
    """Return a sentence about layers whose K or V has fewer tokens than the positions list, or else the ids."""
    max_tokens_by_part = _count_max_tokens(source, sidecars.get(POSITIONS_NAME, b""))
    name, num_listed = POSITIONS_NAME, dict(tokens_by_layer)
    if POSITIONS_NAME not in sidecars:
        name, num_ids = TOKEN_IDS_NAME, _count_token_ids(sidecars[TOKEN_IDS_NAME])
        # Engines also save the id of a token that is not evaluated yet.
        num_listed = {layer: num_ids for (layer, _), tokens in max_tokens_by_part.items() if tokens < num_ids - 1}
    short_tokens = {
        (layer, part): tokens
        for (layer, part), tokens in max_tokens_by_part.items()
        if tokens < num_listed.get(layer, 0)
    }
    layers = sorted({layer for layer, _ in short_tokens})
    if not layers:
        return []
    listed_text = format_range(sorted({num_listed[layer] for layer in layers}))
    return [
        f"{name} lists {listed_text} tokens of {format_layers(layers)}, and K or V has at most "
        f"{format_range(sorted(set(short_tokens.values())))}"
    ]


def _count_max_tokens(source: Source, positions_json: bytes) -> dict[tuple[int, Part], int]:
    """Return how many tokens K and V of each layer have at most: nothing says which axis of other arrays they are."""
    heads_first = _is_dump_kv_document(positions_json)  # [kv_head, token, head_dim]
    max_tokens: dict[tuple[int, Part], int] = {}
    for array in source.arrays:
        name = parse_conventional_name(array.name)
        if name is not None and len(array.shape) >= 3:
            segment_tokens = max(array.shape) if name.end is None else name.end - name.start
            if heads_first and name.end is None and len(array.shape) == 3:
                segment_tokens = array.shape[1]
            max_tokens[name.layer, name.part] = max_tokens.get((name.layer, name.part), 0) + segment_tokens
    return max_tokens


def _is_dump_kv_document(positions_json: bytes) -> bool:
    """Return whether a document of positions is that of a folder of ``.npy`` files that `dump-kv` wrote."""
    try:
        document = parse_document(positions_json, POSITIONS_NAME, MAX_SIDECAR_BYTES).value
    except ManifestError:
        return False
    return isinstance(document, dict) and "kvmnn" in document and document.get("format") == "npy"


def _count_token_ids(ids_json: bytes) -> int:
    """Return the number of token ids in a list; 0 for anything else, of which nothing is known."""
    try:
        ids = loads_strict(ids_json)
    except (ValueError, RecursionError):
        return 0
    is_list = isinstance(ids, list) and all(type(token) is int for token in ids)
    return len(ids) if is_list else 0


def _add_completeness(source: Source, folder: str) -> None:
    """Add the text of ``completeness.json`` to the metadata, if the folder has one."""
    path = Path(folder, COMPLETENESS_FILE)
    if not path.is_file():
        return
    try:
        data = read_bounded(path, MAX_COMPLETENESS_BYTES)
    except FileNotFoundError:
        return
    source.metadata[COMPLETENESS_KEY] = data.decode("utf-8", "replace")
    source.opened_files += (str(path),)


def _add_loss(source: Source, folder: str) -> None:
    """Add the sentence of ``loss.json`` to the metadata, if the folder has one."""
    path = Path(folder, LOSS_FILE)
    if not path.is_file():
        return
    root = parse_document(read_bounded(path, MAX_SIDECAR_BYTES), str(path))
    root.check_schema(LOSS_SCHEMA, LOSS_SCHEMA_VERSION)
    loss = root.get("loss").read_str()
    if not loss:
        raise root.get("loss").error("a sentence about what K and V have lost")
    source.metadata[LOSSY_KEY] = loss
    source.opened_files += (str(path),)


@lru_cache(maxsize=1)
def read_dump_loss(positions_json: bytes) -> str:
    """Return a sentence about what a cache lost before `kvmnn dump-kv` wrote it: tokens, bits; empty if nothing.

    A document of other programs has no such record.
    """
    if LOSSY.encode() not in positions_json:
        return ""
    try:
        document = parse_document(positions_json, POSITIONS_NAME, MAX_SIDECAR_BYTES).value
    except ManifestError:
        return ""  # what reads the positions reports it
    if not isinstance(document, dict) or document.get("label") != LOSSY:
        return ""
    tokens_seen, layers, rounded = map(document.get, ("tokens_seen", "layers", "rounded"))
    counts = [layer.get("tokens") for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    reasons = []
    if type(tokens_seen) is int and any(type(count) is int and count < tokens_seen for count in counts):
        tokens_text = format_range(sorted({count for count in counts if type(count) is int}))
        reasons.append(f"evicted before dump-kv: {tokens_text} of {tokens_seen:,} tokens are here")
    if isinstance(rounded, dict) and type(rounded.get("changed")) is int and rounded["changed"] > 0:
        reasons.append(
            f"{CAST_TEXT}{rounded.get('from')} to {document.get('dtype')}, {rounded['changed']:,} words changed"
        )
    return "; ".join(reasons) or f"{POSITIONS_NAME} says so"


@lru_cache(maxsize=1)
def _dump_sidecars_cached(files: tuple[tuple[str, bytes], ...]) -> str:
    """Compress the sidecar files once for all arrays of a folder."""
    return dump_sidecars(dict(files))


def read_sidecar(source: Source, name: str) -> tuple[bytes, str] | None:
    """Return the content and label of a sidecar file that is next to the input or embedded in its frames."""
    if not source.inputs:
        return None
    path = source.inputs[0]
    embedded_data = parse_sidecars(source.metadata, path).get(name)
    if embedded_data is None and len(source.inputs) > 1:
        return None
    file_path = Path(path, name)
    if embedded_data is not None:
        return embedded_data, str(file_path) if file_path.is_file() else f"{path}: its {name}"
    try:
        return read_bounded(file_path, MAX_SIDECAR_BYTES), str(file_path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def collect_folder_sidecars(metadata: Mapping[str, str], label: str) -> dict[str, bytes]:
    """Return the files that a folder of arrays gets for this metadata, by name; errors as for `parse_sidecars`."""
    files, completeness_text, loss = parse_sidecars(metadata, label), *map(metadata.get, (COMPLETENESS_KEY, LOSSY_KEY))
    if completeness_text is not None:
        files[COMPLETENESS_FILE] = completeness_text.encode()
    if loss and loss != read_dump_loss(files.get(POSITIONS_NAME, b"")):
        document = {"schema": LOSS_SCHEMA, "schema_version": LOSS_SCHEMA_VERSION, "loss": loss}
        files[LOSS_FILE] = (json.dumps(document) + "\n").encode()
    return files


def write_sidecars(directory: DirectoryOutput, metadata: Mapping[str, str] | None) -> list[str]:
    """Write sidecars into a directory of arrays and read them back; return their names. The caller commits.

    Those of arrays that are replaced go: their ids would be taken for those of the new ones.
    """
    files = collect_folder_sidecars(metadata or {}, str(directory.target))
    directory.replace_files(name for name in FOLDER_FILES if name not in files)
    for name, data in files.items():
        file = directory.open_file(name)
        file.write(data)
        file.close()
        if read_bounded(file.path, max(MAX_SIDECAR_BYTES, len(data))) != data:
            raise OutputError(f"{file.target}: does not read back as it was written")
    return list(files)


_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class PositionsSidecar:
    """The content of a positions document."""

    #: Positions of each layer, ascending: int64 ``[token]``, or ``[kv_head, token]`` if heads have different tokens.
    positions: tuple[Positions, ...]
    #: Number of tokens of the text; None if the document lacks it.
    tokens_seen: int | None
    #: True text positions of each layer whose K was rotated to `positions`, in the same shape; None if they equal
    #: `positions`.
    text_positions: tuple[Positions | None, ...] = ()

    @property
    def is_rerotated(self) -> bool:
        """Return whether K of any layer was rotated to other positions than those in the text."""
        return any(positions is not None for positions in self.text_positions)

    @property
    def positions_in_text(self) -> tuple[Positions, ...]:
        """Return the true positions of every layer's tokens in the text."""
        text_positions = self.text_positions or (None,) * len(self.positions)
        return tuple(
            layer_positions if text_layer_positions is None else text_layer_positions
            for layer_positions, text_layer_positions in zip(self.positions, text_positions, strict=True)
        )


def read_positions_sidecar(
    source: Source, tokens: Sequence[int], layer_numbers: Sequence[int] | None = None
) -> PositionsSidecar | None:
    """Return the true positions of every layer's tokens, if a directory or its frames record them."""
    sidecar = read_sidecar(source, POSITIONS_NAME)
    if sidecar is None:
        return None
    text, path = sidecar
    document = parse_document(text, path)
    layers = document.get("layers").read_list()
    if layer_numbers is not None and len(layers) > len(tokens):
        entry_by_layer = {parse_layer_number(entry, index): entry for index, entry in enumerate(layers)}
        layers = [entry_by_layer[layer_number] for layer_number in layer_numbers if layer_number in entry_by_layer]
    if len(layers) != len(tokens):
        raise SourceError(f"{path}: has positions of {len(layers)} layers: the arrays are of {len(tokens)}")
    positions = tuple(
        _parse_positions(layer.get("positions"), count) for layer, count in zip(layers, tokens, strict=True)
    )
    tokens_seen = document.get("tokens_seen").read_int(1) if "tokens_seen" in document.value else None
    text_positions = tuple(
        _parse_positions(layer.get("text_positions"), count) if "text_positions" in layer.value else None
        for layer, count in zip(layers, tokens, strict=True)
    )
    return PositionsSidecar(positions, tokens_seen, text_positions)


def is_dump_kv_folder(source: Source) -> bool:
    """Return whether the arrays are those of a folder of ``.npy`` files that `dump-kv` wrote: [kv_head, token, dim]."""
    sidecar = read_sidecar(source, POSITIONS_NAME)
    if sidecar is None or any(len(array.shape) != 3 for array in source.arrays):
        return False
    if not _is_dump_kv_document(sidecar[0]):
        return False
    layers = parse_document(*sidecar).get("layers").read_list()
    tokens = {layer.value.get("tokens") for layer in layers if isinstance(layer.value, dict)}
    return bool(layers) and {array.shape[1] for array in source.arrays} <= tokens


def read_positions_by_layer(source: Source, *, as_rotated: bool = False) -> PositionMap:
    """Return the positions of the tokens of each layer, from any record in the source.

    They are those in the text; with `as_rotated` those that K is rotated to (`kvmnn mnn compact --rerotate`).
    Raises the errors of `read_positions_sidecar`.
    """
    try:
        key_arrays = {entry.layer: entry for entry in collect_layers(source, allow_keys_only=True)}
    except SourceError:
        return read_token_positions(source, as_rotated=as_rotated)
    sidecar = read_positions_sidecar(source, [entry.geometry[1] for entry in key_arrays.values()], list(key_arrays))
    if sidecar is None:
        return read_token_positions(source, as_rotated=as_rotated)
    return dict(zip(key_arrays, sidecar.positions if as_rotated else sidecar.positions_in_text, strict=True))


def parse_layer_number(layer: JsonReader, index: int) -> int:
    """Return the layer's number; `index`, its place in the list, if the entry has none."""
    return layer.get("layer").read_int(0) if isinstance(layer.value, dict) and "layer" in layer.value else index


def _parse_positions(node: JsonReader, tokens: int) -> Positions:
    values = node.value
    is_per_head = isinstance(values, list) and values and all(isinstance(value, list) for value in values)
    for row in values if is_per_head else [values]:
        if not isinstance(row, list) or not all(type(value) is int and 0 <= value <= _MAX_TOKENS for value in row):
            raise node.error("a list of positions")
        if len(row) != tokens or (np.diff(row) <= 0).any():
            raise node.error(f"{tokens} ascending positions, one for each token of the arrays")
    return np.array(values, np.int64)
