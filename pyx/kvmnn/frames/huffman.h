/* Huffman codes of zstd's literals (RFC 8878, section 4.2), for the encoder. */
#ifndef KVMNN_HUFFMAN_H
#define KVMNN_HUFFMAN_H

#include <stddef.h>
#include <stdint.h>

enum { KVMNN_HUFFMAN_BITS = 11, KVMNN_HUFFMAN_HEADER = 160 };

typedef struct {
    uint16_t code[256];
    uint8_t bits[256]; /* 0: the symbol has no code */
    uint8_t header[KVMNN_HUFFMAN_HEADER];
    size_t header_size; /* 0: there is no code at all */
} kvmnn_huffman;

/* A code for what `counts` counts. Returns 0, and leaves none, for fewer than two symbols or a tree that cannot be said. */
int kvmnn_huffman_build(kvmnn_huffman *code, const uint32_t counts[256]);

/* Bits that the code takes for all that is counted, its header aside; SIZE_MAX where a symbol has no code. */
size_t kvmnn_huffman_cost(const kvmnn_huffman *code, const uint32_t counts[256]);

/* `n` literals in one stream, or in four with the table of their sizes. `dst` has room for 2 n + 64 bytes. The bytes are
   the same at every SIMD level. */
size_t kvmnn_huffman_write(int level, const kvmnn_huffman *code, const uint8_t *literals, size_t n, int streams,
                           uint8_t *dst);

#endif
