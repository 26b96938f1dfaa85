// Products with 4-bit weights of rows that are rounded to eight bits.
//
// Sums of codes times bytes are integers, hence the same in any order; each group's sum is scaled and
// added in float32.

#include "tiles.h"

namespace polybasic {
namespace {

// The products of eight inputs with eight weights are added at a time: two words of four codes (unsigned,
// below 16) with two words of four bytes (signed). Where there is no instruction for that, pairs of
// products are added in 16 bits, of which those of kMaxWords words fit: 16 * 15 * 127 < 2^15.
#if defined(POLYBASIC_QUAD_PRODUCTS) || !(defined(POLYBASIC_AVX512) || defined(POLYBASIC_AVX2))
constexpr size_t kMaxWords = size_t(1) << 20;

POLYBASIC_INLINE void add_quad_products(IntPart& sum, WordPart codes, WordPart values) {
#if !defined(POLYBASIC_QUAD_PRODUCTS)
    for (int byte = 0; byte < 4; ++byte) {
        const IntPart code = (IntPart)((codes >> (8 * byte)) & 0xff);
        const IntPart value = (IntPart)(values << (24 - 8 * byte)) >> 24;
        sum += code * value;
    }
#elif defined(POLYBASIC_AVX512)
    sum = (IntPart)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)values);
#elif defined(POLYBASIC_AVX2)
    sum = (IntPart)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)values);
    asm("" : "+x"(sum));
#else
    sum = (IntPart)vdotq_s32((int32x4_t)sum, same_bits<int8x16_t>(codes), same_bits<int8x16_t>(values));
#endif
}

POLYBASIC_INLINE IntPart whole_sum(IntPart sum) { return sum; }
#elif defined(POLYBASIC_AVX512)
constexpr size_t kMaxWords = 4;

POLYBASIC_INLINE void add_quad_products(IntPart& sum, WordPart codes, WordPart values) {
    sum = (IntPart)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)codes, (__m512i)values));
}

POLYBASIC_INLINE IntPart whole_sum(IntPart sum) {
    return (IntPart)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
}
#else
constexpr size_t kMaxWords = 4;

POLYBASIC_INLINE void add_quad_products(IntPart& sum, WordPart codes, WordPart values) {
    sum = (IntPart)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, (__m256i)values));
    asm("" : "+x"(sum));
}

POLYBASIC_INLINE IntPart whole_sum(IntPart sum) {
    return (IntPart)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
}
#endif

// The zeros of a part's outputs, negative.
POLYBASIC_INLINE FloatPart minus_zeros(const uint8_t* zeros) {
#if defined(POLYBASIC_AVX512)
    const IntPart wide = (IntPart)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)zeros));
#elif defined(POLYBASIC_AVX2)
    const IntPart wide = (IntPart)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)zeros));
#else
    const IntPart wide = __builtin_convertvector(load_part<BytePart>(zeros), IntPart);
#endif
    return -__builtin_convertvector(wide, FloatPart);
}

struct MultiplyInt4 {
    template <int ROWS, int BLOCKS>
    static void run(const Matrix& matrix, const Operand& x, int block, RowTile tile) {
        constexpr int kVectors = BLOCKS * kParts;
        const size_t num_words = matrix.num_inputs / 8, num_groups = matrix.num_groups();
        const size_t words_of_group = matrix.group_size / 8, rows = tile.rows_of_chunk;
        const uint32_t* codes =
            static_cast<const uint32_t*>(matrix.weights) + block * num_words * kLanes;
        const uint32_t* quads = x.quads + tile.first;
        const Ahead ahead = tile.ahead(block, BLOCKS, num_words);
        for (size_t group = 0; group < num_groups; ++group) {
            IntPart totals[ROWS][kVectors] = {};
            const size_t end_of_group = (group + 1) * words_of_group;
            for (size_t i = group * words_of_group; i < end_of_group; i += kMaxWords)
                add_words<ROWS, BLOCKS>(codes, num_words, ahead, quads, rows, i,
                                        i + kMaxWords < end_of_group ? i + kMaxWords : end_of_group,
                                        totals);
            add_group<ROWS, BLOCKS>(matrix, x, block, group, totals, tile);
        }
    }

    template <int ROWS, int BLOCKS>
    POLYBASIC_INLINE static void add_words(const uint32_t* codes, size_t num_words, const Ahead& ahead,
                                           const uint32_t* quads, size_t rows, size_t begin, size_t end,
                                           IntPart (&totals)[ROWS][BLOCKS * kParts]) {
        constexpr int kVectors = BLOCKS * kParts;
        IntPart sums[ROWS][kVectors] = {};
        for (size_t i = begin; i < end; ++i) {
            const size_t distance = ahead.of(i);
            WordPart low[kVectors], high[kVectors];
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                const uint32_t* from = codes + (v / kParts * num_words + i) * kLanes;
                const WordPart read = load_part<WordPart>(from + v % kParts * kPartLanes);
                if (v % kParts == 0) __builtin_prefetch(from + distance);
                low[v] = read & 0x0f0f0f0fu;
                high[v] = (read >> 4) & 0x0f0f0f0fu;
            }
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const WordPart value = all_lanes<WordPart>(quads[2 * i * rows + row]);
#pragma GCC unroll 16
                for (int v = 0; v < kVectors; ++v) add_quad_products(sums[row][v], low[v], value);
            }
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const WordPart value = all_lanes<WordPart>(quads[(2 * i + 1) * rows + row]);
#pragma GCC unroll 16
                for (int v = 0; v < kVectors; ++v) add_quad_products(sums[row][v], high[v], value);
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) totals[row][v] += whole_sum(sums[row][v]);
    }

    // Scale a group's sums and add them to the tile.
    template <int ROWS, int BLOCKS>
    POLYBASIC_INLINE static void add_group(const Matrix& matrix, const Operand& x, int block,
                                           size_t group,
                                           const IntPart (&totals)[ROWS][BLOCKS * kParts],
                                           const RowTile& tile) {
        const size_t rows = tile.rows_of_chunk;
#pragma GCC unroll 16
        for (int v = 0; v < BLOCKS * kParts; ++v) {
            const int lane = v % kParts * kPartLanes;
            const size_t at = ((block + v / kParts) * size_t(matrix.num_groups()) + group) * kLanes + lane;
            const FloatPart scale = load_part<FloatPart>(matrix.scales + at);
            const FloatPart minus_zero = minus_zeros(matrix.zeros + at);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const size_t of_row = group * rows + tile.first + row;
                const FloatPart sum = __builtin_convertvector(totals[row][v], FloatPart);
                const FloatPart centred =
                    fused_multiply_add(minus_zero, all_lanes<FloatPart>(x.sums[of_row]), sum);
                const FloatPart factor = scale * all_lanes<FloatPart>(x.scales[of_row]);
                float* to = tile.row(v / kParts, row) + lane;
                const FloatPart before = group == 0 ? FloatPart{} : load_part<FloatPart>(to);
                const FloatPart after = fused_multiply_add(centred, factor, before);
                std::memcpy(to, &after, sizeof after);
            }
        }
    }
};

}  // namespace

void multiply_int4(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
    multiply_tiles<MultiplyInt4>(matrix, x, rows, blocks, tile);
}

}  // namespace polybasic
