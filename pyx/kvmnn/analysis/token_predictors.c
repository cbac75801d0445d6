#include "token_predictors.h"

#include <string.h>

#define KVMNN_SIMD_KERNELS "analysis/token_predictors_impl.h"
#define KVMNN_KERNEL_TABLE kvmnn_token_kernels
#include "../simd.h"

const kvmnn_token_kernels *kvmnn_token_kernels_at(int level) { return isa_tables[level]; }
