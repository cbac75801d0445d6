"""What a model keeps of a prefix besides full attention: rows of sliding windows, and opaque state, at one length.

A unit is valid for each beginning of its text. This is valid for a text of exactly so many tokens, and is found by the
ids of all of them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import MAX_STATE_AXES, MAX_STATE_NAME, OpaqueState, make_state
from ..dtypes import Bytes
from ..errors import KvmnnError, SourceError
from ..files.json_document import Node, parse
from ..frames import CodecOptions
from ..frames.decoding import Decoder
from ..frames.encoding import encode_words, sampled
from ..frames.hashing import checksum, rows_checksum
from ..frames.words import words_of
from .encoding import token_bytes
from .space import KEY_BYTES, Space
from .token_ids import MAX_TOKENS, Ids
from .unit import DamagedError

STATE_MAGIC = b"KVMNNPS1"

_FIELDS = struct.Struct(f"<8sIIII{KEY_BYTES}s{KEY_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_PIECE = np.dtype([("bytes", "<u8"), ("checksum", "<u8"), ("raw_checksum", "<u8")])
_MAX_DOCUMENT = 16 << 20
_MAX_STATE_BYTES = 1 << 30
_ZSTD_LEVEL = 3
_RAW_BYTES = "raw_bytes"


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefixState:
    """Windows and opaque state of a prefix as they are stored.

    Parameters
    ----------
    space
        Key of the space.
    parent
        Key of the block before `ids`; that of the space at the beginning of a text.
    tokens
        Tokens of the whole prefix: the one length at which this is valid.
    ids
        The last ids of the prefix, from the block behind `parent` on; at least one.
    rows
        Rows of each window, the last of the text, in the order of `Space.windows`.
    states
        Dtype, shape and bytes of each state, in the order of `Space.states`.
    pieces
        Frames of K and of V of each window, if any, then the states, compressed.
    sums
        Checksums of each piece, and of what it holds.
    """

    space: bytes
    parent: bytes
    tokens: int
    ids: Ids
    rows: tuple[int, ...]
    states: tuple[tuple[str, tuple[int, ...], int], ...]
    pieces: tuple[Bytes | bytes, ...]
    sums: tuple[tuple[int, int], ...]
    raw_bytes: int

    @property
    def key(self) -> bytes:
        """What it is found by."""
        return state_key(self.parent, self.ids)

    def to_pieces(self) -> list[Bytes | bytes]:
        """The bytes of the file, in order."""
        states = [{"dtype": dtype, "shape": list(shape), "bytes": size} for dtype, shape, size in self.states]
        about = {"windows": list(self.rows), "states": states, _RAW_BYTES: self.raw_bytes}
        document = json.dumps(about, separators=(",", ":")).encode()
        sizes = (self.tokens, self.ids.size, len(document), len(self.pieces))
        rows = [(len(piece), *sums) for piece, sums in zip(self.pieces, self.sums, strict=True)]
        head = _FIELDS.pack(STATE_MAGIC, *sizes, self.space, self.parent) + self.ids.astype("<u4").tobytes()
        head += document + np.array(rows, _PIECE).tobytes()
        return [head + _CHECKSUM.pack(checksum(head)), *self.pieces]


def state_key(parent: bytes, ids: Ids) -> bytes:
    """The key of the state of a prefix that ends with `ids`, which follow the block with the key `parent`."""
    data = b"kvmnn prefix state" + parent + ids.astype("<u4").tobytes()
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def encode_state(
    space: Space,
    parent: bytes,
    ids: Ids,
    tokens: int,
    windows: Sequence[LayerCache],
    states: Sequence[OpaqueState],
    options: CodecOptions,
) -> PrefixState:
    """Encode rows of windows as frames, and opaque state by zstandard; parameters as those of `PrefixState`.

    Raises
    ------
    SourceError
        Where state cannot be read, or is larger than is stored.
    """
    import zstandard

    pieces: list[bytes] = []
    sums: list[tuple[int, int]] = []
    raw_bytes = 0
    for cache in windows:
        if max(cache.keys.nbytes, cache.values.nbytes) > _MAX_STATE_BYTES:
            raise SourceError(
                f"layer {cache.layer}: K of a window has {cache.keys.nbytes:,} bytes: at most {_MAX_STATE_BYTES:,}"
            )
        for words in (cache.keys, cache.values):
            if not words.shape[2]:
                continue
            rows = np.ascontiguousarray(token_bytes(words)).reshape(len(words), -1)
            lanes = sampled(rows.reshape(-1), options.for_words(words_of(words[:, :0], None)[0]))
            pieces.append(encode_words(rows.reshape(-1), lanes, 1))
            sums.append((checksum(pieces[-1]), rows_checksum(rows)))
            raw_bytes += rows.nbytes
    about = []
    for state in states:
        if state.nbytes > _MAX_STATE_BYTES:
            raise SourceError(
                f"layer {state.layer}: state {state.name!r} has {state.nbytes:,} bytes: at most {_MAX_STATE_BYTES:,}"
            )
        data = state.read()
        pieces.append(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data))
        sums.append((checksum(pieces[-1]), checksum(data)))
        about.append((state.dtype, state.shape, state.nbytes))
        raw_bytes += len(data)
    return PrefixState(
        space=space.key,
        parent=parent,
        tokens=tokens,
        ids=ids,
        rows=tuple(cache.tokens for cache in windows),
        states=tuple(about),
        pieces=tuple(pieces),
        sums=tuple(sums),
        raw_bytes=raw_bytes,
    )


def is_state(data: Bytes) -> bool:
    """Whether a file begins as that of a state does."""
    return data[: len(STATE_MAGIC)].tobytes() == STATE_MAGIC


def parse_state(data: Bytes) -> PrefixState:
    """The state in the bytes of a file; pieces are views of `data`, whose checksums are not compared yet.

    Raises
    ------
    DamagedError
        For anything that `PrefixState.to_pieces` would not have given.
    """
    if data.size < _FIELDS.size:
        raise DamagedError(f"has {data.size:,} bytes: too few for a header")
    magic, tokens, count, document_bytes, pieces, space, parent = _FIELDS.unpack_from(data.data)
    if magic != STATE_MAGIC:
        raise DamagedError("does not begin as state does")
    size = _FIELDS.size + 4 * count + document_bytes + _PIECE.itemsize * pieces + _CHECKSUM.size
    if not 1 <= count <= tokens <= MAX_TOKENS or document_bytes > _MAX_DOCUMENT or size > data.size:
        raise DamagedError("has impossible sizes in its header")
    if checksum(data[: size - _CHECKSUM.size]) != _CHECKSUM.unpack_from(data.data, size - _CHECKSUM.size)[0]:
        raise DamagedError("its header does not match its checksum")
    at = _FIELDS.size + 4 * count
    rows = np.frombuffer(data, _PIECE, pieces, at + document_bytes).tolist()
    ends = list(accumulate((nbytes for nbytes, _, _ in rows), initial=size))
    if ends[-1] != data.size:
        raise DamagedError(f"has {data.size:,} bytes: its header says {ends[-1]:,}")
    try:
        root = parse(data[at : at + document_bytes].tobytes(), "its document", _MAX_DOCUMENT)
        windows = tuple(node.integer(1) for node in root.at("windows").items())
        states = tuple(map(_state_said, root.at("states").items()))
        raw_bytes = root.at(_RAW_BYTES).integer(0)
    except KvmnnError as error:  # of somebody who made the checksum fit
        raise DamagedError(str(error)) from None
    return PrefixState(
        space=space,
        parent=parent,
        tokens=tokens,
        ids=np.frombuffer(data, "<u4", count, _FIELDS.size),
        rows=windows,
        states=states,
        pieces=tuple(data[begin:end] for begin, end in pairwise(ends)),
        sums=tuple((each[1], each[2]) for each in rows),
        raw_bytes=raw_bytes,
    )


def _state_said(node: Node) -> tuple[str, tuple[int, ...], int]:
    dtype, nbytes = node.at("dtype"), node.at("bytes")
    if len(dtype.text()) > MAX_STATE_NAME:
        raise dtype.wrong(f"at most {MAX_STATE_NAME} characters")
    if nbytes.integer(0) > _MAX_STATE_BYTES:
        raise nbytes.wrong(f"at most {_MAX_STATE_BYTES}")
    shape = tuple(axis.integer(0) for axis in node.at("shape").items(most=MAX_STATE_AXES))
    return dtype.text(), shape, nbytes.integer(0)


def decode_state(found: PrefixState, space: Space) -> tuple[list[LayerCache], list[OpaqueState]]:
    """Rows of windows with their true positions, and opaque state; every byte is compared with its checksum.

    Raises
    ------
    DamagedError
        For pieces that do not match their checksum, do not decode, or decode to something else than was put.
    """
    parts = [(shape, part) for shape in space.windows for part in range(2) if shape.dims[part]]
    if (
        found.space != space.key
        or len(found.rows) != len(space.windows)
        or len(found.states) != len(space.states)
        or len(found.pieces) != len(parts) + len(space.states)
        or max(found.rows, default=0) > found.tokens
    ):
        raise DamagedError("holds layers of another model")
    decoder = Decoder(space.dtype)
    pieces = zip(found.pieces, found.sums, strict=True)
    windows = []
    for shape, rows in zip(space.windows, found.rows, strict=True):
        both = []
        for dims, name in zip(shape.dims, "KV", strict=True):
            where = f"{name} of layer {shape.layer}"
            size = shape.kv_heads * rows * dims * space.words.itemsize
            if size > _MAX_STATE_BYTES:
                raise DamagedError(f"{where} would have {size:,} bytes: at most {_MAX_STATE_BYTES:,}")
            words = np.empty((shape.kv_heads, rows, dims), space.words.numpy)
            if dims:
                data, (data_sum, raw_sum) = next(pieces)
                try:
                    decoder.checked(data, data_sum, raw_sum, words)
                except KvmnnError as error:
                    raise DamagedError(f"{where}: {error}") from None
            both.append(words)
        positions = np.arange(found.tokens - rows, found.tokens)
        windows.append(
            LayerCache(layer=shape.layer, keys=both[0], values=both[1], positions=positions, tokens_seen=found.tokens)
        )
    states = []
    for (layer, state_name), about, (data, sums) in zip(space.states, found.states, pieces, strict=True):
        dtype, axes, nbytes = about
        state_bytes = _decompress(data, sums, nbytes, f"state {state_name!r} of layer {layer}")
        states.append(make_state(layer, state_name, state_bytes, dtype=dtype, shape=axes))
    return windows, states


def _decompress(data: Bytes | bytes, sums: tuple[int, int], nbytes: int, what: str) -> bytes:
    import zstandard

    if checksum(data) != sums[0]:
        raise DamagedError(f"{what} does not match its checksum")
    try:
        if zstandard.frame_content_size(bytes(data)) != nbytes:
            raise DamagedError(f"{what} has another number of bytes than its header says")
        found = zstandard.ZstdDecompressor().decompress(bytes(data), max_output_size=nbytes) if nbytes else b""
    except zstandard.ZstdError as error:
        raise DamagedError(f"{what} does not decode: {error}") from None
    if len(found) != nbytes or checksum(found) != sums[1]:
        raise DamagedError(f"{what} is not what was put")
    return found
