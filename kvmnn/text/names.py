"""Names that have hashes in them, no longer than they need to be told apart."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .visible import escape_control

_HASH_PATTERN = re.compile(r"\b[0-9a-f]{32,}\b")
_HASH_DIGIT_COUNTS = (16, 32)


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Names for people: of hashes the first digits where these tell the names apart, of all else everything."""
    all_names = set(names)
    for digits in _HASH_DIGIT_COUNTS:
        short_forms = {name: _shorten_name(name, digits) for name in all_names}
        if len(set(short_forms.values())) == len(short_forms):
            return short_forms
    return {name: escape_control(name) for name in all_names}


def _shorten_name(name: str, digits: int) -> str:
    return escape_control(_HASH_PATTERN.sub(lambda match: match[0][:digits], name))
