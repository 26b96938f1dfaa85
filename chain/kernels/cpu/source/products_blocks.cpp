// Products with weights of GGML's types: blocks of inputs with scales, and offsets or none, in float16.

#include "codes.h"

namespace polybasic {
namespace {

struct HalfScales {
    FloatPart scale, minus_zero;

    POLYBASIC_INLINE HalfScales(const Matrix& matrix, int shift, size_t at)
        : scale(load_halves(static_cast<const uint16_t*>(matrix.scales) + at)),
          minus_zero(all_lanes<FloatPart>(-float(matrix.zero + shift))) {}

    POLYBASIC_INLINE FloatPart apply(FloatPart sum, FloatPart sum_of_bytes) const {
        return scale * fused_multiply_add(minus_zero, sum_of_bytes, sum);
    }
};

struct HalfScalesAndOffsets {
    FloatPart scale, offset;

    POLYBASIC_INLINE HalfScalesAndOffsets(const Matrix& matrix, int, size_t at)
        : scale(load_halves(static_cast<const uint16_t*>(matrix.scales) + at)),
          offset(load_halves(static_cast<const uint16_t*>(matrix.offsets) + at)) {}

    POLYBASIC_INLINE FloatPart apply(FloatPart sum, FloatPart sum_of_bytes) const {
        return fused_multiply_add(scale, sum, offset * sum_of_bytes);
    }
};

}  // namespace

void multiply_blocks(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
    if (matrix.format == kBlocks8)
        multiply_tiles<MultiplyCodes<EightBits, HalfScales>>(matrix, x, rows, blocks, tile);
    else if (matrix.offsets == nullptr)
        multiply_tiles<MultiplyCodes<FourBits, HalfScales>>(matrix, x, rows, blocks, tile);
    else
        multiply_tiles<MultiplyCodes<FourBits, HalfScalesAndOffsets>>(matrix, x, rows, blocks, tile);
}

}  // namespace polybasic
