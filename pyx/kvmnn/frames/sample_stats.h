/* What a sample of a lane says: how many bits its bytes take, and whether they follow from those before them.
 *
 * A sample is windows of KVMNN_SAMPLE_WINDOW_BYTES bytes, one after the other; the last may be shorter.
 */
#ifndef KVMNN_SAMPLE_STATS_H
#define KVMNN_SAMPLE_STATS_H

#include <stddef.h>
#include <stdint.h>

enum {
    KVMNN_SAMPLE_WINDOW_BYTES = 256,
    KVMNN_NUM_SAMPLE_WINDOWS = 16,
    KVMNN_MAX_SAMPLE_BYTES = (KVMNN_NUM_SAMPLE_WINDOWS + 1) * KVMNN_SAMPLE_WINDOW_BYTES,
};

/* To be called once, before the others. */
void kvmnn_samples_init(void);

/* Takes windows of zeros out of n bytes, unless all are, and moves the others together; how many bytes are left. Where a cache
   is not used it says nothing of the rest. */
size_t kvmnn_sample_drop_zeros(uint8_t *sample, size_t n);

/* Order-0 entropy of 1 to KVMNN_MAX_SAMPLE_BYTES bytes, in bits a byte: the same on every machine. */
double kvmnn_sample_entropy(const uint8_t *sample, size_t n);

/* How often the most frequent of these bytes is there. */
size_t kvmnn_sample_max_count(const uint8_t *sample, size_t n);

/* KVMNN_PREDICTABLE if a predictor makes the bytes of every `step`-th window cheaper or short repeats are all over, and
   with it KVMNN_SHORT_REPEATS if most of these are too short for a search that looks at one place in eight; 0 if
   neither. `bits`: of the sample. */
enum { KVMNN_PREDICTABLE = 1, KVMNN_SHORT_REPEATS = 2 };
int kvmnn_sample_predictability(const uint8_t *sample, size_t n, size_t step, double bits);

#endif
