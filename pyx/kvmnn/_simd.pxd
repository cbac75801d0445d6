cdef extern from "kvmnn/simd.h" nogil:
    int kvmnn_simd_is_supported(int level)

cdef int active_level  # an index into every table of levels
