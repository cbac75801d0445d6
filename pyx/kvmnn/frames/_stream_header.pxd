"""The ten bytes before a stream's payload (format.md, "Streams"), and the bits that say which codecs are allowed."""

from libc.stdint cimport uint8_t, uint32_t


cdef enum:
    STREAM_HEADER_BYTES = 10  # mode, codec, raw length, payload length
    CODEC_RLE = 0
    CODEC_ZSTD = 1
    ALLOW_RLE = 1
    ALLOW_ZSTD = 2
    NUM_MODES = 3


cdef inline uint32_t load_le32(const uint8_t *p) noexcept nogil:
    return <uint32_t>p[0] | <uint32_t>p[1] << 8 | <uint32_t>p[2] << 16 | <uint32_t>p[3] << 24


cdef inline void store_le32(uint8_t *p, uint32_t x) noexcept nogil:
    p[0] = x & 0xff
    p[1] = x >> 8 & 0xff
    p[2] = x >> 16 & 0xff
    p[3] = x >> 24
