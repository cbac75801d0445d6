from libc.stdint cimport uint8_t

from cpython.object cimport PyObject


cdef class Room:
    cdef PyObject *made
    cdef size_t size

    cdef uint8_t *at(self, size_t begin, size_t n) except NULL


cdef class Track:
    cdef readonly Room room
    cdef list begins, sizes
    cdef size_t end            # of the pieces that lie where they stay
    cdef Py_ssize_t behind     # the first piece that does not
    cdef Py_ssize_t turn       # the piece that is written to where it stays
    cdef bint busy             # a thread writes or moves pieces to where they stay

    cdef size_t place(self, Py_ssize_t piece) except? 0
    cdef int done(self, Py_ssize_t piece, size_t size) except -1
