/* What a sample of a lane says: how many bits its bytes take, and whether they follow from those before them.
 *
 * A sample is looks of KVMNN_LOOK bytes, one behind the other, the last of which may be shorter.
 */
#ifndef KVMNN_SAMPLES_H
#define KVMNN_SAMPLES_H

#include <stddef.h>
#include <stdint.h>

enum {
    KVMNN_LOOK = 256,
    KVMNN_LOOKS = 16,
    KVMNN_SAMPLE = (KVMNN_LOOKS + 1) * KVMNN_LOOK, /* bytes of a sample, at most */
};

/* To be called once, before the others. */
void kvmnn_samples_init(void);

/* Takes looks of zeros out of n bytes, unless all are, and moves the others together; how many bytes are left. Where a cache
   is not used it says nothing of the rest. */
size_t kvmnn_sample_used(uint8_t *sample, size_t n);

/* Order-0 entropy of 1 to KVMNN_SAMPLE bytes, in bits a byte: the same on every machine. */
double kvmnn_sample_bits(const uint8_t *sample, size_t n);

/* How often the most frequent of these bytes is there. */
size_t kvmnn_sample_most(const uint8_t *sample, size_t n);

/* KVMNN_FOLLOWS if a predictor makes the bytes of every `every`th look cheaper or short repeats are all over, and with
   it KVMNN_SHORT if most of these are too short for a search that looks at one place in eight; 0 if neither. `bits`: of
   the sample. */
enum { KVMNN_FOLLOWS = 1, KVMNN_SHORT = 2 };
int kvmnn_sample_follows(const uint8_t *sample, size_t n, size_t every, double bits);

#endif
