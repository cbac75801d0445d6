/* More of the kernels of residuals.h: the decoder's. Each state waits for what it has read, so that most of a processor is
 * idle: other work is done meanwhile, a little after every few symbols. */

/* The decoder does other work between symbols. Each state of the entropy coder waits for what it has just read, and a
 * processor does not look far enough ahead to find something else. So a little work follows every 32 symbols: raw low
 * parts, the rotation of the next row, the checksum of the rows before. */

/* The offset of a table's entry, in one instruction where there is one. */
static inline uint32_t ISA_FN(entry_offset)(uint32_t entry) {
#if defined(ISA_AVX512)
    return _pext_u32(entry, (SCALE - 1) << 8);
#elif defined(ISA_F16C)
    return _bextr_u32(entry, 8, SCALE_BITS);
#else
    return entry >> 8 & (SCALE - 1);
#endif
}

#if defined(ISA_F16C) && defined(__x86_64__)
#define ISA_RENORMALIZE RENORMALIZE_BMI2
#else
#define ISA_RENORMALIZE RENORMALIZE
#endif

/* Takes the next symbol out of `state`; a unit may be read. */
#define DECODE_SYMBOL(state, entries, symbol, units, num_taken)                                \
    do {                                                                                       \
        uint32_t entry_ = (entries)[(state) & (SCALE - 1)];                                    \
        (symbol) = (uint8_t)entry_;                                                            \
        uint32_t v_ = (entry_ >> 21) * ((state) >> SCALE_BITS) + ISA_FN(entry_offset)(entry_); \
        ISA_RENORMALIZE(v_, units, num_taken);                                                 \
        (state) = v_;                                                                          \
    } while (0)

/* Four coded low parts, by states in registers. */
#define DECODE_FOUR_LOW()                                        \
    do {                                                         \
        DECODE_SYMBOL(low_a, low, out[0], units, num_low_taken); \
        DECODE_SYMBOL(low_b, low, out[1], units, num_low_taken); \
        DECODE_SYMBOL(low_c, low, out[2], units, num_low_taken); \
        DECODE_SYMBOL(low_d, low, out[3], units, num_low_taken); \
        out += 4;                                                \
    } while (0)

#define DECODE_FOUR(j)                                                            \
    do {                                                                          \
        DECODE_SYMBOL(a, tables[p[j]], folded[j], cursor, num_taken);             \
        DECODE_SYMBOL(b, tables[p[(j) + 1]], folded[(j) + 1], cursor, num_taken); \
        DECODE_SYMBOL(c, tables[p[(j) + 2]], folded[(j) + 2], cursor, num_taken); \
        DECODE_SYMBOL(d, tables[p[(j) + 3]], folded[(j) + 3], cursor, num_taken); \
    } while (0)

static void ISA_FN(decode_low)(dense_low_decoder *f, size_t n) {
    const uint32_t *low = f->entries;
    uint32_t low_a = f->states[0], low_b = f->states[1], low_c = f->states[2], low_d = f->states[3];
    const uint8_t *units = f->cursor;
    uint8_t *out = f->out;
    while (n) { /* as many as the units that are left will do for, then see how many there are */
        size_t num_steps = (size_t)(f->end - units) / 8;
        if (num_steps > n / 4) num_steps = n / 4;
        if (num_steps == 0) break;
        uint64_t num_low_taken = 0;
        for (n -= 4 * num_steps; num_steps; --num_steps) DECODE_FOUR_LOW();
        units += 2 * num_low_taken;
    }
    f->states[0] = low_a, f->states[1] = low_b, f->states[2] = low_c, f->states[3] = low_d;
    f->cursor = units, f->out = out;
}

static void ISA_FN(rotate_steps)(dense_rotation_job *job, size_t steps) {
    size_t bytes = job->dtype == KVMNN_FP32 ? 4 : 2, half = job->pairs * bytes, head_bytes = job->dim * bytes;
    for (; steps && job->heads; --steps) {
        size_t n = job->pairs - job->next_pair, offset = job->next_pair * bytes;
        const float *c = job->cosines + job->next_pair, *s = job->sines + job->next_pair;
        const void *a = job->row + offset, *b = job->row + half + offset;
        void *to_a = job->out + offset, *to_b = job->out + half + offset;
        if (n > ROTATION_STEP_PAIRS) n = ROTATION_STEP_PAIRS;
        if (job->dtype == KVMNN_FP16)
            ISA_FN(rotate_fp16)(a, b, n, c, s, to_a, to_b);
        else if (job->dtype == KVMNN_BF16)
            ISA_FN(rotate_bf16)(a, b, n, c, s, to_a, to_b);
        else
            ISA_FN(rotate_fp32)(a, b, n, c, s, to_a, to_b);
        job->next_pair += n;
        if (job->next_pair < job->pairs) continue;
        memcpy(job->out + 2 * half, job->row + 2 * half, head_bytes - 2 * half);
        job->row += head_bytes, job->out += head_bytes, job->next_pair = 0, --job->heads;
    }
}

/* n symbols, a multiple of 4, and in `decode_symbols_and_low` as many coded low parts; returns where the units that were
 * read end. Not inlined: everything has to stay in registers. Volatile: compilers would make a vector of the states, and
 * all would wait for that. */
static DENSE_NOINLINE const uint8_t *ISA_FN(decode_symbols)(const uint8_t *p, size_t n,
                                                            const uint32_t *const tables[256],
                                                            uint32_t states[NUM_STATES], const uint8_t *cursor,
                                                            uint8_t *folded) {
    volatile uint32_t *saved_states = states;
    uint32_t a = saved_states[0], b = saved_states[1], c = saved_states[2], d = saved_states[3];
    uint64_t num_taken = 0;
    p += n, folded += n;
    for (ptrdiff_t j = -(ptrdiff_t)n; j < 0; j += 4) DECODE_FOUR(j);
    saved_states[0] = a, saved_states[1] = b, saved_states[2] = c, saved_states[3] = d;
    return cursor + 2 * num_taken;
}

static DENSE_NOINLINE const uint8_t *ISA_FN(decode_symbols_and_low)(const uint8_t *p, size_t n,
                                                                    const uint32_t *const tables[256],
                                                                    uint32_t states[NUM_STATES], const uint8_t *cursor,
                                                                    uint8_t *folded, dense_low_decoder *f) {
    volatile uint32_t *saved_states = states;
    uint32_t a = saved_states[0], b = saved_states[1], c = saved_states[2], d = saved_states[3];
    const uint32_t *low = f->entries;
    volatile uint32_t *saved_low_states = f->states;
    uint32_t low_a = saved_low_states[0], low_b = saved_low_states[1], low_c = saved_low_states[2],
             low_d = saved_low_states[3];
    const uint8_t *units = f->cursor;
    uint8_t *out = f->out;
    uint64_t num_taken = 0, num_low_taken = 0;
    p += n, folded += n;
    for (ptrdiff_t j = -(ptrdiff_t)n; j < 0; j += 4) {
        DECODE_FOUR(j);
        DECODE_FOUR_LOW();
    }
    saved_low_states[0] = low_a, saved_low_states[1] = low_b, saved_low_states[2] = low_c, saved_low_states[3] = low_d;
    f->cursor = units + 2 * num_low_taken, f->out = out;
    saved_states[0] = a, saved_states[1] = b, saved_states[2] = c, saved_states[3] = d;
    return cursor + 2 * num_taken;
}

static void ISA_FN(decode)(const uint8_t *p, size_t n, const uint32_t *const tables[256], uint32_t states[NUM_STATES],
                           const uint8_t **section, uint8_t *folded, dense_interleaved_work *interleaved) {
    const uint8_t *cursor = *section;
    size_t j = 0;
    for (; j + SYMBOL_STEP <= n; j += SYMBOL_STEP) {
        dense_low_decoder *f = interleaved->low_decoder;
        if (f && (size_t)(f->out_end - f->out) >= SYMBOL_STEP && f->end - f->cursor >= 2 * SYMBOL_STEP)
            cursor = ISA_FN(decode_symbols_and_low)(p + j, SYMBOL_STEP, tables, states, cursor, folded + j, f);
        else
            cursor = ISA_FN(decode_symbols)(p + j, SYMBOL_STEP, tables, states, cursor, folded + j);
        if (interleaved->rotation.heads)
            ISA_FN(rotate_steps)(&interleaved->rotation, SYMBOL_STEP / (2 * ROTATION_STEP_PAIRS));
        for (size_t k = 0; k < interleaved->stripes && interleaved->hash.cursor < interleaved->hash_end; ++k)
            dense_hash_stripe(&interleaved->hash);
    }
    *section = ISA_FN(decode_symbols)(p + j, n - j, tables, states, cursor, folded + j);
}

#undef DECODE_FOUR_LOW
#undef DECODE_FOUR
#undef DECODE_SYMBOL
#undef ISA_RENORMALIZE
