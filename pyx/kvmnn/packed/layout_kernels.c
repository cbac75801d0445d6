#include "layout_kernels.h"

#include <string.h>

#include "nontemporal.h"
#include "row_merge.h"
#include "transpose.h"

#define MIN(a, b) ((a) < (b) ? (a) : (b))

static size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

/* -- keys: tiles of hP tokens, [dims / lP][hP][lP] ------------------------------------------------------------------ */

/* Bytes of a unit (lP words of one token), of a row of units (hP tokens) and of a tile. */
static size_t key_unit(const kvmnn_layout *layout) { return layout->lP * layout->word_bytes; }
static size_t key_row(const kvmnn_layout *layout) { return layout->hP * key_unit(layout); }
static size_t key_tile(const kvmnn_layout *layout) { return ceil_div(layout->dims, layout->lP) * key_row(layout); }

/* Bytes of the words in the last unit where dims is no multiple of lP, else 0. */
static size_t key_tail(const kvmnn_layout *layout) { return layout->dims % layout->lP * layout->word_bytes; }

/* Where token t of a head starts, and how many of `count` tokens from there on lie in the same tile. */
static size_t key_offset(const kvmnn_layout *layout, size_t t) {
    return t / layout->hP * key_tile(layout) + t % layout->hP * key_unit(layout);
}
static size_t key_run(const kvmnn_layout *layout, size_t t, size_t count) {
    return MIN(count, layout->hP - t % layout->hP);
}

static void gather_keys(const kvmnn_layout *layout, const uint8_t *head, size_t start, size_t count, uint8_t *rows,
                        size_t row_stride) {
    const size_t units = layout->dims / layout->lP, unit = key_unit(layout), row = key_row(layout),
                 tail = key_tail(layout);
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        const uint8_t *tile = head + key_offset(layout, start);
        n = key_run(layout, start, count);
        kvmnn_transpose(rows, row_stride, tile, row, units, n, unit);
        for (size_t i = 0; tail > 0 && i < n; ++i)
            memcpy(rows + i * row_stride + units * unit, tile + units * row + i * unit, tail);
    }
}

static void scatter_keys(const kvmnn_layout *layout, uint8_t *head, size_t start, size_t count, const uint8_t *rows,
                         size_t row_stride) {
    const size_t units = layout->dims / layout->lP, unit = key_unit(layout), row = key_row(layout),
                 tail = key_tail(layout);
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        uint8_t *tile = head + key_offset(layout, start);
        n = key_run(layout, start, count);
        kvmnn_transpose(tile, row, rows, row_stride, n, units, unit);
        for (size_t i = 0; tail > 0 && i < n; ++i)
            memcpy(tile + units * row + i * unit, rows + i * row_stride + units * unit, tail);
    }
}

static void zero_keys(const kvmnn_layout *layout, uint8_t *head, size_t start, size_t count) {
    const size_t units = layout->dims / layout->lP, unit = key_unit(layout), row = key_row(layout),
                 tail = key_tail(layout);
    for (size_t n; count > 0; start += n, count -= n) {
        uint8_t *tile = head + key_offset(layout, start);
        n = key_run(layout, start, count);
        for (size_t u = 0; u < units; ++u) memset(tile + u * row, 0, n * unit);
        for (size_t i = 0; tail > 0 && i < n; ++i) memset(tile + units * row + i * unit, 0, tail);
    }
}

static void pad_keys(const kvmnn_layout *layout, uint8_t *head, size_t num_valid, size_t bytes) {
    const size_t units = layout->dims / layout->lP, unit = key_unit(layout), row = key_row(layout),
                 tail = key_tail(layout);
    const size_t tiles = ceil_div(num_valid, layout->hP);
    for (size_t t = 0; tail > 0 && t < tiles; ++t)
        for (size_t i = 0; i < layout->hP; ++i)
            memset(head + t * key_tile(layout) + units * row + i * unit + tail, 0, unit - tail);
    if (num_valid % layout->hP != 0) zero_keys(layout, head, num_valid, layout->hP - num_valid % layout->hP);
    memset(head + tiles * key_tile(layout), 0, bytes - tiles * key_tile(layout));
}

/* Tokens move inside tiles of the same phase: whole tiles at once, or a piece of every row of units. */
static void shift_keys_in_phase(const kvmnn_layout *layout, uint8_t *head, size_t src, size_t dst, size_t count) {
    const size_t units = layout->dims / layout->lP, unit = key_unit(layout), row = key_row(layout),
                 tail = key_tail(layout), tile = key_tile(layout);
    for (size_t n; count > 0; src += n, dst += n, count -= n) {
        uint8_t *target = head + key_offset(layout, dst);
        const uint8_t *source = head + key_offset(layout, src);
        n = key_run(layout, dst, count);
        if (n == layout->hP && tail == 0) {
            n = count - count % layout->hP;
            memmove(target, source, n / layout->hP * tile);
            continue;
        }
        if (n == layout->hP) memmove(target, source, units * row);
        else
            for (size_t u = 0; u < units; ++u) memmove(target + u * row, source + u * row, n * unit);
        for (size_t i = 0; tail > 0 && i < n; ++i)
            memmove(target + units * row + i * unit, source + units * row + i * unit, tail);
    }
}

/* -- values: blocks of tokens, [dims / hP][block / lP][hP][lP] --------------------------------------------------------- */

/* Bytes of a group (lP tokens of hP dims), of a column (all groups of hP dims) and of a block. */
static size_t value_group(const kvmnn_layout *layout) { return layout->lP * layout->hP * layout->word_bytes; }
static size_t value_column(const kvmnn_layout *layout) {
    return ceil_div(layout->block_tokens, layout->lP) * value_group(layout);
}
static size_t value_block(const kvmnn_layout *layout) {
    return ceil_div(layout->dims, layout->hP) * value_column(layout);
}

/* Where the first dim of token t lies; and how many of `count` tokens from t on share its block. */
static size_t value_offset(const kvmnn_layout *layout, size_t t) {
    size_t r = t % layout->block_tokens;
    return t / layout->block_tokens * value_block(layout) + r / layout->lP * value_group(layout) +
           r % layout->lP * layout->word_bytes;
}
static size_t value_run(const kvmnn_layout *layout, size_t t, size_t count) {
    return MIN(count, layout->block_tokens - t % layout->block_tokens);
}

/* Tokens of the run at t that lie in the group at t. */
static size_t value_part(const kvmnn_layout *layout, size_t t, size_t run) {
    return MIN(run, layout->lP - t % layout->block_tokens % layout->lP);
}

static void gather_values(const kvmnn_layout *layout, const uint8_t *head, size_t start, size_t count, uint8_t *rows,
                          size_t row_stride) {
    const size_t column = value_column(layout), unit = layout->lP * layout->word_bytes,
                 chunk = layout->hP * layout->word_bytes, columns = layout->dims / layout->hP;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        const uint8_t *source = head + value_offset(layout, start);
        n = value_part(layout, start, value_run(layout, start, count));
        if (layout->lP == 1) {
            n = value_run(layout, start, count);
            kvmnn_transpose(rows, row_stride, source, column, columns, n, chunk);
            for (size_t i = 0; columns * layout->hP < layout->dims && i < n; ++i)
                memcpy(rows + i * row_stride + columns * chunk, source + columns * column + i * chunk,
                       layout->dims * layout->word_bytes - columns * chunk);
            continue;
        }
        for (size_t d = 0; d < layout->dims; d += layout->hP)
            kvmnn_transpose(rows + d * layout->word_bytes, row_stride, source + d / layout->hP * column, unit,
                            MIN(layout->hP, layout->dims - d), n, layout->word_bytes);
    }
}

static void scatter_values(const kvmnn_layout *layout, uint8_t *head, size_t start, size_t count, const uint8_t *rows,
                           size_t row_stride) {
    const size_t column = value_column(layout), unit = layout->lP * layout->word_bytes,
                 chunk = layout->hP * layout->word_bytes, columns = layout->dims / layout->hP;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        uint8_t *target = head + value_offset(layout, start);
        n = value_part(layout, start, value_run(layout, start, count));
        if (layout->lP == 1) {
            n = value_run(layout, start, count);
            kvmnn_transpose(target, column, rows, row_stride, n, columns, chunk);
            for (size_t i = 0; columns * layout->hP < layout->dims && i < n; ++i)
                memcpy(target + columns * column + i * chunk, rows + i * row_stride + columns * chunk,
                       layout->dims * layout->word_bytes - columns * chunk);
            continue;
        }
        for (size_t d = 0; d < layout->dims; d += layout->hP)
            kvmnn_transpose(target + d / layout->hP * column, unit, rows + d * layout->word_bytes, row_stride, n,
                            MIN(layout->hP, layout->dims - d), layout->word_bytes);
    }
}

/* Words of `tokens` tokens of one group and `width` dims, from `target` on: copied from `source`, or zeroed where it is
 * NULL. */
static void set_group(const kvmnn_layout *layout, uint8_t *target, const uint8_t *source, size_t tokens, size_t width) {
    const size_t unit = layout->lP * layout->word_bytes, bytes = tokens * layout->word_bytes;
    if (tokens == layout->lP) {
        if (source != NULL) memmove(target, source, width * unit);
        else memset(target, 0, width * unit);
        return;
    }
    for (size_t d = 0; d < width; ++d) {
        if (source != NULL) memmove(target + d * unit, source + d * unit, bytes);
        else memset(target + d * unit, 0, bytes);
    }
}

/* The same for `tokens` tokens of one column, the first of them in place `phase` of its group. */
static void set_column(const kvmnn_layout *layout, uint8_t *target, const uint8_t *source, size_t phase, size_t tokens,
                       size_t width) {
    const size_t group = value_group(layout);
    while (tokens > 0) {
        size_t n = MIN(tokens, layout->lP - phase), step = group - phase * layout->word_bytes;
        if (n == layout->lP && width == layout->hP) {
            size_t bytes = tokens / layout->lP * group;
            if (source != NULL) memmove(target, source, bytes);
            else memset(target, 0, bytes);
            n = tokens / layout->lP * layout->lP;
            step = bytes;
        } else {
            set_group(layout, target, source, n, width);
        }
        phase = 0;
        tokens -= n;
        target += step;
        if (source != NULL) source += step;
    }
}

static void zero_values(const kvmnn_layout *layout, uint8_t *head, size_t start, size_t count) {
    for (size_t n; count > 0; start += n, count -= n) {
        uint8_t *target = head + value_offset(layout, start);
        n = value_run(layout, start, count);
        for (size_t d = 0; d < layout->dims; d += layout->hP, target += value_column(layout))
            set_column(layout, target, NULL, start % layout->block_tokens % layout->lP, n,
                       MIN(layout->hP, layout->dims - d));
    }
}

static void pad_values(const kvmnn_layout *layout, uint8_t *head, size_t num_valid, size_t bytes) {
    const size_t column = value_column(layout), rows = ceil_div(layout->block_tokens, layout->lP) * layout->lP,
                 unit = layout->lP * layout->word_bytes;
    const size_t blocks = ceil_div(num_valid, layout->block_tokens), width = layout->dims % layout->hP;
    for (size_t b = 0; b < blocks; ++b) {
        const size_t n = MIN(layout->block_tokens, num_valid - b * layout->block_tokens);
        uint8_t *target = head + b * value_block(layout);
        for (size_t d = 0; d < layout->dims; d += layout->hP, target += column)
            set_column(layout, target + n / layout->lP * value_group(layout) + n % layout->lP * layout->word_bytes,
                       NULL, n % layout->lP, rows - n, layout->hP);
        for (size_t g = 0; width > 0 && g < ceil_div(n, layout->lP); ++g)
            memset(target - column + g * value_group(layout) + width * unit, 0, (layout->hP - width) * unit);
    }
    memset(head + blocks * value_block(layout), 0, bytes - blocks * value_block(layout));
}

/* Tokens move between places of the same phase in their groups. */
static void shift_values_in_phase(const kvmnn_layout *layout, uint8_t *head, size_t src, size_t dst, size_t count) {
    const size_t column = value_column(layout);
    const int whole_blocks = layout->dims % layout->hP == 0 && layout->block_tokens % layout->lP == 0;
    for (size_t n; count > 0; src += n, dst += n, count -= n) {
        uint8_t *target = head + value_offset(layout, dst);
        const uint8_t *source = head + value_offset(layout, src);
        n = value_run(layout, src, value_run(layout, dst, count));
        if (n == layout->block_tokens && whole_blocks) {
            n = count - count % layout->block_tokens;
            memmove(target, source, n / layout->block_tokens * value_block(layout));
            continue;
        }
        for (size_t d = 0; d < layout->dims; d += layout->hP, target += column, source += column)
            set_column(layout, target, source, src % layout->block_tokens % layout->lP, n,
                       MIN(layout->hP, layout->dims - d));
    }
}

/* -- moving tokens inside a head -------------------------------------------------------------------------------------- */

/* Tokens that go through scratch at once: as many as it holds and end a tile or group of the destination; one at a time
 * where the copy runs into tokens it has yet to read, as the loop over tokens does that this must equal. */
static size_t max_scratch_tokens(size_t src, size_t dst, size_t count, size_t capacity, size_t step) {
    if (dst > src) return 1;
    if (capacity > step) capacity -= capacity % step;
    return MIN(count, capacity > dst % step ? capacity - dst % step : capacity);
}

static void shift_keys(const kvmnn_layout *layout, uint8_t *head, size_t src, size_t dst, size_t count,
                       uint8_t *scratch, size_t scratch_bytes) {
    const size_t row = layout->dims * layout->word_bytes, units = layout->dims / layout->lP, width = key_row(layout),
                 tile = key_tile(layout);
    const int can_merge = dst < src && key_tail(layout) == 0 && kvmnn_can_merge_rows(width, units);
    if (src == dst) return;
    if (dst < src && (src - dst) % layout->hP == 0) {
        shift_keys_in_phase(layout, head, src, dst, count);
        return;
    }
    for (size_t n; count > 0; src += n, dst += n, count -= n) {
        if (can_merge && dst % layout->hP == 0 && count >= layout->hP) {
            const uint8_t *source = head + src / layout->hP * tile;
            n = layout->hP;
            kvmnn_merge_rows(head + dst / layout->hP * tile, source, source + tile, width,
                             src % layout->hP * key_unit(layout), units);
            continue;
        }
        n = max_scratch_tokens(src, dst, can_merge ? key_run(layout, dst, count) : count, scratch_bytes / row,
                               layout->hP);
        gather_keys(layout, head, src, n, scratch, row);
        scatter_keys(layout, head, dst, n, scratch, row);
    }
}

static void shift_values(const kvmnn_layout *layout, uint8_t *head, size_t src, size_t dst, size_t count,
                         uint8_t *scratch, size_t scratch_bytes) {
    const size_t row = layout->dims * layout->word_bytes, column = value_column(layout), group = value_group(layout),
                 width = layout->lP * layout->word_bytes;
    const int is_block_aligned = layout->block_tokens % layout->lP == 0; /* groups do not straddle blocks */
    const int can_merge =
        dst < src && is_block_aligned && layout->dims % layout->hP == 0 && kvmnn_can_merge_rows(width, layout->hP);
    if (src == dst) return;
    if (dst < src && is_block_aligned && src % layout->lP == dst % layout->lP) {
        shift_values_in_phase(layout, head, src, dst, count);
        return;
    }
    for (size_t n; count > 0; src += n, dst += n, count -= n) {
        const size_t groups = value_run(layout, src, value_run(layout, dst, count)) / layout->lP;
        if (can_merge && dst % layout->lP == 0 && groups > 0) {
            const size_t skip = src % layout->lP * layout->word_bytes;
            uint8_t *target = head + value_offset(layout, dst);
            const uint8_t *source = head + value_offset(layout, src - src % layout->lP);
            n = groups * layout->lP;
            for (size_t d = 0; d < layout->dims; d += layout->hP, target += column, source += column)
                kvmnn_merge_rows(target, source, source + group, width, skip, groups * layout->hP);
            continue;
        }
        n = max_scratch_tokens(src, dst, can_merge ? value_part(layout, dst, count) : count, scratch_bytes / row,
                               layout->lP);
        gather_values(layout, head, src, n, scratch, row);
        scatter_values(layout, head, dst, n, scratch, row);
    }
}

/* -- past the caches -------------------------------------------------------------------------------------------------- */

static void nt_copy_rows(uint8_t *rows, size_t row_stride, const uint8_t *source, size_t row, size_t count,
                         const uint8_t *next) {
    if (row_stride == row) kvmnn_nt_copy(rows, source, count * row, next);
    else
        for (size_t i = 0; i < count; ++i, next += row)
            kvmnn_nt_copy(rows + i * row_stride, source + i * row, row, next);
}

static void gather_keys_nontemporal(const kvmnn_layout *layout, const uint8_t *head, size_t start, size_t count,
                                    uint8_t *rows, size_t row_stride, uint8_t *scratch, size_t scratch_bytes) {
    const size_t row = layout->dims * layout->word_bytes;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        n = max_scratch_tokens(start, start, count, scratch_bytes / row, layout->hP);
        gather_keys(layout, head, start, n, scratch, row);
        nt_copy_rows(rows, row_stride, scratch, row, n, head + key_offset(layout, start + n));
    }
    kvmnn_nt_fence();
}

static void gather_values_nontemporal(const kvmnn_layout *layout, const uint8_t *head, size_t start, size_t count,
                                      uint8_t *rows, size_t row_stride, uint8_t *scratch, size_t scratch_bytes) {
    const size_t row = layout->dims * layout->word_bytes;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        n = max_scratch_tokens(start, start, count, scratch_bytes / row, layout->lP);
        gather_values(layout, head, start, n, scratch, row);
        nt_copy_rows(rows, row_stride, scratch, row, n, head + value_offset(layout, start + n));
    }
    kvmnn_nt_fence();
}

static void scatter_keys_nontemporal(const kvmnn_layout *layout, uint8_t *head, size_t start, size_t count,
                                     const uint8_t *rows, size_t row_stride, uint8_t *scratch, size_t scratch_bytes) {
    const size_t tile = key_tile(layout), max_tokens = scratch_bytes / tile * layout->hP;
    const int has_whole_tiles = max_tokens > 0 && layout->dims % layout->lP == 0;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        if (!has_whole_tiles || start % layout->hP != 0 || count < layout->hP) {
            n = has_whole_tiles ? key_run(layout, start, count) : count;
            scatter_keys(layout, head, start, n, rows, row_stride);
            continue;
        }
        n = MIN(count - count % layout->hP, max_tokens);
        scatter_keys(layout, scratch, 0, n, rows, row_stride);
        kvmnn_nt_copy(head + key_offset(layout, start), scratch, n / layout->hP * tile,
                      rows + n * row_stride);
    }
    kvmnn_nt_fence();
}

static void scatter_values_nontemporal(const kvmnn_layout *layout, uint8_t *head, size_t start, size_t count,
                                       const uint8_t *rows, size_t row_stride, uint8_t *scratch, size_t scratch_bytes) {
    const int has_whole_blocks = value_block(layout) <= scratch_bytes && layout->dims % layout->hP == 0 &&
                                 layout->block_tokens % layout->lP == 0;
    for (size_t n; count > 0; start += n, count -= n, rows += n * row_stride) {
        n = has_whole_blocks ? value_run(layout, start, count) : count;
        if (!has_whole_blocks || n < layout->block_tokens) {
            scatter_values(layout, head, start, n, rows, row_stride);
            continue;
        }
        scatter_values(layout, scratch, 0, n, rows, row_stride);
        kvmnn_nt_copy(head + value_offset(layout, start), scratch, value_block(layout), rows + n * row_stride);
    }
    kvmnn_nt_fence();
}

const kvmnn_layout_kernels kvmnn_key_kernels = {
    gather_keys, gather_keys_nontemporal, scatter_keys, scatter_keys_nontemporal, zero_keys, pad_keys, shift_keys,
};

const kvmnn_layout_kernels kvmnn_value_kernels = {
    gather_values, gather_values_nontemporal, scatter_values, scatter_values_nontemporal, zero_values, pad_values,
    shift_values,
};

const char *kvmnn_layout_isa_name(void) {
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
