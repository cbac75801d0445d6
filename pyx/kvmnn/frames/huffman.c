#include "huffman.h"

#include "bitwriter.h"
#include "fse.h"

enum { NUM_SYMBOLS = 256, NUM_NODES = 2 * NUM_SYMBOLS };

/* Symbols that occur, the rarest first; by counting where they are many, as the order of equals does not matter. */
static int sort_symbols(const uint32_t *counts, uint8_t *order) {
    uint32_t starts[34] = {0};
    int n = 0;
    for (int s = 0; s < NUM_SYMBOLS; ++s)
        if (counts[s]) ++starts[kvmnn_high_bit(counts[s]) + 1];
    for (int b = 1; b < 34; ++b) starts[b] += starts[b - 1];
    n = (int)starts[33];
    for (int s = 0; s < NUM_SYMBOLS; ++s)
        if (counts[s]) order[starts[kvmnn_high_bit(counts[s])]++] = (uint8_t)s;
    for (int i = 1; i < n; ++i) { /* classes are in order: what is left to move is near */
        uint8_t symbol = order[i];
        int pos = i;
        for (; pos > 0 && counts[order[pos - 1]] > counts[symbol]; --pos) order[pos] = order[pos - 1];
        order[pos] = symbol;
    }
    return n;
}

/* Depths of the leaves of an optimal tree, in `order`. */
static void compute_depths(const uint32_t *counts, const uint8_t *order, int n, int *out) {
    uint64_t weight[NUM_NODES];
    int parent[NUM_NODES], leaf = 0, inner = n, next = n;
    for (int i = 0; i < n; ++i) weight[i] = counts[order[i]];
    while (next < 2 * n - 1) {
        weight[next] = 0;
        for (int child = 0; child < 2; ++child) {
            int smallest = leaf < n && (inner == next || weight[leaf] <= weight[inner]) ? leaf++ : inner++;
            weight[next] += weight[smallest];
            parent[smallest] = next;
        }
        ++next;
    }
    int depth[NUM_NODES];
    depth[next - 1] = 0;
    for (int i = next - 2; i >= 0; --i) depth[i] = depth[parent[i]] + 1;
    for (int i = 0; i < n; ++i) out[i] = depth[i];
}

/* Lengths of at most 11 bits that make a complete code; the rarest symbols come first in `order`. Symbols of one length
   stand together, and stay so: of them the rarest is made longer, where that costs least for what it frees. */
static void limit_lengths(const uint32_t *counts, const uint8_t *order, int *lengths, int n) {
    enum { MAX_LENGTH = KVMNN_MAX_HUFFMAN_BITS, FULL_CODE_SPACE = 1 << MAX_LENGTH };
    int num_longer[MAX_LENGTH + 1] = {0}, excess = -FULL_CODE_SPACE; /* how many symbols are longer than so many bits */
    for (int i = 0; i < n; ++i) {
        if (lengths[i] > MAX_LENGTH) lengths[i] = MAX_LENGTH;
        excess += FULL_CODE_SPACE >> lengths[i];
        for (int length = 0; length < lengths[i]; ++length) ++num_longer[length];
    }
    while (excess > 0) {
        uint64_t cost = 0, freed_space = 0;
        int best = 0;
        for (int length = MAX_LENGTH - 1; length > 0; --length) {
            if (num_longer[length] == num_longer[length - 1]) continue;
            uint64_t count = counts[order[num_longer[length]]], space = (uint64_t)(FULL_CODE_SPACE >> (length + 1));
            if (space > (uint64_t)excess) space = (uint64_t)excess;
            if (best && count * freed_space >= cost * space) continue;
            best = length;
            cost = count;
            freed_space = space;
        }
        excess -= FULL_CODE_SPACE >> (best + 1);
        ++num_longer[best];
    }
    while (excess < 0) { /* too much was freed: the most frequent symbol that it is enough for */
        int best = 0;
        uint32_t max_count = 0;
        for (int length = 2; length <= MAX_LENGTH; ++length) {
            if (num_longer[length] == num_longer[length - 1] || FULL_CODE_SPACE >> length > -excess) continue;
            uint32_t count = counts[order[num_longer[length - 1] - 1]];
            if (count <= max_count) continue;
            best = length;
            max_count = count;
        }
        excess += FULL_CODE_SPACE >> best;
        --num_longer[best - 1];
    }
    for (int length = MAX_LENGTH; length > 0; --length)
        for (int i = num_longer[length]; i < num_longer[length - 1]; ++i) lengths[i] = length;
}

/* The description of the tree; 0 where it cannot be said. */
static size_t write_tree_description(const uint8_t *lengths, int max_length, uint8_t *dst) {
    uint8_t weights[NUM_SYMBOLS];
    size_t n = 0, size;
    for (int s = 0; s < NUM_SYMBOLS; ++s) {
        weights[s] = lengths[s] ? (uint8_t)(max_length + 1 - lengths[s]) : 0;
        if (lengths[s]) n = (size_t)s; /* the last one follows from the others */
    }
    size = kvmnn_fse_encode_weights(weights, n, dst + 1);
    if (size > 0 && size < 128 && (n > 128 || size < (n + 1) / 2)) {
        dst[0] = (uint8_t)size;
        return 1 + size;
    }
    if (n > 128) return 0;
    dst[0] = (uint8_t)(127 + n);
    for (size_t i = 0; i < n; i += 2) dst[1 + i / 2] = (uint8_t)(weights[i] << 4 | (i + 1 < n ? weights[i + 1] : 0));
    return 1 + (n + 1) / 2;
}

int kvmnn_huffman_build(kvmnn_huffman_code *code, const uint32_t counts[256]) {
    uint8_t order[NUM_SYMBOLS];
    int lengths[NUM_SYMBOLS], max_length = 0, n = sort_symbols(counts, order);
    uint16_t first_codes[KVMNN_MAX_HUFFMAN_BITS + 2] = {0}, next_code = 0;
    code->header_bytes = 0;
    code->num_symbols = n;
    if (n < 2) return 0;
    compute_depths(counts, order, n, lengths);
    limit_lengths(counts, order, lengths, n);
    memset(code->lengths, 0, sizeof code->lengths);
    for (int i = 0; i < n; ++i) {
        code->lengths[order[i]] = (uint8_t)lengths[i];
        ++first_codes[lengths[i]];
        if (lengths[i] > max_length) max_length = lengths[i];
    }
    for (int length = max_length; length > 0; --length) { /* the longest codes begin at 0 */
        uint16_t num_codes = first_codes[length];
        first_codes[length] = next_code;
        next_code = (uint16_t)((next_code + num_codes) >> 1);
    }
    for (int s = 0; s < NUM_SYMBOLS; ++s)
        if (code->lengths[s]) code->codes[s] = first_codes[code->lengths[s]]++;
    code->header_bytes = write_tree_description(code->lengths, max_length, code->header);
    return code->header_bytes != 0;
}

size_t kvmnn_huffman_count_bits(const kvmnn_huffman_code *code, const uint32_t counts[256]) {
    size_t bits = 0;
    if (code->header_bytes == 0) return SIZE_MAX;
    for (int s = 0; s < NUM_SYMBOLS; ++s) {
        if (counts[s] && !code->lengths[s]) return SIZE_MAX;
        bits += (size_t)counts[s] * code->lengths[s];
    }
    return bits;
}

static inline void append_bits(kvmnn_bitwriter *out, uint64_t bits, uint64_t count) { /* at most 56 */
    kvmnn_bitwriter_put(out, bits, (unsigned)count);
    kvmnn_bitwriter_flush(out);
}

/* An entry has a code at the top and its length in the lowest byte, so that one word is shifted by, put in and counted. */
static inline void append_code(kvmnn_bitwriter *out, uint64_t entry) {
    append_bits(out, entry >> (64 - (entry & 0xff)), entry & 0xff);
}

/* The entries of two literals at a time; NULL where there are too many of them, or too few literals. */
static const uint64_t *build_pairs(const kvmnn_huffman_code *code, const uint64_t *codes, kvmnn_huffman_pairs *pairs,
                                   size_t n) {
    enum { MAX_PAIR_SYMBOLS = 40, MIN_PAIR_LITERALS = 4096 };
    uint8_t symbols[NUM_SYMBOLS];
    int count = 0;
    if (code->num_symbols > MAX_PAIR_SYMBOLS || n < MIN_PAIR_LITERALS) return NULL;
    if (pairs->source == code) return pairs->entries;
    for (int s = 0; s < NUM_SYMBOLS; ++s)
        if (codes[s]) symbols[count++] = (uint8_t)s;
    for (int i = 0; i < count; ++i)
        for (int j = 0; j < count; ++j) {
            uint64_t first_entry = codes[symbols[j]], second_entry = codes[symbols[i]],
                     length = (first_entry & 0xff) + (second_entry & 0xff);
            pairs->entries[symbols[i] << 8 | symbols[j]] =
                (first_entry & ~(uint64_t)0xff) | (second_entry & ~(uint64_t)0xff) >> (first_entry & 0xff) | length;
        }
    pairs->source = code;
    return pairs->entries;
}

static void store_le16(uint8_t *dst, size_t size) {
    dst[0] = (uint8_t)size;
    dst[1] = (uint8_t)(size >> 8);
}

/* Marks of all bytes as bits: a row for each lower half, of the upper halves below 8 and of the others. */
typedef struct {
    uint8_t rows[2][16];
} symbol_set;

static symbol_set build_symbol_set(const uint8_t is_member[NUM_SYMBOLS]) {
    symbol_set set = {{{0}}};
    for (int s = 0; s < NUM_SYMBOLS; ++s)
        if (is_member[s]) set.rows[s >> 7][s & 15] |= (uint8_t)(1 << (s >> 4 & 7));
    return set;
}

static const uint8_t HIGH_NIBBLE_BIT[16] = {1, 2, 4, 8, 16, 32, 64, 128,
                                            1, 2, 4, 8, 16, 32, 64, 128}; /* by upper half */

typedef struct {
    size_t (*write)(const kvmnn_huffman_code *code, kvmnn_huffman_pairs *pairs, const uint8_t *literals, size_t n,
                    int streams, uint8_t *dst);
    size_t (*find_missing)(const uint8_t has_code[NUM_SYMBOLS], const uint8_t *literals, size_t pos, size_t n);
} huffman_kernels;

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define KVMNN_SIMD_KERNELS "frames/huffman_impl.h"
#define KVMNN_KERNEL_TABLE huffman_kernels
#define KVMNN_USE_AVX512 1
#include "../simd.h"

size_t kvmnn_huffman_write(int level, const kvmnn_huffman_code *code, kvmnn_huffman_pairs *pairs,
                           const uint8_t *literals, size_t n, int streams, uint8_t *dst) {
    return isa_tables[level]->write(code, pairs, literals, n, streams, dst);
}

size_t kvmnn_huffman_find_missing(int level, const uint8_t has_code[NUM_SYMBOLS], const uint8_t *literals, size_t begin,
                                  size_t n) {
    return isa_tables[level]->find_missing(has_code, literals, begin, n);
}
