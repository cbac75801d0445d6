/* The loops of words.h, compiled once per SIMD level (../simd.h). */

/* -- symbols and low parts ----------------------------------------------------------------------------------------- */

static int LEVEL(split)(const uint8_t *words, size_t n, int dtype, int base, uint8_t *restrict symbols,
                        uint8_t *restrict low) {
    if (dtype == KVMNN_FP16) {
        const uint16_t *u = (const uint16_t *)words;
        for (size_t i = 0; i < n; ++i) {
            symbols[i] = (uint8_t)(u[i] >> 8);
            low[i] = (uint8_t)u[i];
        }
        return 0;
    }
    uint16_t outside = 0;
    if (dtype == KVMNN_BF16) {
        const uint16_t *u = (const uint16_t *)words;
        for (size_t i = 0; i < n; ++i) {
            uint16_t v = u[i], e = (uint16_t)((v >> 7 & 255) - base);
            uint16_t inside = (uint16_t)(e - 1) < WINDOW ? 0xffff : 0;
            e &= inside;
            outside |= (uint16_t)~inside;
            symbols[i] = (uint8_t)((v >> 8 & 128) | e << 2 | (v >> 5 & 3));
            low[i] = (uint8_t)(v & 31);
        }
    } else {
        const uint32_t *u = (const uint32_t *)words;
        for (size_t i = 0; i < n; ++i) {
            uint16_t v = (uint16_t)(u[i] >> 16), e = (uint16_t)((v >> 7 & 255) - base);
            uint16_t inside = (uint16_t)(e - 1) < WINDOW ? 0xffff : 0;
            e &= inside;
            outside |= (uint16_t)~inside;
            symbols[i] = (uint8_t)((v >> 8 & 128) | e << 2 | (v >> 5 & 3));
            low[i] = (uint8_t)(v & 31);
        }
    }
    return outside != 0;
}

static void LEVEL(join)(const uint8_t *restrict symbols, const uint8_t *restrict low, const uint8_t *restrict tails,
                        size_t n, int dtype, int base, uint8_t *restrict words) {
    uint16_t *restrict u = (uint16_t *)words;
    if (dtype == KVMNN_FP16) {
        for (size_t i = 0; i < n; ++i) u[i] = (uint16_t)(symbols[i] << 8 | low[i]);
    } else if (dtype == KVMNN_BF16) {
        for (size_t i = 0; i < n; ++i) {
            uint16_t s = symbols[i];
            u[i] = (uint16_t)((s & 128) << 8 | ((s >> 2 & 31) + base) << 7 | (s & 3) << 5 | low[i]);
        }
    } else {
        for (size_t i = 0; i < n; ++i) {
            uint16_t s = symbols[i];
            u[2 * i + 1] = (uint16_t)((s & 128) << 8 | ((s >> 2 & 31) + base) << 7 | (s & 3) << 5 | low[i]);
            memcpy(u + 2 * i, tails + 2 * i, 2);
        }
    }
}

static int LEVEL(unfold)(const uint8_t *restrict folded, const uint8_t *restrict predicted, size_t n,
                         uint8_t *restrict symbols) {
    uint8_t escaped = 0;
    for (size_t i = 0; i < n; ++i) {
        escaped |= folded[i] == ESCAPE ? 1 : 0;
        symbols[i] = (uint8_t)(folded[i] ^ (predicted[i] & 128));
    }
    return escaped;
}

static int LEVEL(escapes)(const uint8_t *symbols, const uint8_t *predicted, size_t n) {
    uint8_t any = 0;
    for (size_t i = 0; i < n; ++i) any |= (symbols[i] ^ (predicted[i] & 128)) == ESCAPE ? 1 : 0;
    return any;
}

static int LEVEL(outside)(const uint8_t *symbols, size_t n) {
    uint8_t any = 0;
    for (size_t i = 0; i < n; ++i) any |= (symbols[i] & 124) == 0 ? 1 : 0;
    return any;
}

/* -- rotation ------------------------------------------------------------------------------------------------------ */

static void LEVEL(angles)(const uint64_t *frequencies, size_t pairs, uint64_t distance, int32_t *restrict scratch,
                          float *restrict cosines, float *restrict sines) {
    for (size_t i = 0; i < pairs; ++i)
        scratch[i] = (int32_t)(((distance * frequencies[i] >> 39) + (1 << 22)) & ((1 << 25) - 1));
    for (size_t i = 0; i < pairs; ++i) {
        uint32_t turns = (uint32_t)scratch[i], quarter = turns >> 23;
        float x = (float)((int32_t)(turns & ((1 << 23) - 1)) - (1 << 22)) * 0x1p-23f;
        float z = x * x;
        uint32_t sine = dense_bits(x * (S0 + z * (S1 + z * (S2 + z * S3))));
        uint32_t cosine = dense_bits(1.0f + z * (C1 + z * (C2 + z * (C3 + z * C4))));
        uint32_t swapped = 0u - (quarter & 1), both = (sine ^ cosine) & swapped;
        cosines[i] = dense_float((cosine ^ both) ^ ((quarter + 1) & 2) << 30);
        sines[i] = dense_float((sine ^ both) ^ (quarter & 2) << 30);
    }
}

static inline float LEVEL(of_half)(uint32_t word) {
    uint32_t normal = (word & 0x7c00) - 0x400 < 0x7800 ? 0xffffffffu : 0;
    return dense_float(((word & 0x8000) << 16 | (((word & 0x7fff) << 13) + 0x38000000)) & normal);
}

static inline uint16_t LEVEL(to_half)(float x) {
    uint32_t bits = dense_bits(x);
    int32_t y = (int32_t)(((bits & 0x7fffffff) + 0x1000) >> 13) - (112 << 10);
    y = y < 1024 ? 0 : y;
    y = y > 31743 ? 31743 : y;
    return (uint16_t)((bits >> 16 & 0x8000) | (uint32_t)y);
}

static inline float LEVEL(of_wide)(uint32_t bits) {
    uint32_t usual = (bits & 0x7f800000) - (64u << 23) < (128u << 23) ? 0xffffffffu : 0;
    return dense_float(bits & usual);
}

static inline uint16_t LEVEL(to_brain)(float x) { /* a sum below 2^66: rounding does not reach the sign */
    return (uint16_t)((dense_bits(x) + 0x8000) >> 16);
}

static void LEVEL(turn_half)(const uint16_t *a, const uint16_t *b, size_t n, const float *c, const float *s,
                             uint16_t *restrict to_a, uint16_t *restrict to_b) {
    for (size_t i = 0; i < n; ++i) {
        float x = LEVEL(of_half)(a[i]), y = LEVEL(of_half)(b[i]);
        float xc = x * c[i], ys = y * s[i], yc = y * c[i], xs = x * s[i];
        to_a[i] = LEVEL(to_half)(xc - ys);
        to_b[i] = LEVEL(to_half)(yc + xs);
    }
}

static void LEVEL(turn_brain)(const uint16_t *a, const uint16_t *b, size_t n, const float *c, const float *s,
                              uint16_t *restrict to_a, uint16_t *restrict to_b) {
    for (size_t i = 0; i < n; ++i) {
        float x = LEVEL(of_wide)((uint32_t)a[i] << 16), y = LEVEL(of_wide)((uint32_t)b[i] << 16);
        float xc = x * c[i], ys = y * s[i], yc = y * c[i], xs = x * s[i];
        to_a[i] = LEVEL(to_brain)(xc - ys);
        to_b[i] = LEVEL(to_brain)(yc + xs);
    }
}

static void LEVEL(turn_single)(const uint32_t *a, const uint32_t *b, size_t n, const float *c, const float *s,
                               uint32_t *restrict to_a, uint32_t *restrict to_b) {
    for (size_t i = 0; i < n; ++i) {
        float x = LEVEL(of_wide)(a[i]), y = LEVEL(of_wide)(b[i]);
        float xc = x * c[i], ys = y * s[i], yc = y * c[i], xs = x * s[i];
        to_a[i] = dense_bits(xc - ys);
        to_b[i] = dense_bits(yc + xs);
    }
}

static void LEVEL(turn)(const uint8_t *row, int dtype, size_t heads, size_t dim, size_t pairs, const float *cosines,
                        const float *sines, uint8_t *turned) {
    size_t bytes = dtype == KVMNN_FP32 ? 4 : 2, half = pairs * bytes, all = dim * bytes;
    for (size_t head = 0; head < heads; ++head, row += all, turned += all) {
        const void *a = row, *b = row + half;
        void *to_a = turned, *to_b = turned + half;
        if (dtype == KVMNN_FP16)
            LEVEL(turn_half)(a, b, pairs, cosines, sines, to_a, to_b);
        else if (dtype == KVMNN_BF16)
            LEVEL(turn_brain)(a, b, pairs, cosines, sines, to_a, to_b);
        else
            LEVEL(turn_single)(a, b, pairs, cosines, sines, to_a, to_b);
        memcpy(turned + 2 * half, row + 2 * half, all - 2 * half);
    }
}

/* -- comparing rows ------------------------------------------------------------------------------------------------ */

static size_t LEVEL(equal)(const uint8_t *a, const uint8_t *b, size_t n) {
    size_t sum = 0, i = 0;
    while (n - i >= 32) {
        uint8_t found[32] = {0};
        size_t end = n - i > 32 * 255 ? i + 32 * 255 : i + (n - i) / 32 * 32;
        for (; i < end; i += 32)
            for (int k = 0; k < 32; ++k) found[k] = (uint8_t)(found[k] + (a[i + k] == b[i + k]));
        uint64_t parts[4], pairs = 0;
        memcpy(parts, found, 32);
        for (int k = 0; k < 4; ++k) pairs += (parts[k] & 0x00ff00ff00ff00ffu) + (parts[k] >> 8 & 0x00ff00ff00ff00ffu);
        sum += (size_t)(pairs * 0x0001000100010001u >> 48);
    }
    for (; i < n; ++i) sum += a[i] == b[i];
    return sum;
}

static uint8_t LEVEL(largest)(const uint8_t *votes) {
    uint8_t most[32] = {0};
    for (int i = 0; i < SCANNED_ROWS; i += 32)
        for (int k = 0; k < 32; ++k) most[k] = votes[i + k] > most[k] ? votes[i + k] : most[k];
    for (int width = 16; width; width /= 2)
        for (int k = 0; k < width; ++k) most[k] = most[k] > most[k + width] ? most[k] : most[k + width];
    return most[0];
}

static void LEVEL(scan)(const uint8_t *columns, size_t stride, size_t rows, const uint8_t *looks, size_t count,
                        uint8_t *restrict votes, uint8_t *restrict maxima) {
    for (size_t i = 0; i < rows; i += SCANNED_ROWS) {
        uint8_t sums[SCANNED_ROWS] = {0};
        const uint8_t *column = columns + i;
        for (size_t k = 0; k < count; ++k, column += stride) {
            uint8_t look = looks[k];
            for (int j = 0; j < SCANNED_ROWS; ++j) sums[j] = (uint8_t)(sums[j] + (column[j] == look));
        }
        memcpy(votes + i, sums, SCANNED_ROWS);
        maxima[i / SCANNED_ROWS] = LEVEL(largest)(sums);
    }
}

/* -- 5 bits -------------------------------------------------------------------------------------------------------- */

static void LEVEL(pack5)(const uint8_t *low, size_t n, uint8_t *packed) {
    for (size_t i = 0; i < n; i += 8, packed += 5) {
        uint64_t v;
        memcpy(&v, low + i, 8);
        if (n - i < 8) v &= ((uint64_t)1 << 8 * (n - i)) - 1;
        v = (v & 0x001f001f001f001fu) | (v & 0x1f001f001f001f00u) >> 3;
        v = (v & 0x000003ff000003ffu) | (v & 0x03ff000003ff0000u) >> 6;
        v = (v & 0xfffff) | (v >> 32 & 0xfffff) << 20;
        memcpy(packed, &v, 8);
    }
}

static void LEVEL(unpack5)(const uint8_t *packed, size_t n, uint8_t *low) {
    for (size_t i = 0; i < n; i += 8, packed += 5) {
        uint64_t v;
        memcpy(&v, packed, 8);
        v = (v & 0xfffff) | (v >> 20 & 0xfffff) << 32;
        v = (v & 0x000003ff000003ffu) | (v << 6 & 0x03ff000003ff0000u);
        v = (v & 0x001f001f001f001fu) | (v << 3 & 0x1f001f001f001f00u);
        memcpy(low + i, &v, 8);
    }
}

#include "coder_impl.h"

static const dense_loops LEVEL(table) = {
    KVMNN_LEVEL_NAME, LEVEL(split),     LEVEL(join),    LEVEL(unfold), LEVEL(escapes), LEVEL(outside), LEVEL(angles),
    LEVEL(turn),      LEVEL(equal),     LEVEL(scan),    LEVEL(largest), LEVEL(pick),   LEVEL(merge),
    LEVEL(subtract),  LEVEL(add_equal), LEVEL(log_sum), LEVEL(fold),   LEVEL(code),    LEVEL(pack5),   LEVEL(unpack5),
};
