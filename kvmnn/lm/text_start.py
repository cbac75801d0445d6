"""Which token begins every text of a model, by the files of its tokenizer, and what says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.json_document import read_object_if_there
from ..text import count

_CONFIG, _SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_MODEL_SETTINGS = ("config.json", "generation_config.json")
_PROBE = "a 1."


@dataclass(frozen=True, kw_only=True)
class TextStart:
    """The token that is put before a text.

    Attributes
    ----------
    token
        Its id; None where no token is put before a text.
    text
        The token as text.
    reason
        What says so; empty where no file says anything.
    """

    token: int | None = None
    text: str = ""
    reason: str = ""

    def note(self, texts: int, already: int = 0, *, what: str = "text") -> str | None:
        """Return a sentence about what was added; None where no file names a token.

        Parameters
        ----------
        texts
            How many texts there are.
        already
            How many of them begin with the token themselves, so that nothing was added.
        what
            What a text is called.
        """
        if self.token is None:
            return f"No token was added before the {what}: {self.reason}." if self.reason else None
        named = f"token {self.token} ({self.text!r})"
        if already == texts:
            whose = f"The {what} begins" if texts == 1 else f"All {texts:,} {what}s begin"
            return f"{whose} with {named} already: none was added."
        whose = f"The {what} begins" if texts == 1 else f"Each {what} begins"
        but = f"; {count(already, what)} had it already" if already else ""
        return f"{whose} with {named}, which was added{but} ({self.reason})."


def find_text_start(path: Path, tokenizer: Any) -> TextStart:
    """Return what begins a text.

    ``"add_bos_token": false`` and ``"bos_token": null`` mean that nothing does. Otherwise it is what the post-processor
    of the tokenizer puts first, and where that puts nothing the token that the files name.

    Parameters
    ----------
    path
        Of the ``tokenizer.json``; the other files are its neighbours.
    tokenizer
        The ``tokenizers.Tokenizer`` of it.

    Raises
    ------
    SourceError
        For a neighbour that is not JSON.
    """
    config, special = (read_object_if_there(path.with_name(name)) for name in (_CONFIG, _SPECIAL))
    asked = config.get("add_bos_token")
    if asked is False:
        return TextStart(reason=f"{_CONFIG} has add_bos_token false")
    where, settings = (_SPECIAL, special) if "bos_token" not in config else (_CONFIG, config)
    if "bos_token" in settings and settings["bos_token"] is None:
        return TextStart(reason=f"{where} has bos_token null")
    named = _token_of(settings, tokenizer)
    if asked is True and named is not None:
        return _start(named, tokenizer, f"add_bos_token of {_CONFIG}")
    first = _put_first(tokenizer)
    if first:
        token = named if named is not None and named in first else first[-1]
        return _start(token, tokenizer, f"post-processor of {path.name}")
    without = "" if asked is True else f'; "add_bos_token": false in {_CONFIG} leaves it out'
    if named is not None:
        without = without.replace(f"in {where}", "there")
        return _start(named, tokenizer, f"bos_token of {where}{without}")
    for name in _MODEL_SETTINGS:
        number = read_object_if_there(path.with_name(name)).get("bos_token_id")
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < tokenizer.get_vocab_size():
            return _start(number, tokenizer, f"bos_token_id of {name}{without}")
    return TextStart()


def _start(token: int, tokenizer: Any, reason: str) -> TextStart:
    return TextStart(token=token, text=tokenizer.id_to_token(token) or "", reason=reason)


def _token_of(settings: Mapping[str, Any], tokenizer: Any) -> int | None:
    """Return the id of the ``bos_token`` that is named, which may be written as an object."""
    named = settings.get("bos_token")
    if isinstance(named, dict):
        named = named.get("content")
    token = tokenizer.token_to_id(named) if isinstance(named, str) else None
    return None if token is None else int(token)


def _put_first(tokenizer: Any) -> Sequence[int]:
    """Return the special tokens that the post-processor puts before a text."""
    found = tokenizer.encode(_PROBE, add_special_tokens=True)
    own = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    ids, mask = found.ids, found.special_tokens_mask
    length = next((place for place, special in enumerate(mask) if not special), 0)
    return ids[:length] if ids[length : length + len(own)] == own else ()
