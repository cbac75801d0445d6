from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    KIND_REFUSED = 0
    KIND_FIXED = 1  # `widths` bytes of argument
    KIND_LENGTH_PREFIXED = 2  # a length of `widths` bytes, then as many bytes
    KIND_TWO_LINES = 3  # two lines

cdef uint8_t[256] kinds   # by opcode
cdef uint8_t[256] widths  # bytes of the argument, or of its length

cdef uint64_t read_number(const uint8_t *p, Py_ssize_t width) noexcept nogil
