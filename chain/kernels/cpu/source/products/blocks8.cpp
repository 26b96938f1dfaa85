// Products with weights in Q8_0.

#include "products/blocks.h"
#include "products/codes_amx.h"

namespace polybasic {

void multiply_blocks8(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
    multiply_codes<EightBits, Scales>(matrix, x, rows, blocks, tile);
}

}  // namespace polybasic
