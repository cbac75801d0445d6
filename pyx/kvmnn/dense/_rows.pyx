"""Decode dense streams of method 2 (docs/format-v2.md): payload to rows of words."""

# A dense stream is encoded in one call without the GIL, the trial of a frame included, and most are decoded so, after
# half a microsecond of Python (`decode_alone`). Two threads over short blocks run in step: each meets the other at the
# GIL again and again, and would wait there longer than a block takes.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

from kvmnn.dense._stream cimport TableSet, decode_rows, error_text, make_shape, parse_sections, write_header
from kvmnn.dense.codec cimport (
    CHECKSUM_OFFSET, DENSE_OK, HEADER_BYTES, SIMILARITY_CLASSES, dense_error, dense_shape, dense_stream,
    dense_table_set,
)

from ..errors import FrameError, KvmnnError


cdef enum:
    MAX_ROW_WORDS = 65536  # of a row, and one less of its heads and of its dim
    NUM_DTYPES = 3
    NEEDS_TABLES = 2    # of the flags, of which there are ...
    FLAG_MASK = 3

cdef size_t MAX_RAW_BYTES = 0xFFFFFFFF


cdef class RowsPayload:
    """A parsed stream of method 2; the header has been checked by the caller."""

    cdef dense_stream parsed_stream
    cdef const uint8_t[::1] data

    def __init__(
        self, const uint8_t[::1] stream not None, int dtype, uint32_t heads, uint32_t dim, size_t rows, int flags
    ):
        cdef dense_error error
        memset(&self.parsed_stream, 0, sizeof(self.parsed_stream))
        self.data = stream
        self.parsed_stream.shape = make_shape(dtype, heads, dim)
        self.parsed_stream.rows, self.parsed_stream.flags = rows, flags
        self.parsed_stream.header, self.parsed_stream.payload = &stream[0], &stream[0] + HEADER_BYTES
        self.parsed_stream.payload_bytes = stream.shape[0] - HEADER_BYTES
        error = parse_sections(&self.parsed_stream)
        if error != DENSE_OK:
            raise FrameError(f"dense stream has {error_text(error)}")

    @property
    def history(self) -> int:
        return self.parsed_stream.history

    @property
    def table_set(self):
        """Return the id of the table set that the stream requires, or None."""
        return self.parsed_stream.set_id if self.parsed_stream.flags & NEEDS_TABLES else None

    def sections(self) -> dict:
        """Return the number of bytes of each section."""
        cdef dense_stream *parsed_struct = &self.parsed_stream
        cdef size_t num_coded = 0, low_bytes = 0, words = 0
        for b in range(SIMILARITY_CLASSES):
            if parsed_struct.low_mask >> b & 1:
                num_coded += parsed_struct.low_count[b]
                low_bytes += 16 + 2 * parsed_struct.num_low_units[b]
        section_bytes = {
            "head": parsed_struct.head_bytes, "exponents": parsed_struct.exponent_count,
            "escapes": parsed_struct.escape_count, "symbols": 16 + 2 * parsed_struct.num_units, "low coded": low_bytes,
            "rest": parsed_struct.uncoded_low_bytes,
        }
        return {"lengths": parsed_struct.payload_bytes - sum(section_bytes.values()), **section_bytes}

    def decode(self, const uint8_t[::1] history, TableSet tables, uint8_t[::1] words not None) -> None:
        """Decode all rows to `words`, of exactly their size.

        `FrameError` if the stream breaks a rule; `words` is undefined then. `history` has the number of rows that the
        stream requires, and `tables` is the set that it names.
        """
        cdef dense_error error
        cdef const uint8_t *history_rows = NULL
        cdef const dense_table_set *native_tables = NULL
        if history is not None and history.shape[0]:
            history_rows = &history[0]
        if tables is not None:
            native_tables = tables.native
        error = decode_rows(&self.parsed_stream, native_tables, history_rows, &words[0])
        if error != DENSE_OK:
            inputs = (("history", history_rows != NULL), ("tables", native_tables != NULL))
            input_names = [name for name, is_used in inputs if is_used]
            hint = f": it is damaged, or was made with other {' or '.join(input_names)}" if input_names else ""
            raise FrameError(f"dense stream has {error_text(error)}{hint}")


# -- with the least work for each of many streams ---------------------------------------------------------------------

cdef bint parse_expected(
    const uint8_t *stream, size_t n, const dense_shape *shape, size_t rows, dense_stream *result
) noexcept nogil:
    """Parse a stream of method 2 with this number and shape of rows; return False for any other stream."""
    cdef uint8_t[HEADER_BYTES] header
    if n < HEADER_BYTES or n - HEADER_BYTES > MAX_RAW_BYTES or stream[7] & ~FLAG_MASK:
        return False
    if not rows or rows > MAX_RAW_BYTES // (shape.words * shape.word_bytes):
        return False
    write_header(header, shape, stream[7], rows, n - HEADER_BYTES)
    if memcmp(header, stream, CHECKSUM_OFFSET):
        return False
    memset(result, 0, sizeof(dense_stream))
    result.shape, result.rows, result.flags = shape[0], rows, stream[7]
    result.header, result.payload, result.payload_bytes = stream, stream + HEADER_BYTES, n - HEADER_BYTES
    return parse_sections(result) == DENSE_OK


cdef bint decode_parsed(
    const dense_stream *parsed_struct, TableSet tables, const uint8_t *history, uint8_t *words
) except -1:
    """Decode all rows to `words`; return False if they break a rule, with `words` undefined."""
    cdef const dense_table_set *native_tables = NULL
    if parsed_struct.flags & NEEDS_TABLES:
        if tables is None:
            return False
        native_tables = tables.native
    return decode_rows(parsed_struct, native_tables, history, words) == DENSE_OK


def decode_short_block(stream, TableSet tables, size_t max_bytes, allocate, tuple numpy_types):
    """Decode a stream of method 2 that refers to no earlier rows to an array `[token, kv_head, head_dim]`.

    `allocate` creates the array from the shape and the entry of `numpy_types` for its dtype. Return None for anything
    else, above `max_bytes` bytes, and for invalid streams, which `decode` explains.
    """
    cdef Py_buffer view, words
    cdef dense_stream parsed_struct
    cdef dense_shape shape
    cdef const uint8_t *header_bytes
    cdef uint16_t heads, dim
    cdef uint32_t rows
    PyObject_GetBuffer(stream, &view, PyBUF_SIMPLE)
    try:
        header_bytes = <const uint8_t *>view.buf
        if view.len < HEADER_BYTES or header_bytes[6] >= NUM_DTYPES:
            return None
        memcpy(&heads, header_bytes + 8, 2)
        memcpy(&dim, header_bytes + 10, 2)
        memcpy(&rows, header_bytes + 12, 4)
        shape = make_shape(header_bytes[6], heads, dim)
        if not heads or not dim or shape.words > MAX_ROW_WORDS:
            return None
        if not parse_expected(header_bytes, view.len, &shape, rows, &parsed_struct):
            return None
        if parsed_struct.history or rows * shape.words * shape.word_bytes > max_bytes:
            return None
        array = allocate((rows, heads, dim), numpy_types[shape.dtype])
        PyObject_GetBuffer(array, &words, PyBUF_WRITABLE)
        try:
            return array if decode_parsed(&parsed_struct, tables, NULL, <uint8_t *>words.buf) else None
        finally:
            PyBuffer_Release(&words)
    finally:
        PyBuffer_Release(&view)


cdef class RowDestination:
    """Rows of words in memory, token by token, to which streams of method 2 are decoded one after the other."""

    cdef dense_shape shape
    cdef size_t row_bytes, rows
    cdef uint8_t[::1] words

    def __init__(self, int dtype, uint32_t heads, uint32_t dim, uint8_t[::1] words not None):
        self.shape = make_shape(dtype, heads, dim)
        self.row_bytes = self.shape.words * self.shape.word_bytes
        if not heads or not dim or self.shape.words > MAX_ROW_WORDS or heads == MAX_ROW_WORDS or dim == MAX_ROW_WORDS:
            raise KvmnnError(f"rows of {heads} heads of {dim}: no stream has them")
        self.words, self.rows = words, words.shape[0] // self.row_bytes

    def decode(
        self, const uint8_t[::1] stream not None, uint64_t checksum, TableSet tables, size_t begin, size_t tokens,
        size_t history
    ) -> bool:
        """Decode a stream of `tokens` tokens and this `checksum` to the rows from `begin` on.

        It may refer to at most `history` rows before them. Return False for any other stream, with these rows
        undefined.
        """
        cdef size_t n = stream.shape[0]
        cdef dense_stream parsed_struct
        cdef uint8_t *out_rows
        if begin > self.rows or tokens > self.rows - begin or history > begin:
            return False
        if not n or not parse_expected(&stream[0], n, &self.shape, tokens, &parsed_struct):
            return False
        if parsed_struct.history > history:
            return False
        if memcmp(&stream[CHECKSUM_OFFSET], &checksum, sizeof(checksum)):
            return False
        out_rows = &self.words[0] + begin * self.row_bytes
        return decode_parsed(&parsed_struct, tables, out_rows - parsed_struct.history * self.row_bytes, out_rows)
