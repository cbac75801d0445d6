"""Packed K/V buffers: copying a token range out, in, and zeroing it (docs/layout.md).

Offsets are in elements. `K` and `V` describe one head: where token t, dim d lies is

    K(t, d) = t/hP * rup(D,lP)*hP + d/lP * hP*lP + t%hP * lP + d%lP
    V(t, d) = t/FA * s0 + d/hP * s1 + (t%FA)/lP * lP*hP + d%hP * lP + t%FA % lP

The caller has checked every size; `check` in kvmnn.layout is what stands between these loops and bad input.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy, memset

cdef enum:
    GATHER = 0
    SCATTER = 1
    ZERO = 2

ctypedef fused word:
    uint16_t
    uint32_t


cdef inline void move(word *packed, word *plain, int what) noexcept nogil:
    # memcpy, because a caller's buffer may start at any address
    if what == GATHER:
        memcpy(<void *>plain, <void *>packed, sizeof(word))
    elif what == SCATTER:
        memcpy(<void *>packed, <void *>plain, sizeof(word))
    else:
        memset(<void *>packed, 0, sizeof(word))


cdef void move_keys(
    word *head, word *plain, size_t start, size_t count, size_t dims, size_t lP, size_t hP, int what
) noexcept nogil:
    cdef size_t t, d, row, group = (dims + lP - 1) // lP * lP * hP
    for t in range(start, start + count):
        row = t // hP * group + t % hP * lP
        for d in range(dims):
            move(head + row + d // lP * hP * lP + d % lP, plain, what)
            if what != ZERO:
                plain += 1


cdef void move_values(
    word *head, word *plain, size_t start, size_t count, size_t dims, size_t lP, size_t hP, size_t block, int what
) noexcept nogil:
    cdef size_t t, d, row, r
    cdef size_t s1 = (block + lP - 1) // lP * lP * hP
    cdef size_t s0 = s1 * ((dims + hP - 1) // hP)
    for t in range(start, start + count):
        r = t % block
        row = t // block * s0 + r // lP * lP * hP + r % lP
        for d in range(dims):
            move(head + row + d // hP * s1 + d % hP * lP, plain, what)
            if what != ZERO:
                plain += 1


cdef void move_heads(
    word *keys, word *values, word *plain_keys, word *plain_values, size_t heads, size_t dims, size_t start,
    size_t count, size_t lP, size_t hP, size_t block, size_t key_head, size_t value_head, int what
) noexcept nogil:
    cdef size_t h, offset
    for h in range(heads):
        offset = 0 if what == ZERO else h * count * dims
        move_keys(keys + h * key_head, plain_keys + offset, start, count, dims, lP, hP, what)
        move_values(values + h * value_head, plain_values + offset, start, count, dims, lP, hP, block, what)


def move_range(
    const uint8_t[::1] keys not None, const uint8_t[::1] values not None,
    const uint8_t[::1] plain_keys, const uint8_t[::1] plain_values,
    int itemsize, size_t heads, size_t dims, size_t start, size_t count, size_t lP, size_t hP, size_t block,
    size_t key_head, size_t value_head, int what
) -> None:
    """Gather (0), scatter (1) or zero (2) tokens [start, start + count) of every head.

    Sizes are checked before, and so is that what is written to (the plain arrays, or the packed buffers) is writable.
    """
    cdef uint8_t *k = <uint8_t *>&keys[0]
    cdef uint8_t *v = <uint8_t *>&values[0]
    cdef uint8_t *pk = NULL
    cdef uint8_t *pv = NULL
    if what != ZERO:
        pk = <uint8_t *>&plain_keys[0]
        pv = <uint8_t *>&plain_values[0]
    with nogil:
        if itemsize == 2:
            move_heads[uint16_t](
                <uint16_t *>k, <uint16_t *>v, <uint16_t *>pk, <uint16_t *>pv, heads, dims, start, count, lP, hP, block,
                key_head, value_head, what,
            )
        else:
            move_heads[uint32_t](
                <uint32_t *>k, <uint32_t *>v, <uint32_t *>pk, <uint32_t *>pv, heads, dims, start, count, lP, hP, block,
                key_head, value_head, what,
            )
