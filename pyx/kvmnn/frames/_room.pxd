from libc.stdint cimport uint8_t

from cpython.object cimport PyObject


cdef class Room:
    cdef PyObject *made
    cdef size_t size

    cdef uint8_t *at(self, size_t begin, size_t n) except NULL
