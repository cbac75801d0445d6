"""Infer the layout of packed files: specified values are checked against sizes and elements, others inferred.

``attention_mode`` 9 and 10 store K, or K and V, as int8, which is inferred from its scales; 11 to 14 store 3 or 4 bits
for a number and a scale for 32 of them (28 or 36 bytes for 64 dimensions), which is rejected by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import PurePath
from typing import Any, Final

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ...dtypes import PARTS, Bytes, Part
from ...errors import MissingOptionError, SourceError, UnsuitableOptionError
from ...files.mapped_file import MappedFile
from ...packed.backends import BACKENDS
from ...packed.inference import (
    CLEAR_CONTRAST_RATIO,
    Clarity,
    Int8Kind,
    LayoutCandidate,
    LayoutEvidence,
    LayoutMatch,
    PackedGeometry,
    ReadBytes,
    choose_sampled_layers,
    compare_candidates,
    compute_clarity,
    describe_inference,
    describe_layout,
    find_last_rows,
    find_matches,
    find_regrouped_matches,
    has_same_placement,
    infer_layout,
    infer_token_range,
    is_consistent_layer,
    iter_matches,
    make_geometry,
    measure_layers,
    rank_candidates,
)
from ...packed.layout import PackLayout
from ...packed.params import EXPAND_CHUNK, FLASH_BLOCK
from .packed_files import PackedFiles

_INT8_KINDS: Final[tuple[Int8Kind, ...]] = ("keys", "both")
_ATTENTION_MODE_BY_INT8_KIND: Final = {"keys": 9, "both": 10}
_MAX_MEASURED_ROWS: Final = 512
_MAX_KEY_SCALE: Final = 1e4  # of int8 K: its range over 255
_TQ_BLOCK_DIMS: Final = 32
_TQ_BLOCK_BYTES: Final = {"TQ3": 14, "TQ4": 18}
_ATTENTION_MODE_BY_TQ_KIND: Final = {("TQ3", False): 11, ("TQ3", True): 12, ("TQ4", False): 13, ("TQ4", True): 14}


def find_int8_matches(
    files: PackedFiles, geometry: PackedGeometry, likely_backends: Sequence[str]
) -> list[LayoutMatch]:
    """Return the int8 layouts that match sizes and scales, the likeliest first; only one if it is clearly best."""
    names = [geometry.backend] if geometry.backend else [*dict.fromkeys((*likely_backends, *BACKENDS))]
    int8_kinds = _INT8_KINDS[: 1 if geometry.flash_block == "none" else 2]  # V is int8 with flash attention alone
    match_by_placement: dict[tuple[object, ...], LayoutMatch] = {}
    for name, int8_kind in product(names, int8_kinds):
        if BACKENDS[name].hP8 is None:
            continue
        trial_geometry = PackedGeometry(
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            backend=name,
            flash_block=geometry.flash_block or FLASH_BLOCK,
            int8=int8_kind,
        )
        for match in find_matches(trial_geometry, files.sizes):
            layout = match.layout
            value_key = (layout.hP, layout.dtype) if int8_kind == "keys" else ()
            placement_key = (layout.lP8, layout.hP8, int8_kind, *value_key)
            if placement_key not in match_by_placement and _count_scaled_rows(files, match):
                match_by_placement[placement_key] = match
    ratings = [(_measure_match(files, match), match) for match in match_by_placement.values()]
    ratings.sort(key=lambda entry: -entry[0])
    is_clear = len(ratings) > 1 and ratings[0][0] >= CLEAR_CONTRAST_RATIO * ratings[1][0]
    return [match for _, match in (ratings[:1] if is_clear else ratings)]


def describe_int8(match: LayoutMatch) -> str:
    """Return what was inferred, as a note."""
    parts_text = "K and V" if match.layout.int8_values else "K"
    return (
        f"int8 {parts_text} inferred ({_format_int8_options(match)}, attention_mode "
        f"{_ATTENTION_MODE_BY_INT8_KIND[_get_int8_kind(match)]}): no layout of floats fits the sizes, and scales are "
        f"where those of {describe_layout(match.layout)} are"
    )


def _get_int8_kind(match: LayoutMatch) -> Int8Kind:
    return "both" if match.layout.int8_values else "keys"


def _format_int8_options(match: LayoutMatch) -> str:
    """Return the options of an int8 layout; the backend is one of them, as ``int8=`` is refused without it."""
    heads = PackedGeometry(kv_heads=match.layout.kv_heads, head_dim=match.layout.head_dim)
    return format_layout_options(match, heads, int8=_get_int8_kind(match))


def _measure_match(files: PackedFiles, match: LayoutMatch) -> float:
    """Measure the evidence for a layout in the first rows of some layers: how far means of dimensions differ.

    K is measured, and V if it is stored as floats. V of int8 has a scale and a bias for each dimension, and so means of
    its own in any layout.
    """
    num_rows = min(_count_scaled_rows(files, match), _MAX_MEASURED_ROWS)
    contrasts = []
    for layer_index in choose_sampled_layers(len(files.layers)):
        buffers = [MappedFile(files.layers[layer_index].get_path(part)) for part in PARTS]
        keys, values = (buffer.view(0, buffer.size) for buffer in buffers)
        capacity = match.capacities[layer_index]
        row_pair = match.layout.gather(keys, values, 0, num_rows, past_length=num_rows, capacity=capacity)
        with np.errstate(all="ignore"):
            measured_parts = row_pair[:1] if match.layout.int8_values else row_pair
            contrasts.append(float(np.prod([_measure_contrast(part) for part in measured_parts])))
    min_contrast = min(contrasts)
    return float(np.exp(np.mean(np.log(contrasts)))) if min_contrast > 0 and np.isfinite(contrasts).all() else 0.0


def _measure_contrast(rows: np.ndarray[Any, np.dtype[Any]]) -> float:
    values = rows.astype(np.float64)
    total_variance = float(values.var())
    return float(values.mean(axis=1).var()) / total_variance if total_variance > 0 else 0.0


def _count_scaled_rows(files: PackedFiles, match: LayoutMatch) -> int:
    """Count the rows of K up to the last one with a scale; 0 if a scale is not a positive number."""
    keys = MappedFile(files.layers[0].key)
    head_bytes = match.layout.key_head_bytes(match.capacities[0])
    row_counts = {
        _count_scales(_read_scales(keys.view(head * head_bytes, head_bytes), match.layout))
        for head in range(match.layout.kv_heads)
    }
    return min(*row_counts, match.capacities[0])


def _read_scales(head_data: Bytes, layout: PackLayout) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    assert layout.lP8 is not None and layout.hP8 is not None
    code_bytes = -(-layout.head_dim // layout.lP8) * layout.lP8 * layout.hP8
    groups = head_data.reshape(-1, code_bytes + 8 * layout.hP8)
    return np.ascontiguousarray(groups[:, code_bytes : code_bytes + 4 * layout.hP8]).view("<f4").reshape(-1)


def _count_scales(scales: np.ndarray[tuple[int], np.dtype[np.float32]]) -> int:
    used_scales = scales[: int(np.flatnonzero(scales).max(initial=-1)) + 1]
    return used_scales.size if ((used_scales > 0) & (used_scales < _MAX_KEY_SCALE)).all() else 0


class RotatedCodesError(SourceError):
    """Files that no layout fits and that may have TQ3 or TQ4 rows, which kvmnn does not read."""


def refuse_rotated_codes(files: PackedFiles, geometry: PackedGeometry) -> None:
    """Raise `RotatedCodesError` for file sizes of TQ3 or TQ4 rows, which kvmnn does not read."""
    assert geometry.kv_heads is not None and geometry.head_dim is not None
    num_blocks, num_heads = geometry.head_dim // _TQ_BLOCK_DIMS, geometry.kv_heads
    float_geometry = replace(geometry, int8=None, flash_block=geometry.flash_block or FLASH_BLOCK)
    float_layouts = [layout for _, layout in float_geometry.list_candidates()]
    for name, block_bytes in _TQ_BLOCK_BYTES.items():
        row_bytes = num_blocks * block_bytes
        layer_bytes = num_heads * row_bytes
        if not layer_bytes or any(0 < key_bytes < layer_bytes * (EXPAND_CHUNK + 1) for key_bytes, _ in files.sizes):
            continue
        if any(key_bytes % layer_bytes for key_bytes, _ in files.sizes):
            continue
        for is_both in (True, False):
            if all(
                value_bytes == key_bytes
                if is_both
                else any(layout.value_bytes(key_bytes // layer_bytes) == value_bytes for layout in float_layouts)
                for key_bytes, value_bytes in files.sizes
            ):
                parts_text = "K and V are" if is_both else "K is"
                raise RotatedCodesError(
                    f"{files.path}: no layout of {num_heads} kv heads x {geometry.head_dim} dims that kvmnn reads has "
                    "the sizes of the files: kv heads, head_dim or backend are others (--kv-heads, --head-dim, "
                    f"--backend), or {parts_text} of {name} rows ({row_bytes} bytes for {geometry.head_dim} dims, "
                    f"attention_mode {_ATTENTION_MODE_BY_TQ_KIND[name, is_both]}), which kvmnn does not read: run the "
                    "engine with attention_mode 8, or 9 or 10 for int8"
                )


MAX_LISTED_CHOICES: Final = 8
"""Maximum number of layouts that an error lists."""

_MAX_LAYOUTS_IN_MESSAGE: Final = 4  # in the one line of the error itself

# Of backends with the same numbers the one that most files come from.
_LIKELY_BACKENDS: Final = ("x86-avx2", "x86-avx512", "arm64-fp16", "arm64-fp32", "arm32-fp16")


class AmbiguousLayoutError(MissingOptionError):
    """Several layouts are equally likely, or a required option is missing.

    `choices` are options that would specify it, the likeliest first.
    """

    def __init__(self, message: str, choices: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.choices = tuple(choices)


@dataclass(frozen=True)
class LayoutChoice:
    """The chosen layout of packed files, and the evidence for it."""

    #: The layout, and the capacity of each pair of files in tokens.
    match: LayoutMatch
    #: Notes about the inferred values and their evidence.
    notes: tuple[str, ...] = ()
    #: How the elements contradict a specified layout; empty if they do not.
    conflict: str = ""
    #: The layout that they fit instead, as options.
    better_options: str = ""
    #: The evidence of the elements for the chosen layout; None if it was not measured.
    evidence: LayoutEvidence | None = None
    #: kv heads and head_dim of each layer; None for a layer that has those of `match`.
    layer_heads: tuple[tuple[int, int] | None, ...] = ()

    @property
    def layouts(self) -> tuple[PackLayout, ...]:
        """Return the layout of each layer."""
        layout = self.match.layout
        return tuple(
            replace(layout, kv_heads=heads[0], head_dim=heads[1]) if heads else layout
            for heads in self.layer_heads or (None,) * len(self.match.capacities)
        )


def choose_group_layouts(
    files: PackedFiles,
    geometry: PackedGeometry,
    head_shapes_by_group: Sequence[tuple[int | None, int | None]],
    num_tokens: int | None,
) -> LayoutChoice:
    """Return layouts for groups of layers with different kv heads and head_dim, but equal dtype and pack numbers."""
    choices: list[LayoutChoice] = []
    for group, (kv_heads, head_dim) in zip(files.groups, head_shapes_by_group, strict=True):
        group_geometry = replace(geometry, kv_heads=kv_heads, head_dim=head_dim)
        if choices:  # one engine on one processor wrote them all
            first = make_geometry(choices[0].match.layout)
            group_geometry = replace(
                group_geometry, backend=None, dtype=first.dtype, lP=first.lP, hP=first.hP, flash_block=first.flash_block
            )
        choice = choose_layout(replace(files, layers=group), group_geometry, num_tokens=num_tokens)
        if choice.conflict:
            raise SourceError(f"{files.path}: {choice.conflict}; the words speak for {choice.better_options}")
        choices.append(choice)
    first_layout = choices[0].match.layout
    heads_by_layer: dict[int, tuple[int, int] | None] = {}
    capacity_by_layer: dict[int, int] = {}
    for group, choice in zip(files.groups, choices, strict=True):
        heads = choice.match.layout.kv_heads, choice.match.layout.head_dim
        own_heads = None if heads == (first_layout.kv_heads, first_layout.head_dim) else heads
        for layer, capacity in zip(group, choice.match.capacities, strict=True):
            heads_by_layer[layer.layer], capacity_by_layer[layer.layer] = own_heads, capacity
    match = replace(choices[0].match, capacities=tuple(capacity_by_layer[layer.layer] for layer in files.layers))
    notes = tuple(dict.fromkeys(note for choice in choices for note in choice.notes))
    layer_heads = tuple(heads_by_layer[layer.layer] for layer in files.layers)
    return LayoutChoice(match, notes, evidence=choices[0].evidence, layer_heads=layer_heads)


def choose_layout(files: PackedFiles, geometry: PackedGeometry, *, num_tokens: int | None = None) -> LayoutChoice:
    """Return the layout that matches the known geometry and the sizes, and fits the elements best."""
    if geometry.int8:
        match = infer_layout(files.path, geometry, files.sizes, _list_file_names(files))
        return LayoutChoice(match, tuple(describe_inference(geometry, match, files.sizes)))
    measurer = _LayoutMeasurer(files)
    if geometry.missing_text:
        return _infer_with_heads(files, geometry, measurer, num_tokens)
    matches = find_matches(geometry, files.sizes)
    if not matches:
        if (int8_choice := _infer_int8(files, geometry)) is not None:
            return int8_choice
        raise _make_mismatch_error(files, geometry, measurer)
    matches = [match for match in matches if num_tokens is None or num_tokens <= min(match.capacities)] or matches
    ranking = rank_candidates(matches, measurer.measure)
    best_candidate = ranking[0]
    better_candidate, clarity = _find_better_candidate(best_candidate, geometry, files, measurer)
    if better_candidate and clarity == "clear":
        return _make_contradicted_choice(best_candidate, better_candidate)
    default_candidate = _find_default_candidate(geometry, ranking)
    if compute_clarity(ranking) == "clear":
        notes = _list_choice_notes(geometry, ranking, files.sizes)
    elif default_candidate is not None:
        best_candidate, notes = default_candidate, describe_inference(geometry, default_candidate.match, files.sizes)
    else:
        choices = [format_layout_options(candidate.match, geometry) for candidate in ranking[:MAX_LISTED_CHOICES]]
        raise AmbiguousLayoutError(
            f"{files.path}: {len(ranking)} layouts fit the sizes of the files, say which (--backend, --dtype); "
            f"the likeliest first: {_format_ranking(ranking)}",
            choices,
        )
    if better_candidate and not has_same_placement(better_candidate.match, best_candidate.match):
        likelier_options = format_layout_options(better_candidate.match, PackedGeometry())
        notes.append(f"{_describe_conflict(best_candidate, better_candidate)}: {likelier_options} is likelier")
    return LayoutChoice(best_candidate.match, tuple(notes), evidence=best_candidate.evidence)


def _make_contradicted_choice(chosen: LayoutCandidate, better: LayoutCandidate) -> LayoutChoice:
    """Return the choice of a specified layout that the elements contradict."""
    better_options = format_layout_options(better.match, PackedGeometry())
    return LayoutChoice(chosen.match, (), _describe_conflict(chosen, better), better_options, chosen.evidence)


def _infer_int8(files: PackedFiles, geometry: PackedGeometry) -> LayoutChoice | None:
    """Return the int8 layout of files that fit no float layout; raise `SourceError` for unsupported rows."""
    matches = find_int8_matches(files, geometry, _LIKELY_BACKENDS)
    if not matches:
        refuse_rotated_codes(files, geometry)
        return None
    if len(matches) == 1:
        return LayoutChoice(matches[0], (describe_int8(matches[0]),))
    choices = [_format_int8_options(match) for match in matches]
    raise AmbiguousLayoutError(
        f"{files.path}: no layout of floats fits the sizes of the files, {len(matches)} of int8 do, say which "
        "(--backend, int8=keys or int8=both of it)",
        choices[:MAX_LISTED_CHOICES],
    )


def _make_mismatch_error(files: PackedFiles, geometry: PackedGeometry, measurer: _LayoutMeasurer) -> SourceError:
    """Make the error for a specified layout that does not fit the sizes; it names one that does, if clear.

    Sizes that no layout of any kv heads and head_dim has are those of damaged files, not of a wrong option.
    """
    try:
        infer_layout(files.path, geometry, files.sizes, _list_file_names(files))
    except SourceError as error:
        mismatch_error = error
    ranking = rank_candidates(
        find_matches(PackedGeometry(kv_heads=geometry.kv_heads, head_dim=geometry.head_dim), files.sizes),
        measurer.measure,
    ) or _rank_plausible_layouts(files, PackedGeometry(), measurer, None)
    if ranking and compute_clarity(ranking) == "clear" and ranking[0].evidence.is_consistent:
        return UnsuitableOptionError(
            f"{mismatch_error}; sizes and words are those of "
            f"{format_layout_options(ranking[0].match, PackedGeometry())}"
        )
    has_fitting_heads = any(True for _ in iter_matches(PackedGeometry(), files.sizes))
    return UnsuitableOptionError(str(mismatch_error)) if has_fitting_heads else mismatch_error


class _LayoutMeasurer:
    """Measures how well layouts fit the elements of some layers; results are cached by layout."""

    def __init__(self, files: PackedFiles) -> None:
        self.layer_indices = choose_sampled_layers(len(files.layers))
        self._views: list[dict[Part, ReadBytes]] = [
            {part: MappedFile(files.layers[layer_index].get_path(part)).view for part in PARTS}
            for layer_index in self.layer_indices
        ]
        self._evidence_by_layout: dict[object, LayoutEvidence] = {}

    def measure(self, match: LayoutMatch) -> LayoutEvidence:
        """Return the evidence of the elements for a layout."""
        if match.layout not in self._evidence_by_layout:
            capacities = [match.capacities[layer_index] for layer_index in self.layer_indices]
            self._evidence_by_layout[match.layout] = measure_layers(self._views, match.layout, capacities)
        return self._evidence_by_layout[match.layout]

    def is_plausible(self, match: LayoutMatch, num_tokens: int | None) -> bool:
        """Return whether the first layer's rows can be those of a prefix of `num_tokens`, or of a fresh one."""
        head_layout = replace(match.layout, kv_heads=1)  # of the first head, which is quick
        capacity = match.capacities[self.layer_indices[0]]
        (num_rows,) = find_last_rows(self._views[0]["key"], head_layout, "key", capacity)
        if not num_rows:
            return False
        min_tokens, max_tokens = infer_token_range(match) if num_tokens is None else (num_tokens, num_tokens)
        return min_tokens <= num_rows <= max_tokens and is_consistent_layer(self._views[0], match.layout, capacity)


def _find_default_candidate(geometry: PackedGeometry, ranking: Sequence[LayoutCandidate]) -> LayoutCandidate | None:
    """Return the only candidate, or for known pack numbers the one with the default flash block."""
    candidates = ranking
    if len(ranking) > 1 and geometry.specifies_packing:
        candidates = [candidate for candidate in ranking if candidate.match.layout.flash_block == 64]
    return candidates[0] if len(candidates) == 1 else None


def _list_choice_notes(
    geometry: PackedGeometry, ranking: Sequence[LayoutCandidate], sizes: Sequence[tuple[int, int]]
) -> list[str]:
    """List notes about the inferred values and their evidence."""
    best_candidate = ranking[0]
    if len(ranking) == 1 or (geometry.specifies_packing and geometry.flash_block is not None):
        return describe_inference(geometry, best_candidate.match, sizes)
    others_text = "the other" if len(ranking) == 2 else f"the {len(ranking) - 1} others"
    return [
        f"layout inferred: of {len(ranking)} that fit the sizes of the files the words speak for that of "
        f"{best_candidate.match.backends} ({describe_layout(best_candidate.match.layout)}): read as {others_text}, "
        f"{_describe_weakness(ranking[1], best_candidate)}"
    ]


def _describe_weakness(candidate: LayoutCandidate, best: LayoutCandidate) -> str:
    """Describe why a layout fits worse than the best one."""
    evidence = candidate.evidence
    if not evidence.is_consistent and best.evidence.is_consistent:
        if evidence.num_misplaced_rows:
            return f"{pluralize(evidence.num_misplaced_rows, 'row')} before the last would be empty or partly so"
        return "heads would end with different rows"
    ratio = best.evidence.contrast / evidence.contrast if evidence.contrast else float("inf")
    return f"dimensions would differ {ratio:.1f} times less in their means"


def _find_better_candidate(
    chosen_candidate: LayoutCandidate, geometry: PackedGeometry, files: PackedFiles, measurer: _LayoutMeasurer
) -> tuple[LayoutCandidate | None, Clarity]:
    """Return a layout, excluded by the caller's options, that fits the elements better than the chosen one."""
    unconstrained_matches = find_matches(
        PackedGeometry(kv_heads=geometry.kv_heads, head_dim=geometry.head_dim), files.sizes
    )
    if not chosen_candidate.evidence.is_consistent:
        unconstrained_matches += find_regrouped_matches(geometry, files.sizes)
    other_matches = [match for match in unconstrained_matches if not has_same_placement(match, chosen_candidate.match)]
    ranking = rank_candidates(other_matches, measurer.measure)
    if not ranking:
        return None, "none"
    clarity = compare_candidates(ranking[0], chosen_candidate)
    return (None, "none") if clarity == "none" else (ranking[0], clarity)


def _describe_conflict(chosen_candidate: LayoutCandidate, better_candidate: LayoutCandidate) -> str:
    return (
        f"read as {describe_layout(chosen_candidate.match.layout)}, "
        f"{_describe_weakness(chosen_candidate, better_candidate)}"
    )


def _infer_with_heads(
    files: PackedFiles, geometry: PackedGeometry, measurer: _LayoutMeasurer, num_tokens: int | None
) -> LayoutChoice:
    """Infer kv heads and head_dim from the elements as well."""
    ranking = _rank_plausible_layouts(files, geometry, measurer, num_tokens)
    heads_only_geometry = PackedGeometry(kv_heads=geometry.kv_heads, head_dim=geometry.head_dim)
    clear_ranking = ranking
    if geometry != heads_only_geometry:
        clear_ranking = _rank_plausible_layouts(files, heads_only_geometry, measurer, num_tokens)
    if not clear_ranking and geometry != PackedGeometry():
        clear_ranking = _rank_plausible_layouts(files, PackedGeometry(), measurer, num_tokens)
    if clear_ranking and compute_clarity(clear_ranking) == "clear":
        if not ranking:
            raise UnsuitableOptionError(
                f"{files.path}: no layout that was asked for agrees with the words; they speak for "
                f"{format_layout_options(clear_ranking[0].match, PackedGeometry())}"
            )
        if compare_candidates(clear_ranking[0], ranking[0]) == "clear":
            return _make_contradicted_choice(ranking[0], clear_ranking[0])
    if ranking and compute_clarity(ranking) == "clear":
        layout, backends = ranking[0].match.layout, ranking[0].match.backends
        reason = (
            f"{len(ranking) - 1} other layouts are less likely" if ranking[1:] else "no other layout agrees with it"
        )
        notes = (
            f"layout inferred from the words: {describe_layout(layout)} ({backends}); rows are full or empty in all "
            f"heads alike, and {reason}",
        )
        return LayoutChoice(ranking[0].match, notes, evidence=ranking[0].evidence)
    choices = [format_layout_options(candidate.match, geometry) for candidate in ranking[:MAX_LISTED_CHOICES]]
    raise AmbiguousLayoutError(f"{files.path}: {format_missing_options(geometry)}", choices)


def _rank_plausible_layouts(
    files: PackedFiles, geometry: PackedGeometry, measurer: _LayoutMeasurer, num_tokens: int | None
) -> list[LayoutCandidate]:
    """Return layouts of any kv heads and head_dim that match the elements, the likeliest first."""
    matches = [match for match in iter_matches(geometry, files.sizes) if measurer.is_plausible(match, num_tokens)]
    ranking = rank_candidates(matches, measurer.measure)
    return [candidate for candidate in ranking if candidate.evidence.is_consistent]


def describe_size_doubt(files: PackedFiles) -> str:
    """Return a sentence about files whose sizes no layout of floats has, whatever the heads; empty if one has them."""
    if any(True for _ in iter_matches(PackedGeometry(), files.sizes)):
        return ""
    key_bytes, value_bytes = files.sizes[0]
    return (
        f"no layout of floats has files of {key_bytes:,} bytes for K and {value_bytes:,} for V: they were cut, or "
        "contain int8 codes"
    )


LIVE_TOKENS_TEXT = (
    "how many tokens are live (--valid-tokens N or --token-ids FILE; in Python PackedOptions(valid_tokens=(N,)))"
)


def format_missing_options(geometry: PackedGeometry, *, include_tokens: bool = False) -> str:
    """Name the numbers that cannot be inferred, and their options, in one sentence."""
    missing_text, tokens_text = geometry.missing_text, LIVE_TOKENS_TEXT
    if not missing_text:
        return f"the files do not say {tokens_text}" if include_tokens else ""
    return f"the files do not say {missing_text}; --model DIR may" + (f"; nor {tokens_text}" if include_tokens else "")


def format_layout_options(match: LayoutMatch, geometry: PackedGeometry, *, int8: str | None = None) -> str:
    """Return the options that specify the properties of a layout that `geometry` leaves open."""
    layout, options, backend_items = match.layout, [], []
    if geometry.kv_heads is None:
        options.append(f"--kv-heads {layout.kv_heads}")
    if geometry.head_dim is None:
        options.append(f"--head-dim {layout.head_dim}")
    if not geometry.specifies_packing:
        names = match.backends.split("/")
        likely_names = [name for name in _LIKELY_BACKENDS if name in names] or names
        backend_items.append(likely_names[0])
    if geometry.flash_block is None and layout.flash_block is None:
        backend_items.append("flash_block=none")
    if int8 is not None:
        backend_items.append(f"int8={int8}")
    if backend_items:
        options.append(f"--backend {','.join(backend_items)}")
    return " ".join(options)


def _format_ranking(ranking: Sequence[LayoutCandidate]) -> str:
    """Format layouts as text to append to a message."""
    texts = [f"{candidate.match.backends}: {describe_layout(candidate.match.layout)}" for candidate in ranking]
    if len(texts) > _MAX_LAYOUTS_IN_MESSAGE:
        texts[_MAX_LAYOUTS_IN_MESSAGE:] = [f"{len(texts) - _MAX_LAYOUTS_IN_MESSAGE} more"]
    return "; ".join(texts)


def _list_file_names(files: PackedFiles) -> list[tuple[str, str]]:
    return [(PurePath(layer.key).name, PurePath(layer.value).name) for layer in files.layers]


@dataclass(frozen=True)
class RowCounts:
    """Number of rows of each layer and KV head up to the last one that is not all zero."""

    #: Rows of K and of V: of each layer, those of each KV head.
    keys_by_head: tuple[tuple[int, ...], ...]
    values_by_head: tuple[tuple[int, ...], ...]

    @property
    def keys(self) -> tuple[int, ...]:
        """Return the rows of K of each layer, the maximum over heads."""
        return tuple(map(max, self.keys_by_head))

    @property
    def values(self) -> tuple[int, ...]:
        """Return the rows of V of each layer, the maximum over heads."""
        return tuple(map(max, self.values_by_head))

    @property
    def _all_counts(self) -> Counter[int]:
        return Counter(count for counts in (*self.keys_by_head, *self.values_by_head) for count in counts)

    @property
    def common_count(self) -> int | None:
        """Return the number of rows of all heads of K and V; None if they differ or all rows are empty."""
        counts = self._all_counts
        return next(iter(counts)) if len(counts) == 1 and 0 not in counts else None

    @property
    def majority_count(self) -> int | None:
        """Return the number of rows of at least half of the heads of K and V, if none has more; None otherwise."""
        counts = self._all_counts
        max_count = max(counts)
        return max_count if max_count and 2 * counts[max_count] >= counts.total() else None


def count_nonempty_rows(
    files: PackedFiles, match: LayoutMatch, layouts: Sequence[PackLayout], max_rows: Sequence[int] | None = None
) -> RowCounts:
    """Find the last row that is not empty in every KV head of K and V, of the first `max_rows` of each layer if given.

    Only the ends of the heads are read, as far back as their rows are empty.
    """
    row_limits = max_rows or (None,) * len(files.layers)
    layers = list(zip(files.layers, match.capacities, layouts, row_limits, strict=True))
    keys, values = (
        tuple(
            tuple(find_last_rows(MappedFile(layer.get_path(part)).view, layout, part, capacity, max_rows=row_limit))
            for layer, capacity, layout, row_limit in layers
        )
        for part in PARTS
    )
    return RowCounts(keys, values)


def describe_empty_rows(files: PackedFiles, row_counts: RowCounts, tokens: Sequence[int]) -> str:
    """Describe the first KV head without values in its last rows of `tokens` where others have some; else empty."""
    # A file that was written in part ends with zeros, and so does its last head, or all of its heads. One row is
    # enough: the K and V that a model computes are never zero in all dimensions of a row. Empty rows before the last
    # one with values are no evidence of that. Rows that are zero in every head of every layer contradict no others:
    # somebody specified too many tokens, or packed arrays that end with zeros.
    heads = [
        (layer.get_path(part), head, num_rows, num_tokens)
        for layer, keys, values, num_tokens in zip(
            files.layers, row_counts.keys_by_head, row_counts.values_by_head, tokens, strict=True
        )
        for part, counts in zip(PARTS, (keys, values), strict=True)
        for head, num_rows in enumerate(counts)
    ]
    num_common = min(max(0, num_tokens - num_rows) for _, _, num_rows, num_tokens in heads)
    short_heads = [entry for entry in heads if entry[3] - entry[2] > num_common]
    if not short_heads:
        return ""
    path, head, num_rows, num_tokens = short_heads[0]
    last_row = num_tokens - num_common - 1
    is_single = num_rows == last_row
    rows_text = f"row {last_row}" if is_single else f"rows {num_rows} to {last_row}"
    more_text = f" (and {pluralize(len(short_heads) - 1, 'more head')} like it)" if len(short_heads) > 1 else ""
    return (
        f"{PurePath(path).name}: {rows_text} of KV head {head}{more_text} {'is' if is_single else 'are'} zero (counted "
        f"from 0), expected values in all {num_tokens} rows: {len(heads) - len(short_heads)} of {len(heads)} heads of "
        "the K and V files have them"
    )


@dataclass(frozen=True)
class TokenCountGuess:
    """The number of live tokens that the files suggest."""

    #: The number of live tokens; None if it is ambiguous.
    num_tokens: int | None
    #: Possible numbers, the likeliest first.
    choices: tuple[int, ...]
    #: Evidence for the number, or why there is none.
    reason: str


def infer_token_count(files: PackedFiles, match: LayoutMatch, row_counts: RowCounts) -> TokenCountGuess:
    """Infer the number of live tokens from non-empty rows and from the capacity of the files.

    The engine allocates capacity for 64 tokens more than a prefix has. Rows beyond that belong to a session that
    continued in the same files; in the files of a running engine, any row may be left over from evicted tokens.
    """
    common_count = row_counts.majority_count  # a head with fewer rows is refused by `describe_empty_rows`
    if common_count is None:
        return TokenCountGuess(None, (), "rows of K and V that are not empty differ in number")
    min_tokens, max_tokens = infer_token_range(match)
    all_text = "all" if row_counts.common_count else "some"
    rows_text = pluralize(common_count, "row")
    stale_text = "of which an engine may have left some"  # of erased tokens: neither kind of file records these
    if files.kind != "prefix":
        return TokenCountGuess(None, (common_count,), f"{rows_text} are not empty, {stale_text}")
    if common_count <= max_tokens or common_count < min_tokens or not max_tokens:
        reason = f"{rows_text} of K and V of {all_text} layers are not empty, {stale_text} (--valid-tokens)"
        return TokenCountGuess(common_count, (common_count,), reason)
    choices = (common_count, *range(max_tokens, max(min_tokens, 1) - 1, -1))
    why = "a session went on, or the files were packed with less room"
    return TokenCountGuess(
        None, choices[:8], f"{common_count} rows are not empty, but the room is that of a prefix of {max_tokens}: {why}"
    )


def describe_omitted_rows(files: PackedFiles, match: LayoutMatch, row_counts: RowCounts, tokens: Sequence[int]) -> str:
    """Describe how many nonzero rows of a prefix cache the specified token count omits; empty for none.

    It speaks only of files that still have the size that MNN gives to a prefix of all their nonzero rows.
    """
    common_count, num_tokens = row_counts.common_count, max(tokens)
    min_tokens, max_tokens = infer_token_range(match)
    if files.kind != "prefix" or common_count is None or len(set(tokens)) != 1 or num_tokens >= common_count:
        return ""
    if not min_tokens <= common_count <= max_tokens or min_tokens <= num_tokens <= max_tokens:
        return ""
    return (
        f"{pluralize(common_count, 'row')} of K and V of all layers are not empty, and the room is that of a prefix of "
        f"{common_count}: {num_tokens} tokens leave {pluralize(common_count - num_tokens, 'row')} out"
    )


def list_token_doubts(
    row_counts: RowCounts, token_counts: Sequence[int], option_name: str
) -> tuple[list[str], list[str]]:
    """Return sentences about rows that suggest more, and about rows that suggest fewer, tokens than specified."""
    more_sentences, fewer_sentences = [], []
    for keys, values, num_tokens in zip(row_counts.keys, row_counts.values, token_counts, strict=True):
        num_nonempty = max(keys, values)
        if num_nonempty > num_tokens:
            more_sentences.append(f"rows after the {num_tokens} tokens are not zero, up to row {num_nonempty}")
        elif num_nonempty < num_tokens:
            fewer_sentences.append(f"the last {num_tokens - num_nonempty} of {num_tokens} tokens are all zero")
    layers_text = pluralize(len(token_counts), "layer")
    more_doubts, fewer_doubts = (
        [f"in {len(texts)} of {layers_text} {texts[0]}: {word} tokens may be live than {option_name} says"]
        if texts
        else []
        for word, texts in (("more", more_sentences), ("fewer", fewer_sentences))
    )
    return more_doubts, fewer_doubts
