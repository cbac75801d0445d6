#include "zstd_writer.h"

#include "huffman.h"

#ifndef KVMNN_BLOCK
#define KVMNN_BLOCK (128 << 10) /* guided fuzzing has smaller ones, to see many of them in little time */
#endif

enum {
    BLOCK = KVMNN_BLOCK,
    RAW = 0,
    RLE = 1,
    COMPRESSED = 2,
    MIN_MATCH = 3,
    SEQUENCES = BLOCK / 3 + 4,
    LITERALS_HEADER = 3, /* of 4096 literals or more that are as they are */
    COPY = 32, /* bytes that are copied at a time, of which some are too many */
};

/* -- numbers as a code and extra bits --------------------------------------------------------------------------------- */

static const int8_t LITERAL_LENGTHS[] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2,  2,
                                         2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
static const int8_t MATCH_LENGTHS[] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1,  1,  1,  1,
                                       1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,
                                       1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};
static const int8_t OFFSETS[] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1,
                                 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};

typedef struct {
    uint8_t code, bits;
    uint32_t extra;
} number;

static number literal_length(uint32_t n) {
    static const uint8_t codes[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 16, 17, 17, 18, 18,
                                      19, 19, 20, 20, 20, 20, 21, 21, 21, 21, 22, 22, 22, 22, 22, 22, 22, 22, 23, 23, 23, 23,
                                      23, 23, 23, 23, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24};
    static const uint8_t bits[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4};
    if (n < 64) return (number){codes[n], bits[codes[n]], n & ((1u << bits[codes[n]]) - 1)};
    int high = kvmnn_high_bit(n);
    return (number){(uint8_t)(high + 19), (uint8_t)high, n - (1u << high)};
}

static number match_length(uint32_t n) {
    static const uint8_t codes[128] = {
        0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25,
        26, 27, 28, 29, 30, 31, 32, 32, 33, 33, 34, 34, 35, 35, 36, 36, 36, 36, 37, 37, 37, 37, 38, 38, 38, 38,
        38, 38, 38, 38, 39, 39, 39, 39, 39, 39, 39, 39, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40,
        40, 40, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 42, 42, 42, 42, 42, 42, 42, 42,
        42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42};
    static const uint8_t bits[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5};
    n -= MIN_MATCH;
    if (n < 128) return (number){codes[n], bits[codes[n]], n & ((1u << bits[codes[n]]) - 1)};
    int high = kvmnn_high_bit(n);
    return (number){(uint8_t)(high + 36), (uint8_t)high, n - (1u << high)};
}

static number offset(uint32_t value) {
    int high = kvmnn_high_bit(value);
    return (number){(uint8_t)high, (uint8_t)high, value - (1u << high)};
}

void kvmnn_sequence_tables_init(kvmnn_sequence_tables *tables) {
    kvmnn_fse_build(&tables->literal_lengths, LITERAL_LENGTHS, sizeof LITERAL_LENGTHS, 6);
    kvmnn_fse_build(&tables->match_lengths, MATCH_LENGTHS, sizeof MATCH_LENGTHS, 6);
    kvmnn_fse_build(&tables->offsets, OFFSETS, sizeof OFFSETS, 5);
}

/* -- what a frame keeps from block to block --------------------------------------------------------------------------- */

typedef struct {
    uint64_t extra; /* bits of the literals' length, of the match's above these, and of the offset's above both */
    uint8_t bits, literals, match, offset; /* how many they are, and the codes */
} sequence;

typedef struct {
    const kvmnn_sequence_tables *tables;
    kvmnn_huffman codes[2];
    int current;         /* which of them the last compressed block used */
    kvmnn_huffman_pairs pairs;
    uint32_t distance;   /* the last one */
    const kvmnn_repeat *next, *end;
    uint32_t done;       /* of the next repeat, in blocks before */
    int flat;            /* literals are as they are */
    int level;           /* of SIMD */
    sequence sequences[SEQUENCES];
    uint8_t literals[BLOCK + COPY];
    uint32_t counts[4][256];
} state;

size_t kvmnn_zstd_scratch(void) { return sizeof(state); }

size_t kvmnn_zstd_bound(size_t n) { return n + (n / BLOCK + 1) * 3 + 2 * (size_t)BLOCK + 256; }

static uint8_t *put_le(uint8_t *dst, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) dst[i] = (uint8_t)(value >> 8 * i);
    return dst + bytes;
}

static uint8_t *put_block(uint8_t *dst, int kind, size_t size, int last) {
    return put_le(dst, (uint64_t)size << 3 | (uint64_t)kind << 1 | (uint64_t)last, 3);
}

uint8_t *kvmnn_zstd_header(uint8_t *dst, size_t n) {
    int form = n < 256 ? 0 : n < 65536 + 256 ? 1 : n <= 0xffffffffu ? 2 : 3;
    dst = put_le(dst, 0xFD2FB528u, 4);
    *dst++ = (uint8_t)(form << 6 | 32);
    return put_le(dst, form == 1 ? n - 256 : n, 1 << form);
}

uint8_t *kvmnn_zstd_raw_block(uint8_t *dst, size_t size, int last) { return put_block(dst, RAW, size, last); }

/* -- one block -------------------------------------------------------------------------------------------------------- */

static inline sequence sequence_of(uint32_t gap, uint32_t length, uint32_t coded_offset) {
    number literals = literal_length(gap), match = match_length(length), distance = offset(coded_offset);
    unsigned lengths = (unsigned)literals.bits + match.bits;
    uint64_t extra = literals.extra | match.extra << literals.bits | (uint64_t)distance.extra << lengths;
    return (sequence){extra, (uint8_t)(lengths + distance.bits), literals.code, match.code, distance.code};
}

/* The literals of a block, where they lie or copied together in `room`, and its sequences; returns how many literals there
 * are. COPY bytes can be read from any place on that is before a match. */
static size_t split(state *s, const uint8_t *src, size_t begin, size_t end, uint8_t *room, const uint8_t **literals,
                    size_t *sequences) {
    size_t at = begin, n = 0, count = 0;
    while (s->next < s->end && s->next->at + s->done < end) {
        size_t from = s->next->at + s->done, left = s->next->length - s->done;
        size_t match = left < end - from ? left : end - from, gap = from - at;
        s->done = match == left ? 0 : s->done + (uint32_t)match;
        if (match >= MIN_MATCH) {
            uint32_t distance = s->next->distance;
            for (size_t i = 0; i < gap; i += COPY) memcpy(room + n + i, src + at + i, COPY);
            n += gap;
            /* offsets 1 to 3 are the last ones; the very last is no choice where no literal came between */
            uint32_t coded = distance == s->distance && gap ? 1 : distance + 3;
            s->sequences[count++] = sequence_of((uint32_t)gap, (uint32_t)match, coded);
            s->distance = distance;
            at = from + match;
        }
        s->next += s->done == 0;
    }
    *sequences = count;
    *literals = count ? room : src + begin;
    if (count) memcpy(room + n, src + at, end - at);
    return n + (end - at);
}

static void add_counts(uint32_t counts[4][256], const uint8_t *literals, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t x;
        memcpy(&x, literals + i, 8);
        ++counts[0][x & 255];
        ++counts[1][x >> 8 & 255];
        ++counts[2][x >> 16 & 255];
        ++counts[3][x >> 24 & 255];
        ++counts[0][x >> 32 & 255];
        ++counts[1][x >> 40 & 255];
        ++counts[2][x >> 48 & 255];
        ++counts[3][x >> 56];
    }
    for (; i < n; ++i) ++counts[0][literals[i]];
}

static void count_literals(state *s, const uint8_t *literals, size_t n) {
    uint32_t(*counts)[256] = s->counts;
    memset(counts, 0, sizeof s->counts);
    add_counts(counts, literals, n);
    for (int b = 0; b < 256; ++b) counts[0][b] += counts[1][b] + counts[2][b] + counts[3][b];
}

/* About how many there are of each literal, by one quarter or another of every 128; what has escaped these is looked for,
 * as each must have a code. */
static void estimate_literals(state *s, const uint8_t *literals, size_t n) {
    enum { LOOK = 32, QUARTERS = 4, RARE = 2 };
    uint32_t(*counts)[256] = s->counts;
    uint8_t known[256];
    memset(counts, 0, sizeof s->counts);
    for (size_t i = 0; i + QUARTERS * LOOK <= n; i += QUARTERS * LOOK) {
        uint32_t quarter = (uint32_t)i * 0x9E3779B1u >> 30;
        add_counts(counts, literals + i + quarter * LOOK, LOOK);
    }
    for (int b = 0; b < 256; ++b) {
        counts[0][b] = QUARTERS * (counts[0][b] + counts[1][b] + counts[2][b] + counts[3][b]);
        known[b] = counts[0][b] != 0;
    }
    for (size_t i = 0; (i = kvmnn_huffman_unknown(s->level, known, literals, i, n)) < n;) {
        known[literals[i]] = 1;
        counts[0][literals[i]] = RARE;
    }
}

/* Header of the section of literals: kind, number, and for coded ones their bytes. */
static uint8_t *put_literals_header(uint8_t *dst, int kind, size_t n, size_t coded) {
    if (kind <= RLE) {
        if (n < 32) return put_le(dst, (uint64_t)kind | n << 3, 1);
        if (n < 4096) return put_le(dst, (uint64_t)kind | 4 | n << 4, 2);
        return put_le(dst, (uint64_t)kind | 12 | n << 4, 3);
    }
    int form = n < 256 ? 0 : n < 1024 ? 1 : n < 16384 ? 2 : 3, width = form < 2 ? 10 : form == 2 ? 14 : 18;
    uint64_t value = (uint64_t)kind | (uint64_t)form << 2 | (uint64_t)n << 4 | (uint64_t)coded << (4 + width);
    return put_le(dst, value, form < 2 ? 3 : form == 2 ? 4 : 5);
}

static uint8_t *put_raw_literals(const uint8_t *literals, size_t n, uint8_t *dst) {
    dst = put_literals_header(dst, RAW, n, 0);
    if (dst != literals) memmove(dst, literals, n);
    return dst + n;
}

/* log2 of n in 256ths, not above it. */
static uint64_t log2_of(uint32_t n) {
    int high = kvmnn_high_bit(n);
    uint32_t next = (high < 8 ? n << (8 - high) : n >> (high - 8)) & 255;
    return (uint64_t)high << 8 | next;
}

/* Bits that a new code would hardly come below, its description included. */
static size_t least_cost(const uint32_t counts[256], size_t n) {
    enum { DESCRIPTION = 8 * 64 };
    uint64_t all = log2_of((uint32_t)n), sum = 0;
    for (int b = 0; b < 256; ++b)
        if (counts[b]) sum += counts[b] * (all - log2_of(counts[b]));
    return (size_t)((sum >> 8) + (sum >> 15)) + DESCRIPTION;
}

static int is_single(const uint32_t counts[256]) {
    int kinds = 0;
    for (int b = 0; b < 256; ++b) kinds += counts[b] != 0;
    return kinds == 1;
}

static uint8_t *put_literals(state *s, const uint8_t *literals, size_t n, uint8_t *dst) {
    enum { LEAST = 64, MANY = BLOCK / 8, TREELESS = 3, WORTH = 64 }; /* one byte in so many is to be saved */
    if (n < LEAST || s->flat) return put_raw_literals(literals, n, dst);
    if (n < MANY) count_literals(s, literals, n);
    else estimate_literals(s, literals, n);
    const uint32_t *counts = s->counts[0];
    if (is_single(counts)) {
        dst = put_literals_header(dst, RLE, n, 0);
        *dst++ = literals[0];
        return dst;
    }
    kvmnn_huffman *fresh = &s->codes[!s->current];
    size_t cost = kvmnn_huffman_cost(&s->codes[s->current], counts), fresh_cost = SIZE_MAX;
    int treeless = 1;
    if (cost > least_cost(counts, n)) { /* a new code may be worth its description, and the time to make it */
        if (s->pairs.made_of == fresh) s->pairs.made_of = NULL;
        if (kvmnn_huffman_build(fresh, counts)) fresh_cost = kvmnn_huffman_cost(fresh, counts) + 8 * fresh->header_size;
        treeless = cost <= fresh_cost;
        cost = treeless ? cost : fresh_cost;
    }
    if (cost == SIZE_MAX || cost / 8 + n / WORTH + 16 >= n) return put_raw_literals(literals, n, dst);
    int streams = n < 256 ? 1 : 4;
    size_t header = n < 1024 ? 3 : n < 16384 ? 4 : 5;
    uint8_t *at = dst + header;
    if (!treeless) {
        s->current = !s->current;
        memcpy(at, fresh->header, fresh->header_size);
        at += fresh->header_size;
    }
    at += kvmnn_huffman_write(s->level, &s->codes[s->current], &s->pairs, literals, n, streams, at);
    put_literals_header(dst, treeless ? TREELESS : COMPRESSED, n, (size_t)(at - dst) - header);
    return at;
}

/* A table for one of the three numbers of all sequences, and what has to be said of it: its kind for the modes byte. */
static int choose(kvmnn_fse *table, const kvmnn_fse *predefined, const uint32_t *counts, size_t n, unsigned first,
                  uint8_t **dst) {
    enum { WORTH_TELLING = 48, SINGLE = 1, FITTED = 2 };
    if (n < WORTH_TELLING) {
        *table = *predefined;
        return 0;
    }
    if (counts[first] == n) {
        kvmnn_fse_single(table, first);
        *(*dst)++ = (uint8_t)first;
        return SINGLE;
    }
    *dst += kvmnn_fse_fit(table, counts, KVMNN_FSE_SYMBOLS, n, *dst);
    return FITTED;
}

static inline void put_extra(kvmnn_bits *out, uint64_t extra, unsigned bits) {
    enum { AT_ONCE = 56, LOW = 32 };
    if (bits > AT_ONCE) {
        kvmnn_bits_add(out, extra & 0xffffffff, LOW);
        kvmnn_bits_flush(out);
        extra >>= LOW;
        bits -= LOW;
    }
    kvmnn_bits_add(out, extra, bits);
    kvmnn_bits_flush(out);
}

static uint8_t *put_sequences(state *s, size_t n, uint8_t *dst) {
    enum { LONG = 0x7f00 };
    const sequence *last = s->sequences + n - 1;
    kvmnn_fse lengths, offsets, matches;
    uint32_t counts[3][KVMNN_FSE_SYMBOLS] = {{0}};
    if (n < 128) dst = put_le(dst, n, 1);
    else if (n < LONG) dst = put_le(dst, (128 + (n >> 8)) | (n & 255) << 8, 2);
    else dst = put_le(dst, 255 | (n - LONG) << 8, 3);
    if (n == 0) return dst;
    for (size_t i = 0; i < n; ++i) {
        ++counts[0][s->sequences[i].literals];
        ++counts[1][s->sequences[i].offset];
        ++counts[2][s->sequences[i].match];
    }
    uint8_t *modes = dst++;
    int kind = choose(&lengths, &s->tables->literal_lengths, counts[0], n, last->literals, &dst) << 6;
    kind |= choose(&offsets, &s->tables->offsets, counts[1], n, last->offset, &dst) << 4;
    kind |= choose(&matches, &s->tables->match_lengths, counts[2], n, last->match, &dst) << 2;
    *modes = (uint8_t)kind;
    kvmnn_bits out = {0, 0, dst};
    uint32_t of_lengths = kvmnn_fse_begin(&lengths, last->literals);
    uint32_t of_matches = kvmnn_fse_begin(&matches, last->match);
    uint32_t of_offsets = kvmnn_fse_begin(&offsets, last->offset);
    put_extra(&out, last->extra, last->bits);
    for (const sequence *each = last; each-- > s->sequences;) {
        of_offsets = kvmnn_fse_put(&offsets, of_offsets, each->offset, &out);
        of_matches = kvmnn_fse_put(&matches, of_matches, each->match, &out);
        of_lengths = kvmnn_fse_put(&lengths, of_lengths, each->literals, &out);
        kvmnn_bits_flush(&out);
        put_extra(&out, each->extra, each->bits);
    }
    kvmnn_fse_end(&matches, of_matches, &out);
    kvmnn_fse_end(&offsets, of_offsets, &out);
    kvmnn_fse_end(&lengths, of_lengths, &out);
    kvmnn_bits_flush(&out);
    return kvmnn_bits_end(&out);
}

static uint8_t *put_one_block(state *s, const uint8_t *src, size_t begin, size_t end, int last, uint8_t *dst) {
    uint32_t distance = s->distance;
    int current = s->current;
    const uint8_t *literals;
    uint8_t *body = dst + 3, *room = s->flat ? body + LITERALS_HEADER : s->literals; /* flat ones stay where they are put */
    size_t size = end - begin, sequences, n = split(s, src, begin, end, room, &literals, &sequences);
    uint8_t *at = put_literals(s, literals, n, body);
    at = put_sequences(s, sequences, at);
    if ((size_t)(at - body) < size) {
        put_block(dst, COMPRESSED, (size_t)(at - body), last);
        return at;
    }
    s->distance = distance; /* a reader of a raw block learns nothing */
    s->current = current;
    put_block(dst, RAW, size, last);
    memcpy(body, src + begin, size);
    return body + size;
}

size_t kvmnn_zstd_write(int level, const kvmnn_sequence_tables *tables, const uint8_t *src, size_t n,
                        const kvmnn_repeat *repeats, size_t count, int flat, uint8_t *scratch, uint8_t *dst) {
    state *s = (state *)scratch;
    uint8_t *at = kvmnn_zstd_header(dst, n);
    s->tables = tables;
    s->codes[0].header_size = s->codes[1].header_size = 0;
    s->current = 0;
    s->pairs.made_of = NULL;
    s->distance = 1;
    s->next = repeats;
    s->end = repeats + count;
    s->done = 0;
    s->flat = flat;
    s->level = level;
    for (size_t begin = 0; begin < n; begin += BLOCK) {
        size_t end = n - begin < BLOCK ? n : begin + BLOCK;
        at = put_one_block(s, src, begin, end, end == n, at);
    }
    return (size_t)(at - dst);
}
