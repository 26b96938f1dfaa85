// Passes, drafts and products of models in float32.

#include "passes/passes.h"

namespace polybasic {

POLYBASIC_INSTANTIATE(, float)

}  // namespace polybasic
