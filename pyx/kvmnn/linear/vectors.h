/* The steps of coder_impl.h for eight tokens at once, by AVX2: the same numbers. Included once per level with AVX2. */

/* (a c + b s + 2^29) >> 30 */
static inline __m256i ISA_FN(turned)(__m256i a, __m256i c, __m256i b, __m256i s) {
    const __m256i half = _mm256_set1_epi64x(1 << 29);
    const __m256i even = _mm256_add_epi64(_mm256_mul_epi32(a, c), _mm256_mul_epi32(b, s));
    const __m256i odd = _mm256_add_epi64(_mm256_mul_epi32(ISA_FN(odd)(a), ISA_FN(odd)(c)),
                                         _mm256_mul_epi32(ISA_FN(odd)(b), ISA_FN(odd)(s)));
    return ISA_FN(shift)(ISA_FN(join)(_mm256_add_epi64(even, half), _mm256_add_epi64(odd, half)), 30);
}

static inline __m256i ISA_FN(negated)(__m256i x) { return _mm256_sub_epi32(_mm256_setzero_si256(), x); }

static inline __m256i ISA_FN(to_units8)(__m256i magnitude, int mantissa_bits, int shift) {
    const __m256i exponent = _mm256_srli_epi32(magnitude, mantissa_bits), zero = _mm256_setzero_si256();
    const __m256i fraction = _mm256_and_si256(magnitude, _mm256_set1_epi32((1 << mantissa_bits) - 1));
    const __m256i first = _mm256_and_si256(_mm256_cmpgt_epi32(exponent, zero), _mm256_set1_epi32(1 << mantissa_bits));
    const __m256i digits = _mm256_or_si256(fraction, first);
    const __m256i places =
        _mm256_add_epi32(_mm256_max_epi32(exponent, _mm256_set1_epi32(1)), _mm256_set1_epi32(shift));
    const __m256i left = _mm256_max_epi32(_mm256_min_epi32(places, _mm256_set1_epi32(30)), zero);
    const __m256i largest = _mm256_set1_epi32(UNIT_LIMIT);
    const __m256i is_beyond = _mm256_cmpgt_epi32(digits, _mm256_srlv_epi32(largest, left));
    const __m256i up = _mm256_blendv_epi8(_mm256_sllv_epi32(digits, left), largest, is_beyond);
    const __m256i down = _mm256_srlv_epi32(digits, _mm256_sub_epi32(zero, places));
    return _mm256_blendv_epi8(up, down, _mm256_cmpgt_epi32(zero, places));
}

static inline __m256i ISA_FN(words_to_units8)(const linear_dtype *dtype, __m256i words, int exponent) {
    const int sign_bit = dtype->is_wide ? 31 : 15;
    const __m256i magnitude = _mm256_and_si256(words, _mm256_set1_epi32((int32_t)((1u << sign_bit) - 1)));
    const __m256i x = ISA_FN(to_units8)(magnitude, dtype->mantissa_bits,
                                        exponent - dtype->bias - dtype->mantissa_bits);
    const __m256i sign = _mm256_srai_epi32(_mm256_slli_epi32(words, 31 - sign_bit), 31);
    return _mm256_sub_epi32(_mm256_xor_si256(x, sign), sign);
}

static inline __m256i ISA_FN(to_ranks8)(const linear_dtype *dtype, __m256i words) {
    const int sign_bit = dtype->is_wide ? 31 : 15;
    const __m256i magnitude = _mm256_srli_epi32(
        _mm256_and_si256(words, _mm256_set1_epi32((int32_t)((1u << sign_bit) - 1))), dtype->raw_bits);
    const __m256i sign = _mm256_srai_epi32(_mm256_slli_epi32(words, 31 - sign_bit), 31);
    return _mm256_add_epi32(_mm256_xor_si256(magnitude, sign), _mm256_set1_epi32((int32_t)dtype->half_ranks));
}

static inline __m256i ISA_FN(normalize8)(__m256i x, __m256i centers, __m256i inverses) {
    return ISA_FN(limit)(
        ISA_FN(shift_saturated)(ISA_FN(multiply_add)(_mm256_sub_epi32(x, centers), inverses, 0), 16), Z_LIMIT);
}

/* Buckets of distances below 2^24, and the logarithms of their widths. */
static inline __m256i ISA_FN(find_buckets8)(__m256i distances, __m256i *bits) {
    const __m256i as_float = _mm256_castps_si256(_mm256_cvtepi32_ps(distances));
    const __m256i is_low = _mm256_cmpgt_epi32(_mm256_set1_epi32(1 << 15), distances);
    const __m256i high = _mm256_sub_epi32(_mm256_srli_epi32(as_float, 21), _mm256_set1_epi32(((127 + 15) << 2) - 8));
    *bits = _mm256_blendv_epi8(_mm256_sub_epi32(_mm256_srli_epi32(as_float, 23), _mm256_set1_epi32(129)),
                               _mm256_set1_epi32(12), is_low);
    return _mm256_blendv_epi8(high, _mm256_srli_epi32(distances, 12), is_low);
}

static inline __m256i ISA_FN(cumulate8)(const ISA_FN(mixture) *mixture, const linear_dtype *dtype, __m256i ranks,
                                        int exponent, __m256i centers, __m256i inverses) {
    const __m256i one = _mm256_set1_epi32(1), zero = _mm256_setzero_si256();
    const __m256i far = _mm256_sub_epi32(ranks, _mm256_set1_epi32((int32_t)dtype->half_ranks));
    const __m256i steps = _mm256_abs_epi32(far);
    const __m256i magnitude = dtype->raw_bits ? steps : _mm256_sub_epi32(_mm256_slli_epi32(steps, 1), one);
    const __m256i size = ISA_FN(to_units8)(magnitude, dtype->boundary_mantissa_bits,
                                           exponent - dtype->bias - dtype->boundary_mantissa_bits);
    const __m256i z = ISA_FN(normalize8)(_mm256_sign_epi32(size, far), centers, inverses);
    const __m256i distances = _mm256_abs_epi32(z);
    __m256i bits;
    const __m256i buckets = ISA_FN(find_buckets8)(distances, &bits);
    const __m256i inside = _mm256_andnot_si256(_mm256_sllv_epi32(_mm256_set1_epi32(-1), bits), distances);
    const __m256i masses = _mm256_i32gather_epi32((const int *)mixture->masses, buckets, 4);
    const __m256i starts = _mm256_i32gather_epi32((const int *)mixture->starts, buckets, 4);
    const __m256i even = _mm256_srlv_epi64(_mm256_mul_epu32(masses, inside),
                                           _mm256_and_si256(bits, _mm256_set1_epi64x(0xffffffff)));
    const __m256i odd =
        _mm256_srlv_epi64(_mm256_mul_epu32(ISA_FN(odd)(masses), ISA_FN(odd)(inside)), ISA_FN(odd)(bits));
    const __m256i mass =
        _mm256_add_epi32(starts, _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa));
    const __m256i sign = _mm256_srai_epi32(z, 31);
    const __m256i side = _mm256_sub_epi32(_mm256_xor_si256(mass, sign), sign);
    const __m256i floors = _mm256_slli_epi32(ranks, dtype->floor == 8 ? 3 : 0);
    __m256i sum = _mm256_add_epi32(_mm256_add_epi32(side, _mm256_set1_epi32(HALF_MASS)), floors);
    sum = _mm256_andnot_si256(_mm256_cmpeq_epi32(ranks, zero), sum);
    return _mm256_blendv_epi8(sum, _mm256_set1_epi32(1 << TOTAL_BITS),
                              _mm256_cmpeq_epi32(ranks, _mm256_set1_epi32((int32_t)(2 * dtype->half_ranks))));
}

static inline __m256i ISA_FN(guess_ranks8)(const linear_dtype *dtype, __m256 x, int exponent) {
    const int mantissa_bits = dtype->mantissa_bits - dtype->raw_bits;
    const __m256i raw = _mm256_castps_si256(x), one = _mm256_set1_epi32(1), zero = _mm256_setzero_si256();
    const __m256i fraction = _mm256_and_si256(raw, _mm256_set1_epi32(0x7fffff));
    const __m256i logs = _mm256_and_si256(_mm256_srli_epi32(raw, 23), _mm256_set1_epi32(255));
    const __m256i shift = _mm256_add_epi32(logs, _mm256_set1_epi32(dtype->bias - 127 - exponent));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(fraction, _mm256_set1_epi32(dtype->raw_bits ? 0 : 1 << (22 - mantissa_bits))),
        23 - mantissa_bits);
    const __m256i capped = _mm256_min_epi32(shift, _mm256_set1_epi32(511));
    const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(capped, mantissa_bits), rounded);
    const __m256i places =
        _mm256_max_epi32(_mm256_sub_epi32(_mm256_set1_epi32(23 - mantissa_bits + 1), shift), zero);
    const __m256i small = _mm256_srlv_epi32(_mm256_or_si256(fraction, _mm256_set1_epi32(1 << 23)), places);
    __m256i steps = _mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(one, shift));
    steps = _mm256_andnot_si256(_mm256_cmpeq_epi32(logs, zero), steps);
    steps = _mm256_min_epi32(steps, _mm256_set1_epi32((int32_t)dtype->half_ranks - 1));
    return _mm256_add_epi32(_mm256_xor_si256(steps, _mm256_srai_epi32(raw, 31)),
                            _mm256_set1_epi32((int32_t)dtype->half_ranks));
}

/* Ranks in whose cells the targets may lie, if the given ranks are not far. */
static inline __m256i ISA_FN(guess_cells8)(const ISA_FN(mixture) *mixture, const linear_dtype *dtype, __m256i targets,
                                           __m256i ranks, int exponent, __m256i centers, __m256i inverses) {
    const __m256 near = _mm256_cvtepi32_ps(centers);
    const __m256i floors = _mm256_slli_epi32(ranks, dtype->floor == 8 ? 3 : 0);
    const __m256i mass = _mm256_sub_epi32(_mm256_sub_epi32(targets, floors), _mm256_set1_epi32(HALF_MASS));
    const __m256i size = _mm256_abs_epi32(mass);
    __m256i buckets = _mm256_set1_epi32(BUCKETS - 1);
    for (int k = 1; k < BUCKETS; ++k)
        buckets = _mm256_add_epi32(
            buckets, _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)mixture->starts[k]), size));
    const __m256i starts = _mm256_i32gather_epi32((const int *)mixture->starts, buckets, 4);
    const __m256 slopes = _mm256_i32gather_ps(mixture->slopes, buckets, 4);
    const __m256 begins = _mm256_i32gather_ps(mixture->begins, buckets, 4);
    const __m256 inside = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(size, starts)), slopes);
    const __m256 scale = _mm256_div_ps(_mm256_set1_ps(65536.0f), _mm256_cvtepi32_ps(inverses));
    __m256 distance = _mm256_mul_ps(_mm256_add_ps(begins, inside), scale);
    distance = _mm256_xor_ps(distance, _mm256_castsi256_ps(_mm256_and_si256(mass, _mm256_set1_epi32(INT32_MIN))));
    const __m256 x = _mm256_add_ps(near, distance);
    /* the same with the floors of that guess */
    const __m256i next = ISA_FN(guess_ranks8)(dtype, x, exponent);
    const __m256i rank_errors = _mm256_slli_epi32(_mm256_sub_epi32(next, ranks), dtype->floor == 8 ? 3 : 0);
    const __m256 back = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(rank_errors), slopes), scale);
    return ISA_FN(guess_ranks8)(dtype, _mm256_sub_ps(x, back), exponent);
}

static inline __m256i ISA_FN(load_words8)(const linear_dtype *dtype, const void *words, size_t at, size_t stride) {
    int32_t loaded[8];
    for (int t = 0; t < 8; ++t)
        loaded[t] = (int32_t)(dtype->is_wide ? ((const uint32_t *)words)[at + (size_t)t * stride]
                                             : ((const uint16_t *)words)[at + (size_t)t * stride]);
    return LANES_OF(loaded);
}

static inline __m256i ISA_FN(shift_centers8)(const ISA_FN(pair) *pair, int t, __m256i first) {
    const __m256i residual = ISA_FN(limit)(_mm256_sub_epi32(first, LANES_OF(pair->centers[0] + t)), 1 << 21);
    const __m256i step =
        ISA_FN(shift_saturated)(ISA_FN(multiply_add)(residual, LANES_OF(pair->slopes + t), 0), 14);
    return ISA_FN(add_limited)(LANES_OF(pair->centers[1] + t), step, CENTER_LIMIT);
}

/* predictions, centers, inverses of eight tokens from t on */
static inline void ISA_FN(predict8)(const ISA_FN(state) *state, const linear_side *side, size_t p, size_t pair_in_head,
                                    int t, const int32_t sums[2 * GROUP], const int32_t biases[2],
                                    ISA_FN(pair) *pair) {
    __m256i centers[2], w1, w2, slopes;
    int32_t angles[8];
    const int32_t *rows = &side->angles[p][0][0];
    for (int row = 0; row < 2; ++row) {
        const size_t place = 2 * p + row;
        const __m256i x = ISA_FN(scale8)(LANES_OF(state->base + place * GROUP + t), sums + row * GROUP + t,
                                         side->chain_factors[place]);
        STORE_LANES(pair->predictions[row] + t, x);
        centers[row] = ISA_FN(add_limited)(x, _mm256_set1_epi32(biases[row]), CENTER_LIMIT);
    }
    if (pair->cosines) {
        const __m256i a = centers[0], b = centers[1], c = LANES_OF(pair->cosines + t), s = LANES_OF(pair->sines + t);
        centers[0] = ISA_FN(limit)(ISA_FN(turned)(a, c, b, ISA_FN(negated)(s)), CENTER_LIMIT);
        centers[1] = ISA_FN(limit)(ISA_FN(turned)(b, c, a, s), CENTER_LIMIT);
        for (int i = 0; i < 8; ++i) angles[i] = state->angles[pair_in_head * GROUP + (size_t)(t + i)] * 4;
        const __m256i at = LANES_OF(angles);
        w1 = _mm256_i32gather_epi32(rows, at, 4);
        slopes = _mm256_i32gather_epi32(rows + 1, at, 4);
        w2 = _mm256_i32gather_epi32(rows + 2, at, 4);
    } else {
        w1 = _mm256_set1_epi32(rows[0]);
        slopes = _mm256_set1_epi32(rows[1]);
        w2 = _mm256_set1_epi32(rows[2]);
    }
    STORE_LANES(pair->centers[0] + t, centers[0]);
    STORE_LANES(pair->centers[1] + t, centers[1]);
    /* exact: a quotient that is no whole number is further from one than doubles round */
    const __m256i spread = LANES_OF(state->spread + t);
    const __m256d all = _mm256_set1_pd(4294967296.0);
    const __m128i low = _mm256_cvttpd_epi32(_mm256_div_pd(all, _mm256_cvtepi32_pd(_mm256_castsi256_si128(spread))));
    const __m128i high =
        _mm256_cvttpd_epi32(_mm256_div_pd(all, _mm256_cvtepi32_pd(_mm256_extracti128_si256(spread, 1))));
    const __m256i inverse = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    STORE_LANES(pair->inverses[0] + t, ISA_FN(shift)(ISA_FN(multiply_add)(w1, inverse, 0), 16));
    STORE_LANES(pair->inverses[1] + t, ISA_FN(shift)(ISA_FN(multiply_add)(w2, inverse, 0), 16));
    STORE_LANES(pair->slopes + t, slopes);
}

static inline void ISA_FN(innovate8)(const ISA_FN(pair) *pair, int t, const int64_t inverses[2],
                                     int32_t units[2][GROUP], int16_t *innovations) {
    __m256i x[2] = {LANES_OF(units[0] + t), LANES_OF(units[1] + t)};
    if (pair->cosines) {
        const __m256i a = x[0], b = x[1], c = LANES_OF(pair->cosines + t), s = LANES_OF(pair->sines + t);
        x[0] = ISA_FN(turned)(a, c, b, s);
        x[1] = ISA_FN(turned)(b, c, a, ISA_FN(negated)(s));
    }
    for (int row = 0; row < 2; ++row) {
        const __m256i prediction = LANES_OF(pair->predictions[row] + t);
        const __m256i d = ISA_FN(add_limited)(x[row], ISA_FN(negated)(prediction), UNIT_LIMIT);
        const __m256i e = ISA_FN(shift)(
            ISA_FN(multiply_add)(d, _mm256_set1_epi32((int32_t)inverses[row]), 1 << 23), 24);
        x[row] = ISA_FN(limit)(e, REGRESSOR_LIMIT);
    }
    STORE_LANES(innovations + 2 * t, _mm256_blend_epi16(x[0], _mm256_slli_epi32(x[1], 16), 0xaa));
}

/* Sums of the innovations of a group, each limited to 1,024. */
static inline void ISA_FN(sum_innovations)(const int16_t *innovations, int32_t totals[2]) {
    const __m256i most = _mm256_set1_epi16(1024), least = _mm256_set1_epi16(-1024), one = _mm256_set1_epi32(1);
    const __m256i first = _mm256_max_epi16(_mm256_min_epi16(LANES_OF(innovations), most), least);
    const __m256i second = _mm256_max_epi16(_mm256_min_epi16(LANES_OF(innovations + GROUP), most), least);
    const __m256i both = _mm256_add_epi16(first, second);
    int32_t lanes[2][8];
    STORE_LANES(lanes[0], _mm256_madd_epi16(both, one));
    STORE_LANES(lanes[1], _mm256_madd_epi16(both, _mm256_slli_epi32(one, 16)));
    for (int i = 0; i < 8; ++i) {
        totals[0] += lanes[0][i];
        totals[1] += lanes[1][i];
    }
}

static inline void ISA_FN(measure8)(ISA_FN(state) *state, const ISA_FN(pair) *pair, int t, int32_t units[2][GROUP],
                                    uint32_t *histogram) {
    const __m256i most = _mm256_set1_epi32(1 << 18);
    __m256i sum = _mm256_setzero_si256(), bits;
    for (int row = 0; row < 2; ++row) {
        const __m256i distances = _mm256_abs_epi32(ISA_FN(normalize8)(
            LANES_OF(units[row] + t), LANES_OF(pair->centers[row] + t), LANES_OF(pair->inverses[row] + t)));
        int32_t buckets[8];
        STORE_LANES(buckets, ISA_FN(find_buckets8)(distances, &bits));
        for (int i = 0; i < 8; ++i) histogram[buckets[i]]++;
        sum = _mm256_add_epi32(sum, _mm256_min_epi32(distances, most));
    }
    const __m256i spread = LANES_OF(state->spread + t), mean = _mm256_srai_epi32(sum, 9);
    const __m256i gain =
        _mm256_sub_epi32(_mm256_add_epi32(_mm256_slli_epi32(mean, 2), mean), _mm256_set1_epi32(1024));
    __m256i next = _mm256_add_epi32(spread, _mm256_srai_epi32(_mm256_mullo_epi32(spread, gain), 15));
    next = _mm256_max_epi32(_mm256_min_epi32(next, _mm256_set1_epi32(196608)), _mm256_set1_epi32(26214));
    STORE_LANES(state->spread + t, next);
}
