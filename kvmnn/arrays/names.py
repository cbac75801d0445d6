"""Which layer an array is of, and whether it holds K or V, by its name."""

from __future__ import annotations

import re

from ..errors import SourceError

_K_WORDS = ("k", "key", "keys")


_V_WORDS = ("v", "value", "values")


_WORD = re.compile(r"[A-Za-z]+\d*|\d+")


_LAYER_WORD = re.compile(r"(?:layers?|l|keys?|values?|k|v)?(\d+)", re.IGNORECASE)


def side_of(where: str, name: str) -> tuple[int, str]:
    """0 for K, 1 for V, by the last word that says so; and the name with that word taken out.

    Raises
    ------
    SourceError
        For a name without such a word.
    """
    for word in reversed(list(_WORD.finditer(name))):
        letters = word[0].rstrip("0123456789")
        for side, words in enumerate((_K_WORDS, _V_WORDS)):
            if letters.lower() in words:
                return side, f"{name[: word.start()]}*{name[word.start() + len(letters) :]}"
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
