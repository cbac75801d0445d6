from libc.stdint cimport uint8_t

from kvmnn.frames._workspace cimport Workspace


cdef size_t frame_bytes(Workspace ws, const uint8_t *src, size_t words, int stride) noexcept nogil
