/* Literals as streams of Huffman codes, included once per SIMD level with LEVEL(name) giving each function its own name.
 *
 * Plain C but for AVX: a code for each of 64 literals, or 32, and eight of these put together, are shuffles and shifts
 * there, which no compiler finds.
 */

#ifdef LEVEL_WIDE

/* Of all symbols. Codes are bytes: the longest begin at 0, so of 256 none is above 255. */
typedef struct {
    __m512i lengths[4], codes[4];
} LEVEL(tables);

static void LEVEL(prepare)(const kvmnn_huffman *code, const uint64_t *codes, kvmnn_huffman_pairs *pairs, size_t n,
                           LEVEL(tables) *tables) {
    uint8_t bytes[SYMBOLS];
    (void)codes, (void)pairs, (void)n;
    for (int s = 0; s < SYMBOLS; ++s) bytes[s] = code->bits[s] ? (uint8_t)code->code[s] : 0;
    for (int i = 0; i < 4; ++i) {
        tables->lengths[i] = _mm512_loadu_si512(code->bits + 64 * i);
        tables->codes[i] = _mm512_loadu_si512(bytes + 64 * i);
    }
}

static inline __m512i LEVEL(look)(const __m512i *table, __m512i literals) {
    __m512i lower = _mm512_permutex2var_epi8(table[0], literals, table[1]);
    __m512i upper = _mm512_permutex2var_epi8(table[2], literals, table[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(literals), lower, upper);
}

/* Neighbours put together in elements of twice the size, the later one below: what is read first stands highest. */
static inline void LEVEL(join16)(__m512i *codes, __m512i *lengths) {
    __m512i low = _mm512_set1_epi32(0xffff), below = _mm512_srli_epi32(*lengths, 16);
    *codes = _mm512_or_si512(_mm512_srli_epi32(*codes, 16), _mm512_sllv_epi32(_mm512_and_si512(*codes, low), below));
    *lengths = _mm512_add_epi32(_mm512_and_si512(*lengths, low), below);
}

static inline void LEVEL(join32)(__m512i *codes, __m512i *lengths) {
    __m512i low = _mm512_set1_epi64(0xffffffff), below = _mm512_srli_epi64(*lengths, 32);
    *codes = _mm512_or_si512(_mm512_srli_epi64(*codes, 32), _mm512_sllv_epi64(_mm512_and_si512(*codes, low), below));
    *lengths = _mm512_add_epi64(_mm512_and_si512(*lengths, low), below);
}

/* One stream, from its last literal to its first; what is behind it. */
static uint8_t *LEVEL(write_one)(const uint64_t *codes, const LEVEL(tables) *tables, const uint8_t *literals, size_t n,
                                 uint8_t *dst) {
    enum { AT_ONCE = 64, MOST_BITS = 56 };
    kvmnn_bits out = {0, 0, dst};
    size_t whole = n / AT_ONCE * AT_ONCE;
    for (; n > whole; --n) append_one(&out, codes[literals[n - 1]]);
    for (; whole; whole -= AT_ONCE) {
        uint64_t bits[2][8], counts[2][8];
        __m512i source = _mm512_loadu_si512(literals + whole - AT_ONCE), zero = _mm512_setzero_si512();
        __m512i lengths = LEVEL(look)(tables->lengths, source);
        __m512i found = LEVEL(look)(tables->codes, source);
        __m512i a = _mm512_unpacklo_epi8(found, zero), a_bits = _mm512_unpacklo_epi8(lengths, zero);
        __m512i b = _mm512_unpackhi_epi8(found, zero), b_bits = _mm512_unpackhi_epi8(lengths, zero);
        LEVEL(join16)(&a, &a_bits);
        LEVEL(join16)(&b, &b_bits);
        LEVEL(join32)(&a, &a_bits);
        LEVEL(join32)(&b, &b_bits);
        __m512i first = _mm512_unpacklo_epi64(a, b), first_bits = _mm512_unpacklo_epi64(a_bits, b_bits);
        __m512i second = _mm512_unpackhi_epi64(a, b), second_bits = _mm512_unpackhi_epi64(a_bits, b_bits);
        __m512i all_bits = _mm512_add_epi64(first_bits, second_bits);
        if (_mm512_cmpgt_epu64_mask(all_bits, _mm512_set1_epi64(MOST_BITS)) == 0) { /* eight codes at a time */
            _mm512_storeu_si512(bits[0], _mm512_or_si512(second, _mm512_sllv_epi64(first, second_bits)));
            _mm512_storeu_si512(counts[0], all_bits);
            for (int i = 7; i >= 0; --i) append(&out, bits[0][i], counts[0][i]);
        } else {
            _mm512_storeu_si512(bits[0], first);
            _mm512_storeu_si512(bits[1], second);
            _mm512_storeu_si512(counts[0], first_bits);
            _mm512_storeu_si512(counts[1], second_bits);
            for (int i = 7; i >= 0; --i) {
                append(&out, bits[1][i], counts[1][i]);
                append(&out, bits[0][i], counts[0][i]);
            }
        }
    }
    return kvmnn_bits_end(&out);
}

#else

/* An entry behind those of a group, whose newest bits stand at the top. Groups are put together before they are appended,
 * so that one does not wait for the other. */
static inline void LEVEL(join)(uint64_t *group, uint64_t *count, uint64_t entry) {
    *group = *group >> (entry & 63) | entry;
    *count += entry;
}

/* The group of as many literals, or, where that has more bits than can be appended, one after the other. */
static inline void LEVEL(append_group)(kvmnn_bits *out, uint64_t group, uint64_t count, const uint64_t *codes,
                                       const uint8_t *literals, int n) {
    enum { MOST_BITS = 56 };
    count &= 0xff;
    if (count <= MOST_BITS) {
        append(out, group >> (64 - count), count);
        return;
    }
    while (n--) append_one(out, codes[literals[n]]);
}

/* One stream, from its last literal to its first; what is behind it. */
static uint8_t *LEVEL(write_singles)(const uint64_t *codes, const uint8_t *literals, size_t n, uint8_t *dst) {
    enum { GROUP = 7 };
    kvmnn_bits out = {0, 0, dst};
    for (; n % GROUP; --n) append_one(&out, codes[literals[n - 1]]);
    for (; n; n -= GROUP) {
        const uint8_t *from = literals + n - GROUP;
        uint64_t group = 0, count = 0;
        for (int j = GROUP - 1; j >= 0; --j) LEVEL(join)(&group, &count, codes[from[j]]);
        LEVEL(append_group)(&out, group, count, codes, from, GROUP);
    }
    return kvmnn_bits_end(&out);
}

static uint8_t *LEVEL(write_pairs)(const uint64_t *codes, const uint64_t *pairs, const uint8_t *literals, size_t n,
                                   uint8_t *dst) {
    enum { GROUP = 8 };
    kvmnn_bits out = {0, 0, dst};
    for (; n % GROUP; --n) append_one(&out, codes[literals[n - 1]]);
    for (; n; n -= GROUP) {
        const uint8_t *from = literals + n - GROUP;
        uint64_t group = 0, count = 0;
        for (int j = GROUP - 2; j >= 0; j -= 2) LEVEL(join)(&group, &count, pairs[from[j] | from[j + 1] << 8]);
        LEVEL(append_group)(&out, group, count, codes, from, GROUP);
    }
    return kvmnn_bits_end(&out);
}

#ifdef LEVEL_F16C
#include "huffman_avx2.h"
#endif

typedef struct {
#ifdef LEVEL_F16C
    LEVEL(code_rows) rows;
#endif
    const uint64_t *pairs; /* or NULL */
} LEVEL(tables);

static void LEVEL(prepare)(const kvmnn_huffman *code, const uint64_t *codes, kvmnn_huffman_pairs *pairs, size_t n,
                           LEVEL(tables) *tables) {
#ifdef LEVEL_F16C
    LEVEL(fill_rows)(code, n, &tables->rows);
    if (tables->rows.count) return;
#endif
    tables->pairs = pairs_of(code, codes, pairs, n);
}

static uint8_t *LEVEL(write_one)(const uint64_t *codes, const LEVEL(tables) *tables, const uint8_t *literals, size_t n,
                                 uint8_t *dst) {
#ifdef LEVEL_F16C
    if (tables->rows.count) return LEVEL(write_by_rows)(codes, &tables->rows, literals, n, dst);
#endif
    if (tables->pairs) return LEVEL(write_pairs)(codes, tables->pairs, literals, n, dst);
    return LEVEL(write_singles)(codes, literals, n, dst);
}

#endif

static size_t LEVEL(write)(const kvmnn_huffman *code, kvmnn_huffman_pairs *pairs, const uint8_t *literals, size_t n,
                           int streams, uint8_t *dst) {
    uint64_t codes[SYMBOLS];
    for (int s = 0; s < SYMBOLS; ++s)
        codes[s] = code->bits[s] ? (uint64_t)code->code[s] << (64 - code->bits[s]) | code->bits[s] : 0;
    LEVEL(tables) tables;
    LEVEL(prepare)(code, codes, pairs, n, &tables);
    if (streams == 1) return (size_t)(LEVEL(write_one)(codes, &tables, literals, n, dst) - dst);
    size_t part = (n + 3) / 4;
    uint8_t *at = dst + 6;
    for (size_t i = 0; i < 4; ++i) {
        uint8_t *end = LEVEL(write_one)(codes, &tables, literals + i * part, i < 3 ? part : n - 3 * part, at);
        if (i < 3) put_size(dst + 2 * i, (size_t)(end - at));
        at = end;
    }
    return (size_t)(at - dst);
}

static size_t LEVEL(unknown)(const uint8_t known[SYMBOLS], const uint8_t *literals, size_t at, size_t n) {
#if defined(LEVEL_F16C)
    const known_bytes marks = bits_of_known(known);
#define ROW(bytes) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(bytes)))
    const __m256i low = ROW(marks.rows[0]), high = ROW(marks.rows[1]), bits = ROW(BIT_OF), half = _mm256_set1_epi8(15);
#undef ROW
    for (; at + 32 <= n; at += 32) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(literals + at));
        __m256i column = _mm256_and_si256(x, half), row = _mm256_and_si256(_mm256_srli_epi16(x, 4), half);
        __m256i found = _mm256_blendv_epi8(_mm256_shuffle_epi8(low, column), _mm256_shuffle_epi8(high, column), x);
        found = _mm256_and_si256(found, _mm256_shuffle_epi8(bits, row));
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(found, _mm256_setzero_si256()))) break;
    }
#elif defined(__aarch64__)
    const known_bytes marks = bits_of_known(known);
    const uint8x16_t low = vld1q_u8(marks.rows[0]), high = vld1q_u8(marks.rows[1]), bits = vld1q_u8(BIT_OF);
    for (; at + 16 <= n; at += 16) {
        uint8x16_t x = vld1q_u8(literals + at), column = vandq_u8(x, vdupq_n_u8(15)), row = vshrq_n_u8(x, 4);
        uint8x16_t upper = vcgeq_u8(x, vdupq_n_u8(128));
        uint8x16_t found = vbslq_u8(upper, vqtbl1q_u8(high, column), vqtbl1q_u8(low, column));
        if (vminvq_u8(vtstq_u8(found, vqtbl1q_u8(bits, row))) == 0) break;
    }
#endif
    while (at < n && known[literals[at]]) ++at;
    return at;
}

static const huffman_loops LEVEL(table) = {LEVEL(write), LEVEL(unknown)};
