/* Codes of 32 literals at a time by AVX2, included by huffman_impl.h at that level: a shuffle looks a literal up in a row of
 * 16 symbols, and those of K and V are nearly all in few rows. */

enum { ROW = 16, ROWS = NUM_SYMBOLS / ROW, MAX_ROWS = 12 };

/* Rows, the most frequent first. Codes are bytes: the longest begin at 0, so of 256 none is above 255. */
typedef struct {
    int count;
    __m256i row[MAX_ROWS]; /* what its symbols have above the column */
    __m256i codes[MAX_ROWS], lengths[MAX_ROWS];
} ISA_FN(code_rows);

static inline __m256i ISA_FN(broadcast_row)(const uint8_t row[ROW]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)row));
}

/* No rows for few literals, and where a code needs more of them for nearly all literals. */
static void ISA_FN(fill_rows)(const kvmnn_huffman_code *code, size_t n, ISA_FN(code_rows) *rows) {
    enum {
        MIN_ROW_LITERALS = 2048,
        FULL_CODE_SPACE = 1 << KVMNN_MAX_HUFFMAN_BITS,
        NEGLIGIBLE_SPACE = FULL_CODE_SPACE / 1024
    };
    int row_space[ROWS] = {0}, remaining = 0;
    rows->count = 0;
    if (n < MIN_ROW_LITERALS) return;
    for (int s = 0; s < NUM_SYMBOLS; ++s)
        if (code->lengths[s]) row_space[s / ROW] += FULL_CODE_SPACE >> code->lengths[s];
    for (int r = 0; r < ROWS; ++r) remaining += row_space[r];
    for (; remaining > NEGLIGIBLE_SPACE; ++rows->count) {
        uint8_t codes[ROW];
        int largest = 0, index = rows->count;
        if (index == MAX_ROWS) {
            rows->count = 0;
            return;
        }
        for (int r = 1; r < ROWS; ++r)
            if (row_space[r] > row_space[largest]) largest = r;
        for (int i = 0; i < ROW; ++i)
            codes[i] = code->lengths[largest * ROW + i] ? (uint8_t)code->codes[largest * ROW + i] : 0;
        rows->row[index] = _mm256_set1_epi8((char)(largest * ROW));
        rows->codes[index] = ISA_FN(broadcast_row)(codes);
        rows->lengths[index] = ISA_FN(broadcast_row)(code->lengths + largest * ROW);
        remaining -= row_space[largest];
        row_space[largest] = 0;
    }
}

/* Neighbours put together in elements of twice the size, the later one below: what is read first stands highest. */
static inline void ISA_FN(join16)(__m256i *codes, __m256i *lengths) {
    __m256i low = _mm256_set1_epi32(0xffff), low_lengths = _mm256_srli_epi32(*lengths, 16);
    *codes =
        _mm256_or_si256(_mm256_srli_epi32(*codes, 16), _mm256_sllv_epi32(_mm256_and_si256(*codes, low), low_lengths));
    *lengths = _mm256_add_epi32(_mm256_and_si256(*lengths, low), low_lengths);
}

static inline void ISA_FN(join32)(__m256i *codes, __m256i *lengths) {
    __m256i low = _mm256_set1_epi64x(0xffffffff), low_lengths = _mm256_srli_epi64(*lengths, 32);
    *codes =
        _mm256_or_si256(_mm256_srli_epi64(*codes, 32), _mm256_sllv_epi64(_mm256_and_si256(*codes, low), low_lengths));
    *lengths = _mm256_add_epi64(_mm256_and_si256(*lengths, low), low_lengths);
}

/* One stream, from its last literal to its first; what is after it. */
static uint8_t *ISA_FN(write_by_rows)(const uint64_t *codes, const ISA_FN(code_rows) * shared_rows,
                                      const uint8_t *literals, size_t n, uint8_t *dst) {
    enum { GROUP_LITERALS = 32, MAX_FLUSH_BITS = 56 };
    const __m256i zero = _mm256_setzero_si256(), other_row_bias = _mm256_set1_epi8(0x70);
    kvmnn_bitwriter out = {0, 0, dst};
    size_t num_grouped = n / GROUP_LITERALS * GROUP_LITERALS;
    const ISA_FN(code_rows) rows = *shared_rows; /* which no store can reach */
    for (; n > num_grouped; --n) append_code(&out, codes[literals[n - 1]]);
    for (; num_grouped; num_grouped -= GROUP_LITERALS) {
        const uint8_t *src = literals + num_grouped - GROUP_LITERALS;
        __m256i source = _mm256_loadu_si256((const __m256i *)(const void *)src), code_bytes = zero, lengths = zero;
        for (int r = 0; r < rows.count; ++r) { /* the top bit of a column says that the literal is in another row */
            __m256i column = _mm256_adds_epu8(_mm256_xor_si256(source, rows.row[r]), other_row_bias);
            code_bytes = _mm256_or_si256(code_bytes, _mm256_shuffle_epi8(rows.codes[r], column));
            lengths = _mm256_or_si256(lengths, _mm256_shuffle_epi8(rows.lengths[r], column));
        }
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(lengths, zero))) { /* one is in none of these */
            for (int i = GROUP_LITERALS - 1; i >= 0; --i) append_code(&out, codes[src[i]]);
            continue;
        }
        uint64_t bits[2][4], counts[2][4];
        __m256i a = _mm256_unpacklo_epi8(code_bytes, zero), a_bits = _mm256_unpacklo_epi8(lengths, zero);
        __m256i b = _mm256_unpackhi_epi8(code_bytes, zero), b_bits = _mm256_unpackhi_epi8(lengths, zero);
        ISA_FN(join16)(&a, &a_bits);
        ISA_FN(join16)(&b, &b_bits);
        ISA_FN(join32)(&a, &a_bits);
        ISA_FN(join32)(&b, &b_bits);
        __m256i first = _mm256_unpacklo_epi64(a, b), first_bits = _mm256_unpacklo_epi64(a_bits, b_bits);
        __m256i second = _mm256_unpackhi_epi64(a, b), second_bits = _mm256_unpackhi_epi64(a_bits, b_bits);
        __m256i all_bits = _mm256_add_epi64(first_bits, second_bits);
        if (_mm256_movemask_epi8(_mm256_cmpgt_epi64(all_bits, _mm256_set1_epi64x(MAX_FLUSH_BITS))) == 0) { /* eight at a time */
            __m256i all = _mm256_or_si256(second, _mm256_sllv_epi64(first, second_bits));
            _mm256_storeu_si256((__m256i *)(void *)bits[0], all);
            _mm256_storeu_si256((__m256i *)(void *)counts[0], all_bits);
            for (int i = 3; i >= 0; --i) append_bits(&out, bits[0][i], counts[0][i]);
        } else {
            _mm256_storeu_si256((__m256i *)(void *)bits[0], first);
            _mm256_storeu_si256((__m256i *)(void *)bits[1], second);
            _mm256_storeu_si256((__m256i *)(void *)counts[0], first_bits);
            _mm256_storeu_si256((__m256i *)(void *)counts[1], second_bits);
            for (int i = 3; i >= 0; --i) {
                append_bits(&out, bits[1][i], counts[1][i]);
                append_bits(&out, bits[0][i], counts[0][i]);
            }
        }
    }
    return kvmnn_bitwriter_finish(&out);
}
