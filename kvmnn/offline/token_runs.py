"""Tokens in a row: tensors ``[token, kv_head, head_dim]`` of 16-bit or 32-bit words, read in runs of complete tokens.

What lies in files is mapped or read only while it is used; where that is asked for fp32 words are rounded on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ..arrays.layers import LayerArray
from ..arrays.named_array import Piece
from ..errors import SourceError
from ..files.changes import FileState, note
from ..files.mapped import MappedFile

RUN_BYTES = 1 << 20
"""Bytes of a run of several tokens."""

_MAX_READ = 256 << 10  # larger files are mapped


class Tensor(Protocol):
    """K or V of one dump."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(tokens, kv_heads, head_dim)``."""

    @property
    def tokens(self) -> int:
        """Tokens by its metadata."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's words as they are measured."""

    @property
    def word_bytes(self) -> int:
        """Bytes of a word as it is measured: 2 or 4."""

    @property
    def width(self) -> int:
        """Bytes of a word as it is stored: 2 or 4."""

    def is_complete(self) -> bool:
        """Whether there are as many bytes as the tokens take."""

    def stored_runs(self, tokens: int) -> Iterator[Piece]:
        """All tokens as the words that are stored, `tokens` at a time, the last run shorter."""

    def runs(self, tokens: int) -> Iterator[Piece]:
        """The same as little-endian words of `word_bytes` bytes."""


class FileTensor:
    """The words in a dump's binary file.

    Parameters
    ----------
    file
        What the file is.
    shape
        ``(tokens, kv_heads, head_dim)`` as the metadata has it.
    width
        Bytes of a word: 2 or 4 (fp32).
    to_fp16
        Round words of 4 bytes: to nearest, ties to even, too large to infinity.
    """

    def __init__(self, file: FileState, shape: tuple[int, int, int], width: int, *, to_fp16: bool = False) -> None:
        self.path = Path(file.path)
        self.width = width
        self.word_bytes = 2 if to_fp16 else width
        self.found = file.size
        self._file = file
        self.shape = shape
        self.tokens, heads, dims = shape
        self.token_bytes = self.word_bytes * heads * dims

    def is_complete(self) -> bool:
        return self.found == self.tokens * stored_token_bytes(self)

    def stored_runs(self, tokens: int) -> Iterator[Piece]:
        return self.raw_runs(tokens * stored_token_bytes(self))

    def runs(self, tokens: int) -> Iterator[Piece]:
        for run in self.stored_runs(tokens):
            yield run if self.width == self.word_bytes else rounded(run)

    def raw_runs(self, step: int) -> Iterator[Piece]:
        """The file's own bytes, `step` at a time.

        Raises
        ------
        SourceError
            When it cannot be read, or changed.
        """
        if self.found > _MAX_READ:
            file = MappedFile(self.path, expected=self._file)
            yield from file.runs(0, file.size, step)
            return
        try:
            data = np.frombuffer(self.path.read_bytes(), np.uint8)
        except OSError as exc:
            raise SourceError(f"{self.path}: cannot be read: {exc.strerror}") from exc
        note(self._file)
        self._file.check()
        for start in range(0, data.size, step):
            yield data[start : start + step]


class ArrayTensor:
    """K or V of a layer of any source; bf16 words stay as they are.

    An array with the heads first is put in order run by run, which takes all of it: as a view where its file is mapped,
    else in memory. With `to_fp16` fp32 words are rounded.
    """

    def __init__(self, array: LayerArray, *, to_fp16: bool = False) -> None:
        self.array = array
        self.width = array.array.word_bytes
        self.word_bytes = 2 if to_fp16 else self.width
        heads, self.tokens, dims = array.geometry
        self.shape = (self.tokens, heads, dims)
        self.token_bytes = self.word_bytes * heads * dims

    def is_complete(self) -> bool:
        return True

    def stored_runs(self, tokens: int) -> Iterator[Piece]:
        if self.array.token_major:
            return self.array.array.pieces(tokens * stored_token_bytes(self))
        return self._turned(tokens, self.width)

    def runs(self, tokens: int) -> Iterator[Piece]:
        for run in self.stored_runs(tokens):
            yield run if self.width == self.word_bytes else rounded(run)

    def _turned(self, tokens: int, width: int) -> Iterator[Piece]:
        heads, count, dims = self.array.geometry
        for data in self.array.array.pieces():
            words = data.view(f"<u{width}").reshape(heads, count, dims)
            for start in range(0, count, tokens):
                turned = np.ascontiguousarray(words[:, start : start + tokens].transpose(1, 0, 2))
                yield turned.reshape(-1).view(np.uint8)


class NoTensor:
    """What latent attention stores as V: nothing."""

    def __init__(self, keys: Tensor) -> None:
        self.tokens, self.width, self.word_bytes = keys.tokens, keys.width, keys.word_bytes
        self.shape = (self.tokens, 0, 0)
        self.token_bytes = 0

    def is_complete(self) -> bool:
        return True

    def stored_runs(self, tokens: int) -> Iterator[Piece]:
        return iter(())

    runs = stored_runs


def stored_token_bytes(tensor: Tensor) -> int:
    """Return the bytes of a token's words as they are stored."""
    return tensor.token_bytes // tensor.word_bytes * tensor.width


def rounded(run: Piece) -> Piece:
    """fp32 words as fp16 words: to nearest, ties to even, too large to infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        return run.view("<f4").astype("<f2").view(np.uint8)


class RowReader:
    """The tokens of several tensors one after the other, as they are measured or as they are stored.

    Parameters
    ----------
    tensors
        Of one geometry and one size of words.
    as_stored
        Take the words as they are stored; all tensors have the same width then.
    """

    def __init__(self, tensors: Sequence[Tensor], *, as_stored: bool = False) -> None:
        self._token_bytes = stored_token_bytes(tensors[0]) if as_stored else tensors[0].token_bytes
        step = max(1, RUN_BYTES // self._token_bytes)
        runs = (tensor.stored_runs(step) if as_stored else tensor.runs(step) for tensor in tensors)
        self._runs = (run for several in runs for run in several)
        self._rest: Piece = np.empty(0, np.uint8)
        self._left = sum(tensor.tokens for tensor in tensors) * self._token_bytes

    def take(self, tokens: int) -> Iterator[Piece]:
        """The next `tokens` tokens, in runs as they come.

        Raises
        ------
        SourceError
            When an input is damaged, cannot be read, or changed.
        """
        left = tokens * self._token_bytes
        self._left -= left
        while left:
            if not self._rest.size:
                self._rest = next(self._runs)
            run, self._rest = self._rest[:left], self._rest[left:]
            left -= run.size
            yield run
            del run
        if not self._left:
            for _ in self._runs:  # checksums and hashes are compared behind the last byte, when more is asked for
                pass

    def take_run(self, tokens: int) -> Piece:
        """The next `tokens` tokens in one run, copied where they lie in several."""
        runs = list(self.take(tokens))
        return runs[0] if len(runs) == 1 else np.concatenate(runs)
