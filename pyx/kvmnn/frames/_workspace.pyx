"""Workspaces of the frame codec: zstd contexts and two buffers for one worker, reused from call to call."""

# A thread gets the workspace that it used last: its buffers are in the caches of that processor. Two threads over short
# blocks gain 1.86 and 2.14 times so, and 1.6 and 1.8 at worst with any workspace. Where all workspaces together hold
# too much, that of a large call is freed first.
#
# Small results do not get huge pages, large ones do: faults of new memory in small pages take three times as long, a
# tenth of an exact frame of 16 MiB.

import ctypes

from libc.stdint cimport uint8_t, uintptr_t

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.object cimport PyObject

from kvmnn.frames._zstdlib cimport zstd


cdef extern from *:
    """
    #include <stdint.h>
    #include <stdlib.h>
    #if defined(__linux__)
    #include <sys/mman.h>
    #endif

    /* malloc, but for large buffers pages of their own. Huge ones where the system has them: streams are walked end to
       end, and small pages would cost more in faults and translation than everything kvmnn does to the bytes. And not
       malloc's, because a large block that is freed teaches glibc to keep all later ones up to its size in its heaps,
       those of arrays included. */
    #if defined(__linux__) && defined(MADV_HUGEPAGE)
    #define KVMNN_HUGE_PAGE_BYTES ((size_t)1 << 21)
    #define KVMNN_USES_OWN_PAGES(size) \\
        ((size) >= 2 * KVMNN_HUGE_PAGE_BYTES && (size) < SIZE_MAX - 2 * KVMNN_HUGE_PAGE_BYTES)
    #define KVMNN_ROUND_TO_HUGE_PAGES(size) \\
        (((size) + KVMNN_HUGE_PAGE_BYTES - 1) / KVMNN_HUGE_PAGE_BYTES * KVMNN_HUGE_PAGE_BYTES)
    #endif

    static void *kvmnn_alloc(size_t size) {
    #ifdef KVMNN_HUGE_PAGE_BYTES
        if (KVMNN_USES_OWN_PAGES(size)) {
            size_t size_in_pages = KVMNN_ROUND_TO_HUGE_PAGES(size), lead;
            char *p = mmap(
                NULL, size_in_pages + KVMNN_HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                0);
            if (p == MAP_FAILED) return NULL;
            lead = (KVMNN_HUGE_PAGE_BYTES - (uintptr_t)p % KVMNN_HUGE_PAGE_BYTES) % KVMNN_HUGE_PAGE_BYTES;
            if (lead) munmap(p, lead);
            munmap(p + lead + size_in_pages, KVMNN_HUGE_PAGE_BYTES - lead);
            madvise(p + lead, size_in_pages, MADV_HUGEPAGE);
            return p + lead;
        }
    #endif
        return malloc(size);
    }

    static void kvmnn_free(void *p, size_t size) {
    #ifdef KVMNN_HUGE_PAGE_BYTES
        if (p != NULL && KVMNN_USES_OWN_PAGES(size)) {
            munmap(p, KVMNN_ROUND_TO_HUGE_PAGES(size));
            return;
        }
    #endif
        (void)size;
        free(p);
    }

    /* Huge pages for a large object of Python's that is about to be written: small ones would cost more in faults than
       what is written costs. numpy does the same for its arrays. */
    static void kvmnn_use_huge_pages(void *p, size_t size) {
    #ifdef KVMNN_HUGE_PAGE_BYTES
        uintptr_t begin = ((uintptr_t)p + KVMNN_HUGE_PAGE_BYTES - 1) / KVMNN_HUGE_PAGE_BYTES * KVMNN_HUGE_PAGE_BYTES;
        uintptr_t end = ((uintptr_t)p + size) / KVMNN_HUGE_PAGE_BYTES * KVMNN_HUGE_PAGE_BYTES;
        if (size >= 2 * KVMNN_HUGE_PAGE_BYTES && begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
    #else
        (void)p;
        (void)size;
    #endif
    }
    """
    void *kvmnn_alloc(size_t size) nogil
    void kvmnn_free(void *p, size_t size) noexcept nogil
    void kvmnn_use_huge_pages(void *p, size_t size) noexcept nogil


cdef extern from "Python.h":
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *content, Py_ssize_t size) except NULL
    void Py_DECREF(PyObject *object)
    unsigned long this_thread "PyThread_get_thread_ident"() noexcept


ctypedef int (*resize_fn)(PyObject **made, Py_ssize_t size) except -1

cdef resize_fn _resize = NULL


def set_resize_function(address) -> None:
    """Set the address of `_PyBytes_Resize`, which is not in the stable ABI, for shrinking bytes; 0 copies instead."""
    global _resize
    _resize = <resize_fn><uintptr_t>int(address)


set_resize_function(ctypes.cast(getattr(ctypes.pythonapi, "_PyBytes_Resize", 0), ctypes.c_void_p).value or 0)


cdef enum:
    MAX_IDLE_BYTES = 80 << 20   # kept between calls by all workspaces together
    MAX_FREED_BYTES = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX of glibc: larger blocks always get new pages


cdef class Workspace:
    """Contexts and buffers of one worker, kept between calls."""

    def __dealloc__(self):
        if self.cctx != NULL:
            zstd.free_cctx(self.cctx)
        if self.dctx != NULL:
            zstd.free_dctx(self.dctx)
        for i in range(NUM_BUFFERS):
            kvmnn_free(self.buffers[i], self.sizes[i])

    cdef uint8_t *get_buffer(self, int index, size_t size) noexcept nogil:
        """Return at least `size` bytes of undefined content, or NULL."""
        self.needed_bytes[index] = max(self.needed_bytes[index], size)
        if size > self.sizes[index]:
            kvmnn_free(self.buffers[index], self.sizes[index])
            self.buffers[index] = <uint8_t *>kvmnn_alloc(size)
            self.sizes[index] = size if self.buffers[index] != NULL else 0
        return self.buffers[index]

    cdef size_t total_size(self) noexcept:
        cdef size_t total = 0
        for i in range(NUM_BUFFERS):
            total += self.sizes[i]
        return total

    cdef bint is_oversized(self) noexcept:
        """Return whether the buffers are far larger than the last call needed."""
        cdef size_t needed_total = 0
        for i in range(NUM_BUFFERS):
            needed_total += self.needed_bytes[i]
        return self.total_size() > 2 * needed_total

    cdef void free_buffers(self) noexcept:
        for i in range(NUM_BUFFERS):
            kvmnn_free(self.buffers[i], self.sizes[i])
            self.buffers[i] = NULL
            self.sizes[i] = 0


cdef list _idle = []


cdef Workspace take_idle():
    """Take the workspace that this thread used last, which is in its processor's caches, else another or a new one."""
    cdef unsigned long thread = this_thread()
    cdef Py_ssize_t i = len(_idle)
    cdef Workspace ws
    try:
        while i > 0:
            i -= 1
            ws = _idle[i]
            if ws.thread == thread:
                break
        else:
            i = -1
        ws = _idle.pop(i)
    except IndexError:  # none waits
        ws = Workspace.__new__(Workspace)
    ws.thread = thread
    return ws


cdef Workspace acquire(bint compress, bint decompress):
    cdef Workspace ws = take_idle()
    for i in range(NUM_BUFFERS):
        ws.needed_bytes[i] = 0
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
    """Return `ws` to the idle ones, within MAX_IDLE_BYTES.

    To stay within this limit, memory of `ws` is freed first if it has far more than this call needed, then that of the
    workspaces idle longest: their threads may be gone, and the caller's next call likely needs what it has just used.
    """
    cdef size_t idle_bytes = ws.total_size()
    cdef Workspace workspace
    for workspace in _idle:
        idle_bytes += workspace.total_size()
    if idle_bytes > MAX_IDLE_BYTES and ws.is_oversized():
        idle_bytes -= ws.total_size()
        ws.free_buffers()
    for workspace in (*_idle, ws):
        if idle_bytes <= MAX_IDLE_BYTES:
            break
        idle_bytes -= workspace.total_size()
        workspace.free_buffers()
    if len(_idle) < 64:
        _idle.append(ws)


cdef size_t _max_freed_bytes = 0


cdef PyObject *allocate_bytes(size_t capacity) except NULL:
    """Allocate a bytes object of yet unknown final size, which the caller fills before anyone else sees it.

    The caller owns the reference, for `shrink_bytes`. glibc reuses memory for blocks up to the largest one that was
    freed, within limits; larger blocks get new pages every time, which must be cleared. A shrunk block is never the
    largest, so one of full size is freed.
    """
    global _max_freed_bytes
    cdef PyObject *bytes_object
    if _max_freed_bytes < capacity <= MAX_FREED_BYTES:
        Py_DECREF(new_bytes(NULL, capacity))
        _max_freed_bytes = capacity
    bytes_object = new_bytes(NULL, capacity)
    kvmnn_use_huge_pages(<void *>PyBytes_AsString(<object>bytes_object), capacity)
    return bytes_object


cdef bytes shrink_bytes(PyObject **bytes_object, size_t size):
    """Shrink the result of `allocate_bytes`, the only reference to it, to `size`; consumes that reference."""
    cdef bytes result
    if _resize != NULL:
        _resize(bytes_object, size)
        result = <bytes>bytes_object[0]
    else:
        result = PyBytes_FromStringAndSize(PyBytes_AsString(<object>bytes_object[0]), size)
    Py_DECREF(bytes_object[0])
    bytes_object[0] = NULL
    return result


def clear_workspaces() -> None:
    """Free the memory kept between calls; also required when the libzstd in use changes."""
    _idle.clear()
