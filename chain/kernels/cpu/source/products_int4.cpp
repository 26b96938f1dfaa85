// Products with weights of AutoAWQ's 4-bit format.

#include "codes.h"

namespace polybasic {
namespace {

// Float scales, and for each group of an output the code of a weight of zero.
struct ScalesAndZeros {
    FloatPart scale, minus_zero;

    POLYBASIC_INLINE ScalesAndZeros(const Matrix& matrix, int, size_t at)
        : scale(load_part<FloatPart>(static_cast<const float*>(matrix.scales) + at)) {
        const uint8_t* zeros = static_cast<const uint8_t*>(matrix.offsets) + at;
#if defined(POLYBASIC_AVX512)
        const IntPart wide = (IntPart)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)zeros));
#elif defined(POLYBASIC_AVX2)
        const IntPart wide = (IntPart)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)zeros));
#else
        const IntPart wide = __builtin_convertvector(load_part<BytePart>(zeros), IntPart);
#endif
        minus_zero = -__builtin_convertvector(wide, FloatPart);
    }

    POLYBASIC_INLINE FloatPart apply(FloatPart sum, FloatPart sum_of_bytes) const {
        return scale * fused_multiply_add(minus_zero, sum_of_bytes, sum);
    }
};

}  // namespace

void multiply_int4(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
    multiply_tiles<MultiplyCodes<FourBits, ScalesAndZeros>>(matrix, x, rows, blocks, tile);
}

}  // namespace polybasic
