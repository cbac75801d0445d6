#include "groups.h"

#include "../half.h"

/* Codes that are taken apart at a time. */
enum { KVMNN_BATCH_CODES = 256 };

/* All codes of up to four bits. */
static const uint8_t kvmnn_all_codes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Eight bytes, the lowest first. */
static inline uint64_t kvmnn_load64_le(const uint8_t *src) {
    uint64_t value;
    memcpy(&value, src, sizeof value);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

#define KVMNN_SIMD_KERNELS "formats/mlx/groups_impl.h"
#define KVMNN_KERNEL_TABLE kvmnn_group_kernels
#if defined(__x86_64__)
#define KVMNN_USE_AVX512 1
#endif
#include "../../simd.h"

const kvmnn_group_kernels *kvmnn_group_kernels_at(int level) { return isa_tables[level]; }
