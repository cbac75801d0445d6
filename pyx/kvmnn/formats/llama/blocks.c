#include "blocks.h"

#include <string.h>

/* The float32 that a little-endian fp16 is. */
static inline float kvmnn_half(const uint8_t *p) {
    const uint32_t word = (uint32_t)p[0] | (uint32_t)p[1] << 8, magnitude = word & 0x7fff;
    uint32_t bits;
    float value;
    if (magnitude >= 0x0400) {
        bits = (magnitude << 13) + ((magnitude >= 0x7c00 ? 224u : 112u) << 23);
        memcpy(&value, &bits, sizeof value);
    } else {
        value = (float)magnitude * 0x1p-24f;
    }
    memcpy(&bits, &value, sizeof bits);
    bits |= (word & 0x8000) << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static const uint8_t kvmnn_bit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};

/* What the codes of iq4_nl stand for. */
static const float kvmnn_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

#define KVMNN_LOOPS "formats/llama/blocks_impl.h"
#define KVMNN_TABLE kvmnn_blocks_table
#include "../../simd.h"

const kvmnn_blocks_table *kvmnn_blocks_at(int level) { return level_tables[level]; }

size_t kvmnn_block_bytes(int kind) {
    static const size_t bytes[KVMNN_BLOCK_KINDS] = {18, 20, 22, 24, 34, 18};
    return bytes[kind];
}
