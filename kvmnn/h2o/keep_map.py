"""A plan as a picture: one letter for each block, or for several neighbouring blocks of a long cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .plan import Plan

LEGEND = "S sink, # heavy hitter, R recent, . dropped, 1 to 9 tenths kept"
MAX_LINES = 8


def keep_map(made: Plan, width: int = 80) -> list[str]:
    """Lines of letters, each line with the token that it starts at.

    Parameters
    ----------
    made
        The plan; where it drops nothing, protected blocks are shown as such and all others as kept.
    width
        Columns.

    Returns
    -------
    At most `MAX_LINES` lines. A letter stands for several blocks where that is needed to fit; where some of these are
    kept and some dropped, it is a digit: how many tenths are kept.
    """
    letters = _letters(made)
    gutter = len(f"{made.kv_len:,}") + 2
    columns = max(10, width - gutter)
    group = -(-letters.size // (columns * MAX_LINES))
    drawn = [_merged(letters[i : i + group]) for i in range(0, letters.size, group)]
    step = group * made.block_tokens
    return [
        f"{first * step:>{gutter - 2},}  " + "".join(drawn[first : first + columns])
        for first in range(0, len(drawn), columns)
    ]


def tokens_per_letter(made: Plan, width: int = 80) -> int:
    """Tokens that one letter of `keep_map` stands for."""
    columns = max(10, width - len(f"{made.kv_len:,}") - 2)
    return -(-made.keep.size // (columns * MAX_LINES)) * made.block_tokens


def _letters(made: Plan) -> npt.NDArray[np.str_]:
    sink, recent = made.floor_blocks
    letters = np.where(made.keep | (made.evicted == 0), "#", ".")
    letters[letters.size - recent :] = "R"
    letters[:sink] = "S"
    return letters


def _merged(letters: npt.NDArray[np.str_]) -> str:
    kinds = set(letters.tolist())
    if len(kinds) == 1:
        return str(kinds.pop())
    if "." in kinds:
        return str(min(9, max(1, round(10 * float(np.mean(letters != "."))))))
    return "#" if "#" in kinds else "S"
