from libc.stdint cimport uint8_t

from kvmnn.frames._workspace cimport Workspace


cdef size_t measure_frame(Workspace ws, const uint8_t *src, size_t num_elements, int itemsize) noexcept nogil
