"""Read tensors ``[token, kv_head, head_dim]`` of 16-bit or 32-bit elements in chunks of whole tokens.

Files are mapped or read only while they are used; fp32 elements can be rounded on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ..arrays.array import Chunk
from ..arrays.layers import LayerArray
from ..errors import build_read_error
from ..files.change_detection import FileState, record_input
from ..files.mapped_file import MappedFile

CHUNK_BYTES = 1 << 20
"""Bytes of a run of several tokens."""

_MAX_READ_BYTES = 256 << 10  # larger files are mapped


class DumpTensor(Protocol):
    """K or V of one dump."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(tokens, kv_heads, head_dim)``."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the metadata."""

    @property
    def token_bytes(self) -> int:
        """Number of bytes of one token as measured."""

    @property
    def measured_itemsize(self) -> int:
        """Number of bytes of an element as measured: 2 or 4."""

    @property
    def stored_itemsize(self) -> int:
        """Number of bytes of an element as stored: 2 or 4."""

    def is_complete(self) -> bool:
        """Return whether the data has the size of the tokens."""

    def iter_stored_chunks(self, tokens: int) -> Iterator[Chunk]:
        """Iterate over all elements as stored, `tokens` tokens at a time; the last chunk may be shorter."""

    def iter_chunks(self, tokens: int) -> Iterator[Chunk]:
        """Iterate over all elements, little-endian and of `measured_itemsize` bytes, `tokens` tokens at a time."""


class FileTensor:
    """The elements in a dump's binary file.

    Parameters
    ----------
    file
        State of the file.
    shape
        ``(tokens, kv_heads, head_dim)`` as the metadata has it.
    stored_itemsize
        Bytes of a word: 2 or 4 (fp32).
    to_fp16
        Round words of 4 bytes: to nearest, ties to even, too large to infinity.
    """

    def __init__(
        self, file: FileState, shape: tuple[int, int, int], stored_itemsize: int, *, to_fp16: bool = False
    ) -> None:
        self.path = Path(file.path)
        self.stored_itemsize = stored_itemsize
        self.measured_itemsize = 2 if to_fp16 else stored_itemsize
        self.file_bytes = file.size
        self._file = file
        self.shape = shape
        self.tokens, heads, dims = shape
        self.token_bytes = self.measured_itemsize * heads * dims

    def is_complete(self) -> bool:
        return self.file_bytes == self.tokens * get_stored_token_bytes(self)

    def iter_stored_chunks(self, tokens: int) -> Iterator[Chunk]:
        return self.iter_raw_chunks(tokens * get_stored_token_bytes(self))

    def iter_chunks(self, tokens: int) -> Iterator[Chunk]:
        for chunk in self.iter_stored_chunks(tokens):
            yield chunk if self.stored_itemsize == self.measured_itemsize else round_to_fp16(chunk)

    def iter_raw_chunks(self, chunk_bytes: int) -> Iterator[Chunk]:
        """Iterate over the file's bytes, `chunk_bytes` at a time."""
        if self.file_bytes > _MAX_READ_BYTES:
            file = MappedFile(self.path, expected_state=self._file)
            yield from file.iter_chunks(0, file.size, chunk_bytes)
            return
        try:
            data = np.frombuffer(self.path.read_bytes(), np.uint8)
        except OSError as exc:
            raise build_read_error(self.path, exc) from exc
        record_input(self._file)
        self._file.verify()
        for start in range(0, data.size, chunk_bytes):
            yield data[start : start + chunk_bytes]


class ArrayTensor:
    """K or V of a layer of any source; bf16 elements are not converted.

    An array with the heads first is transposed chunk by chunk, as a view if its file is mapped, else in memory. With
    `to_fp16`, fp32 elements are rounded.
    """

    def __init__(self, array: LayerArray, *, to_fp16: bool = False) -> None:
        self.array = array
        self.stored_itemsize = array.array.coded_itemsize
        self.measured_itemsize = 2 if to_fp16 else self.stored_itemsize
        heads, self.tokens, dims = array.geometry
        self.shape = (self.tokens, heads, dims)
        self.token_bytes = self.measured_itemsize * heads * dims

    def is_complete(self) -> bool:
        return True

    def iter_stored_chunks(self, tokens: int) -> Iterator[Chunk]:
        if self.array.token_major:
            return self.array.array.iter_chunks(tokens * get_stored_token_bytes(self))
        return self._iter_token_major(tokens, self.stored_itemsize)

    def iter_chunks(self, tokens: int) -> Iterator[Chunk]:
        for chunk in self.iter_stored_chunks(tokens):
            yield chunk if self.stored_itemsize == self.measured_itemsize else round_to_fp16(chunk)

    def _iter_token_major(self, tokens: int, itemsize: int) -> Iterator[Chunk]:
        heads, num_tokens, dims = self.array.geometry
        for data in self.array.array.iter_chunks():
            elements = data.view(f"<u{itemsize}").reshape(heads, num_tokens, dims)
            for start in range(0, num_tokens, tokens):
                chunk = np.ascontiguousarray(elements[:, start : start + tokens].transpose(1, 0, 2))
                yield chunk.reshape(-1).view(np.uint8)


class EmptyTensor:
    """The empty V of latent attention."""

    def __init__(self, keys: DumpTensor) -> None:
        self.tokens, self.stored_itemsize, self.measured_itemsize = (
            keys.tokens,
            keys.stored_itemsize,
            keys.measured_itemsize,
        )
        self.shape = (self.tokens, 0, 0)
        self.token_bytes = 0

    def is_complete(self) -> bool:
        return True

    def iter_stored_chunks(self, tokens: int) -> Iterator[Chunk]:
        return iter(())

    iter_chunks = iter_stored_chunks


def get_stored_token_bytes(tensor: DumpTensor) -> int:
    """Return the number of bytes of one token as stored."""
    return tensor.token_bytes // tensor.measured_itemsize * tensor.stored_itemsize


def round_to_fp16(chunk: Chunk) -> Chunk:
    """Round fp32 elements to fp16: to nearest, ties to even, overflow to infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        return chunk.view("<f4").astype("<f2").view(np.uint8)


class TokenReader:
    """Reads the tokens of several tensors in sequence, as measured or as stored.

    Parameters
    ----------
    tensors
        Tensors of one geometry and element size.
    as_stored
        Take the words as they are stored; all tensors have the same width then.
    """

    def __init__(self, tensors: Sequence[DumpTensor], *, as_stored: bool = False) -> None:
        self._token_bytes = get_stored_token_bytes(tensors[0]) if as_stored else tensors[0].token_bytes
        tokens_per_chunk = max(1, CHUNK_BYTES // self._token_bytes)
        chunk_iterators = (
            tensor.iter_stored_chunks(tokens_per_chunk) if as_stored else tensor.iter_chunks(tokens_per_chunk)
            for tensor in tensors
        )
        self._chunks = (chunk for chunks in chunk_iterators for chunk in chunks)
        self._remainder: Chunk = np.empty(0, np.uint8)
        self._remaining_bytes = sum(tensor.tokens for tensor in tensors) * self._token_bytes

    def iter_tokens(self, tokens: int) -> Iterator[Chunk]:
        """Iterate over the data of the next `tokens` tokens, in chunks of any size."""
        remaining_bytes = tokens * self._token_bytes
        self._remaining_bytes -= remaining_bytes
        while remaining_bytes:
            if not self._remainder.size:
                self._remainder = next(self._chunks)
            chunk, self._remainder = self._remainder[:remaining_bytes], self._remainder[remaining_bytes:]
            remaining_bytes -= chunk.size
            yield chunk
            del chunk
        if not self._remaining_bytes:
            for _ in self._chunks:  # checksums and hashes are compared after the last byte, when more is asked for
                pass

    def read_tokens(self, tokens: int) -> Chunk:
        """Read the next `tokens` tokens as one chunk, copied only if they span several."""
        chunks = list(self.iter_tokens(tokens))
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
