#include "packing.h"

#include <string.h>

#include "far.h"
#include "splice.h"
#include "transpose.h"

#define MIN(a, b) ((a) < (b) ? (a) : (b))

static size_t up(size_t a, size_t b) { return (a + b - 1) / b; }

/* -- keys: tiles of hP tokens, [dims / lP][hP][lP] ------------------------------------------------------------------ */

/* Bytes of a unit (lP words of one token), of a row of units (hP tokens) and of a tile. */
static size_t key_unit(const kvmnn_pack *p) { return p->lP * p->word; }
static size_t key_row(const kvmnn_pack *p) { return p->hP * key_unit(p); }
static size_t key_tile(const kvmnn_pack *p) { return up(p->dims, p->lP) * key_row(p); }

/* Bytes of the words in the last unit where dims is no multiple of lP, else 0. */
static size_t key_tail(const kvmnn_pack *p) { return p->dims % p->lP * p->word; }

/* Where token t of a head starts, and how many of `count` tokens from there on lie in the same tile. */
static size_t key_offset(const kvmnn_pack *p, size_t t) { return t / p->hP * key_tile(p) + t % p->hP * key_unit(p); }
static size_t key_run(const kvmnn_pack *p, size_t t, size_t count) { return MIN(count, p->hP - t % p->hP); }

static void gather_keys(const kvmnn_pack *p, const uint8_t *head, size_t start, size_t count, uint8_t *rows,
                        size_t row_stride) {
    const size_t units = p->dims / p->lP, unit = key_unit(p), row = key_row(p), tail = key_tail(p);
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        const uint8_t *tile = head + key_offset(p, start);
        n = key_run(p, start, count);
        kvmnn_transpose(rows, row_stride, tile, row, units, n, unit);
        for (size_t i = 0; tail > 0 && i < n; ++i)
            memcpy(rows + i * row_stride + units * unit, tile + units * row + i * unit, tail);
    }
}

static void scatter_keys(const kvmnn_pack *p, uint8_t *head, size_t start, size_t count, const uint8_t *rows,
                         size_t row_stride) {
    const size_t units = p->dims / p->lP, unit = key_unit(p), row = key_row(p), tail = key_tail(p);
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        uint8_t *tile = head + key_offset(p, start);
        n = key_run(p, start, count);
        kvmnn_transpose(tile, row, rows, row_stride, n, units, unit);
        for (size_t i = 0; tail > 0 && i < n; ++i)
            memcpy(tile + units * row + i * unit, rows + i * row_stride + units * unit, tail);
    }
}

static void zero_keys(const kvmnn_pack *p, uint8_t *head, size_t start, size_t count) {
    const size_t units = p->dims / p->lP, unit = key_unit(p), row = key_row(p), tail = key_tail(p);
    for (size_t n; count > 0; start += n, count -= n) {
        uint8_t *tile = head + key_offset(p, start);
        n = key_run(p, start, count);
        for (size_t u = 0; u < units; ++u) memset(tile + u * row, 0, n * unit);
        for (size_t i = 0; tail > 0 && i < n; ++i) memset(tile + units * row + i * unit, 0, tail);
    }
}

static void pad_keys(const kvmnn_pack *p, uint8_t *head, size_t live, size_t bytes) {
    const size_t units = p->dims / p->lP, unit = key_unit(p), row = key_row(p), tail = key_tail(p);
    const size_t tiles = up(live, p->hP);
    for (size_t t = 0; tail > 0 && t < tiles; ++t)
        for (size_t i = 0; i < p->hP; ++i) memset(head + t * key_tile(p) + units * row + i * unit + tail, 0, unit - tail);
    if (live % p->hP != 0) zero_keys(p, head, live, p->hP - live % p->hP);
    memset(head + tiles * key_tile(p), 0, bytes - tiles * key_tile(p));
}

/* Tokens move inside tiles of the same phase: whole tiles at once, or a piece of every row of units. */
static void shift_keys_in_phase(const kvmnn_pack *p, uint8_t *head, size_t src, size_t dst, size_t count) {
    const size_t units = p->dims / p->lP, unit = key_unit(p), row = key_row(p), tail = key_tail(p), tile = key_tile(p);
    for (size_t n; count > 0; src += n, dst += n, count -= n) {
        uint8_t *to = head + key_offset(p, dst);
        const uint8_t *from = head + key_offset(p, src);
        n = key_run(p, dst, count);
        if (n == p->hP && tail == 0) {
            n = count - count % p->hP;
            memmove(to, from, n / p->hP * tile);
            continue;
        }
        if (n == p->hP) memmove(to, from, units * row);
        else
            for (size_t u = 0; u < units; ++u) memmove(to + u * row, from + u * row, n * unit);
        for (size_t i = 0; tail > 0 && i < n; ++i)
            memmove(to + units * row + i * unit, from + units * row + i * unit, tail);
    }
}

/* -- values: blocks of tokens, [dims / hP][block / lP][hP][lP] --------------------------------------------------------- */

/* Bytes of a group (lP tokens of hP dims), of a column (all groups of hP dims) and of a block. */
static size_t value_group(const kvmnn_pack *p) { return p->lP * p->hP * p->word; }
static size_t value_column(const kvmnn_pack *p) { return up(p->block, p->lP) * value_group(p); }
static size_t value_block(const kvmnn_pack *p) { return up(p->dims, p->hP) * value_column(p); }

/* Where the first dim of token t lies; and how many of `count` tokens from t on share its block. */
static size_t value_offset(const kvmnn_pack *p, size_t t) {
    size_t r = t % p->block;
    return t / p->block * value_block(p) + r / p->lP * value_group(p) + r % p->lP * p->word;
}
static size_t value_run(const kvmnn_pack *p, size_t t, size_t count) { return MIN(count, p->block - t % p->block); }

/* Tokens of the run at t that lie in the group at t. */
static size_t value_part(const kvmnn_pack *p, size_t t, size_t run) { return MIN(run, p->lP - t % p->block % p->lP); }

static void gather_values(const kvmnn_pack *p, const uint8_t *head, size_t start, size_t count, uint8_t *rows,
                          size_t row_stride) {
    const size_t column = value_column(p), unit = p->lP * p->word, chunk = p->hP * p->word, columns = p->dims / p->hP;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        const uint8_t *from = head + value_offset(p, start);
        n = value_part(p, start, value_run(p, start, count));
        if (p->lP == 1) {
            n = value_run(p, start, count);
            kvmnn_transpose(rows, row_stride, from, column, columns, n, chunk);
            for (size_t i = 0; columns * p->hP < p->dims && i < n; ++i)
                memcpy(rows + i * row_stride + columns * chunk, from + columns * column + i * chunk,
                       p->dims * p->word - columns * chunk);
            continue;
        }
        for (size_t d = 0; d < p->dims; d += p->hP)
            kvmnn_transpose(rows + d * p->word, row_stride, from + d / p->hP * column, unit, MIN(p->hP, p->dims - d), n,
                            p->word);
    }
}

static void scatter_values(const kvmnn_pack *p, uint8_t *head, size_t start, size_t count, const uint8_t *rows,
                           size_t row_stride) {
    const size_t column = value_column(p), unit = p->lP * p->word, chunk = p->hP * p->word, columns = p->dims / p->hP;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        uint8_t *to = head + value_offset(p, start);
        n = value_part(p, start, value_run(p, start, count));
        if (p->lP == 1) {
            n = value_run(p, start, count);
            kvmnn_transpose(to, column, rows, row_stride, n, columns, chunk);
            for (size_t i = 0; columns * p->hP < p->dims && i < n; ++i)
                memcpy(to + columns * column + i * chunk, rows + i * row_stride + columns * chunk,
                       p->dims * p->word - columns * chunk);
            continue;
        }
        for (size_t d = 0; d < p->dims; d += p->hP)
            kvmnn_transpose(to + d / p->hP * column, unit, rows + d * p->word, row_stride, n, MIN(p->hP, p->dims - d),
                            p->word);
    }
}

/* Words of `tokens` tokens of one group and `width` dims, from `to` on: copied from `from`, or zeroed where it is NULL. */
static void set_group(const kvmnn_pack *p, uint8_t *to, const uint8_t *from, size_t tokens, size_t width) {
    const size_t unit = p->lP * p->word, bytes = tokens * p->word;
    if (tokens == p->lP) {
        if (from != NULL) memmove(to, from, width * unit);
        else memset(to, 0, width * unit);
        return;
    }
    for (size_t d = 0; d < width; ++d) {
        if (from != NULL) memmove(to + d * unit, from + d * unit, bytes);
        else memset(to + d * unit, 0, bytes);
    }
}

/* The same for `tokens` tokens of one column, the first of them in place `phase` of its group. */
static void set_column(const kvmnn_pack *p, uint8_t *to, const uint8_t *from, size_t phase, size_t tokens,
                       size_t width) {
    const size_t group = value_group(p);
    while (tokens > 0) {
        size_t n = MIN(tokens, p->lP - phase), step = group - phase * p->word;
        if (n == p->lP && width == p->hP) {
            size_t bytes = tokens / p->lP * group;
            if (from != NULL) memmove(to, from, bytes);
            else memset(to, 0, bytes);
            n = tokens / p->lP * p->lP;
            step = bytes;
        } else {
            set_group(p, to, from, n, width);
        }
        phase = 0;
        tokens -= n;
        to += step;
        if (from != NULL) from += step;
    }
}

static void zero_values(const kvmnn_pack *p, uint8_t *head, size_t start, size_t count) {
    for (size_t n; count > 0; start += n, count -= n) {
        uint8_t *to = head + value_offset(p, start);
        n = value_run(p, start, count);
        for (size_t d = 0; d < p->dims; d += p->hP, to += value_column(p))
            set_column(p, to, NULL, start % p->block % p->lP, n, MIN(p->hP, p->dims - d));
    }
}

static void pad_values(const kvmnn_pack *p, uint8_t *head, size_t live, size_t bytes) {
    const size_t column = value_column(p), rows = up(p->block, p->lP) * p->lP, unit = p->lP * p->word;
    const size_t blocks = up(live, p->block), width = p->dims % p->hP;
    for (size_t b = 0; b < blocks; ++b) {
        const size_t n = MIN(p->block, live - b * p->block);
        uint8_t *to = head + b * value_block(p);
        for (size_t d = 0; d < p->dims; d += p->hP, to += column)
            set_column(p, to + n / p->lP * value_group(p) + n % p->lP * p->word, NULL, n % p->lP, rows - n, p->hP);
        for (size_t g = 0; width > 0 && g < up(n, p->lP); ++g)
            memset(to - column + g * value_group(p) + width * unit, 0, (p->hP - width) * unit);
    }
    memset(head + blocks * value_block(p), 0, bytes - blocks * value_block(p));
}

/* Tokens move between places of the same phase in their groups. */
static void shift_values_in_phase(const kvmnn_pack *p, uint8_t *head, size_t src, size_t dst, size_t count) {
    const size_t column = value_column(p);
    const int whole_blocks = p->dims % p->hP == 0 && p->block % p->lP == 0;
    for (size_t n; count > 0; src += n, dst += n, count -= n) {
        uint8_t *to = head + value_offset(p, dst);
        const uint8_t *from = head + value_offset(p, src);
        n = value_run(p, src, value_run(p, dst, count));
        if (n == p->block && whole_blocks) {
            n = count - count % p->block;
            memmove(to, from, n / p->block * value_block(p));
            continue;
        }
        for (size_t d = 0; d < p->dims; d += p->hP, to += column, from += column)
            set_column(p, to, from, src % p->block % p->lP, n, MIN(p->hP, p->dims - d));
    }
}

/* -- moving tokens inside a head -------------------------------------------------------------------------------------- */

/* Tokens that go through scratch at once: as many as it holds and end a tile or group of the destination; one at a time
 * where the copy runs into tokens it has yet to read, as the loop over tokens does that this must equal. */
static size_t through_scratch(size_t src, size_t dst, size_t count, size_t room, size_t step) {
    if (dst > src) return 1;
    if (room > step) room -= room % step;
    return MIN(count, room > dst % step ? room - dst % step : room);
}

static void shift_keys(const kvmnn_pack *p, uint8_t *head, size_t src, size_t dst, size_t count, uint8_t *scratch,
                       size_t scratch_bytes) {
    const size_t row = p->dims * p->word, units = p->dims / p->lP, width = key_row(p), tile = key_tile(p);
    const int splices = dst < src && key_tail(p) == 0 && kvmnn_can_splice(width, units);
    if (src == dst) return;
    if (dst < src && (src - dst) % p->hP == 0) {
        shift_keys_in_phase(p, head, src, dst, count);
        return;
    }
    for (size_t n; count > 0; src += n, dst += n, count -= n) {
        if (splices && dst % p->hP == 0 && count >= p->hP) {
            const uint8_t *from = head + src / p->hP * tile;
            n = p->hP;
            kvmnn_splice(head + dst / p->hP * tile, from, from + tile, width, src % p->hP * key_unit(p), units);
            continue;
        }
        n = through_scratch(src, dst, splices ? key_run(p, dst, count) : count, scratch_bytes / row, p->hP);
        gather_keys(p, head, src, n, scratch, row);
        scatter_keys(p, head, dst, n, scratch, row);
    }
}

static void shift_values(const kvmnn_pack *p, uint8_t *head, size_t src, size_t dst, size_t count, uint8_t *scratch,
                         size_t scratch_bytes) {
    const size_t row = p->dims * p->word, column = value_column(p), group = value_group(p), width = p->lP * p->word;
    const int whole = p->block % p->lP == 0; /* groups do not straddle blocks */
    const int splices = dst < src && whole && p->dims % p->hP == 0 && kvmnn_can_splice(width, p->hP);
    if (src == dst) return;
    if (dst < src && whole && src % p->lP == dst % p->lP) {
        shift_values_in_phase(p, head, src, dst, count);
        return;
    }
    for (size_t n; count > 0; src += n, dst += n, count -= n) {
        const size_t groups = value_run(p, src, value_run(p, dst, count)) / p->lP;
        if (splices && dst % p->lP == 0 && groups > 0) {
            const size_t skip = src % p->lP * p->word;
            uint8_t *to = head + value_offset(p, dst);
            const uint8_t *from = head + value_offset(p, src - src % p->lP);
            n = groups * p->lP;
            for (size_t d = 0; d < p->dims; d += p->hP, to += column, from += column)
                kvmnn_splice(to, from, from + group, width, skip, groups * p->hP);
            continue;
        }
        n = through_scratch(src, dst, splices ? value_part(p, dst, count) : count, scratch_bytes / row, p->lP);
        gather_values(p, head, src, n, scratch, row);
        scatter_values(p, head, dst, n, scratch, row);
    }
}

/* -- past the caches -------------------------------------------------------------------------------------------------- */

static void copy_rows_far(uint8_t *rows, size_t row_stride, const uint8_t *from, size_t row, size_t count,
                          const uint8_t *next) {
    if (row_stride == row) kvmnn_copy_far(rows, from, count * row, next);
    else
        for (size_t i = 0; i < count; ++i, next += row) kvmnn_copy_far(rows + i * row_stride, from + i * row, row, next);
}

static void gather_keys_far(const kvmnn_pack *p, const uint8_t *head, size_t start, size_t count, uint8_t *rows,
                            size_t row_stride, uint8_t *scratch, size_t scratch_bytes) {
    const size_t row = p->dims * p->word;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        n = through_scratch(start, start, count, scratch_bytes / row, p->hP);
        gather_keys(p, head, start, n, scratch, row);
        copy_rows_far(rows, row_stride, scratch, row, n, head + key_offset(p, start + n));
    }
    kvmnn_far_done();
}

static void gather_values_far(const kvmnn_pack *p, const uint8_t *head, size_t start, size_t count, uint8_t *rows,
                              size_t row_stride, uint8_t *scratch, size_t scratch_bytes) {
    const size_t row = p->dims * p->word;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        n = through_scratch(start, start, count, scratch_bytes / row, p->lP);
        gather_values(p, head, start, n, scratch, row);
        copy_rows_far(rows, row_stride, scratch, row, n, head + value_offset(p, start + n));
    }
    kvmnn_far_done();
}

static void scatter_keys_far(const kvmnn_pack *p, uint8_t *head, size_t start, size_t count, const uint8_t *rows,
                             size_t row_stride, uint8_t *scratch, size_t scratch_bytes) {
    const size_t tile = key_tile(p), most = scratch_bytes / tile * p->hP;
    const int whole = most > 0 && p->dims % p->lP == 0;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        if (!whole || start % p->hP != 0 || count < p->hP) {
            n = whole ? key_run(p, start, count) : count;
            scatter_keys(p, head, start, n, rows, row_stride);
            continue;
        }
        n = MIN(count - count % p->hP, most);
        scatter_keys(p, scratch, 0, n, rows, row_stride);
        kvmnn_copy_far(head + key_offset(p, start), scratch, n / p->hP * tile,
                       rows + n * row_stride);
    }
    kvmnn_far_done();
}

static void scatter_values_far(const kvmnn_pack *p, uint8_t *head, size_t start, size_t count, const uint8_t *rows,
                               size_t row_stride, uint8_t *scratch, size_t scratch_bytes) {
    const int whole = value_block(p) <= scratch_bytes && p->dims % p->hP == 0 && p->block % p->lP == 0;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        n = whole ? value_run(p, start, count) : count;
        if (!whole || n < p->block) {
            scatter_values(p, head, start, n, rows, row_stride);
            continue;
        }
        scatter_values(p, scratch, 0, n, rows, row_stride);
        kvmnn_copy_far(head + value_offset(p, start), scratch, value_block(p), rows + n * row_stride);
    }
    kvmnn_far_done();
}

const kvmnn_packing kvmnn_keys = {
    gather_keys, gather_keys_far, scatter_keys, scatter_keys_far, zero_keys, pad_keys, shift_keys,
};

const kvmnn_packing kvmnn_values = {
    gather_values, gather_values_far, scatter_values, scatter_values_far, zero_values, pad_values, shift_values,
};

const char *kvmnn_packing_level(void) {
#if !defined(KVMNN_VECTORS)
    return "loops";
#elif defined(__SSE2__)
    return "sse2";
#elif defined(__ARM_NEON)
    return "neon";
#else
    return "vectors";
#endif
}
