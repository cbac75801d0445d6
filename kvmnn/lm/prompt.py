"""Prompts as token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import KvmnnError, SourceError
from ..files.mapped import MappedFile

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

MAX_PROMPT_BYTES = 64 << 20
"""Of a file that holds a prompt."""


def read_prompt_file(path: str) -> str:
    """The text of a UTF-8 file, ``"-"`` for standard input.

    Raises
    ------
    SourceError
        For a file that cannot be read, is larger than `MAX_PROMPT_BYTES` or is not UTF-8.
    """
    file = MappedFile(path)
    if file.size > MAX_PROMPT_BYTES:
        raise SourceError(f"{file.label}: {file.size:,} bytes are too many for a prompt")
    return decode_utf8(file.read_head(file.size), file.label)


def decode_utf8(data: bytes, label: str) -> str:
    """UTF-8 bytes as text; `SourceError`, which begins with `label`, where they are none."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as exc:
        raise SourceError(f"{label}: is not UTF-8: byte {exc.start} is 0x{data[exc.start]:02x}") from None


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, after the token that begins every text where the model has one and the text does not begin
    with it already.

    Raises
    ------
    KvmnnError
        Where there is no token at all.
    """
    ids: list[int] = tokenizer.encode(text).tolist()
    if tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids.insert(0, tokenizer.bos)
    if not ids:
        raise KvmnnError("the text has no tokens, and the model has none that begins a text")
    return ids
