/* The kernels of token_predictors.h, included once per SIMD level with ISA_FN(name) giving each function its own name. */

static void ISA_FN(delta)(const uint8_t *restrict src, size_t n, size_t row, uint8_t *restrict dst) {
    if (row > n) row = n;
    memcpy(dst, src, row);
    for (size_t i = row; i < n; ++i) dst[i] = (uint8_t)(src[i] - src[i - row]);
}

static void ISA_FN(exclusive_or)(const uint8_t *restrict src, size_t n, size_t row, uint8_t *restrict dst) {
    if (row > n) row = n;
    memcpy(dst, src, row);
    for (size_t i = row; i < n; ++i) dst[i] = (uint8_t)(src[i] ^ src[i - row]);
}

/* The mask instead of a branch is what compilers make vectors of. */
static void ISA_FN(pair_run)(const uint8_t *restrict src, size_t n, uint8_t *restrict dst) {
    static const uint8_t mask[32] = {255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0,
                                     255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0};
    if (n == 0) return;
    dst[0] = src[0];
    size_t i = 1;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 32; ++j) dst[i + j] = (uint8_t)(src[i + j] - (src[i + j - 1] & mask[j]));
    for (; i < n; ++i) dst[i] = (uint8_t)(i & 1 ? src[i] - src[i - 1] : src[i]);
}

static void ISA_FN(pair)(const uint8_t *src, size_t n, size_t dims, uint8_t *dst) {
    size_t step = dims % 2 == 0 ? n : dims; /* whole pairs follow each other without a seam */
    for (size_t start = 0; start < n; start += step)
        ISA_FN(pair_run)(src + start, n - start < step ? n - start : step, dst + start);
}

/* From the last token to the first, so that each still finds its neighbour as it was. */
static void ISA_FN(delta_in_place)(uint8_t *data, size_t n, size_t row) {
    size_t end = n;
    while (end > row) {
        size_t start = (end - 1) / row * row;
        uint8_t *restrict current = data + start;
        const uint8_t *restrict previous = data + start - row;
        for (size_t i = 0; i < end - start; ++i) current[i] = (uint8_t)(current[i] - previous[i]);
        end = start;
    }
}

static void ISA_FN(undo_delta)(uint8_t *data, size_t n, size_t row) {
    for (size_t start = row; start < n; start += row) {
        size_t length = n - start < row ? n - start : row;
        uint8_t *restrict current = data + start;
        const uint8_t *restrict previous = data + start - row;
        for (size_t i = 0; i < length; ++i) current[i] = (uint8_t)(current[i] + previous[i]);
    }
}

static void ISA_FN(undo_exclusive_or)(uint8_t *data, size_t n, size_t row) {
    for (size_t start = row; start < n; start += row) {
        size_t length = n - start < row ? n - start : row;
        uint8_t *restrict current = data + start;
        const uint8_t *restrict previous = data + start - row;
        for (size_t i = 0; i < length; ++i) current[i] ^= previous[i];
    }
}

static void ISA_FN(undo_pair)(uint8_t *data, size_t n, size_t dims) {
    size_t step = dims % 2 == 0 ? n : dims;
    for (size_t start = 0; start < n; start += step) {
        size_t end = n - start < step ? n : start + step;
        for (size_t i = start + 1; i < end; i += 2) data[i] = (uint8_t)(data[i] + data[i - 1]);
    }
}

/* Eight bytes as a matrix of bits, transposed: bit b of byte i becomes bit i of byte b. */
static uint64_t ISA_FN(transpose8)(uint64_t x) {
    uint64_t t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAULL;
    x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCULL;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0ULL;
    return x ^ t ^ (t << 28);
}

/* Plane b begins at bit b * n, which is no byte border unless n is a multiple of 8. */
static void ISA_FN(bitshuffle)(const uint8_t *restrict src, size_t n, uint8_t *restrict dst) {
    size_t num_groups = n / 8, shift = n % 8;
    memset(dst, 0, n);
    for (size_t i = 0; i < num_groups; ++i) {
        uint64_t x = 0;
        for (int j = 0; j < 8; ++j) x |= (uint64_t)src[8 * i + j] << 8 * j;
        x = ISA_FN(transpose8)(x);
        if (shift == 0) {
            for (size_t b = 0; b < 8; ++b) dst[b * num_groups + i] = (uint8_t)(x >> 8 * b);
            continue;
        }
        for (size_t b = 0; b < 8; ++b) {
            size_t bit_position = b * n + 8 * i, low = bit_position % 8;
            unsigned bits = (unsigned)(x >> 8 * b & 255) << low;
            dst[bit_position / 8] |= (uint8_t)bits;
            if (low) dst[bit_position / 8 + 1] |= (uint8_t)(bits >> 8);
        }
    }
    for (size_t i = 8 * num_groups; i < n; ++i)
        for (size_t b = 0; b < 8; ++b) {
            size_t bit_position = b * n + i;
            dst[bit_position / 8] |= (uint8_t)((src[i] >> b & 1) << bit_position % 8);
        }
}

static const kvmnn_token_kernels ISA_FN(table) = {
    ISA_NAME,           ISA_FN(delta),             ISA_FN(delta_in_place), ISA_FN(exclusive_or), ISA_FN(pair),
    ISA_FN(undo_delta), ISA_FN(undo_exclusive_or), ISA_FN(undo_pair),      ISA_FN(bitshuffle),
};
