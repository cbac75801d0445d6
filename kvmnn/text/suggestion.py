"""What somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(word: str, candidates: Iterable[str]) -> str:
    """``" (did you mean 'streaming'?)"`` for the name nearest to a word; nothing where none is near."""
    names_by_lower = {name.lower(): name for name in candidates}
    anagrams = [name for name in names_by_lower if sorted(name) == sorted(word.lower())]  # '.nyp' is '.npy', not '.npz'
    close_names = anagrams or get_close_matches(word.lower(), names_by_lower, n=1, cutoff=0.7)
    return f" (did you mean {names_by_lower[close_names[0]]!r}?)" if close_names else ""
