"""Dense streams of method 2 (docs/format-v2.md) taken apart: rows of words from a payload."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

from kvmnn.dense._stream cimport TableSet, decode_rows, error_text, parse, put_header, shape_of
from kvmnn.dense.coding cimport (
    BUCKETS, CHECKSUM_AT, DENSE_OK, HEADER_BYTES, dense_error, dense_shape, dense_stream, dense_table_set
)

from ..errors import FrameError, KvmnnError


cdef enum:
    MOST_WORDS = 65536  # of a row, and one less of its heads and of its dim
    DTYPES = 3
    NEEDS_TABLES = 2    # of the flags, of which there are ...
    FLAGS = 3

cdef size_t MOST_BYTES = 0xFFFFFFFF


cdef class Rows:
    """A parsed stream of method 2; the header has been checked by the caller."""

    cdef dense_stream parsed
    cdef const uint8_t[::1] data

    def __init__(
        self, const uint8_t[::1] stream not None, int dtype, uint32_t heads, uint32_t dim, size_t rows, int flags
    ):
        cdef dense_error error
        memset(&self.parsed, 0, sizeof(self.parsed))
        self.data = stream
        self.parsed.shape = shape_of(dtype, heads, dim)
        self.parsed.rows, self.parsed.flags = rows, flags
        self.parsed.header, self.parsed.payload = &stream[0], &stream[0] + HEADER_BYTES
        self.parsed.payload_bytes = stream.shape[0] - HEADER_BYTES
        error = parse(&self.parsed)
        if error != DENSE_OK:
            raise FrameError(f"dense stream has {error_text(error)}")

    @property
    def history(self) -> int:
        return self.parsed.history

    @property
    def table_set(self):
        """The id of the table set that is needed, or None."""
        return self.parsed.set_id if self.parsed.flags & NEEDS_TABLES else None

    def sections(self) -> dict:
        """Bytes of each section."""
        cdef dense_stream *p = &self.parsed
        cdef size_t coded = 0, low_bytes = 0, words = 0
        for b in range(BUCKETS):
            if p.low_mask >> b & 1:
                coded += p.low_count[b]
                low_bytes += 16 + 2 * p.low_units[b]
        named = {
            "head": p.head_bytes, "exponents": p.exponent_count, "escapes": p.escape_count,
            "symbols": 16 + 2 * p.units, "low coded": low_bytes, "rest": p.rest_bytes,
        }
        return {"lengths": p.payload_bytes - sum(named.values()), **named}

    def decode(self, const uint8_t[::1] history, TableSet tables, uint8_t[::1] words not None) -> None:
        """All rows to `words`, of exactly their size.

        `FrameError` where the stream breaks a rule, and then `words` holds anything. `history` has as many rows as the
        stream says, and `tables` are those that it names.
        """
        cdef dense_error error
        cdef const uint8_t *before = NULL
        cdef const dense_table_set *held = NULL
        if history is not None and history.shape[0]:
            before = &history[0]
        if tables is not None:
            held = tables.held
        error = decode_rows(&self.parsed, held, before, &words[0])
        if error != DENSE_OK:
            needed = [name for name, used in (("history", before != NULL), ("tables", held != NULL)) if used]
            hint = f": it is damaged, or was made with other {' or '.join(needed)}" if needed else ""
            raise FrameError(f"dense stream has {error_text(error)}{hint}")


# -- with the least work for each of many streams ---------------------------------------------------------------------

cdef bint parse_usual(
    const uint8_t *stream, size_t n, const dense_shape *shape, size_t rows, dense_stream *parsed
) noexcept nogil:
    """Parse a stream of method 2 of so many rows of this shape. False for anything but such a one."""
    cdef uint8_t[HEADER_BYTES] header
    if n < HEADER_BYTES or n - HEADER_BYTES > MOST_BYTES or stream[7] & ~FLAGS:
        return False
    if not rows or rows > MOST_BYTES // (shape.words * shape.word_bytes):
        return False
    put_header(header, shape, stream[7], rows, n - HEADER_BYTES)
    if memcmp(header, stream, CHECKSUM_AT):
        return False
    memset(parsed, 0, sizeof(dense_stream))
    parsed.shape, parsed.rows, parsed.flags = shape[0], rows, stream[7]
    parsed.header, parsed.payload, parsed.payload_bytes = stream, stream + HEADER_BYTES, n - HEADER_BYTES
    return parse(parsed) == DENSE_OK


cdef bint decode_usual(const dense_stream *parsed, TableSet tables, const uint8_t *history, uint8_t *words) except -1:
    """Decode all rows to `words`. False where they break a rule, and then `words` holds anything."""
    cdef const dense_table_set *held = NULL
    if parsed.flags & NEEDS_TABLES:
        if tables is None:
            return False
        held = tables.held
    return decode_rows(parsed, held, history, words) == DENSE_OK


def decode_alone(stream, TableSet tables, size_t most, empty, tuple types):
    """The words of a stream of method 2 that refers to no rows before it, `[token, kv_head, head_dim]`: an array that
    `empty` makes of the shape and the entry of `types` for its dtype.

    None for anything else, for more than `most` bytes, and for what does not decode: to say why takes longer.
    """
    cdef Py_buffer view, words
    cdef dense_stream parsed
    cdef dense_shape shape
    cdef const uint8_t *at
    cdef uint16_t heads, dim
    cdef uint32_t rows
    PyObject_GetBuffer(stream, &view, PyBUF_SIMPLE)
    try:
        at = <const uint8_t *>view.buf
        if view.len < HEADER_BYTES or at[6] >= DTYPES:
            return None
        memcpy(&heads, at + 8, 2)
        memcpy(&dim, at + 10, 2)
        memcpy(&rows, at + 12, 4)
        shape = shape_of(at[6], heads, dim)
        if not heads or not dim or shape.words > MOST_WORDS or not parse_usual(at, view.len, &shape, rows, &parsed):
            return None
        if parsed.history or rows * shape.words * shape.word_bytes > most:
            return None
        made = empty((rows, heads, dim), types[shape.dtype])
        PyObject_GetBuffer(made, &words, PyBUF_WRITABLE)
        try:
            return made if decode_usual(&parsed, tables, NULL, <uint8_t *>words.buf) else None
        finally:
            PyBuffer_Release(&words)
    finally:
        PyBuffer_Release(&view)


cdef class Place:
    """Rows of words, token by token in memory, to which streams of method 2 are decoded one behind the other."""

    cdef dense_shape shape
    cdef size_t row_bytes, rows
    cdef uint8_t[::1] words

    def __init__(self, int dtype, uint32_t heads, uint32_t dim, uint8_t[::1] words not None):
        self.shape = shape_of(dtype, heads, dim)
        self.row_bytes = self.shape.words * self.shape.word_bytes
        if not heads or not dim or self.shape.words > MOST_WORDS or heads == MOST_WORDS or dim == MOST_WORDS:
            raise KvmnnError(f"rows of {heads} heads of {dim}: no stream has them")
        self.words, self.rows = words, words.shape[0] // self.row_bytes

    def decode(
        self, const uint8_t[::1] stream not None, uint64_t checksum, TableSet tables, size_t begin, size_t tokens,
        size_t history
    ) -> bool:
        """Decode a stream of so many `tokens` and of this `checksum` to the rows from `begin` on; it refers to no more
        than `history` rows before them. False for anything but such a stream, and then these rows hold anything.
        """
        cdef size_t n = stream.shape[0]
        cdef dense_stream parsed
        cdef uint8_t *own
        if begin > self.rows or tokens > self.rows - begin or history > begin:
            return False
        if not n or not parse_usual(&stream[0], n, &self.shape, tokens, &parsed) or parsed.history > history:
            return False
        if memcmp(&stream[CHECKSUM_AT], &checksum, sizeof(checksum)):
            return False
        own = &self.words[0] + begin * self.row_bytes
        return decode_usual(&parsed, tables, own - parsed.history * self.row_bytes, own)
