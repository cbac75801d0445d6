"""What is compressed as one: single dumps, or all of a run and layer together, in one piece or several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..dtypes import PARTS, Part
from .options import MeasureOptions
from .selection import Entry, Selection
from .token_runs import Tensor

_NO_RUN = "__no_run_id__"


@dataclass(frozen=True)
class Unit:
    """Dumps that follow each other along the tokens.

    Parameters
    ----------
    entries
        In order of their first token.
    piece_tokens
        Tokens of a piece, the last one shorter.
    extra_bytes
        Bytes of the format itself for K, and as many for V: framing of pieces, or a table of the dumps.
    """

    entries: tuple[Entry, ...]
    piece_tokens: int
    extra_bytes: int

    @property
    def layer(self) -> int:
        """The layer of all its dumps."""
        return self.entries[0].layer

    def geometry(self, part: Part) -> tuple[int, int]:
        """``(kv_heads, head_dim)`` of K or V; latent attention has another head_dim for V."""
        _, heads, dims = self.entries[0].tensor(part).shape
        return heads, dims

    @property
    def tokens(self) -> int:
        """Tokens of all its dumps."""
        return sum(entry.tokens for entry in self.entries)

    @property
    def parts(self) -> list[Part]:
        """K and V; K alone where nothing is stored as V."""
        return [part for part in PARTS if self.raw_bytes(part)]

    def word_bytes(self, part: Part) -> int:
        """Bytes of a word of K or V as it is measured: 2 or 4."""
        return self.entries[0].tensor(part).word_bytes

    def words(self, part: Part) -> int:
        """Words of K or V, which are the bytes of each byte lane."""
        heads, dims = self.geometry(part)
        return self.tokens * heads * dims

    def raw_bytes(self, part: Part) -> int:
        """Bytes of K or V as they are measured."""
        return self.tokens * self.entries[0].tensor(part).token_bytes

    def piece_bytes(self, part: Part) -> int:
        """Bytes of the largest piece of K or V as they are measured."""
        return min(self.piece_tokens, self.tokens) * self.entries[0].tensor(part).token_bytes

    def pieces(self) -> Iterator[int]:
        """Tokens of each piece."""
        tokens = self.tokens
        for start in range(0, tokens, self.piece_tokens):
            yield min(self.piece_tokens, tokens - start)

    def piece_count(self) -> int:
        """How many pieces there are of K; V has as many."""
        return -(-self.tokens // self.piece_tokens)

    def tensors(self, part: Part) -> list[Tensor]:
        """K or V of its dumps."""
        return [entry.tensor(part) for entry in self.entries]

    @property
    def is_rounded(self) -> bool:
        """Whether all its words are stored in 32 bits and measured in 16."""
        tensors = [tensor for entry in self.entries for tensor in (entry.keys, entry.values)]
        return all(tensor.width == 4 and tensor.word_bytes == 2 for tensor in tensors)

    def is_complete(self) -> bool:
        """Whether every binary file has the bytes that its metadata says."""
        return all(entry.is_complete() for entry in self.entries)


def units_of(selection: Selection, options: MeasureOptions) -> list[Unit]:
    """The selected dumps as the entry mode puts them together, in order of first appearance."""
    if options.is_grouped:
        groups = _groups(selection.entries, options.aggregate_by_stage)
    else:
        groups = [(entry,) for entry in selection.entries]
    return [_unit(entries, options) for entries in groups]


def _groups(entries: list[Entry], by_stage: bool) -> list[tuple[Entry, ...]]:
    found: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        shapes = entry.keys.shape[1:], entry.values.shape[1:]
        words = entry.keys.word_bytes, entry.values.word_bytes
        key = (entry.run_id or _NO_RUN, entry.layer, *shapes, *words, entry.stage if by_stage else None)
        found.setdefault(key, []).append(entry)
    return [tuple(sorted(group, key=lambda entry: entry.seq_start)) for group in found.values()]


def _unit(entries: tuple[Entry, ...], options: MeasureOptions) -> Unit:
    tokens = sum(entry.tokens for entry in entries)
    if not options.is_chunked:
        extra = 4 + 4 * len(entries) if options.entry_mode == "aggregate" else 0
        return Unit(entries, tokens, extra)
    piece = options.online_chunk_seq if 0 < options.online_chunk_seq < tokens else tokens
    return Unit(entries, piece, -(-tokens // piece) * options.online_framing_bytes)
