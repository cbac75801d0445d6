"""Bytes that several threads write parts of, and that get their length when all is known."""

from libc.stdint cimport uint8_t
from libc.string cimport memcpy, memmove

from cpython.buffer cimport PyBUF_READ
from cpython.bytes cimport PyBytes_AsString
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport Py_XDECREF

from kvmnn.frames._workspace cimport shortened, unfinished_bytes

from ..errors import KvmnnError


cdef enum:
    NOBODY = -1


cdef class Room:
    """Room for `most` bytes, none of them written; what is not written takes no memory where it is much."""

    def __init__(self, size_t most):
        self.made = unfinished_bytes(most)
        self.size = most

    def __dealloc__(self):
        Py_XDECREF(self.made)

    cdef uint8_t *at(self, size_t begin, size_t n) except NULL:
        """The place of n bytes."""
        if self.made == NULL or begin > self.size or n > self.size - begin:
            raise KvmnnError(f"{n} bytes at {begin} of {self.size if self.made != NULL else 0}: not there")
        return <uint8_t *>PyBytes_AsString(<object>self.made) + begin

    def write(self, size_t begin, const uint8_t[::1] part not None) -> None:
        """Copy `part` to its place."""
        cdef size_t n = part.shape[0]
        cdef uint8_t *to = self.at(begin, n)
        if n:
            with nogil:
                memcpy(to, &part[0], n)

    def move(self, size_t to, size_t begin, size_t n) -> None:
        """Move n bytes from `begin` on, which were written, to where they stay."""
        cdef uint8_t *here = self.at(begin, n)
        cdef uint8_t *there = self.at(to, n)
        if here != there:
            with nogil:
                memmove(there, here, n)

    def view(self, size_t begin, size_t n) -> memoryview:
        """What was written there: to be looked at while the room is there and not finished."""
        return PyMemoryView_FromMemory(<char *>self.at(begin, n), n, PyBUF_READ)

    def finish(self, size_t size) -> bytes:
        """The first `size` bytes; the room is gone."""
        self.at(0, size)
        return shortened(&self.made, size)


cdef class Track:
    """The pieces of one lane in a room, which come to lie one behind the other while several threads make them.

    `begins`: where each piece may lie until then, none of them before where it stays. A piece that is ready before
    those in front of it is written there, and moved by the thread that makes the last of these.
    """

    def __init__(self, Room room not None, begins not None):
        self.room = room
        self.begins = list(begins)
        self.sizes = [None] * len(self.begins)
        self.end = self.begins[0]
        self.turn = NOBODY

    cdef size_t place(self, Py_ssize_t piece) except? 0:
        """Where to write a piece now: where it stays, if that is known, else where it may lie until then."""
        if not 0 <= piece < len(self.begins):
            raise KvmnnError(f"piece {piece} of {len(self.begins)}: not there")
        if self.behind != piece or self.busy:
            return self.begins[piece]
        self.busy = True
        self.turn = piece
        return self.end

    cdef int done(self, Py_ssize_t piece, size_t size) except -1:
        """The piece was written to its `place`, so many bytes."""
        self.sizes[piece] = size
        if not self.busy:
            self.busy = True
        elif self.turn != piece:
            return 0  # the thread whose turn it is sees to this one, too
        else:
            self.turn = NOBODY
            self.end += size
            self.behind += 1
        while self.behind < len(self.sizes) and self.sizes[self.behind] is not None:
            size = self.sizes[self.behind]
            self.room.move(self.end, self.begins[self.behind], size)
            self.end += size
            self.behind += 1
        self.busy = False
        return 0

    def parts(self) -> list:
        """(bytes, place) of every piece, when all are done."""
        cdef list found = []
        cdef size_t at = self.begins[0]
        for size in self.sizes:
            if size is None:
                raise KvmnnError("a piece is missing")
            found.append((size, at))
            at += size
        return found
