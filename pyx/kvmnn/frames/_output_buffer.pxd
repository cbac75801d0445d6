from libc.stdint cimport uint8_t

from cpython.object cimport PyObject


cdef class OutputBuffer:
    cdef PyObject *bytes_object
    cdef size_t size

    cdef uint8_t *pointer_at(self, size_t begin, size_t n) except NULL


cdef class OrderedWriter:
    cdef readonly OutputBuffer buffer
    cdef list staging_offsets, sizes
    cdef size_t final_end         # of the segments that lie where they stay
    cdef Py_ssize_t next_segment  # the first segment that does not
    cdef Py_ssize_t owner         # the segment that is written to where it stays
    cdef bint is_busy             # a thread writes or moves segments to where they stay

    cdef size_t acquire_offset(self, Py_ssize_t segment) except? 0
    cdef int commit(self, Py_ssize_t segment, size_t size) except -1
