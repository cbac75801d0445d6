#include "groups.h"

#include "../half.h"

/* Codes that are taken apart at a time. */
enum { KVMNN_CODES = 256 };

#define KVMNN_LOOPS "formats/mlx/groups_impl.h"
#define KVMNN_TABLE kvmnn_groups_table
#include "../../simd.h"

const kvmnn_groups_table *kvmnn_groups_at(int level) { return level_tables[level]; }
