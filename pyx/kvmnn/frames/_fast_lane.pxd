from libc.stdint cimport uint8_t, uint32_t

from kvmnn.frames._workspace cimport Workspace


cdef extern from "kvmnn/frames/match_finder.h" nogil:
    ctypedef struct kvmnn_repeat:
        uint32_t start
        uint32_t length
        uint32_t distance


cdef enum:
    MAX_TRIAL_BYTES = 256 << 10  # bytes of a lane that predictors are tried on, where it is longer


cdef struct Scratch:
    uint8_t *writer
    uint8_t *lane            # bytes of one lane; of all, one after the other, where the segment is gathered
    uint32_t *table
    kvmnn_repeat *repeats


cdef struct SegmentInput:  # a segment of an array
    const uint8_t *src
    size_t num_elements
    int itemsize         # bytes of a word, which are its lanes
    bint has_previous    # the word before is there as well, and predictors go on from it
    bint is_predictable  # bytes follow from those before them in some lane
    bint is_gathered     # all lanes are in the scratch memory as they are
    int libzstd_trials   # which lanes libzstd is tried on: of the enum below


cdef enum:
    TRY_UNDECIDED
    TRY_NONE
    TRY_REPEATED  # those that became much smaller
    TRY_ALL


cdef struct LaneResult:
    int mode
    uint8_t *payload  # its payload, or NULL for one that `write_raw_frame` is to write
    size_t payload_size
    const uint8_t *raw_lane  # as they are, where the segment is gathered


cdef struct LaneStats:
    double entropy_bits     # of a byte
    bint has_short_repeats  # there are short repeats all over
    bint is_constant        # one byte and no other


cdef struct LaneEncoding:
    int mode                 # -1: no memory
    bint use_libzstd
    int alternatives       # a bit set of predictors that came near
    double trial_fraction  # of the bytes of a trial, those that were left
    size_t trial_size      # of the payload, where a trial had the whole lane: it is there


cdef size_t align64(size_t n) noexcept nogil
cdef size_t max_payload_size(size_t num_elements) noexcept nogil
cdef bint allocate_scratch(Workspace ws, size_t num_elements, int count, Scratch *scratch) noexcept nogil
cdef void gather_lanes(const SegmentInput *segment, uint8_t *dst) noexcept nogil
cdef bint sample_lanes(const uint8_t *src, size_t num_elements, int itemsize, LaneStats *lane_stats) noexcept nogil
cdef LaneEncoding select_encoding(
    Workspace ws, const SegmentInput *segment, int lane, int modes, LaneStats stats, Scratch scratch, uint8_t **slots
) noexcept nogil
cdef bint encode_lane(
    Workspace ws, SegmentInput *segment, int lane, LaneEncoding *encoding, double bits, Scratch scratch,
    uint8_t **slots, LaneResult *lane_result
) noexcept nogil
cdef void try_alternatives(
    Workspace ws, const SegmentInput *segment, int lane, int modes, const LaneEncoding *encoding, Scratch scratch,
    LaneResult *lane_result, uint8_t **spare_slots
) noexcept nogil
cdef size_t raw_frame_size(size_t n) noexcept nogil
cdef void write_raw_frame(
    const uint8_t *src, size_t num_elements, int itemsize, int lane, bint bypass_cache, uint8_t *dst
) noexcept nogil
