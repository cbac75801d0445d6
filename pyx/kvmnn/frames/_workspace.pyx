"""What one worker of the frame codec works with: zstd contexts and two buffers, kept from call to call."""

from libc.stdint cimport uint8_t
from libc.stdlib cimport free

from kvmnn.frames._zstdlib cimport zstd


cdef extern from *:
    """
    #include <stdlib.h>
    #if defined(__linux__)
    #include <sys/mman.h>
    #endif

    /* malloc, with huge pages for large buffers where the system has them: streams are walked end to end, and small
       pages would cost more in faults and translation than everything kvmnn does to the bytes. */
    static void *kvmnn_alloc(size_t size) {
    #if defined(__linux__) && defined(MADV_HUGEPAGE)
        const size_t huge = (size_t)1 << 21;
        void *p;
        if (size >= 2 * huge) {
            if (posix_memalign(&p, huge, size) != 0) return NULL;
            madvise(p, size, MADV_HUGEPAGE);
            return p;
        }
    #endif
        return malloc(size);
    }
    """
    void *kvmnn_alloc(size_t size) nogil


cdef enum:
    KEEP_BYTES = 48 << 20  # kept between calls by all workspaces together


cdef class Workspace:
    """Contexts and buffers of one worker, kept between calls."""

    def __dealloc__(self):
        if self.cctx != NULL:
            zstd.free_cctx(self.cctx)
        if self.dctx != NULL:
            zstd.free_dctx(self.dctx)
        for i in range(2):
            free(self.buffers[i])

    cdef uint8_t *buffer(self, int which, size_t size) noexcept nogil:
        """At least `size` bytes whose content is undefined, or NULL."""
        if size > self.sizes[which]:
            free(self.buffers[which])
            self.buffers[which] = <uint8_t *>kvmnn_alloc(size)
            self.sizes[which] = size if self.buffers[which] != NULL else 0
        return self.buffers[which]

    cdef size_t size(self) noexcept:
        return self.sizes[0] + self.sizes[1]

    cdef void empty(self) noexcept:
        for i in range(2):
            free(self.buffers[i])
            self.buffers[i] = NULL
            self.sizes[i] = 0


cdef list _idle = []


cdef Workspace acquire(bint compress, bint decompress):
    cdef Workspace ws
    try:
        ws = _idle.pop()
    except IndexError:
        ws = Workspace.__new__(Workspace)
    if compress and ws.cctx == NULL:
        ws.cctx = zstd.new_cctx()
        if ws.cctx == NULL:
            raise MemoryError("no memory for a zstd compression context")
    if decompress and ws.dctx == NULL:
        ws.dctx = zstd.new_dctx()
        if ws.dctx == NULL:
            raise MemoryError("no memory for a zstd decompression context")
    return ws


cdef void release(Workspace ws) noexcept:
    cdef size_t kept = ws.size()
    cdef Workspace other
    for other in tuple(_idle):
        kept += other.size()
    if kept > KEEP_BYTES:
        ws.empty()
    if len(_idle) < 64:
        _idle.append(ws)


def forget_workspaces() -> None:
    """Free the memory kept between calls; also what a change of the libzstd in use needs."""
    _idle.clear()
