"""Packed files of K and V, whoever wrote them: layers found, described, and read as plain arrays.

Finding names the files of every layer. Describing adds what files cannot tell: geometry, pack numbers and tokens, from
the caller, a model directory, or the document that kvmnn leaves beside the files it writes. Reading touches live
elements only.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from functools import partial

from ... import dtypes
from ...arrays.completeness import Completeness
from ...arrays.layers import array_name
from ...arrays.named_array import NamedArray, UnsupportedArrayError
from ...arrays.source import PACKED_FILES_KEY, Source
from ...bundle.packed_record import to_json
from ...dtypes import PARTS
from ...errors import SourceError
from ...packed import cache_info
from ...packed.cache_info import CacheInfo, LayerInfo, TokenIds
from ...packed.fitting import Fit, Geometry, describe, of_layout
from ...packed.layout import PackLayout
from ...packed.rows import row_dtype
from ...text import count as count_of
from ..options import PackedOptions
from .file_account import account_files, find_difference, room_arrays
from .layer_kinds import check_layers, describe_completeness, of_files, read_states, sort_layers
from .layout_choice import AmbiguousLayoutError, LayoutChoice, choose_layout, choose_layouts, missing_options
from .live_tokens import RowCounts, count_rows, describe_rows_left, doubt_tokens, guess_tokens
from .model import check_agrees, fingerprint, has_weights, read_geometry
from .packed_files import PackedFiles
from .packed_reading import packed_runs


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
    forced
        What the words, or the sizes of the files, speak against, where the caller insisted on it; else empty.
    left_rows
        Which rows the specified tokens leave out of a fresh prefix, as a sentence; empty for none.
    trusted
        Whether the caller insists on what was specified.
    """

    files: PackedFiles
    info: CacheInfo
    notes: tuple[str, ...] = field(default=())
    forced: str = ""
    left_rows: str = ""
    trusted: bool = False

    @property
    def completeness(self) -> Completeness | None:
        """The state of every layer, where some have no K and V of their own."""
        return describe_completeness(self.info, self.files.model_states)

    def to_source(self, dtype: str | None = None, *, whole: bool = False) -> Source:
        """Return ``layer_<n>.key`` and ``layer_<n>.value``, each ``[kv_head, token, head_dim]``, of every layer.

        With `whole`, of a prefix whose files can be written again, arrays with the other bytes of its files as well,
        and in the metadata the hashes of the files, for frames.
        """
        layout = self.info.layout
        completeness = self.completeness
        if dtype not in (None, layout.dtype):
            raise UnsupportedArrayError(f"{self.files.path}: holds {layout.dtype} words, not {dtype}")
        arrays = [
            NamedArray(
                name=array_name(layer.layer, part),
                dtype=row_dtype(layout, part),
                shape=(self.info.layout_of(layer).kv_heads, layer.tokens, self.info.layout_of(layer).head_dim),
                array_dtype=dtypes.by_name(row_dtype(layout, part)).numpy.str,
                reader=partial(packed_runs, files.path(part), self.info.layout_of(layer), part, layer),
            )
            for files, layer in zip(self.files.layers, self.info.layers, strict=True)
            for part in PARTS
        ]
        opened = self.files.opened
        if layout.quantised:  # no way back to these files: what was lost is said, and nothing is noted down
            notes = [*self.notes, *layout.unrecoverable]
            return Source(arrays, notes=notes, lossy=True, opened=opened, completeness=completeness, doubt=self.forced)
        metadata = {cache_info.METADATA_KEY: cache_info.to_json(self.info)}
        if whole and self.files.is_whole:
            if self.left_rows and not self.trusted:
                raise _refuse(self.files, self.info, self.left_rows)
            record = account_files(self.files, self.info, left_out=self.forced or self.left_rows)
            metadata[PACKED_FILES_KEY] = to_json(record)
            arrays += room_arrays(self.files, self.info, record)
        notes = list(self.notes)
        return Source(
            arrays,
            metadata,
            notes=notes,
            cache=self.info,
            opened=opened,
            completeness=completeness,
            states=read_states(self.files),
            doubt=self.forced,
        )


def describe_files(files: PackedFiles, options: PackedOptions) -> Described:
    """Put together what the caller, the model directory and the document beside the files say, and what words tell.

    Raises
    ------
    SourceError
        When what is said differs in different places, or does not fit the sizes or the words; when the engine would
        not load the files, unless `options` say to read them anyway.
    MissingOptionError
        When neither files nor options say something that is needed; `AmbiguousLayoutError` lists what it may be.
    OptionError
        When `options` say another geometry than their model has.
    """
    files, known = _check_files(files, options)
    notes = [*files.notes, *([f"read although {files.unlike_sizes}"] if files.unlike_sizes and not known else [])]
    choice = _layout(files, options, known)
    fit = choice.fit
    notes += choice.notes
    if choice.conflict and not options.trust and not (options.tokens or options.token_ids):  # which count would be odd
        raise SourceError(
            f"{files.path}: {choice.conflict}; the words speak for {choice.better}; --force reads them as specified"
        )
    rows = None if known or fit.layout.quantised else count_rows(files, fit, choice.layouts)
    tokens, token_notes = _tokens(files, options, known, fit, rows)
    notes += token_notes
    layers = tuple(
        LayerInfo(
            layer=layer.layer, tokens=count, capacity=capacity, positions=runs, text_positions=text_runs, heads=heads
        )
        for layer, count, capacity, (runs, text_runs), heads in zip(
            files.layers,
            tokens,
            fit.capacities,
            _positions(tokens, known),
            choice.heads or (None,) * len(tokens),
            strict=True,
        )
    )
    info = CacheInfo(
        kind=files.kind,
        name=files.name,
        layout=fit.layout,
        layers=layers,
        token_ids=options.token_ids or (known.token_ids if known else None),
        model=_fingerprint(options.model, notes) or (known.model if known else None),
        next_position=known.next_position if known else None,
        states=of_files(files),
    )
    if known:
        _check_same(files, known, info)
    elif options.token_ids and {options.token_ids.count} != set(tokens):
        raise SourceError(f"{files.path}: {options.token_ids.count} token ids for {max(tokens)} tokens")
    cut = f"{files.unlike_sizes}: files were cut" if files.unlike_sizes and not known else ""
    if rows is None:
        return Described(files, info, tuple(notes), cut, "", options.trust)
    contradicted = _check_words(files, options, info, choice, rows, notes)
    left_rows = describe_rows_left(files, fit, rows, tokens)
    forced = "; ".join(filter(None, (cut, contradicted)))
    return Described(files, info, tuple(notes), forced, left_rows, options.trust)


def _fingerprint(model: str | None, notes: list[str]) -> str | None:
    """That of the model, where its directory has more than settings."""
    if model is None:
        return None
    if not has_weights(model):
        notes.append(f"{model} has no .mnn file: its settings are taken, and no fingerprint of the model is noted down")
        return None
    return fingerprint(model)


def _check_files(files: PackedFiles, options: PackedOptions) -> tuple[PackedFiles, CacheInfo | None]:
    """The files by kinds of layers, and what the document beside them says.

    `SourceError` for files that are damaged or that it does not fit.
    """
    if files.gaps:
        raise SourceError(f"{files.path}: {files.gaps[0]}, so no engine would load it: compute the prefix again")
    if files.problems and not options.ignore_markers:
        raise SourceError(f"{files.path}: {files.problems[0]} (--ignore-markers reads the files anyway)")
    known = read_document(files)
    files = sort_layers(files, options, known)
    if known and (
        files.sizes != [_sizes(known.layout_of(layer), layer) for layer in known.layers]
        or of_files(files) != known.states
    ):
        raise SourceError(
            f"{files.document[1] if files.document else files.path}: does not describe the files beside it any more: "
            f"{_drift(files, known)}; move it away and say what they hold"
        )
    if files.unlike_sizes and not known and not options.trust:
        raise SourceError(
            f"{files.path}: {files.unlike_sizes}: files were cut, and MNN would delete this prefix instead of loading "
            "it: compute it again (--force reads what is left)"
        )
    return files, known


def _check_words(
    files: PackedFiles,
    options: PackedOptions,
    info: CacheInfo,
    choice: LayoutChoice,
    rows: RowCounts,
    notes: list[str],
) -> str:
    """Refuse what the words contradict, or say it where the caller is to be believed; returns what was believed."""
    tokens = _tokens_of(info)
    conflict = f"{choice.conflict}; the words speak for {choice.better}" if choice.conflict else ""
    if conflict and not options.trust:
        raise _refuse(files, info, conflict)
    option = "--tokens" if options.tokens else "--token-ids"
    above, below = doubt_tokens(rows, tokens, option)
    if above and options.token_ids and not options.tokens:
        ids = count_of(tokens[0], "token id")
        raise SourceError(
            f"{files.path}: {ids}, but {above[0].partition(':')[0]}: say --tokens {tokens[0]} as well if only these "
            "tokens are meant"
        )
    if conflict:
        notes.append(f"the words contradict what was specified: {conflict}")
    elif options.tokens or options.token_ids:
        notes += [*above, *below]
    return conflict


def _refuse(files: PackedFiles, info: CacheInfo, conflict: str) -> SourceError:
    """What the words contradict, and the first of them."""
    first = find_difference(files, info)
    seen = f" (the first word in the way: {first})" if first else ""
    return SourceError(f"{files.path}: {conflict}{seen}; --force reads the files as specified")


def read_document(files: PackedFiles) -> CacheInfo | None:
    """What kvmnn left beside the files, for just the layers that were found."""
    if files.document is None:
        return None
    text, where = files.document
    known = cache_info.from_json(text, where)
    wanted = {layer.layer for layer in files.layers}
    kept = tuple(layer for layer in known.layers if layer.layer in wanted)
    states = tuple(state for state in known.states if state.layer in wanted)
    whole = os.path.isdir(files.path)
    if len(kept) + len(states) != len(wanted) or (whole and len(wanted) != len(known.numbers)):
        raise SourceError(f"{where}: describes {len(known.numbers)} layers, but there are files of {len(wanted)}")
    return replace(known, layers=kept, states=states)


def model_geometry(options: PackedOptions, files: PackedFiles | None = None) -> Geometry:
    """The caller's geometry, completed from the model directory, whose layers are those of `files`.

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
    if files is not None:
        check_layers(files, model, options.model)
    check_agrees(options.model, model, options.geometry.kv_heads, options.geometry.head_dim)
    return options.geometry.or_else(
        Geometry(kv_heads=model.kv_heads, head_dim=model.head_dim, flash_block=model.flash_block)
    )


def _sizes(layout: PackLayout, layer: LayerInfo) -> tuple[int, int]:
    return layout.key_bytes(layer.capacity), layout.value_bytes(layer.capacity)


def _drift(files: PackedFiles, known: CacheInfo) -> str:
    pairs = [(layer.layer, *_sizes(known.layout_of(layer), layer)) for layer in known.layers]
    pairs += [(state.layer, state.key_bytes, state.value_bytes) for state in known.states]
    for found, (number, *sizes) in zip((*files.layers, *files.states), pairs, strict=True):
        expected = sizes[0], sizes[1]
        if (found.key_bytes, found.value_bytes) != expected:
            return (
                f"layer {number} has files of {found.key_bytes} and {found.value_bytes} bytes, it says "
                f"{expected[0]} and {expected[1]}"
            )
    return "they differ in number"


def _layout(files: PackedFiles, options: PackedOptions, known: CacheInfo | None) -> LayoutChoice:
    geometry = model_geometry(options, files)
    if known is not None:
        if not any(layout == known.layout for _, layout in geometry.or_else(of_layout(known.layout)).candidates()):
            raise SourceError(
                f"{files.path}: its document says {describe(known.layout)}, which is not what was asked for"
            )
        fit = Fit(known.layout, "", tuple(layer.capacity for layer in known.layers))
        return LayoutChoice(fit, heads=tuple(layer.heads for layer in known.layers))
    tokens = options.tokens or ((options.token_ids.count,) if options.token_ids else ())
    number = tokens[0] if len(set(tokens)) == 1 else None

    def choose(number: int | None) -> LayoutChoice:
        if len(files.groups) > 1:
            return choose_layouts(files, geometry, _group_heads(files, options), number)
        return choose_layout(files, geometry, tokens=number)

    try:
        return choose(number)
    except AmbiguousLayoutError as error:
        if number is not None and not error.choices:
            with contextlib.suppress(AmbiguousLayoutError):  # the rows may show a layout, with another number of tokens
                return choose(None)
        if not geometry.missing:
            raise
        where = f"neither its files nor those of the model in {options.model} say {geometry.missing}"
        missing = missing_options(geometry, tokens=not tokens)
        text = f"{files.path}: {where}" if options.model else f"{files.path}: {missing}"
        choices = [choice if tokens else f"{choice} --tokens N" for choice in error.choices]
        raise AmbiguousLayoutError(text, choices) from None


def _group_heads(files: PackedFiles, options: PackedOptions) -> list[tuple[int | None, int | None]]:
    """What is known of the kv heads and head_dim of each group of layers."""
    own: tuple[tuple[int | None, int | None], ...] = options.heads
    if not own and options.model:
        model = read_geometry(options.model)
        states = zip(model.layer_geometry, model.states, strict=True) if model.layer_geometry else ()
        own = tuple(heads for heads, state in states if state.kind == "full")
    if len(own) != len(files.layers):
        if options.geometry.kv_heads or options.geometry.head_dim:
            raise SourceError(
                f"{files.path}: its layers differ in size, so --kv-heads and --head-dim are not those of all: leave "
                "them out, or say --model DIR"
            )
        return [(None, None)] * len(files.groups)
    by_layer = dict(zip((layer.layer for layer in files.layers), own, strict=True))
    return [by_layer[group[0].layer] for group in files.groups]


def _tokens(
    files: PackedFiles, options: PackedOptions, known: CacheInfo | None, fit: Fit, rows: RowCounts | None
) -> tuple[tuple[int, ...], list[str]]:
    """Live tokens of each layer, and how they were inferred."""
    count, notes = len(files.layers), []
    if options.tokens:
        if len(options.tokens) not in (1, count):
            raise SourceError(f"{files.path}: {len(options.tokens)} numbers of tokens for {count} layers")
        tokens = options.tokens if len(options.tokens) == count else options.tokens * count
    elif known:
        tokens = tuple(layer.tokens for layer in known.layers)
    elif options.token_ids:
        tokens = (options.token_ids.count,) * count
    else:
        guess = guess_tokens(files, fit, rows) if rows else None
        if guess is None or guess.tokens is None:
            raise AmbiguousLayoutError(
                f"{files.path}: the files do not say how many tokens are live: say --tokens N (at most "
                f"{min(fit.capacities)}) or --token-ids FILE" + (f"; {guess.reason}" if guess else ""),
                [f"--tokens {number}" for number in guess.choices] if guess else [],
            )
        tokens = (guess.tokens,) * count
        notes = [f"{guess.tokens} tokens inferred: {guess.reason}"]
    for layer, number, capacity in zip(files.layers, tokens, fit.capacities, strict=True):
        if not 1 <= number <= capacity:
            raise SourceError(
                f"{files.path}: layer {layer.layer}: {number} tokens: expected at least 1 and at most {capacity}, "
                "which the files have room for"
            )
    return tokens, notes


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
