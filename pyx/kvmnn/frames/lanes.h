/* Leaf kernels over byte streams, one table per SIMD level.
 *
 * A lane is every `itemsize`-th byte of an array of elements: itemsize 2 for 16-bit elements, 4 for 32-bit elements.
 * All functions are free of allocation, of Python and of alignment demands. Source and destination never overlap
 * unless a function says that it works in place.
 */
#ifndef KVMNN_LANES_H
#define KVMNN_LANES_H

#include <stddef.h>
#include <stdint.h>

enum { KVMNN_MODE_RAW = 0, KVMNN_MODE_DELTA = 1, KVMNN_MODE_XOR = 2 };

typedef struct {
    const char *name;

    /* dst[i] = src[itemsize * i + lane], then the predictor `mode` over dst with the byte before it taken as 0. */
    void (*predict_lane)(const uint8_t *src, size_t num_elements, int itemsize, int lane, int mode, uint8_t *dst);

    /* Lanes as they are: `num_elements` bytes at lanes[j], unless that is NULL. Unless `repeats` is NULL, repeats[j] says how many
       bytes of lane j are equal to the one before. */
    void (*split)(const uint8_t *src, size_t num_elements, int itemsize, uint8_t *const *lanes, size_t *repeats);

    /* All three predictors of one lane for the words [start, end), from the whole arrays: what is before start is there.
       Adds to `repeats` how many bytes of each are equal to the one before. */
    void (*predict_lane_part)(const uint8_t *src, size_t start, size_t end, int itemsize, int lane, uint8_t *raw,
                              uint8_t *delta, uint8_t *exclusive_or, size_t repeats[3]);

    /* dst[i] = src[i] past the caches, where there is a way to. */
    void (*copy_nontemporal)(uint8_t *dst, const uint8_t *src, size_t n);

    /* The predictor over one contiguous stream; `dst` gets n bytes. */
    void (*predict)(const uint8_t *src, size_t n, int mode, uint8_t *dst);

    /* The same for delta_seq or xor_seq; how many bytes of `dst` are equal to the one before. */
    size_t (*predict_counting_repeats)(const uint8_t *src, size_t n, int mode, uint8_t *dst);

    /* Undo a predictor in place. */
    void (*unpredict)(uint8_t *stream, size_t n, int mode);

    /* dst[itemsize * i + j] = lanes[j][i]. */
    void (*join)(const uint8_t *const *lanes, size_t num_elements, int itemsize, uint8_t *dst);

    /* The same past the caches, where there is a way to: for more bytes than they hold. */
    void (*join_nontemporal)(const uint8_t *const *lanes, size_t num_elements, int itemsize, uint8_t *dst);

    /* 1 where join() would give exactly `num_elements * itemsize` bytes of `expected`, else 0. */
    int (*join_equals)(const uint8_t *const *lanes, size_t num_elements, int itemsize, const uint8_t *expected);

    /* First p >= i with four equal bytes at p (p + 4 <= n), or n. */
    size_t (*find_run4)(const uint8_t *s, size_t i, size_t n);

    /* Number of i in 1..n-1 with s[i] == s[i - 1]. */
    size_t (*repeats)(const uint8_t *s, size_t n);

    /* Number of bytes equal to s[i] from i on, i < n. */
    size_t (*run_length)(const uint8_t *s, size_t i, size_t n);

    /* counts[b] += occurrences of b. */
    void (*histogram)(const uint8_t *s, size_t n, uint64_t counts[256]);
} kvmnn_lane_kernels;

/* The table of a level of simd.h that this processor runs. */
const kvmnn_lane_kernels *kvmnn_lane_kernels_at(int level);

#endif
