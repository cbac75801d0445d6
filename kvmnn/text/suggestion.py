"""What somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'streaming'?)"`` for the name nearest to a word; nothing where none is near."""
    names = {name.lower(): name for name in known}
    transposed = [name for name in names if sorted(name) == sorted(word.lower())]  # '.nyp' is '.npy', not '.npz'
    found = transposed or get_close_matches(word.lower(), names, n=1, cutoff=0.7)
    return f" (did you mean {names[found[0]]!r}?)" if found else ""
