"""A bytes object that several threads write parts of, shrunk to its final size at the end."""

# Parts of a long frame are written into its own buffer, by several threads, before the length of each is known. A part
# for which all parts before it are there is written in its final place. One that is ready too early is written where it
# would be if all before it had their largest size, and the thread that closes the gap moves it. New memory for each
# part (12 microseconds for a page of 4 KiB) was a third of the time, and moving all parts at the end a tenth of what
# two threads took.

from libc.stdint cimport uint8_t
from libc.string cimport memcpy, memmove

from cpython.buffer cimport PyBUF_READ
from cpython.bytes cimport PyBytes_AsString
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport Py_XDECREF

from kvmnn.frames._workspace cimport allocate_bytes, shrink_bytes

from ..errors import KvmnnError


cdef enum:
    NO_OWNER = -1


cdef class OutputBuffer:
    """A buffer of `capacity` uninitialised bytes; if large, unwritten pages use no memory."""

    def __init__(self, size_t capacity):
        self.bytes_object = allocate_bytes(capacity)
        self.size = capacity

    def __dealloc__(self):
        Py_XDECREF(self.bytes_object)

    cdef uint8_t *pointer_at(self, size_t begin, size_t n) except NULL:
        """Return the address of n bytes at an offset."""
        if self.bytes_object == NULL or begin > self.size or n > self.size - begin:
            raise KvmnnError(f"{n} bytes at {begin} of {self.size if self.bytes_object != NULL else 0}: not there")
        return <uint8_t *>PyBytes_AsString(<object>self.bytes_object) + begin

    def write(self, size_t begin, const uint8_t[::1] fragment not None) -> None:
        """Copy `fragment` to the offset `begin`."""
        cdef size_t n = fragment.shape[0]
        cdef uint8_t *target = self.pointer_at(begin, n)
        if n:
            with nogil:
                memcpy(target, &fragment[0], n)

    def move(self, size_t target, size_t begin, size_t n) -> None:
        """Move n written bytes from `begin` to their final offset."""
        cdef uint8_t *source = self.pointer_at(begin, n)
        cdef uint8_t *destination = self.pointer_at(target, n)
        if source != destination:
            with nogil:
                memmove(destination, source, n)

    def view(self, size_t begin, size_t n) -> memoryview:
        """Return a view of written bytes, valid until the buffer is finished."""
        return PyMemoryView_FromMemory(<char *>self.pointer_at(begin, n), n, PyBUF_READ)

    def finish(self, size_t size) -> bytes:
        """Return the first `size` bytes, and release the buffer."""
        self.pointer_at(0, size)
        return shrink_bytes(&self.bytes_object, size)


cdef class OrderedWriter:
    """Ordered segments of one lane in a buffer, written by several threads and finally contiguous.

    `staging_offsets`: provisional offset of each segment, none before its final one. A segment that is ready before its
    predecessors is written there, and moved by the thread that completes the last of these.
    """

    def __init__(self, OutputBuffer buffer not None, staging_offsets not None):
        self.buffer = buffer
        self.staging_offsets = list(staging_offsets)
        self.sizes = [None] * len(self.staging_offsets)
        self.final_end = self.staging_offsets[0]
        self.owner = NO_OWNER

    cdef size_t acquire_offset(self, Py_ssize_t segment) except? 0:
        """Return the offset to write a segment at: the final one if it is known, else the provisional one."""
        if not 0 <= segment < len(self.staging_offsets):
            raise KvmnnError(f"piece {segment} of {len(self.staging_offsets)}: not there")
        if self.next_segment != segment or self.is_busy:
            return self.staging_offsets[segment]
        self.is_busy = True
        self.owner = segment
        return self.final_end

    cdef int commit(self, Py_ssize_t segment, size_t size) except -1:
        """Record that `size` bytes of the segment were written at its `acquire_offset`."""
        self.sizes[segment] = size
        if not self.is_busy:
            self.is_busy = True
        elif self.owner != segment:
            return 0  # the owner moves this one, too
        else:
            self.owner = NO_OWNER
            self.final_end += size
            self.next_segment += 1
        while self.next_segment < len(self.sizes) and self.sizes[self.next_segment] is not None:
            size = self.sizes[self.next_segment]
            self.buffer.move(self.final_end, self.staging_offsets[self.next_segment], size)
            self.final_end += size
            self.next_segment += 1
        self.is_busy = False
        return 0

    def list_fragments(self) -> list:
        """Return (bytes, offset) of every segment, once all are committed."""
        cdef list fragments = []
        cdef size_t offset = self.staging_offsets[0]
        for size in self.sizes:
            if size is None:
                raise KvmnnError("a piece is missing")
            fragments.append((size, offset))
            offset += size
        return fragments
