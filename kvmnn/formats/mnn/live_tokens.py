"""How many tokens of packed files are live: as specified, or as the rows and the room of the files tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...dtypes import PARTS, Part
from ...files.mapped import MappedFile
from ...packed.evidence import find_last_row
from ...packed.fitting import Fit
from ...packed.inference import fresh_tokens
from ...packed.layout import PackLayout
from ...text import count
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
    def common(self) -> int | None:
        """The number of all layers, K and V; None where they differ or all rows are empty."""
        numbers = {*self.keys, *self.values}
        return numbers.pop() if len(numbers) == 1 and 0 not in numbers else None


def count_rows(files: PackedFiles, fit: Fit, layouts: Sequence[PackLayout]) -> RowCounts:
    """Look for the last row of K and of V in every layer that is not empty."""

    def of_part(part: Part) -> tuple[int, ...]:
        return tuple(
            find_last_row(MappedFile(layer.path(part)).view, layout, part, capacity)
            for layer, capacity, layout in zip(files.layers, fit.capacities, layouts, strict=True)
        )

    keys, values = (of_part(part) for part in PARTS)
    return RowCounts(keys, values)


@dataclass(frozen=True)
class TokenGuess:
    """Live tokens as the files tell.

    Parameters
    ----------
    tokens
        The number that stands out; None where none does.
    choices
        Numbers that are possible, the likeliest first.
    reason
        From what it was inferred, or why it was not.
    """

    tokens: int | None
    choices: tuple[int, ...]
    reason: str


def guess_tokens(files: PackedFiles, fit: Fit, rows: RowCounts) -> TokenGuess:
    """Infer the number of live tokens from rows that are not empty and from the room of the files.

    The engine makes room for 64 tokens more than a prefix has. Rows beyond that are of a session that went on in the
    same files; in the files of a running engine any row may be left over from tokens that are gone.
    """
    found = rows.common
    if found is None:
        return TokenGuess(None, (), "rows of K and V that are not empty differ in number")
    first, last = fresh_tokens(fit)
    if files.kind != "prefix":
        return TokenGuess(None, (found,), f"{count(found, 'row')} are not empty, of which an engine may have left some")
    if first <= found <= last or found < first or not last:
        return TokenGuess(found, (found,), f"{count(found, 'row')} of K and V of all layers are not empty")
    choices = (found, *range(last, max(first, 1) - 1, -1))
    why = "a session went on, or the files were packed with less room"
    return TokenGuess(
        None, choices[:8], f"{found} rows are not empty, but the room is that of a prefix of {last}: {why}"
    )


def describe_rows_left(files: PackedFiles, fit: Fit, rows: RowCounts, tokens: Sequence[int]) -> str:
    """Which rows of a fresh prefix, whose number the files tell, a specified number leaves out; empty for none."""
    found, said = rows.common, set(tokens)
    first, last = fresh_tokens(fit)
    if files.kind != "prefix" or found is None or len(said) != 1 or max(said) >= found:
        return ""
    if not first <= found <= last or first <= max(said) <= last:
        return ""
    return (
        f"{count(found, 'row')} of K and V of all layers are not empty, and the room is that of a prefix of {found}: "
        f"{max(said)} tokens leave {count(found - max(said), 'row')} out"
    )


def doubt_tokens(rows: RowCounts, tokens: Sequence[int], option: str) -> tuple[list[str], list[str]]:
    """Where rows speak for more tokens than specified, and where for fewer, as sentences: old rows may be left."""
    more, fewer = [], []
    for keys, values, number in zip(rows.keys, rows.values, tokens, strict=True):
        used = max(keys, values)
        if used > number:
            more.append(f"rows behind the {number} tokens are not zero, up to row {used}")
        elif used < number:
            fewer.append(f"the last {number - used} of {number} tokens are all zero")
    layers = count(len(tokens), "layer")
    above = [f"in {len(more)} of {layers} {more[0]}: more tokens may be live than {option} says"] if more else []
    below = [f"in {len(fewer)} of {layers} {fewer[0]}: fewer tokens may be live than {option} says"] if fewer else []
    return above, below
