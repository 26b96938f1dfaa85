// Products with weights of AutoAWQ's 4-bit format.

#include "codes.h"

namespace polybasic {
namespace {

// Float scales, and for each group of an output the code of a weight of zero.
struct ScalesAndZeros {
    static constexpr size_t kWords = 0;
    const float* scales;
    const uint8_t* zeros;

    ScalesAndZeros(const Matrix& matrix, int, size_t first)
        : scales(static_cast<const float*>(matrix.scales) + first),
          zeros(static_cast<const uint8_t*>(matrix.offsets) + first) {}

    POLYBASIC_INLINE void prefetch(size_t at) const {
        __builtin_prefetch(scales + at);
        __builtin_prefetch(zeros + at);
    }

    POLYBASIC_INLINE ScaleAndZero at(size_t at) const {
#if defined(POLYBASIC_AVX512)
        const IntPart wide = (IntPart)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(zeros + at)));
#elif defined(POLYBASIC_AVX2)
        const IntPart wide = (IntPart)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(zeros + at)));
#else
        const IntPart wide = __builtin_convertvector(load_part<BytePart>(zeros + at), IntPart);
#endif
        return {load_part<FloatPart>(scales + at), -__builtin_convertvector(wide, FloatPart)};
    }
};

}  // namespace

void multiply_int4(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
    multiply_tiles<MultiplyCodes<FourBits, ScalesAndZeros>>(matrix, x, rows, blocks, tile);
}

}  // namespace polybasic
