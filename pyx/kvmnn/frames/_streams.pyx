"""Byte streams: predictors and RLE (format.md, "Streams"), with the SIMD kernels of lanes.h."""

from libc.math cimport log2
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize

from kvmnn._simd cimport active_level

from ..errors import KvmnnError

cdef extern from "kvmnn/frames/lanes.h" nogil:
    const kvmnn_lane_kernels *kvmnn_lane_kernels_at(int level)


cdef enum:
    MIN_RUN = 4         # shorter runs are literals
    MAX_RUN = 131       # (control & 127) + 4
    MAX_LITERALS = 128  # control + 1


cdef const kvmnn_lane_kernels *lane_kernels() noexcept nogil:
    """Return the kernels of the SIMD level in use."""
    return kvmnn_lane_kernels_at(active_level)


# -- RLE ----------------------------------------------------------------------------------------------------------

cdef size_t rle_bound(size_t n) noexcept nogil:
    """Return the maximum RLE payload size for n bytes."""
    return n + (n + MAX_LITERALS - 1) // MAX_LITERALS


cdef size_t rle_min_size(size_t n, size_t repeats) noexcept nogil:
    """Return a lower bound of the RLE payload of n bytes of which `repeats` equal the byte before them.

    A run token of length l takes l - 1 >= 3/4 l repeats, so tokens stand for at most 4/3 repeats; all other bytes are
    literals.
    """
    cdef size_t max_covered = repeats + (repeats + 2) // 3
    return rle_bound(n - max_covered) if max_covered < n else 0


cdef size_t rle_size(const uint8_t *s, size_t n, size_t limit) noexcept nogil:
    """Return the length of the canonical payload of n bytes, or some number above `limit` if it is longer than that."""
    cdef const kvmnn_lane_kernels *kernels = lane_kernels()
    cdef size_t i = 0, size = 0, start, length
    while i < n and size <= limit:
        start = i
        i = kernels.find_run4(s, i, n)
        size += rle_bound(i - start)
        if i < n:
            length = kernels.run_length(s, i, n)
            i += length
            size += 2 * (length // MAX_RUN)
            length %= MAX_RUN
            if length >= MIN_RUN:
                size += 2
            else:
                i -= length
    return size


cdef size_t rle_encode(const uint8_t *s, size_t n, uint8_t *dst) noexcept nogil:
    """Write the canonical payload to dst (rle_bound(n) bytes) and return its length."""
    cdef const kvmnn_lane_kernels *kernels = lane_kernels()
    cdef size_t i = 0, start, length
    cdef uint8_t *out = dst
    while i < n:
        start = i
        i = kernels.find_run4(s, i, n)
        while start < i:
            length = min(i - start, <size_t>MAX_LITERALS)
            out[0] = <uint8_t>(length - 1)
            memcpy(out + 1, s + start, length)
            out += 1 + length
            start += length
        if i < n:
            length = kernels.run_length(s, i, n)
            while length >= MIN_RUN:
                start = min(length, <size_t>MAX_RUN)
                out[0] = <uint8_t>(0x80 | (start - MIN_RUN))
                out[1] = s[i]
                out += 2
                i += start
                length -= start
    return out - dst


cdef bint rle_decode(const uint8_t *payload, size_t n, uint8_t *dst, size_t expected_bytes) noexcept nogil:
    """Decode exactly n payload bytes to exactly `expected_bytes` bytes; False if the reference decoder rejects them."""
    cdef size_t i = 0, num_written = 0, length
    cdef uint8_t control
    if n == 0 or expected_bytes == 0:
        return False
    while i < n:
        control = payload[i]
        i += 1
        if control < 0x80:
            length = <size_t>control + 1
            if length > n - i or length > expected_bytes - num_written:
                return False
            memcpy(dst + num_written, payload + i, length)
            i += length
        else:
            length = <size_t>(control & 0x7f) + MIN_RUN
            if i >= n or length > expected_bytes - num_written:
                return False
            memset(dst + num_written, payload[i], length)
            i += 1
        num_written += length
    return num_written == expected_bytes


cdef double compute_entropy(const uint64_t *counts) noexcept nogil:
    """Return the order-0 entropy of a histogram in bits per byte; 0 for an empty one."""
    cdef double total = 0, bits = 0
    cdef int b
    for b in range(256):
        total += <double>counts[b]
    for b in range(256):
        if counts[b]:
            bits -= <double>counts[b] * log2(<double>counts[b] / total)
    return bits / total if total > 0 else 0.0


# -- the same for Python (conformance, tests) -----------------------------------------------------------------------

def encode_rle(const uint8_t[::1] data not None) -> bytes:
    """Return the canonical RLE payload of `data`; `KvmnnError` if it is empty, as in the reference encoder."""
    cdef size_t n = data.shape[0], size
    if n == 0:
        raise KvmnnError("RLE: nothing to encode: expected at least 1 byte")
    cdef bytes out
    with nogil:
        size = rle_size(&data[0], n, <size_t>-1)
    out = PyBytes_FromStringAndSize(NULL, size)
    cdef uint8_t *target = <uint8_t *>PyBytes_AsString(out)
    with nogil:
        rle_encode(&data[0], n, target)
    return out


def decode_rle(const uint8_t[::1] payload not None, size_t expected_bytes) -> bytes:
    """Decode an RLE payload to `expected_bytes` bytes; `KvmnnError` if the reference decoder rejects it."""
    cdef size_t n = payload.shape[0]
    cdef bint is_ok = False
    if n == 0 or expected_bytes == 0 or expected_bytes > MAX_RUN * n // 2:
        raise KvmnnError(f"RLE: a payload of {n} bytes cannot stand for {expected_bytes} bytes")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, expected_bytes)
    cdef uint8_t *target = <uint8_t *>PyBytes_AsString(out)
    with nogil:
        is_ok = rle_decode(&payload[0], n, target, expected_bytes)
    if not is_ok:
        raise KvmnnError(f"RLE: the payload of {n} bytes does not decode to exactly {expected_bytes} bytes")
    return out


def predict(const uint8_t[::1] data not None, int mode) -> bytes:
    """Apply the predictor `mode` (0 raw, 1 delta_seq, 2 xor_seq) to one byte stream."""
    cdef size_t n = data.shape[0]
    if not 0 <= mode <= 2:
        raise KvmnnError(f"predictor mode {mode}: expected 0, 1 or 2")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, n)
    if n:
        lane_kernels().predict(&data[0], n, mode, <uint8_t *>PyBytes_AsString(out))
    return out


def unpredict(const uint8_t[::1] data not None, int mode) -> bytes:
    """Return the inverse of `predict`."""
    cdef size_t n = data.shape[0]
    if not 0 <= mode <= 2:
        raise KvmnnError(f"predictor mode {mode}: expected 0, 1 or 2")
    cdef bytes out = PyBytes_FromStringAndSize(<const char *>&data[0] if n else NULL, n)
    if n:
        lane_kernels().unpredict(<uint8_t *>PyBytes_AsString(out), n, mode)
    return out


def split_lanes(const uint8_t[::1] data not None, int itemsize) -> list:
    """Split an array of words into its `itemsize` (2 or 4) byte lanes, as bytes."""
    cdef size_t num_elements
    if itemsize != 2 and itemsize != 4:
        raise KvmnnError(f"word size {itemsize}: expected 2 or 4")
    if data.shape[0] % itemsize:
        raise KvmnnError(f"{data.shape[0]} bytes are not a whole number of {itemsize}-byte words")
    num_elements = data.shape[0] // itemsize
    cdef list out = []
    cdef bytes lane
    for lane_index in range(itemsize):
        lane = PyBytes_FromStringAndSize(NULL, num_elements)
        if num_elements:
            lane_kernels().predict_lane(
                &data[0], num_elements, itemsize, lane_index, KVMNN_MODE_RAW, <uint8_t *>PyBytes_AsString(lane))
        out.append(lane)
    return out


def compute_order0_entropy(const uint8_t[::1] data not None) -> float:
    """Return the order-0 entropy of the bytes, in bits per byte."""
    cdef uint64_t counts[256]
    memset(counts, 0, sizeof(counts))
    if data.shape[0]:
        with nogil:
            lane_kernels().histogram(&data[0], data.shape[0], counts)
    return compute_entropy(counts)
