/* The dense stream (docs/format-v2.md): what its C files share.
 *
 * Nothing here allocates: callers hand over one piece of memory, from which an arena gives aligned parts.
 */
#ifndef KVMNN_DENSE_H
#define KVMNN_DENSE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { KVMNN_FP16, KVMNN_BF16, KVMNN_FP32 };

enum {
    SIMILARITY_CLASSES = 5,
    COPY_CLASS = 7, /* in place of a similarity class */
    MAGNITUDES = 128,
    CONTEXTS = SIMILARITY_CLASSES * MAGNITUDES,
    MAX_TABLES = 64,
    SCALE_BITS = 11,
    SCALE = 1 << SCALE_BITS,
    NUM_STATES = 4,
    RANS_LOWER_BOUND = 1 << 15,
    ESCAPE_SYMBOL = 127,
    EXPONENT_WINDOW = 31, /* exponents of bf16 and fp32 that a symbol can hold */
    MAX_BASE = 224,
    MAX_HISTORY_ROWS = 256,
    MAX_ROWS = 1 << 24,
    MAX_POSITION = 0x7fffffff,
    PAD_BYTES = 64, /* bytes that loops may read or write after a part */
};

/* What went wrong with a stream; the texts are in _stream.pyx, in this order. */
typedef enum {
    DENSE_OK,
    DENSE_HEAD,      /* the head's bit string is too short, too long, or its last bits are not 0 */
    DENSE_ROTARY,    /* rotary parameters */
    DENSE_POSITION,  /* positions */
    DENSE_MODEL,     /* tables */
    DENSE_REFERENCE, /* similarity classes or references */
    DENSE_SIZES,     /* sections that do not fit */
    DENSE_STATE,     /* entropy coder's states or units */
    DENSE_ESCAPE,    /* escapes and exponents */
    DENSE_LOW,       /* low parts */
    DENSE_CHECKSUM,
} dense_error;

typedef struct {
    int dtype, base;
    uint32_t heads, dim;
    size_t words; /* of a row */
    size_t word_bytes;
} dense_shape;

typedef struct {
    uint32_t dims; /* words of a head that are rotated, 0 for none */
    int interleaved;
    const uint64_t *frequencies; /* dims / 2, turns per position times 2^64 */
} dense_rotary;

typedef struct {
    uint16_t frequencies[256];
} dense_table;

typedef struct {
    int num_tables;
    uint8_t context_tables[CONTEXTS];
    uint8_t low_mask; /* similarity classes with a table of low parts */
    dense_table symbol_tables[MAX_TABLES];
    dense_table low_tables[SIMILARITY_CLASSES];
} dense_model;

typedef struct {
    uint64_t reciprocal_52; /* reciprocal times 2^52 */
    uint32_t reciprocal;
    uint16_t start;   /* with ESCAPE_MARK in codes of escapes, which are those of symbols without a frequency */
    uint16_t f_shift; /* frequency << 4 | shift of the reciprocal; 0: the symbol cannot be coded */
} dense_code;

enum { CODE_BYTES = sizeof(dense_code), START_MASK = 2 * SCALE - 1, ESCAPE_MARK = 1 << 15 };

/* History rows and own rows as one sequence. */
typedef struct {
    const uint8_t *history, *own;
    size_t history_rows, rows, row_bytes; /* rows: own ones */
} dense_rows;

static inline const uint8_t *dense_row(const dense_rows *r, size_t i) {
    return i < r->history_rows ? r->history + i * r->row_bytes : r->own + (i - r->history_rows) * r->row_bytes;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *cursor, *end; /* NULL: only counts */
    size_t used_bytes;
} dense_arena;

static inline size_t arena_align(size_t n) { return (n + PAD_BYTES + 63) & ~(size_t)63; }

/* `n` bytes and PAD_BYTES more. The caller has asked for as much as is taken: there is no failure. */
static inline void *arena_alloc(dense_arena *a, size_t n) {
    uint8_t *p = a->cursor;
    a->used_bytes += arena_align(n);
    if (a->cursor) a->cursor += arena_align(n);
    return p;
}

/* -- bits, lowest first -------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *cursor;
    uint64_t pending;
    unsigned num_pending;
} bitwriter;

/* At most 32; 8 bytes after are touched. */
static inline void bitwriter_put(bitwriter *w, uint32_t value, unsigned bits) {
    w->pending |= (uint64_t)value << w->num_pending;
    w->num_pending += bits;
    memcpy(w->cursor, &w->pending, 8);
    w->cursor += w->num_pending >> 3;
    w->pending >>= w->num_pending & ~7u;
    w->num_pending &= 7;
}

static inline uint8_t *bitwriter_finish(bitwriter *w) {
    if (w->num_pending) *w->cursor++ = (uint8_t)w->pending;
    return w->cursor;
}

typedef struct {
    const uint8_t *cursor, *end;
    uint64_t pending;
    unsigned num_pending;
    int overrun; /* more was read than there is: all reads give 0 from then on */
} bitreader;

/* Has at least `bits` in `pending`, as far as there are any. */
static inline void bitreader_fill(bitreader *r, unsigned bits) { /* at most 32 */
    if (r->num_pending >= bits) return;
    if (r->end - r->cursor >= 8) {
        uint64_t next;
        unsigned bytes = (63 - r->num_pending) >> 3; /* at most 7 */
        memcpy(&next, r->cursor, 8);
        r->pending |= (next & (((uint64_t)1 << 8 * bytes) - 1)) << r->num_pending;
        r->cursor += bytes;
        r->num_pending += 8 * bytes;
        return;
    }
    for (; r->num_pending < bits && r->cursor != r->end; r->num_pending += 8)
        r->pending |= (uint64_t)*r->cursor++ << r->num_pending;
}

/* The next bits, which stay; after the end there are zeros. */
static inline uint32_t bitreader_peek(bitreader *r, unsigned bits) {
    bitreader_fill(r, bits);
    return (uint32_t)(r->pending & (((uint64_t)1 << bits) - 1));
}

/* Of bits that were peeked. */
static inline void bitreader_skip(bitreader *r, unsigned bits) {
    if (r->num_pending < bits) {
        r->overrun = 1;
        r->pending = 0, r->num_pending = 0;
        return;
    }
    r->pending >>= bits;
    r->num_pending -= bits;
}

static inline uint32_t bitreader_get(bitreader *r, unsigned bits) { /* at most 32 */
    uint32_t value = bitreader_peek(r, bits);
    bitreader_skip(r, bits);
    return r->overrun ? 0 : value;
}

/* Whether all bytes were needed, and what is left of the last one is 0. */
static inline int bitreader_is_exhausted(const bitreader *r) {
    return !r->overrun && r->cursor == r->end && r->num_pending < 8 && r->pending == 0;
}

static inline unsigned dense_high_bit(uint32_t x) { /* x is not 0 */
#if defined(__GNUC__)
    return 31u - (unsigned)__builtin_clz(x);
#else
    unsigned n = 0;
    while (x >>= 1) ++n;
    return n;
#endif
}

/* Bits that a number takes: 0 for 0. */
static inline unsigned dense_bit_width(uint32_t x) { return x ? dense_high_bit(x) + 1 : 0; }

/* A `number` of the format; below 2^32 - 1. */
static inline void bitwriter_put_number(bitwriter *w, uint32_t value) {
    unsigned k = dense_high_bit(value + 1);
    bitwriter_put(w, k, 5);
    bitwriter_put(w, value + 1 - ((uint32_t)1 << k), k);
}

static inline uint32_t bitreader_get_number(bitreader *r) {
    unsigned k = bitreader_get(r, 5);
    return ((uint32_t)1 << k) - 1 + bitreader_get(r, k);
}

static inline uint16_t dense_load16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static inline uint32_t dense_load32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* -- the files ----------------------------------------------------------------------------------------------------- */

uint64_t kvmnn_xxh64(const uint8_t *p, size_t n, uint64_t seed);

/* header_fields.c: what the head's bit string holds next to the model. */
void dense_write_rotary(bitwriter *w, const dense_rotary *rotary);
dense_error dense_read_rotary(bitreader *r, uint32_t dim, uint64_t *frequencies, dense_rotary *rotary);
void dense_write_positions(bitwriter *w, const uint32_t *positions, size_t n);
dense_error dense_read_positions(bitreader *r, uint32_t *positions, size_t n);
void dense_write_row_references(bitwriter *w, size_t history, size_t rows, const uint8_t *similarity_classes,
                                const uint32_t *references);
dense_error dense_read_row_references(bitreader *r, size_t history, size_t rows, uint8_t *similarity_classes,
                                      uint32_t *references);

/* frequency_tables.c */
void dense_quantize_frequencies(const uint32_t counts[256], dense_table *t); /* to numbers that can be written ... */
void dense_write_model(bitwriter *w, const dense_model *m);
int dense_normalize(dense_table *t); /* ... and to those of sum SCALE; 0 if there are none */
void dense_normalize_model(dense_model *m);
dense_error dense_read_model(bitreader *r, dense_model *m); /* normalized */

/* rans.c */
/* Codes of frequencies, each at a place of its first three bits: divisions that need not be done again. */
typedef struct {
    uint16_t frequencies[4 * SCALE_BITS];
    dense_code codes[4 * SCALE_BITS];
} dense_code_cache;

void dense_build_encoder_table(const dense_table *t, dense_code_cache *cache, dense_code codes[256]);
void dense_mark_escapes(dense_code codes[256]);
void dense_build_decoder_table(const dense_table *t, uint32_t entries[SCALE]);

#endif
