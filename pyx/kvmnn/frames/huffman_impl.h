/* Literals as streams of Huffman codes, included once per SIMD level with ISA_FN(name) giving each function its own name.
 *
 * Plain C but for AVX: a code for each of 64 literals, or 32, and eight of these put together, are shuffles and shifts
 * there, which no compiler finds.
 */

#ifdef ISA_AVX512

/* Of all symbols. Codes are bytes: the longest begin at 0, so of 256 none is above 255. */
typedef struct {
    __m512i lengths[4], codes[4];
} ISA_FN(tables);

static void ISA_FN(prepare)(const kvmnn_huffman_code *code, const uint64_t *codes, kvmnn_huffman_pairs *pairs, size_t n,
                            ISA_FN(tables) *tables) {
    uint8_t bytes[NUM_SYMBOLS];
    (void)codes, (void)pairs, (void)n;
    for (int s = 0; s < NUM_SYMBOLS; ++s) bytes[s] = code->lengths[s] ? (uint8_t)code->codes[s] : 0;
    for (int i = 0; i < 4; ++i) {
        tables->lengths[i] = _mm512_loadu_si512(code->lengths + 64 * i);
        tables->codes[i] = _mm512_loadu_si512(bytes + 64 * i);
    }
}

static inline __m512i ISA_FN(lookup)(const __m512i *table, __m512i literals) {
    __m512i lower = _mm512_permutex2var_epi8(table[0], literals, table[1]);
    __m512i upper = _mm512_permutex2var_epi8(table[2], literals, table[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(literals), lower, upper);
}

/* Neighbours put together in elements of twice the size, the later one below: what is read first stands highest. */
static inline void ISA_FN(join16)(__m512i *codes, __m512i *lengths) {
    __m512i low = _mm512_set1_epi32(0xffff), low_lengths = _mm512_srli_epi32(*lengths, 16);
    *codes =
        _mm512_or_si512(_mm512_srli_epi32(*codes, 16), _mm512_sllv_epi32(_mm512_and_si512(*codes, low), low_lengths));
    *lengths = _mm512_add_epi32(_mm512_and_si512(*lengths, low), low_lengths);
}

static inline void ISA_FN(join32)(__m512i *codes, __m512i *lengths) {
    __m512i low = _mm512_set1_epi64(0xffffffff), low_lengths = _mm512_srli_epi64(*lengths, 32);
    *codes =
        _mm512_or_si512(_mm512_srli_epi64(*codes, 32), _mm512_sllv_epi64(_mm512_and_si512(*codes, low), low_lengths));
    *lengths = _mm512_add_epi64(_mm512_and_si512(*lengths, low), low_lengths);
}

/* One stream, from its last literal to its first; what is after it. */
static uint8_t *ISA_FN(write_stream)(const uint64_t *codes, const ISA_FN(tables) * tables, const uint8_t *literals,
                                     size_t n, uint8_t *dst) {
    enum { GROUP_LITERALS = 64, MAX_FLUSH_BITS = 56 };
    kvmnn_bitwriter out = {0, 0, dst};
    size_t num_grouped = n / GROUP_LITERALS * GROUP_LITERALS;
    for (; n > num_grouped; --n) append_code(&out, codes[literals[n - 1]]);
    for (; num_grouped; num_grouped -= GROUP_LITERALS) {
        uint64_t bits[2][8], counts[2][8];
        __m512i source = _mm512_loadu_si512(literals + num_grouped - GROUP_LITERALS), zero = _mm512_setzero_si512();
        __m512i lengths = ISA_FN(lookup)(tables->lengths, source);
        __m512i code_bytes = ISA_FN(lookup)(tables->codes, source);
        __m512i a = _mm512_unpacklo_epi8(code_bytes, zero), a_bits = _mm512_unpacklo_epi8(lengths, zero);
        __m512i b = _mm512_unpackhi_epi8(code_bytes, zero), b_bits = _mm512_unpackhi_epi8(lengths, zero);
        ISA_FN(join16)(&a, &a_bits);
        ISA_FN(join16)(&b, &b_bits);
        ISA_FN(join32)(&a, &a_bits);
        ISA_FN(join32)(&b, &b_bits);
        __m512i first = _mm512_unpacklo_epi64(a, b), first_bits = _mm512_unpacklo_epi64(a_bits, b_bits);
        __m512i second = _mm512_unpackhi_epi64(a, b), second_bits = _mm512_unpackhi_epi64(a_bits, b_bits);
        __m512i all_bits = _mm512_add_epi64(first_bits, second_bits);
        if (_mm512_cmpgt_epu64_mask(all_bits, _mm512_set1_epi64(MAX_FLUSH_BITS)) == 0) { /* eight codes at a time */
            _mm512_storeu_si512(bits[0], _mm512_or_si512(second, _mm512_sllv_epi64(first, second_bits)));
            _mm512_storeu_si512(counts[0], all_bits);
            for (int i = 7; i >= 0; --i) append_bits(&out, bits[0][i], counts[0][i]);
        } else {
            _mm512_storeu_si512(bits[0], first);
            _mm512_storeu_si512(bits[1], second);
            _mm512_storeu_si512(counts[0], first_bits);
            _mm512_storeu_si512(counts[1], second_bits);
            for (int i = 7; i >= 0; --i) {
                append_bits(&out, bits[1][i], counts[1][i]);
                append_bits(&out, bits[0][i], counts[0][i]);
            }
        }
    }
    return kvmnn_bitwriter_finish(&out);
}

#else

/* An entry after those of a group, whose newest bits stand at the top. Groups are put together before they are appended,
 * so that one does not wait for the other. */
static inline void ISA_FN(join)(uint64_t *group, uint64_t *count, uint64_t entry) {
    *group = *group >> (entry & 63) | entry;
    *count += entry;
}

/* The group of as many literals, or, where that has more bits than can be appended, one after the other. */
static inline void ISA_FN(append_group)(kvmnn_bitwriter *out, uint64_t group, uint64_t count, const uint64_t *codes,
                                        const uint8_t *literals, int n) {
    enum { MAX_FLUSH_BITS = 56 };
    count &= 0xff;
    if (count <= MAX_FLUSH_BITS) {
        append_bits(out, group >> (64 - count), count);
        return;
    }
    while (n--) append_code(out, codes[literals[n]]);
}

/* One stream, from its last literal to its first; what is after it. */
static uint8_t *ISA_FN(write_singles)(const uint64_t *codes, const uint8_t *literals, size_t n, uint8_t *dst) {
    enum { GROUP = 7 };
    kvmnn_bitwriter out = {0, 0, dst};
    for (; n % GROUP; --n) append_code(&out, codes[literals[n - 1]]);
    for (; n; n -= GROUP) {
        const uint8_t *src = literals + n - GROUP;
        uint64_t group = 0, count = 0;
        for (int j = GROUP - 1; j >= 0; --j) ISA_FN(join)(&group, &count, codes[src[j]]);
        ISA_FN(append_group)(&out, group, count, codes, src, GROUP);
    }
    return kvmnn_bitwriter_finish(&out);
}

static uint8_t *ISA_FN(write_pairs)(const uint64_t *codes, const uint64_t *pairs, const uint8_t *literals, size_t n,
                                    uint8_t *dst) {
    enum { GROUP = 8 };
    kvmnn_bitwriter out = {0, 0, dst};
    for (; n % GROUP; --n) append_code(&out, codes[literals[n - 1]]);
    for (; n; n -= GROUP) {
        const uint8_t *src = literals + n - GROUP;
        uint64_t group = 0, count = 0;
        for (int j = GROUP - 2; j >= 0; j -= 2) ISA_FN(join)(&group, &count, pairs[src[j] | src[j + 1] << 8]);
        ISA_FN(append_group)(&out, group, count, codes, src, GROUP);
    }
    return kvmnn_bitwriter_finish(&out);
}

#ifdef ISA_F16C
#include "huffman_avx2.h"
#endif

typedef struct {
#ifdef ISA_F16C
    ISA_FN(code_rows) rows;
#endif
    const uint64_t *pairs; /* or NULL */
} ISA_FN(tables);

static void ISA_FN(prepare)(const kvmnn_huffman_code *code, const uint64_t *codes, kvmnn_huffman_pairs *pairs, size_t n,
                            ISA_FN(tables) *tables) {
#ifdef ISA_F16C
    ISA_FN(fill_rows)(code, n, &tables->rows);
    if (tables->rows.count) return;
#endif
    tables->pairs = build_pairs(code, codes, pairs, n);
}

static uint8_t *ISA_FN(write_stream)(const uint64_t *codes, const ISA_FN(tables) * tables, const uint8_t *literals,
                                     size_t n, uint8_t *dst) {
#ifdef ISA_F16C
    if (tables->rows.count) return ISA_FN(write_by_rows)(codes, &tables->rows, literals, n, dst);
#endif
    if (tables->pairs) return ISA_FN(write_pairs)(codes, tables->pairs, literals, n, dst);
    return ISA_FN(write_singles)(codes, literals, n, dst);
}

#endif

static size_t ISA_FN(write)(const kvmnn_huffman_code *code, kvmnn_huffman_pairs *pairs, const uint8_t *literals,
                            size_t n, int streams, uint8_t *dst) {
    uint64_t codes[NUM_SYMBOLS];
    for (int s = 0; s < NUM_SYMBOLS; ++s)
        codes[s] = code->lengths[s] ? (uint64_t)code->codes[s] << (64 - code->lengths[s]) | code->lengths[s] : 0;
    ISA_FN(tables) tables;
    ISA_FN(prepare)(code, codes, pairs, n, &tables);
    if (streams == 1) return (size_t)(ISA_FN(write_stream)(codes, &tables, literals, n, dst) - dst);
    size_t part_literals = (n + 3) / 4;
    uint8_t *out = dst + 6;
    for (size_t i = 0; i < 4; ++i) {
        uint8_t *end = ISA_FN(write_stream)(codes, &tables, literals + i * part_literals,
                                            i < 3 ? part_literals : n - 3 * part_literals, out);
        if (i < 3) store_le16(dst + 2 * i, (size_t)(end - out));
        out = end;
    }
    return (size_t)(out - dst);
}

static size_t ISA_FN(find_missing)(const uint8_t has_code[NUM_SYMBOLS], const uint8_t *literals, size_t pos, size_t n) {
#if defined(ISA_F16C)
    const symbol_set marks = build_symbol_set(has_code);
#define ROW(bytes) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(bytes)))
    const __m256i low = ROW(marks.rows[0]), high = ROW(marks.rows[1]), bits = ROW(HIGH_NIBBLE_BIT),
                  half = _mm256_set1_epi8(15);
#undef ROW
    for (; pos + 32 <= n; pos += 32) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(literals + pos));
        __m256i column = _mm256_and_si256(x, half), row = _mm256_and_si256(_mm256_srli_epi16(x, 4), half);
        __m256i member_bits =
            _mm256_blendv_epi8(_mm256_shuffle_epi8(low, column), _mm256_shuffle_epi8(high, column), x);
        member_bits = _mm256_and_si256(member_bits, _mm256_shuffle_epi8(bits, row));
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(member_bits, _mm256_setzero_si256()))) break;
    }
#elif defined(__aarch64__)
    const symbol_set marks = build_symbol_set(has_code);
    const uint8x16_t low = vld1q_u8(marks.rows[0]), high = vld1q_u8(marks.rows[1]), bits = vld1q_u8(HIGH_NIBBLE_BIT);
    for (; pos + 16 <= n; pos += 16) {
        uint8x16_t x = vld1q_u8(literals + pos), column = vandq_u8(x, vdupq_n_u8(15)), row = vshrq_n_u8(x, 4);
        uint8x16_t upper = vcgeq_u8(x, vdupq_n_u8(128));
        uint8x16_t member_bits = vbslq_u8(upper, vqtbl1q_u8(high, column), vqtbl1q_u8(low, column));
        if (vminvq_u8(vtstq_u8(member_bits, vqtbl1q_u8(bits, row))) == 0) break;
    }
#endif
    while (pos < n && has_code[literals[pos]]) ++pos;
    return pos;
}

static const huffman_kernels ISA_FN(table) = {ISA_FN(write), ISA_FN(find_missing)};
