/* What a frame of the words would take: to make one, or a part of one, costs more than to know that it is no use. */
#include "coding.h"

enum {
    CHUNK = 16, /* words that frames look for again, all together */
    SAMPLED = 16,
    TABLE_BITS = 12,
    WORTH = 32,    /* one sampled chunk in so many is a repeat */
    COUNTED = 4096 /* words, more or less */
};

/* Whether chunks come again. Their contents choose those that are looked at, so that equal ones both are. */
static int repeats(const uint8_t *words, size_t chunks, size_t bytes) {
    uint32_t table[1 << TABLE_BITS] = {0};
    size_t looked = 0, found = 0;
    for (size_t i = 0; i < chunks; ++i) {
        uint64_t hash = dense_load64(words + i * bytes) * 0x9E3779B97F4A7C15u;
        if (hash >> 32 & (SAMPLED - 1)) continue;
        uint32_t *entry = &table[hash >> (64 - TABLE_BITS)];
        ++looked;
        found += *entry && memcmp(words + (*entry - 1) * bytes, words + i * bytes, bytes) == 0;
        *entry = (uint32_t)i + 1;
    }
    return found * WORTH > looked;
}

size_t dense_least_frame(const dense_input *in) {
    const size_t bytes = in->shape.word_bytes, words = in->rows.rows * in->shape.words;
    uint32_t counts[4][256] = {{0}};
    size_t step = words / COUNTED | 1, counted = 0;
    if (repeats(in->own, words / CHUNK, CHUNK * bytes)) return 0;
    for (size_t i = 0; i < words; i += step, ++counted)
        for (size_t k = 0; k < bytes; ++k) ++counts[k][in->own[i * bytes + k]];
    double bits = 0;
    for (size_t k = 0; k < bytes; ++k) bits += dense_order0_bits(in->loops, counts[k]);
    return (size_t)(bits / 8 / (double)counted * (double)words);
}
