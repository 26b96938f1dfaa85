// Products with weights in Q4_0, Q4_1 and Q4_K.

#include "products/blocks.h"
#include "products/codes_amx.h"

namespace polybasic {

void multiply_blocks4(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
    multiply_codes<FourBits, ScalesAndOffsets>(matrix, x, rows, blocks, tile);
}

}  // namespace polybasic
