/* Literals as streams of Huffman codes, included once per SIMD level with LEVEL(name) giving each function its own name.
 *
 * Plain C but for LEVEL_WIDE: a code for each of 64 literals, and eight of these put together, are shuffles and shifts
 * there, which no compiler finds.
 */

#ifdef LEVEL_WIDE

typedef struct {
    __m512i lengths[4], low[4], high[4]; /* of 256 codes each: their bits, their lower and their upper byte */
} LEVEL(tables);

static void LEVEL(prepare)(const kvmnn_huffman *code, LEVEL(tables) *tables) {
    uint8_t low[SYMBOLS], high[SYMBOLS];
    for (int s = 0; s < SYMBOLS; ++s) {
        uint16_t bits = code->bits[s] ? code->code[s] : 0;
        low[s] = (uint8_t)bits;
        high[s] = (uint8_t)(bits >> 8);
    }
    for (int i = 0; i < 4; ++i) {
        tables->lengths[i] = _mm512_loadu_si512(code->bits + 64 * i);
        tables->low[i] = _mm512_loadu_si512(low + 64 * i);
        tables->high[i] = _mm512_loadu_si512(high + 64 * i);
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

/* The newest bits on top of those held, which are below 8. */
static inline void LEVEL(append)(kvmnn_bits *out, uint64_t bits, uint64_t count) {
    kvmnn_bits_add(out, bits, (unsigned)count);
    kvmnn_bits_flush(out);
}

/* One stream, from its last literal to its first; what is behind it. */
static uint8_t *LEVEL(write_one)(const LEVEL(tables) *tables, const uint64_t *codes, const uint8_t *literals, size_t n,
                                 uint8_t *dst) {
    enum { AT_ONCE = 64, MOST_BITS = 56 };
    stream rest = {0, 0, dst};
    size_t whole = n / AT_ONCE * AT_ONCE;
    write_rest(&rest, codes, literals, whole, n);
    kvmnn_bits out = {rest.count & 0xff ? rest.held >> (64 - (rest.count & 0xff)) : 0, rest.count & 0xff, rest.at};
    for (; whole; whole -= AT_ONCE) {
        uint64_t bits[2][8], counts[2][8];
        __m512i source = _mm512_loadu_si512(literals + whole - AT_ONCE), zero = _mm512_setzero_si512();
        __m512i lengths = LEVEL(look)(tables->lengths, source);
        __m512i low = LEVEL(look)(tables->low, source), high = LEVEL(look)(tables->high, source);
        __m512i a = _mm512_unpacklo_epi8(low, high), a_bits = _mm512_unpacklo_epi8(lengths, zero);
        __m512i b = _mm512_unpackhi_epi8(low, high), b_bits = _mm512_unpackhi_epi8(lengths, zero);
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
            for (int i = 7; i >= 0; --i) LEVEL(append)(&out, bits[0][i], counts[0][i]);
        } else {
            _mm512_storeu_si512(bits[0], first);
            _mm512_storeu_si512(bits[1], second);
            _mm512_storeu_si512(counts[0], first_bits);
            _mm512_storeu_si512(counts[1], second_bits);
            for (int i = 7; i >= 0; --i) {
                LEVEL(append)(&out, bits[1][i], counts[1][i]);
                LEVEL(append)(&out, bits[0][i], counts[0][i]);
            }
        }
    }
    return kvmnn_bits_end(&out);
}

#else

/* Two streams at once, as each step waits for the one before it in the same stream. `n` literals each. */
static void LEVEL(write_two)(stream *a, stream *b, const uint64_t *codes, const uint8_t *first, const uint8_t *second,
                             size_t n) {
    enum { TOGETHER = 4 }; /* 7 bits are left from before, and 4 x 11 come */
    stream one = *a, two = *b;
    size_t i = n;
    for (; i >= TOGETHER; i -= TOGETHER) {
        for (int j = 1; j <= TOGETHER; ++j) {
            put(&one, codes, first[i - (size_t)j]);
            put(&two, codes, second[i - (size_t)j]);
        }
        flush(&one);
        flush(&two);
    }
    for (; i > 0; --i) {
        put(&one, codes, first[i - 1]);
        put(&two, codes, second[i - 1]);
        flush(&one);
        flush(&two);
    }
    *a = one;
    *b = two;
}

#endif

static size_t LEVEL(write)(const kvmnn_huffman *code, const uint8_t *literals, size_t n, int streams, uint8_t *dst) {
    uint64_t codes[SYMBOLS];
    for (int s = 0; s < SYMBOLS; ++s)
        codes[s] = code->bits[s] ? (uint64_t)code->code[s] << (64 - code->bits[s]) | code->bits[s] : 0;
    if (streams == 1) {
        stream out = {0, 0, dst};
        write_rest(&out, codes, literals, 0, n);
        return (size_t)(ended(&out) - dst);
    }
    size_t part = (n + 3) / 4, last = n - 3 * part;
    uint8_t *at = dst + 6;
#ifdef LEVEL_WIDE
    LEVEL(tables) tables;
    LEVEL(prepare)(code, &tables);
    for (int i = 0; i < 4; ++i) {
        uint8_t *end = LEVEL(write_one)(&tables, codes, literals + (size_t)i * part, i < 3 ? part : last, at);
        if (i < 3) put_size(dst + 2 * i, (size_t)(end - at));
        at = end;
    }
#else
    size_t room = part * KVMNN_HUFFMAN_BITS / 8 + 16;
    for (int pair = 0; pair < 2; ++pair) { /* the second of a pair is made behind the room that the first may take */
        const uint8_t *first = literals + 2 * (size_t)pair * part, *second = first + part;
        size_t second_size = pair ? last : part;
        stream one = {0, 0, at}, two = {0, 0, at + room};
        write_rest(&one, codes, first, second_size, part);
        LEVEL(write_two)(&one, &two, codes, first, second, second_size);
        uint8_t *one_end = ended(&one), *two_end = ended(&two);
        size_t one_bytes = (size_t)(one_end - at), two_bytes = (size_t)(two_end - (at + room));
        memmove(one_end, at + room, two_bytes);
        put_size(dst + 4 * pair, one_bytes);
        if (!pair) put_size(dst + 2, two_bytes);
        at = one_end + two_bytes;
    }
#endif
    return (size_t)(at - dst);
}

static const kvmnn_huffman_write_fn LEVEL(table) = LEVEL(write);
