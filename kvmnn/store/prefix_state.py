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
from ..arrays.opaque_state import MAX_STATE_AXES, MAX_STATE_NAME_CHARS, OpaqueState, make_state
from ..dtypes import Bytes
from ..errors import KvmnnError, SourceError
from ..files.json_document import JsonReader, parse_document
from ..frames import CodecOptions
from ..frames.decoding import FrameDecoder
from ..frames.encoding import encode_elements, with_selected_predictors
from ..frames.hashing import checksum_rows, integrity_checksum
from ..frames.words import as_elements
from .encoding import view_token_bytes
from .space import KEY_BYTES, Namespace
from .token_ids import MAX_TOKENS, Ids
from .unit import DamagedUnitError

STATE_MAGIC = b"KVMNNPS1"

_STATE_STRUCT = struct.Struct(f"<8sIIII{KEY_BYTES}s{KEY_BYTES}s")
_CHECKSUM_STRUCT = struct.Struct("<Q")
_PIECE_DTYPE = np.dtype([("bytes", "<u8"), ("checksum", "<u8"), ("raw_checksum", "<u8")])
_MAX_DOCUMENT_BYTES = 16 << 20
_MAX_STATE_BYTES = 1 << 30
_ZSTD_LEVEL = 3
_RAW_BYTES_KEY = "raw_bytes"


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefixState:
    """Windows and opaque state of a prefix as they are stored.

    Parameters
    ----------
    namespace_key
        Key of the space.
    parent
        Key of the block before `ids`; that of the space at the beginning of a text.
    tokens
        Tokens of the whole prefix: the one length at which this is valid.
    ids
        The last ids of the prefix, from the block behind `parent` on; at least one.
    window_rows
        Rows of each window, the last of the text, in the order of `Namespace.windows`.
    state_specs
        Dtype, shape and bytes of each state, in the order of `Namespace.states`.
    pieces
        Frames of K and of V of each window, if any, then the states, compressed.
    piece_sums
        Checksums of each piece, and of what it holds.
    """

    namespace_key: bytes
    parent: bytes
    tokens: int
    ids: Ids
    window_rows: tuple[int, ...]
    state_specs: tuple[tuple[str, tuple[int, ...], int], ...]
    pieces: tuple[Bytes | bytes, ...]
    piece_sums: tuple[tuple[int, int], ...]
    raw_bytes: int

    @property
    def key(self) -> bytes:
        """What it is found by."""
        return compute_state_key(self.parent, self.ids)

    def to_pieces(self) -> list[Bytes | bytes]:
        """The bytes of the file, in order."""
        states = [{"dtype": dtype, "shape": list(shape), "bytes": size} for dtype, shape, size in self.state_specs]
        header = {"windows": list(self.window_rows), "states": states, _RAW_BYTES_KEY: self.raw_bytes}
        document = json.dumps(header, separators=(",", ":")).encode()
        sizes = (self.tokens, self.ids.size, len(document), len(self.pieces))
        piece_rows = [(len(piece), *sums) for piece, sums in zip(self.pieces, self.piece_sums, strict=True)]
        head = (
            _STATE_STRUCT.pack(STATE_MAGIC, *sizes, self.namespace_key, self.parent) + self.ids.astype("<u4").tobytes()
        )
        head += document + np.array(piece_rows, _PIECE_DTYPE).tobytes()
        return [head + _CHECKSUM_STRUCT.pack(integrity_checksum(head)), *self.pieces]


def compute_state_key(parent: bytes, ids: Ids) -> bytes:
    """The key of the state of a prefix that ends with `ids`, which follow the block with the key `parent`."""
    data = b"kvmnn prefix state" + parent + ids.astype("<u4").tobytes()
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def encode_state(
    namespace: Namespace,
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
        for elements in (cache.keys, cache.values):
            if not elements.shape[2]:
                continue
            rows = np.ascontiguousarray(view_token_bytes(elements)).reshape(len(elements), -1)
            lanes = with_selected_predictors(
                rows.reshape(-1), options.to_lane_options(as_elements(elements[:, :0], None)[0])
            )
            pieces.append(encode_elements(rows.reshape(-1), lanes, 1))
            sums.append((integrity_checksum(pieces[-1]), checksum_rows(rows)))
            raw_bytes += rows.nbytes
    state_specs = []
    for state in states:
        if state.nbytes > _MAX_STATE_BYTES:
            raise SourceError(
                f"layer {state.layer}: state {state.name!r} has {state.nbytes:,} bytes: at most {_MAX_STATE_BYTES:,}"
            )
        data = state.read()
        pieces.append(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data))
        sums.append((integrity_checksum(pieces[-1]), integrity_checksum(data)))
        state_specs.append((state.dtype, state.shape, state.nbytes))
        raw_bytes += len(data)
    return PrefixState(
        namespace_key=namespace.key,
        parent=parent,
        tokens=tokens,
        ids=ids,
        window_rows=tuple(cache.tokens for cache in windows),
        state_specs=tuple(state_specs),
        pieces=tuple(pieces),
        piece_sums=tuple(sums),
        raw_bytes=raw_bytes,
    )


def is_prefix_state(data: Bytes) -> bool:
    """Whether a file begins as that of a state does."""
    return data[: len(STATE_MAGIC)].tobytes() == STATE_MAGIC


def parse_state(data: Bytes) -> PrefixState:
    """The state in the bytes of a file; pieces are views of `data`, whose checksums are not compared yet.

    Raises
    ------
    DamagedError
        For anything that `PrefixState.to_pieces` would not have given.
    """
    if data.size < _STATE_STRUCT.size:
        raise DamagedUnitError(f"has {data.size:,} bytes: too few for a header")
    magic, tokens, num_ids, document_bytes, num_pieces, namespace, parent = _STATE_STRUCT.unpack_from(data.data)
    if magic != STATE_MAGIC:
        raise DamagedUnitError("does not begin as state does")
    size = (
        _STATE_STRUCT.size + 4 * num_ids + document_bytes + _PIECE_DTYPE.itemsize * num_pieces + _CHECKSUM_STRUCT.size
    )
    if not 1 <= num_ids <= tokens <= MAX_TOKENS or document_bytes > _MAX_DOCUMENT_BYTES or size > data.size:
        raise DamagedUnitError("has impossible sizes in its header")
    if (
        integrity_checksum(data[: size - _CHECKSUM_STRUCT.size])
        != _CHECKSUM_STRUCT.unpack_from(data.data, size - _CHECKSUM_STRUCT.size)[0]
    ):
        raise DamagedUnitError("its header does not match its checksum")
    document_begin = _STATE_STRUCT.size + 4 * num_ids
    piece_rows = np.frombuffer(data, _PIECE_DTYPE, num_pieces, document_begin + document_bytes).tolist()
    ends = list(accumulate((nbytes for nbytes, _, _ in piece_rows), initial=size))
    if ends[-1] != data.size:
        raise DamagedUnitError(f"has {data.size:,} bytes: its header says {ends[-1]:,}")
    try:
        root = parse_document(
            data[document_begin : document_begin + document_bytes].tobytes(), "its document", _MAX_DOCUMENT_BYTES
        )
        windows = tuple(node.read_int(1) for node in root.get("windows").read_list())
        states = tuple(map(_parse_state_spec, root.get("states").read_list()))
        raw_bytes = root.get(_RAW_BYTES_KEY).read_int(0)
    except KvmnnError as error:  # of somebody who made the checksum fit
        raise DamagedUnitError(str(error)) from None
    return PrefixState(
        namespace_key=namespace,
        parent=parent,
        tokens=tokens,
        ids=np.frombuffer(data, "<u4", num_ids, _STATE_STRUCT.size),
        window_rows=windows,
        state_specs=states,
        pieces=tuple(data[begin_byte:end_byte] for begin_byte, end_byte in pairwise(ends)),
        piece_sums=tuple((piece_row[1], piece_row[2]) for piece_row in piece_rows),
        raw_bytes=raw_bytes,
    )


def _parse_state_spec(node: JsonReader) -> tuple[str, tuple[int, ...], int]:
    dtype, nbytes = node.get("dtype"), node.get("bytes")
    if len(dtype.read_str()) > MAX_STATE_NAME_CHARS:
        raise dtype.error(f"at most {MAX_STATE_NAME_CHARS} characters")
    if nbytes.read_int(0) > _MAX_STATE_BYTES:
        raise nbytes.error(f"at most {_MAX_STATE_BYTES}")
    shape = tuple(axis.read_int(0) for axis in node.get("shape").read_list(max_len=MAX_STATE_AXES))
    return dtype.read_str(), shape, nbytes.read_int(0)


def decode_state(prefix_state: PrefixState, namespace: Namespace) -> tuple[list[LayerCache], list[OpaqueState]]:
    """Rows of windows with their true positions, and opaque state; every byte is compared with its checksum.

    Raises
    ------
    DamagedError
        For pieces that do not match their checksum, do not decode, or decode to something else than was put.
    """
    parts = [(shape, part) for shape in namespace.windows for part in range(2) if shape.dims[part]]
    if (
        prefix_state.namespace_key != namespace.key
        or len(prefix_state.window_rows) != len(namespace.windows)
        or len(prefix_state.state_specs) != len(namespace.states)
        or len(prefix_state.pieces) != len(parts) + len(namespace.states)
        or max(prefix_state.window_rows, default=0) > prefix_state.tokens
    ):
        raise DamagedUnitError("holds layers of another model")
    decoder = FrameDecoder(namespace.dtype)
    pieces = zip(prefix_state.pieces, prefix_state.piece_sums, strict=True)
    windows = []
    for shape, rows in zip(namespace.windows, prefix_state.window_rows, strict=True):
        pair = []
        for dims, name in zip(shape.dims, "KV", strict=True):
            where = f"{name} of layer {shape.layer}"
            size = shape.kv_heads * rows * dims * namespace.element_dtype.itemsize
            if size > _MAX_STATE_BYTES:
                raise DamagedUnitError(f"{where} would have {size:,} bytes: at most {_MAX_STATE_BYTES:,}")
            elements = np.empty((shape.kv_heads, rows, dims), namespace.element_dtype.numpy_dtype)
            if dims:
                data, (data_sum, raw_sum) = next(pieces)
                try:
                    decoder.decode_verified(data, data_sum, raw_sum, elements)
                except KvmnnError as error:
                    raise DamagedUnitError(f"{where}: {error}") from None
            pair.append(elements)
        positions = np.arange(prefix_state.tokens - rows, prefix_state.tokens)
        windows.append(
            LayerCache(
                layer=shape.layer, keys=pair[0], values=pair[1], positions=positions, tokens_seen=prefix_state.tokens
            )
        )
    states = []
    for (layer, state_name), state_spec, (data, sums) in zip(
        namespace.states, prefix_state.state_specs, pieces, strict=True
    ):
        dtype, axes, nbytes = state_spec
        state_bytes = _decompress_state(data, sums, nbytes, f"state {state_name!r} of layer {layer}")
        states.append(make_state(layer, state_name, state_bytes, dtype=dtype, shape=axes))
    return windows, states


def _decompress_state(data: Bytes | bytes, sums: tuple[int, int], nbytes: int, label: str) -> bytes:
    import zstandard

    if integrity_checksum(data) != sums[0]:
        raise DamagedUnitError(f"{label} does not match its checksum")
    try:
        if zstandard.frame_content_size(bytes(data)) != nbytes:
            raise DamagedUnitError(f"{label} has another number of bytes than its header says")
        state_bytes = zstandard.ZstdDecompressor().decompress(bytes(data), max_output_size=nbytes) if nbytes else b""
    except zstandard.ZstdError as error:
        raise DamagedUnitError(f"{label} does not decode: {error}") from None
    if len(state_bytes) != nbytes or integrity_checksum(state_bytes) != sums[1]:
        raise DamagedUnitError(f"{label} is not what was put")
    return state_bytes
