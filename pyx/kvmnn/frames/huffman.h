/* Huffman codes of zstd's literals (RFC 8878, section 4.2), for the encoder. */
#ifndef KVMNN_HUFFMAN_H
#define KVMNN_HUFFMAN_H

#include <stddef.h>
#include <stdint.h>

enum { KVMNN_MAX_HUFFMAN_BITS = 11, KVMNN_MAX_HUFFMAN_HEADER_BYTES = 160 };

typedef struct {
    uint16_t codes[256];
    uint8_t lengths[256]; /* 0: the symbol has no code */
    uint8_t header[KVMNN_MAX_HUFFMAN_HEADER_BYTES];
    size_t header_bytes; /* 0: there is no code at all */
    int num_symbols;
} kvmnn_huffman_code;

/* Codes of two literals at a time, of a code with few symbols; those of others hold anything. */
typedef struct {
    const kvmnn_huffman_code *source; /* to be set to NULL when that code is made again */
    uint64_t entries[1 << 16];
} kvmnn_huffman_pairs;

/* A code for what `counts` counts. Returns 0, and leaves none, for fewer than two symbols or a tree that cannot be said. */
int kvmnn_huffman_build(kvmnn_huffman_code *code, const uint32_t counts[256]);

/* Bits that the code takes for all that is counted, its header aside; SIZE_MAX where a symbol has no code. */
size_t kvmnn_huffman_count_bits(const kvmnn_huffman_code *code, const uint32_t counts[256]);

/* `n` literals, which all have a code, in one stream, or in four with the table of their sizes. `dst` has room for
   2 n + 64 bytes. The bytes are the same at every SIMD level. */
size_t kvmnn_huffman_write(int level, const kvmnn_huffman_code *code, kvmnn_huffman_pairs *pairs,
                           const uint8_t *literals, size_t n, int streams, uint8_t *dst);

/* The first of `n` literals from `begin` on that is not marked in `has_code`, or n. */
size_t kvmnn_huffman_find_missing(int level, const uint8_t has_code[256], const uint8_t *literals, size_t begin,
                                  size_t n);

#endif
