#include "tokens.h"

#include <string.h>

#define KVMNN_LOOPS "offline/tokens_impl.h"
#define KVMNN_TABLE kvmnn_tokens
#include "../simd.h"

const kvmnn_tokens *kvmnn_tokens_at(int level) { return level_tables[level]; }
