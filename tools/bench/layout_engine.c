/* The engine's own way of packing, reading and moving, for tools/bench/layout.py: one element after the other, each
 * place computed from the index formulas, as MNN's cache manager does it. */
#include <stddef.h>
#include <stdint.h>

typedef struct {
    size_t dims, lP, hP, block;
} numbers;

static size_t key_index(const numbers *n, size_t t, size_t d) {
    return (t / n->hP) * ((n->dims + n->lP - 1) / n->lP * n->lP) * n->hP + (d / n->lP) * n->hP * n->lP +
           (t % n->hP) * n->lP + d % n->lP;
}

static size_t value_index(const numbers *n, size_t t, size_t d) {
    size_t s2 = n->lP * n->hP, s1 = (n->block + n->lP - 1) / n->lP * s2, s0 = s1 * ((n->dims + n->hP - 1) / n->hP);
    size_t r = t % n->block;
    return (t / n->block) * s0 + (d / n->hP) * s1 + (r / n->lP) * s2 + (d % n->hP) * n->lP + r % n->lP;
}

#define LOOPS(word)                                                                                                    \
    void pack_keys_##word(const numbers *n, word##_t *head, const word##_t *rows, size_t tokens) {                     \
        for (size_t t = 0; t < tokens; ++t)                                                                            \
            for (size_t d = 0; d < n->dims; ++d) head[key_index(n, t, d)] = rows[t * n->dims + d];                     \
    }                                                                                                                  \
    void pack_values_##word(const numbers *n, word##_t *head, const word##_t *rows, size_t tokens) {                   \
        for (size_t t = 0; t < tokens; ++t)                                                                            \
            for (size_t d = 0; d < n->dims; ++d) head[value_index(n, t, d)] = rows[t * n->dims + d];                   \
    }                                                                                                                  \
    void unpack_keys_##word(const numbers *n, word##_t *head, word##_t *rows, size_t tokens) {                         \
        for (size_t t = 0; t < tokens; ++t)                                                                            \
            for (size_t d = 0; d < n->dims; ++d) rows[t * n->dims + d] = head[key_index(n, t, d)];                     \
    }                                                                                                                  \
    void unpack_values_##word(const numbers *n, word##_t *head, word##_t *rows, size_t tokens) {                       \
        for (size_t t = 0; t < tokens; ++t)                                                                            \
            for (size_t d = 0; d < n->dims; ++d) rows[t * n->dims + d] = head[value_index(n, t, d)];                   \
    }                                                                                                                  \
    void move_##word(const numbers *n, word##_t *keys, word##_t *values, size_t src, size_t dst, size_t count) {       \
        for (size_t i = 0; i < count; ++i)                                                                             \
            for (size_t d = 0; d < n->dims; ++d) {                                                                     \
                keys[key_index(n, dst + i, d)] = keys[key_index(n, src + i, d)];                                       \
                values[value_index(n, dst + i, d)] = values[value_index(n, src + i, d)];                               \
            }                                                                                                          \
    }

LOOPS(uint16)
LOOPS(uint32)
