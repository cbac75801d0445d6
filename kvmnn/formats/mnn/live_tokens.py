"""How many tokens of packed files are live: as specified, or as the rows and the room of the files tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...dtypes import PARTS, Part
from ...files.mapped import MappedFile
from ...packed.evidence import find_last_row
from ...packed.fitting import LayoutMatch
from ...packed.inference import infer_token_range
from ...packed.layout import PackLayout
from ...text import pluralize
from .packed_files import PackedFiles


@dataclass(frozen=True)
class RowCounts:
    """Rows of each layer up to the last one that is not empty.

    Parameters
    ----------
    keys, values
        Of K and of V, in any head.
    """

    keys: tuple[int, ...]
    values: tuple[int, ...]

    @property
    def common_count(self) -> int | None:
        """The number of all layers, K and V; None where they differ or all rows are empty."""
        counts = {*self.keys, *self.values}
        return counts.pop() if len(counts) == 1 and 0 not in counts else None


def count_nonempty_rows(files: PackedFiles, match: LayoutMatch, layouts: Sequence[PackLayout]) -> RowCounts:
    """Look for the last row of K and of V in every layer that is not empty."""

    def count_part_rows(part: Part) -> tuple[int, ...]:
        return tuple(
            find_last_row(MappedFile(layer.get_path(part)).view, layout, part, capacity)
            for layer, capacity, layout in zip(files.layers, match.capacities, layouts, strict=True)
        )

    keys, values = (count_part_rows(part) for part in PARTS)
    return RowCounts(keys, values)


@dataclass(frozen=True)
class TokenCountGuess:
    """Live tokens as the files tell.

    Parameters
    ----------
    num_tokens
        The number that stands out; None where none does.
    choices
        Numbers that are possible, the likeliest first.
    reason
        From what it was inferred, or why it was not.
    """

    num_tokens: int | None
    choices: tuple[int, ...]
    reason: str


def infer_token_count(files: PackedFiles, match: LayoutMatch, row_counts: RowCounts) -> TokenCountGuess:
    """Infer the number of live tokens from rows that are not empty and from the room of the files.

    The engine makes room for 64 tokens more than a prefix has. Rows beyond that are of a session that went on in the
    same files; in the files of a running engine any row may be left over from tokens that are gone.
    """
    common_count = row_counts.common_count
    if common_count is None:
        return TokenCountGuess(None, (), "rows of K and V that are not empty differ in number")
    min_tokens, max_tokens = infer_token_range(match)
    if files.kind != "prefix":
        return TokenCountGuess(
            None,
            (common_count,),
            f"{pluralize(common_count, 'row')} are not empty, of which an engine may have left some",
        )
    if min_tokens <= common_count <= max_tokens or common_count < min_tokens or not max_tokens:
        return TokenCountGuess(
            common_count, (common_count,), f"{pluralize(common_count, 'row')} of K and V of all layers are not empty"
        )
    choices = (common_count, *range(max_tokens, max(min_tokens, 1) - 1, -1))
    why = "a session went on, or the files were packed with less room"
    return TokenCountGuess(
        None, choices[:8], f"{common_count} rows are not empty, but the room is that of a prefix of {max_tokens}: {why}"
    )


def describe_omitted_rows(files: PackedFiles, match: LayoutMatch, row_counts: RowCounts, tokens: Sequence[int]) -> str:
    """Which rows of a fresh prefix, whose number the files tell, a specified number leaves out; empty for none."""
    common_count, specified_counts = row_counts.common_count, set(tokens)
    min_tokens, max_tokens = infer_token_range(match)
    if (
        files.kind != "prefix"
        or common_count is None
        or len(specified_counts) != 1
        or max(specified_counts) >= common_count
    ):
        return ""
    if not min_tokens <= common_count <= max_tokens or min_tokens <= max(specified_counts) <= max_tokens:
        return ""
    return (
        f"{pluralize(common_count, 'row')} of K and V of all layers are not empty, and the room is that of a prefix of "
        f"{common_count}: "
        f"{max(specified_counts)} tokens leave {pluralize(common_count - max(specified_counts), 'row')} out"
    )


def list_token_doubts(
    row_counts: RowCounts, token_counts: Sequence[int], option_name: str
) -> tuple[list[str], list[str]]:
    """Where rows speak for more tokens than specified, and where for fewer, as sentences: old rows may be left."""
    more_sentences, fewer_sentences = [], []
    for keys, values, num_tokens in zip(row_counts.keys, row_counts.values, token_counts, strict=True):
        num_nonempty = max(keys, values)
        if num_nonempty > num_tokens:
            more_sentences.append(f"rows behind the {num_tokens} tokens are not zero, up to row {num_nonempty}")
        elif num_nonempty < num_tokens:
            fewer_sentences.append(f"the last {num_tokens - num_nonempty} of {num_tokens} tokens are all zero")
    layers_text = pluralize(len(token_counts), "layer")
    more_tokens_doubts = (
        [
            f"in {len(more_sentences)} of {layers_text} {more_sentences[0]}: more tokens may be live than "
            f"{option_name} says"
        ]
        if more_sentences
        else []
    )
    fewer_tokens_doubts = (
        [
            f"in {len(fewer_sentences)} of {layers_text} {fewer_sentences[0]}: fewer tokens may be live than "
            f"{option_name} says"
        ]
        if fewer_sentences
        else []
    )
    return more_tokens_doubts, fewer_tokens_doubts
