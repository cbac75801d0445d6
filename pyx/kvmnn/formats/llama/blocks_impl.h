/* The kernels of blocks.h, included once per SIMD level: ISA_FN(name) gives each function its own name. Inner trip counts
 * are constants, and codes are taken apart before they are multiplied, so that compilers make vectors of them. */

/* The fp16 words of a batch, `offset` bytes into each block. */
static inline void ISA_FN(load_scales)(const kvmnn_batch *batch, size_t offset, float *restrict out) {
    uint32_t words[KVMNN_BATCH_BLOCKS] = {0};
    for (size_t i = 0; i < batch->n; ++i) words[i] = kvmnn_word(batch->block_at[i] + offset);
    for (int i = 0; i < KVMNN_BATCH_BLOCKS; ++i) out[i] = kvmnn_half_to_float(words[i]);
}

/* 32 codes as floats: times a scale, less a shift before it, or plus a minimum after it. */
static inline void ISA_FN(store_scaled)(const int8_t *restrict codes, float scale, float *restrict out) {
    for (int i = 0; i < 32; ++i) out[i] = (float)codes[i] * scale;
}

static inline void ISA_FN(store_shifted)(const uint8_t *restrict codes, int shift, float scale, float *restrict out) {
    for (int i = 0; i < 32; ++i) out[i] = (float)((int)codes[i] - shift) * scale;
}

static inline void ISA_FN(store_with_minimum)(const uint8_t *restrict codes, float scale, float minimum,
                                              float *restrict out) {
    for (int i = 0; i < 32; ++i) out[i] = (float)codes[i] * scale + minimum;
}

static void ISA_FN(q4_0)(const kvmnn_block_rows *blocks, float *restrict out) {
    float scales[KVMNN_BATCH_BLOCKS];
    uint8_t codes[KVMNN_BATCH_BLOCKS][32];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 18, &batch)) {
        ISA_FN(load_scales)(&batch, 0, scales);
        for (size_t i = 0; i < batch.n; ++i) kvmnn_unpack_nibbles(batch.block_at[i] + 2, codes[i]);
        for (size_t i = 0; i < batch.n; ++i, out += 32) ISA_FN(store_shifted)(codes[i], 8, scales[i], out);
    }
}

static void ISA_FN(q4_1)(const kvmnn_block_rows *blocks, float *restrict out) {
    float scales[KVMNN_BATCH_BLOCKS], minima[KVMNN_BATCH_BLOCKS];
    uint8_t codes[KVMNN_BATCH_BLOCKS][32];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 20, &batch)) {
        ISA_FN(load_scales)(&batch, 0, scales);
        ISA_FN(load_scales)(&batch, 2, minima);
        for (size_t i = 0; i < batch.n; ++i) kvmnn_unpack_nibbles(batch.block_at[i] + 4, codes[i]);
        for (size_t i = 0; i < batch.n; ++i, out += 32) ISA_FN(store_with_minimum)(codes[i], scales[i], minima[i], out);
    }
}

static void ISA_FN(q5_0)(const kvmnn_block_rows *blocks, float *restrict out) {
    float scales[KVMNN_BATCH_BLOCKS];
    uint8_t codes[KVMNN_BATCH_BLOCKS][32];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 22, &batch)) {
        ISA_FN(load_scales)(&batch, 0, scales);
        for (size_t i = 0; i < batch.n; ++i)
            kvmnn_unpack_nibbles_and_bits(batch.block_at[i] + 6, batch.block_at[i] + 2, codes[i]);
        for (size_t i = 0; i < batch.n; ++i, out += 32) ISA_FN(store_shifted)(codes[i], 16, scales[i], out);
    }
}

static void ISA_FN(q5_1)(const kvmnn_block_rows *blocks, float *restrict out) {
    float scales[KVMNN_BATCH_BLOCKS], minima[KVMNN_BATCH_BLOCKS];
    uint8_t codes[KVMNN_BATCH_BLOCKS][32];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 24, &batch)) {
        ISA_FN(load_scales)(&batch, 0, scales);
        ISA_FN(load_scales)(&batch, 2, minima);
        for (size_t i = 0; i < batch.n; ++i)
            kvmnn_unpack_nibbles_and_bits(batch.block_at[i] + 8, batch.block_at[i] + 4, codes[i]);
        for (size_t i = 0; i < batch.n; ++i, out += 32) ISA_FN(store_with_minimum)(codes[i], scales[i], minima[i], out);
    }
}

static void ISA_FN(q8_0)(const kvmnn_block_rows *blocks, float *restrict out) {
    float scales[KVMNN_BATCH_BLOCKS];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 34, &batch)) {
        ISA_FN(load_scales)(&batch, 0, scales);
        for (size_t i = 0; i < batch.n; ++i, out += 32)
            ISA_FN(store_scaled)((const int8_t *)batch.block_at[i] + 2, scales[i], out);
    }
}

/* What 32 codes of iq4_nl stand for. */
static inline void ISA_FN(lookup_iq4)(const uint8_t *bytes, int8_t *restrict out) {
#ifdef ISA_F16C
    const __m128i values = _mm_loadu_si128((const __m128i *)(const void *)kvmnn_iq4), low = _mm_set1_epi8(15);
    const __m128i both = _mm_loadu_si128((const __m128i *)(const void *)bytes);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), low);
    _mm_storeu_si128((__m128i *)(void *)out, _mm_shuffle_epi8(values, _mm_and_si128(both, low)));
    _mm_storeu_si128((__m128i *)(void *)(out + 16), _mm_shuffle_epi8(values, high));
#else
    for (int i = 0; i < 16; ++i) out[i] = kvmnn_iq4[bytes[i] & 15];
    for (int i = 0; i < 16; ++i) out[16 + i] = kvmnn_iq4[bytes[i] >> 4];
#endif
}

static void ISA_FN(iq4_nl)(const kvmnn_block_rows *blocks, float *restrict out) {
    float scales[KVMNN_BATCH_BLOCKS];
    int8_t codes[KVMNN_BATCH_BLOCKS][32];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 18, &batch)) {
        ISA_FN(load_scales)(&batch, 0, scales);
        for (size_t i = 0; i < batch.n; ++i) ISA_FN(lookup_iq4)(batch.block_at[i] + 2, codes[i]);
        for (size_t i = 0; i < batch.n; ++i, out += 32) ISA_FN(store_scaled)(codes[i], scales[i], out);
    }
}

static const kvmnn_block_kernels ISA_FN(table) = {
    ISA_NAME,
    {ISA_FN(q4_0), ISA_FN(q4_1), ISA_FN(q5_0), ISA_FN(q5_1), ISA_FN(q8_0), ISA_FN(iq4_nl)},
};
