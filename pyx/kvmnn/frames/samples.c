#include "samples.h"

#include <math.h>
#include <string.h>

static const double PREDICTED = 0.93; /* of a byte's bits: predicted bytes that take less are worth a trial */
static const double DISTINCT = 4.0;   /* bits of a byte, from which short repeats do not come by chance */
static const double REPEATED = 0.3;   /* of bytes: so many in short repeats are worth a trial */

static uint32_t costs[KVMNN_SAMPLE + 1]; /* n * log2(n), in 65536ths: whole numbers have no order of summing up */

void kvmnn_samples_init(void) {
    for (int n = 1; n <= KVMNN_SAMPLE; ++n) costs[n] = (uint32_t)(n * log2(n) * 65536 + 0.5);
}

static int is_zero(const uint8_t *look, size_t n) {
    uint8_t any = 0;
    for (size_t i = 0; i < n; ++i) any |= look[i];
    return any == 0;
}

size_t kvmnn_sample_used(uint8_t *sample, size_t n) {
    size_t used = 0;
    for (size_t begin = 0; begin < n; begin += KVMNN_LOOK) {
        size_t size = n - begin < KVMNN_LOOK ? n - begin : KVMNN_LOOK;
        if (sample[begin] == 0 && is_zero(sample + begin, size)) continue;
        if (used < begin) memmove(sample + used, sample + begin, size);
        used += size;
    }
    return used ? used : n < KVMNN_LOOK ? n : KVMNN_LOOK;
}

static void count(const uint8_t *sample, size_t n, uint16_t counts[256]) {
    uint16_t parts[3][256];
    size_t i = 0;
    memset(counts, 0, 256 * sizeof *counts);
    memset(parts, 0, sizeof parts);
    for (; i + 4 <= n; i += 4) { /* a counter that was just stored would be waited for */
        ++counts[sample[i]];
        for (int j = 0; j < 3; ++j) ++parts[j][sample[i + 1 + (size_t)j]];
    }
    for (; i < n; ++i) ++counts[sample[i]];
    for (int b = 0; b < 256; ++b) counts[b] = (uint16_t)(counts[b] + parts[0][b] + parts[1][b] + parts[2][b]);
}

double kvmnn_sample_bits(const uint8_t *sample, size_t n) {
    uint16_t counts[256];
    uint64_t saved = 0;
    count(sample, n, counts);
    for (int b = 0; b < 256; ++b) saved += costs[counts[b]];
    return (double)(costs[n] - saved) / (65536.0 * (double)n);
}

size_t kvmnn_sample_most(const uint8_t *sample, size_t n) {
    uint16_t counts[256], most = 0;
    count(sample, n, counts);
    for (int b = 0; b < 256; ++b) most = counts[b] > most ? counts[b] : most;
    return most;
}

/* Bytes of a look that are in repeats of four bytes or more; `longer` becomes more by those in stretches of eight. */
static size_t in_repeats(const uint8_t *look, size_t n, size_t *longer) {
    enum { LENGTH = 4, LONGER = 8, BITS = 10 };
    uint8_t last[1 << BITS]; /* a place that has these bytes, if any has: a look is not longer than it can say */
    size_t found = 0, begin = 0, end = 0;
    memset(last, 0, sizeof last);
    for (size_t i = 0; i + LENGTH <= n; ++i) {
        const uint8_t *b = look + i;
        uint32_t bytes = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
        uint8_t *place = last + (bytes * 0x9E3779B1u >> (32 - BITS));
        if (*place < i && memcmp(look + *place, b, LENGTH) == 0) {
            if (i > end) {
                found += end - begin;
                if (end - begin >= LONGER) *longer += end - begin;
                begin = i;
            }
            end = i + LENGTH;
        }
        *place = (uint8_t)i;
    }
    if (end - begin >= LONGER) *longer += end - begin;
    return found + (end - begin);
}

int kvmnn_sample_follows(const uint8_t *sample, size_t n, size_t every, double bits) {
    uint8_t steps[KVMNN_SAMPLE], flips[KVMNN_SAMPLE];
    size_t count = 0, seen = 0, repeated = 0, longer = 0;
    for (size_t begin = 0; begin < n; begin += every * KVMNN_LOOK) {
        const uint8_t *look = sample + begin;
        size_t size = n - begin < KVMNN_LOOK ? n - begin : KVMNN_LOOK;
        for (size_t i = 1; i < size; ++i) {
            steps[count + i - 1] = (uint8_t)(look[i] - look[i - 1]);
            flips[count + i - 1] = (uint8_t)(look[i] ^ look[i - 1]);
        }
        count += size - 1;
        seen += size;
        if (bits > DISTINCT) repeated += in_repeats(look, size, &longer);
    }
    if ((double)repeated > REPEATED * (double)seen)
        return 2 * longer < repeated ? KVMNN_FOLLOWS | KVMNN_SHORT : KVMNN_FOLLOWS;
    if (count == 0) return 0;
    return kvmnn_sample_bits(steps, count) < PREDICTED * bits || kvmnn_sample_bits(flips, count) < PREDICTED * bits;
}
