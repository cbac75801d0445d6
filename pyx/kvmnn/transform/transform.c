/* The entropy coder: 4 interleaved rANS states of 32 bits, units of 16 bits, static tables of 12 bits. */
#include "transform.h"

#include <string.h>

#define KVMNN_SIMD_KERNELS "transform/transform_impl.h"
#define KVMNN_KERNEL_TABLE transform_kernels
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
                int32_t q = coefficients[t * side->n + c];
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
    for (size_t k = count; k-- > 0;) {
        code entry = codes[symbols[k]];
        uint32_t state = states[k % NUM_STATES];
        if (state >= entry.frequency << (32 - TRANSFORM_SCALE_BITS)) {
            *--cursor = (uint8_t)(state >> 8);
            *--cursor = (uint8_t)state;
            state >>= 16;
        }
        states[k % NUM_STATES] =
            (state / entry.frequency << TRANSFORM_SCALE_BITS) + state % entry.frequency + entry.start;
    }
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

int kvmnn_transform_decode(const transform_side *side, const uint8_t *units, size_t units_bytes, const uint8_t *bits,
                           size_t bits_bytes, uint8_t *scratch, int16_t *coefficients) {
    uint32_t *entries = (uint32_t *)(void *)scratch, states[NUM_STATES];
    uint8_t is_built[TRANSFORM_TABLES] = {0};
    bit_reader reader = {bits, bits + bits_bytes, 0, 0};
    if (units_bytes < STATES_BYTES || (units_bytes - STATES_BYTES) % 2) return 0;
    const uint8_t *cursor = units + STATES_BYTES, *units_end = units + units_bytes;
    for (int i = 0; i < NUM_STATES; ++i) {
        states[i] = (uint32_t)units[4 * i] | (uint32_t)units[4 * i + 1] << 8 | (uint32_t)units[4 * i + 2] << 16 |
                    (uint32_t)units[4 * i + 3] << 24;
        if (states[i] < STATE_MIN) return 0;
    }
    size_t k = 0;
    for (size_t begin = 0; begin < side->rows; begin += TRANSFORM_BLOCK_ROWS) {
        size_t end = side->rows - begin > TRANSFORM_BLOCK_ROWS ? begin + TRANSFORM_BLOCK_ROWS : side->rows;
        for (size_t c = 0; c < side->n; ++c) {
            table_choice choices[TRANSFORM_EXPONENTS];
            choose_tables(side->levels[c], choices);
            for (size_t t = begin; t < end; ++t, ++k) {
                table_choice choice = choices[(side->exponents ? side->exponents[t] : 0) - TRANSFORM_MIN_EXPONENT];
                uint32_t *table = entries + (size_t)choice.table * SCALE, state = states[k % NUM_STATES];
                if (!is_built[choice.table]) {
                    build_table(side->frequencies + choice.table * TRANSFORM_SYMBOLS, table);
                    is_built[choice.table] = 1;
                }
                uint32_t entry = table[state & (SCALE - 1)], symbol = entry >> 24;
                state = (entry >> 12 & (SCALE - 1)) * (state >> TRANSFORM_SCALE_BITS) + (entry & (SCALE - 1));
                if (state < STATE_MIN) {
                    if (cursor == units_end) return 0;
                    state = state << 16 | (uint32_t)cursor[0] | (uint32_t)cursor[1] << 8;
                    cursor += 2;
                }
                states[k % NUM_STATES] = state;
                int32_t q = (int32_t)symbol - TRANSFORM_CENTRE;
                if (symbol == ESCAPE_SYMBOL) {
                    int32_t raw = get_bits(&reader, ESCAPE_BITS);
                    if (raw < 0) return 0;
                    q = raw >= 1 << 15 ? raw - (1 << 16) : raw;
                } else if (choice.shift) {
                    int32_t raw = get_bits(&reader, choice.shift);
                    if (raw < 0) return 0;
                    q = q * (1 << choice.shift) + raw;
                }
                coefficients[t * side->n + c] = (int16_t)q;
            }
        }
    }
    for (int i = 0; i < NUM_STATES; ++i)
        if (states[i] != STATE_MIN) return 0;
    return cursor == units_end && reader.bytes == reader.end && reader.count < 8 && reader.pending == 0;
}
