"""Traces of requests: those that Mooncake and Bailian publish, kvmnn's own, and plain token ids.

A trace names the contents of a request by symbols: one for each token, or one for a block of tokens (`hash_ids`).
"""

from __future__ import annotations

import io
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._util.dataclass import dataclass
from ..._util.patterns import declare_pattern
from ..._util.text import escape_control, pluralize
from ..._util.validation import repr_short
from ...errors import SourceError
from ...files.mapped_file import MappedFile
from ..namespace import MAX_TOKENS
from ._kernel import number_prefixes

MAX_LINE_BYTES = 64 << 20
MAX_REQUESTS = 1 << 28
_MAX_SYMBOL_TOKENS = 1 << 16
MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
_PLAIN_IDS_REGEX = declare_pattern(r"[\d\s,]+")
_MAX_SYMBOL = 0xFFFFFFFF
_READ_BYTES = 1 << 18


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """Requests in the order in which they arrived."""

    #: Name of the file in messages.
    label: str
    #: ``"mooncake"``, ``"bailian"``, ``"kvmnn"`` or ``"tokens"``.
    format: str
    #: Tokens that a symbol stands for; the last symbol of a request may stand for fewer.
    symbol_tokens: int
    #: Symbols of all requests.
    symbols: npt.NDArray[np.uint32]
    #: Number of symbols up to the end of each request.
    ends: npt.NDArray[np.int64]
    #: Input tokens of each request, and how many of them have symbols.
    tokens: npt.NDArray[np.int64]
    named_tokens: npt.NDArray[np.int64]


class _NeedsNumbering(Exception):
    """The ids are no 32-bit numbers: they are numbered in the order of their first use."""


def read_trace(path: str | os.PathLike[str], symbol_tokens: int | None = None) -> RequestTrace:
    """Read a trace: a JSON document for each request, one a line.

    Parameters
    ----------
    path
        Lines of one of these kinds: ``{"timestamp", "input_length", "output_length", "hash_ids"}`` (Mooncake: a hash
        for 512 tokens), the same with ``chat_id``, ``parent_chat_id``, ``type`` and ``turn`` (Bailian: 16 tokens), the
        same with ``block_tokens`` (kvmnn), ``{"token_ids": [...]}``, or ``[1, 2, 3]`` and ``1 2 3``. A request has a
        hash for each block, or for each full block: then the tokens after these are new in each request.
        ``"-"`` is standard input.
    symbol_tokens
        Tokens that a hash stands for; None for what the format says.

    Raises
    ------
    SourceError
        If a line is no request of the format of the first line, or has more or fewer hashes than its input has
        blocks, or the trace is empty or cannot be read.
    """
    file = MappedFile(path)
    try:
        return _read_requests(file, symbol_tokens, None)
    except _NeedsNumbering:
        return _read_requests(file, symbol_tokens, {})


def _read_requests(file: MappedFile, symbol_tokens: int | None, numbering: dict[int | str, int] | None) -> RequestTrace:
    label = file.label
    symbols, counts, tokens = array("I"), array("q"), array("q")
    trace_format, declared_tokens = "", 0
    for number, line in _iter_lines(file):
        where = f"{label}: line {number}"
        document = _parse_line(line, where)
        if not trace_format:
            trace_format, declared_tokens = _detect_format(document, where)
            symbol_tokens = declared_tokens if symbol_tokens is None or trace_format == "tokens" else symbol_tokens
        if isinstance(document, list) and trace_format != "tokens":
            raise SourceError(f"{where}: expected a request with hash_ids, as on the first line, found token ids")
        ids = document if isinstance(document, list) else document.get(_ID_KEYS[trace_format])
        if not isinstance(ids, list):
            raise SourceError(f"{where}: expected a list {_ID_KEYS[trace_format]!r}, found {repr_short(ids)}")
        if trace_format == "tokens" and not 1 <= len(ids) <= MAX_TOKENS:
            raise SourceError(f"{where}: expected 1 to {MAX_TOKENS:,} token ids, found {len(ids):,}")
        length = len(ids)
        if isinstance(document, dict) and trace_format != "tokens":
            declared_length = document.get("input_length")
            if type(declared_length) is not int or declared_length < 0:
                raise SourceError(
                    f"{where}: input_length is {repr_short(declared_length)}: expected a number of tokens"
                )
            block_tokens = document.get("block_tokens", declared_tokens)
            if block_tokens != declared_tokens:
                raise SourceError(
                    f"{where}: block_tokens is {repr_short(block_tokens)}: expected {declared_tokens}, as on the first "
                    "line"
                )
            assert symbol_tokens is not None
            length = declared_length
            _check_num_hashes(len(ids), length, symbol_tokens, where)
        try:
            symbols.extend(array("I", ids) if numbering is None else _number_ids(ids, numbering, where))
        except (OverflowError, TypeError):
            if trace_format == "tokens":
                raise SourceError(f"{where}: expected token ids from 0 to {_MAX_SYMBOL}") from None
            raise _NeedsNumbering from None
        counts.append(len(ids))
        tokens.append(length)
    if not trace_format or symbol_tokens is None:
        raise SourceError(f"{label}: has no requests")
    input_tokens = np.frombuffer(tokens, np.int64)
    return RequestTrace(
        label=label,
        format=trace_format,
        symbol_tokens=symbol_tokens,
        symbols=np.frombuffer(symbols, np.uint32) if symbols else np.empty(0, np.uint32),
        ends=np.fromiter(accumulate(counts), np.int64, len(counts)),
        tokens=input_tokens,
        named_tokens=np.minimum(input_tokens, np.frombuffer(counts, np.int64) * symbol_tokens),
    )


_ID_KEYS = {"mooncake": "hash_ids", "bailian": "hash_ids", "kvmnn": "hash_ids", "tokens": "token_ids"}


def _check_num_hashes(num_hashes: int, num_tokens: int, symbol_tokens: int, where: str) -> None:
    """Raise `SourceError` unless there is a hash for each block of the input, or for each full block."""
    num_full_blocks, num_blocks = num_tokens // symbol_tokens, -(-num_tokens // symbol_tokens)
    if num_full_blocks <= num_hashes <= num_blocks:
        return
    counts_text = f"{num_blocks:,}" if num_full_blocks == num_blocks else f"{num_full_blocks:,} or {num_blocks:,}"
    message = (
        f"{where}: expected {counts_text} {'hash' if counts_text == '1' else 'hashes'} for "
        f"{pluralize(num_tokens, 'token')} ({symbol_tokens:,} a hash), found {num_hashes:,}"
    )
    block_tokens = _infer_block_tokens(num_hashes, num_tokens)
    raise SourceError(message if block_tokens is None else f"{message}: block_tokens {block_tokens} would fit")


def _infer_block_tokens(num_hashes: int, num_tokens: int) -> int | None:
    """Return the tokens of a block that give so many blocks, a power of two if one does; None if no number does."""
    if not 0 < num_hashes <= num_tokens:
        return None
    min_tokens = -(-num_tokens // num_hashes)
    for block_tokens in (1 << (min_tokens - 1).bit_length(), min_tokens):
        if block_tokens <= _MAX_SYMBOL_TOKENS and -(-num_tokens // block_tokens) == num_hashes:
            return block_tokens
    return None


class _MappedStream(io.RawIOBase):
    """The bytes of a mapped file as a stream."""

    def __init__(self, file: MappedFile) -> None:
        super().__init__()
        self._file = file
        self._offset = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        nbytes = min(len(buffer), self._file.size - self._offset)
        if nbytes:
            buffer[:nbytes] = self._file.view(self._offset, nbytes).data
            self._offset += nbytes
        return nbytes


def _iter_lines(file: MappedFile) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not empty."""
    label = file.label
    buffered = io.BufferedReader(_MappedStream(file), _READ_BYTES)
    with io.TextIOWrapper(buffered, encoding="utf-8", errors="replace") as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise SourceError(f"{label}: line {number} has more than {MAX_LINE_BYTES:,} characters")
            if number > MAX_REQUESTS:
                raise SourceError(f"{label}: has more than {MAX_REQUESTS:,} lines")
            if text := line.strip():
                yield number, text


def _parse_line(line: str, where: str) -> dict[str, Any] | list[Any]:
    if _PLAIN_IDS_REGEX.fullmatch(line) is not None:
        line = f"[{','.join(line.replace(',', ' ').split())}]"
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: is no JSON: {error}") from None
    if not isinstance(document, dict | list):
        raise SourceError(f"{where}: expected an object or a list of token ids, found {repr_short(document)}")
    return document


def _detect_format(document: dict[str, Any] | list[Any], where: str) -> tuple[str, int]:
    """Return the format of a trace and the tokens of a symbol, by its first line."""
    if isinstance(document, list) or "token_ids" in document:
        return "tokens", 1
    if "hash_ids" not in document:
        key_text = escape_control(", ".join(document)[:100]) or "nothing"
        raise SourceError(f"{where}: expected hash_ids or token_ids, found {key_text}")
    if "block_tokens" in document:
        block_tokens = document["block_tokens"]
        if type(block_tokens) is not int or not 1 <= block_tokens <= _MAX_SYMBOL_TOKENS:
            raise SourceError(
                f"{where}: block_tokens is {repr_short(block_tokens)}: expected 1 to {_MAX_SYMBOL_TOKENS}"
            )
        return "kvmnn", block_tokens
    return ("bailian", BAILIAN_BLOCK_TOKENS) if "chat_id" in document else ("mooncake", MOONCAKE_BLOCK_TOKENS)


def _number_ids(ids: Iterable[Any], numbering: dict[int | str, int], where: str) -> array[int]:
    numbers = array("I")
    for value in ids:
        if type(value) not in (int, str):
            raise SourceError(f"{where}: a hash is {repr_short(value)}: expected a number or a text")
        numbers.append(numbering.setdefault(value, len(numbering)))
    return numbers


@dataclass(frozen=True, eq=False)
class BlockTrace:
    """The requests of a trace as keys of blocks: equal keys mean that all tokens up to the end of a block are equal."""

    #: The trace.
    trace: RequestTrace
    #: Tokens of a block.
    block_tokens: int
    #: Keys of the blocks of all requests, a partial block at the end included.
    keys: npt.NDArray[np.int64]
    #: First key of each request, and the end.
    begins: npt.NDArray[np.int64]
    #: Symbols of each block by its key, as big-endian bytes; empty if each block is one symbol, which has no parts.
    chunks: list[bytes]

    @property
    def num_keys(self) -> int:
        """Number of different keys."""
        return int(self.keys.max()) + 1 if self.keys.size else 0

    def count_reusable_tokens(self) -> int:
        """Return the tokens in blocks that an earlier request had: a store without limit finds at least these."""
        _, first_indices = np.unique(self.keys, return_index=True)
        sizes = np.full(self.keys.size, self.block_tokens, np.int64)
        counts = np.diff(self.begins)
        has_keys = counts > 0
        last_sizes = self.trace.named_tokens - (counts - 1) * self.block_tokens
        sizes[self.begins[1:][has_keys] - 1] = last_sizes[has_keys]
        return int(sizes.sum() - sizes[first_indices].sum())


def split_into_blocks(trace: RequestTrace, block_tokens: int) -> BlockTrace:
    """Split the requests of a trace into blocks of at least `block_tokens`, whole symbols each."""
    symbols_per_block = max(1, block_tokens // trace.symbol_tokens)
    if symbols_per_block == 1:
        begin_indices = np.concatenate([np.zeros(1, np.int64), trace.ends])
        return BlockTrace(trace, trace.symbol_tokens, number_prefixes(trace.symbols, trace.ends), begin_indices, [])
    begins = [0]
    keys = array("q")
    number_by_child: dict[tuple[int, bytes], int] = {}
    chunks: list[bytes] = []
    data = trace.symbols.astype(">u4").tobytes()
    step = 4 * symbols_per_block
    begin = 0
    for end in (4 * trace.ends).tolist():
        parent = 0
        for offset in range(begin, end, step):
            chunk = data[offset : min(offset + step, end)]
            key = number_by_child.get((parent, chunk))
            if key is None:
                number_by_child[parent, chunk] = key = len(number_by_child) + 1
                chunks.append(chunk)
            parent = key
            keys.append(key)
        begins.append(len(keys))
        begin = end
    flat = np.frombuffer(keys, np.int64) - 1 if keys else np.empty(0, np.int64)
    return BlockTrace(trace, symbols_per_block * trace.symbol_tokens, flat, np.array(begins, np.int64), chunks)
