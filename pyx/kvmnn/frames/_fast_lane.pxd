from libc.stdint cimport uint8_t, uint32_t

from kvmnn.frames._workspace cimport Workspace


cdef extern from "kvmnn/frames/repeats.h" nogil:
    ctypedef struct kvmnn_repeat:
        uint32_t at
        uint32_t length
        uint32_t distance


cdef enum:
    TRIAL_MOST = 256 << 10   # bytes of a lane that predictors are tried on, where it is longer


cdef struct Scratch:
    uint8_t *writer
    uint8_t *lane            # bytes of one lane; of all, one behind the other, where the piece is gathered
    uint32_t *table
    kvmnn_repeat *repeats


cdef struct Piece:           # of an array
    const uint8_t *src
    size_t words
    int stride               # bytes of a word, which are its lanes
    bint continued           # the word before is there as well, and predictors go on from it
    bint follows             # bytes follow from those before them in some lane
    bint gathered            # all lanes are in the scratch memory as they are
    int doubts               # which lanes libzstd is tried on: of the enum below


cdef enum:
    UNKNOWN
    NONE
    REPEATED                 # those that became much smaller
    ALL


cdef struct Lane:
    int mode
    uint8_t *made            # its payload, or NULL for one that `raw_frame` is to write
    size_t size
    const uint8_t *bytes     # as they are, where the piece is gathered


cdef struct Look:
    double bits              # of a byte
    bint short               # there are short repeats all over
    bint constant            # one byte and no other


cdef struct Form:
    int mode                 # -1: no memory
    bint libzstd
    int rivals               # a bit set of predictors that came near
    double share             # of the bytes of a trial, those that were left
    size_t size              # of the payload, where a trial had the whole lane: it is there


cdef size_t aligned(size_t n) noexcept nogil
cdef size_t lane_room(size_t words) noexcept nogil
cdef bint make_room(Workspace ws, size_t words, int count, Scratch *scratch) noexcept nogil
cdef void gather(const Piece *of, uint8_t *to) noexcept nogil
cdef bint look_at(const uint8_t *src, size_t words, int stride, Look *looks) noexcept nogil
cdef Form best_form(
    Workspace ws, const Piece *of, int lane, int modes, Look look, Scratch scratch, uint8_t **slots
) noexcept nogil
cdef bint make_lane(
    Workspace ws, Piece *of, int lane, Form *form, double bits, Scratch scratch, uint8_t **slots, Lane *found
) noexcept nogil
cdef void smaller(
    Workspace ws, const Piece *of, int lane, int modes, const Form *form, Scratch scratch, Lane *found, uint8_t **spare
) noexcept nogil
cdef size_t raw_size(size_t n) noexcept nogil
cdef void raw_frame(const uint8_t *src, size_t words, int stride, int lane, bint past, uint8_t *dst) noexcept nogil
