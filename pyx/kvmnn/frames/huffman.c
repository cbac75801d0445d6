#include "huffman.h"

#include "bits.h"
#include "fse.h"

enum { SYMBOLS = 256, NODES = 2 * SYMBOLS };

/* Symbols that occur, the rarest first; by counting where they are many, as the order of equals does not matter. */
static int sorted(const uint32_t *counts, uint8_t *order) {
    uint32_t starts[34] = {0};
    int n = 0;
    for (int s = 0; s < SYMBOLS; ++s)
        if (counts[s]) ++starts[kvmnn_high_bit(counts[s]) + 1];
    for (int b = 1; b < 34; ++b) starts[b] += starts[b - 1];
    n = (int)starts[33];
    for (int s = 0; s < SYMBOLS; ++s)
        if (counts[s]) order[starts[kvmnn_high_bit(counts[s])]++] = (uint8_t)s;
    for (int i = 1; i < n; ++i) { /* classes are in order: what is left to move is near */
        uint8_t symbol = order[i];
        int at = i;
        for (; at > 0 && counts[order[at - 1]] > counts[symbol]; --at) order[at] = order[at - 1];
        order[at] = symbol;
    }
    return n;
}

/* Depths of the leaves of an optimal tree, in `order`. */
static void depths(const uint32_t *counts, const uint8_t *order, int n, int *out) {
    uint64_t weight[NODES];
    int parent[NODES], leaf = 0, inner = n, next = n;
    for (int i = 0; i < n; ++i) weight[i] = counts[order[i]];
    while (next < 2 * n - 1) {
        weight[next] = 0;
        for (int child = 0; child < 2; ++child) {
            int least = leaf < n && (inner == next || weight[leaf] <= weight[inner]) ? leaf++ : inner++;
            weight[next] += weight[least];
            parent[least] = next;
        }
        ++next;
    }
    int depth[NODES];
    depth[next - 1] = 0;
    for (int i = next - 2; i >= 0; --i) depth[i] = depth[parent[i]] + 1;
    for (int i = 0; i < n; ++i) out[i] = depth[i];
}

/* Lengths of at most 11 bits that make a complete code; the rarest symbols come first in `order`. Symbols of one length
   stand together, and stay so: of them the rarest is made longer, where that costs least for what it frees. */
static void limit(const uint32_t *counts, const uint8_t *order, int *lengths, int n) {
    enum { MOST = KVMNN_HUFFMAN_BITS, ALL = 1 << MOST };
    int longer[MOST + 1] = {0}, over = -ALL; /* how many symbols are longer than so many bits */
    for (int i = 0; i < n; ++i) {
        if (lengths[i] > MOST) lengths[i] = MOST;
        over += ALL >> lengths[i];
        for (int length = 0; length < lengths[i]; ++length) ++longer[length];
    }
    while (over > 0) {
        uint64_t cost = 0, freed = 0;
        int best = 0;
        for (int length = MOST - 1; length > 0; --length) {
            if (longer[length] == longer[length - 1]) continue;
            uint64_t count = counts[order[longer[length]]], room = (uint64_t)(ALL >> (length + 1));
            if (room > (uint64_t)over) room = (uint64_t)over;
            if (best && count * freed >= cost * room) continue;
            best = length;
            cost = count;
            freed = room;
        }
        over -= ALL >> (best + 1);
        ++longer[best];
    }
    while (over < 0) { /* too much was freed: the most frequent symbol that it is enough for */
        int best = 0;
        uint32_t most = 0;
        for (int length = 2; length <= MOST; ++length) {
            if (longer[length] == longer[length - 1] || ALL >> length > -over) continue;
            uint32_t count = counts[order[longer[length - 1] - 1]];
            if (count <= most) continue;
            best = length;
            most = count;
        }
        over += ALL >> best;
        --longer[best - 1];
    }
    for (int length = MOST; length > 0; --length)
        for (int i = longer[length]; i < longer[length - 1]; ++i) lengths[i] = length;
}

/* The description of the tree; 0 where it cannot be said. */
static size_t describe(const uint8_t *bits, int longest, uint8_t *dst) {
    uint8_t weights[SYMBOLS];
    size_t n = 0, size;
    for (int s = 0; s < SYMBOLS; ++s) {
        weights[s] = bits[s] ? (uint8_t)(longest + 1 - bits[s]) : 0;
        if (bits[s]) n = (size_t)s; /* the last one follows from the others */
    }
    size = kvmnn_fse_weights(weights, n, dst + 1);
    if (size > 0 && size < 128 && (n > 128 || size < (n + 1) / 2)) {
        dst[0] = (uint8_t)size;
        return 1 + size;
    }
    if (n > 128) return 0;
    dst[0] = (uint8_t)(127 + n);
    for (size_t i = 0; i < n; i += 2) dst[1 + i / 2] = (uint8_t)(weights[i] << 4 | (i + 1 < n ? weights[i + 1] : 0));
    return 1 + (n + 1) / 2;
}

int kvmnn_huffman_build(kvmnn_huffman *code, const uint32_t counts[256]) {
    uint8_t order[SYMBOLS];
    int lengths[SYMBOLS], longest = 0, n = sorted(counts, order);
    uint16_t of_length[KVMNN_HUFFMAN_BITS + 2] = {0}, next = 0;
    code->header_size = 0;
    code->symbols = n;
    if (n < 2) return 0;
    depths(counts, order, n, lengths);
    limit(counts, order, lengths, n);
    memset(code->bits, 0, sizeof code->bits);
    for (int i = 0; i < n; ++i) {
        code->bits[order[i]] = (uint8_t)lengths[i];
        ++of_length[lengths[i]];
        if (lengths[i] > longest) longest = lengths[i];
    }
    for (int length = longest; length > 0; --length) { /* the longest codes begin at 0 */
        uint16_t many = of_length[length];
        of_length[length] = next;
        next = (uint16_t)((next + many) >> 1);
    }
    for (int s = 0; s < SYMBOLS; ++s)
        if (code->bits[s]) code->code[s] = of_length[code->bits[s]]++;
    code->header_size = describe(code->bits, longest, code->header);
    return code->header_size != 0;
}

size_t kvmnn_huffman_cost(const kvmnn_huffman *code, const uint32_t counts[256]) {
    size_t bits = 0;
    if (code->header_size == 0) return SIZE_MAX;
    for (int s = 0; s < SYMBOLS; ++s) {
        if (counts[s] && !code->bits[s]) return SIZE_MAX;
        bits += (size_t)counts[s] * code->bits[s];
    }
    return bits;
}

static inline void append(kvmnn_bits *out, uint64_t bits, uint64_t count) { /* at most 56 */
    kvmnn_bits_add(out, bits, (unsigned)count);
    kvmnn_bits_flush(out);
}

/* An entry has a code at the top and its length in the lowest byte, so that one word is shifted by, put in and counted. */
static inline void append_one(kvmnn_bits *out, uint64_t entry) {
    append(out, entry >> (64 - (entry & 0xff)), entry & 0xff);
}

/* The entries of two literals at a time; NULL where there are too many of them, or too few literals. */
static const uint64_t *pairs_of(const kvmnn_huffman *code, const uint64_t *codes, kvmnn_huffman_pairs *pairs, size_t n) {
    enum { MOST_SYMBOLS = 40, LEAST_LITERALS = 4096 };
    uint8_t symbols[SYMBOLS];
    int count = 0;
    if (code->symbols > MOST_SYMBOLS || n < LEAST_LITERALS) return NULL;
    if (pairs->made_of == code) return pairs->entries;
    for (int s = 0; s < SYMBOLS; ++s)
        if (codes[s]) symbols[count++] = (uint8_t)s;
    for (int i = 0; i < count; ++i)
        for (int j = 0; j < count; ++j) {
            uint64_t first = codes[symbols[j]], second = codes[symbols[i]], length = (first & 0xff) + (second & 0xff);
            pairs->entries[symbols[i] << 8 | symbols[j]] =
                (first & ~(uint64_t)0xff) | (second & ~(uint64_t)0xff) >> (first & 0xff) | length;
        }
    pairs->made_of = code;
    return pairs->entries;
}

static void put_size(uint8_t *dst, size_t size) {
    dst[0] = (uint8_t)size;
    dst[1] = (uint8_t)(size >> 8);
}

/* Marks of all bytes as bits: a row for each lower half, of the upper halves below 8 and of the others. */
typedef struct {
    uint8_t rows[2][16];
} known_bytes;

static known_bytes bits_of_known(const uint8_t known[SYMBOLS]) {
    known_bytes made = {{{0}}};
    for (int s = 0; s < SYMBOLS; ++s)
        if (known[s]) made.rows[s >> 7][s & 15] |= (uint8_t)(1 << (s >> 4 & 7));
    return made;
}

static const uint8_t BIT_OF[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128}; /* by upper half */

typedef struct {
    size_t (*write)(const kvmnn_huffman *code, kvmnn_huffman_pairs *pairs, const uint8_t *literals, size_t n, int streams,
                    uint8_t *dst);
    size_t (*unknown)(const uint8_t known[SYMBOLS], const uint8_t *literals, size_t at, size_t n);
} huffman_loops;

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define KVMNN_LOOPS "frames/huffman_impl.h"
#define KVMNN_TABLE huffman_loops
#define KVMNN_WIDE 1
#include "../simd.h"

size_t kvmnn_huffman_write(int level, const kvmnn_huffman *code, kvmnn_huffman_pairs *pairs, const uint8_t *literals,
                           size_t n, int streams, uint8_t *dst) {
    return level_tables[level]->write(code, pairs, literals, n, streams, dst);
}

size_t kvmnn_huffman_unknown(int level, const uint8_t known[SYMBOLS], const uint8_t *literals, size_t at, size_t n) {
    return level_tables[level]->unknown(known, literals, at, n);
}
