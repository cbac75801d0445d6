"""Which layer an array is of, and whether it holds K or V, by its name."""

from __future__ import annotations

import re

from ..dtypes import Part
from ..errors import SourceError

_PART_WORDS: dict[str, Part] = {
    **dict.fromkeys(("k", "key", "keys"), "key"),
    **dict.fromkeys(("v", "value", "values"), "value"),
}
_WORD = re.compile(r"[A-Za-z]+\d*|\d+")
_LAYER_WORD = re.compile(r"(?:layers?|l|keys?|values?|k|v)?(\d+)", re.IGNORECASE)


def part_of(where: str, name: str) -> tuple[Part, str]:
    """K or V by the last word that says so; and the name with that word replaced by ``*``.

    Raises
    ------
    SourceError
        For a name without such a word.
    """
    for word in reversed(list(_WORD.finditer(name))):
        letters = word[0].rstrip("0123456789")
        part = _PART_WORDS.get(letters.lower())
        if part:
            return part, f"{name[: word.start()]}*{name[word.start() + len(letters) :]}"
    raise SourceError(
        f"{where}: array {name!r} is neither K nor V by its name: expected a word k, key or keys, v, value or values "
        "in it (--tensor chooses arrays)"
    )


def layer_of(name: str) -> int | None:
    """The first number that stands alone or behind a word for layer, K or V."""
    for word in re.findall(r"[A-Za-z0-9]+", name):
        found = _LAYER_WORD.fullmatch(word)
        if found and len(found[1]) < 10:
            return int(found[1])
    return None
