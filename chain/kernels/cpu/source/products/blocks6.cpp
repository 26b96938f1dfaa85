// Products with weights in Q6_K.

#include "products/blocks.h"
#include "products/codes_amx.h"

namespace polybasic {

void multiply_blocks6(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
    multiply_codes<SixBits, ScalesOfHalves>(matrix, x, rows, blocks, tile);
}

}  // namespace polybasic
