"""Packed files of K and V, whoever wrote them: layers found, described, and read as plain arrays.

Finding names the files of every layer. Describing adds what files cannot tell: geometry, pack numbers and tokens, from
the caller, a model directory, or the document that kvmnn leaves beside the files it writes. Reading touches live
elements only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath

from ... import dtypes
from ...arrays.layers import array_name
from ...arrays.named_array import NamedArray, UnsupportedArrayError
from ...arrays.source import Source
from ...dtypes import PARTS
from ...errors import MissingOptionError, SourceError
from ...packed import cache_info
from ...packed.cache_info import CacheInfo, LayerInfo, TokenIds
from ...packed.fitting import Fit, Geometry, describe, inferred, of_layout, the_fit
from ...packed.layout import PackLayout
from ...packed.rows import row_dtype
from ...text import count as count_of
from ..options import PackedOptions
from .model import check_agrees, fingerprint, read_geometry
from .packed_files import PackedFiles
from .packed_reading import packed_runs, used_rows


@dataclass(frozen=True)
class Described:
    """Packed files and all there is to know about them.

    Parameters
    ----------
    files
        What was found.
    info
        What they hold.
    notes
        What was inferred, and from what, in words.
    """

    files: PackedFiles
    info: CacheInfo
    notes: tuple[str, ...] = field(default=())

    def to_source(self, dtype: str | None = None) -> Source:
        """``layer_<n>.key`` and ``layer_<n>.value``, each ``[kv_head, token, head_dim]``, of every layer."""
        layout = self.info.layout
        if dtype not in (None, layout.dtype):
            raise UnsupportedArrayError(f"{self.files.path}: holds {layout.dtype} words, not {dtype}")
        arrays = [
            NamedArray(
                name=array_name(layer.layer, part),
                dtype=row_dtype(layout, part),
                shape=(layout.kv_heads, layer.tokens, layout.head_dim),
                array_dtype=dtypes.by_name(row_dtype(layout, part)).numpy.str,
                reader=partial(packed_runs, files.path(part), layout, part, layer),
            )
            for files, layer in zip(self.files.layers, self.info.layers, strict=True)
            for part in PARTS
        ]
        opened = self.files.opened
        if layout.quantised:  # no way back to these files: what was lost is said, and nothing is noted down
            notes = [*self.notes, *layout.unrecoverable]
            return Source(arrays, notes=notes, lossy=True, opened=opened)
        metadata = {cache_info.METADATA_KEY: cache_info.to_json(self.info)}
        return Source(arrays, metadata, notes=list(self.notes), cache=self.info, opened=opened)


def describe_files(files: PackedFiles, options: PackedOptions) -> Described:
    """Put together what the caller, the model directory and the document beside the files say.

    Raises
    ------
    SourceError
        When what is said differs in different places, or does not fit the sizes; when the engine would not load the
        files, unless `options` say to read them anyway.
    MissingOptionError
        When neither files nor options say something that is needed.
    OptionError
        When `options` say another geometry than their model has.
    """
    if files.problems and not options.ignore_markers:
        raise SourceError(f"{files.path}: {files.problems[0]} (--ignore-markers reads the files anyway)")
    known = read_document(files)
    if known and files.sizes != [_sizes(known.layout, layer) for layer in known.layers]:
        raise SourceError(
            f"{files.document[1] if files.document else files.path}: does not describe the files beside it any more: "
            f"{_drift(files, known)}; move it away and say what they hold"
        )
    notes: list[str] = []
    fit = _layout(files, options, known, notes)
    tokens = _tokens(files, options, known, fit)
    layers = tuple(
        LayerInfo(layer=layer.layer, tokens=count, capacity=capacity, positions=runs, text_positions=text_runs)
        for layer, count, capacity, (runs, text_runs) in zip(
            files.layers, tokens, fit.capacities, _positions(tokens, known), strict=True
        )
    )
    info = CacheInfo(
        kind=files.kind,
        name=files.name,
        layout=fit.layout,
        layers=layers,
        token_ids=options.token_ids or (known.token_ids if known else None),
        model=fingerprint(options.model) if options.model else (known.model if known else None),
        next_position=known.next_position if known else None,
    )
    if known:
        _check_same(files, known, info)
    elif options.token_ids and {options.token_ids.count} != set(tokens):
        raise SourceError(f"{files.path}: {options.token_ids.count} token ids for {max(tokens)} tokens")
    if not known:
        notes += _doubts(files, info, options)
    return Described(files, info, tuple(notes))


def read_document(files: PackedFiles) -> CacheInfo | None:
    """What kvmnn left beside the files, for just the layers that were found."""
    if files.document is None:
        return None
    text, where = files.document
    known = cache_info.from_json(text, where)
    wanted = {layer.layer for layer in files.layers}
    kept = tuple(layer for layer in known.layers if layer.layer in wanted)
    whole = os.path.isdir(files.path)
    if len(kept) != len(wanted) or (whole and len(kept) != len(known.layers)):
        raise SourceError(f"{where}: describes {len(known.layers)} layers, but there are files of {len(wanted)}")
    return replace(known, layers=kept)


def model_geometry(options: PackedOptions, layers: int | None, where: str) -> Geometry:
    """The caller's geometry, completed from the model directory.

    Raises
    ------
    SourceError
        When the model has another number of layers than there are files.
    OptionError
        When the caller says other kv heads or another head_dim than the model has.
    """
    if options.model is None:
        return options.geometry
    model = read_geometry(options.model)
    if None not in (model.layers, layers) and model.layers != layers:
        raise SourceError(f"{where}: has files of {layers} layers, but the model in {options.model} has {model.layers}")
    check_agrees(options.model, model, options.geometry.kv_heads, options.geometry.head_dim)
    return options.geometry.or_else(
        Geometry(kv_heads=model.kv_heads, head_dim=model.head_dim, flash_block=model.flash_block)
    )


def _sizes(layout: PackLayout, layer: LayerInfo) -> tuple[int, int]:
    return layout.key_bytes(layer.capacity), layout.value_bytes(layer.capacity)


def _drift(files: PackedFiles, known: CacheInfo) -> str:
    for found, layer in zip(files.layers, known.layers, strict=True):
        expected = _sizes(known.layout, layer)
        if (found.key_bytes, found.value_bytes) != expected:
            return (
                f"layer {layer.layer} has files of {found.key_bytes} and {found.value_bytes} bytes, it says "
                f"{expected[0]} and {expected[1]}"
            )
    return "they differ in number"


def _layout(files: PackedFiles, options: PackedOptions, known: CacheInfo | None, notes: list[str]) -> Fit:
    layers = len(files.layers) if files.kind == "prefix" and files.layers[0].layer == 0 else None
    geometry = model_geometry(options, layers, files.path)
    if known is None and options.model and geometry.missing:
        raise MissingOptionError(
            f"{files.path}: neither its files nor those of the model in {options.model} say {geometry.missing}"
        )
    if known is None:
        names = [(PurePath(layer.key).name, PurePath(layer.value).name) for layer in files.layers]
        fit = the_fit(files.path, geometry, files.sizes, names)
        notes.extend(inferred(geometry, fit, files.sizes))
        return fit
    if not any(layout == known.layout for _, layout in geometry.or_else(of_layout(known.layout)).candidates()):
        raise SourceError(f"{files.path}: its document says {describe(known.layout)}, which is not what was asked for")
    return Fit(known.layout, "", tuple(layer.capacity for layer in known.layers))


def _tokens(files: PackedFiles, options: PackedOptions, known: CacheInfo | None, fit: Fit) -> tuple[int, ...]:
    count = len(files.layers)
    if options.tokens:
        if len(options.tokens) not in (1, count):
            raise SourceError(f"{files.path}: {len(options.tokens)} numbers of tokens for {count} layers")
        tokens = options.tokens if len(options.tokens) == count else options.tokens * count
    elif known:
        tokens = tuple(layer.tokens for layer in known.layers)
    elif options.token_ids:
        tokens = (options.token_ids.count,) * count
    else:
        raise MissingOptionError(
            f"{files.path}: the files do not say how many tokens are live: say --tokens N (at most "
            f"{min(fit.capacities)}) or --token-ids FILE"
        )
    for layer, number, capacity in zip(files.layers, tokens, fit.capacities, strict=True):
        if not 1 <= number <= capacity:
            raise SourceError(
                f"{files.path}: layer {layer.layer}: {number} tokens: expected at least 1 and at most {capacity}, "
                "which the files have room for"
            )
    return tokens


def _positions(
    tokens: tuple[int, ...], known: CacheInfo | None
) -> list[tuple[cache_info.Ranges, cache_info.Ranges | None]]:
    """The positions in the document if it has the same number of tokens, else 0, 1, 2 and so on."""
    if known and tuple(layer.tokens for layer in known.layers) == tokens:
        return [(layer.positions, layer.text_positions) for layer in known.layers]
    return [(((0, count),), None) for count in tokens]


def _check_same(files: PackedFiles, known: CacheInfo, info: CacheInfo) -> None:
    for what, said, found in (
        ("number of tokens", _tokens_of(known), _tokens_of(info)),
        ("token ids", known.token_ids or info.token_ids, info.token_ids),
        ("model", known.model or info.model, info.model),
    ):
        if said != found:
            raise SourceError(
                f"{files.path}: its document says another {what} than was given: {_shown(said)}, not {_shown(found)}"
            )


def _tokens_of(info: CacheInfo) -> tuple[int, ...]:
    return tuple(layer.tokens for layer in info.layers)


def _shown(value: tuple[int, ...] | TokenIds | str | None) -> str:
    if isinstance(value, TokenIds):
        return f"{value.count} ids with the SHA-256 {value.sha256[:12]}..."
    if isinstance(value, tuple):
        return ",".join(map(str, value if len(set(value)) > 1 else value[:1]))
    return f"{str(value)[:12]}..."


def _doubts(files: PackedFiles, info: CacheInfo, options: PackedOptions) -> list[str]:
    """Where the rows of K speak for another number of tokens than was said, in words; an engine may leave old rows.

    `SourceError` for fewer token ids than rows, where no tokens were said.
    """
    if info.layout.quantised:
        return []
    more, fewer = [], []
    for found, layer in zip(files.layers, info.layers, strict=True):
        used = used_rows(found.key, info.layout, "key", layer.capacity)
        if used > layer.tokens:
            more.append(f"rows behind the {layer.tokens} tokens are not zero, up to row {used}")
        elif used < layer.tokens:
            fewer.append(f"the last {layer.tokens - used} of {layer.tokens} tokens are all zero")
    layers = count_of(len(files.layers), "layer")
    notes = []
    said = "--tokens" if options.tokens else "--token-ids"
    if more and not options.tokens:
        tokens = info.layers[0].tokens
        raise SourceError(
            f"{files.path}: {count_of(tokens, 'token id')}, but in {len(more)} of {layers} {more[0]}: "
            f"say --tokens {tokens} as well if only these tokens are meant"
        )
    if more:
        notes.append(f"in {len(more)} of {layers} {more[0]}: more tokens may be live than --tokens says")
    if fewer:
        notes.append(f"in {len(fewer)} of {layers} {fewer[0]}: fewer tokens may be live than {said} says")
    return notes
