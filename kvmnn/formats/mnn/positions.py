"""Positions of a prefix that MNN loads: it counts from 0 by the number of ids, and reads no positions from any file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...packed.cache_info import CacheInfo
from ...text import span

SET_LENGTH: Final = "const_cast<MNN::Transformer::LlmContext*>(llm->getContext())->all_seq_len = {};"
"""The line of C++ that sets the position of MNN's next token."""


def holds_gaps(info: CacheInfo) -> bool:
    """Return whether K of any layer has other positions than the first ones."""
    return any(layer.positions != ((0, layer.tokens),) for layer in info.layers)


def position_warnings(info: CacheInfo) -> list[str]:
    """Return what goes wrong when MNN loads such a prefix: lines of at most 80 characters, none where nothing does."""
    tokens = sorted({layer.tokens for layer in info.layers})
    lines = []
    if len(tokens) > 1:
        lines += [f"layers hold {span(tokens)} tokens, and MNN reads the same number of rows", "of every layer."]
    if holds_gaps(info):
        last = max(begin + size for layer in info.layers for begin, size in layer.positions) - 1
        lines += [
            f"K has positions up to {last}, and after loading MNN continues at {tokens[-1]}:",
            "what it generates is wrong. Rotate K (--rerotate), or set the position of",
            "the next token in C++, after generate(ids, 0):",
            f"  {SET_LENGTH.format(info.continues_at)}",
        ]
    return lines


def warning_lines(warnings: Sequence[str]) -> list[str]:
    """Return the lines as a result prints them."""
    return [f"  {'warning: ' if place == 0 else '  '}{line}" for place, line in enumerate(warnings)]


def warning_sentences(warnings: Sequence[str]) -> list[str]:
    """Return the lines as JSON has them: one text."""
    return [" ".join(line.strip() for line in warnings)] if warnings else []
