"""Packed files of K and V: find the files of every layer, describe them, and read them as plain arrays.

A description adds what the files do not record: geometry, pack numbers and tokens, from the caller, a model directory,
or the document that kvmnn writes. Only live elements are read.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import field, replace
from pathlib import PurePath
from typing import TypeAlias

from ..._util.dataclass import dataclass
from ..._util.text import pluralize as count_of
from ...arrays.array import UnsupportedArrayError
from ...arrays.completeness import SHIFTED_KEYS_TEXT, Completeness, add_missing_state
from ...arrays.layers import format_array_name
from ...arrays.source import COMPACTED_TEXT, LOSSY_KEY, PACKED_FILES_KEY, Source, join_losses
from ...bundle.manifest import MANIFEST_NAME, dump_packed_record
from ...dtypes import PARTS
from ...errors import KvmnnError, MissingFileError, OptionError, SourceError, UnsuitableOptionError
from ...files.mapped_file import FileHead, MappedFile
from ...packed import cache_info
from ...packed.cache_info import CacheInfo, LayerInfo, TokenIdsFingerprint, compute_file_sizes
from ...packed.inference import LayoutMatch, PackedGeometry, describe_layout, make_geometry
from .. import raw
from ..base import PathFormat
from ..options import PackedOptions, ReadOptions
from . import mmap_cache
from .layer_kinds import (
    build_completeness,
    build_state_layers,
    check_layer_count,
    list_opaque_states,
    separate_state_layers,
)
from .layout_inference import (
    AmbiguousLayoutError,
    LayoutChoice,
    RowCounts,
    choose_group_layouts,
    choose_layout,
    count_nonempty_rows,
    describe_empty_rows,
    describe_omitted_rows,
    describe_size_doubt,
    format_layout_options,
    format_missing_options,
    infer_token_count,
    list_token_doubts,
)
from .model import check_model_agrees, read_model_geometry, try_compute_fingerprint
from .packed_files import DamagedFilesError, PackedFiles, describe_marker, find_prefix, has_gaps, list_prefix_names
from .packed_io import account_for_files, find_difference, make_packed_array, make_unused_arrays
from .row_hashes import find_changed_layer

_IDS = "sequence of token ids"
_PropertyValue: TypeAlias = "tuple[int, ...] | TokenIdsFingerprint | str | None"
PACKED_SUFFIXES = (".k", ".v")


@dataclass(frozen=True)
class PackedCacheReader:
    """A reader of packed files with a known layout."""

    #: The files.
    files: PackedFiles
    #: The layout and layers of the cache.
    info: CacheInfo
    #: Notes about the inferred values and their evidence.
    notes: tuple[str, ...] = field(default=())
    #: Evidence of elements or file sizes against a layout that the caller forced; else empty.
    ignored_conflict: str = ""
    #: A sentence about nonzero rows of a prefix cache beyond the specified tokens; empty for none.
    omitted_rows_text: str = ""

    @property
    def completeness(self) -> Completeness | None:
        """Return the state of every layer, if some have no K and V of their own or K is int8; else None."""
        completeness = build_completeness(self.info, self.files.model_states)
        return add_missing_state(completeness, SHIFTED_KEYS_TEXT) if self.info.layout.is_quantized else completeness

    def to_source(self, dtype: str | None = None, *, include_unused: bool = False) -> Source:
        """Return ``layer_<n>.key`` and ``layer_<n>.value``, each ``[kv_head, token, head_dim]``, of every layer.

        `include_unused` adds what frames need to restore the files of a prefix: arrays with their unused bytes, and
        their hashes in the metadata.
        """
        layout = self.info.layout
        if dtype not in (None, layout.dtype):
            raise UnsupportedArrayError(f"{self.files.path}: holds {layout.dtype} words, not {dtype}")
        source = Source(
            [
                make_packed_array(
                    format_array_name(layer.layer, part),
                    files.get_path(part),
                    self.info.get_layer_layout(layer),
                    part,
                    layer,
                )
                for files, layer in zip(self.files.layers, self.info.layers, strict=True)
                for part in PARTS
            ],
            notes=[*self.notes],
            opened_files=self.files.opened_files,
            completeness=self.completeness,
            doubt=self.ignored_conflict or self.omitted_rows_text,
            has_assumed_positions=self.files.sidecar_document is None,
        )
        if layout.is_quantized:  # no way back to these files, whose description is of no use then
            source.lossy = True
            source.metadata[LOSSY_KEY] = join_losses(*layout.unrecoverable_parts, self.info.loss)
            return source
        if self.ignored_conflict:
            source.metadata[LOSSY_KEY] = self.ignored_conflict
        source.cache, source.states = self.info, list_opaque_states(self.files)
        source.metadata[cache_info.METADATA_KEY] = cache_info.dump_cache_info(self.info)
        if include_unused and self.files.is_whole_prefix:
            record = account_for_files(self.files, self.info, left_out=self.ignored_conflict)
            source.metadata[PACKED_FILES_KEY] = dump_packed_record(record)
            source.arrays = [*source.arrays, *make_unused_arrays(self.files, self.info, record)]
        return source


def open_packed_files(files: PackedFiles, options: PackedOptions) -> PackedCacheReader:
    """Combine options, model directory, sidecar and the evidence of the elements into a reader of packed files.

    Raises
    ------
    SourceError
        When the descriptions contradict each other or the sizes; when the engine would not load the files, or a KV head
        lacks rows that others have, unless `options` force reading.
    UnsuitableOptionError
        When sizes or words of the files contradict `options`, unless these force reading.
    MissingOptionError
        When a required value is neither specified nor inferred; `AmbiguousLayoutError` lists the possible values.
    OptionError
        When the geometry in `options` differs from that of the model.
    """
    files, sidecar_info = _check_and_sort_files(files, options)
    stray_document_loss = _check_stray_document(files, options)
    num_frame_layers = len(options.heads or options.valid_tokens) if options.is_of_frames else 0
    if num_frame_layers > 1 and num_frame_layers != len(files.layers):
        raise SourceError(
            f"{files.path}: has {count_of(len(files.layers), 'layer')} with K and V, and the frames have "
            f"{num_frame_layers} (kvmnn diff names those that differ)"
        )
    size_mismatch = "" if sidecar_info else files.size_mismatch
    try:
        choice = _resolve_layout(files, options, sidecar_info)
        has_count = bool(options.valid_tokens or options.token_ids)
        if choice.conflict and not options.ignore_contradictions and not has_count:  # which count would be odd
            raise _make_damage_error(files, options) or UnsuitableOptionError(
                f"{files.path}: {choice.conflict}; the words speak for {choice.better_options}; --ignore "
                "contradictions reads them as specified"
            )
        match = choice.match
        has_row_counts = not (sidecar_info or match.layout.is_quantized or options.is_of_frames)
        row_counts = count_nonempty_rows(files, match, choice.layouts) if has_row_counts else None
        tokens, token_notes = _resolve_tokens(files, options, sidecar_info, match, row_counts)
    except AmbiguousLayoutError as error:
        raise _make_damage_error(files, options) or error from None
    notes = [*files.notes, *([f"read although {size_mismatch}"] if size_mismatch else []), *choice.notes]
    notes += token_notes
    layer_heads = choice.layer_heads or (None,) * len(tokens)
    layers = tuple(
        LayerInfo(
            layer=layer.layer,
            tokens=num_tokens,
            capacity=capacity,
            positions=position_runs,
            text_positions=text_position_runs,
            heads=heads,
        )
        for layer, num_tokens, capacity, (position_runs, text_position_runs), heads in zip(
            files.layers, tokens, match.capacities, _list_positions(tokens, sidecar_info), layer_heads, strict=True
        )
    )
    info = CacheInfo(
        kind=files.kind,
        name=files.name,
        layout=match.layout,
        layers=layers,
        token_ids=options.token_ids or (sidecar_info.token_ids if sidecar_info else None),
        model=try_compute_fingerprint(options.model, notes) or (sidecar_info.model if sidecar_info else None),
        next_position=sidecar_info.next_position if sidecar_info else None,
        states=build_state_layers(files),
        loss=sidecar_info.loss if sidecar_info else "",
    )
    if sidecar_info:
        _check_same_as_sidecar(files, options, sidecar_info, info)
        if options.token_ids and not options.ignore_contradictions:
            check_ids_count(files.path, sidecar_info, options.token_ids.count)
    elif options.token_ids and {options.token_ids.count} != set(tokens):
        raise UnsuitableOptionError(f"{files.path}: {options.token_ids.count} token ids for {max(tokens)} tokens")
    if choice.conflict and not options.ignore_contradictions:
        conflict = f"{choice.conflict}; the words speak for {choice.better_options}"
        raise _make_damage_error(files, options) or _make_conflict_error(files, info, conflict)
    if not options.is_of_frames:  # frames that are compared have every row
        counts = row_counts or count_nonempty_rows(files, match, choice.layouts, tokens)
        empty_rows_loss = _check_empty_rows(files, options, describe_empty_rows(files, counts, tokens))
        markers_losses = [f"{problem}: not checked whether its files belong together" for problem in files.problems]
        info = replace(info, loss=join_losses(info.loss, empty_rows_loss, *markers_losses, stray_document_loss))
        if match.layout.is_quantized:  # unused rows of int8 V are not zero, those of K are
            all_counts = count_nonempty_rows(files, match, choice.layouts)
            all_counts = replace(all_counts, values_by_head=all_counts.keys_by_head)
            option_name = "--valid-tokens" if options.valid_tokens else "--token-ids"
            notes += list_token_doubts(all_counts, tokens, option_name)[0]
        if sidecar_info is None:
            _refuse_zero_rows(files, options, counts, tokens)
        else:  # frames that are compared show the first difference
            info = replace(info, loss=join_losses(info.loss, _check_document(files, options, sidecar_info)))
    conflicts, omitted_rows_text = [], ""
    if size_mismatch and not options.is_of_frames:
        conflicts.append(f"{size_mismatch}: files were cut")
    if row_counts is not None:
        conflicts.append(_check_contents(files, options, info, choice, row_counts, notes))
        omitted_rows_text = describe_omitted_rows(files, match, row_counts, tokens)
    elif sidecar_info and not (match.layout.is_quantized or options.is_of_frames or _has_evicted_rows(info)):
        row_counts = count_nonempty_rows(files, match, choice.layouts)
        document_name = files.name + cache_info.CACHE_SIDECAR_SUFFIX
        notes += list_token_doubts(row_counts, tokens, document_name)[0]  # the engine may have written the files since
        omitted_rows_text = describe_omitted_rows(files, match, row_counts, tokens)
    ignored_conflict = "; ".join(filter(None, conflicts))
    return PackedCacheReader(files, info, tuple(notes), ignored_conflict, omitted_rows_text)


_MAX_STRAY_BYTES = 16


def _make_damage_error(files: PackedFiles, options: PackedOptions) -> SourceError | None:
    """Make the error for files that are understood but for empty rows or a few stray bytes; None for other files.

    Empty rows of one head, or one byte after the rows, contradict every layout. Every second layer, without the one
    that has them, still shows the right one.
    """
    if len(files.layers) < 2 or len({*files.sizes}) != 1:
        return None
    geometry = resolve_geometry(options, files)
    for layers in (files.layers[::2], files.layers[1::2]):
        half = replace(files, layers=layers)
        try:
            match = choose_layout(half, geometry).match
        except KvmnnError:
            continue
        if match.layout.is_quantized:
            return None
        num_tokens = count_nonempty_rows(half, match, (match.layout,) * len(layers)).common_count
        if num_tokens is None:
            continue
        options_text = f"{format_layout_options(match, geometry)} --valid-tokens {num_tokens}".lstrip()
        whole_match = replace(match, capacities=match.capacities[:1] * len(files.layers))
        row_counts = count_nonempty_rows(files, whole_match, (match.layout,) * len(files.layers))
        problem = describe_empty_rows(files, row_counts, (num_tokens,) * len(files.layers))
        if problem and row_counts.majority_count == num_tokens:
            return DamagedFilesError(
                f"{files.path}: {problem}: the file was written in part: compute the prefix again, or read it with "
                f"{options_text} --ignore contradictions",
                problem,
            )
        if options.valid_tokens or options.token_ids:
            continue
        infos = [
            LayerInfo(layer=layer.layer, tokens=num_tokens, capacity=match.capacities[0], positions=((0, num_tokens),))
            for layer in files.layers
        ]
        info = CacheInfo(kind=files.kind, name=files.name, layout=match.layout, layers=tuple(infos))
        difference_text = find_difference(files, info, max_bytes=_MAX_STRAY_BYTES)
        if difference_text:
            return AmbiguousLayoutError(
                f"{files.path}: nothing is inferred, as {difference_text}: compute the prefix again, or read it with "
                f"{options_text}",
                [options_text],
            )
    return None


def _check_and_sort_files(files: PackedFiles, options: PackedOptions) -> tuple[PackedFiles, CacheInfo | None]:
    """Group the files by kind of layer, and return their sidecar's description, if any.

    Raises `SourceError` for damaged files, and for a sidecar that does not match them.
    """
    if files.missing_files:
        raise SourceError(
            f"{files.path}: {files.missing_files[0]}, so no engine would load it: compute the prefix again"
        )
    if files.problems and not options.ignore_markers:
        raise SourceError(f"{files.path}: {files.problems[0]} (--ignore markers reads the files anyway)")
    sidecar_info = read_sidecar_info(files)
    files = separate_state_layers(files, options, sidecar_info)
    if sidecar_info and (
        files.sizes != [compute_file_sizes(sidecar_info, layer) for layer in sidecar_info.layers]
        or build_state_layers(files) != sidecar_info.states
    ):
        raise SourceError(
            f"{files.sidecar_document[1] if files.sidecar_document else files.path}: does not describe the files next "
            f"to it any more: {_describe_drift(files, sidecar_info)}; move it away and say what they hold"
        )
    if files.size_mismatch and not sidecar_info and not options.ignore_contradictions:
        raise SourceError(
            f"{files.path}: {files.size_mismatch}: files were cut, and MNN would delete this prefix instead of loading "
            "it: compute it again"
        )
    return files, sidecar_info


def _check_contents(
    files: PackedFiles,
    options: PackedOptions,
    info: CacheInfo,
    choice: LayoutChoice,
    row_counts: RowCounts,
    notes: list[str],
) -> str:
    """Raise an error for tokens that the elements contradict; return how these contradict the layout, if they do."""
    tokens = _list_token_counts(info)
    conflict = f"{choice.conflict}; the words speak for {choice.better_options}" if choice.conflict else ""
    option_name = "--valid-tokens" if options.valid_tokens else "--token-ids"
    more_tokens_doubts, fewer_tokens_doubts = list_token_doubts(row_counts, tokens, option_name)
    if more_tokens_doubts and options.token_ids and not options.valid_tokens:
        ids_text = count_of(tokens[0], "token id")
        raise UnsuitableOptionError(
            f"{files.path}: {ids_text}, but {more_tokens_doubts[0].partition(':')[0]}: say --valid-tokens {tokens[0]} "
            "as well if only these tokens are meant"
        )
    if fewer_tokens_doubts and options.token_ids and not (options.valid_tokens or options.ignore_contradictions):
        ids_text = count_of(tokens[0], "token id")
        num_rows = min(map(max, row_counts.keys, row_counts.values))  # of the layer that has the fewest
        raise UnsuitableOptionError(
            f"{files.path}: {ids_text}, but {count_of(num_rows, 'row')} of K and V are not zero "
            f"({fewer_tokens_doubts[0].partition(':')[0]}): expected the ids of the tokens that the files hold; "
            "--ignore contradictions takes all ids"
        )
    if conflict:
        notes.append(f"the words contradict what was specified: {conflict}")
    elif options.valid_tokens or options.token_ids:
        notes += [*more_tokens_doubts, *fewer_tokens_doubts]
    return conflict


def _refuse_zero_rows(
    files: PackedFiles, options: PackedOptions, row_counts: RowCounts, tokens: tuple[int, ...]
) -> None:
    """Raise `UnsuitableOptionError` for more tokens than rows of any layer, where nothing but an option states them."""
    num_rows = row_counts.common_count or min(tokens)
    is_only_specified = options.valid_tokens and not (options.token_ids or options.ignore_contradictions)
    if is_only_specified and num_rows < min(tokens):
        raise UnsuitableOptionError(
            f"{files.path}: --valid-tokens says {min(tokens)}, but K and V of all layers are zero from row {num_rows} "
            f"on (counted from 0): expected at most {num_rows}; --ignore contradictions takes the zero rows as tokens"
        )


def _has_evicted_rows(info: CacheInfo) -> bool:
    """Return whether rows after the live tokens are expected: those of tokens that were evicted."""
    return COMPACTED_TEXT in info.loss or has_gaps(info)


def _check_empty_rows(files: PackedFiles, options: PackedOptions, problem: str) -> str:
    """Raise `DamagedFilesError` for a KV head that lacks rows; return what is lost if that is to be ignored."""
    if not problem:
        return ""
    if options.ignore_contradictions:
        return f"{problem}: the zero rows are taken as tokens"
    option_name = "--valid-tokens" if options.valid_tokens else "--token-ids" if options.token_ids else ""
    cause = f"{option_name} has more tokens than the file, or it" if option_name else "the file"
    raise DamagedFilesError(
        f"{files.path}: {problem}: {cause} was written in part: compute the prefix again; --ignore contradictions "
        "takes the zero rows as tokens",
        problem,
    )


def _check_stray_document(files: PackedFiles, options: PackedOptions) -> str:
    """Raise `SourceError` for files that may have been renamed without their document; return the loss if ignored.

    Without it, rows of evicted tokens would be read as tokens, and losses would be unknown.
    """
    if not files.stray_document or options.is_of_frames:
        return ""
    problem = f"{files.stray_document} describes no files next to it"
    if options.ignore_contradictions:
        return f"{problem}: whether it is that of prefix {files.name!r} is unknown, and it was not read"
    raise SourceError(
        f"{files.path}: {problem}: rename it to {files.name}{cache_info.CACHE_SIDECAR_SUFFIX} if these files were "
        "renamed, else remove it; --ignore contradictions reads the files without it"
    )


def _check_document(files: PackedFiles, options: PackedOptions, sidecar_info: CacheInfo) -> str:
    """Raise `SourceError` for a document that was written for other rows; return what is lost if that is to be ignored.

    Tokens, positions and losses of the rows that are there would be wrong: MNN computes a prefix of a name again and
    leaves the document.
    """
    layer = find_changed_layer(files, sidecar_info)
    if layer is None:
        return ""
    document_name = files.name + cache_info.CACHE_SIDECAR_SUFFIX
    problem = f"{document_name} was written for other rows than those of layer {layer}"
    if options.ignore_contradictions:
        return f"{problem}: its tokens and positions are taken as true"
    raise SourceError(
        f"{files.path}: {problem}: MNN computed the prefix again, or the files were changed or damaged: remove "
        f"{document_name} to read the files without it, or pack them again; --ignore contradictions takes it as it is"
    )


def _make_conflict_error(files: PackedFiles, info: CacheInfo, conflict: str) -> UnsuitableOptionError:
    """Make the error for elements that contradict the specified layout; it names the first one."""
    difference_text = find_difference(files, info)
    detail_text = f" (the first word in the way: {difference_text})" if difference_text else ""
    return UnsuitableOptionError(
        f"{files.path}: {conflict}{detail_text}; --ignore contradictions reads the files as specified"
    )


def read_sidecar_info(files: PackedFiles) -> CacheInfo | None:
    """Read kvmnn's description next to the files, restricted to the layers that were found."""
    if files.sidecar_document is None:
        return None
    text, label = files.sidecar_document
    sidecar_info = cache_info.load_cache_info(text, label)
    found_layers = {layer.layer for layer in files.layers}
    selected_layers = tuple(layer for layer in sidecar_info.layers if layer.layer in found_layers)
    states = tuple(state for state in sidecar_info.states if state.layer in found_layers)
    is_folder = os.path.isdir(files.path)
    if len(selected_layers) + len(states) != len(found_layers) or (
        is_folder and len(found_layers) != len(sidecar_info.numbers)
    ):
        problem = f"describes {len(sidecar_info.numbers)} layers, but there are files of {len(found_layers)}"
        raise DamagedFilesError(f"{label}: {problem}", f"{os.path.basename(label)}: {problem}")
    return replace(sidecar_info, layers=selected_layers, states=states)


def resolve_geometry(options: PackedOptions, files: PackedFiles | None = None) -> PackedGeometry:
    """Complete the caller's geometry from the model directory, whose layers are those of `files`."""
    if options.model is None:
        return options.geometry
    model = read_model_geometry(options.model)
    if files is not None:
        check_layer_count(files, model, options.model)
    check_model_agrees(options.model, model, options.geometry.kv_heads, options.geometry.head_dim)
    return options.geometry.merge_defaults(
        PackedGeometry(kv_heads=model.kv_heads, head_dim=model.head_dim, flash_block=model.flash_block)
    )


def _describe_drift(files: PackedFiles, sidecar_info: CacheInfo) -> str:
    pairs = [(layer.layer, *compute_file_sizes(sidecar_info, layer)) for layer in sidecar_info.layers]
    pairs += [(state.layer, state.key_bytes, state.value_bytes) for state in sidecar_info.states]
    for file_pair, (layer_number, *expected_sizes) in zip((*files.layers, *files.states), pairs, strict=True):
        if [*file_pair.sizes] != expected_sizes:
            return (
                f"layer {layer_number} has files of {file_pair.key_bytes} and {file_pair.value_bytes} bytes, it says "
                f"{expected_sizes[0]} and {expected_sizes[1]}"
            )
    return "they differ in number"


def _resolve_layout(files: PackedFiles, options: PackedOptions, sidecar_info: CacheInfo | None) -> LayoutChoice:
    geometry = resolve_geometry(options, files)
    if sidecar_info is not None:
        candidates = geometry.merge_defaults(make_geometry(sidecar_info.layout)).list_candidates()
        if sidecar_info.layout not in [layout for _, layout in candidates]:
            layout_text = describe_layout(sidecar_info.layout)
            if options.is_of_frames and candidates:  # the frames that are compared say the geometry
                raise SourceError(
                    f"{files.path}: its files hold {layout_text} by their document, the bundle "
                    f"{describe_layout(candidates[0][1])}"
                )
            raise UnsuitableOptionError(
                f"{files.path}: its document says {layout_text}, which is not what was asked for"
            )
        match = LayoutMatch(sidecar_info.layout, "", tuple(layer.capacity for layer in sidecar_info.layers))
        return LayoutChoice(match, layer_heads=tuple(layer.heads for layer in sidecar_info.layers))
    tokens = options.valid_tokens or ((options.token_ids.count,) if options.token_ids else ())
    num_tokens = tokens[0] if len(set(tokens)) == 1 else None

    def choose(num_tokens: int | None) -> LayoutChoice:
        if len(files.groups) > 1:
            return choose_group_layouts(files, geometry, _resolve_group_heads(files, options), num_tokens)
        return choose_layout(files, geometry, num_tokens=num_tokens)

    try:
        return choose(num_tokens)
    except UnsuitableOptionError as error:
        raise (SourceError(str(error)) if options.is_of_frames else error) from None
    except AmbiguousLayoutError as error:
        if num_tokens is not None and not error.choices:
            with contextlib.suppress(AmbiguousLayoutError):  # the rows may show a layout, with another number of tokens
                return choose(None)
        if not geometry.missing_text:
            raise
        unresolved_text = f"neither its files nor those of the model in {options.model} say {geometry.missing_text}"
        missing_text = format_missing_options(geometry, include_tokens=not tokens)
        size_doubt = "" if error.choices or len(files.groups) > 1 else describe_size_doubt(files)
        message = "; ".join(filter(None, [size_doubt, unresolved_text if options.model else missing_text]))
        choices = [choice if tokens else f"{choice} --valid-tokens N" for choice in error.choices]
        raise AmbiguousLayoutError(f"{files.path}: {message}", choices) from None


def _resolve_group_heads(files: PackedFiles, options: PackedOptions) -> list[tuple[int | None, int | None]]:
    """Return the known kv heads and head_dim of each group of layers."""
    layer_heads: tuple[tuple[int | None, int | None], ...] = options.heads
    if not layer_heads and options.model:
        layer_heads = read_model_geometry(options.model).full_layer_heads
    if len(layer_heads) != len(files.layers):
        if options.geometry.kv_heads or options.geometry.head_dim:
            raise UnsuitableOptionError(
                f"{files.path}: its layers differ in size, so --kv-heads and --head-dim are not those of all: leave "
                "them out, or say --model DIR"
            )
        return [(None, None)] * len(files.groups)
    by_layer = dict(zip((layer.layer for layer in files.layers), layer_heads, strict=True))
    return [by_layer[group[0].layer] for group in files.groups]


def _resolve_tokens(
    files: PackedFiles,
    options: PackedOptions,
    sidecar_info: CacheInfo | None,
    match: LayoutMatch,
    row_counts: RowCounts | None,
) -> tuple[tuple[int, ...], list[str]]:
    """Return the live tokens of each layer, and how they were inferred."""
    num_layers, notes = len(files.layers), []
    if options.valid_tokens:
        if len(options.valid_tokens) not in (1, num_layers):
            raise UnsuitableOptionError(
                f"{files.path}: {len(options.valid_tokens)} numbers of tokens for {num_layers} layers"
            )
        tokens = options.valid_tokens if len(options.valid_tokens) == num_layers else options.valid_tokens * num_layers
    elif sidecar_info:
        tokens = tuple(layer.tokens for layer in sidecar_info.layers)
    elif options.token_ids:
        tokens = (options.token_ids.count,) * num_layers
    else:
        guess = infer_token_count(files, match, row_counts) if row_counts else None
        if guess is None or guess.num_tokens is None:
            raise AmbiguousLayoutError(
                f"{files.path}: the files do not say how many tokens are live: say --valid-tokens N (at most "
                f"{min(match.capacities)}; in Python PackedOptions(valid_tokens=(N,))) or --token-ids FILE"
                + (f"; {guess.reason}" if guess else ""),
                [f"--valid-tokens {num_tokens}" for num_tokens in guess.choices] if guess else [],
            )
        tokens = (guess.num_tokens,) * num_layers
        notes = [f"{guess.num_tokens} tokens inferred: {guess.reason}"]
    for layer, num_tokens, capacity in zip(files.layers, tokens, match.capacities, strict=True):
        if not 1 <= num_tokens <= capacity:
            error_type = UnsuitableOptionError if options.valid_tokens and not options.is_of_frames else SourceError
            raise error_type(
                f"{files.path}: layer {layer.layer}: {num_tokens} tokens: expected at least 1 and at most {capacity}, "
                "which the files have room for"
            )
    return tokens, notes


def _list_positions(
    tokens: tuple[int, ...], sidecar_info: CacheInfo | None
) -> list[tuple[cache_info.PositionRuns, cache_info.PositionRuns | None]]:
    """Return the positions in the document if it has as many as there are tokens; else 0, 1, 2 ..."""
    if sidecar_info and tuple(layer.tokens for layer in sidecar_info.layers) == tokens:
        return [(layer.positions, layer.text_positions) for layer in sidecar_info.layers]
    return [(((0, num_tokens),), None) for num_tokens in tokens]


def _check_same_as_sidecar(
    files: PackedFiles, options: PackedOptions, sidecar_info: CacheInfo, info: CacheInfo
) -> None:
    error_type = SourceError if options.is_of_frames else UnsuitableOptionError
    origin, stored_counts, actual_counts = "its document", _list_token_counts(sidecar_info), _list_token_counts(info)
    _check_property(files.path, origin, "number of tokens", stored_counts, actual_counts, error_type)
    _check_property(files.path, origin, _IDS, sidecar_info.token_ids, info.token_ids, error_type)
    _check_property(files.path, origin, "model", sidecar_info.model, info.model, error_type)


def check_recorded_provenance(
    info: CacheInfo,
    where: str,
    token_ids: TokenIdsFingerprint | None,
    model_fingerprint: str | None,
    error_type: type[KvmnnError] = UnsuitableOptionError,
) -> None:
    """Raise an error for token ids or a model that are not those that `info` records; None is not compared."""
    hint = "; --ignore contradictions (ignore_contradictions=True) takes what was given"
    _check_property(where, "it", _IDS, info.token_ids, token_ids, error_type, hint)
    _check_property(where, "it", "model", info.model, model_fingerprint, error_type, hint)


def _check_property(
    where: str,
    origin: str,
    name: str,
    stored_value: _PropertyValue,
    actual_value: _PropertyValue,
    error_type: type[KvmnnError],
    hint: str = "",
) -> None:
    if None not in (stored_value, actual_value) and stored_value != actual_value:
        raise error_type(
            f"{where}: {origin} says another {name} than was given: {_format_value(stored_value)}, not "
            f"{_format_value(actual_value)}{hint}"
        )


def check_ids_count(where: str, info: CacheInfo, num_ids: int) -> None:
    """Raise an error for more ids than the text has tokens by the document `info`, or fewer than there are rows."""
    tokens = _list_token_counts(info)
    ends = [begin + size for layer in info.layers for begin, size in layer.text_position_runs]
    min_ids, max_ids = min(tokens), max(*tokens, *ends, info.next_position or 0)  # evicted tokens have ids too
    if not min_ids <= num_ids <= max_ids:
        expected_text = f"{min_ids} to {max_ids}" if min_ids < max_ids else f"{max_ids}"
        raise UnsuitableOptionError(
            f"{where}: {count_of(num_ids, 'token id')}, but its document says {count_of(max(tokens), 'token')}: "
            f"expected {expected_text}; --ignore contradictions takes all ids"
        )


def _list_token_counts(info: CacheInfo) -> tuple[int, ...]:
    return tuple(layer.tokens for layer in info.layers)


def _format_value(value: _PropertyValue) -> str:
    if isinstance(value, TokenIdsFingerprint):
        return f"{value.count} ids with the SHA-256 {value.sha256[:12]}..."
    if isinstance(value, tuple):
        return ",".join(map(str, value if len(set(value)) > 1 else value[:1]))
    return f"{str(value)[:12]}..."


def find_packed(path: str, options: PackedOptions | None = None) -> PackedFiles | None:
    """Find the packed files of a directory, or of one of its ``.k`` and ``.v`` files; None if there are none.

    Raises
    ------
    SourceError
        When files of a cache are missing.
    MissingOptionError
        When there are several caches to choose from.
    """
    options = options or PackedOptions()
    if os.path.isdir(path):
        listing = set(os.listdir(path))
    elif PurePath(path).suffix in PACKED_SUFFIXES:
        listing = {PurePath(path).name}
    else:
        return None
    if mmap_cache.has_mmap_files(listing):
        return mmap_cache.find_mmap_files(path, options.layer_order, options.pid)
    return find_prefix(path, options.prefix_name) if list_prefix_names(listing) else None


def is_named_as_packed(head: FileHead) -> bool:
    """Return whether a file, or a file in a directory, has a name of packed files."""
    if head.kind != "folder":
        return head.suffix in PACKED_SUFFIXES
    try:
        names = set(os.listdir(head.path))
    except OSError:
        return False
    return mmap_cache.has_mmap_files(names) or bool(list_prefix_names(names))


def read(path: str, options: ReadOptions) -> Source:
    """Return K and V of the packed files at a path, or the raw elements of another file with such a name."""
    files = find_packed(path, options.packed)
    if files is None and (layer_text := describe_marker(path)):
        raise SourceError(
            f"{path}: is an empty marker: {layer_text} is complete; name the folder, or a file without _sync"
        )
    if files is None:
        return raw.read(MappedFile(path, max_bytes=options.max_bytes), options)
    packed_cache = open_packed_files(files, options.packed or PackedOptions())
    return packed_cache.to_source(options.dtype, include_unused=options.engine.passthrough)


PACKED = PathFormat(name="packed", kinds=("folder", "file", "stream"), check=is_named_as_packed, read_path=read)


def open_packed(path: str, options: PackedOptions | None = None) -> PackedCacheReader:
    """Open the packed files at `path` for `compact`; `kvmnn.open` reads their arrays.

    Raises
    ------
    OptionError
        When there are no packed files.
    SourceError
        The errors of `find_packed` and `open_packed_files`.
    """
    options = options or PackedOptions()
    files = find_packed(path, options)
    if files is None:
        if not os.path.lexists(path):
            raise MissingFileError(f"{path}: cannot be read: No such file or directory")
        has_manifest = os.path.isfile(os.path.join(path, MANIFEST_NAME))
        remedy = (
            "; it has a manifest: kvmnn decode or kvmnn mnn pack writes packed files from it" if has_manifest else ""
        )
        raise OptionError(f"{path}: holds no packed files (a prefix cache or live cache files){remedy}")
    return open_packed_files(files, options)
