#include "sample_stats.h"

#include <math.h>
#include <string.h>

static const double MAX_PREDICTED_ENTROPY_RATIO =
    0.93;                                   /* of a byte's bits: predicted bytes that take less are worth a trial */
static const double MIN_ENTROPY_BITS = 4.0; /* bits of a byte, from which short repeats do not come by chance */
static const double MIN_REPEAT_FRACTION = 0.3;          /* of bytes: so many in short repeats are worth a trial */

static uint32_t
    entropy_terms[KVMNN_MAX_SAMPLE_BYTES + 1]; /* n * log2(n), in 65536ths: whole numbers have no order of summing up */

void kvmnn_samples_init(void) {
    for (int n = 1; n <= KVMNN_MAX_SAMPLE_BYTES; ++n) entropy_terms[n] = (uint32_t)(n * log2(n) * 65536 + 0.5);
}

static int is_zero(const uint8_t *window, size_t n) {
    uint8_t bits = 0;
    for (size_t i = 0; i < n; ++i) bits |= window[i];
    return bits == 0;
}

size_t kvmnn_sample_drop_zeros(uint8_t *sample, size_t n) {
    size_t num_bytes = 0;
    for (size_t begin = 0; begin < n; begin += KVMNN_SAMPLE_WINDOW_BYTES) {
        size_t size = n - begin < KVMNN_SAMPLE_WINDOW_BYTES ? n - begin : KVMNN_SAMPLE_WINDOW_BYTES;
        if (sample[begin] == 0 && is_zero(sample + begin, size)) continue;
        if (num_bytes < begin) memmove(sample + num_bytes, sample + begin, size);
        num_bytes += size;
    }
    return num_bytes ? num_bytes : n < KVMNN_SAMPLE_WINDOW_BYTES ? n : KVMNN_SAMPLE_WINDOW_BYTES;
}

static void count_bytes(const uint8_t *sample, size_t n, uint16_t counts[256]) {
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

double kvmnn_sample_entropy(const uint8_t *sample, size_t n) {
    uint16_t counts[256];
    uint64_t symbol_terms = 0;
    count_bytes(sample, n, counts);
    for (int b = 0; b < 256; ++b) symbol_terms += entropy_terms[counts[b]];
    return (double)(entropy_terms[n] - symbol_terms) / (65536.0 * (double)n);
}

size_t kvmnn_sample_max_count(const uint8_t *sample, size_t n) {
    uint16_t counts[256], max_count = 0;
    count_bytes(sample, n, counts);
    for (int b = 0; b < 256; ++b) max_count = counts[b] > max_count ? counts[b] : max_count;
    return max_count;
}

/* Bytes of a window that are in repeats of four bytes or more; `long_bytes` becomes more by those in stretches of eight.
 */
static size_t count_repeated_bytes(const uint8_t *window, size_t n, size_t *long_bytes) {
    enum { HASHED_BYTES = 4, LONG_BYTES = 8, BITS = 10 };
    uint8_t
        last_positions[1 << BITS]; /* a place that has these bytes, if any has: a window is not longer than it can say */
    size_t num_bytes = 0, begin = 0, end = 0;
    memset(last_positions, 0, sizeof last_positions);
    for (size_t i = 0; i + HASHED_BYTES <= n; ++i) {
        const uint8_t *b = window + i;
        uint32_t bytes = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
        uint8_t *slot = last_positions + (bytes * 0x9E3779B1u >> (32 - BITS));
        if (*slot < i && memcmp(window + *slot, b, HASHED_BYTES) == 0) {
            if (i > end) {
                num_bytes += end - begin;
                if (end - begin >= LONG_BYTES) *long_bytes += end - begin;
                begin = i;
            }
            end = i + HASHED_BYTES;
        }
        *slot = (uint8_t)i;
    }
    if (end - begin >= LONG_BYTES) *long_bytes += end - begin;
    return num_bytes + (end - begin);
}

int kvmnn_sample_predictability(const uint8_t *sample, size_t n, size_t step, double bits) {
    uint8_t deltas[KVMNN_MAX_SAMPLE_BYTES], xors[KVMNN_MAX_SAMPLE_BYTES];
    size_t count = 0, num_bytes = 0, repeated_bytes = 0, long_bytes = 0;
    for (size_t begin = 0; begin < n; begin += step * KVMNN_SAMPLE_WINDOW_BYTES) {
        const uint8_t *window = sample + begin;
        size_t size = n - begin < KVMNN_SAMPLE_WINDOW_BYTES ? n - begin : KVMNN_SAMPLE_WINDOW_BYTES;
        for (size_t i = 1; i < size; ++i) {
            deltas[count + i - 1] = (uint8_t)(window[i] - window[i - 1]);
            xors[count + i - 1] = (uint8_t)(window[i] ^ window[i - 1]);
        }
        count += size - 1;
        num_bytes += size;
        if (bits > MIN_ENTROPY_BITS) repeated_bytes += count_repeated_bytes(window, size, &long_bytes);
    }
    if ((double)repeated_bytes > MIN_REPEAT_FRACTION * (double)num_bytes)
        return 2 * long_bytes < repeated_bytes ? KVMNN_PREDICTABLE | KVMNN_SHORT_REPEATS : KVMNN_PREDICTABLE;
    if (count == 0) return 0;
    return kvmnn_sample_entropy(deltas, count) < MAX_PREDICTED_ENTROPY_RATIO * bits ||
           kvmnn_sample_entropy(xors, count) < MAX_PREDICTED_ENTROPY_RATIO * bits;
}
