// Products with weights of AutoAWQ's 4-bit format.

#include "products/codes_amx.h"

namespace polybasic {
namespace {

// Scales, and for each group of an output the code of a weight of zero.
struct ScalesAndZeros {
    static constexpr size_t kUnits = 0;
    static constexpr bool kHasFactors = false;
    const uint16_t* scales;
    const int8_t* zeros;
    size_t num_groups;

    ScalesAndZeros(const Matrix& matrix, int, int block) : num_groups(matrix.num_groups()) {
        const size_t first = block * num_groups * kLanes;
        scales = static_cast<const uint16_t*>(matrix.scales) + first;
        zeros = static_cast<const int8_t*>(matrix.offsets) + first;
    }

    POLYBASIC_INLINE void prefetch(int block, size_t group, size_t distance) const {
        const size_t at = (block * num_groups + group) * kLanes + distance;
        __builtin_prefetch(scales + at);
        __builtin_prefetch(zeros + at);
    }

    POLYBASIC_INLINE ScaleAndZero at(int block, size_t group, int lane) const {
        const size_t at = (block * num_groups + group) * kLanes + lane;
        return {load_halves(scales + at),
                -__builtin_convertvector(load_bytes(zeros + at), FloatPart)};
    }
};

}  // namespace

void multiply_int4(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
    multiply_codes<FourBits, ScalesAndZeros>(matrix, x, rows, blocks, tile);
}

}  // namespace polybasic
