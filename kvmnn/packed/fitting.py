"""Which layout a packed file has: what the caller says, checked against the sizes, and inferred only where they leave
one possibility.

No file of MNN holds its geometry, its pack numbers or its number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from .. import dtypes
from ..checks import whole
from ..errors import KvmnnError, MissingOptionError, SourceError
from ..text import count
from .addressing import FLASH_BLOCK
from .backends import BACKENDS
from .layout import PackLayout

FlashBlock = int | Literal["none"]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What is known of packed files; None for what is not.

    Parameters
    ----------
    kv_heads, head_dim
        Of every layer.
    dtype
        ``fp16``, ``bf16`` or ``fp32``.
    backend
        A name that `PackLayout.for_backend` knows; stands for dtype, lP and hP.
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
                whole(value, name, 1)
        if self.dtype is not None:
            dtypes.by_name(self.dtype)
        if self.backend is not None:
            PackLayout.for_backend(self.backend, kv_heads=1, head_dim=1)

    def or_else(self, other: Geometry) -> Geometry:
        """This one, with what it does not say taken from `other`.

        A backend says dtype and pack numbers; if one of the two names it, the other's are not mixed in.
        """
        skip = {"backend", "lP", "hP", "dtype"} if self.backend else {"backend"} if self.lP or self.hP else set()
        filled = {
            field.name: getattr(other, field.name)
            for field in fields(self)
            if getattr(self, field.name) is None and field.name not in skip
        }
        return replace(self, **filled)

    @property
    def missing(self) -> str:
        """Which of kv_heads and head_dim is not known, and the options that say it; empty for neither."""
        options = {"kv_heads": "--kv-heads", "head_dim": "--head-dim"}
        return " and ".join(f"{name} ({option})" for name, option in options.items() if getattr(self, name) is None)

    def candidates(self) -> list[tuple[str, PackLayout]]:
        """Every layout that agrees with what is known, named by the backends that have it.

        Raises
        ------
        MissingOptionError
            When kv_heads or head_dim is not known, or the backend of an int8 cache.
        """
        if self.missing:
            raise MissingOptionError(f"the files do not say {self.missing}; --model DIR may")
        if self.int8 and self.backend is None:
            raise MissingOptionError("int8 caches need the backend named (--backend)")
        found: dict[PackLayout, list[str]] = {}
        for name, layout in self._packs():
            for block in self._blocks():
                blocked = _plain(layout, None if block == "none" else block, self.int8)
                if self.dtype in (None, blocked.dtype):
                    found.setdefault(blocked, []).append(name)
        return [("/".join(names), layout) for layout, names in found.items()]

    def _packs(self) -> list[tuple[str, PackLayout]]:
        assert self.kv_heads is not None and self.head_dim is not None
        if self.backend is not None:
            layout = PackLayout.for_backend(self.backend, kv_heads=self.kv_heads, head_dim=self.head_dim)
            return [(self.backend, layout)]
        known = [
            (name, PackLayout.for_backend(name, kv_heads=self.kv_heads, head_dim=self.head_dim)) for name in BACKENDS
        ]
        if self.dtype and self.lP and self.hP:
            same = [name for name, layout in known if (layout.dtype, layout.lP, layout.hP) == self._numbers()]
            layout = PackLayout(self.kv_heads, self.head_dim, self.dtype, self.lP, self.hP)
            return [("/".join(same) or "given numbers", layout)]
        return [
            (name, layout) for name, layout in known if self.lP in (None, layout.lP) and self.hP in (None, layout.hP)
        ]

    @property
    def names_packs(self) -> bool:
        """Whether dtype and pack numbers are known."""
        return self.backend is not None or None not in self._numbers()

    def _numbers(self) -> tuple[str | None, int | None, int | None]:
        return self.dtype, self.lP, self.hP

    def _blocks(self) -> list[FlashBlock]:
        if self.int8 == "both":  # the engine quantises values with flash attention only
            return [self.flash_block or FLASH_BLOCK]
        return [FLASH_BLOCK, "none"] if self.flash_block is None else [self.flash_block]


def _plain(layout: PackLayout, flash_block: int | None, int8: str | None) -> PackLayout:
    """Only what decides where elements lie, so that backends that agree in that are one."""
    plain = PackLayout(layout.kv_heads, layout.head_dim, layout.dtype, layout.lP, layout.hP, flash_block)
    if int8 is None:
        return plain
    return replace(plain, lP8=layout.lP8, hP8=layout.hP8, int8_keys=True, int8_values=int8 == "both")


@dataclass(frozen=True)
class Fit:
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


def fits(geometry: Geometry, sizes: Sequence[tuple[int, int]]) -> list[Fit]:
    """All layouts that agree with `geometry` and with the sizes of the K and V files (bytes) of every layer."""
    found = []
    for backends, layout in geometry.candidates():
        capacities = [capacity_of(layout, *pair) for pair in sizes]
        if all(capacities):
            found.append(Fit(layout, backends, tuple(capacity or 0 for capacity in capacities)))
    return found


def the_fit(
    where: str, geometry: Geometry, sizes: Sequence[tuple[int, int]], files: Sequence[tuple[str, str]] = ()
) -> Fit:
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
        found = fits(geometry, sizes)
    except SourceError as exc:
        raise type(exc)(f"{where}: {exc}") from None
    if len(found) == 1:
        return found[0]
    if geometry.names_packs:
        usual = [fit for fit in found if fit.layout.flash_block == FLASH_BLOCK]
        found = usual or found
        if len(found) == 1:
            return found[0]
    if found:
        raise MissingOptionError(
            f"{where}: {len(found)} layouts fit the sizes of the files, say which (--backend, --dtype, --flash-block)"
            f"{listed(found)}"
        )
    every = geometry.candidates()
    heads, dims = geometry.kv_heads, geometry.head_dim
    if not every:
        raise SourceError(f"{where}: no layout is known with that dtype and those pack numbers")
    number = _first_misfit([layout for _, layout in every], sizes)
    pair, both = sizes[number], files[number] if files else None
    if len(every) > 2:
        of = f" ({' and '.join(both)})" if both else ""
        raise SourceError(
            f"{where}: K and V files of {pair[0]} and {pair[1]} bytes{of} fit none of the {len(every)} layouts known "
            f"for {heads} kv heads x {dims} dims"
        )
    raise SourceError(f"{where}: {misfit(every[0][1], *pair, both)}")


def listed(found: Sequence[Fit]) -> str:
    """Layouts, to be put behind a message."""
    return ": " + "; ".join(f"{fit.backends}: {describe(fit.layout)}" for fit in found)


def _first_misfit(layouts: Sequence[PackLayout], sizes: Sequence[tuple[int, int]]) -> int:
    """The first layer whose files fit none of the layouts; else the first that does not fit the first of them."""
    for asked in (layouts, layouts[:1]):
        for number, pair in enumerate(sizes):
            if not any(capacity_of(layout, *pair) for layout in asked):
                return number
    return 0


def inferred(geometry: Geometry, fit: Fit, sizes: Sequence[tuple[int, int]]) -> list[str]:
    """What `the_fit` found that `geometry` does not say, in words."""
    notes = []
    if not geometry.names_packs:
        notes.append(f"layout inferred: of those known only that of {fit.backends} fits the sizes of the files")
    if geometry.flash_block is None:
        usual = fit.layout.flash_block == FLASH_BLOCK
        block = f"flash block {fit.layout.flash_block}" if fit.layout.flash_block else "no flash attention"
        if len(fits(geometry, sizes)) > 1:
            notes.append(f"{block} taken, the engine's default; the sizes would fit --flash-block none as well")
        elif not (usual and geometry.names_packs):
            notes.append(f"{block} inferred from the sizes of the files")
    return notes


def capacity_of(layout: PackLayout, key_bytes: int, value_bytes: int) -> int | None:
    """`PackLayout.capacity_of`, or None where these sizes do not fit."""
    try:
        return layout.capacity_of(key_bytes, value_bytes)
    except KvmnnError:
        return None


def misfit(layout: PackLayout, key_bytes: int, value_bytes: int, names: tuple[str, str] | None = None) -> str:
    """Why files of these sizes, with these `names`, do not have this layout."""
    tile = layout.flash_block or layout.lP
    one = replace(layout, flash_block=tile)
    for part, found, unit, tokens in (
        ("K", key_bytes, one.key_bytes(1), layout.hP),
        ("V", value_bytes, one.value_bytes(1), tile),
    ):
        if found < 1 or found % unit:
            file = f"{names['KV'.index(part)]}: " if names else ""
            return (
                f"{file}a {part} file of {found} bytes is not a whole number of the {unit} bytes that {tokens} tokens "
                f"take in {describe(layout)}"
            )
    keys, values = key_bytes // one.key_bytes(1) * layout.hP, value_bytes // one.value_bytes(1) * tile
    both = f"{' and '.join(names)}: " if names else ""
    return (
        f"{both}K file and V file do not belong together: {key_bytes} bytes give K room for {keys} tokens, "
        f"{value_bytes} bytes give V room for {values}, in {describe(layout)}"
    )


def of_layout(layout: PackLayout) -> Geometry:
    """What a layout says, as something known."""
    return Geometry(
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        lP=layout.lP,
        hP=layout.hP,
        flash_block="none" if layout.flash_block is None else layout.flash_block,
    )


def describe(layout: PackLayout) -> str:
    """A layout in words."""
    packs = f"lP {layout.lP}, hP {layout.hP}"
    if layout.quantised:
        packs += f", int8 {'K and V' if layout.int8_values else 'K'} (lP8 {layout.lP8}, hP8 {layout.hP8})"
    block = f"flash block {layout.flash_block}" if layout.flash_block else "no flash attention"
    return f"{count(layout.kv_heads, 'kv head')} x {layout.head_dim} dims, {layout.dtype}, {packs}, {block}"
