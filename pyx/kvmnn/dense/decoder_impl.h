/* More of the loops of words.h: the decoder's. Each state waits for what it has read, so that most of a processor is
 * idle: other work is done meanwhile, a little after every few symbols. */

/* The offset of a table's entry, in one instruction where there is one. */
static inline uint32_t LEVEL(offset_of)(uint32_t entry) {
#if defined(LEVEL_WIDE)
    return _pext_u32(entry, (SCALE - 1) << 8);
#elif defined(LEVEL_F16C)
    return _bextr_u32(entry, 8, SCALE_BITS);
#else
    return entry >> 8 & (SCALE - 1);
#endif
}

#if defined(LEVEL_F16C) && defined(__x86_64__)
#define LEVEL_RENORMALISE RENORMALISE_BMI2
#else
#define LEVEL_RENORMALISE RENORMALISE
#endif

/* Takes the next symbol out of `state`; a unit may be read. */
#define DECODE(state, entries, symbol, at, taken)                                          \
    do {                                                                                   \
        uint32_t entry_ = (entries)[(state) & (SCALE - 1)];                                \
        (symbol) = (uint8_t)entry_;                                                        \
        uint32_t v_ = (entry_ >> 21) * ((state) >> SCALE_BITS) + LEVEL(offset_of)(entry_); \
        LEVEL_RENORMALISE(v_, at, taken);                                                  \
        (state) = v_;                                                                      \
    } while (0)

/* Four coded low parts, by states in registers. */
#define LOW_PARTS()                               \
    do {                                          \
        DECODE(la, low, to[0], units, low_taken); \
        DECODE(lb, low, to[1], units, low_taken); \
        DECODE(lc, low, to[2], units, low_taken); \
        DECODE(ld, low, to[3], units, low_taken); \
        to += 4;                                  \
    } while (0)

#define SYMBOLS(j)                                                 \
    do {                                                           \
        DECODE(a, tables[p[j]], folded[j], at, taken);             \
        DECODE(b, tables[p[(j) + 1]], folded[(j) + 1], at, taken); \
        DECODE(c, tables[p[(j) + 2]], folded[(j) + 2], at, taken); \
        DECODE(d, tables[p[(j) + 3]], folded[(j) + 3], at, taken); \
    } while (0)

static void LEVEL(flat)(dense_flat *f, size_t n) {
    const uint32_t *low = f->entries;
    uint32_t la = f->states[0], lb = f->states[1], lc = f->states[2], ld = f->states[3];
    const uint8_t *units = f->at;
    uint8_t *to = f->to;
    while (n) { /* as many as the units that are left will do for, then see how many there are */
        size_t turns = (size_t)(f->end - units) / 8;
        if (turns > n / 4) turns = n / 4;
        if (turns == 0) break;
        uint64_t low_taken = 0;
        for (n -= 4 * turns; turns; --turns) LOW_PARTS();
        units += 2 * low_taken;
    }
    f->states[0] = la, f->states[1] = lb, f->states[2] = lc, f->states[3] = ld;
    f->at = units, f->to = to;
}

static void LEVEL(turn_on)(dense_turning *t, size_t steps) {
    size_t bytes = t->dtype == KVMNN_FP32 ? 4 : 2, half = t->pairs * bytes, all = t->dim * bytes;
    for (; steps && t->heads; --steps) {
        size_t n = t->pairs - t->pair, at = t->pair * bytes;
        const float *c = t->cosines + t->pair, *s = t->sines + t->pair;
        const void *a = t->row + at, *b = t->row + half + at;
        void *to_a = t->turned + at, *to_b = t->turned + half + at;
        if (n > TURNED_PAIRS) n = TURNED_PAIRS;
        if (t->dtype == KVMNN_FP16)
            LEVEL(turn_half)(a, b, n, c, s, to_a, to_b);
        else if (t->dtype == KVMNN_BF16)
            LEVEL(turn_brain)(a, b, n, c, s, to_a, to_b);
        else
            LEVEL(turn_single)(a, b, n, c, s, to_a, to_b);
        t->pair += n;
        if (t->pair < t->pairs) continue;
        memcpy(t->turned + 2 * half, t->row + 2 * half, all - 2 * half);
        t->row += all, t->turned += all, t->pair = 0, --t->heads;
    }
}

/* n symbols, a multiple of 4, and in `both` as many coded low parts; what is behind the units taken. Not inlined: all of
 * it has to be held in registers. Volatile: compilers would make a vector of the states, and all would wait for that. */
static DENSE_APART const uint8_t *LEVEL(symbols)(const uint8_t *p, size_t n, const uint32_t *const tables[256],
                                                 uint32_t states[STATES], const uint8_t *at, uint8_t *folded) {
    volatile uint32_t *held = states;
    uint32_t a = held[0], b = held[1], c = held[2], d = held[3];
    uint64_t taken = 0;
    p += n, folded += n;
    for (ptrdiff_t j = -(ptrdiff_t)n; j < 0; j += 4) SYMBOLS(j);
    held[0] = a, held[1] = b, held[2] = c, held[3] = d;
    return at + 2 * taken;
}

static DENSE_APART const uint8_t *LEVEL(both)(const uint8_t *p, size_t n, const uint32_t *const tables[256],
                                              uint32_t states[STATES], const uint8_t *at, uint8_t *folded,
                                              dense_flat *f) {
    volatile uint32_t *held = states;
    uint32_t a = held[0], b = held[1], c = held[2], d = held[3];
    const uint32_t *low = f->entries;
    volatile uint32_t *low_held = f->states;
    uint32_t la = low_held[0], lb = low_held[1], lc = low_held[2], ld = low_held[3];
    const uint8_t *units = f->at;
    uint8_t *to = f->to;
    uint64_t taken = 0, low_taken = 0;
    p += n, folded += n;
    for (ptrdiff_t j = -(ptrdiff_t)n; j < 0; j += 4) {
        SYMBOLS(j);
        LOW_PARTS();
    }
    low_held[0] = la, low_held[1] = lb, low_held[2] = lc, low_held[3] = ld;
    f->at = units + 2 * low_taken, f->to = to;
    held[0] = a, held[1] = b, held[2] = c, held[3] = d;
    return at + 2 * taken;
}

static void LEVEL(decode)(const uint8_t *p, size_t n, const uint32_t *const tables[256], uint32_t states[STATES],
                          const uint8_t **section, uint8_t *folded, dense_beside *beside) {
    const uint8_t *at = *section;
    size_t j = 0;
    for (; j + STEP <= n; j += STEP) {
        dense_flat *f = beside->flat;
        if (f && (size_t)(f->to_end - f->to) >= STEP && f->end - f->at >= 2 * STEP)
            at = LEVEL(both)(p + j, STEP, tables, states, at, folded + j, f);
        else
            at = LEVEL(symbols)(p + j, STEP, tables, states, at, folded + j);
        if (beside->turning.heads) LEVEL(turn_on)(&beside->turning, STEP / (2 * TURNED_PAIRS));
        for (size_t k = 0; k < beside->stripes && beside->hash.at < beside->hash_end; ++k)
            dense_hash_stripe(&beside->hash);
    }
    *section = LEVEL(symbols)(p + j, n - j, tables, states, at, folded + j);
}

#undef LOW_PARTS
#undef SYMBOLS
#undef DECODE
#undef LEVEL_RENORMALISE
