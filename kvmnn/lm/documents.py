"""Documents: texts of plain, JSON-lines and Parquet files as the token ids that are fed and scored."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.packages import import_optional
from .._util.text import pluralize
from .._util.validation import validate_int
from ..errors import KvmnnError, SourceError, build_read_error
from ..files.schema import Record

LINE_SUFFIXES, ROW_SUFFIXES = (".jsonl", ".ndjson"), (".parquet",)
MAX_RECORD_BYTES = 64 << 20  # of one line or row
_BATCH_ROWS = 64


class TextRecord(NamedTuple):
    """One text with its line or row number, from 1; empty if the record has no text."""

    number: int
    text: str


def has_records(path: Path) -> bool:
    """Return whether a file contains several texts, by its suffix."""
    return path.suffix.lower() in (*LINE_SUFFIXES, *ROW_SUFFIXES)


def iter_records(path: Path, field: str) -> Iterator[TextRecord]:
    """Iterate lazily over the texts of a file that contains several."""
    return _iter_rows(path, field) if path.suffix.lower() in ROW_SUFFIXES else _iter_lines(path, field)


# -- JSON lines --------------------------------------------------------------------------------------------------------


def _iter_lines(path: Path, field: str) -> Iterator[TextRecord]:
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_RECORD_BYTES + 1):
                number += 1
                location = f"{path}, line {number}"
                if len(line) > MAX_RECORD_BYTES:
                    raise SourceError(f"{location}: has more than {MAX_RECORD_BYTES:,} bytes")
                if line.strip():
                    record = _parse_object(line, location, first=number == 1)
                    yield TextRecord(number, _get_text(record, field, location))
    except OSError as exc:
        raise build_read_error(path, exc) from exc


def _parse_object(line: bytes, location: str, *, first: bool) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as exc:
        raise SourceError(f"{location}: is not UTF-8: byte {exc.start} is 0x{exc.object[exc.start]:02x}") from None
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{location}: is not JSON: {' '.join(str(exc).split())[:200]}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{location}: found a {type(value).__name__}, expected a JSON object with a text")
    return value


def _get_text(record: dict[str, Any], field: str, location: str) -> str:
    if field not in record:
        raise SourceError(
            f"{location}: has no key {field!r}; {_format_names(list(record))}: name the key of the texts (--field)"
        )
    value = record[field]
    if value is not None and not isinstance(value, str):
        raise SourceError(f"{location}: {field!r} is a {type(value).__name__}: expected text")
    return _validate_text(value or "", location)


# -- Parquet -----------------------------------------------------------------------------------------------------------


def _iter_rows(path: Path, field: str) -> Iterator[TextRecord]:
    parquet, arrow = import_optional("pyarrow.parquet"), import_optional("pyarrow")
    read_errors = (OSError, ValueError, arrow.ArrowException)
    try:
        file = parquet.ParquetFile(path, memory_map=True)
    except read_errors as exc:
        raise _build_read_error(path, exc) from exc
    with file:
        _check_column(path, file.schema_arrow, field, arrow)
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=[field], use_threads=False)
        number = 0
        while True:
            try:
                batch = next(batches, None)
                values = [] if batch is None else batch.column(0).to_pylist()
            except read_errors as exc:
                raise _build_read_error(path, exc) from exc
            if batch is None:
                return
            for value in values:
                number += 1
                text = _validate_text(value or "", f"{path}, row {number}")
                if len(text) > MAX_RECORD_BYTES:
                    raise SourceError(f"{path}, row {number}: has more than {MAX_RECORD_BYTES:,} characters")
                yield TextRecord(number, text)


def _check_column(path: Path, schema: Any, field: str, arrow: Any) -> None:
    if field not in schema.names:
        raise SourceError(
            f"{path}: has no column {field!r}; {_format_names(schema.names)}: name the column of the texts (--field)"
        )
    column_type = schema.field(field).type
    value_type = column_type.value_type if arrow.types.is_dictionary(column_type) else column_type
    if not (arrow.types.is_string(value_type) or arrow.types.is_large_string(value_type)):
        raise SourceError(f"{path}: column {field!r} holds {column_type}: expected text")


def _build_read_error(path: Path, error: Exception) -> SourceError:
    if isinstance(error, OSError) and error.strerror:
        return SourceError(f"{path}: cannot be read: {error.strerror}")
    return SourceError(f"{path}: is not a Parquet file: {' '.join(str(error).split())[:200]}")


# -- both --------------------------------------------------------------------------------------------------------------


def _validate_text(text: str, location: str) -> str:
    """Return text that UTF-8 can encode; empty if it is blank."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise SourceError(f"{location}: character {exc.start} is half of a surrogate pair") from None
    return "" if text.isspace() else text


def _format_names(names: list[str]) -> str:
    names_text = ", ".join(repr(name) for name in names[:8]) + (" ..." if len(names) > 8 else "")
    return f"it has {names_text}" if names else "it has none at all"


Ids = npt.NDArray[np.int64]

_READ_BLOCK_BYTES = 1 << 20
_MIN_PREFIX_CHARACTERS = 1 << 20
_MAX_CHARACTERS_PER_TOKEN = 64

MAX_DOCUMENTS = 10_000  # texts that are read at once: their tokens stay in memory


class TextTokenizer(Protocol):
    """The part of `kvmnn.lm.tokenizer.Tokenizer` that documents need."""

    @property
    def bos(self) -> int | None: ...

    def encode(self, text: str) -> Ids: ...

    def decode(self, ids: Any) -> str: ...


@dataclass(frozen=True, eq=False)
class Document(Record):
    """One text, cut to the tokens that are scored."""

    json_keys = "name tokens=num_scored bytes=nbytes sha256"

    #: The file's name, with its line or row where it has many.
    name: str
    #: int64 ``[1 + tokens]``: the token that is fed first (bos, or the text's own first token where the model has
    #: none), then those that are scored.
    ids: Ids
    #: UTF-8 bytes of the scored tokens.
    nbytes: int
    #: SHA-256 of the whole text.
    sha256: str
    #: Whether the first id is the token that begins every text.
    begins_with_bos: bool = True
    #: More than `num_fed` where the text is shorter.
    requested_tokens: int = 0
    #: Tokens at the beginning that come from another run's cache. They are not scored, and neither is the one after
    #: them, as a cache has no logits. 0 for a text that is scored from its beginning.
    scored_from: int = 0
    #: Whether the text begins with bos itself, so that it was not added.
    has_own_bos: bool = False

    @property
    def num_fed(self) -> int:
        """Number of tokens that are fed: all but the last."""
        return len(self.ids) - 1

    @property
    def num_scored(self) -> int:
        """Number of tokens that are scored."""
        return self.num_fed - self.scored_from

    @property
    def own_ids(self) -> Ids:
        """Tokens of the text without bos, as the projects of the presets feed them."""
        return self.ids[1:] if self.begins_with_bos else self.ids


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Which texts of files and folders are read.

    Parameters
    ----------
    field
        Key or column of the texts, in files that contain many.
    samples
        Take this many texts, drawn without replacement from all there are; None takes all, at most `MAX_DOCUMENTS`.
    seed
        Seed of the draw.

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
            validate_int(self.samples, "samples", 1, MAX_DOCUMENTS)
        validate_int(self.seed, "seed", 0)


def read_documents(
    paths: Iterable[str | os.PathLike[str]],
    tokenizer: TextTokenizer,
    tokens: int,
    options: TextOptions | None = None,
    *,
    notes: list[str] | None = None,
) -> list[Document]:
    """Read the documents of files and folders in order, each under a unique name.

    Parameters
    ----------
    paths
        UTF-8 texts, ``.jsonl`` and ``.parquet`` files (`kvmnn.lm.documents`), and folders, of which all such files
        are taken by name. Records without text are left out.
    tokenizer, tokens
        As for `read_document`.
    options
        Which texts of the files are used.
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
    options, note_list = options or TextOptions(), [] if notes is None else notes
    files = list(_iter_files(paths))
    selected = None if options.samples is None else _draw_indices(files, options, note_list)
    documents: list[Document] = []
    used_names: set[str] = set()
    for index, (path, record) in enumerate(_iter_texts(files, options.field, note_list if selected is None else [])):
        if selected is not None and index not in selected:
            continue
        base_name = path.name if record is None else f"{path.name}:{record.number}"
        name, number = base_name, 1
        while name in used_names:
            number += 1
            name = f"{base_name}~{number}"
        used_names.add(name)
        if record is None:
            documents.append(read_document(path, tokenizer, tokens, name=name))
        else:
            location = f"{path}:{record.number}"
            documents.append(build_document_from_text(name, record.text, tokenizer, tokens, location=location))
        if selected is not None and len(documents) == len(selected):
            break
        if len(documents) > MAX_DOCUMENTS:
            raise SourceError(f"{path}: more than {MAX_DOCUMENTS:,} texts: expected --samples N, which draws N of them")
    return documents


def read_document(path: Path, tokenizer: TextTokenizer, tokens: int, *, name: str | None = None) -> Document:
    """Return the first `tokens` tokens of a UTF-8 file after the tokenizer's bos."""
    if has_records(path):
        raise SourceError(f"{path}: holds many texts: expected a UTF-8 text")
    # What follows these characters cannot reach the requested tokens.
    text = _read_text(path, _compute_max_characters(tokens))
    if not text.num_bytes:
        raise SourceError(f"{path}: is empty: expected text")
    return _build_document(str(path), name or path.name, text, tokenizer, tokens)


def build_document_from_text(
    name: str, text: str, tokenizer: TextTokenizer, tokens: int, *, location: str | None = None
) -> Document:
    """Build a document of the first `tokens` tokens of a text, after bos; raise as `read_document` does."""
    encoded_text, prefix = text.encode("utf-8"), text[: _compute_max_characters(tokens)]
    digest = hashlib.sha256(encoded_text).hexdigest()
    loaded_text = _LoadedText(prefix, len(encoded_text), digest, len(prefix) == len(text))
    return _build_document(location or name, name, loaded_text, tokenizer, tokens)


class _LoadedText(NamedTuple):
    """The first characters of a text, its bytes, its SHA-256, and whether these are all of its characters."""

    prefix: str
    num_bytes: int
    digest: str
    is_complete: bool


def _compute_max_characters(tokens: int) -> int:
    if tokens < 1:
        raise KvmnnError(f"tokens is {tokens}: expected at least 1")
    return max(_MIN_PREFIX_CHARACTERS, _MAX_CHARACTERS_PER_TOKEN * tokens)


def _build_document(location: str, name: str, text: _LoadedText, tokenizer: TextTokenizer, tokens: int) -> Document:
    text_ids = np.asarray(tokenizer.encode(text.prefix), np.int64)
    bos = tokenizer.bos
    has_own_bos = bos is not None and text_ids[:1].tolist() == [bos]
    is_added = bos is not None and not has_own_bos
    ids = np.concatenate([np.array([bos], np.int64), text_ids[:tokens]]) if is_added else text_ids[: tokens + 1]
    if len(ids) < 2:
        raise SourceError(
            f"{location}: has {pluralize(len(text_ids), 'token')}: expected at least {1 if is_added else 2}"
        )
    scored_ids = ids[1:]
    is_whole_text = text.is_complete and is_added and len(scored_ids) == len(text_ids)
    nbytes = text.num_bytes if is_whole_text else count_text_bytes(tokenizer, scored_ids)
    return Document(name, ids, nbytes, text.digest, bos is not None, tokens, has_own_bos=has_own_bos)


def _draw_indices(files: Sequence[Path], options: TextOptions, notes: list[str]) -> frozenset[int]:
    """Draw the indices of the texts to read, counted over all files."""
    num_texts = sum(1 for _ in _iter_texts(files, options.field, notes))
    num_requested = options.samples or 0
    if num_texts <= num_requested:
        if num_texts < num_requested:
            notes.append(f"{num_requested:,} texts were asked for, there are {num_texts:,}: all of them were taken.")
        return frozenset(range(num_texts))
    return frozenset(np.random.default_rng(options.seed).choice(num_texts, num_requested, replace=False).tolist())


def _iter_texts(files: Iterable[Path], field: str, notes: list[str]) -> Iterator[tuple[Path, TextRecord | None]]:
    """Iterate over all texts: the file, and the record if the file has several."""
    for path in files:
        if not has_records(path):
            yield path, None
            continue
        num_empty = num_texts = 0
        for record in iter_records(path, field):
            num_empty, num_texts = num_empty + (not record.text), num_texts + bool(record.text)
            if record.text:
                yield path, record
        if not num_texts:
            raise SourceError(f"{path}: has no text in {field!r}")
        if num_empty:
            notes.append(f"{path.name}: {pluralize(num_empty, 'record')} without text left out.")


def _read_text(path: Path, characters: int) -> _LoadedText:
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    parts: list[str] = []
    num_characters = num_bytes = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(_READ_BLOCK_BYTES):
                digest.update(block)
                text = _decode_block(path, decoder, block, num_bytes)
                num_bytes += len(block)
                if num_characters <= characters:
                    parts.append(text)
                    num_characters += len(text)
            _decode_block(path, decoder, b"", num_bytes)
    except OSError as exc:
        raise build_read_error(path, exc) from exc
    prefix = "".join(parts)[:characters]
    return _LoadedText(prefix, num_bytes, digest.hexdigest(), num_characters <= characters)


def _decode_block(path: Path, decoder: codecs.IncrementalDecoder, block: bytes, offset: int) -> str:
    """Decode the next block; the bytes of a character that the previous one cut precede it."""
    num_pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as exc:
        position = offset - num_pending + exc.start
        raise SourceError(f"{path}: is not UTF-8: byte {position} is 0x{exc.object[exc.start]:02x}") from None


def count_text_bytes(tokenizer: TextTokenizer, ids: Ids) -> int:
    """Return the UTF-8 bytes of tokens; a cut character counts 3 (its replacement), a special token 0."""
    return len(tokenizer.decode(ids).encode("utf-8", "surrogatepass"))


def _iter_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for raw_path in paths:
        path = Path(raw_path)
        if not path.is_dir():
            yield path
            continue
        suffixes = (".txt", *LINE_SUFFIXES, *ROW_SUFFIXES)
        try:
            files = sorted(entry for entry in path.iterdir() if entry.suffix.lower() in suffixes and entry.is_file())
        except OSError as exc:
            raise build_read_error(path, exc) from exc
        if not files:
            raise SourceError(f"{path}: has no *.txt, *.jsonl or *.parquet files")
        yield from files
