#include "zstd_writer.h"

#include "huffman.h"

#ifndef KVMNN_ZSTD_BLOCK_BYTES
#define KVMNN_ZSTD_BLOCK_BYTES (128 << 10) /* guided fuzzing has smaller ones, to see many of them in little time */
#endif

enum {
    BLOCK_BYTES = KVMNN_ZSTD_BLOCK_BYTES,
    BLOCK_RAW = 0,
    BLOCK_RLE = 1,
    BLOCK_COMPRESSED = 2,
    MIN_MATCH = 3,
    MAX_SEQUENCES = BLOCK_BYTES / 3 + 4,
    RAW_LITERALS_HEADER_BYTES = 3, /* of 4096 literals or more that are as they are */
    WILDCOPY_BYTES = 32, /* bytes that are copied at a time, of which some are too many */
};

/* -- numbers as a code and extra bits --------------------------------------------------------------------------------- */

static const int8_t LITERAL_LENGTH_DISTRIBUTION[] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2,  2,
                                                     2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
static const int8_t MATCH_LENGTH_DISTRIBUTION[] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1,  1,  1,  1,
                                                   1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,
                                                   1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};
static const int8_t OFFSET_DISTRIBUTION[] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1,
                                             1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};

typedef struct {
    uint8_t code, bits;
    uint32_t extra;
} length_code;

static length_code encode_literal_length(uint32_t n) {
    static const uint8_t codes[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 16, 17, 17, 18, 18,
                                      19, 19, 20, 20, 20, 20, 21, 21, 21, 21, 22, 22, 22, 22, 22, 22, 22, 22, 23, 23, 23, 23,
                                      23, 23, 23, 23, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24};
    static const uint8_t bits[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4};
    if (n < 64) return (length_code){codes[n], bits[codes[n]], n & ((1u << bits[codes[n]]) - 1)};
    int high = kvmnn_high_bit(n);
    return (length_code){(uint8_t)(high + 19), (uint8_t)high, n - (1u << high)};
}

static length_code encode_match_length(uint32_t n) {
    static const uint8_t codes[128] = {
        0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25,
        26, 27, 28, 29, 30, 31, 32, 32, 33, 33, 34, 34, 35, 35, 36, 36, 36, 36, 37, 37, 37, 37, 38, 38, 38, 38,
        38, 38, 38, 38, 39, 39, 39, 39, 39, 39, 39, 39, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40,
        40, 40, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 41, 42, 42, 42, 42, 42, 42, 42, 42,
        42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42};
    static const uint8_t bits[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5};
    n -= MIN_MATCH;
    if (n < 128) return (length_code){codes[n], bits[codes[n]], n & ((1u << bits[codes[n]]) - 1)};
    int high = kvmnn_high_bit(n);
    return (length_code){(uint8_t)(high + 36), (uint8_t)high, n - (1u << high)};
}

static length_code encode_offset(uint32_t value) {
    int high = kvmnn_high_bit(value);
    return (length_code){(uint8_t)high, (uint8_t)high, value - (1u << high)};
}

void kvmnn_sequence_tables_init(kvmnn_sequence_tables *tables) {
    kvmnn_fse_build(&tables->literal_lengths, LITERAL_LENGTH_DISTRIBUTION, sizeof LITERAL_LENGTH_DISTRIBUTION, 6);
    kvmnn_fse_build(&tables->match_lengths, MATCH_LENGTH_DISTRIBUTION, sizeof MATCH_LENGTH_DISTRIBUTION, 6);
    kvmnn_fse_build(&tables->offsets, OFFSET_DISTRIBUTION, sizeof OFFSET_DISTRIBUTION, 5);
}

/* -- what a frame keeps from block to block --------------------------------------------------------------------------- */

typedef struct {
    uint64_t extra; /* bits of the literals' length, of the match's above these, and of the offset's above both */
    uint8_t num_extra_bits, literal_code, match_code, offset_code; /* how many they are, and the codes */
} sequence;

typedef struct {
    const kvmnn_sequence_tables *tables;
    kvmnn_huffman_code codes[2];
    int current_code; /* which of them the last compressed block used */
    kvmnn_huffman_pairs pairs;
    uint32_t last_distance;
    const kvmnn_repeat *next_repeat, *repeats_end;
    uint32_t consumed_bytes; /* of the next repeat, in blocks before */
    int literals_raw;        /* literals are as they are */
    int isa_level;           /* of simd.h */
    sequence sequences[MAX_SEQUENCES];
    uint8_t literals[BLOCK_BYTES + WILDCOPY_BYTES];
    uint32_t counts[4][256];
} block_state;

size_t kvmnn_zstd_scratch_bytes(void) { return sizeof(block_state); }

size_t kvmnn_zstd_bound(size_t n) { return n + (n / BLOCK_BYTES + 1) * 3 + 2 * (size_t)BLOCK_BYTES + 256; }

static uint8_t *store_le(uint8_t *dst, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) dst[i] = (uint8_t)(value >> 8 * i);
    return dst + bytes;
}

static uint8_t *write_block_header(uint8_t *dst, int block_type, size_t size, int is_last) {
    return store_le(dst, (uint64_t)size << 3 | (uint64_t)block_type << 1 | (uint64_t)is_last, 3);
}

uint8_t *kvmnn_zstd_write_header(uint8_t *dst, size_t n) {
    int size_format = n < 256 ? 0 : n < 65536 + 256 ? 1 : n <= 0xffffffffu ? 2 : 3;
    dst = store_le(dst, 0xFD2FB528u, 4);
    *dst++ = (uint8_t)(size_format << 6 | 32);
    return store_le(dst, size_format == 1 ? n - 256 : n, 1 << size_format);
}

uint8_t *kvmnn_zstd_write_raw_block_header(uint8_t *dst, size_t size, int is_last) {
    return write_block_header(dst, BLOCK_RAW, size, is_last);
}

/* -- one block -------------------------------------------------------------------------------------------------------- */

static inline sequence make_sequence(uint32_t gap, uint32_t length, uint32_t coded_offset) {
    length_code literals = encode_literal_length(gap), match = encode_match_length(length),
                distance = encode_offset(coded_offset);
    unsigned lengths = (unsigned)literals.bits + match.bits;
    uint64_t extra = literals.extra | match.extra << literals.bits | (uint64_t)distance.extra << lengths;
    return (sequence){extra, (uint8_t)(lengths + distance.bits), literals.code, match.code, distance.code};
}

/* The literals of a block, where they lie or copied together in `literal_buffer`, and its sequences; returns how many
 * literals there are. WILDCOPY_BYTES bytes can be read from any place on that is before a match. */
static size_t build_sequences(block_state *s, const uint8_t *src, size_t begin, size_t end, uint8_t *literal_buffer,
                              const uint8_t **literals, size_t *sequences) {
    size_t pos = begin, num_copied = 0, count = 0;
    while (s->next_repeat < s->repeats_end && s->next_repeat->start + s->consumed_bytes < end) {
        size_t match_start = s->next_repeat->start + s->consumed_bytes,
               match_left = s->next_repeat->length - s->consumed_bytes;
        size_t match_bytes = match_left < end - match_start ? match_left : end - match_start,
               num_literals = match_start - pos;
        s->consumed_bytes = match_bytes == match_left ? 0 : s->consumed_bytes + (uint32_t)match_bytes;
        if (match_bytes >= MIN_MATCH) {
            uint32_t distance = s->next_repeat->distance;
            for (size_t i = 0; i < num_literals; i += WILDCOPY_BYTES)
                memcpy(literal_buffer + num_copied + i, src + pos + i, WILDCOPY_BYTES);
            num_copied += num_literals;
            /* offsets 1 to 3 are the last ones; the very last is no choice where no literal came between */
            uint32_t coded_offset = distance == s->last_distance && num_literals ? 1 : distance + 3;
            s->sequences[count++] = make_sequence((uint32_t)num_literals, (uint32_t)match_bytes, coded_offset);
            s->last_distance = distance;
            pos = match_start + match_bytes;
        }
        s->next_repeat += s->consumed_bytes == 0;
    }
    *sequences = count;
    *literals = count ? literal_buffer : src + begin;
    if (count) memcpy(literal_buffer + num_copied, src + pos, end - pos);
    return num_copied + (end - pos);
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

static void count_literals(block_state *s, const uint8_t *literals, size_t n) {
    uint32_t(*counts)[256] = s->counts;
    memset(counts, 0, sizeof s->counts);
    add_counts(counts, literals, n);
    for (int b = 0; b < 256; ++b) counts[0][b] += counts[1][b] + counts[2][b] + counts[3][b];
}

/* About how many there are of each literal, by one quarter or another of every 128; what has escaped these is looked for,
 * as each must have a code. */
static void estimate_literals(block_state *s, const uint8_t *literals, size_t n) {
    enum { SAMPLE_BYTES = 32, QUARTERS = 4, RARE_COUNT = 2 };
    uint32_t(*counts)[256] = s->counts;
    uint8_t has_code[256];
    memset(counts, 0, sizeof s->counts);
    for (size_t i = 0; i + QUARTERS * SAMPLE_BYTES <= n; i += QUARTERS * SAMPLE_BYTES) {
        uint32_t quarter = (uint32_t)i * 0x9E3779B1u >> 30;
        add_counts(counts, literals + i + quarter * SAMPLE_BYTES, SAMPLE_BYTES);
    }
    for (int b = 0; b < 256; ++b) {
        counts[0][b] = QUARTERS * (counts[0][b] + counts[1][b] + counts[2][b] + counts[3][b]);
        has_code[b] = counts[0][b] != 0;
    }
    for (size_t i = 0; (i = kvmnn_huffman_find_missing(s->isa_level, has_code, literals, i, n)) < n;) {
        has_code[literals[i]] = 1;
        counts[0][literals[i]] = RARE_COUNT;
    }
}

/* Header of the section of literals: kind, number, and for coded ones their bytes. */
static uint8_t *write_literals_header(uint8_t *dst, int section_type, size_t n, size_t coded_bytes) {
    if (section_type <= BLOCK_RLE) {
        if (n < 32) return store_le(dst, (uint64_t)section_type | n << 3, 1);
        if (n < 4096) return store_le(dst, (uint64_t)section_type | 4 | n << 4, 2);
        return store_le(dst, (uint64_t)section_type | 12 | n << 4, 3);
    }
    int size_format = n < 256     ? 0
                      : n < 1024  ? 1
                      : n < 16384 ? 2
                                  : 3,
        width = size_format < 2    ? 10
                : size_format == 2 ? 14
                                   : 18;
    uint64_t value =
        (uint64_t)section_type | (uint64_t)size_format << 2 | (uint64_t)n << 4 | (uint64_t)coded_bytes << (4 + width);
    return store_le(dst, value, size_format < 2 ? 3 : size_format == 2 ? 4 : 5);
}

static uint8_t *write_raw_literals(const uint8_t *literals, size_t n, uint8_t *dst) {
    dst = write_literals_header(dst, BLOCK_RAW, n, 0);
    if (dst != literals) memmove(dst, literals, n);
    return dst + n;
}

/* log2 of n in 256ths, not above it. */
static uint64_t log2_fixed(uint32_t n) {
    int high = kvmnn_high_bit(n);
    uint32_t next = (high < 8 ? n << (8 - high) : n >> (high - 8)) & 255;
    return (uint64_t)high << 8 | next;
}

/* Bits that a new code would hardly come below, its description included. */
static size_t estimate_min_cost(const uint32_t counts[256], size_t n) {
    enum { DESCRIPTION_BITS = 8 * 64 };
    uint64_t total_log2 = log2_fixed((uint32_t)n), total_bits = 0;
    for (int b = 0; b < 256; ++b)
        if (counts[b]) total_bits += counts[b] * (total_log2 - log2_fixed(counts[b]));
    return (size_t)((total_bits >> 8) + (total_bits >> 15)) + DESCRIPTION_BITS;
}

static int has_single_symbol(const uint32_t counts[256]) {
    int num_symbols = 0;
    for (int b = 0; b < 256; ++b) num_symbols += counts[b] != 0;
    return num_symbols == 1;
}

static uint8_t *write_literals(block_state *s, const uint8_t *literals, size_t n, uint8_t *dst) {
    enum {
        MIN_CODED_LITERALS = 64,
        MIN_ESTIMATED_LITERALS = BLOCK_BYTES / 8,
        LITERALS_TREELESS = 3,
        MIN_GAIN_DIVISOR = 64
    }; /* one byte in so many is to be saved */
    if (n < MIN_CODED_LITERALS || s->literals_raw) return write_raw_literals(literals, n, dst);
    if (n < MIN_ESTIMATED_LITERALS) count_literals(s, literals, n);
    else estimate_literals(s, literals, n);
    const uint32_t *counts = s->counts[0];
    if (has_single_symbol(counts)) {
        dst = write_literals_header(dst, BLOCK_RLE, n, 0);
        *dst++ = literals[0];
        return dst;
    }
    kvmnn_huffman_code *new_code = &s->codes[!s->current_code];
    size_t cost = kvmnn_huffman_count_bits(&s->codes[s->current_code], counts), new_cost = SIZE_MAX;
    int is_treeless = 1;
    if (cost > estimate_min_cost(counts, n)) { /* a new code may be worth its description, and the time to make it */
        if (s->pairs.source == new_code) s->pairs.source = NULL;
        if (kvmnn_huffman_build(new_code, counts))
            new_cost = kvmnn_huffman_count_bits(new_code, counts) + 8 * new_code->header_bytes;
        is_treeless = cost <= new_cost;
        cost = is_treeless ? cost : new_cost;
    }
    if (cost == SIZE_MAX || cost / 8 + n / MIN_GAIN_DIVISOR + 16 >= n) return write_raw_literals(literals, n, dst);
    int streams = n < 256 ? 1 : 4;
    size_t header_bytes = n < 1024 ? 3 : n < 16384 ? 4 : 5;
    uint8_t *out = dst + header_bytes;
    if (!is_treeless) {
        s->current_code = !s->current_code;
        memcpy(out, new_code->header, new_code->header_bytes);
        out += new_code->header_bytes;
    }
    out += kvmnn_huffman_write(s->isa_level, &s->codes[s->current_code], &s->pairs, literals, n, streams, out);
    write_literals_header(dst, is_treeless ? LITERALS_TREELESS : BLOCK_COMPRESSED, n,
                          (size_t)(out - dst) - header_bytes);
    return out;
}

/* A table for one of the three numbers of all sequences, and what has to be said of it: its kind for the modes byte. */
static int select_table(kvmnn_fse_table *table, const kvmnn_fse_table *predefined, const uint32_t *counts, size_t n,
                        unsigned last_symbol, uint8_t **dst) {
    enum { MIN_FITTED_SEQUENCES = 48, TABLE_RLE = 1, TABLE_COMPRESSED = 2 };
    if (n < MIN_FITTED_SEQUENCES) {
        *table = *predefined;
        return 0;
    }
    if (counts[last_symbol] == n) {
        kvmnn_fse_build_rle(table, last_symbol);
        *(*dst)++ = (uint8_t)last_symbol;
        return TABLE_RLE;
    }
    *dst += kvmnn_fse_build_fitted(table, counts, KVMNN_MAX_FSE_SYMBOLS, n, *dst);
    return TABLE_COMPRESSED;
}

static inline void write_extra_bits(kvmnn_bitwriter *out, uint64_t extra, unsigned bits) {
    enum { MAX_FLUSH_BITS = 56, LOW_BITS = 32 };
    if (bits > MAX_FLUSH_BITS) {
        kvmnn_bitwriter_put(out, extra & 0xffffffff, LOW_BITS);
        kvmnn_bitwriter_flush(out);
        extra >>= LOW_BITS;
        bits -= LOW_BITS;
    }
    kvmnn_bitwriter_put(out, extra, bits);
    kvmnn_bitwriter_flush(out);
}

static uint8_t *write_sequences(block_state *s, size_t n, uint8_t *dst) {
    enum { LONG_COUNT_BASE = 0x7f00 };
    const sequence *last_sequence = s->sequences + n - 1;
    kvmnn_fse_table length_table, offset_table, match_table;
    uint32_t counts[3][KVMNN_MAX_FSE_SYMBOLS] = {{0}};
    if (n < 128) dst = store_le(dst, n, 1);
    else if (n < LONG_COUNT_BASE) dst = store_le(dst, (128 + (n >> 8)) | (n & 255) << 8, 2);
    else dst = store_le(dst, 255 | (n - LONG_COUNT_BASE) << 8, 3);
    if (n == 0) return dst;
    for (size_t i = 0; i < n; ++i) {
        ++counts[0][s->sequences[i].literal_code];
        ++counts[1][s->sequences[i].offset_code];
        ++counts[2][s->sequences[i].match_code];
    }
    uint8_t *modes = dst++;
    int mode_bits =
        select_table(&length_table, &s->tables->literal_lengths, counts[0], n, last_sequence->literal_code, &dst) << 6;
    mode_bits |= select_table(&offset_table, &s->tables->offsets, counts[1], n, last_sequence->offset_code, &dst) << 4;
    mode_bits |= select_table(&match_table, &s->tables->match_lengths, counts[2], n, last_sequence->match_code, &dst)
                 << 2;
    *modes = (uint8_t)mode_bits;
    kvmnn_bitwriter out = {0, 0, dst};
    uint32_t length_state = kvmnn_fse_init_state(&length_table, last_sequence->literal_code);
    uint32_t match_state = kvmnn_fse_init_state(&match_table, last_sequence->match_code);
    uint32_t offset_state = kvmnn_fse_init_state(&offset_table, last_sequence->offset_code);
    write_extra_bits(&out, last_sequence->extra, last_sequence->num_extra_bits);
    for (const sequence *current = last_sequence; current-- > s->sequences;) {
        offset_state = kvmnn_fse_encode_symbol(&offset_table, offset_state, current->offset_code, &out);
        match_state = kvmnn_fse_encode_symbol(&match_table, match_state, current->match_code, &out);
        length_state = kvmnn_fse_encode_symbol(&length_table, length_state, current->literal_code, &out);
        kvmnn_bitwriter_flush(&out);
        write_extra_bits(&out, current->extra, current->num_extra_bits);
    }
    kvmnn_fse_flush_state(&match_table, match_state, &out);
    kvmnn_fse_flush_state(&offset_table, offset_state, &out);
    kvmnn_fse_flush_state(&length_table, length_state, &out);
    kvmnn_bitwriter_flush(&out);
    return kvmnn_bitwriter_finish(&out);
}

static uint8_t *write_block(block_state *s, const uint8_t *src, size_t begin, size_t end, int is_last, uint8_t *dst) {
    uint32_t saved_distance = s->last_distance;
    int saved_code = s->current_code;
    const uint8_t *literals;
    uint8_t *body = dst + 3; /* raw literals stay where they are copied to */
    uint8_t *literal_buffer = s->literals_raw ? body + RAW_LITERALS_HEADER_BYTES : s->literals;
    size_t size = end - begin, sequences,
           n = build_sequences(s, src, begin, end, literal_buffer, &literals, &sequences);
    uint8_t *out = write_literals(s, literals, n, body);
    out = write_sequences(s, sequences, out);
    if ((size_t)(out - body) < size) {
        write_block_header(dst, BLOCK_COMPRESSED, (size_t)(out - body), is_last);
        return out;
    }
    s->last_distance = saved_distance; /* a reader of a raw block learns nothing */
    s->current_code = saved_code;
    write_block_header(dst, BLOCK_RAW, size, is_last);
    memcpy(body, src + begin, size);
    return body + size;
}

size_t kvmnn_zstd_write_frame(int level, const kvmnn_sequence_tables *tables, const uint8_t *src, size_t n,
                              const kvmnn_repeat *repeats, size_t count, int literals_raw, uint8_t *scratch,
                              uint8_t *dst) {
    block_state *s = (block_state *)scratch;
    uint8_t *out = kvmnn_zstd_write_header(dst, n);
    s->tables = tables;
    s->codes[0].header_bytes = s->codes[1].header_bytes = 0;
    s->current_code = 0;
    s->pairs.source = NULL;
    s->last_distance = 1;
    s->next_repeat = repeats;
    s->repeats_end = repeats + count;
    s->consumed_bytes = 0;
    s->literals_raw = literals_raw;
    s->isa_level = level;
    for (size_t begin = 0; begin < n; begin += BLOCK_BYTES) {
        size_t end = n - begin < BLOCK_BYTES ? n : begin + BLOCK_BYTES;
        out = write_block(s, src, begin, end, end == n, out);
    }
    return (size_t)(out - dst);
}
