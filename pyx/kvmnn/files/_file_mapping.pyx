"""Files mapped for reading, which stay readable if the file is truncated: see fault_guard.h."""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_SetFromErrno


cdef extern from "fault_guard.h" nogil:
    ctypedef struct kv_region:
        pass
    kv_region *kv_watch(void *address, size_t nbytes)
    void kv_unwatch(kv_region *region)
    void kv_release(kv_region *region)
    bint kv_is_damaged(const kv_region *region)
    int kv_dup(int fd)
    void kv_close(int fd)
    void *kv_map(int fd, size_t nbytes)
    void kv_release_pages(void *address, size_t nbytes)
    void kv_unmap(void *address, size_t nbytes)


cdef class DamageMonitor:
    """Records whether a mapping was damaged, also after the mapping is gone."""

    cdef kv_region *_region

    @property
    def is_damaged(self) -> bool:
        """Return whether a page could not be read: it and all later pages read as zeros."""
        return self._region != NULL and kv_is_damaged(self._region)

    def __dealloc__(self):
        if self._region != NULL:
            kv_release(self._region)


cdef class FileMapping:
    """The first `nbytes` bytes (at least 1) of an open file as a read-only buffer; `fileno` is a descriptor of its own.

    Raises
    ------
    OSError
        When the file cannot be mapped.
    """

    cdef readonly DamageMonitor monitor
    cdef readonly Py_ssize_t nbytes
    cdef object __weakref__
    cdef void *_address
    cdef int _fd
    cdef bint _is_open

    def __cinit__(self, int fd, Py_ssize_t nbytes):
        self._fd = kv_dup(fd)
        if self._fd < 0:
            PyErr_SetFromErrno(OSError)
        self._is_open = True
        self._address = kv_map(self._fd, nbytes)
        if self._address == NULL:
            PyErr_SetFromErrno(OSError)
        self.nbytes = nbytes
        self.monitor = DamageMonitor.__new__(DamageMonitor)
        self.monitor._region = kv_watch(self._address, nbytes)
        if self.monitor._region == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.monitor is not None and self.monitor._region != NULL:
            kv_unwatch(self.monitor._region)
        if self._address != NULL:
            kv_unmap(self._address, self.nbytes)
        if self._is_open:
            kv_close(self._fd)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self._address, self.nbytes, 1, flags)

    def fileno(self) -> int:
        """Return the descriptor of the file, open as long as the mapping."""
        return self._fd

    def release_pages(self, Py_ssize_t offset, Py_ssize_t nbytes) -> None:
        """Release pages: `offset` is a multiple of the page size, and the range lies within the mapping."""
        kv_release_pages(<char *> self._address + offset, nbytes)
