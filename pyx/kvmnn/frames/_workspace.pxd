from libc.stdint cimport uint8_t

from cpython.object cimport PyObject


cdef enum:
    BUFFERS = 3


cdef class Workspace:
    cdef void *cctx
    cdef void *dctx
    cdef uint8_t *buffers[BUFFERS]
    cdef size_t sizes[BUFFERS]
    cdef size_t needed[BUFFERS]  # of them, since it was acquired
    cdef unsigned long thread

    cdef uint8_t *buffer(self, int which, size_t size) noexcept nogil
    cdef size_t size(self) noexcept
    cdef bint is_far_too_large(self) noexcept
    cdef void empty(self) noexcept


cdef Workspace acquire(bint compress, bint decompress)
cdef void release(Workspace ws) noexcept

cdef PyObject *unfinished_bytes(size_t most) except NULL
cdef bytes shortened(PyObject **unfinished, size_t size)
