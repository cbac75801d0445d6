"""Which token begins every text of a model, by the files of its tokenizer, and what says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.json_document import read_object_or_empty
from ..text import pluralize

_CONFIG_FILE, _SPECIAL_TOKENS_FILE = "tokenizer_config.json", "special_tokens_map.json"
_MODEL_SETTINGS = ("config.json", "generation_config.json")
_PROBE_TEXT = "a 1."


@dataclass(frozen=True, kw_only=True)
class BosInfo:
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

    def format_note(self, num_texts: int, num_with_own: int = 0, *, noun: str = "text") -> str | None:
        """Return a sentence about what was added; None where no file names a token.

        Parameters
        ----------
        num_texts
            How many texts there are.
        num_with_own
            How many of them begin with the token themselves, so that nothing was added.
        noun
            What a text is called.
        """
        if self.token is None:
            return f"No token was added before the {noun}: {self.reason}." if self.reason else None
        token_text = f"token {self.token} ({self.text!r})"
        if num_with_own == num_texts:
            subject = f"The {noun} begins" if num_texts == 1 else f"All {num_texts:,} {noun}s begin"
            return f"{subject} with {token_text} already: none was added."
        subject = f"The {noun} begins" if num_texts == 1 else f"Each {noun} begins"
        exception = f"; {pluralize(num_with_own, noun)} had it already" if num_with_own else ""
        return f"{subject} with {token_text}, which was added{exception} ({self.reason})."


def find_bos(path: Path, tokenizer: Any) -> BosInfo:
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
    config, special = (read_object_or_empty(path.with_name(name)) for name in (_CONFIG_FILE, _SPECIAL_TOKENS_FILE))
    add_bos = config.get("add_bos_token")
    if add_bos is False:
        return BosInfo(reason=f"{_CONFIG_FILE} has add_bos_token false")
    file_name, settings = (_SPECIAL_TOKENS_FILE, special) if "bos_token" not in config else (_CONFIG_FILE, config)
    if "bos_token" in settings and settings["bos_token"] is None:
        return BosInfo(reason=f"{file_name} has bos_token null")
    bos_token = _get_bos_token(settings, tokenizer)
    if add_bos is True and bos_token is not None:
        return _build_bos_info(bos_token, tokenizer, f"add_bos_token of {_CONFIG_FILE}")
    prefix_tokens = _list_prefix_tokens(tokenizer)
    if prefix_tokens:
        token = bos_token if bos_token is not None and bos_token in prefix_tokens else prefix_tokens[-1]
        return _build_bos_info(token, tokenizer, f"post-processor of {path.name}")
    opt_out_note = "" if add_bos is True else f'; "add_bos_token": false in {_CONFIG_FILE} leaves it out'
    if bos_token is not None:
        opt_out_note = opt_out_note.replace(f"in {file_name}", "there")
        return _build_bos_info(bos_token, tokenizer, f"bos_token of {file_name}{opt_out_note}")
    for name in _MODEL_SETTINGS:
        number = read_object_or_empty(path.with_name(name)).get("bos_token_id")
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < tokenizer.get_vocab_size():
            return _build_bos_info(number, tokenizer, f"bos_token_id of {name}{opt_out_note}")
    return BosInfo()


def _build_bos_info(token: int, tokenizer: Any, reason: str) -> BosInfo:
    return BosInfo(token=token, text=tokenizer.id_to_token(token) or "", reason=reason)


def _get_bos_token(settings: Mapping[str, Any], tokenizer: Any) -> int | None:
    """Return the id of the ``bos_token`` that is named, which may be written as an object."""
    bos_text = settings.get("bos_token")
    if isinstance(bos_text, dict):
        bos_text = bos_text.get("content")
    token = tokenizer.token_to_id(bos_text) if isinstance(bos_text, str) else None
    return None if token is None else int(token)


def _list_prefix_tokens(tokenizer: Any) -> Sequence[int]:
    """Return the special tokens that the post-processor puts before a text."""
    encoding = tokenizer.encode(_PROBE_TEXT, add_special_tokens=True)
    plain_ids = tokenizer.encode(_PROBE_TEXT, add_special_tokens=False).ids
    ids, mask = encoding.ids, encoding.special_tokens_mask
    length = next((index for index, special in enumerate(mask) if not special), 0)
    return ids[:length] if ids[length : length + len(plain_ids)] == plain_ids else ()
