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
    BUCKETS = 5,
    COPY = 7, /* in place of a bucket */
    MAGNITUDES = 128,
    CONTEXTS = BUCKETS * MAGNITUDES,
    MOST_TABLES = 64,
    SCALE_BITS = 11,
    SCALE = 1 << SCALE_BITS,
    STATES = 4,
    STATE_LOW = 1 << 15,
    ESCAPE = 127,
    WINDOW = 31, /* exponents of bf16 and fp32 that a symbol can hold */
    MOST_BASE = 224,
    MOST_HISTORY = 256,
    MOST_ROWS = 1 << 24,
    MOST_POSITION = 0x7fffffff,
    PAD = 64, /* bytes that loops may read or write behind a part */
};

/* What went wrong with a stream; the texts are in _stream.pyx, in this order. */
typedef enum {
    DENSE_OK,
    DENSE_HEAD,      /* the head's bit string is too short, too long, or its last bits are not 0 */
    DENSE_ROTARY,    /* rotary parameters */
    DENSE_POSITION,  /* positions */
    DENSE_MODEL,     /* tables */
    DENSE_REFERENCE, /* buckets or references */
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
    uint16_t f[256];
} dense_table;

typedef struct {
    int tables;
    uint8_t map[CONTEXTS];
    uint8_t low_mask; /* buckets with a table of low parts */
    dense_table symbols[MOST_TABLES];
    dense_table low[BUCKETS];
} dense_model;

typedef struct {
    uint64_t wide; /* reciprocal times 2^52 */
    uint32_t reciprocal;
    uint16_t start;   /* with ESCAPE_MARK in codes of escapes, which are those of symbols without a frequency */
    uint16_t f_shift; /* frequency << 4 | shift of the reciprocal; 0: the symbol cannot be coded */
} dense_code;

enum { CODE_BYTES = sizeof(dense_code), STARTS = 2 * SCALE - 1, ESCAPE_MARK = 1 << 15 };

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
    uint8_t *at, *end; /* NULL: only counts */
    size_t used;
} dense_arena;

static inline size_t dense_aligned(size_t n) { return (n + PAD + 63) & ~(size_t)63; }

/* `n` bytes and PAD more. The caller has asked for as much as is taken: there is no failure. */
static inline void *dense_take(dense_arena *a, size_t n) {
    uint8_t *p = a->at;
    a->used += dense_aligned(n);
    if (a->at) a->at += dense_aligned(n);
    return p;
}

/* -- bits, lowest first -------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *at;
    uint64_t held;
    unsigned count;
} dense_writer;

/* At most 32; 8 bytes behind are touched. */
static inline void dense_put(dense_writer *w, uint32_t value, unsigned bits) {
    w->held |= (uint64_t)value << w->count;
    w->count += bits;
    memcpy(w->at, &w->held, 8);
    w->at += w->count >> 3;
    w->held >>= w->count & ~7u;
    w->count &= 7;
}

static inline uint8_t *dense_put_end(dense_writer *w) {
    if (w->count) *w->at++ = (uint8_t)w->held;
    return w->at;
}

typedef struct {
    const uint8_t *at, *end;
    uint64_t held;
    unsigned count;
    int over; /* more was read than there is: all reads give 0 from then on */
} dense_reader;

/* Has at least `bits` in `held`, as far as there are any. */
static inline void dense_fill(dense_reader *r, unsigned bits) { /* at most 32 */
    if (r->count >= bits) return;
    if (r->end - r->at >= 8) {
        uint64_t next;
        unsigned bytes = (63 - r->count) >> 3; /* at most 7 */
        memcpy(&next, r->at, 8);
        r->held |= (next & (((uint64_t)1 << 8 * bytes) - 1)) << r->count;
        r->at += bytes;
        r->count += 8 * bytes;
        return;
    }
    for (; r->count < bits && r->at != r->end; r->count += 8) r->held |= (uint64_t)*r->at++ << r->count;
}

/* The next bits, which stay; behind the end there are zeros. */
static inline uint32_t dense_peek(dense_reader *r, unsigned bits) {
    dense_fill(r, bits);
    return (uint32_t)(r->held & (((uint64_t)1 << bits) - 1));
}

/* Of bits that were peeked. */
static inline void dense_skip(dense_reader *r, unsigned bits) {
    if (r->count < bits) {
        r->over = 1;
        r->held = 0, r->count = 0;
        return;
    }
    r->held >>= bits;
    r->count -= bits;
}

static inline uint32_t dense_get(dense_reader *r, unsigned bits) { /* at most 32 */
    uint32_t value = dense_peek(r, bits);
    dense_skip(r, bits);
    return r->over ? 0 : value;
}

/* Whether all bytes were needed, and what is left of the last one is 0. */
static inline int dense_got_all(const dense_reader *r) {
    return !r->over && r->at == r->end && r->count < 8 && r->held == 0;
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
static inline unsigned dense_width(uint32_t x) { return x ? dense_high_bit(x) + 1 : 0; }

/* A `number` of the format; below 2^32 - 1. */
static inline void dense_put_number(dense_writer *w, uint32_t value) {
    unsigned k = dense_high_bit(value + 1);
    dense_put(w, k, 5);
    dense_put(w, value + 1 - ((uint32_t)1 << k), k);
}

static inline uint32_t dense_get_number(dense_reader *r) {
    unsigned k = dense_get(r, 5);
    return ((uint32_t)1 << k) - 1 + dense_get(r, k);
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

/* head.c: what the head's bit string holds beside the model. */
void dense_put_rotary(dense_writer *w, const dense_rotary *rotary);
dense_error dense_get_rotary(dense_reader *r, uint32_t dim, uint64_t *frequencies, dense_rotary *rotary);
void dense_put_positions(dense_writer *w, const uint32_t *positions, size_t n);
dense_error dense_get_positions(dense_reader *r, uint32_t *positions, size_t n);
void dense_put_rows(dense_writer *w, size_t history, size_t rows, const uint8_t *buckets, const uint32_t *references);
dense_error dense_get_rows(dense_reader *r, size_t history, size_t rows, uint8_t *buckets, uint32_t *references);

/* tables.c */
void dense_quantise(const uint32_t counts[256], dense_table *t); /* to numbers that can be written ... */
void dense_put_model(dense_writer *w, const dense_model *m);
int dense_settle(dense_table *t); /* ... and to those of sum SCALE; 0 if there are none */
void dense_settle_model(dense_model *m);
dense_error dense_get_model(dense_reader *r, dense_model *m); /* settled */

/* rans.c */
/* Codes of frequencies, each at a place of its first three bits: divisions that need not be done again. */
typedef struct {
    uint16_t f[4 * SCALE_BITS];
    dense_code codes[4 * SCALE_BITS];
} dense_known_codes;

void dense_encoder_table(const dense_table *t, dense_known_codes *known, dense_code codes[256]);
void dense_mark_escapes(dense_code codes[256]);
void dense_decoder_table(const dense_table *t, uint32_t entries[SCALE]);

#endif
