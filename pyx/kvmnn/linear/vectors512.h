/* The steps of coder_impl.h for all sixteen tokens of a group at once, by AVX-512: the same numbers. */

/* Numbers of 64 bits: of the even lanes of 32 bits, and of the odd ones. */
typedef struct {
    __m512i even, odd;
} wide512;

/* Two tables of 16 numbers as one of 32. */
typedef struct {
    __m512i low, high;
} table512;

static inline __m512i load512(const void *at) { return _mm512_loadu_si512(at); }

static inline table512 load_table512(const void *at) {
    return (table512){load512(at), load512((const char *)at + 64)};
}

static inline __m512i look_up512(table512 table, __m512i at) {
    return _mm512_permutex2var_epi32(table.low, at, table.high);
}

static inline __m512i take_odd512(__m512i x) { return _mm512_srli_epi64(x, 32); }

/* Lanes of 32 bits as numbers of 64, with their signs. */
static inline wide512 widen512(__m512i x) {
    return (wide512){_mm512_srai_epi64(_mm512_slli_epi64(x, 32), 32), _mm512_srai_epi64(x, 32)};
}

/* Numbers of 64 bits that fit in 32 as lanes. */
static inline __m512i narrow512(wide512 x) {
    return _mm512_mask_shuffle_epi32(x.even, 0xaaaa, x.odd, _MM_PERM_CCAA);
}

static inline wide512 multiply512(__m512i a, __m512i b) {
    return (wide512){_mm512_mul_epi32(a, b), _mm512_mul_epi32(take_odd512(a), take_odd512(b))};
}

static inline wide512 add512(wide512 a, wide512 b) {
    return (wide512){_mm512_add_epi64(a.even, b.even), _mm512_add_epi64(a.odd, b.odd)};
}

static inline wide512 subtract512(wide512 a, wide512 b) {
    return (wide512){_mm512_sub_epi64(a.even, b.even), _mm512_sub_epi64(a.odd, b.odd)};
}

static inline wide512 add_number512(wide512 a, int64_t b) {
    const __m512i all = _mm512_set1_epi64(b);
    return (wide512){_mm512_add_epi64(a.even, all), _mm512_add_epi64(a.odd, all)};
}

static inline wide512 shift512(wide512 x, unsigned places) {
    return (wide512){_mm512_srai_epi64(x.even, places), _mm512_srai_epi64(x.odd, places)};
}

static inline wide512 limit512(wide512 x, int64_t limit) {
    const __m512i most = _mm512_set1_epi64(limit), least = _mm512_set1_epi64(-limit);
    return (wide512){_mm512_max_epi64(_mm512_min_epi64(x.even, most), least),
                     _mm512_max_epi64(_mm512_min_epi64(x.odd, most), least)};
}

/* Products of numbers of which 32 bits count. */
static inline wide512 multiply_wide512(wide512 a, wide512 b) {
    return (wide512){_mm512_mul_epi32(a.even, b.even), _mm512_mul_epi32(a.odd, b.odd)};
}

/* Two rows turned by angles, a c - b s and b c + a s; back where `direction` is -1. */
static inline void turn512(wide512 x[2], const int32_t *cosines, const int32_t *sines, int is_back) {
    const __m512i c = load512(cosines), s = load512(sines);
    const wide512 cs = {c, take_odd512(c)}, sn = {s, take_odd512(s)};
    const wide512 ac = multiply_wide512(x[0], cs), bs = multiply_wide512(x[1], sn);
    const wide512 bc = multiply_wide512(x[1], cs), as = multiply_wide512(x[0], sn);
    const wide512 first = is_back ? add512(ac, bs) : subtract512(ac, bs);
    const wide512 second = is_back ? subtract512(bc, as) : add512(bc, as);
    x[0] = shift512(add_number512(first, 1 << 29), 30);
    x[1] = shift512(add_number512(second, 1 << 29), 30);
}

/* -- words and cells ----------------------------------------------------------------------------------------------- */

static inline __m512i to_units512(__m512i magnitude, int mantissa_bits, int shift) {
    const __m512i exponent = _mm512_srli_epi32(magnitude, (unsigned)mantissa_bits), zero = _mm512_setzero_si512();
    const __m512i fraction = _mm512_and_si512(magnitude, _mm512_set1_epi32((1 << mantissa_bits) - 1));
    const __m512i digits = _mm512_mask_or_epi32(fraction, _mm512_test_epi32_mask(exponent, exponent), fraction,
                                                _mm512_set1_epi32(1 << mantissa_bits));
    const __m512i places =
        _mm512_add_epi32(_mm512_max_epi32(exponent, _mm512_set1_epi32(1)), _mm512_set1_epi32(shift));
    const __m512i left = _mm512_min_epi32(places, _mm512_set1_epi32(30)), limit = _mm512_set1_epi32(UNIT_LIMIT);
    const __m512i up = _mm512_mask_mov_epi32(_mm512_sllv_epi32(digits, left),
                                             _mm512_cmpgt_epi32_mask(digits, _mm512_srlv_epi32(limit, left)), limit);
    const __m512i down = _mm512_srlv_epi32(digits, _mm512_sub_epi32(zero, places));
    return _mm512_mask_mov_epi32(up, _mm512_movepi32_mask(places), down);
}

static inline __m512i words_to_units512(const linear_dtype *dtype, __m512i words, int exponent) {
    const int sign_bit = dtype->is_wide ? 31 : 15;
    const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi32((int32_t)((1u << sign_bit) - 1)));
    const __m512i x = to_units512(magnitude, dtype->mantissa_bits, exponent - dtype->bias - dtype->mantissa_bits);
    return _mm512_mask_sub_epi32(x, _mm512_test_epi32_mask(words, _mm512_set1_epi32((int32_t)(1u << sign_bit))),
                                 _mm512_setzero_si512(), x);
}

static inline __m512i to_ranks512(const linear_dtype *dtype, __m512i words) {
    const int sign_bit = dtype->is_wide ? 31 : 15;
    const __m512i magnitude = _mm512_srli_epi32(
        _mm512_and_si512(words, _mm512_set1_epi32((int32_t)((1u << sign_bit) - 1))), (unsigned)dtype->raw_bits);
    const __m512i sign = _mm512_srai_epi32(_mm512_slli_epi32(words, (unsigned)(31 - sign_bit)), 31);
    return _mm512_add_epi32(_mm512_xor_si512(magnitude, sign), _mm512_set1_epi32((int32_t)dtype->half_ranks));
}

static inline __m512i to_words512(const linear_dtype *dtype, __m512i ranks) {
    const __m512i far = _mm512_sub_epi32(ranks, _mm512_set1_epi32((int32_t)dtype->half_ranks));
    const __m512i sign = _mm512_srai_epi32(far, 31);
    return _mm512_or_si512(_mm512_slli_epi32(_mm512_xor_si512(far, sign), (unsigned)dtype->raw_bits),
                           _mm512_slli_epi32(sign, dtype->is_wide ? 31 : 15));
}

static inline __m512i normalize512(__m512i x, __m512i centers, __m512i inverses) {
    return narrow512(limit512(shift512(multiply512(_mm512_sub_epi32(x, centers), inverses), 16), Z_LIMIT));
}

/* Buckets of distances below 2^24, and the logarithms of their widths. */
static inline __m512i find_buckets512(__m512i distances, __m512i *bits) {
    const __m512i as_float = _mm512_castps_si512(_mm512_cvtepi32_ps(distances));
    const __mmask16 is_high = _mm512_cmpge_epi32_mask(distances, _mm512_set1_epi32(1 << 15));
    *bits = _mm512_mask_sub_epi32(_mm512_set1_epi32(12), is_high, _mm512_srli_epi32(as_float, 23),
                                  _mm512_set1_epi32(129));
    return _mm512_mask_sub_epi32(_mm512_srli_epi32(distances, 12), is_high, _mm512_srli_epi32(as_float, 21),
                                 _mm512_set1_epi32(((127 + 15) << 2) - 8));
}

static inline __m512i cumulate512(table512 masses, table512 starts, const linear_dtype *dtype, __m512i ranks,
                                  int exponent, __m512i centers, __m512i inverses) {
    const __m512i far = _mm512_sub_epi32(ranks, _mm512_set1_epi32((int32_t)dtype->half_ranks));
    const __m512i steps = _mm512_abs_epi32(far), zero = _mm512_setzero_si512();
    const __m512i magnitude =
        dtype->raw_bits ? steps : _mm512_sub_epi32(_mm512_add_epi32(steps, steps), _mm512_set1_epi32(1));
    __m512i size = to_units512(magnitude, dtype->boundary_mantissa_bits,
                               exponent - dtype->bias - dtype->boundary_mantissa_bits);
    size = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(far, far), size);
    size = _mm512_mask_sub_epi32(size, _mm512_movepi32_mask(far), zero, size);
    const __m512i z = normalize512(size, centers, inverses);
    const __m512i distances = _mm512_abs_epi32(z);
    __m512i bits;
    const __m512i buckets = find_buckets512(distances, &bits);
    const __m512i inside = _mm512_andnot_si512(_mm512_sllv_epi32(_mm512_set1_epi32(-1), bits), distances);
    const __m512i mass = look_up512(masses, buckets), low = _mm512_set1_epi64(0xffffffff);
    const __m512i even = _mm512_srlv_epi64(_mm512_mul_epu32(mass, inside), _mm512_and_si512(bits, low));
    const __m512i odd = _mm512_srlv_epi64(_mm512_mul_epu32(take_odd512(mass), take_odd512(inside)), take_odd512(bits));
    const __m512i below = _mm512_add_epi32(look_up512(starts, buckets), narrow512((wide512){even, odd}));
    const __m512i side = _mm512_mask_sub_epi32(below, _mm512_movepi32_mask(z), zero, below);
    const __m512i floors = _mm512_slli_epi32(ranks, dtype->floor == 8 ? 3 : 0);
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(side, _mm512_set1_epi32(HALF_MASS)), floors);
    return _mm512_mask_mov_epi32(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(ranks, ranks), sum),
                                 _mm512_cmpeq_epi32_mask(ranks, _mm512_set1_epi32((int32_t)(2 * dtype->half_ranks))),
                                 _mm512_set1_epi32(1 << TOTAL_BITS));
}

/* -- a pair of the whole group ------------------------------------------------------------------------------------- */

/* Predictions, centers, inverses, slopes; `sums` are those of the chain. */
static inline void predict512(const ISA_FN(state) *state, const linear_side *side, size_t p, size_t pair_in_head,
                              const __m512i sums[2], const int32_t biases[2], ISA_FN(pair) *pair) {
    const int32_t(*rows)[4] = (const int32_t(*)[4])side->angles[p];
    wide512 centers[2];
    __m512i w1, w2, slopes;
    for (int row = 0; row < 2; ++row) {
        const size_t place = 2 * p + (size_t)row;
        const wide512 step = multiply512(sums[row], _mm512_set1_epi32(side->chain_factors[place]));
        const wide512 base = widen512(load512(state->base + place * GROUP));
        const wide512 x =
            limit512(add512(base, shift512(add_number512(step, 1 << 15), 16)), CENTER_LIMIT);
        _mm512_storeu_si512(pair->predictions[row], narrow512(x));
        centers[row] = limit512(add_number512(x, biases[row]), CENTER_LIMIT);
    }
    if (pair->cosines) {
        const uint8_t *angles = state->angles + pair_in_head * GROUP;
        __m512i quarters[4];
        turn512(centers, pair->cosines, pair->sines, 0);
        for (int row = 0; row < 2; ++row) centers[row] = limit512(centers[row], CENTER_LIMIT);
        for (int i = 0; i < 4; ++i) { /* of tokens i, i + 4, i + 8, i + 12 */
            __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const void *)rows[angles[i]]));
            x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)rows[angles[i + 4]]), 1);
            x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)rows[angles[i + 8]]), 2);
            quarters[i] = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)rows[angles[i + 12]]), 3);
        }
        const __m512i low = _mm512_unpacklo_epi32(quarters[0], quarters[1]);
        const __m512i next = _mm512_unpacklo_epi32(quarters[2], quarters[3]);
        w1 = _mm512_unpacklo_epi64(low, next);
        slopes = _mm512_unpackhi_epi64(low, next);
        w2 = _mm512_unpacklo_epi64(_mm512_unpackhi_epi32(quarters[0], quarters[1]),
                                   _mm512_unpackhi_epi32(quarters[2], quarters[3]));
    } else {
        w1 = _mm512_set1_epi32(rows[0][0]);
        slopes = _mm512_set1_epi32(rows[0][1]);
        w2 = _mm512_set1_epi32(rows[0][2]);
    }
    for (int row = 0; row < 2; ++row) _mm512_storeu_si512(pair->centers[row], narrow512(centers[row]));
    _mm512_storeu_si512(pair->slopes, slopes);
    /* 2^32 / spread: the float's quotient is wrong by 1 at most */
    const __m512i spread = load512(state->spread), one = _mm512_set1_epi32(1);
    __m512i inverse = _mm512_cvttps_epi32(_mm512_div_ps(_mm512_set1_ps(4294967296.0f), _mm512_cvtepi32_ps(spread)));
    const __m512i rest = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_mullo_epi32(inverse, spread));
    inverse = _mm512_mask_sub_epi32(inverse, _mm512_movepi32_mask(rest), inverse, one);
    inverse = _mm512_mask_add_epi32(inverse, _mm512_cmpge_epi32_mask(rest, spread), inverse, one);
    _mm512_storeu_si512(pair->inverses[0], narrow512(shift512(multiply512(w1, inverse), 16)));
    _mm512_storeu_si512(pair->inverses[1], narrow512(shift512(multiply512(w2, inverse), 16)));
}

/* The second words' centers, given the first ones. */
static inline __m512i shift_centers512(const ISA_FN(pair) *pair, __m512i first) {
    const wide512 distance = widen512(_mm512_sub_epi32(first, load512(pair->centers[0])));
    const __m512i slopes = load512(pair->slopes);
    const wide512 step = multiply_wide512(limit512(distance, 1 << 21), (wide512){slopes, take_odd512(slopes)});
    return narrow512(
        limit512(add512(widen512(load512(pair->centers[1])), shift512(step, 14)), CENTER_LIMIT));
}

/* The innovations of a pair, from both words' units; also their sums, each innovation limited to 1,024. */
static inline void innovate512(const ISA_FN(pair) *pair, const int32_t sigmas[2], const __m512i units[2],
                               int16_t *innovations, int32_t totals[2]) {
    wide512 x[2] = {widen512(units[0]), widen512(units[1])};
    if (pair->cosines) turn512(x, pair->cosines, pair->sines, 1);
    __m512i rows[2];
    for (int row = 0; row < 2; ++row) {
        const __m512i inverse = _mm512_set1_epi64(((int64_t)1 << 32) / sigmas[row]);
        const wide512 d =
            limit512(subtract512(x[row], widen512(load512(pair->predictions[row]))), UNIT_LIMIT);
        const wide512 e = shift512(add_number512(multiply_wide512(d, (wide512){inverse, inverse}), 1 << 23), 24);
        rows[row] = narrow512(limit512(e, REGRESSOR_LIMIT));
    }
    const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, rows[0], _mm512_slli_epi32(rows[1], 16));
    _mm512_storeu_si512(innovations, both);
    const __m512i limited = _mm512_max_epi16(_mm512_min_epi16(both, _mm512_set1_epi16(1024)), _mm512_set1_epi16(-1024));
    const __m512i first = _mm512_madd_epi16(limited, _mm512_set1_epi32(1));
    const __m512i second = _mm512_madd_epi16(limited, _mm512_set1_epi32(1 << 16));
    const __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi32(first, second), _mm512_unpackhi_epi32(first, second));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    const __m128i rest = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i last = _mm_add_epi32(rest, _mm_unpackhi_epi64(rest, rest));
    totals[0] = _mm_cvtsi128_si32(last);
    totals[1] = _mm_extract_epi32(last, 1);
}

/* How far the words are from their centers: the tokens' spread, and the bytes' buckets of both rows. */
static inline void measure512(ISA_FN(state) *state, const ISA_FN(pair) *pair, const __m512i units[2],
                              uint8_t buckets[2 * GROUP]) {
    const __m512i most = _mm512_set1_epi32(1 << 18);
    __m512i sum = _mm512_setzero_si512(), bits;
    for (int row = 0; row < 2; ++row) {
        const __m512i distances = _mm512_abs_epi32(
            normalize512(units[row], load512(pair->centers[row]), load512(pair->inverses[row])));
        _mm_storeu_si128((void *)(buckets + GROUP * row),
                         _mm512_cvtepi32_epi8(find_buckets512(distances, &bits)));
        sum = _mm512_add_epi32(sum, _mm512_min_epi32(distances, most));
    }
    const __m512i spread = load512(state->spread), mean = _mm512_srai_epi32(sum, 9);
    const __m512i gain =
        _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(mean, 2), mean), _mm512_set1_epi32(1024));
    const __m512i next = _mm512_add_epi32(spread, _mm512_srai_epi32(_mm512_mullo_epi32(spread, gain), 15));
    _mm512_storeu_si512(state->spread, _mm512_max_epi32(_mm512_min_epi32(next, _mm512_set1_epi32(196608)),
                                                        _mm512_set1_epi32(26214)));
}

/* -- the mixture of a pair ----------------------------------------------------------------------------------------- */

static inline __m512i scan512(__m512i x) {
    const __m512i zero = _mm512_setzero_si512();
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 15));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 14));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 12));
    return _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 8));
}

static inline void mix512(ISA_FN(mixture) *mixture, const uint64_t counts[SCALES], uint32_t weights[SCALES]) {
    static const uint64_t least[8] = {3, 8, 20, 29, 16, 4};
    const __m512i all = _mm512_maskz_loadu_epi64(0x3f, counts);
    const uint64_t factor = ((uint64_t)4016 << 40) / (uint64_t)_mm512_reduce_add_epi64(all);
    const __m512i shares = _mm512_srli_epi64(_mm512_mullo_epi64(all, _mm512_set1_epi64((int64_t)factor)), 40);
    const __m512i sums = _mm512_add_epi64(shares, load512(least));
    _mm256_mask_storeu_epi32(weights, 0x3f, _mm512_cvtepi64_epi32(sums));
    const __m512i pairs = _mm512_broadcast_i32x4(_mm512_cvtepi64_epi16(sums));
    __m512i even = _mm512_setzero_si512(), odd = even; /* buckets 8 i to 8 i + 3, and 8 i + 4 to 8 i + 7 */
#define ADD_SCALES(j, control)                                                                          \
    do {                                                                                                \
        const __m512i first = load512(linear_masses[j]), second = load512(linear_masses[(j) + 1]);      \
        const __m512i both = _mm512_shuffle_epi32(pairs, control);                                      \
        even = _mm512_dpwssd_epi32(even, _mm512_unpacklo_epi16(first, second), both);                   \
        odd = _mm512_dpwssd_epi32(odd, _mm512_unpackhi_epi16(first, second), both);                     \
    } while (0)
    ADD_SCALES(0, _MM_PERM_AAAA);
    ADD_SCALES(2, _MM_PERM_BBBB);
    ADD_SCALES(4, _MM_PERM_CCCC);
#undef ADD_SCALES
    const __m512i order = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const table512 masses = {_mm512_permutex2var_epi64(even, order, odd),
                             _mm512_permutex2var_epi64(even, _mm512_add_epi64(order, _mm512_set1_epi64(4)), odd)};
    const __m512i low = scan512(masses.low);
    const __m512i high = _mm512_add_epi32(scan512(masses.high), _mm512_permutexvar_epi32(_mm512_set1_epi32(15), low));
    _mm512_storeu_si512(mixture->masses, masses.low);
    _mm512_storeu_si512(mixture->masses + 16, masses.high);
    _mm512_storeu_si512(mixture->starts, _mm512_sub_epi32(low, masses.low));
    _mm512_storeu_si512(mixture->starts + 16, _mm512_sub_epi32(high, masses.high));
}

/* counts = counts x 29/32 + gains; gains of bucket k for scale j: how many words, x mass of j, / mass of the mixture */
static inline void learn512(const ISA_FN(mixture) *mixture, const uint8_t buckets[2 * GROUP],
                            const uint32_t weights[SCALES], uint64_t counts[SCALES]) {
    static const uint8_t numbers[BUCKETS] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                             16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    const __m256i iota = _mm256_loadu_si256((const void *)numbers);
    __m256i ones = _mm256_setzero_si256(), twos = _mm256_setzero_si256();
    for (int i = 0; i < 2 * GROUP; i += 2) {
        ones = _mm256_sub_epi8(ones, _mm256_cmpeq_epi8(iota, _mm256_set1_epi8((char)buckets[i])));
        twos = _mm256_sub_epi8(twos, _mm256_cmpeq_epi8(iota, _mm256_set1_epi8((char)buckets[i + 1])));
    }
    uint8_t histogram[BUCKETS];
    _mm256_storeu_si256((void *)histogram, _mm256_add_epi8(ones, twos));
    /* reciprocals of the masses */
    __m256i places[2], digits[2];
    for (int i = 0; i < 2; ++i) {
        const __m512i mass = load512(mixture->masses + 16 * i), zeros = _mm512_lzcnt_epi32(mass);
        const __m512i first = _mm512_srli_epi32(_mm512_sllv_epi32(mass, zeros), 24);
        digits[i] = _mm512_cvtepi32_epi16(_mm512_and_si512(first, _mm512_set1_epi32(127)));
        places[i] = _mm512_cvtepi32_epi16(_mm512_sub_epi32(zeros, _mm512_set1_epi32(7))); /* 25 less its bits */
    }
    const __m512i at = _mm512_inserti64x4(_mm512_castsi256_si512(digits[0]), digits[1], 1);
    const __m512i shifts = _mm512_inserti64x4(_mm512_castsi256_si512(places[0]), places[1], 1);
    const __m512i below =
        _mm512_permutex2var_epi16(load512(linear_reciprocals), at, load512(linear_reciprocals + 32));
    const __m512i above =
        _mm512_permutex2var_epi16(load512(linear_reciprocals + 64), at, load512(linear_reciprocals + 96));
    const __m512i reciprocals =
        _mm512_mask_blend_epi16(_mm512_test_epi16_mask(at, _mm512_set1_epi16(64)), below, above);
    __m512i gains[8];
    for (int j = 0; j < 8; ++j) gains[j] = _mm512_setzero_si512();
    for (int i = 0; i < 4; ++i) {
        const __m128i part = i == 0   ? _mm512_castsi512_si128(reciprocals)
                             : i == 1 ? _mm512_extracti32x4_epi32(reciprocals, 1)
                             : i == 2 ? _mm512_extracti32x4_epi32(reciprocals, 2)
                                      : _mm512_extracti32x4_epi32(reciprocals, 3);
        const __m128i places_part = i == 0   ? _mm512_castsi512_si128(shifts)
                                    : i == 1 ? _mm512_extracti32x4_epi32(shifts, 1)
                                    : i == 2 ? _mm512_extracti32x4_epi32(shifts, 2)
                                             : _mm512_extracti32x4_epi32(shifts, 3);
        const __m512i exact = _mm512_sllv_epi64(_mm512_cvtepu16_epi64(part), _mm512_cvtepu16_epi64(places_part));
        const __m128i seen = _mm_loadl_epi64((const void *)(histogram + 8 * i));
        const __m256i mass = _mm256_loadu_si256((const void *)(mixture->masses + 8 * i));
        const __m512i share = _mm512_maskz_mullo_epi64((__mmask8)_mm256_test_epi32_mask(mass, mass), exact,
                                                       _mm512_cvtepu8_epi64(seen));
        for (int j = 0; j < SCALES; ++j) {
            const __m512i scale = _mm512_cvtepu16_epi64(_mm_loadu_si128((const void *)(linear_masses[j] + 8 * i)));
            gains[j] = _mm512_add_epi64(gains[j], _mm512_mullo_epi64(share, scale));
        }
    }
    __m512i sums[4];
    for (int i = 0; i < 4; ++i)
        sums[i] = _mm512_add_epi64(_mm512_unpacklo_epi64(gains[2 * i], gains[2 * i + 1]),
                                   _mm512_unpackhi_epi64(gains[2 * i], gains[2 * i + 1]));
    const __m512i low = _mm512_add_epi64(_mm512_shuffle_i64x2(sums[0], sums[1], 0x88),
                                         _mm512_shuffle_i64x2(sums[0], sums[1], 0xdd));
    const __m512i high = _mm512_add_epi64(_mm512_shuffle_i64x2(sums[2], sums[3], 0x88),
                                          _mm512_shuffle_i64x2(sums[2], sums[3], 0xdd));
    const __m512i total = _mm512_add_epi64(_mm512_shuffle_i64x2(low, high, 0x88),
                                           _mm512_shuffle_i64x2(low, high, 0xdd));
    const __m512i before = _mm512_maskz_loadu_epi64(0x3f, counts);
    const __m512i kept = _mm512_srli_epi64(
        _mm512_sub_epi64(_mm512_slli_epi64(before, 5), _mm512_add_epi64(before, _mm512_add_epi64(before, before))), 5);
    const __m512i factors = _mm512_cvtepu32_epi64(_mm256_maskz_loadu_epi32(0x3f, weights));
    const __m512i more = _mm512_mullo_epi64(_mm512_srli_epi64(total, 16), factors);
    _mm512_mask_storeu_epi64(counts, 0x3f, _mm512_add_epi64(_mm512_add_epi64(kept, more), _mm512_set1_epi64(1)));
}

/* -- decoding ------------------------------------------------------------------------------------------------------ */

/* Cells in which the reals `x`, in units, may lie. */
static inline __m512i guess_ranks512(const linear_dtype *dtype, __m512 x, int exponent) {
    const int mantissa_bits = dtype->mantissa_bits - dtype->raw_bits;
    const __m512i raw = _mm512_castps_si512(x), zero = _mm512_setzero_si512();
    const __m512i magnitude = _mm512_and_si512(raw, _mm512_set1_epi32(0x7fffffff));
    const __m512i shift = _mm512_add_epi32(_mm512_srli_epi32(magnitude, 23),
                                           _mm512_set1_epi32(dtype->bias - 127 - exponent));
    const __m512i half = _mm512_set1_epi32(dtype->raw_bits ? 0 : 1 << (22 - mantissa_bits));
    /* exponent and fraction in one: rounding up may carry */
    const __m512i moved = _mm512_add_epi32(
        magnitude, _mm512_set1_epi32((int32_t)((uint32_t)(dtype->bias - 127 - exponent) << 23)));
    const __m512i normal = _mm512_srai_epi32(_mm512_add_epi32(moved, half), (unsigned)(23 - mantissa_bits));
    const __mmask16 is_small = _mm512_cmplt_epi32_mask(shift, _mm512_set1_epi32(1));
    const __m512i digits =
        _mm512_ternarylogic_epi32(raw, _mm512_set1_epi32(0x7fffff), _mm512_set1_epi32(1 << 23), 0xea);
    const __m512i places = _mm512_sub_epi32(_mm512_set1_epi32(23 - mantissa_bits + 1), shift);
    __m512i steps = _mm512_mask_srlv_epi32(normal, is_small, digits, places);
    const __m512i most = _mm512_set1_epi32((int32_t)dtype->half_ranks - 1);
    steps = _mm512_mask_mov_epi32(steps, _mm512_cmpgt_epi32_mask(shift, _mm512_set1_epi32(200)), most);
    steps = _mm512_max_epi32(_mm512_min_epi32(steps, most), zero);
    return _mm512_add_epi32(_mm512_xor_si512(steps, _mm512_srai_epi32(raw, 31)),
                            _mm512_set1_epi32((int32_t)dtype->half_ranks));
}

/* What finds the cell of a target: of a mixture, and of the centers. */
typedef struct {
    table512 masses, starts, slopes, begins;
} guide512;

static inline guide512 prepare_guide512(const ISA_FN(mixture) *mixture) {
    static const float begins[BUCKETS] = {0, 4096, 8192, 12288, 16384, 20480, 24576, 28672, 32768, 40960, 49152,
        57344, 65536, 81920, 98304, 114688, 131072, 163840, 196608, 229376, 262144, 327680, 393216, 458752, 524288,
        655360, 786432, 917504, 1048576, 1310720, 1572864, 1835008};
    static const float widths[BUCKETS] = {4096, 4096, 4096, 4096, 4096, 4096, 4096, 4096, 8192, 8192, 8192, 8192,
        16384, 16384, 16384, 16384, 32768, 32768, 32768, 32768, 65536, 65536, 65536, 65536, 131072, 131072, 131072,
        131072, 262144, 262144, 262144, 262144};
    const table512 masses = load_table512(mixture->masses);
    const __m512 half = _mm512_set1_ps(0.5f);
    const __m512 low = _mm512_div_ps(_mm512_loadu_ps(widths), _mm512_add_ps(_mm512_cvtepi32_ps(masses.low), half));
    const __m512 high =
        _mm512_div_ps(_mm512_loadu_ps(widths + 16), _mm512_add_ps(_mm512_cvtepi32_ps(masses.high), half));
    return (guide512){masses, load_table512(mixture->starts),
                      {_mm512_castps_si512(low), _mm512_castps_si512(high)}, load_table512(begins)};
}

/* The last bucket of those before which there is at most so much mass: one of four, then in these four. */
static inline __m512i find_mass512(table512 starts, __m512i size) {
    const __m512i one = _mm512_set1_epi32(1), four = _mm512_set1_epi32(4);
    __m512i quarters[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int k = 4; k < BUCKETS; k += 4) {
        const __m512i start = _mm512_permutexvar_epi32(_mm512_set1_epi32(k % 16), k < 16 ? starts.low : starts.high);
        __m512i *sum = &quarters[k / 4 % 2];
        *sum = _mm512_mask_add_epi32(*sum, _mm512_cmple_epi32_mask(start, size), *sum, four);
    }
    const __m512i first = _mm512_add_epi32(quarters[0], quarters[1]), second = _mm512_add_epi32(first, one);
    const __m512i third = _mm512_add_epi32(second, one), last = _mm512_add_epi32(third, one);
    const __mmask16 above[3] = {_mm512_cmple_epi32_mask(look_up512(starts, second), size),
                                _mm512_cmple_epi32_mask(look_up512(starts, third), size),
                                _mm512_cmple_epi32_mask(look_up512(starts, last), size)};
    return _mm512_mask_mov_epi32(
        _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(first, above[0], second), above[1], third), above[2], last);
}

/* Ranks in whose cells the targets may lie. Boundaries are rounded down twice, in units and in deviations, hence the
 * floors. */
static inline __m512i guess_cells512(const guide512 *guide, const linear_dtype *dtype, __m512i targets, int exponent,
                                     __m512i centers, __m512i inverses) {
    const __m512 near = _mm512_cvtepi32_ps(centers), one = _mm512_set1_ps(1.0f);
    const __m512 scale = _mm512_div_ps(_mm512_set1_ps(65536.0f), _mm512_cvtepi32_ps(inverses));
    const unsigned floor_bits = dtype->floor == 8 ? 3 : 0;
    const __m512i first = guess_ranks512(dtype, near, exponent);
    const __m512i mass = _mm512_sub_epi32(_mm512_sub_epi32(targets, _mm512_slli_epi32(first, floor_bits)),
                                          _mm512_set1_epi32(HALF_MASS));
    const __m512i size = _mm512_abs_epi32(mass), sign = _mm512_and_si512(mass, _mm512_set1_epi32(INT32_MIN));
    const __m512i buckets = find_mass512(guide->starts, size);
    const __m512 starts = _mm512_cvtepi32_ps(_mm512_sub_epi32(size, look_up512(guide->starts, buckets)));
    const __m512 slopes = _mm512_castsi512_ps(look_up512(guide->slopes, buckets));
    const __m512 begins = _mm512_castsi512_ps(look_up512(guide->begins, buckets));
    const __m512 distance = _mm512_fmadd_ps(starts, slopes, begins);
    const __m512 z = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(distance), sign));
    const __m512 x = _mm512_fmadd_ps(_mm512_add_ps(_mm512_floor_ps(z), one), scale, near);
    /* the same with the floors of that guess */
    const __m512i next = guess_ranks512(dtype, x, exponent);
    const __m512 more = _mm512_cvtepi32_ps(_mm512_slli_epi32(_mm512_sub_epi32(next, first), floor_bits));
    const __m512 again = _mm512_fnmadd_ps(more, slopes, z);
    return guess_ranks512(dtype, _mm512_fmadd_ps(_mm512_add_ps(_mm512_floor_ps(again), one), scale, near), exponent);
}

/* Eight states after their symbols; units are there for all of them. */
static inline __m512i advance512(__m512i states, __m512i starts, __m512i sizes, const uint8_t **cursor) {
    const __m512i high = _mm512_srli_epi64(states, TOTAL_BITS), all = _mm512_set1_epi64((1 << TOTAL_BITS) - 1);
    const __m512i rest = _mm512_sub_epi64(_mm512_and_si512(states, all), starts);
    const __m512i x = _mm512_add_epi64(_mm512_mullo_epi64(high, sizes), rest);
    const __mmask8 is_small = _mm512_cmplt_epu64_mask(x, _mm512_set1_epi64((int64_t)1 << 32));
    const __m256i units = _mm256_maskz_expand_epi32(is_small, _mm256_loadu_si256((const void *)*cursor));
    *cursor += 4 * __builtin_popcount(is_small);
    return _mm512_mask_or_epi64(x, is_small, _mm512_slli_epi64(x, 32), _mm512_cvtepu32_epi64(units));
}

/* The words of a row of a group, one of each state. */
static inline __m512i decode512(ISA_FN(reader) *reader, __m512i states[2], const ISA_FN(pair) *pair,
                                const guide512 *guide, const linear_dtype *dtype, __m512i centers, int row,
                                int exponent) {
    const __m512i low = states[0], high = states[1], one = _mm512_set1_epi32(1);
    const __m512i halves = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(low)),
                                              _mm512_cvtepi64_epi32(high), 1);
    const __m512i targets = _mm512_and_si512(halves, _mm512_set1_epi32((1 << TOTAL_BITS) - 1));
    const __m512i inverses = load512(pair->inverses[row]);
    __m512i ranks = guess_cells512(guide, dtype, targets, exponent, centers, inverses);
    __m512i start = cumulate512(guide->masses, guide->starts, dtype, ranks, exponent, centers, inverses);
    __m512i end = cumulate512(guide->masses, guide->starts, dtype, _mm512_add_epi32(ranks, one), exponent, centers,
                              inverses);
    unsigned is_wrong = _mm512_cmpgt_epi32_mask(start, targets) | _mm512_cmple_epi32_mask(end, targets);
    if (is_wrong) { /* of a quarter of the rows: mostly one word */
        uint32_t cells[GROUP], places[GROUP], starts[GROUP], ends[GROUP];
        _mm512_storeu_si512(cells, ranks);
        _mm512_storeu_si512(places, targets);
        _mm512_storeu_si512(starts, start);
        _mm512_storeu_si512(ends, end);
        for (; is_wrong; is_wrong &= is_wrong - 1) {
            const int t = __builtin_ctz(is_wrong);
            linear_symbol symbol;
            cells[t] = ISA_FN(seek_cell)(&pair->mixture, dtype, places[t], exponent, pair->centers[row][t],
                                         pair->inverses[row][t], cells[t], &symbol);
            starts[t] = symbol.start;
            ends[t] = symbol.start + symbol.size;
        }
        ranks = load512(cells);
        start = load512(starts);
        end = load512(ends);
    }
    const __m512i sizes = _mm512_sub_epi32(end, start);
    if (dtype->raw_bits || reader->end - reader->cursor < 4 * LANES) {
        int32_t starts[GROUP], widths[GROUP], raw[GROUP] = {0};
        _mm512_storeu_si512(starts, start);
        _mm512_storeu_si512(widths, sizes);
        _mm512_storeu_si512(reader->states, low);
        _mm512_storeu_si512(reader->states + 8, high);
        for (int t = 0; t < GROUP; ++t) {
            uint64_t x = ISA_FN(advance)(reader, reader->states[t],
                                         (linear_symbol){(uint32_t)starts[t], (uint32_t)widths[t]});
            uint32_t bits = 0;
            if (dtype->raw_bits) x = ISA_FN(take_raw)(reader, dtype, x, &bits);
            raw[t] = (int32_t)bits;
            reader->states[t] = x;
        }
        states[0] = load512(reader->states);
        states[1] = load512(reader->states + 8);
        return _mm512_or_si512(to_words512(dtype, ranks), load512(raw));
    }
    states[0] = advance512(low, _mm512_cvtepu32_epi64(_mm512_castsi512_si256(start)),
                           _mm512_cvtepu32_epi64(_mm512_castsi512_si256(sizes)), &reader->cursor);
    states[1] = advance512(high, _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(start, 1)),
                           _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(sizes, 1)), &reader->cursor);
    return to_words512(dtype, ranks);
}

/* -- groups -------------------------------------------------------------------------------------------------------- */

/* Columns of a group: words of 32 bits, or two neighbours of 16 bits. */
static inline size_t count_columns512(const linear_dtype *dtype, size_t n) { return dtype->is_wide ? n : n / 2; }

/* The words of an element of all tokens, and back. */
static inline __m512i load_column512(const linear_dtype *dtype, const uint32_t *columns, size_t element) {
    if (dtype->is_wide) return load512(columns + GROUP * element);
    const __m512i both = load512(columns + GROUP * (element / 2));
    return element % 2 ? _mm512_srli_epi32(both, 16) : _mm512_and_si512(both, _mm512_set1_epi32(0xffff));
}

static inline void store_column512(const linear_dtype *dtype, uint32_t *columns, size_t element, __m512i words) {
    uint32_t *at = columns + GROUP * (dtype->is_wide ? element : element / 2);
    if (!dtype->is_wide)
        words = element % 2 ? _mm512_mask_blend_epi16(0xaaaaaaaa, load512(at), _mm512_slli_epi32(words, 16))
                            : _mm512_mask_blend_epi16(0x55555555, load512(at), words);
    _mm512_storeu_si512(at, words);
}

/* Regressors of the rows of a group. */
static void regressors512(const linear_shape *shape, const linear_scales *scales, const linear_dtype *dtype,
                          const void *words, const int64_t *positions, uint32_t *columns, int16_t *out) {
    const size_t n = shape->elements;
    uint32_t *pairs = columns + n * GROUP;
    int32_t cosines[GROUP], sines[GROUP];
    load_columns512(words, count_columns512(dtype, n), columns);
    for (size_t pair_in_head = 0; pair_in_head < shape->head_dim / 2; ++pair_in_head) {
        const int is_rotated = 2 * pair_in_head < shape->rotated_dims;
        if (is_rotated) compute_group_rotations512(positions, shape->frequencies[pair_in_head], cosines, sines, NULL);
        for (size_t place = 2 * pair_in_head; place < n; place += shape->head_dim) {
            wide512 x[2];
            __m512i rows[2];
            for (size_t row = 0; row < 2; ++row)
                x[row] = widen512(words_to_units512(
                    dtype, load_column512(dtype, columns, (size_t)shape->order[place + row]),
                    scales->exponents[place / 2]));
            if (is_rotated) turn512(x, cosines, sines, 1);
            for (size_t row = 0; row < 2; ++row) {
                const __m512i inverse = _mm512_set1_epi64(((int64_t)1 << 40) / scales->deviations[place + row]);
                const wide512 d = limit512(add_number512(x[row], -(int64_t)scales->means[place + row]), UNIT_LIMIT);
                const wide512 product = multiply_wide512(d, (wide512){inverse, inverse});
                rows[row] = narrow512(
                    limit512(shift512(add_number512(product, (int64_t)1 << 31), 32), REGRESSOR_LIMIT));
            }
            _mm512_storeu_si512(pairs + GROUP * (place / 2),
                                _mm512_mask_blend_epi16(0xaaaaaaaa, rows[0], _mm512_slli_epi32(rows[1], 16)));
        }
    }
    store_columns512(pairs, n / 2, out);
}

/* What a pair is predicted from, given the sums of its chain over all pairs before it. */
static inline void begin_pair512(const ISA_FN(state) *state, const linear_side *side, size_t p, const __m512i sums[2],
                                 ISA_FN(pair) *pair) {
    const size_t pair_in_head = 2 * p % side->shape.head_dim / 2;
    int32_t biases[2];
    for (size_t row = 0; row < 2; ++row) {
        const int64_t mean = state->sums[2 * p + row] * state->bias_factor >> 8;
        biases[row] = (int32_t)(mean * side->sigmas[2 * p + row] >> 20);
    }
    pair->cosines = pair->sines = NULL;
    if (2 * pair_in_head < side->shape.rotated_dims) {
        pair->cosines = state->cosines + pair_in_head * GROUP;
        pair->sines = state->sines + pair_in_head * GROUP;
    }
    predict512(state, side, p, pair_in_head, sums, biases, pair);
}

/* Sums of the chain of pair `p` over the first `count` pairs, and what one more adds. */
static inline void chain512(const ISA_FN(state) *state, const linear_side *side, size_t p, size_t count,
                            __m512i sums[2]) {
    const size_t n = side->shape.elements;
    int32_t out[2 * GROUP];
    ISA_FN(multiply)(state->innovations, side->chain_weights + 2 * p * n, n, count, 2, out);
    sums[0] = load512(out);
    sums[1] = load512(out + GROUP);
}

static inline void extend_chain512(const ISA_FN(state) *state, const linear_side *side, size_t p, size_t last,
                                   __m512i sums[2]) {
    const __m512i innovations = load512(state->innovations + 2 * GROUP * last);
    for (size_t row = 0; row < 2; ++row) {
        int32_t packed_pair;
        memcpy(&packed_pair, side->chain_weights + (2 * p + row) * side->shape.elements + 2 * last, 4);
        sums[row] = _mm512_dpwssd_epi32(sums[row], innovations, _mm512_set1_epi32(packed_pair));
    }
}

static inline void end_pair512(ISA_FN(state) *state, const linear_side *side, size_t p, const ISA_FN(pair) *pair,
                               const __m512i units[2], int is_constant, uint8_t buckets[2 * GROUP]) {
    int32_t totals[2];
    innovate512(pair, side->sigmas + 2 * p, units, state->innovations + 2 * p * GROUP, totals);
    for (int row = 0; row < 2; ++row) state->sums[2 * p + row] += totals[row] - (state->sums[2 * p + row] >> 2);
    if (!is_constant) measure512(state, pair, units, buckets);
}

/* Symbols of a whole group. */
static linear_symbol *ISA_FN(model_group)(ISA_FN(state) *state, const linear_job *job, const void *words,
                                          linear_symbol *symbols) {
    const linear_side *side = job->side;
    const linear_dtype *dtype = job->dtype;
    const size_t n = side->shape.elements;
    ISA_FN(pair) pair;
    uint32_t weights[SCALES];
    uint8_t buckets[2 * GROUP];
    load_columns512(words, count_columns512(dtype, n), state->columns);
    for (size_t p = 0; p < n / 2; ++p) {
        const int exponent = side->scales.exponents[p];
        int is_constant = 0;
        __m512i units[2], sums[2];
        chain512(state, side, p, p, sums);
        begin_pair512(state, side, p, sums, &pair);
        mix512(&pair.mixture, state->counts[p], weights);
        const table512 masses = load_table512(pair.mixture.masses), starts = load_table512(pair.mixture.starts);
        for (int row = 0; row < 2; ++row) {
            const size_t element = (size_t)side->shape.order[2 * p + (size_t)row];
            const __m512i at = load_column512(dtype, state->columns, element);
            units[row] = words_to_units512(dtype, at, exponent);
            if (row) _mm512_storeu_si512(pair.centers[1], shift_centers512(&pair, units[0]));
            if (job->is_constant && job->is_constant[element]) {
                is_constant = 1;
                continue;
            }
            const __m512i centers = load512(pair.centers[row]), inverses = load512(pair.inverses[row]);
            const __m512i ranks = to_ranks512(dtype, at);
            const __m512i start = cumulate512(masses, starts, dtype, ranks, exponent, centers, inverses);
            const __m512i next = _mm512_add_epi32(ranks, _mm512_set1_epi32(1));
            const __m512i end = cumulate512(masses, starts, dtype, next, exponent, centers, inverses);
            const __m512i size = _mm512_sub_epi32(end, start);
            const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            const __m512i low = _mm512_permutex2var_epi32(start, order, size);
            const __m512i high =
                _mm512_permutex2var_epi32(start, _mm512_add_epi32(order, _mm512_set1_epi32(8)), size);
            if (!dtype->raw_bits) {
                _mm512_storeu_si512(symbols, low);
                _mm512_storeu_si512(symbols + 8, high);
                symbols += GROUP;
                continue;
            }
            linear_symbol both[GROUP];
            uint32_t lane_words[GROUP];
            _mm512_storeu_si512(both, low);
            _mm512_storeu_si512(both + 8, high);
            _mm512_storeu_si512(lane_words, at);
            for (int t = 0; t < GROUP; ++t) {
                *symbols++ = both[t];
                *symbols++ = ISA_FN(raw_symbol)(dtype, lane_words[t]);
            }
        }
        end_pair512(state, side, p, &pair, units, is_constant, buckets);
        if (!is_constant) learn512(&pair.mixture, buckets, weights, state->counts[p]);
    }
    return symbols;
}

/* Words of a whole group. A word's cell depends on the word before it, by one long chain of steps: what does not, the
 * next pair's mixture and most of its sums, is done while that chain waits for its own results. */
static void ISA_FN(decode_group)(ISA_FN(state) *state, ISA_FN(reader) *reader, const linear_job *job, void *words) {
    const linear_side *side = job->side;
    const linear_dtype *dtype = job->dtype;
    const size_t n = side->shape.elements;
    ISA_FN(pair) pairs[2];
    uint32_t weights[2][SCALES];
    uint8_t buckets[2 * GROUP];
    int is_learned = 1;
    __m512i states[2] = {load512(reader->states), load512(reader->states + 8)};
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    if (job->is_constant) load_columns512(words, count_columns512(dtype, n), state->columns);
    mix512(&pairs[0].mixture, state->counts[0], weights[0]);
    for (size_t p = 0; p < n / 2; ++p) {
        ISA_FN(pair) *pair = &pairs[p % 2], *other = &pairs[(p + 1) % 2];
        const int exponent = side->scales.exponents[p];
        int is_constant = 0;
        __m512i units[2];
        if (p) extend_chain512(state, side, p, p - 1, sums);
        begin_pair512(state, side, p, sums, pair);
        const guide512 guide = prepare_guide512(&pair->mixture);
        if (!is_learned) learn512(&other->mixture, buckets, weights[(p + 1) % 2], state->counts[p - 1]);
        for (int row = 0; row < 2; ++row) {
            const size_t element = (size_t)side->shape.order[2 * p + (size_t)row];
            __m512i at, centers = load512(pair->centers[0]);
            if (row) {
                centers = shift_centers512(pair, units[0]);
                _mm512_storeu_si512(pair->centers[1], centers);
            }
            if (p + 1 < n / 2) {
                if (row)
                    mix512(&other->mixture, state->counts[p + 1], weights[(p + 1) % 2]);
                else
                    chain512(state, side, p + 1, p, sums);
            }
            if (job->is_constant && job->is_constant[element]) {
                is_constant = 1;
                at = load_column512(dtype, state->columns, element);
            } else {
                at = decode512(reader, states, pair, &guide, dtype, centers, row, exponent);
                store_column512(dtype, state->columns, element, at);
            }
            units[row] = words_to_units512(dtype, at, exponent);
        }
        end_pair512(state, side, p, pair, units, is_constant, buckets);
        is_learned = is_constant;
    }
    const size_t last = n / 2 - 1;
    if (!is_learned) learn512(&pairs[last % 2].mixture, buckets, weights[last % 2], state->counts[last]);
    _mm512_storeu_si512(reader->states, states[0]);
    _mm512_storeu_si512(reader->states + 8, states[1]);
    store_columns512(state->columns, count_columns512(dtype, n), words);
}

/* Eight states before their symbols; units go before the cursor. */
static inline __m512i retreat512(__m512i states, const linear_symbol *symbols, uint8_t **cursor) {
    const __m512i both = load512(symbols), sizes = _mm512_srli_epi64(both, 32);
    const __m512i starts = _mm512_and_si512(both, _mm512_set1_epi64(0xffffffff));
    const __mmask8 is_full = _mm512_cmpge_epu64_mask(states, _mm512_slli_epi64(sizes, 64 - TOTAL_BITS));
    const int count = __builtin_popcount(is_full);
    *cursor -= 4 * count;
    _mm256_mask_storeu_epi32(*cursor, (__mmask8)((1 << count) - 1),
                             _mm256_maskz_compress_epi32(is_full, _mm512_cvtepi64_epi32(states)));
    const __m512i x = _mm512_mask_srli_epi64(states, is_full, states, 32);
    /* the quotient of doubles is wrong by 1 at most */
    __m512i quotient = _mm512_cvttpd_epu64(_mm512_div_pd(_mm512_cvtepu64_pd(x), _mm512_cvtepu64_pd(sizes)));
    __m512i rest = _mm512_sub_epi64(x, _mm512_mullo_epi64(quotient, sizes));
    const __mmask8 is_low = _mm512_movepi64_mask(rest), is_high = _mm512_cmpge_epi64_mask(rest, sizes);
    const __m512i one = _mm512_set1_epi64(1);
    quotient = _mm512_mask_sub_epi64(quotient, is_low, quotient, one);
    rest = _mm512_mask_add_epi64(rest, is_low, rest, sizes);
    quotient = _mm512_mask_add_epi64(quotient, is_high, quotient, one);
    rest = _mm512_mask_sub_epi64(rest, is_high, rest, sizes);
    return _mm512_add_epi64(_mm512_slli_epi64(quotient, TOTAL_BITS), _mm512_add_epi64(rest, starts));
}
