"""Names that have hashes in them, no longer than they need to be told apart."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .visible import visible

_HASH = re.compile(r"\b[0-9a-f]{32,}\b")
_DIGITS = (16, 32)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Names for people: of hashes the first digits where these tell the names apart, of all else everything."""
    all_names = set(names)
    for digits in _DIGITS:
        found = {name: _shortened(name, digits) for name in all_names}
        if len(set(found.values())) == len(found):
            return found
    return {name: visible(name) for name in all_names}


def _shortened(name: str, digits: int) -> str:
    return visible(_HASH.sub(lambda match: match[0][:digits], name))
