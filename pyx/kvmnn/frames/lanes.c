#include "lanes.h"

#include "little_endian.h"

/* Asks for the cache line of an address, which need not be anyone's. */
static void kvmnn_prefetch_to_write(const uint8_t *p) {
#if defined(__GNUC__)
    __builtin_prefetch(p, 1);
#else
    (void)p;
#endif
}

#define KVMNN_LOOPS "frames/lanes_impl.h"
#define KVMNN_TABLE kvmnn_lanes
#include "../simd.h"

const kvmnn_lanes *kvmnn_lanes_at(int level) { return level_tables[level]; }
