"""Sizes of byte streams under predictors along the token axis (docs/offline.md): what `kvmnn measure` simulates."""

from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize

from kvmnn._simd cimport active_level
from kvmnn.frames._streams cimport KVMNN_MODE_RAW, entropy, lanes
from kvmnn.frames._zstdlib cimport zstd


cdef extern from "kvmnn/offline/tokens.h" nogil:
    ctypedef struct kvmnn_tokens:
        void (*delta)(const uint8_t *src, size_t n, size_t row, uint8_t *dst) noexcept nogil
        void (*delta_in_place)(uint8_t *data, size_t n, size_t row) noexcept nogil
        void (*exclusive_or)(const uint8_t *src, size_t n, size_t row, uint8_t *dst) noexcept nogil
        void (*pair)(const uint8_t *src, size_t n, size_t dims, uint8_t *dst) noexcept nogil
        void (*undo_delta)(uint8_t *data, size_t n, size_t row) noexcept nogil
        void (*undo_exclusive_or)(uint8_t *data, size_t n, size_t row) noexcept nogil
        void (*undo_pair)(uint8_t *data, size_t n, size_t dims) noexcept nogil
        void (*bitshuffle)(const uint8_t *src, size_t n, uint8_t *dst) noexcept nogil

    const kvmnn_tokens *kvmnn_tokens_at(int level)


cdef enum:
    RAW = 0
    DELTA_SEQ = 1
    XOR_SEQ = 2
    PAIR_DELTA = 3
    PAIR_DELTA_DELTA_SEQ = 4
    PREDICTORS = 5

    WORDS = 32768         # split and counted before the next are touched

NAMES = ("raw", "delta_seq", "xor_seq", "pair_delta", "pair_delta_delta_seq")
"""The predictors by number."""


cdef void predict_into(
    const kvmnn_tokens *loops, const uint8_t *src, size_t n, size_t row, size_t dims, int predictor, uint8_t *dst
) noexcept nogil:
    if predictor == DELTA_SEQ:
        loops.delta(src, n, row, dst)
    elif predictor == XOR_SEQ:
        loops.exclusive_or(src, n, row, dst)
    elif predictor == PAIR_DELTA:
        loops.pair(src, n, dims, dst)
    elif predictor == PAIR_DELTA_DELTA_SEQ:
        loops.pair(src, n, dims, dst)
        loops.delta_in_place(dst, n, row)
    else:
        memcpy(dst, src, n)


cdef int same_as(int predictor, size_t tokens, size_t dims) noexcept nogil:
    """The lowest predictor that gives the same bytes on a block of this shape."""
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


# -- for Python: one array at a time ------------------------------------------------------------------------------------

cdef size_t checked_row(size_t n, size_t heads, size_t dims, int predictor) except 0:
    if heads == 0 or dims == 0 or n % (heads * dims):
        raise ValueError(f"{n} bytes are no whole tokens of {heads} heads x {dims} dims")
    if not 0 <= predictor < PREDICTORS:
        raise ValueError(f"no predictor has the number {predictor}")
    return heads * dims


def predict(const uint8_t[::1] data not None, size_t heads, size_t dims, int predictor) -> bytes:
    """The stream of `predictor` (an index of `NAMES`) over bytes ``[token, head, dim]``."""
    cdef size_t n = data.shape[0], row = checked_row(n, heads, dims, predictor)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, n)
    cdef uint8_t *dst = <uint8_t *>PyBytes_AsString(out)
    if n:
        with nogil:
            predict_into(kvmnn_tokens_at(active_level), &data[0], n, row, dims, predictor, dst)
    return out


def unpredict(const uint8_t[::1] data not None, size_t heads, size_t dims, int predictor) -> bytes:
    """The inverse of `predict`."""
    cdef size_t n = data.shape[0], row = checked_row(n, heads, dims, predictor)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, n)
    cdef uint8_t *dst = <uint8_t *>PyBytes_AsString(out)
    cdef const kvmnn_tokens *loops = kvmnn_tokens_at(active_level)
    if n:
        with nogil:
            memcpy(dst, &data[0], n)
            if predictor == DELTA_SEQ or predictor == PAIR_DELTA_DELTA_SEQ:
                loops.undo_delta(dst, n, row)
            elif predictor == XOR_SEQ:
                loops.undo_exclusive_or(dst, n, row)
            if predictor == PAIR_DELTA or predictor == PAIR_DELTA_DELTA_SEQ:
                loops.undo_pair(dst, n, dims)
    return out


def bitshuffle(const uint8_t[::1] data not None) -> bytes:
    """All bits 0 of the bytes, then all bits 1 and so on, packed from the lowest bit up."""
    cdef size_t n = data.shape[0]
    cdef bytes out = PyBytes_FromStringAndSize(NULL, n)
    if n:
        kvmnn_tokens_at(active_level).bitshuffle(&data[0], n, <uint8_t *>PyBytes_AsString(out))
    return out


# -- sizes of streams -------------------------------------------------------------------------------------------------

cdef enum:
    CHOSEN = 0     # the payloads of all blocks, for the joint frame, and behind them the lane of the block being filled
    WORK = 1       # a predicted stream before bitshuffle
    FIRST = 2      # payloads: the best so far, and the one being tried
    SECOND = 3
    FRAME = 4      # what zstd writes
    BUFFERS = 5


cdef class StreamMeter:
    """The compressed size of one byte lane of tokens of 16-bit words, block by block; for one thread at a time.

    `setup` says what is measured; then for every piece `begin`, `feed` as often as needed, `finish`. Contexts and
    buffers are kept from piece to piece.
    """
    cdef void *cctx
    cdef uint8_t *buffers[BUFFERS]
    cdef size_t sizes[BUFFERS]
    cdef int predictors[PREDICTORS]
    cdef int n_predictors
    cdef int lane, level
    cdef bint shuffled, counted
    cdef size_t row, dims, block_tokens
    cdef size_t tokens, tokens_in_block, tokens_seen
    cdef size_t chosen, size, blocks
    cdef uint64_t won[PREDICTORS]
    cdef uint64_t counts[256]
    cdef bint begun

    def __cinit__(self):
        self.cctx = zstd.new_cctx()
        if self.cctx == NULL:
            raise MemoryError("no memory for a zstd compression context")

    def __dealloc__(self):
        if self.cctx != NULL:
            zstd.free_cctx(self.cctx)
        self.forget()

    def forget(self) -> None:
        """Free the buffers."""
        cdef int i
        for i in range(BUFFERS):
            free(self.buffers[i])
            self.buffers[i] = NULL
            self.sizes[i] = 0

    def held(self) -> int:
        """Bytes of the buffers."""
        cdef size_t total = 0
        cdef int i
        for i in range(BUFFERS):
            total += self.sizes[i]
        return total

    cdef uint8_t *buffer(self, int which, size_t size) noexcept nogil:
        if size > self.sizes[which]:
            free(self.buffers[which])
            self.buffers[which] = <uint8_t *>malloc(size)
            self.sizes[which] = size if self.buffers[which] != NULL else 0
        return self.buffers[which]

    def setup(
        self, int lane, size_t heads, size_t dims, size_t block_tokens, predictors, int level, bint shuffled, bint counted
    ) -> None:
        """What the next pieces are: lane 0 (low bytes) or 1, geometry, tokens of a block, predictors by number, and
        whether bytes are counted for the entropy limit."""
        cdef tuple numbers = tuple(predictors)
        if lane not in (0, 1) or heads == 0 or dims == 0 or block_tokens == 0:
            raise ValueError("expected lane 0 or 1, and heads, dims and block_tokens above zero")
        if not 0 < len(numbers) <= PREDICTORS or not all(0 <= p < PREDICTORS for p in numbers):
            raise ValueError(f"expected 1 to {PREDICTORS} predictors by number, not {numbers!r}")
        self.lane, self.dims, self.row = lane, dims, heads * dims
        self.block_tokens, self.level, self.shuffled, self.counted = block_tokens, level, shuffled, counted
        self.n_predictors = len(numbers)
        for i, number in enumerate(numbers):
            self.predictors[i] = number
        self.begun = False

    def begin(self, size_t tokens) -> None:
        """Start a piece of `tokens` tokens; its blocks begin at its first token."""
        cdef size_t block = min(self.block_tokens, tokens) * self.row
        cdef bint single = tokens <= self.block_tokens
        if self.row == 0 or tokens == 0:
            raise ValueError("setup() first, and expect tokens")
        self.begun = False
        if (
            self.buffer(CHOSEN, tokens * self.row) == NULL
            or (self.shuffled and self.buffer(WORK, block) == NULL)
            or self.buffer(FIRST, block) == NULL
            or (not single and self.buffer(SECOND, block) == NULL)
            or self.buffer(FRAME, zstd.bound(tokens * self.row)) == NULL
        ):
            raise MemoryError(f"no memory for a stream of {tokens * self.row} bytes")
        self.tokens = tokens
        self.tokens_in_block = self.tokens_seen = self.chosen = self.size = self.blocks = 0
        memset(self.won, 0, sizeof(self.won))
        memset(self.counts, 0, sizeof(self.counts))
        self.begun = True

    def feed(self, const uint8_t[::1] words not None) -> None:
        """The next tokens, as the little-endian 16-bit words that both lanes are made of."""
        cdef size_t row_bytes = 2 * self.row, n = words.shape[0]
        cdef bint fine
        if not self.begun or n % row_bytes or n // row_bytes > self.tokens - self.tokens_seen:
            raise ValueError(f"{n} bytes are no whole tokens, or more than the piece has")
        if n == 0:
            return
        with nogil:
            fine = self.take(&words[0], n // row_bytes)
        if not fine:
            self.begun = False
            raise MemoryError("zstd could not compress a block")

    def finish(self) -> tuple:
        """End the piece.

        Returns
        -------
        (size, blocks, won, limit): bytes of the joint frame of all blocks, their number, how often each predictor was
        chosen, in the order of `setup`, and the bytes that the order-0 entropy of the lane amounts to, if counted.
        """
        cdef size_t size = self.size
        if not self.begun or self.tokens_seen != self.tokens:
            raise ValueError(f"{self.tokens_seen} of {self.tokens} tokens have come")
        self.begun = False
        if self.blocks > 1:
            with nogil:
                size = zstd.compress(
                    self.cctx, self.buffers[FRAME], self.sizes[FRAME], self.buffers[CHOSEN], self.chosen, self.level
                )
            if zstd.is_error(size):
                raise MemoryError(f"zstd could not compress a stream of {self.chosen} bytes")
        won = tuple(self.won[i] for i in range(self.n_predictors))
        limit = entropy(self.counts) * self.tokens * self.row / 8.0 if self.counted else 0.0
        return size, self.blocks, won, limit

    cdef bint take(self, const uint8_t *words, size_t tokens) noexcept nogil:
        cdef size_t now, n, start, part
        cdef uint8_t *dst
        while tokens:
            now = min(tokens, self.block_tokens - self.tokens_in_block)
            n = now * self.row
            dst = self.buffers[CHOSEN] + self.chosen + self.tokens_in_block * self.row
            start = 0
            while start < n:
                part = min(<size_t>WORDS, n - start)
                lanes().predict_lane(words + 2 * start, part, 2, self.lane, KVMNN_MODE_RAW, dst + start)
                if self.counted:
                    lanes().histogram(dst + start, part, self.counts)
                start += part
            words += 2 * n
            tokens -= now
            self.tokens_seen += now
            self.tokens_in_block += now
            if self.tokens_in_block == self.block_tokens or self.tokens_seen == self.tokens:
                if not self.close_block():
                    return False
        return True

    cdef bint close_block(self) noexcept nogil:
        """Compress the block under every predictor and keep the payload whose frame is smallest, the first of equals."""
        cdef const kvmnn_tokens *loops = kvmnn_tokens_at(active_level)
        cdef size_t n = self.tokens_in_block * self.row, size, best_size = 0
        cdef const uint8_t *payload
        cdef const uint8_t *best = NULL
        cdef uint8_t *slot
        cdef int i, winner = 0
        cdef bint several = self.tokens > self.block_tokens
        for i in range(self.n_predictors):
            if self.is_repeated(i):
                continue  # the same bytes as an earlier one, which wins at equality
            slot = self.buffers[SECOND if several and best == self.buffers[FIRST] else FIRST]
            payload = self.make_payload(loops, self.predictors[i], n, slot)
            size = zstd.compress(self.cctx, self.buffers[FRAME], self.sizes[FRAME], payload, n, self.level)
            if zstd.is_error(size):
                return False
            if best == NULL or size < best_size:
                best, best_size, winner = payload, size, i
        if several and best != self.buffers[CHOSEN] + self.chosen:
            memcpy(self.buffers[CHOSEN] + self.chosen, best, n)
        self.chosen += n
        self.size = best_size
        self.won[winner] += 1
        self.blocks += 1
        self.tokens_in_block = 0
        return True

    cdef bint is_repeated(self, int index) noexcept nogil:
        cdef int i, mine = same_as(self.predictors[index], self.tokens_in_block, self.dims)
        for i in range(index):
            if same_as(self.predictors[i], self.tokens_in_block, self.dims) == mine:
                return True
        return False

    cdef const uint8_t *make_payload(
        self, const kvmnn_tokens *loops, int predictor, size_t n, uint8_t *slot
    ) noexcept nogil:
        cdef const uint8_t *stream = self.buffers[CHOSEN] + self.chosen
        cdef uint8_t *dst = self.buffers[WORK] if self.shuffled else slot
        if predictor != RAW:
            predict_into(loops, stream, n, self.row, self.dims, predictor, dst)
            stream = dst
        if self.shuffled:
            loops.bitshuffle(stream, n, slot)
            stream = slot
        return stream
