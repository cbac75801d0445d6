"""Measure byte streams under predictors along the token axis (docs/offline.md), for `kvmnn measure`."""

from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize

from kvmnn._simd cimport active_level
from kvmnn.frames._streams cimport KVMNN_MODE_RAW, compute_entropy, lane_kernels
from kvmnn.frames._zstdlib cimport zstd


cdef extern from "kvmnn/analysis/token_predictors.h" nogil:
    ctypedef struct kvmnn_token_kernels:
        void (*delta)(const uint8_t *src, size_t n, size_t row, uint8_t *dst) noexcept nogil
        void (*delta_in_place)(uint8_t *data, size_t n, size_t row) noexcept nogil
        void (*exclusive_or)(const uint8_t *src, size_t n, size_t row, uint8_t *dst) noexcept nogil
        void (*pair)(const uint8_t *src, size_t n, size_t dims, uint8_t *dst) noexcept nogil
        void (*undo_delta)(uint8_t *data, size_t n, size_t row) noexcept nogil
        void (*undo_exclusive_or)(uint8_t *data, size_t n, size_t row) noexcept nogil
        void (*undo_pair)(uint8_t *data, size_t n, size_t dims) noexcept nogil
        void (*bitshuffle)(const uint8_t *src, size_t n, uint8_t *dst) noexcept nogil

    const kvmnn_token_kernels *kvmnn_token_kernels_at(int level)


cdef enum:
    RAW = 0
    DELTA_SEQ = 1
    XOR_SEQ = 2
    PAIR_DELTA = 3
    PAIR_DELTA_DELTA_SEQ = 4
    NUM_PREDICTORS = 5

    TILE_ELEMENTS = 32768  # split and counted before the next are touched

PREDICTOR_NAMES = ("raw", "delta_seq", "xor_seq", "pair_delta", "pair_delta_delta_seq")
"""Names of the predictors by number."""


cdef void predict_into(
    const kvmnn_token_kernels *kernels, const uint8_t *src, size_t n, size_t row, size_t dims, int predictor,
    uint8_t *dst
) noexcept nogil:
    if predictor == DELTA_SEQ:
        kernels.delta(src, n, row, dst)
    elif predictor == XOR_SEQ:
        kernels.exclusive_or(src, n, row, dst)
    elif predictor == PAIR_DELTA:
        kernels.pair(src, n, dims, dst)
    elif predictor == PAIR_DELTA_DELTA_SEQ:
        kernels.pair(src, n, dims, dst)
        kernels.delta_in_place(dst, n, row)
    else:
        memcpy(dst, src, n)


cdef int canonical_predictor(int predictor, size_t tokens, size_t dims) noexcept nogil:
    """Return the lowest predictor that gives the same bytes on a block of this shape."""
    if tokens <= 1:
        if predictor == DELTA_SEQ or predictor == XOR_SEQ:
            predictor = RAW
        elif predictor == PAIR_DELTA_DELTA_SEQ:
            predictor = PAIR_DELTA
    if dims <= 1:
        if predictor == PAIR_DELTA:
            predictor = RAW
        elif predictor == PAIR_DELTA_DELTA_SEQ:
            predictor = DELTA_SEQ
    return predictor


# -- for Python: one array at a time
# ------------------------------------------------------------------------------------

cdef size_t check_row(size_t n, size_t heads, size_t dims, int predictor) except 0:
    if heads == 0 or dims == 0 or n % (heads * dims):
        raise ValueError(f"{n} bytes are no whole tokens of {heads} heads x {dims} dims")
    if not 0 <= predictor < NUM_PREDICTORS:
        raise ValueError(f"no predictor has the number {predictor}")
    return heads * dims


def predict(const uint8_t[::1] data not None, size_t heads, size_t dims, int predictor) -> bytes:
    """Return the stream of `predictor` (an index of `PREDICTOR_NAMES`) over bytes ``[token, head, dim]``."""
    cdef size_t n = data.shape[0], row = check_row(n, heads, dims, predictor)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, n)
    cdef uint8_t *dst = <uint8_t *>PyBytes_AsString(out)
    if n:
        with nogil:
            predict_into(kvmnn_token_kernels_at(active_level), &data[0], n, row, dims, predictor, dst)
    return out


def unpredict(const uint8_t[::1] data not None, size_t heads, size_t dims, int predictor) -> bytes:
    """Return the inverse of `predict`."""
    cdef size_t n = data.shape[0], row = check_row(n, heads, dims, predictor)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, n)
    cdef uint8_t *dst = <uint8_t *>PyBytes_AsString(out)
    cdef const kvmnn_token_kernels *kernels = kvmnn_token_kernels_at(active_level)
    if n:
        with nogil:
            memcpy(dst, &data[0], n)
            if predictor == DELTA_SEQ or predictor == PAIR_DELTA_DELTA_SEQ:
                kernels.undo_delta(dst, n, row)
            elif predictor == XOR_SEQ:
                kernels.undo_exclusive_or(dst, n, row)
            if predictor == PAIR_DELTA or predictor == PAIR_DELTA_DELTA_SEQ:
                kernels.undo_pair(dst, n, dims)
    return out


def bitshuffle(const uint8_t[::1] data not None) -> bytes:
    """Return bit 0 of all bytes, then bit 1 of all bytes and so on, packed from the lowest bit up."""
    cdef size_t n = data.shape[0]
    cdef bytes out = PyBytes_FromStringAndSize(NULL, n)
    if n:
        kvmnn_token_kernels_at(active_level).bitshuffle(&data[0], n, <uint8_t *>PyBytes_AsString(out))
    return out


# -- sizes of streams -------------------------------------------------------------------------------------------------

cdef enum:
    CHOSEN_BUFFER = 0  # the payloads of all blocks, for the joint frame, and after them the lane of the block being
                       # filled
    WORK_BUFFER = 1    # a predicted stream before bitshuffle
    PAYLOAD_BUFFER_A = 2   # payloads: the best so far, and the one being tried
    PAYLOAD_BUFFER_B = 3
    FRAME_BUFFER = 4  # what zstd writes
    NUM_BUFFERS = 5


cdef class StreamMeter:
    """Measures the compressed size of one byte lane of tokens of 16-bit words, block by block; for one thread at a
    time.

    Call `configure`; then for every stream `start`, `feed` as often as needed, `finish`. Contexts and buffers are
    reused from stream to stream.
    """
    cdef void *cctx
    cdef uint8_t *buffers[NUM_BUFFERS]
    cdef size_t sizes[NUM_BUFFERS]
    cdef int predictors[NUM_PREDICTORS]
    cdef int n_predictors
    cdef int lane, level
    cdef bint use_bitshuffle, count_bytes
    cdef size_t row, dims, block_tokens
    cdef size_t tokens, tokens_in_block, num_tokens_fed
    cdef size_t chosen_bytes, size, blocks
    cdef uint64_t num_wins[NUM_PREDICTORS]
    cdef uint64_t counts[256]
    cdef bint is_open

    def __cinit__(self):
        self.cctx = zstd.new_cctx()
        if self.cctx == NULL:
            raise MemoryError("no memory for a zstd compression context")

    def __dealloc__(self):
        if self.cctx != NULL:
            zstd.free_cctx(self.cctx)
        self.free_buffers()

    def free_buffers(self) -> None:
        """Free the buffers."""
        cdef int i
        for i in range(NUM_BUFFERS):
            free(self.buffers[i])
            self.buffers[i] = NULL
            self.sizes[i] = 0

    def count_buffer_bytes(self) -> int:
        """Return the number of bytes of the buffers."""
        cdef size_t total = 0
        cdef int i
        for i in range(NUM_BUFFERS):
            total += self.sizes[i]
        return total

    cdef uint8_t *get_buffer(self, int index, size_t size) noexcept nogil:
        if size > self.sizes[index]:
            free(self.buffers[index])
            self.buffers[index] = <uint8_t *>malloc(size)
            self.sizes[index] = size if self.buffers[index] != NULL else 0
        return self.buffers[index]

    def configure(
        self, int lane, size_t heads, size_t dims, size_t block_tokens, predictors, int level, bint use_bitshuffle,
        bint count_bytes
    ) -> None:
        """Configure the next streams: lane 0 (low bytes) or 1, geometry, tokens of a block, predictors by number, and
        whether bytes are counted for the entropy limit.
        """
        cdef tuple numbers = tuple(predictors)
        if lane not in (0, 1) or heads == 0 or dims == 0 or block_tokens == 0:
            raise ValueError("expected lane 0 or 1, and heads, dims and block_tokens above zero")
        if not 0 < len(numbers) <= NUM_PREDICTORS or not all(0 <= p < NUM_PREDICTORS for p in numbers):
            raise ValueError(f"expected 1 to {NUM_PREDICTORS} predictors by number, not {numbers!r}")
        self.lane, self.dims, self.row = lane, dims, heads * dims
        self.block_tokens, self.level = block_tokens, level
        self.use_bitshuffle, self.count_bytes = use_bitshuffle, count_bytes
        self.n_predictors = len(numbers)
        for i, number in enumerate(numbers):
            self.predictors[i] = number
        self.is_open = False

    def start(self, size_t tokens) -> None:
        """Start a stream of `tokens` tokens; its blocks begin at its first token."""
        cdef size_t block = min(self.block_tokens, tokens) * self.row
        cdef bint is_single_block = tokens <= self.block_tokens
        if self.row == 0 or tokens == 0:
            raise ValueError("setup() first, and expect tokens")
        self.is_open = False
        if (
            self.get_buffer(CHOSEN_BUFFER, tokens * self.row) == NULL
            or (self.use_bitshuffle and self.get_buffer(WORK_BUFFER, block) == NULL)
            or self.get_buffer(PAYLOAD_BUFFER_A, block) == NULL
            or (not is_single_block and self.get_buffer(PAYLOAD_BUFFER_B, block) == NULL)
            or self.get_buffer(FRAME_BUFFER, zstd.bound(tokens * self.row)) == NULL
        ):
            raise MemoryError(f"no memory for a stream of {tokens * self.row} bytes")
        self.tokens = tokens
        self.tokens_in_block = self.num_tokens_fed = self.chosen_bytes = self.size = self.blocks = 0
        memset(self.num_wins, 0, sizeof(self.num_wins))
        memset(self.counts, 0, sizeof(self.counts))
        self.is_open = True

    def feed(self, const uint8_t[::1] words not None) -> None:
        """Add the next tokens, as little-endian 16-bit words of which one lane is measured."""
        cdef size_t row_bytes = 2 * self.row, n = words.shape[0]
        cdef bint is_ok
        if not self.is_open or n % row_bytes or n // row_bytes > self.tokens - self.num_tokens_fed:
            raise ValueError(f"{n} bytes are no whole tokens, or more than the piece has")
        if n == 0:
            return
        with nogil:
            is_ok = self.split_tokens(&words[0], n // row_bytes)
        if not is_ok:
            self.is_open = False
            raise MemoryError("zstd could not compress a block")

    def finish(self) -> tuple:
        """End the stream.

        Returns
        -------
        (size, blocks, wins, limit): bytes of the joint frame of all blocks, their number, how often each predictor was
        chosen, in the order of `configure`, and the bytes that the order-0 entropy of the lane amounts to, if counted.
        """
        cdef size_t size = self.size
        if not self.is_open or self.num_tokens_fed != self.tokens:
            raise ValueError(f"{self.num_tokens_fed} of {self.tokens} tokens have come")
        self.is_open = False
        if self.blocks > 1:
            with nogil:
                size = zstd.compress(
                    self.cctx, self.buffers[FRAME_BUFFER], self.sizes[FRAME_BUFFER], self.buffers[CHOSEN_BUFFER],
                    self.chosen_bytes, self.level
                )
            if zstd.is_error(size):
                raise MemoryError(f"zstd could not compress a stream of {self.chosen_bytes} bytes")
        wins = tuple(self.num_wins[i] for i in range(self.n_predictors))
        limit = compute_entropy(self.counts) * self.tokens * self.row / 8.0 if self.count_bytes else 0.0
        return size, self.blocks, wins, limit

    cdef bint split_tokens(self, const uint8_t *words, size_t tokens) noexcept nogil:
        cdef size_t num_tokens, n, start, num_elements
        cdef uint8_t *dst
        while tokens:
            num_tokens = min(tokens, self.block_tokens - self.tokens_in_block)
            n = num_tokens * self.row
            dst = self.buffers[CHOSEN_BUFFER] + self.chosen_bytes + self.tokens_in_block * self.row
            start = 0
            while start < n:
                num_elements = min(<size_t>TILE_ELEMENTS, n - start)
                lane_kernels().predict_lane(words + 2 * start, num_elements, 2, self.lane, KVMNN_MODE_RAW, dst + start)
                if self.count_bytes:
                    lane_kernels().histogram(dst + start, num_elements, self.counts)
                start += num_elements
            words += 2 * n
            tokens -= num_tokens
            self.num_tokens_fed += num_tokens
            self.tokens_in_block += num_tokens
            if self.tokens_in_block == self.block_tokens or self.num_tokens_fed == self.tokens:
                if not self.close_block():
                    return False
        return True

    cdef bint close_block(self) noexcept nogil:
        """Compress the block under every predictor and keep the payload whose frame is smallest, the first of
        equals."""
        cdef const kvmnn_token_kernels *kernels = kvmnn_token_kernels_at(active_level)
        cdef size_t n = self.tokens_in_block * self.row, size, best_size = 0
        cdef const uint8_t *payload
        cdef const uint8_t *best = NULL
        cdef uint8_t *slot
        cdef int i, winner = 0
        cdef bint has_many_blocks = self.tokens > self.block_tokens
        for i in range(self.n_predictors):
            if self.is_duplicate(i):
                continue  # the same bytes as an earlier one, which wins at equality
            slot = self.buffers[
                PAYLOAD_BUFFER_B if has_many_blocks and best == self.buffers[PAYLOAD_BUFFER_A] else PAYLOAD_BUFFER_A
            ]
            payload = self.make_payload(kernels, self.predictors[i], n, slot)
            size = zstd.compress(
                self.cctx, self.buffers[FRAME_BUFFER], self.sizes[FRAME_BUFFER], payload, n, self.level)
            if zstd.is_error(size):
                return False
            if best == NULL or size < best_size:
                best, best_size, winner = payload, size, i
        if has_many_blocks and best != self.buffers[CHOSEN_BUFFER] + self.chosen_bytes:
            memcpy(self.buffers[CHOSEN_BUFFER] + self.chosen_bytes, best, n)
        self.chosen_bytes += n
        self.size = best_size
        self.num_wins[winner] += 1
        self.blocks += 1
        self.tokens_in_block = 0
        return True

    cdef bint is_duplicate(self, int index) noexcept nogil:
        cdef int i, canonical = canonical_predictor(self.predictors[index], self.tokens_in_block, self.dims)
        for i in range(index):
            if canonical_predictor(self.predictors[i], self.tokens_in_block, self.dims) == canonical:
                return True
        return False

    cdef const uint8_t *make_payload(
        self, const kvmnn_token_kernels *kernels, int predictor, size_t n, uint8_t *slot
    ) noexcept nogil:
        cdef const uint8_t *stream = self.buffers[CHOSEN_BUFFER] + self.chosen_bytes
        cdef uint8_t *dst = self.buffers[WORK_BUFFER] if self.use_bitshuffle else slot
        if predictor != RAW:
            predict_into(kernels, stream, n, self.row, self.dims, predictor, dst)
            stream = dst
        if self.use_bitshuffle:
            kernels.bitshuffle(stream, n, slot)
            stream = slot
        return stream
