"""What one worker of the frame codec works with: zstd contexts and two buffers, kept from call to call."""

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
    #define KVMNN_HUGE ((size_t)1 << 21)
    #define KVMNN_OWN_PAGES(size) ((size) >= 2 * KVMNN_HUGE && (size) < SIZE_MAX - 2 * KVMNN_HUGE)
    #define KVMNN_PAGES(size) (((size) + KVMNN_HUGE - 1) / KVMNN_HUGE * KVMNN_HUGE)
    #endif

    static void *kvmnn_alloc(size_t size) {
    #ifdef KVMNN_HUGE
        if (KVMNN_OWN_PAGES(size)) {
            size_t room = KVMNN_PAGES(size), before;
            char *p = mmap(NULL, room + KVMNN_HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (p == MAP_FAILED) return NULL;
            before = (KVMNN_HUGE - (uintptr_t)p % KVMNN_HUGE) % KVMNN_HUGE;
            if (before) munmap(p, before);
            munmap(p + before + room, KVMNN_HUGE - before);
            madvise(p + before, room, MADV_HUGEPAGE);
            return p + before;
        }
    #endif
        return malloc(size);
    }

    static void kvmnn_free(void *p, size_t size) {
    #ifdef KVMNN_HUGE
        if (p != NULL && KVMNN_OWN_PAGES(size)) {
            munmap(p, KVMNN_PAGES(size));
            return;
        }
    #endif
        (void)size;
        free(p);
    }

    /* Huge pages for a large object of Python's that is about to be written: small ones would cost more in faults than
       what is written costs. numpy does the same for its arrays. */
    static void kvmnn_use_huge_pages(void *p, size_t size) {
    #ifdef KVMNN_HUGE
        uintptr_t begin = ((uintptr_t)p + KVMNN_HUGE - 1) / KVMNN_HUGE * KVMNN_HUGE;
        uintptr_t end = ((uintptr_t)p + size) / KVMNN_HUGE * KVMNN_HUGE;
        if (size >= 2 * KVMNN_HUGE && begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
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
    void Py_DECREF(PyObject *one)
    unsigned long this_thread "PyThread_get_thread_ident"() noexcept


ctypedef int (*resize_fn)(PyObject **made, Py_ssize_t size) except -1

cdef resize_fn _resize = NULL


def use_resize(address) -> None:
    """Shorten bytes by `_PyBytes_Resize`, which is no part of the stable ABI, at this address; by a copy where it is 0."""
    global _resize
    _resize = <resize_fn><uintptr_t>int(address)


use_resize(ctypes.cast(getattr(ctypes.pythonapi, "_PyBytes_Resize", 0), ctypes.c_void_p).value or 0)


cdef enum:
    KEEP_BYTES = 80 << 20   # kept between calls by all workspaces together
    FREED_UP_TO = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX of glibc: larger blocks always get new pages


cdef class Workspace:
    """Contexts and buffers of one worker, kept between calls."""

    def __dealloc__(self):
        if self.cctx != NULL:
            zstd.free_cctx(self.cctx)
        if self.dctx != NULL:
            zstd.free_dctx(self.dctx)
        for i in range(BUFFERS):
            kvmnn_free(self.buffers[i], self.sizes[i])

    cdef uint8_t *buffer(self, int which, size_t size) noexcept nogil:
        """At least `size` bytes whose content is undefined, or NULL."""
        self.needed[which] = max(self.needed[which], size)
        if size > self.sizes[which]:
            kvmnn_free(self.buffers[which], self.sizes[which])
            self.buffers[which] = <uint8_t *>kvmnn_alloc(size)
            self.sizes[which] = size if self.buffers[which] != NULL else 0
        return self.buffers[which]

    cdef size_t size(self) noexcept:
        cdef size_t all_of_them = 0
        for i in range(BUFFERS):
            all_of_them += self.sizes[i]
        return all_of_them

    cdef bint is_far_too_large(self) noexcept:
        """For what it was needed for."""
        cdef size_t needed = 0
        for i in range(BUFFERS):
            needed += self.needed[i]
        return self.size() > 2 * needed

    cdef void empty(self) noexcept:
        for i in range(BUFFERS):
            kvmnn_free(self.buffers[i], self.sizes[i])
            self.buffers[i] = NULL
            self.sizes[i] = 0


cdef list _idle = []


cdef Workspace idle():
    """The one that this thread has used last, whose memory is in the caches of its processor, or another, or a new one."""
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
    cdef Workspace ws = idle()
    for i in range(BUFFERS):
        ws.needed[i] = 0
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
    """Keep `ws` for the next call. What does not fit into KEEP_BYTES is taken from `ws` if it has far more than this call
    has needed, then from those that wait the longest: they may be of threads that are gone, and the caller's next call is
    likely to need what it has just used."""
    cdef size_t kept = ws.size()
    cdef Workspace other
    for other in _idle:
        kept += other.size()
    if kept > KEEP_BYTES and ws.is_far_too_large():
        kept -= ws.size()
        ws.empty()
    for other in (*_idle, ws):
        if kept <= KEEP_BYTES:
            break
        kept -= other.size()
        other.empty()
    if len(_idle) < 64:
        _idle.append(ws)


cdef size_t _freed_most = 0


cdef PyObject *unfinished_bytes(size_t most) except NULL:
    """Bytes that the caller writes, all that stay, before anyone else sees them; it is not known yet how many they become.
    A reference of the caller's, for `shortened`.

    glibc gives blocks up to the largest one that was freed, within limits, memory that has been used before; larger
    ones get new pages every time, each to be cleared. What is shortened never is the largest, so such a one is freed.
    """
    global _freed_most
    cdef PyObject *made
    if _freed_most < most <= FREED_UP_TO:
        Py_DECREF(new_bytes(NULL, most))
        _freed_most = most
    made = new_bytes(NULL, most)
    kvmnn_use_huge_pages(<void *>PyBytes_AsString(<object>made), most)
    return made


cdef bytes shortened(PyObject **unfinished, size_t size):
    """The first `size` of `unfinished_bytes`, which nobody else knows; the caller has no reference any more."""
    cdef bytes made
    if _resize != NULL:
        _resize(unfinished, size)
        made = <bytes>unfinished[0]
    else:
        made = PyBytes_FromStringAndSize(PyBytes_AsString(<object>unfinished[0]), size)
    Py_DECREF(unfinished[0])
    unfinished[0] = NULL
    return made


def forget_workspaces() -> None:
    """Free the memory kept between calls; also what a change of the libzstd in use needs."""
    _idle.clear()
