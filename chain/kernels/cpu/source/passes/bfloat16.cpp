// Passes, drafts and products of models in bfloat16.

#include "passes/passes.h"

namespace polybasic {

POLYBASIC_INSTANTIATE(, Bfloat16)

}  // namespace polybasic
