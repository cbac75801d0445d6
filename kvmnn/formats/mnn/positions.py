"""Positions of a prefix that MNN loads: it counts from 0 by the number of ids, and reads no positions from any file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...packed.cache_info import CacheInfo
from ...text import format_range

SET_LENGTH_STATEMENT: Final = "const_cast<MNN::Transformer::LlmContext*>(llm->getContext())->all_seq_len = {};"
"""The line of C++ that sets the position of MNN's next token."""


def has_gaps(info: CacheInfo) -> bool:
    """Return whether K of any layer has other positions than the first ones."""
    return any(layer.positions != ((0, layer.tokens),) for layer in info.layers)


def list_position_warnings(info: CacheInfo) -> list[str]:
    """Return what goes wrong when MNN loads such a prefix: lines of at most 80 characters, none where nothing does."""
    token_counts = sorted({layer.tokens for layer in info.layers})
    lines = []
    if len(token_counts) > 1:
        lines += [
            f"layers hold {format_range(token_counts)} tokens, and MNN reads the same number of rows",
            "of every layer.",
        ]
    if has_gaps(info):
        last_position = (
            max(start_position + size for layer in info.layers for start_position, size in layer.positions) - 1
        )
        lines += [
            f"K has positions up to {last_position}, and after loading MNN continues at {token_counts[-1]}:",
            "what it generates is wrong. Rotate K (--rerotate), or set the position of",
            "the next token in C++, after generate(ids, 0):",
            f"  {SET_LENGTH_STATEMENT.format(info.next_token_position)}",
        ]
    return lines


def format_warning_lines(warnings: Sequence[str]) -> list[str]:
    """Return the lines as a result prints them."""
    return [f"  {'warning: ' if index == 0 else '  '}{line}" for index, line in enumerate(warnings)]


def join_warnings(warnings: Sequence[str]) -> list[str]:
    """Return the lines as JSON has them: one text."""
    return [" ".join(line.strip() for line in warnings)] if warnings else []
