"""Which layout a packed file has: what the caller says, checked against the sizes, and inferred only where they leave
one possibility.

No file of MNN holds its geometry, its pack numbers or its number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from .. import dtypes
from ..checks import validate_int
from ..errors import KvmnnError, MissingOptionError, SourceError
from ..text import pluralize
from .addressing import FLASH_BLOCK
from .backends import BACKENDS
from .layout import PackLayout

FlashBlock = int | Literal["none"]


@dataclass(frozen=True, kw_only=True)
class PackedGeometry:
    """What is known of packed files; None for what is not.

    Parameters
    ----------
    kv_heads, head_dim
        Of every layer.
    dtype
        ``fp16``, ``bf16`` or ``fp32``.
    backend
        A name that `PackLayout.from_backend` knows; stands for dtype, lP and hP.
    lP, hP
        Pack numbers, where no backend is named.
    flash_block
        Tokens in a block of V, or ``"none"`` without flash attention.
    int8
        ``"keys"`` or ``"both"`` where the engine quantises its cache (``attention_mode`` 9 or 10); the backend has to
        be named then.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    backend: str | None = None
    lP: int | None = None
    hP: int | None = None
    flash_block: FlashBlock | None = None
    int8: Literal["keys", "both"] | None = None

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
        """This one, with what it does not say taken from `defaults`.

        A backend says dtype and pack numbers; if one of the two names it, the other's are not mixed in.
        """
        skip = {"backend", "lP", "hP", "dtype"} if self.backend else {"backend"} if self.lP or self.hP else set()
        default_fields = {
            field.name: getattr(defaults, field.name)
            for field in fields(self)
            if getattr(self, field.name) is None and field.name not in skip
        }
        return replace(self, **default_fields)

    @property
    def missing_text(self) -> str:
        """Which of kv_heads and head_dim is not known, and the options that say it; empty for neither."""
        options = {"kv_heads": "--kv-heads", "head_dim": "--head-dim"}
        return " and ".join(f"{name} ({option})" for name, option in options.items() if getattr(self, name) is None)

    def list_candidates(self) -> list[tuple[str, PackLayout]]:
        """Every layout that agrees with what is known, named by the backends that have it.

        Raises
        ------
        MissingOptionError
            When kv_heads or head_dim is not known, or the backend of an int8 cache.
        """
        if self.missing_text:
            raise MissingOptionError(f"the files do not say {self.missing_text}; --model DIR may")
        if self.int8 and self.backend is None:
            raise MissingOptionError("int8 caches need the backend named (--backend)")
        names_by_layout: dict[PackLayout, list[str]] = {}
        for name, layout in self._list_pack_layouts():
            for block in self._list_flash_blocks():
                placed_layout = _strip_to_placement(layout, None if block == "none" else block, self.int8)
                if self.dtype in (None, placed_layout.dtype):
                    names_by_layout.setdefault(placed_layout, []).append(name)
        return [("/".join(names), layout) for layout, names in names_by_layout.items()]

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
        """Whether dtype and pack numbers are known."""
        return self.backend is not None or None not in self._make_packing_key()

    def _make_packing_key(self) -> tuple[str | None, int | None, int | None]:
        return self.dtype, self.lP, self.hP

    def _list_flash_blocks(self) -> list[FlashBlock]:
        if self.int8 == "both":  # the engine quantises values with flash attention only
            return [self.flash_block or FLASH_BLOCK]
        return [FLASH_BLOCK, "none"] if self.flash_block is None else [self.flash_block]


def _strip_to_placement(layout: PackLayout, flash_block: int | None, int8: str | None) -> PackLayout:
    """Only what decides where elements lie, so that backends that agree in that are one."""
    plain = PackLayout(layout.kv_heads, layout.head_dim, layout.dtype, layout.lP, layout.hP, flash_block)
    if int8 is None:
        return plain
    return replace(plain, lP8=layout.lP8, hP8=layout.hP8, int8_keys=True, int8_values=int8 == "both")


@dataclass(frozen=True)
class LayoutMatch:
    """A layout that the sizes of all files agree with.

    Parameters
    ----------
    layout, backends
        The layout, and the names of the backends that have it.
    capacities
        Tokens that each pair of files has room for.
    """

    layout: PackLayout
    backends: str
    capacities: tuple[int, ...]


def find_matches(geometry: PackedGeometry, sizes: Sequence[tuple[int, int]]) -> list[LayoutMatch]:
    """All layouts that agree with `geometry` and with the sizes of the K and V files (bytes) of every layer."""
    matches = []
    for backends, layout in geometry.list_candidates():
        capacities = [try_infer_capacity(layout, *pair) for pair in sizes]
        if all(capacities):
            matches.append(LayoutMatch(layout, backends, tuple(capacity or 0 for capacity in capacities)))
    return matches


def infer_layout(
    where: str, geometry: PackedGeometry, sizes: Sequence[tuple[int, int]], files: Sequence[tuple[str, str]] = ()
) -> LayoutMatch:
    """The only layout that fits; where the pack numbers are known, the usual flash block before none at all.

    `files` are the names of the K and V file of every layer, for messages.

    Raises
    ------
    SourceError
        When none fits, with the reason if only one was asked for.
    MissingOptionError
        When several do, naming them, and when `geometry` says too little.
    """
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
            f"{where}: {len(matches)} layouts fit the sizes of the files, say which (--backend, --dtype, --flash-block)"
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
            f"{len(candidates)} layouts known "
            f"for {heads} kv heads x {dims} dims"
        )
    raise SourceError(f"{where}: {explain_mismatch(candidates[0][1], *sizes_of_layer, file_names)}")


def format_candidates(matches: Sequence[LayoutMatch]) -> str:
    """Layouts, to be put behind a message."""
    return ": " + "; ".join(f"{match.backends}: {describe_layout(match.layout)}" for match in matches)


def _find_first_mismatch(layouts: Sequence[PackLayout], sizes: Sequence[tuple[int, int]]) -> int:
    """The first layer whose files fit none of the layouts; else the first that does not fit the first of them."""
    for candidate_layouts in (layouts, layouts[:1]):
        for layer_index, pair in enumerate(sizes):
            if not any(try_infer_capacity(layout, *pair) for layout in candidate_layouts):
                return layer_index
    return 0


def describe_inference(geometry: PackedGeometry, match: LayoutMatch, sizes: Sequence[tuple[int, int]]) -> list[str]:
    """What `infer_layout` found that `geometry` does not say, in words."""
    notes = []
    if not geometry.specifies_packing:
        notes.append(f"layout inferred: of those known only that of {match.backends} fits the sizes of the files")
    if geometry.flash_block is None:
        is_default_block = match.layout.flash_block == FLASH_BLOCK
        block_text = f"flash block {match.layout.flash_block}" if match.layout.flash_block else "no flash attention"
        if len(find_matches(geometry, sizes)) > 1:
            notes.append(f"{block_text} taken, the engine's default; the sizes would fit --flash-block none as well")
        elif not (is_default_block and geometry.specifies_packing):
            notes.append(f"{block_text} inferred from the sizes of the files")
    return notes


def try_infer_capacity(layout: PackLayout, key_bytes: int, value_bytes: int) -> int | None:
    """`PackLayout.capacity_of`, or None where these sizes do not fit."""
    try:
        return layout.infer_capacity(key_bytes, value_bytes)
    except KvmnnError:
        return None


def explain_mismatch(layout: PackLayout, key_bytes: int, value_bytes: int, names: tuple[str, str] | None = None) -> str:
    """Why files of these sizes, with these `names`, do not have this layout."""
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
                f"{unit_tokens} tokens "
                f"take in {describe_layout(layout)}"
            )
    key_capacity, value_capacity = (
        key_bytes // blocked_layout.key_bytes(1) * layout.hP,
        value_bytes // blocked_layout.value_bytes(1) * tile,
    )
    file_text = f"{' and '.join(names)}: " if names else ""
    return (
        f"{file_text}K file and V file do not belong together: {key_bytes} bytes give K room for {key_capacity} "
        f"tokens, "
        f"{value_bytes} bytes give V room for {value_capacity}, in {describe_layout(layout)}"
    )


def make_geometry(layout: PackLayout) -> PackedGeometry:
    """What a layout says, as something known."""
    return PackedGeometry(
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        lP=layout.lP,
        hP=layout.hP,
        flash_block="none" if layout.flash_block is None else layout.flash_block,
    )


def describe_layout(layout: PackLayout) -> str:
    """A layout in words."""
    packs = f"lP {layout.lP}, hP {layout.hP}"
    if layout.is_quantised:
        packs += f", int8 {'K and V' if layout.int8_values else 'K'} (lP8 {layout.lP8}, hP8 {layout.hP8})"
    block = f"flash block {layout.flash_block}" if layout.flash_block else "no flash attention"
    return f"{pluralize(layout.kv_heads, 'kv head')} x {layout.head_dim} dims, {layout.dtype}, {packs}, {block}"
