"""The streams of a lane under the predictors, made for an encoder to choose from."""

from libc.stdint cimport uint8_t
from libc.string cimport memset

from kvmnn.frames._stream_header cimport NUM_MODES
from kvmnn.frames._streams cimport KVMNN_MODE_DELTA, KVMNN_MODE_RAW, lane_kernels, rle_min_size
from kvmnn.frames._workspace cimport Workspace


cdef enum:
    TILE_ELEMENTS = 4096  # words that are split, predicted and scanned before the next are touched


cdef inline const uint8_t *make_stream(
    Workspace ws, const uint8_t *src, size_t num_elements, int itemsize, int lane, int mode
) noexcept nogil:
    """One lane under one predictor in the workspace's first buffer, or NULL."""
    cdef uint8_t *stream = ws.get_buffer(0, num_elements)
    if stream != NULL:
        if itemsize == 1:
            lane_kernels().predict(src, num_elements, mode, stream)
        else:
            lane_kernels().predict_lane(src, num_elements, itemsize, lane, mode, stream)
    return stream


cdef inline const uint8_t *make_stream_with_rle_bound(
    Workspace ws, const uint8_t *src, size_t num_elements, int itemsize, int lane, int mode, size_t *min_rle_size
) noexcept nogil:
    """The same of words of several bytes, and a lower bound of its RLE length."""
    cdef uint8_t *stream = ws.get_buffer(0, num_elements)
    cdef uint8_t previous
    cdef size_t start = 0, size, overlap_start, repeats = 0
    if stream == NULL:
        return NULL
    while start < num_elements:
        size = min(<size_t>TILE_ELEMENTS, num_elements - start)
        lane_kernels().predict_lane(src + start * <size_t>itemsize, size, itemsize, lane, mode, stream + start)
        if start and mode != KVMNN_MODE_RAW:
            previous = src[(start - 1) * <size_t>itemsize + lane]
            stream[start] = stream[start] - previous if mode == KVMNN_MODE_DELTA else stream[start] ^ previous
        overlap_start = start - 1 if start else 0
        repeats += lane_kernels().repeats(stream + overlap_start, start + size - overlap_start)
        start += size
    min_rle_size[0] = rle_min_size(num_elements, repeats)
    return stream


cdef inline size_t stream_spacing(size_t num_elements) noexcept nogil:
    """From one stream to the next in a buffer, so that the same place of two streams never falls into the same set of a
    cache: a lane is often a power of two long, and writing three of them side by side would cost a quarter more."""
    return ((num_elements + 4095) & ~<size_t>4095) + 1088


cdef inline void make_all_streams(
    const uint8_t *src, size_t num_elements, int itemsize, int lane, uint8_t *streams, size_t *min_rle_sizes
) noexcept nogil:
    """A lane under all predictors, `stream_spacing` apart at `streams`, and a lower bound of the RLE length of each
    stream.

    Works in tiles, so that the source is read once.
    """
    cdef size_t[NUM_MODES] repeats
    cdef size_t start = 0, stop, step = stream_spacing(num_elements)
    cdef int mode
    memset(repeats, 0, sizeof(repeats))
    while start < num_elements:
        stop = start + min(<size_t>TILE_ELEMENTS, num_elements - start)
        lane_kernels().predict_lane_part(
            src, start, stop, itemsize, lane, streams, streams + step, streams + 2 * step, repeats
        )
        start = stop
    for mode in range(NUM_MODES):
        min_rle_sizes[mode] = rle_min_size(num_elements, repeats[mode])
