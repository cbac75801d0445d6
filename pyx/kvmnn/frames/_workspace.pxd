from libc.stdint cimport uint8_t

from cpython.object cimport PyObject


cdef enum:
    NUM_BUFFERS = 3


cdef class Workspace:
    cdef void *cctx
    cdef void *dctx
    cdef uint8_t *buffers[NUM_BUFFERS]
    cdef size_t sizes[NUM_BUFFERS]
    cdef size_t needed_bytes[NUM_BUFFERS]  # of them, since it was acquired
    cdef unsigned long thread

    cdef uint8_t *get_buffer(self, int index, size_t size) noexcept nogil
    cdef size_t total_size(self) noexcept
    cdef bint is_oversized(self) noexcept
    cdef void free_buffers(self) noexcept


cdef Workspace acquire(bint compress, bint decompress)
cdef void release(Workspace ws) noexcept

cdef PyObject *allocate_bytes(size_t capacity) except NULL
cdef bytes shrink_bytes(PyObject **bytes_object, size_t size)
