"""Dense streams of method 2 (docs/format-v2.md): rows of words to a payload; what `_rows` needs for the way back."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_FromStringAndSize

from kvmnn._simd cimport active_level
from kvmnn.dense.coding cimport (
    CHECKSUM_AT, DENSE_HEAD, DENSE_OK, HEADER_BYTES, MODEL_BYTES, MOST_BASE, PAD, SET_HEADER_BYTES, dense_alike,
    dense_checksum, dense_choose_base, dense_cluster_room, dense_count, dense_counts, dense_decode, dense_decode_room,
    dense_encode, dense_encode_out, dense_encode_room, dense_error, dense_get_set, dense_input, dense_parse,
    dense_part_pairs, dense_put_header, dense_put_set, dense_rotary, dense_shape, dense_stream, dense_table_set,
    kvmnn_dense_loops_at, kvmnn_xxh64,
)
from kvmnn.frames._fast cimport frame_bytes
from kvmnn.frames._workspace cimport Workspace, acquire, release

from ..errors import FrameError, KvmnnError


cdef enum:
    LINE = 64                     # of the cache
    SAMPLE = 16                   # a frame is tried on one row in so many first, ...
    LEAST_SAMPLE_BYTES = 8 << 10  # ... or so many bytes

cdef double SAMPLE_ERRS = 1.05    # a frame may be shorter than its sample says

cdef enum:
    LOOKED_AT_ROWS = 4096         # repeats are looked for in so many rows ...
    LOOKED_AT_PLACES = 8          # ... at so many places of each, 8 bytes each ...
    SEEN_BITS = 15                # ... with a table of so many places

cdef double MANY_REPEATS = 0.05   # of all that is looked at: rows of a sample do not show what repeats far away

cdef tuple _MOST_BASES = (0, MOST_BASE, MOST_BASE)
"""By dtype."""

cdef tuple _ERRORS = (
    "",
    "a head that is cut, or longer than what it holds",
    "rotary parameters that do not fit its rows",
    "positions that run beyond its rows or below 0",
    "tables that break their rules",
    "a reference that is no row before it",
    "sections that do not fit its payload",
    "an entropy coder that ends in another state than it began in",
    "escapes or exponents that are not those of its words",
    "low parts that are not as many as its words",
    "other words than its checksum says",
)
"""By dense_error."""


cdef str error_text(dense_error error):
    return _ERRORS[error]


cdef dense_shape shape_of(int dtype, uint32_t heads, uint32_t dim) noexcept nogil:
    cdef dense_shape shape
    shape.dtype, shape.base, shape.heads, shape.dim = dtype, 0, heads, dim
    shape.words = <size_t>heads * dim
    shape.word_bytes = 4 if dtype == 2 else 2
    return shape


def xxh64(const uint8_t[::1] data not None, uint64_t seed=0) -> int:
    """XXH64 of bytes."""
    cdef uint8_t nothing
    return kvmnn_xxh64(&data[0] if data.shape[0] else &nothing, data.shape[0], seed)


def whole_stream(
    int method, int dtype, uint32_t heads, uint32_t dim, const uint8_t[::1] words not None,
    const uint8_t[::1] payload not None
) -> bytes:
    """A stream of method 0 or 1 of rows of words, one behind the other; `payload`: the frame, or the words again."""
    cdef dense_shape shape = shape_of(dtype, heads, dim)
    cdef size_t row_bytes = shape.words * shape.word_bytes, n = payload.shape[0]
    cdef uint8_t[HEADER_BYTES] header
    cdef uint64_t checksum
    dense_put_header(header, &shape, method, 0, words.shape[0] // row_bytes, n)
    made = bytearray(PyBytes_FromStringAndSize(<char *>header, HEADER_BYTES)) + payload
    cdef uint8_t[::1] stream = made
    with nogil:
        checksum = dense_checksum(&stream[0], n if method == 1 else 0, &words[0], words.shape[0])
    memcpy(&stream[CHECKSUM_AT], &checksum, 8)
    return bytes(made)


def whole_checksum(const uint8_t[::1] stream not None, const uint8_t[::1] words not None) -> int:
    """What the checksum of a stream of method 0 or 1 must be if it holds `words`."""
    cdef uint64_t checksum
    with nogil:
        checksum = dense_checksum(
            &stream[0], stream.shape[0] - HEADER_BYTES if stream[5] == 1 else 0, &words[0], words.shape[0])
    return checksum


cdef uint8_t *aligned(uint8_t *p) noexcept nogil:
    """The next place where a cache line begins: vectors that lie across two take twice as long."""
    return p + (LINE - <size_t>p % LINE) % LINE if p != NULL else NULL


cdef class Input:
    """Rows on their way into a stream; all sizes are checked by the caller.

    own, history: rows of words, aligned; rotary: dims, whether pairs are interleaved, frequencies; known: for each own
    row a row to try, or -1.
    """

    cdef dense_input given
    cdef size_t own_bytes, history_bytes
    cdef const uint8_t[::1] own
    cdef const uint8_t[::1] history
    cdef const uint64_t[::1] frequencies
    cdef const uint32_t[::1] positions
    cdef const int32_t[::1] known

    def __init__(
        self, int dtype, uint32_t heads, uint32_t dim, const uint8_t[::1] own not None, const uint8_t[::1] history,
        rotary, const uint32_t[::1] positions, const int32_t[::1] known
    ):
        cdef dense_input *given = &self.given
        memset(given, 0, sizeof(dense_input))
        self.own, self.history, self.positions, self.known = own, history, positions, known
        self.own_bytes, self.history_bytes = own.shape[0], 0
        given.loops = kvmnn_dense_loops_at(active_level)
        given.shape = shape_of(dtype, heads, dim)
        given.rows.row_bytes = given.shape.words * given.shape.word_bytes
        given.rows.rows = self.own_bytes // given.rows.row_bytes
        given.rows.own = given.own = &own[0]
        if history is not None and history.shape[0]:
            self.history_bytes = history.shape[0]
            given.rows.history, given.rows.history_rows = &history[0], self.history_bytes // given.rows.row_bytes
        if rotary is not None:
            dims, interleaved, self.frequencies = rotary
            given.rotary.dims, given.rotary.interleaved = dims, interleaved
            given.rotary.frequencies = &self.frequencies[0]
            given.positions = &positions[0]
        if known is not None:
            given.known = &known[0]

    @property
    def base(self) -> int:
        """The exponent window that suits the words."""
        return dense_choose_base(&self.given)

    def alike(self, rotary) -> int:
        """How many words have the symbol that is predicted for them, if K is rotated so; None: not at all."""
        cdef dense_input given = self.given
        cdef const uint64_t[::1] frequencies
        cdef size_t found = 0
        cdef uint8_t *at
        memset(&given.rotary, 0, sizeof(dense_rotary))
        if rotary is not None:
            dims, interleaved, frequencies = rotary
            given.rotary.dims, given.rotary.interleaved = dims, interleaved
            given.rotary.frequencies = &frequencies[0]
        given.shape.base = dense_choose_base(&given)
        cdef Workspace ws = acquire(False, False)
        try:
            with nogil:
                at = self.room(ws, &given)
                if at != NULL:
                    found = dense_alike(&given, at)
        finally:
            release(ws)
        if at == NULL:
            raise MemoryError("no memory to try rotations")
        return found

    cdef uint8_t *room(self, Workspace ws, dense_input *given) noexcept nogil:
        """Memory to work in, to which rows are copied whose pairs have to lie as halves; NULL if there is none."""
        cdef size_t row_bytes = given.rows.row_bytes, size = dense_encode_room(given)
        cdef size_t apart_bytes = self.own_bytes + self.history_bytes if given.rotary.interleaved else 0
        cdef uint8_t *at = aligned(ws.buffer(0, LINE + size + row_bytes + PAD + apart_bytes))
        if at != NULL and apart_bytes:
            apart(given, at + size, at + size + row_bytes + PAD)
        return at

    def encode(
        self, TableSet tables, int32_t[::1] references=None, double frames_above=0, bint repeats=False
    ) -> tuple:
        """The stream of method 2, or None where it would not be shorter than its words and a header; and whether a frame of
        the words may be shorter, as one of a sample is, or there is no sample.

        references: where to note down the row that each own row refers to; frames_above: no frame is shorter than a
        stream of no more bytes; repeats: a frame may also be shorter where rows far apart have much in common, which no
        sample shows. All in one go: threads on short arrays wait for the GIL each time that they need it.
        """
        cdef dense_input given = self.given
        cdef uint32_t *chosen = NULL
        cdef size_t size = 0, limit = self.own_bytes + HEADER_BYTES
        cdef int trial = 0
        cdef uint8_t *out
        cdef uint8_t *at
        given.shape.base = dense_choose_base(&given) if tables is None else tables.held.base
        if tables is not None:
            given.set = tables.held
        if references is not None:
            chosen = <uint32_t *>&references[0]
        cdef Workspace ws = acquire(True, False)
        try:
            with nogil:
                out = ws.buffer(2, dense_encode_out(&given) + PAD)  # the trial needs the others
                at = self.room(ws, &given) if out != NULL else NULL
                if at != NULL:
                    size = dense_encode(&given, at, out, limit, chosen)
                    limit = size if size else limit
                    if limit > frames_above:
                        trial = try_frame(ws, &self.given, self.own_bytes, limit - HEADER_BYTES, repeats)
            if at == NULL or trial < 0:
                raise MemoryError("no memory to encode rows")
            return PyBytes_FromStringAndSize(<char *>out, size) if size else None, trial > 0
        finally:
            release(ws)


cdef int try_frame(
    Workspace ws, const dense_input *given, size_t nbytes, size_t limit, bint repeats
) noexcept nogil:
    """1 where a frame of the words may be shorter than `limit`, 0 where not, -1: no memory."""
    cdef size_t row_bytes = given.rows.row_bytes, rows = given.rows.rows
    cdef size_t sample = max(rows // SAMPLE, (LEAST_SAMPLE_BYTES + row_bytes - 1) // row_bytes), size
    if sample >= rows:
        return 1
    size = frame_bytes(
        ws, given.own + (rows - sample) // 2 * row_bytes, sample * given.shape.words, given.shape.word_bytes)
    if not size:
        return -1
    if <double>size / (sample * row_bytes) <= SAMPLE_ERRS * limit / nbytes:
        return 1
    return repeats and has_many_repeats(given.own, rows, row_bytes)


cdef int has_many_repeats(const uint8_t *own, size_t rows, size_t row_bytes) noexcept nogil:
    """Whether rows have many words at the same place in common: zstd finds them however far away they are."""
    cdef uint32_t seen[1 << SEEN_BITS]
    cdef size_t looked_at = min(rows, <size_t>LOOKED_AT_ROWS), places = LOOKED_AT_PLACES, place, row, at
    cdef size_t found = 0
    cdef uint64_t word
    cdef uint32_t tag
    if row_bytes < 8 * LOOKED_AT_PLACES:
        return 0
    for place in range(places):
        memset(seen, 0, sizeof(seen))
        at = (place * <size_t>40503 % 65536) * (row_bytes - 8) // 65536 // 2 * 2  # nowhere in step with the heads
        for row in range(looked_at):
            memcpy(&word, own + row * row_bytes + at, 8)
            word *= <uint64_t>0x9E3779B97F4A7C15
            tag = <uint32_t>(word >> (64 - SEEN_BITS))
            found += seen[tag] == (<uint32_t>(word >> 8) | 1)
            seen[tag] = <uint32_t>(word >> 8) | 1
    return found > MANY_REPEATS * looked_at * places


cdef void apart(dense_input *given, uint8_t *row, uint8_t *copy) noexcept nogil:
    """Rows with their pairs as halves in place of those with pairs side by side."""
    cdef size_t history = given.rows.history_rows * given.rows.row_bytes, own = given.rows.rows * given.rows.row_bytes
    if history:
        memcpy(copy, given.rows.history, history)
    memcpy(copy + history, given.rows.own, own)
    dense_part_pairs(
        copy, given.rows.history_rows + given.rows.rows, &given.shape, given.rotary.dims, 1, row)
    given.rows.history, given.rows.own = copy, copy + history


cdef dense_error parse(dense_stream *stream) noexcept nogil:
    """Find the sections of a stream of method 2, of which shape, rows, flags, header and payload are filled in."""
    return dense_parse(stream)


cdef void put_header(uint8_t *header, const dense_shape *shape, int flags, size_t rows, size_t payload) noexcept nogil:
    """All of the header of a stream of method 2 but the checksum."""
    dense_put_header(header, shape, 2, flags, rows, payload)


cdef dense_error decode_rows(
    const dense_stream *stream, const dense_table_set *tables, const uint8_t *history, uint8_t *words
) except *:
    """Decode all rows of a parsed stream to `words`, which hold anything after an error."""
    cdef dense_error error = DENSE_OK
    cdef uint8_t *room
    cdef Workspace ws = acquire(False, False)
    with nogil:
        room = aligned(ws.buffer(0, LINE + dense_decode_room(stream)))
        if room != NULL:
            error = dense_decode(stream, kvmnn_dense_loops_at(active_level), history, tables, room, words)
    release(ws)
    if room == NULL:
        raise MemoryError("no memory to decode rows")
    return error


cdef class TableSet:
    """A model that several streams share, from the bytes of a set."""


    def __cinit__(self):
        self.held = <dense_table_set *>calloc(1, sizeof(dense_table_set))
        if self.held == NULL:
            raise MemoryError("no memory for a table set")

    def __init__(self, const uint8_t[::1] data not None):
        cdef dense_error error
        if data.shape[0] <= SET_HEADER_BYTES:
            raise FrameError(f"table set has {data.shape[0]} bytes: expected more than {SET_HEADER_BYTES}")
        if data[5] >= len(_MOST_BASES):
            raise FrameError(f"table set has dtype {data[5]}: expected 0 to {len(_MOST_BASES) - 1}")
        if data[6] > _MOST_BASES[data[5]]:
            raise FrameError(f"table set has base {data[6]}: expected at most {_MOST_BASES[data[5]]}")
        if data[7] > 1:
            raise FrameError(f"table set has flags {data[7]:#04x}: expected 0 or 1")
        error = dense_get_set(&data[0], data.shape[0], self.held)
        if error == DENSE_HEAD:
            raise FrameError("table set is cut, or longer than what it holds")
        if error != DENSE_OK:
            raise FrameError(f"table set has {error_text(error)}")

    def __dealloc__(self):
        free(self.held)

    @property
    def id(self) -> int:
        return self.held.id

    @property
    def dtype(self) -> int:
        return self.held.dtype

    @property
    def rotary(self):
        """Dims, whether pairs are interleaved, and frequencies; None without rotary parameters."""
        cdef size_t i
        if not self.held.rotary.dims:
            return None
        frequencies = [self.held.rotary.frequencies[i] for i in range(self.held.rotary.dims // 2)]
        return self.held.rotary.dims, self.held.rotary.interleaved, frequencies


cdef class Counts:
    """What is counted of arrays on the way to a table set."""

    cdef dense_counts *held

    def __cinit__(self):
        self.held = <dense_counts *>calloc(1, sizeof(dense_counts))
        if self.held == NULL:
            raise MemoryError("no memory to count symbols")

    def __dealloc__(self):
        free(self.held)

    def add(self, Input rows not None, int base) -> None:
        """Count the own rows of an input."""
        cdef dense_input given = rows.given
        cdef uint8_t *at
        given.shape.base = base
        cdef Workspace ws = acquire(False, False)
        try:
            with nogil:
                at = rows.room(ws, &given)
                if at != NULL:
                    dense_count(&given, at, self.held)
        finally:
            release(ws)
        if at == NULL:
            raise MemoryError("no memory to count symbols")

    def table_set(self, Input like not None, int base) -> bytes:
        """The bytes of a set with the dtype and rotary parameters of `like`; what was counted is used up."""
        cdef size_t size, room = dense_cluster_room()
        cdef uint8_t *at
        cdef Workspace ws = acquire(False, False)
        try:
            with nogil:
                at = ws.buffer(0, room + SET_HEADER_BYTES + MODEL_BYTES + 4 * <size_t>like.given.rotary.dims + PAD)
                if at != NULL:
                    size = dense_put_set(
                        like.given.loops, self.held, like.given.shape.dtype, base, &like.given.rotary, at, at + room)
            if at == NULL:
                raise MemoryError("no memory for a table set")
            return PyBytes_FromStringAndSize(<char *>at + room, size)
        finally:
            release(ws)
