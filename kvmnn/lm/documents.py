"""Texts as the token ids that are fed and scored."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..checks import whole
from ..errors import KvmnnError, SourceError
from ..text import count
from .text_records import LINES, ROWS, Record, holds_records, records

Ids = npt.NDArray[np.int64]

_BLOCK_BYTES = 1 << 20
_PREFIX_CHARACTERS = 1 << 20
_CHARACTERS_A_TOKEN = 64

MAX_DOCUMENTS = 10_000
"""Texts that are taken at once: their tokens are held."""


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
        The file's name, with its line or row where it holds many.
    ids
        int64 ``[1 + tokens]``: the token that is fed first (bos, or the text's own first token where the model has
        none), then those that are scored.
    nbytes
        UTF-8 bytes of the scored tokens.
    sha256
        Of all of the text.
    begins_with_bos
        Whether the first id is the token that begins every text.
    asked
        Tokens that were asked for; more than `fed` where the text is shorter.
    begin
        Tokens that another run's cache begins the text with. They are not scored, and neither is the one behind them,
        as a cache holds no logits. 0 for a text that is scored from its beginning.
    has_own_bos
        Whether the text begins with that token itself, so that it was not added.
    """

    name: str
    ids: Ids
    nbytes: int
    sha256: str
    begins_with_bos: bool = True
    asked: int = 0
    begin: int = 0
    has_own_bos: bool = False

    @property
    def fed(self) -> int:
        """Tokens that are fed: all but the last."""
        return len(self.ids) - 1

    @property
    def tokens(self) -> int:
        """Tokens that are scored."""
        return self.fed - self.begin

    @property
    def own_ids(self) -> Ids:
        """The text's tokens without bos, which is what the projects of the presets feed."""
        return self.ids[1:] if self.begins_with_bos else self.ids

    def to_dict(self) -> dict[str, Any]:
        """What the results document says of it."""
        return {"name": self.name, "tokens": self.tokens, "bytes": self.nbytes, "sha256": self.sha256}


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Which texts are taken of files and folders.

    Parameters
    ----------
    field
        Key or column of the texts, in files that hold many.
    samples
        Take this many texts, drawn without replacement from all there are; None takes all, at most `MAX_DOCUMENTS`.
    seed
        Of the draw.

    Raises
    ------
    KvmnnError
        For `samples` outside 1 to `MAX_DOCUMENTS` and a seed below 0.
    """

    field: str = "text"
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples is not None:
            whole(self.samples, "samples", 1, MAX_DOCUMENTS)
        whole(self.seed, "seed", 0)


def read_documents(
    paths: Iterable[str | os.PathLike[str]],
    tokenizer: TextTokenizer,
    tokens: int,
    options: TextOptions | None = None,
    *,
    notes: list[str] | None = None,
) -> list[Document]:
    """The documents of files and folders, each under a name of its own, in the order in which they lie there.

    Parameters
    ----------
    paths
        UTF-8 texts, ``.jsonl`` and ``.parquet`` files (`kvmnn.lm.text_records`), and folders, of which all such files
        are taken by name. Records without text are left out.
    tokenizer, tokens
        As for `read_document`.
    options
        Which texts.
    notes
        Gets a sentence for whatever was left out.

    Raises
    ------
    MissingDependencyError
        For Parquet where pyarrow is not installed.
    SourceError
        For a file that is empty, not UTF-8, damaged or not there, for a line or row that is no record, for a folder
        without texts, and for more than `MAX_DOCUMENTS` texts.
    """
    options, said = options or TextOptions(), [] if notes is None else notes
    files = list(_files(paths))
    chosen = None if options.samples is None else _drawn(files, options, said)
    documents: list[Document] = []
    taken: set[str] = set()
    for index, (path, record) in enumerate(_texts(files, options.field, said if chosen is None else [])):
        if chosen is not None and index not in chosen:
            continue
        name = _own_name(path.name if record is None else f"{path.name}:{record.number}", taken)
        if record is None:
            documents.append(read_document(path, tokenizer, tokens, name=name))
        else:
            documents.append(_of_record(path, record, tokenizer, tokens, name))
        if chosen is not None and len(documents) == len(chosen):
            break
        if len(documents) > MAX_DOCUMENTS:
            raise SourceError(f"{path}: more than {MAX_DOCUMENTS:,} texts: expected --samples N, which draws N of them")
    return documents


def read_document(path: Path, tokenizer: TextTokenizer, tokens: int, *, name: str | None = None) -> Document:
    """The first `tokens` tokens of a UTF-8 file behind the tokenizer's bos.

    Of a long file only its first 64 characters a token, at least 2**20, are tokenized: what lies behind cannot reach
    the tokens asked for.

    Raises
    ------
    SourceError
        For a file that is empty, not UTF-8 or not there, and for one of many texts.
    """
    if holds_records(path):
        raise SourceError(f"{path}: holds many texts: expected a UTF-8 text")
    text = _read(path, _characters(tokens))
    if not text.length:
        raise SourceError(f"{path}: is empty: expected text")
    return _document(str(path), name or path.name, text, tokenizer, tokens)


def document_of_text(name: str, text: str, tokenizer: TextTokenizer, tokens: int) -> Document:
    """Return the first `tokens` tokens of a text that is in no file, after the tokenizer's bos; errors of an empty one
    as of `read_document`."""
    words = text.encode("utf-8")
    prefix = text[: _characters(tokens)]
    whole = _Text(prefix, len(words), hashlib.sha256(words).hexdigest(), len(prefix) == len(text))
    return _document(name, name, whole, tokenizer, tokens)


class _Text(NamedTuple):
    """The first characters of a text, its bytes, its SHA-256, and whether these are all of its characters."""

    prefix: str
    length: int
    digest: str
    complete: bool


def _characters(tokens: int) -> int:
    if tokens < 1:
        raise KvmnnError(f"tokens is {tokens}: expected at least 1")
    return max(_PREFIX_CHARACTERS, _CHARACTERS_A_TOKEN * tokens)


def _of_record(path: Path, record: Record, tokenizer: TextTokenizer, tokens: int, name: str) -> Document:
    words, characters = record.text.encode("utf-8"), _characters(tokens)
    text = _Text(
        record.text[:characters], len(words), hashlib.sha256(words).hexdigest(), len(record.text) <= characters
    )
    return _document(f"{path}:{record.number}", name, text, tokenizer, tokens)


def _document(where: str, name: str, text: _Text, tokenizer: TextTokenizer, tokens: int) -> Document:
    own = np.asarray(tokenizer.encode(text.prefix), np.int64)
    bos = tokenizer.bos
    has_own_bos = bos is not None and own[:1].tolist() == [bos]
    is_added = bos is not None and not has_own_bos
    ids = np.concatenate([np.array([bos], np.int64), own[:tokens]]) if is_added else own[: tokens + 1]
    if len(ids) < 2:
        raise SourceError(f"{where}: has {len(own)} tokens: expected at least {1 if is_added else 2}")
    scored = ids[1:]
    everything = text.complete and is_added and len(scored) == len(own)
    nbytes = text.length if everything else bytes_of(tokenizer, scored)
    return Document(name, ids, nbytes, text.digest, bos is not None, tokens, has_own_bos=has_own_bos)


def _drawn(files: Sequence[Path], options: TextOptions, notes: list[str]) -> frozenset[int]:
    """Which of all texts are taken, counted through all files."""
    there = sum(1 for _ in _texts(files, options.field, notes))
    asked = options.samples or 0
    if there <= asked:
        if there < asked:
            notes.append(f"{asked:,} texts were asked for, there are {there:,}: all of them were taken.")
        return frozenset(range(there))
    return frozenset(np.random.default_rng(options.seed).choice(there, asked, replace=False).tolist())


def _texts(files: Iterable[Path], field: str, notes: list[str]) -> Iterator[tuple[Path, Record | None]]:
    """Every text: its file, and its record where the file holds many."""
    for path in files:
        if not holds_records(path):
            yield path, None
            continue
        empty = there = 0
        for record in records(path, field):
            empty, there = empty + (not record.text), there + bool(record.text)
            if record.text:
                yield path, record
        if not there:
            raise SourceError(f"{path}: has no text in {field!r}")
        if empty:
            notes.append(f"{path.name}: {count(empty, 'record')} without text left out.")


def _own_name(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}~{number}"
    taken.add(name)
    return name


def _read(path: Path, characters: int) -> _Text:
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
    return _Text(prefix, length, digest.hexdigest(), have <= characters)


def _decoded(path: Path, decoder: codecs.IncrementalDecoder, block: bytes, before: int) -> str:
    """A further block; what was pending of a character lies before it."""
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as exc:
        where = before - pending + exc.start
        raise SourceError(f"{path}: is not UTF-8: byte {where} is 0x{exc.object[exc.start]:02x}") from None


def bytes_of(tokenizer: TextTokenizer, ids: Ids) -> int:
    """UTF-8 bytes of tokens. A character that the cut leaves incomplete counts by its replacement, three bytes; special
    tokens, where the text spells one out, count nothing."""
    return len(tokenizer.decode(ids).encode("utf-8", "surrogatepass"))


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            yield path
            continue
        suffixes = (".txt", *LINES, *ROWS)
        try:
            found = sorted(entry for entry in path.iterdir() if entry.suffix.lower() in suffixes and entry.is_file())
        except OSError as exc:
            raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
        if not found:
            raise SourceError(f"{path}: has no *.txt, *.jsonl or *.parquet files")
        yield from found
