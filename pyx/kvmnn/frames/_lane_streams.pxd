"""The streams of a lane under the predictors, made for an encoder to choose from."""

from libc.stdint cimport uint8_t
from libc.string cimport memset

from kvmnn.frames._stream_header cimport MODES
from kvmnn.frames._streams cimport KVMNN_MODE_DELTA, KVMNN_MODE_RAW, lanes, rle_least
from kvmnn.frames._workspace cimport Workspace


cdef enum:
    TILE = 4096  # words that are split, predicted and scanned before the next are touched


cdef inline const uint8_t *make_stream(
    Workspace ws, const uint8_t *src, size_t words, int stride, int lane, int mode
) noexcept nogil:
    """One lane under one predictor in the workspace's first buffer, or NULL."""
    cdef uint8_t *stream = ws.buffer(0, words)
    if stream != NULL:
        if stride == 1:
            lanes().predict(src, words, mode, stream)
        else:
            lanes().predict_lane(src, words, stride, lane, mode, stream)
    return stream


cdef inline const uint8_t *make_bounded(
    Workspace ws, const uint8_t *src, size_t words, int stride, int lane, int mode, size_t *rle_least_size
) noexcept nogil:
    """The same of words of several bytes, and a lower bound of its RLE length."""
    cdef uint8_t *stream = ws.buffer(0, words)
    cdef uint8_t before
    cdef size_t start = 0, size, seen, repeats = 0
    if stream == NULL:
        return NULL
    while start < words:
        size = min(<size_t>TILE, words - start)
        lanes().predict_lane(src + start * <size_t>stride, size, stride, lane, mode, stream + start)
        if start and mode != KVMNN_MODE_RAW:
            before = src[(start - 1) * <size_t>stride + lane]
            stream[start] = stream[start] - before if mode == KVMNN_MODE_DELTA else stream[start] ^ before
        seen = start - 1 if start else 0
        repeats += lanes().repeats(stream + seen, start + size - seen)
        start += size
    rle_least_size[0] = rle_least(words, repeats)
    return stream


cdef inline size_t spacing(size_t words) noexcept nogil:
    """From one stream to the next in a buffer, so that the same place of two streams never falls into the same set of a
    cache: a lane is often a power of two long, and writing three of them side by side would cost a quarter more."""
    return ((words + 4095) & ~<size_t>4095) + 1088


cdef inline void make_streams(
    const uint8_t *src, size_t words, int stride, int lane, uint8_t *streams, size_t *rle_least_sizes
) noexcept nogil:
    """A lane under all predictors, `spacing` apart at `streams`, and a lower bound of the RLE length of each stream.

    Works in tiles, so that the source is read once.
    """
    cdef size_t[MODES] repeats
    cdef size_t start = 0, stop, step = spacing(words)
    cdef int mode
    memset(repeats, 0, sizeof(repeats))
    while start < words:
        stop = start + min(<size_t>TILE, words - start)
        lanes().predict_lane_part(
            src, start, stop, stride, lane, streams, streams + step, streams + 2 * step, repeats
        )
        start = stop
    for mode in range(MODES):
        rle_least_sizes[mode] = rle_least(words, repeats[mode])
