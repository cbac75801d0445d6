"""libzstd as a table of functions that need no GIL. `kvmnn.frames.zstd` decides which library fills it.

Two fillings: addresses of the real functions, or, where no library with public symbols exists, two Python callables
(`compress(level, sized, data) -> bytes` and `decompress(payload, capacity) -> bytes`) that are called with the GIL.
"""

from libc.stdint cimport uintptr_t
from libc.string cimport memcpy

from cpython.bytes cimport PyBytes_AsString, PyBytes_Size
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.buffer cimport PyBUF_READ


# -- filling 1: a shared library ------------------------------------------------------------------------------------

cdef enum:
    ZSTD_c_compressionLevel = 100
    ZSTD_c_contentSizeFlag = 200
    ZSTD_reset_session_only = 1

ctypedef size_t (*set_parameter_fn)(void *, int, int) noexcept nogil
ctypedef size_t (*compress2_fn)(void *, void *, size_t, const void *, size_t) noexcept nogil
ctypedef size_t (*reset_fn)(void *, int) noexcept nogil

cdef set_parameter_fn _set_parameter
cdef compress2_fn _compress2
cdef reset_fn _reset


cdef size_t _library_compress_without_size(
    void *cctx, void *dst, size_t capacity, const void *src, size_t n, int level
) noexcept nogil:
    # ZSTD_compressCCtx ignores these parameters and leaves them as they are, so they need no reset. A session does: one
    # that ended for want of room would refuse parameters.
    cdef size_t code = _reset(cctx, ZSTD_reset_session_only)
    if not zstd.is_error(code):
        code = _set_parameter(cctx, ZSTD_c_compressionLevel, level)
    if not zstd.is_error(code):
        code = _set_parameter(cctx, ZSTD_c_contentSizeFlag, 0)
    if zstd.is_error(code):
        return code
    return _compress2(cctx, dst, capacity, src, n)


FUNCTION_NAMES = (
    "ZSTD_createCCtx", "ZSTD_freeCCtx", "ZSTD_createDCtx", "ZSTD_freeDCtx", "ZSTD_compressCCtx",
    "ZSTD_decompressDCtx", "ZSTD_isError", "ZSTD_compressBound", "ZSTD_CCtx_setParameter", "ZSTD_compress2",
    "ZSTD_CCtx_reset",
)
"""Functions whose addresses `use_library` takes, in its order."""


def use_library(addresses) -> None:
    """Call the functions at `addresses`, one for each of `FUNCTION_NAMES`; the library must stay loaded."""
    global _set_parameter, _compress2, _reset
    cdef list address_list = [int(address) for address in addresses]
    if len(address_list) != len(FUNCTION_NAMES) or 0 in address_list:
        raise ValueError(f"expected {len(FUNCTION_NAMES)} non-zero addresses")
    zstd.new_cctx = <void *(*)() noexcept nogil><uintptr_t>address_list[0]
    zstd.free_cctx = <size_t (*)(void *) noexcept nogil><uintptr_t>address_list[1]
    zstd.new_dctx = <void *(*)() noexcept nogil><uintptr_t>address_list[2]
    zstd.free_dctx = <size_t (*)(void *) noexcept nogil><uintptr_t>address_list[3]
    zstd.compress = <compress_fn><uintptr_t>address_list[4]
    zstd.compress_without_size = _library_compress_without_size
    zstd.decompress = <decompress_fn><uintptr_t>address_list[5]
    zstd.is_error = <unsigned (*)(size_t) noexcept nogil><uintptr_t>address_list[6]
    zstd.bound = <size_t (*)(size_t) noexcept nogil><uintptr_t>address_list[7]
    zstd.stops_at_capacity = True
    _set_parameter = <set_parameter_fn><uintptr_t>address_list[8]
    _compress2 = <compress2_fn><uintptr_t>address_list[9]
    _reset = <reset_fn><uintptr_t>address_list[10]


# -- filling 2: Python callables --------------------------------------------------------------------------------------

cdef object _py_compress = None
cdef object _py_decompress = None

cdef enum:
    PYTHON_CALL_FAILED = -1


cdef void *_stub_new_context() noexcept nogil:
    return <void *>&zstd  # no context to keep: any address that is not NULL


cdef size_t _stub_free_context(void *context) noexcept nogil:
    return 0


cdef unsigned _python_is_error(size_t code) noexcept nogil:
    return code == <size_t>PYTHON_CALL_FAILED or is_dst_too_small(code)


cdef size_t _python_bound(size_t n) noexcept nogil:
    # ZSTD_COMPRESSBOUND of zstd.h
    return n + (n >> 8) + ((((<size_t>128 << 10) - n) >> 11) if n < (<size_t>128 << 10) else 0)


cdef size_t _copy_out(object data, void *dst, size_t capacity) except? 0:
    cdef bytes content = data
    cdef size_t n = PyBytes_Size(content)
    if n > capacity:
        return <size_t>-ZSTD_error_dstSize_tooSmall
    if n:
        memcpy(dst, PyBytes_AsString(content), n)  # dst may be NULL where nothing is expected
    return n


cdef object _make_view(const void *src, size_t n):
    return PyMemoryView_FromMemory(<char *>src, n, PyBUF_READ)


cdef size_t _python_compress(
    void *cctx, void *dst, size_t capacity, const void *src, size_t n, int level
) noexcept nogil:
    with gil:
        try:
            return _copy_out(_py_compress(level, True, _make_view(src, n)), dst, capacity)
        except Exception:
            return <size_t>PYTHON_CALL_FAILED


cdef size_t _python_compress_without_size(
    void *cctx, void *dst, size_t capacity, const void *src, size_t n, int level
) noexcept nogil:
    with gil:
        try:
            return _copy_out(_py_compress(level, False, _make_view(src, n)), dst, capacity)
        except Exception:
            return <size_t>PYTHON_CALL_FAILED


cdef size_t _python_decompress(void *dctx, void *dst, size_t capacity, const void *src, size_t n) noexcept nogil:
    with gil:
        try:
            return _copy_out(_py_decompress(_make_view(src, n), capacity), dst, capacity)
        except Exception:
            return <size_t>PYTHON_CALL_FAILED


def use_callables(compress, decompress) -> None:
    """Call `compress(level, sized, data)` and `decompress(payload, capacity)`, which raise on failure."""
    global _py_compress, _py_decompress
    _py_compress = compress
    _py_decompress = decompress
    zstd.new_cctx = zstd.new_dctx = _stub_new_context
    zstd.free_cctx = zstd.free_dctx = _stub_free_context
    zstd.compress = _python_compress
    zstd.compress_without_size = _python_compress_without_size
    zstd.decompress = _python_decompress
    zstd.is_error = _python_is_error
    zstd.bound = _python_bound
    zstd.stops_at_capacity = False


# -- the structure of a payload, from its headers alone (RFC 8878, section 3.1)
# ------------------------------------------

cdef enum:
    SKIPPABLE_MAGIC = 0x184D2A50       # and the 15 numbers after it
    COMPRESSED_BASE = 4 << 20          # what a compressed block can decode to at most: this and ...
    COMPRESSED_FACTOR = 64 << 10       # ... so much for each of its bytes

cdef size_t MALFORMED_FRAME = 0


cdef inline size_t load_le(const unsigned char *p, int n) noexcept nogil:
    cdef size_t x = 0
    cdef int i
    for i in range(n):
        x |= <size_t>p[i] << 8 * i
    return x


cdef size_t find_frame_end(const unsigned char *p, size_t n, size_t pos, size_t *max_output) noexcept nogil:
    """Return the offset after the zstd or skippable frame at `pos`, or MALFORMED_FRAME if ZSTD_decompress would fail
    too.

    `max_output` grows by the maximum that the frame can decode to. libzstd does not limit blocks to 128 KiB here. Raw
    and RLE blocks have the size they claim. A compressed block has at most 128 KiB of literals and 98047 sequences,
    each of which copies at most 34 bytes and 8190 more for each bit of its own.
    """
    cdef size_t magic, size, header, field_code
    cdef int descriptor
    if n - pos < 8:
        return MALFORMED_FRAME
    magic = load_le(p + pos, 4)
    if magic & ~<size_t>15 == SKIPPABLE_MAGIC:
        size = load_le(p + pos + 4, 4)
        return pos + 8 + size if size <= n - pos - 8 else MALFORMED_FRAME
    if magic != <size_t>0xFD2FB528:
        return MALFORMED_FRAME
    descriptor = p[pos + 4]
    pos += 5
    if not descriptor & 32:
        pos += 1  # window descriptor
    field_code = descriptor & 3
    pos += 4 if field_code == 3 else field_code  # dictionary id
    field_code = descriptor >> 6
    pos += <size_t>1 << field_code if field_code else descriptor >> 5 & 1  # content size
    while True:
        if pos > n or n - pos < 3:
            return MALFORMED_FRAME
        header = load_le(p + pos, 3)
        field_code, size = header >> 1 & 3, header >> 3
        if field_code == 3:
            return MALFORMED_FRAME
        max_output[0] += COMPRESSED_BASE + COMPRESSED_FACTOR * size if field_code == 2 else size
        if field_code == 1:
            size = 1
        pos += 3
        if size > n - pos:
            return MALFORMED_FRAME
        pos += size
        if header & 1:
            break
    if descriptor & 4:
        pos += 4  # checksum
    return pos if pos <= n else MALFORMED_FRAME


cdef size_t max_output_size(const unsigned char *p, size_t n) noexcept nogil:
    """Return the maximum size that a payload can decode to; 0 if its structure is invalid."""
    cdef size_t pos = 0, max_output = 0
    while pos < n:
        pos = find_frame_end(p, n, pos, &max_output)
        if pos == MALFORMED_FRAME:
            return 0
    return max_output


def find_frame_extent(const unsigned char[::1] payload not None, size_t offset) -> int:
    """Return the offset after the zstd or skippable frame at `offset`; `ValueError` if there is none."""
    cdef size_t max_output = 0, end = MALFORMED_FRAME
    if offset < <size_t>payload.shape[0]:
        end = find_frame_end(&payload[0], payload.shape[0], offset, &max_output)
    if end == MALFORMED_FRAME:
        raise ValueError(f"no complete zstd frame at offset {offset} of {payload.shape[0]}")
    return end


# -- both: for Python
# ------------------------------------------------------------------------------------------------------

cdef class ZstdContext:
    """Compression and decompression contexts that are reused from call to call; for one thread at a time."""
    cdef void *cctx
    cdef void *dctx

    def __cinit__(self):
        self.cctx = zstd.new_cctx()
        self.dctx = zstd.new_dctx()
        if self.cctx == NULL or self.dctx == NULL:
            raise MemoryError("no memory for zstd contexts")

    def __dealloc__(self):
        if self.cctx != NULL:
            zstd.free_cctx(self.cctx)
        if self.dctx != NULL:
            zstd.free_dctx(self.dctx)

    def compress_into(
        self, unsigned char[::1] out not None, const unsigned char[::1] data not None, int level=3
    ) -> int:
        """Write one zstd frame, as ZSTD_compress does, and return its length; `ValueError` if `out` is too short."""
        cdef size_t size
        with nogil:
            size = zstd.compress(
                self.cctx, &out[0] if out.shape[0] else NULL, out.shape[0],
                &data[0] if data.shape[0] else NULL, data.shape[0], level,
            )
        if zstd.is_error(size):
            raise ValueError(f"zstd: {data.shape[0]} bytes were not compressed into {out.shape[0]}")
        return size

    def decompress_into(self, unsigned char[::1] out not None, const unsigned char[::1] payload not None) -> int:
        """Decompress a payload with the verdict of ZSTD_decompress, and return the size of the result."""
        cdef size_t size
        with nogil:
            size = zstd.decompress(
                self.dctx, &out[0] if out.shape[0] else NULL, out.shape[0],
                &payload[0] if payload.shape[0] else NULL, payload.shape[0],
            )
        if zstd.is_error(size):
            raise ValueError(f"zstd: the payload of {payload.shape[0]} bytes does not decode into {out.shape[0]} bytes")
        return size


def max_compressed_size(size_t n) -> int:
    """Return the maximum size of a zstd frame of n bytes."""
    return zstd.bound(n)


def compress(const unsigned char[::1] data not None, int level=3) -> bytes:
    """Compress to one zstd frame, as ZSTD_compress does."""
    out = bytearray(zstd.bound(data.shape[0]))
    return bytes(memoryview(out)[:ZstdContext().compress_into(out, data, level)])


def decompress(const unsigned char[::1] payload not None, size_t expected_bytes) -> bytes:
    """Decompress to exactly `expected_bytes` bytes with the verdict of ZSTD_decompress; `ValueError` otherwise."""
    out = bytearray(expected_bytes)
    size = ZstdContext().decompress_into(out, payload)
    if size != expected_bytes:
        raise ValueError(f"zstd: the payload of {payload.shape[0]} bytes decodes to {size} bytes, not {expected_bytes}")
    return bytes(out)
