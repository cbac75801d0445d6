/* The steps of the entropy coder, for loops that hold states in registers. */
#ifndef KVMNN_DENSE_RANS_H
#define KVMNN_DENSE_RANS_H

#include "dense.h"

#if defined(__GNUC__)
#define DENSE_NOINLINE __attribute__((noinline))
#define DENSE_ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define DENSE_NOINLINE
#define DENSE_ALWAYS_INLINE inline
#endif

/* Puts a symbol before those that `state` holds; a unit may be written before `end`. `mark`: of all codes. */
#define ENCODE(state, code)                                                                      \
    do {                                                                                         \
        const dense_code code_ = *(code);                                                        \
        uint32_t f_ = code_.f_shift >> 4, v_ = (state);                                          \
        mark |= code_.start;                                                                     \
        uint32_t full_ = v_ >= f_ << 20;                                                         \
        end[-1] = (uint16_t)v_;                                                                  \
        end -= full_;                                                                            \
        v_ ^= (v_ ^ v_ >> 16) & (0u - full_);                                                    \
        uint32_t q_ = (uint32_t)((uint64_t)v_ * code_.reciprocal >> 32) >> (code_.f_shift & 15); \
        (state) = v_ + (code_.start & START_MASK) + q_ * (SCALE - f_);                           \
    } while (0)

/* A state that has become too low takes a unit in, the next after `cursor` and the `num_taken` ones. Not by a branch,
 * which would be mispredicted: where compilers like one better, it is said in the processor's words. */
#if defined(__x86_64__) && defined(__GNUC__)
#define RENORMALIZE(v, cursor, num_taken)                                      \
    do {                                                                       \
        uint32_t with_ = (v) << 16 | dense_load16((cursor) + 2 * (num_taken)); \
        __asm__("cmpl %3, %0\n\tcmovbl %2, %0\n\tadcq $0, %1"                  \
                : "+r"(v), "+r"(num_taken)                                     \
                : "r"(with_), "i"(RANS_LOWER_BOUND)                            \
                : "cc");                                                       \
    } while (0)
/* The same with BMI2: a turn by 16 is a shift for a state that is too low. */
#define RENORMALIZE_BMI2(v, cursor, num_taken)                                                    \
    do {                                                                                          \
        uint32_t with_;                                                                           \
        __asm__("rorx $16, %0, %2\n\tmovw %3, %w2\n\tcmpl %4, %0\n\tcmovbl %2, %0\n\tadcq $0, %1" \
                : "+r"(v), "+r"(num_taken), "=&r"(with_)                                          \
                : "m"(*(const uint8_t(*)[2])((cursor) + 2 * (num_taken))), "i"(RANS_LOWER_BOUND)  \
                : "cc");                                                                          \
    } while (0)
#else
#define RENORMALIZE(v, cursor, num_taken)                                                    \
    do {                                                                                     \
        uint32_t low_ = (v) < RANS_LOWER_BOUND;                                              \
        (v) ^= ((v) ^ ((v) << 16 | dense_load16((cursor) + 2 * (num_taken)))) & (0u - low_); \
        (num_taken) += low_;                                                                 \
    } while (0)
#endif

/* An entry of a decoder's table: frequency << 21 | offset << 8 | symbol. */
#define NEXT_STATE(entry, state) (((entry) >> 21) * ((state) >> SCALE_BITS) + ((entry) >> 8 & (SCALE - 1)))

/* The same where no unit may be left; 0 if one is needed and there is none. */
static inline int dense_decode_bounded(uint32_t *state, const uint32_t *entries, uint8_t *symbol,
                                       const uint8_t **cursor, const uint8_t *end) {
    uint32_t entry = entries[*state & (SCALE - 1)];
    uint32_t v = NEXT_STATE(entry, *state);
    *symbol = (uint8_t)entry;
    if (v < RANS_LOWER_BOUND) {
        if (*cursor == end) return 0;
        v = v << 16 | dense_load16(*cursor);
        *cursor += 2;
    }
    *state = v;
    return 1;
}

static inline int dense_load_states(const uint8_t *section, uint32_t states[NUM_STATES]) {
    int is_valid = 1;
    for (int i = 0; i < NUM_STATES; ++i) {
        states[i] = dense_load32(section + 4 * i);
        is_valid &= states[i] >= RANS_LOWER_BOUND && states[i] >> 31 == 0;
    }
    return is_valid;
}

static inline int dense_states_are_final(const uint32_t states[NUM_STATES]) {
    int is_final = 1;
    for (int i = 0; i < NUM_STATES; ++i) is_final &= states[i] == RANS_LOWER_BOUND;
    return is_final;
}

#endif
