/* The loops of blocks.h, included once per SIMD level: LEVEL(name) gives each function its own name. Inner trip counts
 * are constants, and codes are taken apart before they are multiplied, so that compilers make vectors of them. */

/* The fp16 words of a batch, `offset` bytes into each block. */
static inline void LEVEL(scales)(const kvmnn_batch *batch, size_t offset, float *restrict to) {
    uint32_t words[KVMNN_BATCH] = {0};
    for (size_t i = 0; i < batch->n; ++i) words[i] = kvmnn_word(batch->at[i] + offset);
    for (int i = 0; i < KVMNN_BATCH; ++i) to[i] = kvmnn_half(words[i]);
}

/* 32 codes as floats: times a scale, less a shift before it, or plus a minimum after it. */
static inline void LEVEL(scaled)(const int8_t *restrict codes, float scale, float *restrict to) {
    for (int i = 0; i < 32; ++i) to[i] = (float)codes[i] * scale;
}

static inline void LEVEL(shifted)(const uint8_t *restrict codes, int shift, float scale, float *restrict to) {
    for (int i = 0; i < 32; ++i) to[i] = (float)((int)codes[i] - shift) * scale;
}

static inline void LEVEL(moved)(const uint8_t *restrict codes, float scale, float least, float *restrict to) {
    for (int i = 0; i < 32; ++i) to[i] = (float)codes[i] * scale + least;
}

static void LEVEL(q4_0)(const kvmnn_block_rows *blocks, float *restrict to) {
    float scales[KVMNN_BATCH];
    uint8_t codes[KVMNN_BATCH][32];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 18, &batch)) {
        LEVEL(scales)(&batch, 0, scales);
        for (size_t i = 0; i < batch.n; ++i) kvmnn_halves(batch.at[i] + 2, codes[i]);
        for (size_t i = 0; i < batch.n; ++i, to += 32) LEVEL(shifted)(codes[i], 8, scales[i], to);
    }
}

static void LEVEL(q4_1)(const kvmnn_block_rows *blocks, float *restrict to) {
    float scales[KVMNN_BATCH], minima[KVMNN_BATCH];
    uint8_t codes[KVMNN_BATCH][32];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 20, &batch)) {
        LEVEL(scales)(&batch, 0, scales);
        LEVEL(scales)(&batch, 2, minima);
        for (size_t i = 0; i < batch.n; ++i) kvmnn_halves(batch.at[i] + 4, codes[i]);
        for (size_t i = 0; i < batch.n; ++i, to += 32) LEVEL(moved)(codes[i], scales[i], minima[i], to);
    }
}

static void LEVEL(q5_0)(const kvmnn_block_rows *blocks, float *restrict to) {
    float scales[KVMNN_BATCH];
    uint8_t codes[KVMNN_BATCH][32];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 22, &batch)) {
        LEVEL(scales)(&batch, 0, scales);
        for (size_t i = 0; i < batch.n; ++i) kvmnn_halves_and_bits(batch.at[i] + 6, batch.at[i] + 2, codes[i]);
        for (size_t i = 0; i < batch.n; ++i, to += 32) LEVEL(shifted)(codes[i], 16, scales[i], to);
    }
}

static void LEVEL(q5_1)(const kvmnn_block_rows *blocks, float *restrict to) {
    float scales[KVMNN_BATCH], minima[KVMNN_BATCH];
    uint8_t codes[KVMNN_BATCH][32];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 24, &batch)) {
        LEVEL(scales)(&batch, 0, scales);
        LEVEL(scales)(&batch, 2, minima);
        for (size_t i = 0; i < batch.n; ++i) kvmnn_halves_and_bits(batch.at[i] + 8, batch.at[i] + 4, codes[i]);
        for (size_t i = 0; i < batch.n; ++i, to += 32) LEVEL(moved)(codes[i], scales[i], minima[i], to);
    }
}

static void LEVEL(q8_0)(const kvmnn_block_rows *blocks, float *restrict to) {
    float scales[KVMNN_BATCH];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 34, &batch)) {
        LEVEL(scales)(&batch, 0, scales);
        for (size_t i = 0; i < batch.n; ++i, to += 32) LEVEL(scaled)((const int8_t *)batch.at[i] + 2, scales[i], to);
    }
}

/* What 32 codes of iq4_nl stand for. */
static inline void LEVEL(named)(const uint8_t *bytes, int8_t *restrict to) {
#ifdef LEVEL_F16C
    const __m128i names = _mm_loadu_si128((const __m128i *)(const void *)kvmnn_iq4), low = _mm_set1_epi8(15);
    const __m128i both = _mm_loadu_si128((const __m128i *)(const void *)bytes);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), low);
    _mm_storeu_si128((__m128i *)(void *)to, _mm_shuffle_epi8(names, _mm_and_si128(both, low)));
    _mm_storeu_si128((__m128i *)(void *)(to + 16), _mm_shuffle_epi8(names, high));
#else
    for (int i = 0; i < 16; ++i) to[i] = kvmnn_iq4[bytes[i] & 15];
    for (int i = 0; i < 16; ++i) to[16 + i] = kvmnn_iq4[bytes[i] >> 4];
#endif
}

static void LEVEL(iq4_nl)(const kvmnn_block_rows *blocks, float *restrict to) {
    float scales[KVMNN_BATCH];
    int8_t codes[KVMNN_BATCH][32];
    kvmnn_batch batch = {0};
    while (kvmnn_next_batch(blocks, 18, &batch)) {
        LEVEL(scales)(&batch, 0, scales);
        for (size_t i = 0; i < batch.n; ++i) LEVEL(named)(batch.at[i] + 2, codes[i]);
        for (size_t i = 0; i < batch.n; ++i, to += 32) LEVEL(scaled)(codes[i], scales[i], to);
    }
}

static const kvmnn_blocks_table LEVEL(table) = {
    KVMNN_LEVEL_NAME,
    {LEVEL(q4_0), LEVEL(q4_1), LEVEL(q5_0), LEVEL(q5_1), LEVEL(q8_0), LEVEL(iq4_nl)},
};
