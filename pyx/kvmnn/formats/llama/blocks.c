#include "blocks.h"

#include "../half.h"

/* Blocks that are taken apart before their codes become numbers: what is stored in pieces has left the processor's
 * queue of stores when it is loaded in one. */
enum { KVMNN_BATCH_BLOCKS = 16 };

/* The next blocks of the rows, at most a batch. */
typedef struct {
    size_t row, block, n;
    const uint8_t *block_at[KVMNN_BATCH_BLOCKS];
} kvmnn_batch;

static inline size_t kvmnn_next_batch(const kvmnn_block_rows *blocks, size_t size, kvmnn_batch *batch) {
    const uint8_t *block = blocks->source + batch->row * blocks->stride + batch->block * size;
    for (batch->n = 0; batch->n < KVMNN_BATCH_BLOCKS && batch->row < blocks->rows; ++batch->n, block += size) {
        batch->block_at[batch->n] = block;
        if (++batch->block == blocks->count) {
            batch->block = 0;
            block = blocks->source + ++batch->row * blocks->stride - size;
        }
    }
    return batch->n;
}

static inline uint32_t kvmnn_word(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }

/* For each byte the 16 that each of its bits is worth, the lowest first. */
#define KVMNN_BITS(b) {(b) << 4 & 16, (b) << 3 & 16, (b) << 2 & 16, (b) << 1 & 16, (b) & 16, (b) >> 1 & 16, (b) >> 2 & 16, (b) >> 3 & 16}
#define KVMNN_BITS4(b) KVMNN_BITS(b), KVMNN_BITS((b) + 1), KVMNN_BITS((b) + 2), KVMNN_BITS((b) + 3)
#define KVMNN_BITS16(b) KVMNN_BITS4(b), KVMNN_BITS4((b) + 4), KVMNN_BITS4((b) + 8), KVMNN_BITS4((b) + 12)
#define KVMNN_BITS64(b) KVMNN_BITS16(b), KVMNN_BITS16((b) + 16), KVMNN_BITS16((b) + 32), KVMNN_BITS16((b) + 48)
static const uint8_t kvmnn_fifth_bits[256][8] = {KVMNN_BITS64(0), KVMNN_BITS64(64), KVMNN_BITS64(128),
                                                 KVMNN_BITS64(192)};

/* 32 codes of four bits: the low halves of 16 bytes, then the high ones. */
static inline void kvmnn_unpack_nibbles(const uint8_t *bytes, uint8_t *codes) {
    for (int i = 0; i < 16; i += 8) {
        uint64_t both, low, high;
        memcpy(&both, bytes + i, 8);
        low = both & UINT64_C(0x0f0f0f0f0f0f0f0f);
        high = both >> 4 & UINT64_C(0x0f0f0f0f0f0f0f0f);
        memcpy(codes + i, &low, 8);
        memcpy(codes + 16 + i, &high, 8);
    }
}

/* The same with a fifth bit for each. */
static inline void kvmnn_unpack_nibbles_and_bits(const uint8_t *bytes, const uint8_t *bits, uint8_t *codes) {
    for (int i = 0; i < 2; ++i) {
        uint64_t both, low, high;
        memcpy(&both, bytes + 8 * i, 8);
        memcpy(&low, kvmnn_fifth_bits[bits[i]], 8);
        memcpy(&high, kvmnn_fifth_bits[bits[2 + i]], 8);
        low |= both & UINT64_C(0x0f0f0f0f0f0f0f0f);
        high |= both >> 4 & UINT64_C(0x0f0f0f0f0f0f0f0f);
        memcpy(codes + 8 * i, &low, 8);
        memcpy(codes + 16 + 8 * i, &high, 8);
    }
}

/* What the codes of iq4_nl stand for. */
static const int8_t kvmnn_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

#define KVMNN_SIMD_KERNELS "formats/llama/blocks_impl.h"
#define KVMNN_KERNEL_TABLE kvmnn_block_kernels
#include "../../simd.h"

const kvmnn_block_kernels *kvmnn_block_kernels_at(int level) { return isa_tables[level]; }

size_t kvmnn_block_bytes(int kind) {
    static const size_t bytes[KVMNN_BLOCK_KINDS] = {18, 20, 22, 24, 34, 18};
    return bytes[kind];
}
