/* Frames of zstd (RFC 8878) made without libzstd: raw blocks, Huffman literals, and repeats that are known already. */
#ifndef KVMNN_ZSTD_WRITER_H
#define KVMNN_ZSTD_WRITER_H

#include <stddef.h>
#include <stdint.h>

#include "fse.h"
#include "match_finder.h"

enum { KVMNN_MAX_RAW_BLOCK_BYTES = 128 << 10 }; /* bytes of one, at most */

typedef struct {
    kvmnn_fse_table literal_lengths, match_lengths, offsets;
} kvmnn_sequence_tables;

/* The tables that the format names as predefined. */
void kvmnn_sequence_tables_init(kvmnn_sequence_tables *tables);

/* Bytes that a frame of `n` bytes takes at most, what a flush writes too far included. */
size_t kvmnn_zstd_bound(size_t n);

/* Bytes of scratch that a frame needs. */
size_t kvmnn_zstd_scratch_bytes(void);

/* A frame's header: one segment of `n` bytes, no checksum. What is after it. n is not 0. */
uint8_t *kvmnn_zstd_write_header(uint8_t *dst, size_t n);

/* The header of a block of `size` bytes as they are, which the caller puts where this points. */
uint8_t *kvmnn_zstd_write_raw_block_header(uint8_t *dst, size_t size, int is_last);

/* A frame of `n` bytes, in which `repeats` (of bytes) are copied from before; what is between them is kept as it is if
   `literals_raw`. No repeat begins in the last 32 bytes. `level`: a SIMD level that this processor runs. Returns the
   frame's size. n is not 0. */
size_t kvmnn_zstd_write_frame(int level, const kvmnn_sequence_tables *tables, const uint8_t *src, size_t n,
                              const kvmnn_repeat *repeats, size_t count, int literals_raw, uint8_t *scratch,
                              uint8_t *dst);

#endif
