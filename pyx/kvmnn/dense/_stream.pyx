"""Encode dense streams of method 2 (docs/format-v2.md): rows of words to a payload; shared parts of `_rows`."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_FromStringAndSize

from kvmnn._simd cimport active_level
from kvmnn.dense.codec cimport (
    CHECKSUM_OFFSET, DENSE_HEAD, DENSE_OK, HEADER_BYTES, MAX_BASE, MAX_MODEL_BYTES, PAD_BYTES, SET_HEADER_BYTES,
    dense_checksum, dense_choose_base, dense_cluster_scratch_bytes, dense_count_predicted, dense_count_symbols,
    dense_counts, dense_decode, dense_decode_scratch_bytes, dense_encode, dense_encode_capacity,
    dense_encode_scratch_bytes, dense_error, dense_input, dense_parse, dense_read_table_set, dense_reorder_pairs,
    dense_rotary, dense_shape, dense_stream, dense_table_set, dense_write_header, dense_write_table_set,
    kvmnn_dense_kernels_at, kvmnn_xxh64,
)
from kvmnn.frames._fast_encoder cimport measure_frame
from kvmnn.frames._workspace cimport Workspace, acquire, release

from ..errors import FrameError, KvmnnError


cdef enum:
    CACHE_LINE_BYTES = 64       # of the cache
    SAMPLE_DIVISOR = 16         # a frame is tried on one row in so many first, ...
    MIN_SAMPLE_BYTES = 8 << 10  # ... or so many bytes

cdef double MAX_SAMPLE_ERROR_RATIO = 1.05  # a frame may be shorter than its sample says

cdef enum:
    MAX_REPEAT_ROWS = 4096  # repeats are looked for in so many rows ...
    NUM_REPEAT_COLUMNS = 8  # ... at so many places of each, 8 bytes each ...
    REPEAT_TABLE_BITS = 15  # ... with a table of so many places

cdef double MIN_REPEAT_FRACTION = 0.05  # of all that is looked at: rows of a sample do not show what repeats far away

cdef tuple _MAX_BASES = (0, MAX_BASE, MAX_BASE)
"""Maximum base by dtype."""

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
"""Messages by dense_error."""


cdef str error_text(dense_error error):
    return _ERRORS[error]


cdef dense_shape make_shape(int dtype, uint32_t heads, uint32_t dim) noexcept nogil:
    cdef dense_shape shape
    shape.dtype, shape.base, shape.heads, shape.dim = dtype, 0, heads, dim
    shape.words = <size_t>heads * dim
    shape.word_bytes = 4 if dtype == 2 else 2
    return shape


def xxh64(const uint8_t[::1] data not None, uint64_t seed=0) -> int:
    """Return XXH64 of bytes."""
    cdef uint8_t placeholder
    return kvmnn_xxh64(&data[0] if data.shape[0] else &placeholder, data.shape[0], seed)


def build_verbatim_stream(
    int method, int dtype, uint32_t heads, uint32_t dim, const uint8_t[::1] words not None,
    const uint8_t[::1] payload not None
) -> bytes:
    """Build a stream of method 0 or 1 from consecutive rows of words; `payload` is the words again, or their frame."""
    cdef dense_shape shape = make_shape(dtype, heads, dim)
    cdef size_t row_bytes = shape.words * shape.word_bytes, n = payload.shape[0]
    cdef uint8_t[HEADER_BYTES] header
    cdef uint64_t checksum
    dense_write_header(header, &shape, method, 0, words.shape[0] // row_bytes, n)
    buffer = bytearray(PyBytes_FromStringAndSize(<char *>header, HEADER_BYTES)) + payload
    cdef uint8_t[::1] stream = buffer
    with nogil:
        checksum = dense_checksum(&stream[0], n if method == 1 else 0, &words[0], words.shape[0])
    memcpy(&stream[CHECKSUM_OFFSET], &checksum, 8)
    return bytes(buffer)


def compute_verbatim_checksum(const uint8_t[::1] stream not None, const uint8_t[::1] words not None) -> int:
    """Compute the expected checksum of a stream of method 0 or 1 that contains `words`."""
    cdef uint64_t checksum
    with nogil:
        checksum = dense_checksum(
            &stream[0], stream.shape[0] - HEADER_BYTES if stream[5] == 1 else 0, &words[0], words.shape[0])
    return checksum


cdef uint8_t *align_to_line(uint8_t *p) noexcept nogil:
    """Return the next address at a cache line: vectors that span two lines take twice as long."""
    return p + (CACHE_LINE_BYTES - <size_t>p % CACHE_LINE_BYTES) % CACHE_LINE_BYTES if p != NULL else NULL


cdef class EncoderRows:
    """Rows to encode; all sizes are checked by the caller.

    own_rows, history: rows of words, aligned; rotary: dims, whether pairs are interleaved, frequencies;
    reference_hints: for each own row a row to try, or -1.
    """

    cdef dense_input input
    cdef size_t own_bytes, history_bytes
    cdef const uint8_t[::1] own_rows
    cdef const uint8_t[::1] history
    cdef const uint64_t[::1] frequencies
    cdef const uint32_t[::1] positions
    cdef const int32_t[::1] reference_hints

    def __init__(
        self, int dtype, uint32_t heads, uint32_t dim, const uint8_t[::1] own_rows not None, const uint8_t[::1] history,
        rotary, const uint32_t[::1] positions, const int32_t[::1] reference_hints
    ):
        cdef dense_input *input_struct = &self.input
        memset(input_struct, 0, sizeof(dense_input))
        self.own_rows, self.history = own_rows, history
        self.positions, self.reference_hints = positions, reference_hints
        self.own_bytes, self.history_bytes = own_rows.shape[0], 0
        input_struct.kernels = kvmnn_dense_kernels_at(active_level)
        input_struct.shape = make_shape(dtype, heads, dim)
        input_struct.rows.row_bytes = input_struct.shape.words * input_struct.shape.word_bytes
        input_struct.rows.rows = self.own_bytes // input_struct.rows.row_bytes
        input_struct.rows.own = input_struct.original_rows = &own_rows[0]
        if history is not None and history.shape[0]:
            self.history_bytes = history.shape[0]
            input_struct.rows.history = &history[0]
            input_struct.rows.history_rows = self.history_bytes // input_struct.rows.row_bytes
        if rotary is not None:
            dims, interleaved, self.frequencies = rotary
            input_struct.rotary.dims, input_struct.rotary.interleaved = dims, interleaved
            input_struct.rotary.frequencies = &self.frequencies[0]
            input_struct.positions = &positions[0]
        if reference_hints is not None:
            input_struct.reference_hints = &reference_hints[0]

    @property
    def base(self) -> int:
        """Return the exponent window that suits the words."""
        return dense_choose_base(&self.input)

    def count_predicted(self, rotary) -> int:
        """Count the words whose symbol is predicted correctly, given the rotation of K (None: not rotated)."""
        cdef dense_input input_copy = self.input
        cdef const uint64_t[::1] frequencies
        cdef size_t num_predicted = 0
        cdef uint8_t *scratch
        memset(&input_copy.rotary, 0, sizeof(dense_rotary))
        if rotary is not None:
            dims, interleaved, frequencies = rotary
            input_copy.rotary.dims, input_copy.rotary.interleaved = dims, interleaved
            input_copy.rotary.frequencies = &frequencies[0]
        input_copy.shape.base = dense_choose_base(&input_copy)
        cdef Workspace ws = acquire(False, False)
        try:
            with nogil:
                scratch = self.allocate_scratch(ws, &input_copy)
                if scratch != NULL:
                    num_predicted = dense_count_predicted(&input_copy, scratch)
        finally:
            release(ws)
        if scratch == NULL:
            raise MemoryError("no memory to try rotations")
        return num_predicted

    cdef uint8_t *allocate_scratch(self, Workspace ws, dense_input *input_copy) noexcept nogil:
        """Allocate scratch memory, with rows of interleaved pairs copied in half-split order; NULL on failure."""
        cdef size_t row_bytes = input_copy.rows.row_bytes, size = dense_encode_scratch_bytes(input_copy)
        cdef size_t reordered_bytes = self.own_bytes + self.history_bytes if input_copy.rotary.interleaved else 0
        cdef uint8_t *scratch = align_to_line(
            ws.get_buffer(0, CACHE_LINE_BYTES + size + row_bytes + PAD_BYTES + reordered_bytes))
        if scratch != NULL and reordered_bytes:
            reorder_pairs(input_copy, scratch + size, scratch + size + row_bytes + PAD_BYTES)
        return scratch

    def encode(
        self, TableSet tables, int32_t[::1] references=None, double frame_trial_min_bytes=0, bint repeats=False
    ) -> tuple:
        """Encode a stream of method 2, and return it with whether a frame of the words may be shorter.

        The stream is None if it is no shorter than its words and a header. Whether a frame may be shorter is judged by
        a frame of a sample, and true without a sample. references: output for the row that each own row refers to.
        frame_trial_min_bytes: streams up to this size need no frame trial. repeats: also consider a frame if distant
        rows have much in common, which no sample shows. All is done in one call, because threads on short arrays wait
        for the GIL each time they need it.
        """
        cdef dense_input input_copy = self.input
        cdef uint32_t *references_out = NULL
        cdef size_t size = 0, limit = self.own_bytes + HEADER_BYTES
        cdef int frame_trial = 0
        cdef uint8_t *out
        cdef uint8_t *scratch
        input_copy.shape.base = dense_choose_base(&input_copy) if tables is None else tables.native.base
        if tables is not None:
            input_copy.table_set = tables.native
        if references is not None:
            references_out = <uint32_t *>&references[0]
        cdef Workspace ws = acquire(True, False)
        try:
            with nogil:
                out = ws.get_buffer(2, dense_encode_capacity(&input_copy) + PAD_BYTES)  # the trial needs the others
                scratch = self.allocate_scratch(ws, &input_copy) if out != NULL else NULL
                if scratch != NULL:
                    size = dense_encode(&input_copy, scratch, out, limit, references_out)
                    limit = size if size else limit
                    if limit > frame_trial_min_bytes:
                        frame_trial = try_frame(ws, &self.input, self.own_bytes, limit - HEADER_BYTES, repeats)
            if scratch == NULL or frame_trial < 0:
                raise MemoryError("no memory to encode rows")
            return PyBytes_FromStringAndSize(<char *>out, size) if size else None, frame_trial > 0
        finally:
            release(ws)


cdef int try_frame(
    Workspace ws, const dense_input *input_struct, size_t nbytes, size_t limit, bint repeats
) noexcept nogil:
    """Return 1 if a frame of the words may be shorter than `limit`, 0 if not, -1 if memory is exhausted."""
    cdef size_t row_bytes = input_struct.rows.row_bytes, rows = input_struct.rows.rows
    cdef size_t sample_rows = max(rows // SAMPLE_DIVISOR, (MIN_SAMPLE_BYTES + row_bytes - 1) // row_bytes), size
    if sample_rows >= rows:
        return 1
    size = measure_frame(
        ws, input_struct.original_rows + (rows - sample_rows) // 2 * row_bytes, sample_rows * input_struct.shape.words,
        input_struct.shape.word_bytes)
    if not size:
        return -1
    if <double>size / (sample_rows * row_bytes) <= MAX_SAMPLE_ERROR_RATIO * limit / nbytes:
        return 1
    return repeats and has_many_repeats(input_struct.original_rows, rows, row_bytes)


cdef int has_many_repeats(const uint8_t *own_rows, size_t rows, size_t row_bytes) noexcept nogil:
    """Return whether rows have many words in common at the same positions, which zstd finds at any distance."""
    cdef uint32_t table[1 << REPEAT_TABLE_BITS]
    cdef size_t num_rows = min(rows, <size_t>MAX_REPEAT_ROWS), num_columns = NUM_REPEAT_COLUMNS, column, row, offset
    cdef size_t num_repeats = 0
    cdef uint64_t word
    cdef uint32_t tag
    if row_bytes < 8 * NUM_REPEAT_COLUMNS:
        return 0
    for column in range(num_columns):
        memset(table, 0, sizeof(table))
        offset = (column * <size_t>40503 % 65536) * (row_bytes - 8) // 65536 // 2 * 2  # nowhere in step with the heads
        for row in range(num_rows):
            memcpy(&word, own_rows + row * row_bytes + offset, 8)
            word *= <uint64_t>0x9E3779B97F4A7C15
            tag = <uint32_t>(word >> (64 - REPEAT_TABLE_BITS))
            num_repeats += table[tag] == (<uint32_t>(word >> 8) | 1)
            table[tag] = <uint32_t>(word >> 8) | 1
    return num_repeats > MIN_REPEAT_FRACTION * num_rows * num_columns


cdef void reorder_pairs(dense_input *input_copy, uint8_t *row, uint8_t *copy) noexcept nogil:
    """Copy rows of interleaved pairs in half-split order."""
    cdef size_t history_bytes = input_copy.rows.history_rows * input_copy.rows.row_bytes
    cdef size_t own_bytes = input_copy.rows.rows * input_copy.rows.row_bytes
    if history_bytes:
        memcpy(copy, input_copy.rows.history, history_bytes)
    memcpy(copy + history_bytes, input_copy.rows.own, own_bytes)
    dense_reorder_pairs(
        copy, input_copy.rows.history_rows + input_copy.rows.rows, &input_copy.shape, input_copy.rotary.dims, 1, row)
    input_copy.rows.history, input_copy.rows.own = copy, copy + history_bytes


cdef dense_error parse_sections(dense_stream *stream) noexcept nogil:
    """Find the sections of a stream of method 2, of which shape, rows, flags, header and payload are filled in."""
    return dense_parse(stream)


cdef void write_header(
    uint8_t *header, const dense_shape *shape, int flags, size_t rows, size_t payload
) noexcept nogil:
    """Write the header of a stream of method 2, except the checksum."""
    dense_write_header(header, shape, 2, flags, rows, payload)


cdef dense_error decode_rows(
    const dense_stream *stream, const dense_table_set *tables, const uint8_t *history, uint8_t *words
) except *:
    """Decode all rows of a parsed stream to `words`, which are undefined after an error."""
    cdef dense_error error = DENSE_OK
    cdef uint8_t *scratch
    cdef Workspace ws = acquire(False, False)
    with nogil:
        scratch = align_to_line(ws.get_buffer(0, CACHE_LINE_BYTES + dense_decode_scratch_bytes(stream)))
        if scratch != NULL:
            error = dense_decode(stream, kvmnn_dense_kernels_at(active_level), history, tables, scratch, words)
    release(ws)
    if scratch == NULL:
        raise MemoryError("no memory to decode rows")
    return error


cdef class TableSet:
    """A table set that several streams share, parsed from its bytes."""


    def __cinit__(self):
        self.native = <dense_table_set *>calloc(1, sizeof(dense_table_set))
        if self.native == NULL:
            raise MemoryError("no memory for a table set")

    def __init__(self, const uint8_t[::1] data not None):
        cdef dense_error error
        if data.shape[0] <= SET_HEADER_BYTES:
            raise FrameError(f"table set has {data.shape[0]} bytes: expected more than {SET_HEADER_BYTES}")
        if data[5] >= len(_MAX_BASES):
            raise FrameError(f"table set has dtype {data[5]}: expected 0 to {len(_MAX_BASES) - 1}")
        if data[6] > _MAX_BASES[data[5]]:
            raise FrameError(f"table set has base {data[6]}: expected at most {_MAX_BASES[data[5]]}")
        if data[7] > 1:
            raise FrameError(f"table set has flags {data[7]:#04x}: expected 0 or 1")
        error = dense_read_table_set(&data[0], data.shape[0], self.native)
        if error == DENSE_HEAD:
            raise FrameError("table set is cut, or longer than what it holds")
        if error != DENSE_OK:
            raise FrameError(f"table set has {error_text(error)}")

    def __dealloc__(self):
        free(self.native)

    @property
    def id(self) -> int:
        return self.native.id

    @property
    def dtype(self) -> int:
        return self.native.dtype

    @property
    def rotary(self):
        """Return dims, whether pairs are interleaved, and frequencies; None without rotary parameters."""
        cdef size_t i
        if not self.native.rotary.dims:
            return None
        frequencies = [self.native.rotary.frequencies[i] for i in range(self.native.rotary.dims // 2)]
        return self.native.rotary.dims, self.native.rotary.interleaved, frequencies


cdef class SymbolCounts:
    """Symbol counts of arrays, from which a table set is built."""

    cdef dense_counts *native

    def __cinit__(self):
        self.native = <dense_counts *>calloc(1, sizeof(dense_counts))
        if self.native == NULL:
            raise MemoryError("no memory to count symbols")

    def __dealloc__(self):
        free(self.native)

    def add(self, EncoderRows rows not None, int base) -> None:
        """Count the own rows of an input."""
        cdef dense_input input_copy = rows.input
        cdef uint8_t *scratch
        input_copy.shape.base = base
        cdef Workspace ws = acquire(False, False)
        try:
            with nogil:
                scratch = rows.allocate_scratch(ws, &input_copy)
                if scratch != NULL:
                    dense_count_symbols(&input_copy, scratch, self.native)
        finally:
            release(ws)
        if scratch == NULL:
            raise MemoryError("no memory to count symbols")

    def table_set(self, EncoderRows template not None, int base) -> bytes:
        """Build the bytes of a set with the dtype and rotary parameters of `template`; this consumes the counts."""
        cdef size_t size, cluster_bytes = dense_cluster_scratch_bytes()
        cdef uint8_t *memory
        cdef Workspace ws = acquire(False, False)
        try:
            with nogil:
                memory = ws.get_buffer(
                    0, cluster_bytes + SET_HEADER_BYTES + MAX_MODEL_BYTES + 4 * <size_t>template.input.rotary.dims
                    + PAD_BYTES)
                if memory != NULL:
                    size = dense_write_table_set(
                        template.input.kernels, self.native, template.input.shape.dtype, base, &template.input.rotary,
                        memory, memory + cluster_bytes)
            if memory == NULL:
                raise MemoryError("no memory for a table set")
            return PyBytes_FromStringAndSize(<char *>memory + cluster_bytes, size)
        finally:
            release(ws)
