// Products with weights of GGML's types: blocks of inputs with scales, and offsets or none, in float16.

#include "codes.h"

namespace polybasic {
namespace {

struct HalfScales {
    static constexpr size_t kWords = 4;
    const uint16_t* scales;
    FloatPart minus_zero;

    HalfScales(const Matrix& matrix, int shift, size_t first)
        : scales(static_cast<const uint16_t*>(matrix.scales) + first),
          minus_zero(all_lanes<FloatPart>(-float(matrix.zero + shift))) {}

    POLYBASIC_INLINE void prefetch(size_t at) const { __builtin_prefetch(scales + at); }

    POLYBASIC_INLINE ScaleAndZero at(size_t at) const { return {load_halves(scales + at), minus_zero}; }
};

struct HalfScaleAndOffset {
    FloatPart scale, offset;

    POLYBASIC_INLINE FloatPart apply(FloatPart sum, FloatPart sum_of_bytes) const {
        return fused_multiply_add(scale, sum, offset * sum_of_bytes);
    }
};

struct HalfScalesAndOffsets {
    static constexpr size_t kWords = 4;
    const uint16_t *scales, *offsets;

    HalfScalesAndOffsets(const Matrix& matrix, int, size_t first)
        : scales(static_cast<const uint16_t*>(matrix.scales) + first),
          offsets(static_cast<const uint16_t*>(matrix.offsets) + first) {}

    POLYBASIC_INLINE void prefetch(size_t at) const {
        __builtin_prefetch(scales + at);
        __builtin_prefetch(offsets + at);
    }

    POLYBASIC_INLINE HalfScaleAndOffset at(size_t at) const {
        return {load_halves(scales + at), load_halves(offsets + at)};
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
