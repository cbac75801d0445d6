/* The entropy coder: 4 interleaved rANS states of 32 bits, units of 16 bits, static tables of 12 bits. */
#include "transform.h"

#include <string.h>

#define KVMNN_SIMD_KERNELS "transform/transform_impl.h"
#define KVMNN_KERNEL_TABLE transform_kernels
#define KVMNN_USE_AVX512
#include "../simd.h"

const transform_kernels *kvmnn_transform_kernels_at(int level) { return isa_tables[level]; }

enum {
    SCALE = 1 << TRANSFORM_SCALE_BITS,
    NUM_STATES = 4,
    STATES_BYTES = 4 * NUM_STATES,
    ESCAPE_SYMBOL = TRANSFORM_SYMBOLS - 1,
    ESCAPE_BITS = 16,
    MAX_LEVEL = TRANSFORM_TABLES - 1,
    LEVELS_PER_SHIFT = 8
};
static const uint32_t STATE_MIN = 1u << 16;

int kvmnn_transform_tables_are_valid(const uint16_t *frequencies) {
    for (int table = 0; table < TRANSFORM_TABLES; ++table) {
        uint32_t sum = 0;
        int is_valid = frequencies[ESCAPE_SYMBOL] != 0;
        for (int s = 0; s < TRANSFORM_SYMBOLS; ++s) {
            sum += frequencies[s];
            is_valid &= frequencies[s] < SCALE;
        }
        if (!is_valid || sum != SCALE) return 0;
        frequencies += TRANSFORM_SYMBOLS;
    }
    return 1;
}

/* Which table a coefficient has, and how many of its low bits are stored as they are. */
typedef struct {
    uint8_t table, shift;
} table_choice;

static table_choice choose_table(int32_t level) {
    table_choice choice = {0, 0};
    if (level <= 0) return choice;
    int32_t shift = level <= MAX_LEVEL ? 0 : (level - MAX_LEVEL + LEVELS_PER_SHIFT - 1) / LEVELS_PER_SHIFT;
    if (shift > TRANSFORM_MAX_SHIFT) shift = TRANSFORM_MAX_SHIFT;
    level -= shift * LEVELS_PER_SHIFT;
    choice.shift = (uint8_t)shift;
    choice.table = (uint8_t)(level > MAX_LEVEL ? MAX_LEVEL : level);
    return choice;
}

/* The choices of a coefficient for all exponents. */
static void choose_tables(int32_t level, table_choice choices[TRANSFORM_EXPONENTS]) {
    for (int i = 0; i < TRANSFORM_EXPONENTS; ++i)
        choices[i] = choose_table(level - 2 * (i + TRANSFORM_MIN_EXPONENT));
}

static inline size_t get_place(const transform_side *side, size_t row) {
    return side->places ? (size_t)side->places[row] : row;
}

/* -- bits ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *bytes;
    size_t size;
    uint64_t pending;
    unsigned count;
} bit_writer;

static inline void put_bits(bit_writer *w, uint32_t value, unsigned count) {
    w->pending |= (uint64_t)value << w->count;
    w->count += count;
    while (w->count >= 8) {
        w->bytes[w->size++] = (uint8_t)w->pending;
        w->pending >>= 8;
        w->count -= 8;
    }
}

typedef struct {
    const uint8_t *bytes, *end;
    uint64_t pending;
    unsigned count;
} bit_reader;

/* Returns the next bits, or -1 beyond the end. */
static inline int32_t get_bits(bit_reader *r, unsigned count) {
    while (r->count < count) {
        if (r->bytes == r->end) return -1;
        r->pending |= (uint64_t)*r->bytes++ << r->count;
        r->count += 8;
    }
    int32_t value = (int32_t)(r->pending & (((uint64_t)1 << count) - 1));
    r->pending >>= count;
    r->count -= count;
    return value;
}

/* -- encoder ------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t frequency, start;
} code;

/* The state before a symbol was decoded; a unit may be written before `*cursor`, which there is always room for. */
static inline uint32_t put_symbol(uint32_t state, code entry, uint8_t **cursor) {
    uint32_t is_full = state >= entry.frequency << (32 - TRANSFORM_SCALE_BITS);
    (*cursor)[-1] = (uint8_t)(state >> 8);
    (*cursor)[-2] = (uint8_t)state;
    *cursor -= 2 * is_full;
    state = is_full ? state >> 16 : state;
    return (state / entry.frequency << TRANSFORM_SCALE_BITS) + state % entry.frequency + entry.start;
}

size_t kvmnn_transform_encode_capacity(const transform_side *side) {
    return STATES_BYTES + 16 + side->rows * side->n * 4;
}

size_t kvmnn_transform_encode_scratch_bytes(const transform_side *side) {
    return sizeof(code[TRANSFORM_TABLES][TRANSFORM_SYMBOLS]) + side->rows * side->n * sizeof(uint16_t);
}

void kvmnn_transform_encode(const transform_side *side, const int16_t *coefficients, uint8_t *scratch, uint8_t *units,
                            uint8_t *bits, size_t capacity, size_t *units_bytes, size_t *bits_bytes) {
    code *codes = (code *)(void *)scratch;
    uint16_t *symbols = (uint16_t *)(void *)(codes + TRANSFORM_TABLES * TRANSFORM_SYMBOLS);
    bit_writer writer = {bits, 0, 0, 0};
    size_t count = 0;
    for (int table = 0; table < TRANSFORM_TABLES; ++table) {
        uint32_t start = 0;
        for (int s = 0; s < TRANSFORM_SYMBOLS; ++s) {
            uint32_t frequency = side->frequencies[table * TRANSFORM_SYMBOLS + s];
            codes[table * TRANSFORM_SYMBOLS + s] = (code){frequency, start};
            start += frequency;
        }
    }
    for (size_t begin = 0; begin < side->rows; begin += TRANSFORM_BLOCK_ROWS) {
        size_t end = side->rows - begin > TRANSFORM_BLOCK_ROWS ? begin + TRANSFORM_BLOCK_ROWS : side->rows;
        for (size_t c = 0; c < side->n; ++c) {
            table_choice choices[TRANSFORM_EXPONENTS];
            choose_tables(side->levels[c], choices);
            for (size_t t = begin; t < end; ++t) {
                table_choice choice = choices[(side->exponents ? side->exponents[t] : 0) - TRANSFORM_MIN_EXPONENT];
                int32_t q = coefficients[get_place(side, t) * side->n + c];
                int32_t high = (q - (q & ((1 << choice.shift) - 1))) / (1 << choice.shift);
                uint32_t symbol = (uint32_t)(high + TRANSFORM_CENTRE), base = choice.table * TRANSFORM_SYMBOLS;
                if (symbol >= ESCAPE_SYMBOL || codes[base + symbol].frequency == 0) {
                    symbol = ESCAPE_SYMBOL;
                    put_bits(&writer, (uint32_t)q & 0xffff, ESCAPE_BITS);
                } else if (choice.shift) {
                    put_bits(&writer, (uint32_t)q & ((1u << choice.shift) - 1), choice.shift);
                }
                symbols[count++] = (uint16_t)(base + symbol);
            }
        }
    }
    if (writer.count) put_bits(&writer, 0, 8 - writer.count);
    *bits_bytes = writer.size;
    uint32_t states[NUM_STATES];
    for (int i = 0; i < NUM_STATES; ++i) states[i] = STATE_MIN;
    uint8_t *cursor = units + capacity;
    size_t k = count;
    while (k % NUM_STATES) --k, states[k % NUM_STATES] = put_symbol(states[k % NUM_STATES], codes[symbols[k]], &cursor);
    for (; k; k -= NUM_STATES)
        for (size_t i = NUM_STATES; i-- > 0;)
            states[i] = put_symbol(states[i], codes[symbols[k - NUM_STATES + i]], &cursor);
    for (int i = NUM_STATES; i-- > 0;)
        for (int shift = 24; shift >= 0; shift -= 8) *--cursor = (uint8_t)(states[i] >> shift);
    *units_bytes = (size_t)(units + capacity - cursor);
}

/* -- decoder ------------------------------------------------------------------------------------------------------- */

size_t kvmnn_transform_decode_scratch_bytes(void) { return (size_t)TRANSFORM_TABLES * SCALE * sizeof(uint32_t); }

/* symbol << 24 | frequency << 12 | offset; both are below 4096. */
static void build_table(const uint16_t *frequencies, uint32_t *entries) {
    for (uint32_t s = 0; s < TRANSFORM_SYMBOLS; ++s)
        for (uint32_t i = 0; i < frequencies[s]; ++i) *entries++ = s << 24 | (uint32_t)frequencies[s] << 12 | i;
}

/* What a decoder has read. The first state is that of the next coefficient. */
typedef struct {
    uint32_t states[NUM_STATES];
    const uint8_t *cursor, *end;
    bit_reader bits;
    int is_valid;
} coder;

static inline int32_t read_value(coder *d, uint32_t symbol, unsigned shift) {
    if (symbol == ESCAPE_SYMBOL) {
        int32_t raw = get_bits(&d->bits, ESCAPE_BITS);
        d->is_valid &= raw >= 0;
        return raw >= 1 << 15 ? raw - (1 << 16) : raw;
    }
    int32_t q = (int32_t)symbol - TRANSFORM_CENTRE;
    if (shift) {
        int32_t raw = get_bits(&d->bits, shift);
        d->is_valid &= raw >= 0;
        q = q * (1 << shift) + raw;
    }
    return q;
}

static inline uint32_t next_state(uint32_t entry, uint32_t state) {
    return (entry >> 12 & (SCALE - 1)) * (state >> TRANSFORM_SCALE_BITS) + (entry & (SCALE - 1));
}

/* One coefficient, with no unit beyond the end. */
static void decode_one(coder *d, const uint32_t *table, unsigned shift, int16_t *coefficient) {
    uint32_t entry = table[d->states[0] & (SCALE - 1)], state = next_state(entry, d->states[0]);
    if (state < STATE_MIN) {
        if (d->cursor == d->end) {
            d->is_valid = 0;
        } else {
            state = state << 16 | (uint32_t)d->cursor[0] | (uint32_t)d->cursor[1] << 8;
            d->cursor += 2;
        }
    }
    for (int i = 0; i + 1 < NUM_STATES; ++i) d->states[i] = d->states[i + 1];
    d->states[NUM_STATES - 1] = state;
    *coefficient = (int16_t)read_value(d, entry >> 24, shift);
}

/* Takes a unit in where a state is too low, not by a branch, which nobody could foresee. */
#define DECODE_STEP(state, table, entry)                                             \
    do {                                                                             \
        (entry) = (table)[(state) & (SCALE - 1)];                                    \
        uint32_t next_ = next_state((entry), (state)), low_ = next_ < STATE_MIN;     \
        uint32_t with_ = next_ << 16 | (uint32_t)cursor[0] | (uint32_t)cursor[1] << 8; \
        (state) = low_ ? with_ : next_;                                              \
        cursor += 2 * low_;                                                          \
    } while (0)

/* Rows `begin` to `end` of one coefficient. `tables` and `shifts` are by exponent, from the lowest on. */
static void decode_column(coder *d, const transform_side *side, size_t begin, size_t end,
                          const uint32_t *const tables[TRANSFORM_EXPONENTS],
                          const table_choice choices[TRANSFORM_EXPONENTS], int16_t *column) {
    const size_t n = side->n;
    const int8_t *exponents = side->exponents;
    size_t t = begin;
    uint32_t s0 = d->states[0], s1 = d->states[1], s2 = d->states[2], s3 = d->states[3];
    const uint8_t *cursor = d->cursor;
#define INDEX(i) ((exponents ? exponents[t + (i)] : 0) - TRANSFORM_MIN_EXPONENT)
    for (; t + NUM_STATES <= end && d->end - cursor >= 2 * NUM_STATES; t += NUM_STATES) {
        const int i0 = INDEX(0), i1 = INDEX(1), i2 = INDEX(2), i3 = INDEX(3);
        uint32_t e0, e1, e2, e3;
        DECODE_STEP(s0, tables[i0], e0);
        DECODE_STEP(s1, tables[i1], e1);
        DECODE_STEP(s2, tables[i2], e2);
        DECODE_STEP(s3, tables[i3], e3);
        column[get_place(side, t) * n] = (int16_t)read_value(d, e0 >> 24, choices[i0].shift);
        column[get_place(side, t + 1) * n] = (int16_t)read_value(d, e1 >> 24, choices[i1].shift);
        column[get_place(side, t + 2) * n] = (int16_t)read_value(d, e2 >> 24, choices[i2].shift);
        column[get_place(side, t + 3) * n] = (int16_t)read_value(d, e3 >> 24, choices[i3].shift);
    }
    d->states[0] = s0, d->states[1] = s1, d->states[2] = s2, d->states[3] = s3;
    d->cursor = cursor;
    for (; t < end; ++t) decode_one(d, tables[INDEX(0)], choices[INDEX(0)].shift, column + get_place(side, t) * n);
#undef INDEX
}

int kvmnn_transform_decode(const transform_side *side, const uint8_t *units, size_t units_bytes, const uint8_t *bits,
                           size_t bits_bytes, uint8_t *scratch, int16_t *coefficients) {
    uint32_t *entries = (uint32_t *)(void *)scratch, is_used = 0;
    uint8_t is_built[TRANSFORM_TABLES] = {0};
    if (units_bytes < STATES_BYTES || (units_bytes - STATES_BYTES) % 2) return 0;
    coder d = {{0}, units + STATES_BYTES, units + units_bytes, {bits, bits + bits_bytes, 0, 0}, 1};
    for (int i = 0; i < NUM_STATES; ++i) {
        d.states[i] = (uint32_t)units[4 * i] | (uint32_t)units[4 * i + 1] << 8 | (uint32_t)units[4 * i + 2] << 16 |
                      (uint32_t)units[4 * i + 3] << 24;
        if (d.states[i] < STATE_MIN) return 0;
    }
    for (size_t t = 0; t < side->rows && side->exponents; ++t)
        is_used |= (uint32_t)1 << (side->exponents[t] - TRANSFORM_MIN_EXPONENT);
    if (!side->exponents) is_used = (uint32_t)1 << -TRANSFORM_MIN_EXPONENT;
    for (size_t begin = 0; begin < side->rows; begin += TRANSFORM_BLOCK_ROWS) {
        size_t end = side->rows - begin > TRANSFORM_BLOCK_ROWS ? begin + TRANSFORM_BLOCK_ROWS : side->rows;
        for (size_t c = 0; c < side->n && d.is_valid; ++c) {
            table_choice choices[TRANSFORM_EXPONENTS];
            const uint32_t *tables[TRANSFORM_EXPONENTS];
            choose_tables(side->levels[c], choices);
            for (int i = 0; i < TRANSFORM_EXPONENTS; ++i) {
                uint32_t *table = entries + (size_t)choices[i].table * SCALE;
                tables[i] = table;
                if ((is_used >> i & 1) && !is_built[choices[i].table]) {
                    build_table(side->frequencies + choices[i].table * TRANSFORM_SYMBOLS, table);
                    is_built[choices[i].table] = 1;
                }
            }
            decode_column(&d, side, begin, end, tables, choices, coefficients + c);
        }
    }
    for (int i = 0; i < NUM_STATES; ++i) d.is_valid &= d.states[i] == STATE_MIN;
    return d.is_valid && d.cursor == d.end && d.bits.bytes == d.bits.end && d.bits.count < 8 && d.bits.pending == 0;
}
