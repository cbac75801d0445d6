"""Texts as the token ids that are fed and scored."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import KvmnnError, SourceError

Ids = npt.NDArray[np.int64]

_BLOCK_BYTES = 1 << 20
_PREFIX_CHARACTERS = 1 << 20
_CHARACTERS_A_TOKEN = 64


class TextTokenizer(Protocol):
    """What is needed of `kvmnn.lm.tokenizer.Tokenizer`."""

    @property
    def bos(self) -> int | None:
        """The token that every text begins with, or None."""

    def encode(self, text: str) -> Ids:
        """Token ids without special ones."""

    def decode(self, ids: Any) -> str:
        """Text of token ids."""


@dataclass(frozen=True, eq=False)
class Document:
    """One text, cut to the tokens that are scored.

    Parameters
    ----------
    name
        The file's name.
    ids
        int64 ``[1 + tokens]``: the token that is fed first (bos, or the text's own first token where the model has
        none), then those that are scored.
    nbytes
        UTF-8 bytes of the scored tokens.
    sha256
        Of all of the file.
    begins_with_bos
        Whether the first id is not of the text.
    asked
        Tokens that were asked for; more than `tokens` where the text is shorter.
    """

    name: str
    ids: Ids
    nbytes: int
    sha256: str
    begins_with_bos: bool = True
    asked: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that are scored."""
        return len(self.ids) - 1

    @property
    def own_ids(self) -> Ids:
        """The text's tokens without bos, which is what the projects of the presets feed."""
        return self.ids[1:] if self.begins_with_bos else self.ids

    def to_dict(self) -> dict[str, Any]:
        """What the results document says of it."""
        return {"name": self.name, "tokens": self.tokens, "bytes": self.nbytes, "sha256": self.sha256}


def read_documents(paths: Iterable[str | os.PathLike[str]], tokenizer: TextTokenizer, tokens: int) -> list[Document]:
    """The documents of files and folders (all their ``*.txt``, by name), each under a name of its own.

    Raises
    ------
    SourceError
        For a file that is empty, not UTF-8 or not there, and for a folder without texts.
    """
    documents: list[Document] = []
    taken: set[str] = set()
    for path in _files(paths):
        name, number = path.name, 1
        while name in taken:
            number += 1
            name = f"{path.name}~{number}"
        taken.add(name)
        documents.append(read_document(path, tokenizer, tokens, name=name))
    return documents


def read_document(path: Path, tokenizer: TextTokenizer, tokens: int, *, name: str | None = None) -> Document:
    """The first `tokens` tokens of a UTF-8 file behind the tokenizer's bos.

    Of a long file only its first 64 characters a token, at least 2**20, are tokenized: what lies behind cannot reach
    the tokens asked for.
    """
    if tokens < 1:
        raise KvmnnError(f"tokens is {tokens}: expected at least 1")
    prefix, length, digest, complete = _read(path, max(_PREFIX_CHARACTERS, _CHARACTERS_A_TOKEN * tokens))
    if not length:
        raise SourceError(f"{path}: is empty: expected text")
    own = np.asarray(tokenizer.encode(prefix), np.int64)
    bos = tokenizer.bos
    ids = own[: tokens + 1] if bos is None else np.concatenate([np.array([bos], np.int64), own[:tokens]])
    if len(ids) < 2:
        raise SourceError(f"{path}: has {len(own)} tokens: expected at least {2 if bos is None else 1}")
    scored = ids[1:]
    everything = complete and bos is not None and len(scored) == len(own)
    nbytes = length if everything else _bytes_of(tokenizer, scored)
    return Document(name or path.name, ids, nbytes, digest, bos is not None, tokens)


def _read(path: Path, characters: int) -> tuple[str, int, str, bool]:
    """The first characters of a UTF-8 file, its bytes, its SHA-256, and whether these are all of its characters."""
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    parts: list[str] = []
    have = length = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                text = _decoded(path, decoder, block, length)
                length += len(block)
                if have <= characters:
                    parts.append(text)
                    have += len(text)
            _decoded(path, decoder, b"", length)
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    prefix = "".join(parts)[:characters]
    return prefix, length, digest.hexdigest(), have <= characters


def _decoded(path: Path, decoder: codecs.IncrementalDecoder, block: bytes, before: int) -> str:
    """A further block; what was pending of a character lies before it."""
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as exc:
        where = before - pending + exc.start
        raise SourceError(f"{path}: is not UTF-8: byte {where} is 0x{exc.object[exc.start]:02x}") from None


def _bytes_of(tokenizer: TextTokenizer, ids: Ids) -> int:
    """UTF-8 bytes of tokens. A character that the cut leaves incomplete counts by its replacement, three bytes; special
    tokens, where the text spells one out, count nothing."""
    return len(tokenizer.decode(ids).encode("utf-8", "surrogatepass"))


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            yield path
            continue
        found = sorted(entry for entry in path.glob("*.txt") if entry.is_file())
        if not found:
            raise SourceError(f"{path}: has no *.txt files")
        yield from found
