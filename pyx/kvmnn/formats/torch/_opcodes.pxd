from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    REFUSED = 0
    FIXED = 1  # `widths` bytes of argument
    COUNTED = 2  # a length of `widths` bytes, then as many bytes
    LINES = 3  # two lines

cdef uint8_t[256] kinds   # by opcode
cdef uint8_t[256] widths  # bytes of the argument, or of its length

cdef uint64_t number(const uint8_t *p, Py_ssize_t width) noexcept nogil
