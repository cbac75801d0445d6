"""What is compressed as one: single dumps, or all of a run and layer together, in one piece or several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..dtypes import PARTS, Part
from .options import MeasureOptions
from .selection import DumpEntry, DumpSelection
from .token_runs import DumpTensor

_NO_RUN_ID = "__no_run_id__"


@dataclass(frozen=True)
class CompressionUnit:
    """Dumps that follow each other along the tokens.

    Parameters
    ----------
    entries
        In order of their first token.
    chunk_tokens
        Tokens of a piece, the last one shorter.
    extra_bytes
        Bytes of the format itself for K, and as many for V: framing of pieces, or a table of the dumps.
    """

    entries: tuple[DumpEntry, ...]
    chunk_tokens: int
    extra_bytes: int

    @property
    def layer(self) -> int:
        """The layer of all its dumps."""
        return self.entries[0].layer

    def get_geometry(self, part: Part) -> tuple[int, int]:
        """``(kv_heads, head_dim)`` of K or V; latent attention has another head_dim for V."""
        _, heads, dims = self.entries[0].get_tensor(part).shape
        return heads, dims

    @property
    def tokens(self) -> int:
        """Tokens of all its dumps."""
        return sum(entry.tokens for entry in self.entries)

    @property
    def parts(self) -> list[Part]:
        """K and V; K alone where nothing is stored as V."""
        return [part for part in PARTS if self.count_raw_bytes(part)]

    def get_itemsize(self, part: Part) -> int:
        """Bytes of a word of K or V as it is measured: 2 or 4."""
        return self.entries[0].get_tensor(part).measured_itemsize

    def count_elements(self, part: Part) -> int:
        """Words of K or V, which are the bytes of each byte lane."""
        heads, dims = self.get_geometry(part)
        return self.tokens * heads * dims

    def count_raw_bytes(self, part: Part) -> int:
        """Bytes of K or V as they are measured."""
        return self.tokens * self.entries[0].get_tensor(part).token_bytes

    def count_chunk_bytes(self, part: Part) -> int:
        """Bytes of the largest piece of K or V as they are measured."""
        return min(self.chunk_tokens, self.tokens) * self.entries[0].get_tensor(part).token_bytes

    def iter_chunk_tokens(self) -> Iterator[int]:
        """Tokens of each piece."""
        tokens = self.tokens
        for start in range(0, tokens, self.chunk_tokens):
            yield min(self.chunk_tokens, tokens - start)

    def count_chunks(self) -> int:
        """How many pieces there are of K; V has as many."""
        return -(-self.tokens // self.chunk_tokens)

    def list_tensors(self, part: Part) -> list[DumpTensor]:
        """K or V of its dumps."""
        return [entry.get_tensor(part) for entry in self.entries]

    @property
    def is_rounded(self) -> bool:
        """Whether all its words are stored in 32 bits and measured in 16."""
        tensors = [tensor for entry in self.entries for tensor in (entry.keys, entry.values)]
        return all(tensor.stored_itemsize == 4 and tensor.measured_itemsize == 2 for tensor in tensors)

    def is_complete(self) -> bool:
        """Whether every binary file has the bytes that its metadata says."""
        return all(entry.is_complete() for entry in self.entries)


def build_units(selection: DumpSelection, options: MeasureOptions) -> list[CompressionUnit]:
    """The selected dumps as the entry mode puts them together, in order of first appearance."""
    if options.is_grouped:
        groups = _group_entries(selection.entries, options.aggregate_by_stage)
    else:
        groups = [(entry,) for entry in selection.entries]
    return [_build_unit(entries, options) for entries in groups]


def _group_entries(entries: list[DumpEntry], by_stage: bool) -> list[tuple[DumpEntry, ...]]:
    entries_by_key: dict[tuple[object, ...], list[DumpEntry]] = {}
    for entry in entries:
        shapes = entry.keys.shape[1:], entry.values.shape[1:]
        itemsizes = entry.keys.measured_itemsize, entry.values.measured_itemsize
        key = (entry.run_id or _NO_RUN_ID, entry.layer, *shapes, *itemsizes, entry.stage if by_stage else None)
        entries_by_key.setdefault(key, []).append(entry)
    return [tuple(sorted(group, key=lambda entry: entry.seq_start)) for group in entries_by_key.values()]


def _build_unit(entries: tuple[DumpEntry, ...], options: MeasureOptions) -> CompressionUnit:
    tokens = sum(entry.tokens for entry in entries)
    if not options.is_chunked:
        extra_bytes = 4 + 4 * len(entries) if options.entry_mode == "aggregate" else 0
        return CompressionUnit(entries, tokens, extra_bytes)
    chunk_tokens = options.online_chunk_seq if 0 < options.online_chunk_seq < tokens else tokens
    return CompressionUnit(entries, chunk_tokens, -(-tokens // chunk_tokens) * options.online_framing_bytes)
