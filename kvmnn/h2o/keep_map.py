"""A plan as a picture: one letter for each block, or for several neighbouring blocks of a long cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .plan import BlockPlan

MAP_LEGEND = "S sink, # heavy hitter, R recent, . dropped, 1 to 9 tenths kept"
MAX_MAP_LINES = 8


def render_block_map(plan: BlockPlan, width: int = 80) -> list[str]:
    """Lines of letters, each line with the token that it starts at.

    Parameters
    ----------
    plan
        The plan; where it drops nothing, protected blocks are shown as such and all others as kept.
    width
        Columns.

    Returns
    -------
    At most `MAX_MAP_LINES` lines. A letter stands for several blocks where that is needed to fit; where some of these
    are kept and some dropped, it is a digit: how many tenths are kept.
    """
    letters = _render_block_letters(plan)
    label_width = len(f"{plan.kv_len:,}") + 2
    columns = max(10, width - label_width)
    blocks_per_cell = -(-letters.size // (columns * MAX_MAP_LINES))
    cells = [_merge_letters(letters[i : i + blocks_per_cell]) for i in range(0, letters.size, blocks_per_cell)]
    tokens_per_cell = blocks_per_cell * plan.block_tokens
    return [
        f"{first * tokens_per_cell:>{label_width - 2},}  " + "".join(cells[first : first + columns])
        for first in range(0, len(cells), columns)
    ]


def compute_tokens_per_letter(plan: BlockPlan, width: int = 80) -> int:
    """Tokens that one letter of `render_block_map` stands for."""
    columns = max(10, width - len(f"{plan.kv_len:,}") - 2)
    return -(-plan.keep.size // (columns * MAX_MAP_LINES)) * plan.block_tokens


def _render_block_letters(plan: BlockPlan) -> npt.NDArray[np.str_]:
    sink, recent = plan.num_floor_blocks
    letters = np.where(plan.keep | (plan.num_evicted == 0), "#", ".")
    letters[letters.size - recent :] = "R"
    letters[:sink] = "S"
    return letters


def _merge_letters(letters: npt.NDArray[np.str_]) -> str:
    kinds = set(letters.tolist())
    if len(kinds) == 1:
        return str(kinds.pop())
    if "." in kinds:
        return str(min(9, max(1, round(10 * float(np.mean(letters != "."))))))
    return "#" if "#" in kinds else "S"
