"""Units: K and V of consecutive blocks in one file, with checksums; and the entropy tables that dense units share.

A unit is a header, then a frame or a dense stream for K and V of every layer, or a stream of both by a model's profile.
Shared tables are one object for each namespace. docs/format-store.md documents the bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.parallel import parallel_map, resolve_threads
from ..arrays.layer_cache import LayerCache
from ..dense import RopeConfig, SharedTables
from ..dtypes import Bytes, Elements
from ..errors import KvmnnError
from ..frames.buffers import integrity_checksum
from .namespace import KEY_BYTES, MAX_LAYERS, MAX_TOKENS, Ids, Namespace, list_parts

# Units are larger than blocks and are evicted whole. A frame of 64 tokens is a twentieth to a fifteenth larger than one
# of 512. Texts share blocks; the unit, up to eight blocks of one put, is encoded, stored and evicted. Units are a tree:
# one is evicted when no other follows it, the least recently used first.

FRAME_MAGIC, DENSE_MAGIC, LAYER_MAGIC = b"KVMNNPU1", b"KVMNNPU2", b"KVMNNPU3"
LAYER_CODECS = ("profile", "transform")
"""Codecs of units with a stream for each layer, by their number in a unit; the second is lossy."""
PROFILE_KEY_BYTES = 32
MAX_HISTORY_ROWS = 256
"""Rows before a dense unit that its streams may refer to."""
MAX_CHAIN_UNITS = 8
"""Units that may have to be decoded for a dense unit; a longer chain is started again without history."""

TokenSpan = tuple[int, int]
"""First token of a unit, and the token after its last."""

_UNIT_STRUCT = struct.Struct(f"<8sIII{KEY_BYTES}s{KEY_BYTES}s")
_DENSE_STRUCT = struct.Struct(f"<III{KEY_BYTES}s")
_LAYER_STRUCT = struct.Struct(f"<I{PROFILE_KEY_BYTES}s")
_CHECKSUM_STRUCT = struct.Struct("<Q")
_FRAME_DTYPE = np.dtype([("bytes", "<u8"), ("checksum", "<u8"), ("raw_checksum", "<u8")])
_STREAM_DTYPE = np.dtype([("bytes", "<u8"), ("checksum", "<u8")])
_NO_TABLES = bytes(KEY_BYTES)
# Of the number of frames: what was put had lost something before. The store has a sentence about it (`save_loss`);
# a unit says it after the loss of that as well.
_ROUNDED_BIT = 1 << 31


class DamagedUnitError(KvmnnError):
    """A stored unit or state fails a check: of its structure, checksum or tables, or of what the index says of it."""


class UnitFrame(NamedTuple):
    """K or V of one layer."""

    #: Frame or dense stream.
    data: Bytes | bytes
    #: Checksums of the frame, and of its elements (`frames.buffers.checksum_rows`). For a dense stream: the checksum of
    #: its elements, which it contains itself, and 0.
    checksum: int
    raw_checksum: int


@dataclass(frozen=True, eq=False)
class DenseUnitInfo:
    """The dependencies of the streams of a dense unit."""

    #: ``[block]``: checksums of the elements of each whole block in all layers (`write_path.combine_block_sums`). A
    #: unit that follows refers to these rows only if what is put has the same checksums.
    block_sums: tuple[int, ...]
    #: Rows directly before the unit that its streams refer to; 0 for none.
    history_rows: int = 0
    #: Length of the chain of units that have to be decoded for these rows.
    chain_length: int = 0
    #: Key of the shared tables; empty for streams with their own.
    tables_key: bytes = b""


@dataclass(frozen=True, eq=False)
class LayerUnitInfo:
    """The codec of a unit with a stream for K and V of each layer."""

    #: One of `LAYER_CODECS`.
    codec: str
    #: Key of the profile without which it is not decoded.
    profile_key: bytes


@dataclass(frozen=True, eq=False)
class Unit:
    """Consecutive blocks of a sequence."""

    #: Key of the namespace.
    namespace_key: bytes
    #: Key of the block before the first; of the namespace, at the beginning of a sequence.
    parent: bytes
    #: Tokens before the first.
    start: int
    #: ``[token]``: token ids of these blocks; the last block may be partial.
    ids: Ids
    #: K and V of each layer, in the order of `Namespace.parts`; with `layer_info` a stream for each layer.
    frames: tuple[UnitFrame, ...]
    #: Dependencies of dense streams; None for others.
    dense: DenseUnitInfo | None = None
    #: Codec of streams for each layer; None for others.
    layer_info: LayerUnitInfo | None = None
    #: Whether K and V had lost something before they were put, by a cast for example.
    is_rounded: bool = False

    @property
    def is_lossy(self) -> bool:
        """Return whether its streams decode to other elements than were put."""
        return self.layer_info is not None and self.layer_info.codec == LAYER_CODECS[1]

    @property
    def has_loss(self) -> bool:
        """Return whether K and V are not those that the model computed: rounded before the put, or by it."""
        return self.is_lossy or self.is_rounded

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        blocks = None if self.dense is None else len(self.dense.block_sums)
        size = count_header_bytes(self.ids.size, len(self.frames), blocks, by_layer=self.layer_info is not None)
        return size + sum(len(frame.data) for frame in self.frames)

    def to_pieces(self) -> list[Bytes | bytes]:
        """Return the bytes of the file, in pieces."""
        magic = LAYER_MAGIC if self.layer_info else FRAME_MAGIC if self.dense is None else DENSE_MAGIC
        num_frames = len(self.frames) | (_ROUNDED_BIT if self.is_rounded else 0)
        head = _UNIT_STRUCT.pack(magic, self.ids.size, num_frames, self.start, self.namespace_key, self.parent)
        ids = self.ids.astype("<u4").tobytes()
        if self.layer_info is not None:
            info = self.layer_info
            head += _LAYER_STRUCT.pack(LAYER_CODECS.index(info.codec), info.profile_key) + ids
            head += np.array([(len(frame.data), frame.checksum) for frame in self.frames], _STREAM_DTYPE).tobytes()
        elif self.dense is None:
            frame_rows = [(len(frame.data), frame.checksum, frame.raw_checksum) for frame in self.frames]
            head += ids + np.array(frame_rows, _FRAME_DTYPE).tobytes()
        else:
            block_sums = np.array(self.dense.block_sums, "<u8")
            head += _DENSE_STRUCT.pack(
                self.dense.history_rows, self.dense.chain_length, block_sums.size, self.dense.tables_key or _NO_TABLES
            )
            streams = np.array([(len(frame.data), frame.checksum) for frame in self.frames], _STREAM_DTYPE)
            head += ids + block_sums.tobytes() + streams.tobytes()
        return [head + _CHECKSUM_STRUCT.pack(integrity_checksum(head)), *(frame.data for frame in self.frames)]


class ReadyUnits:
    """Units of an exported sequence, to be stored as they are where a put would make the same of the same words."""

    def __init__(self, streams: Mapping[TokenSpan, tuple[UnitFrame, ...]]) -> None:
        self.streams = streams
        self.encoded_spans: set[TokenSpan] = set()
        """Tokens of units that were encoded in place of being stored as they are."""

    def is_rounded_again(self, span: TokenSpan) -> bool:
        """Return whether the words of a unit, once encoded, are rounded twice."""
        return bool(self.streams) and span in self.encoded_spans

    def plan_spans(self, start: int, tokens: int, block_tokens: int, unit_blocks: int) -> list[TokenSpan]:
        """Return the tokens of units from `start` to `tokens`; empty if these are not what a store can hold."""
        spans = sorted(span for span in self.streams if span[0] >= start)
        begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
        can_hold = [start, *ends] == [*begins, tokens] and not any(begin % block_tokens for begin in begins)
        return spans if can_hold and all(end - begin < (unit_blocks + 1) * block_tokens for begin, end in spans) else []


def count_header_bytes(
    num_tokens: int, num_frames: int, num_blocks: int | None = None, *, by_layer: bool = False
) -> int:
    """Count the bytes before the first frame or stream; dense units have `num_blocks` whole blocks."""
    size = _UNIT_STRUCT.size + 4 * num_tokens + _CHECKSUM_STRUCT.size
    if by_layer:
        return size + _LAYER_STRUCT.size + _STREAM_DTYPE.itemsize * num_frames
    if num_blocks is None:
        return size + _FRAME_DTYPE.itemsize * num_frames
    return size + _DENSE_STRUCT.size + 8 * num_blocks + _STREAM_DTYPE.itemsize * num_frames


def parse_unit(data: Bytes) -> Unit:
    """Parse the bytes of a unit; frames are views of `data`, whose checksums are not compared yet."""
    header = parse_header(data)
    ends = list(accumulate((size for size, _, _ in header.frame_rows), initial=header.nbytes))
    if ends[-1] != data.size:
        raise DamagedUnitError(f"has {data.size:,} bytes: its header says {ends[-1]:,}")
    frames = [
        UnitFrame(data[begin_byte:end_byte], frame_sum, raw_sum)
        for (begin_byte, end_byte), (_, frame_sum, raw_sum) in zip(pairwise(ends), header.frame_rows, strict=True)
    ]
    return Unit(
        header.namespace_key,
        header.parent,
        header.start,
        header.ids,
        tuple(frames),
        header.dense,
        header.layer_info,
        header.is_rounded,
    )


UNSEALED_NOTHING: Bytes = np.empty(0, np.uint8)
"""Stands for the bytes of a unit that does not decrypt."""


def to_unit_bytes(data: bytes, *, is_sealed: bool) -> Bytes:
    """Return a value of a remote store as the bytes of a unit; of a sealed one, none means that it does not decrypt."""
    return np.frombuffer(data, np.uint8) if data or not is_sealed else UNSEALED_NOTHING


def check_header_size(data: Bytes, min_bytes: int) -> None:
    """Raise `DamagedUnitError` if a unit has fewer bytes than its fixed fields."""
    if data is UNSEALED_NOTHING:
        raise DamagedUnitError("does not decrypt")
    if data.size < min_bytes:
        raise DamagedUnitError(f"has {data.size:,} bytes: too few for a header")


class UnitHeader(NamedTuple):
    """Header of a unit, whose fields are those of `Unit`."""

    namespace_key: bytes
    parent: bytes
    start: int
    ids: Ids
    dense: DenseUnitInfo | None
    layer_info: LayerUnitInfo | None
    #: Size, checksum and raw checksum of each frame.
    frame_rows: list[tuple[int, int, int]]
    #: Size of the header.
    nbytes: int
    is_rounded: bool

    @property
    def is_lossy(self) -> bool:
        """Return whether its streams decode to other elements than were put."""
        return self.layer_info is not None and self.layer_info.codec == LAYER_CODECS[1]

    @property
    def has_loss(self) -> bool:
        """Return whether K and V are not those that the model computed: rounded before the put, or by it."""
        return self.is_lossy or self.is_rounded

    @property
    def unit_bytes(self) -> int:
        """Size of the unit."""
        return self.nbytes + sum(size for size, _, _ in self.frame_rows)


def parse_header(data: Bytes) -> UnitHeader:
    """Parse the header of a unit; raise as `parse_unit` does."""
    check_header_size(data, _UNIT_STRUCT.size)
    magic, num_tokens, num_frames, start, namespace, parent = _UNIT_STRUCT.unpack_from(data.data)
    if magic not in (FRAME_MAGIC, DENSE_MAGIC, LAYER_MAGIC):
        raise DamagedUnitError("does not begin as a unit does")
    is_rounded, num_frames = bool(num_frames & _ROUNDED_BIT), num_frames & ~_ROUNDED_BIT
    if not (1 <= num_tokens <= MAX_TOKENS and 1 <= num_frames <= 2 * MAX_LAYERS and start <= MAX_TOKENS):
        raise DamagedUnitError("has impossible sizes in its header")
    position, history, chain, num_blocks, tables = _UNIT_STRUCT.size, 0, 0, None, _NO_TABLES
    layer_info = None
    if magic == LAYER_MAGIC:
        check_header_size(data, position + _LAYER_STRUCT.size)
        codec, profile_key = _LAYER_STRUCT.unpack_from(data.data, position)
        position += _LAYER_STRUCT.size
        if codec >= len(LAYER_CODECS):
            raise DamagedUnitError("has streams of an unknown codec")
        layer_info = LayerUnitInfo(LAYER_CODECS[codec], profile_key)
    if magic == DENSE_MAGIC:
        if data.size < position + _DENSE_STRUCT.size:
            raise DamagedUnitError(f"has {data.size:,} bytes: too few for a header")
        history, chain, num_blocks, tables = _DENSE_STRUCT.unpack_from(data.data, position)
        position += _DENSE_STRUCT.size
        if (
            num_blocks > num_tokens
            or history > min(MAX_HISTORY_ROWS, start)
            or chain > MAX_CHAIN_UNITS
            or bool(chain) != bool(history)
        ):
            raise DamagedUnitError("has impossible sizes in its header")
    size = count_header_bytes(num_tokens, num_frames, num_blocks, by_layer=layer_info is not None)
    if size > data.size:
        raise DamagedUnitError(f"has {data.size:,} bytes: its header alone has {size:,}")
    (stored_checksum,) = _CHECKSUM_STRUCT.unpack_from(data.data, size - _CHECKSUM_STRUCT.size)
    if integrity_checksum(data[: size - _CHECKSUM_STRUCT.size]) != stored_checksum:
        raise DamagedUnitError("its header does not match its checksum")
    ids = np.frombuffer(data, "<u4", num_tokens, position)
    position += 4 * num_tokens
    dense = None
    if layer_info is not None:
        streams = np.frombuffer(data, _STREAM_DTYPE, num_frames, position).tolist()
        frame_rows = [(nbytes, stream_checksum, 0) for nbytes, stream_checksum in streams]
    elif num_blocks is None:
        frame_rows = np.frombuffer(data, _FRAME_DTYPE, num_frames, position).tolist()
    else:
        sums = tuple(np.frombuffer(data, "<u8", num_blocks, position).tolist())
        dense = DenseUnitInfo(sums, history, chain, b"" if tables == _NO_TABLES else tables)
        streams = np.frombuffer(data, _STREAM_DTYPE, num_frames, position + 8 * num_blocks).tolist()
        frame_rows = [(nbytes, stream_checksum, 0) for nbytes, stream_checksum in streams]
    return UnitHeader(namespace, parent, start, ids, dense, layer_info, frame_rows, size, is_rounded)


def has_attention_steps(header: UnitHeader, data: Bytes) -> bool:
    """Return whether the lossy streams of a unit have steps by attention; `data` begins with the header."""
    flags_at = header.nbytes + _STREAM_FLAGS_OFFSET
    return header.is_lossy and data.size > flags_at and bool(data[flags_at] & _ATTENTION_FLAG)


def predict_kl(units: Iterable[tuple[Unit, int]]) -> float | None:
    """Return the mean loss, in nats a token, that lossy streams record; None for none, or where one records none.

    Parameters
    ----------
    units
        Units, each with the number of its tokens that count.
    """
    total_loss, num_tokens, is_lossy = 0.0, 0, False
    for unit, tokens in units:
        num_tokens += tokens
        if unit.is_lossy:
            is_lossy = True
            total_loss += tokens * sum(map(_read_stream_loss, unit.frames))
    return total_loss / num_tokens if is_lossy and num_tokens and math.isfinite(total_loss) else None


def _read_stream_loss(frame: UnitFrame) -> float:
    end_byte = _STREAM_LOSS_OFFSET + _STREAM_LOSS_STRUCT.size
    loss_field = bytes(frame.data[_STREAM_LOSS_OFFSET:end_byte])
    return float(_STREAM_LOSS_STRUCT.unpack(loss_field)[0]) if len(loss_field) == _STREAM_LOSS_STRUCT.size else math.nan


_STREAM_LOSS_OFFSET, _STREAM_LOSS_STRUCT = 64, struct.Struct("<f")
_STREAM_FLAGS_OFFSET, _ATTENTION_FLAG = 7, 1
"""In the header of a transform stream (docs/format-transform.md)."""


TABLES_MAGIC = b"KVMNNPT2"
MAX_TABLE_TOKENS = 512
"""Shared tables are built from at most this many tokens."""
MIN_TABLE_TOKENS = 256
"""Shared tables are not built from fewer tokens."""
MAX_TABLE_SETS_BYTES = 256 << 20

_TABLES_STRUCT = struct.Struct("<8sI")
_MAX_CACHED_SETS = 8


class TableSets:
    """Shared tables of a namespace, for K and V of each layer in the order of `Namespace.parts`."""

    def __init__(self, sets: Sequence[SharedTables]) -> None:
        self.sets = tuple(sets)

    @cached_property
    def data(self) -> bytes:
        """Bytes of the object: magic, number of sets, their sizes, the sets."""
        sizes = np.array([len(tables.data) for tables in self.sets], "<u4").tobytes()
        head = _TABLES_STRUCT.pack(TABLES_MAGIC, len(self.sets)) + sizes
        return head + b"".join(tables.data for tables in self.sets)

    @cached_property
    def key(self) -> bytes:
        """Key of the object: the 16-byte BLAKE2b hash of its bytes."""
        return hashlib.blake2b(self.data, digest_size=KEY_BYTES).digest()


def build_table_sets(
    layers: Sequence[LayerCache], namespace: Namespace, rotary: RopeConfig | None, threads: int | None
) -> TableSets:
    """Build shared tables from the first tokens of a sequence."""

    def build_tables(job: tuple[tuple[int, int], Elements]) -> SharedTables:
        (_, part), elements = job
        samples = [elements[:, :MAX_TABLE_TOKENS]]
        return SharedTables.from_arrays(
            samples, dtype=namespace.dtype, rotary=None if part else select_rotary(rotary, elements)
        )

    jobs = zip(namespace.parts, list_parts(layers), strict=True)
    return TableSets(parallel_map(build_tables, jobs, resolve_threads(threads)))


def select_rotary(rotary: RopeConfig | None, keys: Elements) -> RopeConfig | None:
    """Return the RoPE parameters for a layer; None if its heads have fewer elements than are rotated."""
    return rotary if rotary is not None and rotary.dims <= keys.shape[2] else None


def parse_table_sets(data: bytes, key: bytes) -> TableSets:
    """Parse the bytes of shared tables."""
    if hashlib.blake2b(data, digest_size=KEY_BYTES).digest() != key:
        raise DamagedUnitError("its tables are damaged")
    try:
        magic, num_sets = _TABLES_STRUCT.unpack_from(data)
        if magic != TABLES_MAGIC or not 1 <= num_sets <= 2 * MAX_LAYERS:
            raise DamagedUnitError("its tables are none")
        sizes = np.frombuffer(data, "<u4", num_sets, _TABLES_STRUCT.size).tolist()
        begin_byte = _TABLES_STRUCT.size + 4 * num_sets
        sets = []
        for size in sizes:
            sets.append(SharedTables(data[begin_byte : begin_byte + size]))
            begin_byte += size
    except (struct.error, ValueError, KvmnnError) as error:  # forged, with a matching key
        raise DamagedUnitError(f"its tables are none: {error}") from None
    return TableSets(sets)


def make_object_name(namespace_key: bytes, key: bytes) -> str:
    """Return the name of shared tables among those of all namespaces."""
    return f"{namespace_key.hex()}-{key.hex()}"


def list_object_keys(names: Sequence[str], namespace_key: bytes) -> list[bytes]:
    """Return the keys of the shared tables of a namespace; other names are skipped."""
    name_regex = re.compile(f"{namespace_key.hex()}-([0-9a-f]{{{2 * KEY_BYTES}}})")
    return [bytes.fromhex(match[1]) for match in map(name_regex.fullmatch, sorted(names)) if match]


class TableSetCache:
    """Shared tables of a store, the last used in memory.

    `read` returns an object by its name, None if it does not exist; `names` lists the names of all objects.
    """

    def __init__(self, read: Callable[[str], bytes | None], names: Callable[[], Sequence[str]]) -> None:
        self._read_object, self._list_names = read, names
        self._cached_sets: OrderedDict[tuple[bytes, bytes], TableSets] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, namespace_key: bytes, key: bytes) -> TableSets:
        """Return the tables with this key; raise `DamagedUnitError` if they are missing or damaged."""
        with self._lock:
            cached = self._cached_sets.get((namespace_key, key))
            if cached is not None:
                self._cached_sets.move_to_end((namespace_key, key))
                return cached
        data = self._read_object(make_object_name(namespace_key, key))
        if data is None:
            raise DamagedUnitError("its tables are gone")
        sets = parse_table_sets(data, key)
        self.put(namespace_key, sets)
        return sets

    def get_any(self, namespace_key: bytes) -> TableSets | None:
        """Return one of the namespace's sets of entropy tables, a cached one if possible; None if none is readable."""
        with self._lock:
            cached_keys = [key for cached_namespace, key in self._cached_sets if cached_namespace == namespace_key]
        for key in cached_keys or list_object_keys(self._list_names(), namespace_key):
            try:
                return self.get(namespace_key, key)
            except DamagedUnitError:
                continue
        return None

    def put(self, namespace_key: bytes, sets: TableSets) -> None:
        """Cache tables."""
        with self._lock:
            self._cached_sets[namespace_key, sets.key] = sets
            if len(self._cached_sets) > _MAX_CACHED_SETS:
                self._cached_sets.popitem(last=False)
