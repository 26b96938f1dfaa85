// Products with weights in Q5_0, Q5_1 and Q5_K.

#include "products/blocks.h"
#include "products/codes_amx.h"

namespace polybasic {

void multiply_blocks5(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
    multiply_codes<FiveBits, ScalesAndOffsets>(matrix, x, rows, blocks, tile);
}

}  // namespace polybasic
