/* Bits written from the lowest one up, as zstd reads them from the end back. */
#ifndef KVMNN_BITWRITER_H
#define KVMNN_BITWRITER_H

#include "little_endian.h"

typedef struct {
    uint64_t pending;
    unsigned num_pending; /* bits in `pending`, below 8 after a flush */
    uint8_t *cursor;
} kvmnn_bitwriter;

static inline void kvmnn_bitwriter_put(kvmnn_bitwriter *writer, uint64_t value, unsigned count) {
    writer->pending |= value << writer->num_pending;
    writer->num_pending += count;
}

/* Writes eight bytes of which only the full ones count; there must be room for them. */
static inline void kvmnn_bitwriter_flush(kvmnn_bitwriter *writer) {
    kvmnn_store_le64(writer->cursor, writer->pending);
    writer->cursor += writer->num_pending >> 3;
    writer->pending >>= writer->num_pending & ~7u;
    writer->num_pending &= 7;
}

/* The end mark; what is after the last byte. */
static inline uint8_t *kvmnn_bitwriter_finish(kvmnn_bitwriter *writer) {
    kvmnn_bitwriter_put(writer, 1, 1);
    kvmnn_bitwriter_flush(writer);
    if (writer->num_pending) *writer->cursor++ = (uint8_t)writer->pending;
    return writer->cursor;
}

static inline int kvmnn_high_bit(uint32_t x) { /* x is not 0 */
#if defined(__GNUC__)
    return 31 - __builtin_clz(x);
#else
    int n = 0;
    while (x >>= 1) ++n;
    return n;
#endif
}

#endif
