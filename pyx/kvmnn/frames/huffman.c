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

/* Lengths of at most 11 bits that make a complete code; the rarest symbols come first. */
static void limit(int *lengths, int n) {
    const int all = 1 << KVMNN_HUFFMAN_BITS;
    int used = 0;
    for (int i = 0; i < n; ++i) {
        if (lengths[i] > KVMNN_HUFFMAN_BITS) lengths[i] = KVMNN_HUFFMAN_BITS;
        used += all >> lengths[i];
    }
    for (int i = 0; used > all; i = i + 1 < n ? i + 1 : 0) {
        if (lengths[i] < KVMNN_HUFFMAN_BITS) {
            used -= all >> (lengths[i] + 1);
            ++lengths[i];
        }
    }
    while (used < all) {
        for (int i = n - 1; i >= 0 && used < all; --i) {
            if (lengths[i] > 1 && used + (all >> lengths[i]) <= all) {
                used += all >> lengths[i];
                --lengths[i];
            }
        }
    }
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
    if (n < 2) return 0;
    depths(counts, order, n, lengths);
    limit(lengths, n);
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

/* A stream whose newest bits stand at the top: an entry is a code at the top and its length in the lowest byte, so that
   one word is shifted by, put in and counted. What is below the bits that count is of no matter. */
typedef struct {
    uint64_t held, count; /* of `count` the lowest byte, at most 7 after a flush */
    uint8_t *at;
} stream;

static inline void put(stream *out, const uint64_t *codes, uint8_t literal) {
    uint64_t entry = codes[literal];
    out->held = out->held >> (entry & 0xff) | entry;
    out->count += entry;
}

/* At most 56 bits; eight bytes are written of which only the full ones count. */
static inline void flush(stream *out) {
    unsigned count = out->count & 0xff;
    kvmnn_bits all = {count ? out->held >> (64 - count) : 0, count, out->at};
    kvmnn_bits_flush(&all);
    out->at = all.at;
    out->count = count & 7;
}

static uint8_t *ended(stream *out) {
    unsigned count = out->count & 0xff;
    kvmnn_bits all = {count ? out->held >> (64 - count) : 0, count, out->at};
    return kvmnn_bits_end(&all);
}

/* Two streams at once, as each step waits for the one before it in the same stream. `n` literals each. */
static void write_two(stream *a, stream *b, const uint64_t *codes, const uint8_t *first, const uint8_t *second,
                      size_t n) {
    enum { TOGETHER = 4 }; /* 7 bits are left from before, and 4 x 11 come */
    stream one = *a, two = *b;
    size_t i = n;
    for (; i >= TOGETHER; i -= TOGETHER) {
        for (int j = 1; j <= TOGETHER; ++j) {
            put(&one, codes, first[i - (size_t)j]);
            put(&two, codes, second[i - (size_t)j]);
        }
        flush(&one);
        flush(&two);
    }
    for (; i > 0; --i) {
        put(&one, codes, first[i - 1]);
        put(&two, codes, second[i - 1]);
        flush(&one);
        flush(&two);
    }
    *a = one;
    *b = two;
}

static void write_rest(stream *out, const uint64_t *codes, const uint8_t *literals, size_t from, size_t to) {
    for (size_t i = to; i > from; --i) {
        put(out, codes, literals[i - 1]);
        flush(out);
    }
}

size_t kvmnn_huffman_write(const kvmnn_huffman *code, const uint8_t *literals, size_t n, int streams, uint8_t *dst) {
    uint64_t codes[SYMBOLS];
    for (int s = 0; s < SYMBOLS; ++s)
        codes[s] = code->bits[s] ? (uint64_t)code->code[s] << (64 - code->bits[s]) | code->bits[s] : 0;
    if (streams == 1) {
        stream out = {0, 0, dst};
        write_rest(&out, codes, literals, 0, n);
        return (size_t)(ended(&out) - dst);
    }
    size_t part = (n + 3) / 4, last = n - 3 * part, room = part * KVMNN_HUFFMAN_BITS / 8 + 16;
    uint8_t *at = dst + 6;
    for (int pair = 0; pair < 2; ++pair) { /* the second of a pair is made behind the room that the first may take */
        const uint8_t *first = literals + 2 * (size_t)pair * part, *second = first + part;
        size_t second_size = pair ? last : part;
        stream one = {0, 0, at}, two = {0, 0, at + room};
        write_rest(&one, codes, first, second_size, part);
        write_two(&one, &two, codes, first, second, second_size);
        uint8_t *one_end = ended(&one), *two_end = ended(&two);
        size_t one_bytes = (size_t)(one_end - at), two_bytes = (size_t)(two_end - (at + room));
        memmove(one_end, at + room, two_bytes);
        dst[4 * pair] = (uint8_t)one_bytes;
        dst[4 * pair + 1] = (uint8_t)(one_bytes >> 8);
        if (!pair) {
            dst[2] = (uint8_t)two_bytes;
            dst[3] = (uint8_t)(two_bytes >> 8);
        }
        at = one_end + two_bytes;
    }
    return (size_t)(at - dst);
}
