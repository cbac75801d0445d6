#include "groups.h"

#include "../half.h"

/* Codes that are taken apart at a time. */
enum { KVMNN_CODES = 256 };

/* All codes of up to four bits. */
static const uint8_t kvmnn_all_codes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Eight bytes, the lowest first. */
static inline uint64_t kvmnn_eight(const uint8_t *from) {
    uint64_t held;
    memcpy(&held, from, sizeof held);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    held = __builtin_bswap64(held);
#endif
    return held;
}

#define KVMNN_LOOPS "formats/mlx/groups_impl.h"
#define KVMNN_TABLE kvmnn_groups_table
#if defined(__x86_64__)
#define KVMNN_WIDE 1
#endif
#include "../../simd.h"

const kvmnn_groups_table *kvmnn_groups_at(int level) { return level_tables[level]; }
