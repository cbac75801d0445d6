/* Codes of 32 literals at a time by AVX2, included by huffman_impl.h at that level: a shuffle looks a literal up in a row of
 * 16 symbols, and those of K and V are nearly all in few rows. */

enum { ROW = 16, ROWS = SYMBOLS / ROW, MOST_ROWS = 12 };

/* Rows, the most frequent first. Codes are bytes: the longest begin at 0, so of 256 none is above 255. */
typedef struct {
    int count;
    __m256i row[MOST_ROWS]; /* what its symbols have above the column */
    __m256i codes[MOST_ROWS], lengths[MOST_ROWS];
} LEVEL(code_rows);

static inline __m256i LEVEL(twice)(const uint8_t row[ROW]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)row));
}

/* No rows for few literals, and where a code needs more of them for nearly all literals. */
static void LEVEL(fill_rows)(const kvmnn_huffman *code, size_t n, LEVEL(code_rows) *rows) {
    enum { LEAST_LITERALS = 2048, ALL = 1 << KVMNN_HUFFMAN_BITS, FEW = ALL / 1024 };
    int share[ROWS] = {0}, left = 0;
    rows->count = 0;
    if (n < LEAST_LITERALS) return;
    for (int s = 0; s < SYMBOLS; ++s)
        if (code->bits[s]) share[s / ROW] += ALL >> code->bits[s];
    for (int r = 0; r < ROWS; ++r) left += share[r];
    for (; left > FEW; ++rows->count) {
        uint8_t codes[ROW];
        int most = 0, at = rows->count;
        if (at == MOST_ROWS) {
            rows->count = 0;
            return;
        }
        for (int r = 1; r < ROWS; ++r)
            if (share[r] > share[most]) most = r;
        for (int i = 0; i < ROW; ++i) codes[i] = code->bits[most * ROW + i] ? (uint8_t)code->code[most * ROW + i] : 0;
        rows->row[at] = _mm256_set1_epi8((char)(most * ROW));
        rows->codes[at] = LEVEL(twice)(codes);
        rows->lengths[at] = LEVEL(twice)(code->bits + most * ROW);
        left -= share[most];
        share[most] = 0;
    }
}

/* Neighbours put together in elements of twice the size, the later one below: what is read first stands highest. */
static inline void LEVEL(join16)(__m256i *codes, __m256i *lengths) {
    __m256i low = _mm256_set1_epi32(0xffff), below = _mm256_srli_epi32(*lengths, 16);
    *codes = _mm256_or_si256(_mm256_srli_epi32(*codes, 16), _mm256_sllv_epi32(_mm256_and_si256(*codes, low), below));
    *lengths = _mm256_add_epi32(_mm256_and_si256(*lengths, low), below);
}

static inline void LEVEL(join32)(__m256i *codes, __m256i *lengths) {
    __m256i low = _mm256_set1_epi64x(0xffffffff), below = _mm256_srli_epi64(*lengths, 32);
    *codes = _mm256_or_si256(_mm256_srli_epi64(*codes, 32), _mm256_sllv_epi64(_mm256_and_si256(*codes, low), below));
    *lengths = _mm256_add_epi64(_mm256_and_si256(*lengths, low), below);
}

/* One stream, from its last literal to its first; what is behind it. */
static uint8_t *LEVEL(write_by_rows)(const uint64_t *codes, const LEVEL(code_rows) *shared, const uint8_t *literals,
                                     size_t n, uint8_t *dst) {
    enum { AT_ONCE = 32, MOST_BITS = 56 };
    const __m256i zero = _mm256_setzero_si256(), elsewhere = _mm256_set1_epi8(0x70);
    kvmnn_bits out = {0, 0, dst};
    size_t whole = n / AT_ONCE * AT_ONCE;
    const LEVEL(code_rows) rows = *shared; /* which no store can reach */
    for (; n > whole; --n) append_one(&out, codes[literals[n - 1]]);
    for (; whole; whole -= AT_ONCE) {
        const uint8_t *from = literals + whole - AT_ONCE;
        __m256i source = _mm256_loadu_si256((const __m256i *)(const void *)from), found = zero, lengths = zero;
        for (int r = 0; r < rows.count; ++r) { /* the top bit of a column says that the literal is in another row */
            __m256i column = _mm256_adds_epu8(_mm256_xor_si256(source, rows.row[r]), elsewhere);
            found = _mm256_or_si256(found, _mm256_shuffle_epi8(rows.codes[r], column));
            lengths = _mm256_or_si256(lengths, _mm256_shuffle_epi8(rows.lengths[r], column));
        }
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(lengths, zero))) { /* one is in none of these */
            for (int i = AT_ONCE - 1; i >= 0; --i) append_one(&out, codes[from[i]]);
            continue;
        }
        uint64_t bits[2][4], counts[2][4];
        __m256i a = _mm256_unpacklo_epi8(found, zero), a_bits = _mm256_unpacklo_epi8(lengths, zero);
        __m256i b = _mm256_unpackhi_epi8(found, zero), b_bits = _mm256_unpackhi_epi8(lengths, zero);
        LEVEL(join16)(&a, &a_bits);
        LEVEL(join16)(&b, &b_bits);
        LEVEL(join32)(&a, &a_bits);
        LEVEL(join32)(&b, &b_bits);
        __m256i first = _mm256_unpacklo_epi64(a, b), first_bits = _mm256_unpacklo_epi64(a_bits, b_bits);
        __m256i second = _mm256_unpackhi_epi64(a, b), second_bits = _mm256_unpackhi_epi64(a_bits, b_bits);
        __m256i all_bits = _mm256_add_epi64(first_bits, second_bits);
        if (_mm256_movemask_epi8(_mm256_cmpgt_epi64(all_bits, _mm256_set1_epi64x(MOST_BITS))) == 0) { /* eight at a time */
            __m256i all = _mm256_or_si256(second, _mm256_sllv_epi64(first, second_bits));
            _mm256_storeu_si256((__m256i *)(void *)bits[0], all);
            _mm256_storeu_si256((__m256i *)(void *)counts[0], all_bits);
            for (int i = 3; i >= 0; --i) append(&out, bits[0][i], counts[0][i]);
        } else {
            _mm256_storeu_si256((__m256i *)(void *)bits[0], first);
            _mm256_storeu_si256((__m256i *)(void *)bits[1], second);
            _mm256_storeu_si256((__m256i *)(void *)counts[0], first_bits);
            _mm256_storeu_si256((__m256i *)(void *)counts[1], second_bits);
            for (int i = 3; i >= 0; --i) {
                append(&out, bits[1][i], counts[1][i]);
                append(&out, bits[0][i], counts[0][i]);
            }
        }
    }
    return kvmnn_bits_end(&out);
}
