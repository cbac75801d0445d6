"""Which layout packed files have: what was specified, checked against sizes and words, and inferred where they tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Final

from ...dtypes import PARTS, Part
from ...errors import MissingOptionError, SourceError
from ...files.mapped import MappedFile
from ...packed.evidence import (
    LayoutEvidence,
    View,
    find_last_row,
    is_consistent_layer,
    measure_layers,
    sample_layers,
)
from ...packed.fitting import Fit, Geometry, describe, fits, inferred, of_layout, the_fit
from ...packed.inference import (
    Clarity,
    Reading,
    compare_readings,
    enumerate_fits,
    first_clarity,
    fresh_tokens,
    has_same_places,
    rank_readings,
    recut_heads,
)
from ...packed.layout import PackLayout
from ...text import count
from .packed_files import PackedFiles
from .quantised_layouts import describe_int8, refuse_rotated_codes, try_int8

MAX_CHOICES: Final = 8
"""Of layouts that an error lists."""

_MAX_LISTED: Final = 4  # in the one line of the error itself

# Of backends with the same numbers the one that most files come from.
_LIKELY_BACKENDS: Final = ("x86-avx2", "x86-avx512", "arm64-fp16", "arm64-fp32", "arm32-fp16")


class AmbiguousLayoutError(MissingOptionError):
    """Several layouts are as likely, or some option is missing that nothing tells.

    Parameters
    ----------
    message
        What is not known.
    choices
        Options that would say it, the likeliest first.
    """

    def __init__(self, message: str, choices: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.choices = tuple(choices)


@dataclass(frozen=True)
class LayoutChoice:
    """A layout of packed files, and how it was found.

    Parameters
    ----------
    fit
        The layout, and for how many tokens each pair of files has room.
    notes
        What was inferred, and from what.
    conflict
        How the words contradict a layout that was specified; empty where they do not.
    better
        The layout that they speak for then, as options.
    evidence
        What the words tell about the chosen layout; None where nobody looked.
    heads
        Kv heads and head_dim of each layer, where they differ from those of `fit`; None for those that do not.
    """

    fit: Fit
    notes: tuple[str, ...] = ()
    conflict: str = ""
    better: str = ""
    evidence: LayoutEvidence | None = None
    heads: tuple[tuple[int, int] | None, ...] = ()

    @property
    def layouts(self) -> tuple[PackLayout, ...]:
        """Layout of each layer."""
        heads = self.heads or (None,) * len(self.fit.capacities)
        return tuple(
            replace(self.fit.layout, kv_heads=each[0], head_dim=each[1]) if each else self.fit.layout for each in heads
        )


def choose_layouts(
    files: PackedFiles, geometry: Geometry, heads: Sequence[tuple[int | None, int | None]], tokens: int | None
) -> LayoutChoice:
    """Return the layouts of layers whose kv heads and head_dim differ, which agree in dtype and pack numbers.

    Parameters
    ----------
    files
        With several `PackedFiles.groups`.
    geometry
        What the caller says of all layers.
    heads
        What is known of the kv heads and head_dim of each group.
    tokens
        As for `choose_layout`.

    Raises
    ------
    SourceError
        When the words of a group contradict the others, or what was specified.
    AmbiguousLayoutError
        As `choose_layout`.
    """
    choices: list[LayoutChoice] = []
    for group, (kv_heads, head_dim) in zip(files.groups, heads, strict=True):
        asked = replace(geometry, kv_heads=kv_heads, head_dim=head_dim)
        if choices:  # one engine on one processor wrote them all
            first = of_layout(choices[0].fit.layout)
            asked = replace(asked, backend=None, dtype=first.dtype, lP=first.lP, hP=first.hP)
            asked = replace(asked, flash_block=first.flash_block)
        choice = choose_layout(replace(files, layers=group), asked, tokens=tokens)
        if choice.conflict:
            raise SourceError(f"{files.path}: {choice.conflict}; the words speak for {choice.better}")
        choices.append(choice)
    layout = choices[0].fit.layout
    by_layer: dict[int, tuple[tuple[int, int] | None, int]] = {}
    for group, choice in zip(files.groups, choices, strict=True):
        found = choice.fit.layout.kv_heads, choice.fit.layout.head_dim
        own = None if found == (layout.kv_heads, layout.head_dim) else found
        by_layer |= {layer.layer: (own, each) for layer, each in zip(group, choice.fit.capacities, strict=True)}
    ordered = [by_layer[layer.layer] for layer in files.layers]
    fit = replace(choices[0].fit, capacities=tuple(capacity for _, capacity in ordered))
    notes = tuple(dict.fromkeys(note for choice in choices for note in choice.notes))
    return LayoutChoice(fit, notes, evidence=choices[0].evidence, heads=tuple(own for own, _ in ordered))


def choose_layout(files: PackedFiles, geometry: Geometry, *, tokens: int | None = None) -> LayoutChoice:
    """Return the layout that agrees with what is known, with the sizes, and best with the words.

    Parameters
    ----------
    files
        All of full attention.
    geometry
        What the caller and the model say.
    tokens
        Live tokens of every layer, where that is known.

    Raises
    ------
    SourceError
        When no layout fits the sizes.
    AmbiguousLayoutError
        When several are as likely; its choices are the options of each.
    MissingOptionError
        When int8 files lack the numbers that nothing in them tells.
    """
    if geometry.int8:
        fit = the_fit(files.path, geometry, files.sizes, _file_names(files))
        return LayoutChoice(fit, tuple(inferred(geometry, fit, files.sizes)))
    trial = _Trial(files)
    if geometry.missing:
        return _infer_all(files, geometry, trial, tokens)
    asked = fits(geometry, files.sizes)
    if not asked:
        if (quantised := _infer_int8(files, geometry)) is not None:
            return quantised
        raise _describe_misfit(files, geometry, trial)
    asked = [fit for fit in asked if tokens is None or tokens <= min(fit.capacities)] or asked
    ranking = rank_readings(asked, trial.measure)
    chosen = ranking[0]
    better, clarity = _find_better(chosen, geometry, files, trial)
    notes: list[str] = []
    if better and clarity == "clear":
        return LayoutChoice(
            chosen.fit, (), _describe_conflict(chosen, better), specify_layout(better.fit, Geometry()), chosen.evidence
        )
    usual = _usual_block(geometry, ranking)
    if first_clarity(ranking) == "clear":
        notes = _describe_choice(geometry, ranking, files.sizes)
    elif usual is not None:
        chosen, notes = usual, inferred(geometry, usual.fit, files.sizes)
    else:
        choices = [specify_layout(reading.fit, geometry) for reading in ranking[:MAX_CHOICES]]
        raise AmbiguousLayoutError(
            f"{files.path}: {len(ranking)} layouts fit the sizes of the files, say which (--backend, --dtype, "
            f"--flash-block); the likeliest first: {_list(ranking)}",
            choices,
        )
    if better and not has_same_places(better.fit, chosen.fit):
        likelier = specify_layout(better.fit, Geometry())
        notes.append(f"{_describe_conflict(chosen, better)}: {likelier} is likelier")
    return LayoutChoice(chosen.fit, tuple(notes), evidence=chosen.evidence)


def _infer_int8(files: PackedFiles, geometry: Geometry) -> LayoutChoice | None:
    """The int8 layout of files that fit none of floats; `SourceError` for rows that kvmnn does not read."""
    found = try_int8(files, geometry, _LIKELY_BACKENDS)
    if not found:
        refuse_rotated_codes(files, geometry)
        return None
    if len(found) == 1:
        return LayoutChoice(found[0], (describe_int8(found[0]),))
    choices = [
        f"{specify_layout(fit, geometry)} --int8 {'both' if fit.layout.int8_values else 'keys'}" for fit in found
    ]
    raise AmbiguousLayoutError(
        f"{files.path}: no layout of floats fits the sizes of the files, {len(found)} of int8 do, say which "
        "(--backend, --int8)",
        choices[:MAX_CHOICES],
    )


def _describe_misfit(files: PackedFiles, geometry: Geometry, trial: _Trial) -> SourceError:
    """Why no layout that was specified fits the sizes, and which does."""
    try:
        the_fit(files.path, geometry, files.sizes, _file_names(files))
    except SourceError as error:
        found = error
    ranking = rank_readings(
        fits(Geometry(kv_heads=geometry.kv_heads, head_dim=geometry.head_dim), files.sizes), trial.measure
    )
    if ranking and first_clarity(ranking) == "clear" and ranking[0].evidence.is_consistent:
        return type(found)(f"{found}; sizes and words are those of {specify_layout(ranking[0].fit, Geometry())}")
    return found


class _Trial:
    """Layouts tried on the words of some layers."""

    def __init__(self, files: PackedFiles) -> None:
        self.numbers = sample_layers(len(files.layers))
        self._views: list[dict[Part, View]] = [
            {part: MappedFile(files.layers[number].path(part)).view for part in PARTS} for number in self.numbers
        ]
        self._measured: dict[object, LayoutEvidence] = {}

    def measure(self, fit: Fit) -> LayoutEvidence:
        """What the words tell about a layout."""
        if fit.layout not in self._measured:
            capacities = [fit.capacities[number] for number in self.numbers]
            self._measured[fit.layout] = measure_layers(self._views, fit.layout, capacities)
        return self._measured[fit.layout]

    def is_plausible(self, fit: Fit, tokens: int | None) -> bool:
        """Whether the first layer's rows are those of a prefix of `tokens`, or of a fresh one."""
        one = replace(fit.layout, kv_heads=1)
        capacity = fit.capacities[self.numbers[0]]
        rows = find_last_row(self._views[0]["key"], one, "key", capacity)  # of the first head, which is quick
        first, last = fresh_tokens(fit) if tokens is None else (tokens, tokens)
        return rows > 0 and first <= rows <= last and is_consistent_layer(self._views[0], fit.layout, capacity)


def _usual_block(geometry: Geometry, ranking: Sequence[Reading]) -> Reading | None:
    """The only layout, or of pack numbers that are known the one with the usual flash block."""
    if len(ranking) == 1:
        return ranking[0]
    usual = [reading for reading in ranking if reading.fit.layout.flash_block == 64] if geometry.names_packs else []
    return usual[0] if len(usual) == 1 else None


def _describe_choice(geometry: Geometry, ranking: Sequence[Reading], sizes: Sequence[tuple[int, int]]) -> list[str]:
    """What was inferred, and from what."""
    first = ranking[0]
    if len(ranking) == 1 or (geometry.names_packs and geometry.flash_block is not None):
        return inferred(geometry, first.fit, sizes)
    others = "the other" if len(ranking) == 2 else f"the {len(ranking) - 1} others"
    return [
        f"layout inferred: of {len(ranking)} that fit the sizes of the files the words speak for that of "
        f"{first.fit.backends} ({describe(first.fit.layout)}): read as {others}, {_weakness(ranking[1], first)}"
    ]


def _weakness(reading: Reading, best: Reading) -> str:
    """What speaks against a reading beside a better one."""
    evidence = reading.evidence
    if not evidence.is_consistent and best.evidence.is_consistent:
        if evidence.misplaced_rows:
            return f"{count(evidence.misplaced_rows, 'row')} before the last would be empty or partly so"
        return "heads would end with different rows"
    ratio = best.evidence.contrast / evidence.contrast if evidence.contrast else float("inf")
    return f"dimensions would differ {ratio:.1f} times less in their means"


def _find_better(
    chosen: Reading, geometry: Geometry, files: PackedFiles, trial: _Trial
) -> tuple[Reading | None, Clarity]:
    """A layout that the words speak for more than for the chosen one, of those that were ruled out by the caller."""
    open_fits = fits(Geometry(kv_heads=geometry.kv_heads, head_dim=geometry.head_dim), files.sizes)
    if not chosen.evidence.is_consistent:
        open_fits += recut_heads(geometry, files.sizes)
    others = [fit for fit in open_fits if not has_same_places(fit, chosen.fit)]
    ranking = rank_readings(others, trial.measure)
    if not ranking:
        return None, "none"
    clarity = compare_readings(ranking[0], chosen)
    return (None, "none") if clarity == "none" else (ranking[0], clarity)


def _describe_conflict(chosen: Reading, better: Reading) -> str:
    return f"read as {describe(chosen.fit.layout)}, {_weakness(chosen, better)}"


def _infer_all(files: PackedFiles, geometry: Geometry, trial: _Trial, tokens: int | None) -> LayoutChoice:
    """Kv heads and head_dim from the words as well."""
    ranking = _rank_all(files, geometry, trial, tokens)
    heads = Geometry(kv_heads=geometry.kv_heads, head_dim=geometry.head_dim)
    others = ranking if geometry == heads else _rank_all(files, heads, trial, tokens)
    best = others[0] if others and first_clarity(others) == "clear" else None
    better = specify_layout(best.fit, Geometry()) if best else ""
    if not ranking and best:
        raise SourceError(f"{files.path}: no layout that was asked for agrees with the words; they speak for {better}")
    if ranking and best and compare_readings(best, ranking[0]) == "clear":
        first = ranking[0]
        return LayoutChoice(first.fit, (), _describe_conflict(first, best), better, first.evidence)
    if ranking and first_clarity(ranking) == "clear":
        layout, backends = ranking[0].fit.layout, ranking[0].fit.backends
        why = f"{len(ranking) - 1} other layouts are less likely" if ranking[1:] else "no other layout agrees with it"
        notes = (
            f"layout inferred from the words: {describe(layout)} ({backends}); rows are full or empty in all heads "
            f"alike, and {why}",
        )
        return LayoutChoice(ranking[0].fit, notes, evidence=ranking[0].evidence)
    choices = [specify_layout(reading.fit, geometry) for reading in ranking[:MAX_CHOICES]]
    raise AmbiguousLayoutError(f"{files.path}: {missing_options(geometry)}", choices)


def _rank_all(files: PackedFiles, geometry: Geometry, trial: _Trial, tokens: int | None) -> list[Reading]:
    """Layouts with any kv heads and head_dim that agree with the words, the likeliest first."""
    plausible = [fit for fit in enumerate_fits(geometry, files.sizes) if trial.is_plausible(fit, tokens)]
    return [reading for reading in rank_readings(plausible, trial.measure) if reading.evidence.is_consistent]


def missing_options(geometry: Geometry, *, tokens: bool = False) -> str:
    """Which numbers nothing tells, and the options for them, in one sentence."""
    known = [geometry.missing] if geometry.missing else []
    said = f"the files do not say {known[0]}; --model DIR may" if known else ""
    if tokens:
        said += (
            "; nor" if said else "the files do not say"
        ) + " how many tokens are live (--tokens N or --token-ids FILE)"
    return said


def specify_layout(fit: Fit, geometry: Geometry) -> str:
    """Return the options that say of a layout what `geometry` leaves open."""
    layout, options = fit.layout, []
    if geometry.kv_heads is None:
        options.append(f"--kv-heads {layout.kv_heads}")
    if geometry.head_dim is None:
        options.append(f"--head-dim {layout.head_dim}")
    if not geometry.names_packs:
        names = fit.backends.split("/")
        likely = [name for name in _LIKELY_BACKENDS if name in names] or names
        options.append(f"--backend {likely[0]}")
    if geometry.flash_block is None and layout.flash_block is None:
        options.append("--flash-block none")
    return " ".join(options)


def _list(ranking: Sequence[Reading]) -> str:
    """Layouts in words, to be put behind a message."""
    shown = [f"{reading.fit.backends}: {describe(reading.fit.layout)}" for reading in ranking[:_MAX_LISTED]]
    return "; ".join([*shown, f"{len(ranking) - len(shown)} more"] if ranking[_MAX_LISTED:] else shown)


def _file_names(files: PackedFiles) -> list[tuple[str, str]]:
    return [(PurePath(layer.key).name, PurePath(layer.value).name) for layer in files.layers]
