"""Infer the layout of packed files: by sizes, where these leave one possibility, else by evidence in the words.

No file of MNN records its geometry, its pack numbers or its number of tokens. Two things differ between the right
layout and a wrong one. The engine writes rows of tokens into files of zeros, so in the right layout each row is either
full or empty, and the empty ones come last, in K and V of every head alike; a wrong layout mixes both. And dimensions
of K and V have means of their own: the variance between the means of the dimensions, over the variance of all words, is
highest in the right layout (`LayoutEvidence.contrast`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.text import pluralize
from .._util.validation import validate_int
from ..dtypes import PARTS, Bytes, Part, parse_dtype
from ..errors import MissingOptionError, SourceError
from .backends import BACKENDS
from .layout import HeadRowAccessor, PackLayout, get_head_bytes, get_row_bytes
from .params import EXPAND_CHUNK, FLASH_BLOCK

FlashBlock = int | Literal["none"]

Int8Kind = Literal["keys", "both"]
"""What the engine quantised with ``attention_mode`` 9 and 10."""


@dataclass(frozen=True, kw_only=True)
class PackedGeometry:
    """The known geometry of packed files; None for each unknown value."""

    #: kv heads and head_dim of every layer.
    kv_heads: int | None = None
    head_dim: int | None = None
    #: ``fp16``, ``bf16`` or ``fp32``.
    dtype: str | None = None
    #: A name that `PackLayout.from_backend` accepts; it determines dtype, lP and hP.
    backend: str | None = None
    #: Pack numbers, if no backend is named.
    lP: int | None = None
    hP: int | None = None
    #: Tokens in a block of V, or ``"none"`` without flash attention.
    flash_block: FlashBlock | None = None
    #: ``"keys"`` or ``"both"`` for an int8 cache (``attention_mode`` 9 or 10), which requires `backend`.
    int8: Int8Kind | None = None

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim", "lP", "hP", "flash_block"):
            value = getattr(self, name)
            if value is not None and value != "none":
                validate_int(value, name, 1)
        if self.dtype is not None:
            dtypes.parse_dtype(self.dtype)
        if self.backend is not None:
            PackLayout.from_backend(self.backend, kv_heads=1, head_dim=1)

    def merge_defaults(self, defaults: PackedGeometry) -> PackedGeometry:
        """Return the geometry with unknown fields filled from `defaults`."""
        # A backend implies dtype and pack numbers; where one of the two names it, the other's are not mixed in.
        skip = {"backend", "lP", "hP", "dtype"} if self.backend else {"backend"} if self.lP or self.hP else set()
        default_fields = {
            field.name: getattr(defaults, field.name)
            for field in fields(self)
            if getattr(self, field.name) is None and field.name not in skip
        }
        return replace(self, **default_fields)

    @property
    def missing_text(self) -> str:
        """Return which of kv_heads and head_dim is unknown, with its option; empty for neither."""
        options = {"kv_heads": "--kv-heads", "head_dim": "--head-dim"}
        return " and ".join(f"{name} ({option})" for name, option in options.items() if getattr(self, name) is None)

    def list_candidates(self) -> list[tuple[str, PackLayout]]:
        """Return every layout that agrees with the geometry, named by the backends that have it."""
        if self.missing_text:
            raise MissingOptionError(f"the files do not say {self.missing_text}; --model DIR may")
        if self.int8 and self.backend is None:
            raise MissingOptionError("int8 caches need the backend named (--backend)")
        return list(_list_layouts(self))

    def _list_pack_layouts(self) -> list[tuple[str, PackLayout]]:
        assert self.kv_heads is not None and self.head_dim is not None
        if self.backend is not None:
            layout = PackLayout.from_backend(self.backend, kv_heads=self.kv_heads, head_dim=self.head_dim)
            return [(self.backend, layout)]
        backend_layouts = [
            (name, PackLayout.from_backend(name, kv_heads=self.kv_heads, head_dim=self.head_dim)) for name in BACKENDS
        ]
        if self.dtype and self.lP and self.hP:
            matching_names = [
                name
                for name, layout in backend_layouts
                if (layout.dtype, layout.lP, layout.hP) == self._make_packing_key()
            ]
            layout = PackLayout(self.kv_heads, self.head_dim, self.dtype, self.lP, self.hP)
            return [("/".join(matching_names) or "given numbers", layout)]
        return [
            (name, layout)
            for name, layout in backend_layouts
            if self.lP in (None, layout.lP) and self.hP in (None, layout.hP)
        ]

    @property
    def specifies_packing(self) -> bool:
        """Return whether dtype and pack numbers are known."""
        return self.backend is not None or None not in self._make_packing_key()

    def _make_packing_key(self) -> tuple[str | None, int | None, int | None]:
        return self.dtype, self.lP, self.hP

    def _list_flash_blocks(self) -> list[FlashBlock]:
        if self.int8 == "both":  # the engine quantises values with flash attention only
            return [self.flash_block or FLASH_BLOCK]
        return [FLASH_BLOCK, "none"] if self.flash_block is None else [self.flash_block]


@lru_cache(maxsize=256)  # inference from the words asks for the same ones again, of every head_dim
def _list_layouts(geometry: PackedGeometry) -> tuple[tuple[str, PackLayout], ...]:
    names_by_layout: dict[PackLayout, list[str]] = {}
    for name, layout in geometry._list_pack_layouts():
        for block in geometry._list_flash_blocks():
            placed_layout = _strip_to_placement(layout, None if block == "none" else block, geometry.int8)
            if geometry.dtype in (None, placed_layout.dtype):
                names_by_layout.setdefault(placed_layout, []).append(name)
    return tuple(("/".join(names), layout) for layout, names in names_by_layout.items())


def _strip_to_placement(layout: PackLayout, flash_block: int | None, int8: str | None) -> PackLayout:
    """Keep only what decides where elements are stored, so that backends with equal buffers become equal."""
    plain = PackLayout(layout.kv_heads, layout.head_dim, layout.dtype, layout.lP, layout.hP, flash_block)
    if int8 is None:
        return plain
    return replace(plain, lP8=layout.lP8, hP8=layout.hP8, int8_keys=True, int8_values=int8 == "both")


@dataclass(frozen=True)
class LayoutMatch:
    """A layout that the sizes of all files agree with."""

    #: The layout, and the names of the backends that have it.
    layout: PackLayout
    backends: str
    #: Capacity of each pair of files in tokens.
    capacities: tuple[int, ...]


def find_matches(geometry: PackedGeometry, sizes: Sequence[tuple[int, int]]) -> list[LayoutMatch]:
    """Return all layouts that agree with `geometry` and with the sizes of the K and V files (bytes) of every layer."""
    matches = []
    for backends, layout in geometry.list_candidates():
        capacities = [layout.find_capacity(*pair) for pair in sizes]
        if all(capacities):
            matches.append(LayoutMatch(layout, backends, tuple(capacity or 0 for capacity in capacities)))
    return matches


def infer_layout(
    where: str, geometry: PackedGeometry, sizes: Sequence[tuple[int, int]], files: Sequence[tuple[str, str]] = ()
) -> LayoutMatch:
    """Return the only layout that fits; with known pack numbers, the usual flash block precedes none at all."""
    try:
        matches = find_matches(geometry, sizes)
    except SourceError as exc:
        raise type(exc)(f"{where}: {exc}") from None
    if len(matches) == 1:
        return matches[0]
    if geometry.specifies_packing:
        default_matches = [match for match in matches if match.layout.flash_block == FLASH_BLOCK]
        matches = default_matches or matches
        if len(matches) == 1:
            return matches[0]
    if matches:
        raise MissingOptionError(
            f"{where}: {len(matches)} layouts fit the sizes of the files, say which (--backend, --dtype)"
            f"{format_candidates(matches)}"
        )
    candidates = geometry.list_candidates()
    heads, dims = geometry.kv_heads, geometry.head_dim
    if not candidates:
        raise SourceError(f"{where}: no layout is known with that dtype and those pack numbers")
    layer_index = _find_first_mismatch([layout for _, layout in candidates], sizes)
    sizes_of_layer, file_names = sizes[layer_index], files[layer_index] if files else None
    if len(candidates) > 2:
        file_text = f" ({' and '.join(file_names)})" if file_names else ""
        raise SourceError(
            f"{where}: K and V files of {sizes_of_layer[0]} and {sizes_of_layer[1]} bytes{file_text} fit none of the "
            f"{len(candidates)} layouts known for {heads} kv heads x {dims} dims"
        )
    hint = _format_int8_hint(geometry, sizes)
    raise SourceError(f"{where}: {explain_mismatch(candidates[0][1], *sizes_of_layer, file_names)}{hint}")


def _format_int8_hint(geometry: PackedGeometry, sizes: Sequence[tuple[int, int]]) -> str:
    """Return that the sizes fit if the engine quantised K alone, or both: some models keep V in floats in mode 10."""
    if not geometry.int8:
        return ""
    kind: Int8Kind = "keys" if geometry.int8 == "both" else "both"
    return f"; the sizes fit int8={kind}" if find_matches(replace(geometry, int8=kind), sizes) else ""


def format_candidates(matches: Sequence[LayoutMatch]) -> str:
    """Format layouts at the end of a message."""
    return ": " + "; ".join(f"{match.backends}: {describe_layout(match.layout)}" for match in matches)


def _find_first_mismatch(layouts: Sequence[PackLayout], sizes: Sequence[tuple[int, int]]) -> int:
    """Return the first layer whose files fit none of the layouts; else the first that does not fit the first layout."""
    for candidate_layouts in (layouts, layouts[:1]):
        for layer_index, pair in enumerate(sizes):
            if not any(layout.find_capacity(*pair) for layout in candidate_layouts):
                return layer_index
    return 0


def describe_inference(geometry: PackedGeometry, match: LayoutMatch, sizes: Sequence[tuple[int, int]]) -> list[str]:
    """Describe what `infer_layout` inferred beyond `geometry`."""
    notes = []
    if not geometry.specifies_packing:
        notes.append(f"layout inferred: of those known only that of {match.backends} fits the sizes of the files")
    if geometry.flash_block is None:
        is_default_block = match.layout.flash_block == FLASH_BLOCK
        block_text = f"flash block {match.layout.flash_block}" if match.layout.flash_block else "no flash attention"
        if len(find_matches(geometry, sizes)) > 1:
            notes.append(
                f"{block_text} taken, the engine's default; the sizes would fit --backend flash_block=none as well"
            )
        elif not (is_default_block and geometry.specifies_packing):
            notes.append(f"{block_text} inferred from the sizes of the files")
    return notes


def explain_mismatch(layout: PackLayout, key_bytes: int, value_bytes: int, names: tuple[str, str] | None = None) -> str:
    """Explain why files of these sizes, with these `names`, do not have this layout."""
    tile = layout.flash_block or layout.lP
    blocked_layout = replace(layout, flash_block=tile)
    for part, file_bytes, unit_bytes, unit_tokens in (
        ("K", key_bytes, blocked_layout.key_bytes(1), layout.hP),
        ("V", value_bytes, blocked_layout.value_bytes(1), tile),
    ):
        if file_bytes < 1 or file_bytes % unit_bytes:
            file = f"{names['KV'.index(part)]}: " if names else ""
            return (
                f"{file}a {part} file of {file_bytes} bytes is not a whole number of the {unit_bytes} bytes that "
                f"{unit_tokens} tokens take in {describe_layout(layout)}"
            )
    key_capacity = key_bytes // blocked_layout.key_bytes(1) * layout.hP
    value_capacity = value_bytes // blocked_layout.value_bytes(1) * tile
    file_text = f"{' and '.join(names)}: " if names else ""
    return (
        f"{file_text}K file and V file do not belong together: {key_bytes} bytes give K room for {key_capacity} "
        f"tokens, {value_bytes} bytes give V room for {value_capacity}, in {describe_layout(layout)}"
    )


def make_geometry(layout: PackLayout) -> PackedGeometry:
    """Return a layout as a known geometry."""
    return PackedGeometry(
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        lP=layout.lP,
        hP=layout.hP,
        flash_block="none" if layout.flash_block is None else layout.flash_block,
    )


def describe_layout(layout: PackLayout) -> str:
    """Describe a layout in words."""
    packs = f"lP {layout.lP}, hP {layout.hP}"
    if layout.is_quantized:
        packs += f", int8 {'K and V' if layout.int8_values else 'K'} (lP8 {layout.lP8}, hP8 {layout.hP8})"
    block = f"flash block {layout.flash_block}" if layout.flash_block else "no flash attention"
    return f"{pluralize(layout.kv_heads, 'kv head')} x {layout.head_dim} dims, {layout.dtype}, {packs}, {block}"


ReadBytes = Callable[[int, int], Bytes]  # returns bytes of a packed file, given offset and number

MAX_SAMPLED_HEADS = 8
MAX_SAMPLED_LAYERS = 4
_MAX_FIRST_ROWS = 512
_MAX_LAST_ROWS = 192  # three blocks of V, where a wrong layout shows gaps
_LAST_ROWS_STEP = 2 * _MAX_LAST_ROWS
_KNOWN_END_ROWS = 8
_PROBE_STEP_ROWS = 32  # the engine reserves capacity for 64 tokens
_MAX_PROBES = 256
_SCAN_BYTES = 1 << 20
_FILL_SAMPLE_BYTES = 64

# A word that is zero by itself is rare in K and V; a row of which more than this share is empty was not written as one.
_MAX_EMPTY_FRACTION = 0.2


@dataclass(frozen=True)
class LayerEvidence:
    """Evidence of one layer for a layout."""

    #: Number of rows up to the last non-empty one of any head, in K or V.
    num_rows: int
    #: Whether K and V of all heads end with the same row.
    has_equal_ends: bool
    #: Number of earlier rows that are empty, partly empty, or have data in the padding.
    num_misplaced_rows: int
    #: Variance between the means of the dimensions over the variance of all words; 0 if not finite.
    key_contrast: float
    value_contrast: float

    @property
    def contrast(self) -> float:
        """Return the geometric mean of the contrasts of K and of V."""
        return float(np.sqrt(self.key_contrast * self.value_contrast))


@dataclass(frozen=True)
class LayoutEvidence:
    """Evidence of some layers for a layout."""

    layers: tuple[LayerEvidence, ...]

    @property
    def num_rows(self) -> int:
        """Return the number of rows up to the last non-empty one of any layer."""
        return max(layer.num_rows for layer in self.layers)

    @property
    def num_misplaced_rows(self) -> int:
        """Return the number of empty or partly empty rows that precede a non-empty one."""
        return sum(layer.num_misplaced_rows for layer in self.layers)

    @property
    def has_equal_ends(self) -> bool:
        """Return whether K and V of all heads of a layer end with the same row."""
        return all(layer.has_equal_ends for layer in self.layers)

    @property
    def is_consistent(self) -> bool:
        """Return whether rows are full or empty, and the empty ones last, in all heads alike."""
        return self.has_equal_ends and not self.num_misplaced_rows

    @property
    def contrast(self) -> float:
        """Return the geometric mean over the layers."""
        values = [layer.contrast for layer in self.layers]
        return float(np.exp(np.mean(np.log(values)))) if min(values) > 0 else 0.0


def choose_sampled_layers(count: int) -> list[int]:
    """Return the indices of the layers to sample, of `count`."""
    return _spread_indices(count, MAX_SAMPLED_LAYERS)


def _spread_indices(count: int, max_indices: int) -> list[int]:
    """Return at most `max_indices` indices below `count`, the first and the last with them."""
    num_steps = min(count, max_indices) - 1
    return [step * (count - 1) // max(1, num_steps) for step in range(num_steps + 1)]


def measure_layer(views: dict[Part, ReadBytes], layout: PackLayout, capacity: int) -> LayerEvidence:
    """Measure the evidence of a layer for a float layout."""
    ends: set[int] = set()
    num_misplaced = 0
    contrasts: dict[Part, float] = {}
    for part in PARTS:
        sampler = _HeadSampler(views[part], layout, part, capacity)
        last_rows = sampler.find_last_rows()
        ends.update(last_rows)
        num_misplaced += sampler.count_misplaced_rows(max(last_rows))
        contrasts[part] = sampler.measure_contrast(max(last_rows))
    return LayerEvidence(max(ends), len(ends) == 1, num_misplaced, contrasts["key"], contrasts["value"])


def is_consistent_layer(views: dict[Part, ReadBytes], layout: PackLayout, capacity: int) -> bool:
    """Return whether rows are full or empty, and the empty ones last, in all heads: `measure_layer` without means."""
    samplers = [_HeadSampler(views[part], layout, part, capacity) for part in PARTS]
    ends = {row for sampler in samplers for row in sampler.find_last_rows()}
    return len(ends) == 1 and not any(sampler.count_misplaced_rows(max(ends)) for sampler in samplers)


def find_last_rows(
    view: ReadBytes, layout: PackLayout, part: Part, capacity: int, *, max_rows: int | None = None
) -> list[int]:
    """Return for each KV head the number of rows up to the last non-empty one, of the first `max_rows` if specified.

    An empty row repeats a single byte. Int8 rows are dequantised: those that were not written have a scale of 0.
    """
    return _HeadSampler(view, layout, part, capacity, sample=False).find_last_rows(max_rows)


class _HeadSampler:
    """The rows of some heads of a file."""

    def __init__(self, view: ReadBytes, layout: PackLayout, part: Part, capacity: int, *, sample: bool = True) -> None:
        self._view = view
        self._capacity = capacity
        self._head_dim = layout.head_dim
        padded_layout = layout
        if not layout.is_int8(part):
            padded_dim = _round_up(layout.head_dim, layout.get_pack_numbers(part)[part == "value"])
            if padded_dim != layout.head_dim:
                padded_layout = replace(layout, head_dim=padded_dim)
        self._accessor = HeadRowAccessor(padded_layout, part, capacity)  # rows with the padding after their dimensions
        self._row_bytes = get_row_bytes(padded_layout, part)
        self._head_bytes = get_head_bytes(padded_layout, part, capacity)
        self._dtype = layout.dtype
        self._unpadded_row_bytes = get_row_bytes(layout, part)
        self._file_bytes = self._head_bytes * layout.kv_heads
        self._head_indices = _spread_indices(layout.kv_heads, MAX_SAMPLED_HEADS if sample else layout.kv_heads)

    def _read_ranges(self, heads: Sequence[int], ranges: Sequence[tuple[int, int]], num_rows: int) -> Bytes:
        """Read runs of rows of heads, ``[head, row, byte]``, `num_rows` in all: most have one row, hundreds of them."""
        rows = np.empty((len(heads), num_rows, self._row_bytes), np.uint8)
        for head, head_rows in zip(heads, rows.reshape(len(heads), -1), strict=True):
            view, offset = self._view(head * self._head_bytes, self._head_bytes), 0
            for begin, end in ranges:
                size = (end - begin) * self._row_bytes
                self._accessor.read_rows(view, begin, head_rows[offset : offset + size])
                offset += size
        return rows

    def find_last_rows(self, max_rows: int | None = None) -> list[int]:
        """Return for each head the number of rows up to the last one that is not empty, of the first `max_rows`."""
        return [self._find_last_row(head, max_rows) for head in self._head_indices]

    def _find_last_row(self, head: int, max_rows: int | None) -> int:
        # Most files end soon after their last token; where the number of tokens is known, the last one has values.
        end, step = (self._capacity, _LAST_ROWS_STEP) if max_rows is None else (max_rows, _KNOWN_END_ROWS)
        while end:
            begin = max(0, end - step)
            elements = self._read_ranges([head], [(begin, end)], end - begin)[0, :, : self._unpadded_row_bytes]
            used_rows = np.flatnonzero((elements != elements[:, :1]).any(axis=1))
            if used_rows.size:
                return begin + int(used_rows[-1]) + 1
            end, step = begin, max(step, _SCAN_BYTES // self._row_bytes)
        return 0

    def _iter_sampled_ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        """Iterate over runs of the first `rows` rows to sample."""
        first_end = min(rows, _MAX_FIRST_ROWS)
        if first_end:
            yield 0, first_end
        last_begin = max(first_end, rows - _MAX_LAST_ROWS)
        if first_end < last_begin:  # heads mistaken for one have unused capacity in the middle
            step = max(_PROBE_STEP_ROWS, (last_begin - first_end) // _MAX_PROBES)
            yield from ((row, row + 1) for row in range(first_end, last_begin, step))
        if last_begin < rows:
            yield last_begin, rows

    def count_misplaced_rows(self, rows: int) -> int:
        """Count the sampled rows below `rows` that are empty, partly empty, or have data in the padding."""
        bits_dtype = np.dtype(f"<u{parse_dtype(self._dtype).itemsize}")
        fill_byte = _read_fill_byte(self._view, self._file_bytes)
        fill_element = np.frombuffer(bytes([fill_byte]) * bits_dtype.itemsize, bits_dtype)[0]
        ranges = list(self._iter_sampled_ranges(rows))
        lengths = [end - begin for begin, end in ranges]
        elements = self._read_ranges(self._head_indices, ranges, sum(lengths)).view(bits_dtype)
        is_blank = elements == 0
        if fill_byte:
            is_blank |= elements == fill_element
        is_misplaced = is_blank[..., : self._head_dim].mean(axis=2) > _MAX_EMPTY_FRACTION
        padding = elements[..., self._head_dim :]
        if padding.size:
            # Files without unused rows do not end with the byte that memory was filled with: padding that has one value
            # throughout a run of rows was not written either.
            first_rows = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
            is_padding_blank = (padding == padding[:, first_rows, :1]).all(axis=2)
            is_misplaced |= ~(is_padding_blank | is_blank[..., self._head_dim :].all(axis=2))
        return int(np.count_nonzero(is_misplaced))

    def measure_contrast(self, rows: int) -> float:
        """Return the variance between the means of dimensions over the variance of all words, in the first rows."""
        end = min(rows, _MAX_FIRST_ROWS)
        if end < 2:
            return 0.0
        elements = self._read_ranges(self._head_indices, [(0, end)], end)[..., : self._unpadded_row_bytes]
        rows_by_head: npt.NDArray[Any] = np.ascontiguousarray(elements).view(parse_dtype(self._dtype).numpy_dtype)
        if self._dtype == "bf16":
            rows_by_head = (rows_by_head.astype(np.uint32) << np.uint32(16)).view(np.float32)
        with np.errstate(all="ignore"):
            values = rows_by_head.astype(np.float64)  # [head, row, dim]
            total_variance = float(values.var())
            variance_of_means = float(values.mean(axis=1).var())
            contrast = variance_of_means / total_variance if total_variance > 0 else 0.0
        return contrast if np.isfinite(contrast) else 0.0


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _read_fill_byte(view: ReadBytes, size: int) -> int:
    """Return the content of never-written bytes of a file: the byte that it ends with over and over, else zero."""
    tail = view(size - min(size, _FILL_SAMPLE_BYTES), min(size, _FILL_SAMPLE_BYTES))
    return int(tail[-1]) if (tail == tail[-1]).all() else 0


def measure_layers(
    views: Sequence[dict[Part, ReadBytes]], layout: PackLayout, capacities: Sequence[int]
) -> LayoutEvidence:
    """Measure the evidence of layers for a layout."""
    pairs = zip(views, capacities, strict=True)
    return LayoutEvidence(tuple(measure_layer(layer_views, layout, capacity) for layer_views, capacity in pairs))


Clarity = Literal["clear", "weak", "none"]  # how far one layout exceeds another

# In full files of two real models, packed for each backend, 64 to 512 tokens, the contrast of the right layout is at
# least 1.78 times that of any wrong one. Words without structure have about 1 / tokens, whatever the layout: of the
# right layout it must be several times that.
CLEAR_CONTRAST_RATIO: Final = 1.3
WEAK_CONTRAST_RATIO: Final = 1.15
MIN_CONTRAST_SIGNAL: Final = 4.0
MIN_CONTRAST_TOKENS: Final = 16

_MIN_MISPLACED_ROWS = 4  # a few words of a cache may be zero by themselves

MAX_TRIED_HEADS: Final = 64


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout that the sizes allow, and the evidence for it."""

    match: LayoutMatch
    evidence: LayoutEvidence

    @property
    def has_default_capacity(self) -> bool:
        """Return whether the files have the capacity that the engine allocates for just the rows that are not empty."""
        min_tokens, max_tokens = infer_token_range(self.match)
        return min_tokens <= self.evidence.num_rows <= max_tokens

    @property
    def sort_key(self) -> tuple[bool, int, float, bool]:
        """Return the sort key, the likeliest candidate first."""
        evidence, is_default_block = self.evidence, self.match.layout.flash_block == FLASH_BLOCK
        num_misplaced = 0 if evidence.is_consistent else evidence.num_misplaced_rows
        return not evidence.is_consistent, num_misplaced, -evidence.contrast, not is_default_block


MeasureEvidence = Callable[[LayoutMatch], LayoutEvidence]


def rank_candidates(matches: Sequence[LayoutMatch], measure: MeasureEvidence) -> list[LayoutCandidate]:
    """Measure layouts and sort them, the likeliest first; of several with the same placement only the first remains."""
    ranking: list[LayoutCandidate] = []
    candidates = [LayoutCandidate(match, measure(match)) for match in matches]
    for candidate in sorted(candidates, key=lambda candidate: candidate.sort_key):
        if not any(has_same_placement(candidate.match, better.match) for better in ranking):
            ranking.append(candidate)
    return ranking


def has_same_placement(first: LayoutMatch, second: LayoutMatch) -> bool:
    """Return whether two layouts of the same files put each token in the same place."""
    a, b = first.layout, second.layout
    if (a.kv_heads, a.head_dim, a.dtype) != (b.kv_heads, b.head_dim, b.dtype):
        return False
    if (a.lP, a.hP, a.flash_block) == (b.lP, b.hP, b.flash_block):
        return True
    capacity = min(*first.capacities, *second.capacities)
    if (a.key_head_bytes(capacity), a.value_head_bytes(capacity)) != (
        b.key_head_bytes(capacity),
        b.value_head_bytes(capacity),
    ):
        return False
    tokens, dims = np.arange(min(capacity, 4 * FLASH_BLOCK))[:, None], np.arange(a.head_dim)
    if (a.lP, a.hP) != (b.lP, b.hP) and not np.array_equal(a.key_index(tokens, dims), b.key_index(tokens, dims)):
        return False
    return np.array_equal(a.value_index(tokens, dims, capacity), b.value_index(tokens, dims, capacity))


def compare_candidates(first: LayoutCandidate, second: LayoutCandidate) -> Clarity:
    """Return how far `first` exceeds `second`."""
    a, b = first.evidence, second.evidence
    if b.is_consistent and not a.is_consistent:
        return "none"
    is_only_consistent = a.is_consistent and not b.is_consistent
    if is_only_consistent and (not b.has_equal_ends or b.num_misplaced_rows >= _MIN_MISPLACED_ROWS):
        return "clear"
    ratio = a.contrast / b.contrast if b.contrast else float("inf")
    is_higher_everywhere = all(x.key_contrast > y.key_contrast for x, y in zip(a.layers, b.layers, strict=True))
    has_signal = a.num_rows >= MIN_CONTRAST_TOKENS and a.contrast * a.num_rows >= MIN_CONTRAST_SIGNAL
    if a.is_consistent and has_signal and is_higher_everywhere and ratio >= CLEAR_CONTRAST_RATIO:
        return "clear"
    return "weak" if is_only_consistent or (has_signal and ratio >= WEAK_CONTRAST_RATIO) else "none"


def compute_clarity(ranking: Sequence[LayoutCandidate]) -> Clarity:
    """Return how far the first of a ranking exceeds all others."""
    levels: tuple[Clarity, ...] = ("none", "weak", "clear")
    results = (compare_candidates(ranking[0], candidate) for candidate in ranking[1:])
    return min(results, key=levels.index, default="clear")


def infer_token_range(match: LayoutMatch) -> tuple[int, int]:
    """Return the range of token counts for which MNN makes files of these sizes; zeros if there is none."""
    # It adds a capacity of 64; K comes in tiles and V in blocks, so that several numbers are possible.
    layout, capacity = match.layout, max(match.capacities)
    min_capacity = capacity
    sizes = layout.key_bytes(capacity), layout.value_bytes(capacity)
    while min_capacity > 1 and (layout.key_bytes(min_capacity - 1), layout.value_bytes(min_capacity - 1)) == sizes:
        min_capacity -= 1
    return max(0, min_capacity - EXPAND_CHUNK), max(0, capacity - EXPAND_CHUNK)


def iter_matches(geometry: PackedGeometry, sizes: Sequence[tuple[int, int]]) -> Iterator[LayoutMatch]:
    """Iterate over the layouts that sizes allow where kv heads, head_dim or both are unknown."""
    dims = _HEAD_DIMS if geometry.head_dim is None else (geometry.head_dim,)
    heads = range(1, MAX_TRIED_HEADS + 1) if geometry.kv_heads is None else (geometry.kv_heads,)
    distinct_sizes = sorted(set(sizes))
    for dim in dims:
        for backends, layout in replace(geometry, kv_heads=1, head_dim=dim).list_candidates():
            tiles, remainder = divmod(sizes[0][0], layout.key_bytes(1))
            for kv_heads in heads:
                if remainder or not tiles or tiles % kv_heads:
                    continue
                if any(size % kv_heads for pair in distinct_sizes for size in pair):
                    continue
                capacities = {
                    (key_bytes, value_bytes): layout.find_capacity(key_bytes // kv_heads, value_bytes // kv_heads)
                    for key_bytes, value_bytes in distinct_sizes
                }
                if all(capacities.values()):
                    candidate_layout = replace(layout, kv_heads=kv_heads)
                    yield LayoutMatch(candidate_layout, backends, tuple(capacities[pair] or 0 for pair in sizes))


# Those of models, and tiny ones of tests.
_HEAD_DIMS = tuple(sorted({*range(2, 65, 2), *range(64, 257, 8), *range(256, 577, 32)}))


def find_regrouped_matches(geometry: PackedGeometry, sizes: Sequence[tuple[int, int]]) -> list[LayoutMatch]:
    """Return layouts with as many words a token as `geometry` has, in another number of heads."""
    assert geometry.kv_heads is not None and geometry.head_dim is not None
    elements, matches = geometry.kv_heads * geometry.head_dim, []
    for heads in range(1, MAX_TRIED_HEADS + 1):
        if elements % heads == 0 and heads != geometry.kv_heads:
            matches += find_matches(PackedGeometry(kv_heads=heads, head_dim=elements // heads), sizes)
    return matches
