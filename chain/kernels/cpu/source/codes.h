// Products of codes of four or eight bits with rows that are rounded to eight bits.
//
// Sums of codes times bytes are integers, hence the same in any order; each group's sum is scaled and
// added in float32.
#pragma once

#include "tiles.h"

namespace polybasic {

// The products of four inputs of each output are added at a time: a word of four codes with a word of
// four bytes (signed). Where there is no instruction for that, pairs of products of codes of four bits are
// added in 16 bits, of which those of kMaxPairs words fit: 16 * 15 * 127 < 2^15.
#if defined(POLYBASIC_QUAD_PRODUCTS) || !(defined(POLYBASIC_AVX512) || defined(POLYBASIC_AVX2))
constexpr size_t kMaxPairs = size_t(1) << 20;

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
constexpr size_t kMaxPairs = 4;

POLYBASIC_INLINE void add_quad_products(IntPart& sum, WordPart codes, WordPart values) {
    sum = (IntPart)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)codes, (__m512i)values));
}

POLYBASIC_INLINE IntPart whole_sum(IntPart sum) {
    return (IntPart)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
}
#else
constexpr size_t kMaxPairs = 4;

POLYBASIC_INLINE void add_quad_products(IntPart& sum, WordPart codes, WordPart values) {
    sum = (IntPart)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, (__m256i)values));
    asm("" : "+x"(sum));
}

POLYBASIC_INLINE IntPart whole_sum(IntPart sum) {
    return (IntPart)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
}
#endif

// Codes of four bits, unsigned: one word holds those of eight inputs.
struct FourBits {
    static constexpr size_t kVectors = 1;           // that hold the codes of eight inputs
    static constexpr size_t kMaxWords = kMaxPairs;  // of eight inputs, whose products are added together
    static constexpr int kShift = 0;

    POLYBASIC_INLINE static void read(const uint32_t* from, WordPart& low, WordPart& high) {
        const WordPart words = load_part<WordPart>(from);
        low = words & 0x0f0f0f0fu;
        high = (words >> 4) & 0x0f0f0f0fu;
    }

    POLYBASIC_INLINE static void add(IntPart& sum, WordPart codes, WordPart values) {
        add_quad_products(sum, codes, values);
    }

    POLYBASIC_INLINE static IntPart whole(IntPart sum) { return whole_sum(sum); }
};

// Codes of eight bits, signed. x86 processors multiply unsigned bytes with signed ones: those with an
// instruction for four products take codes that are kShift larger, others the codes' magnitudes with rows
// that have the codes' signs.
struct EightBits {
    static constexpr size_t kVectors = 2;
    static constexpr size_t kMaxWords = size_t(1) << 20;
#if defined(POLYBASIC_QUAD_PRODUCTS) && !defined(POLYBASIC_NEON)
    static constexpr int kShift = 128;
#else
    static constexpr int kShift = 0;
#endif

    POLYBASIC_INLINE static void read(const uint32_t* from, WordPart& low, WordPart& high) {
        low = load_part<WordPart>(from);
        high = load_part<WordPart>(from + kLanes);
        if constexpr (kShift != 0) {
            low ^= 0x80808080u;
            high ^= 0x80808080u;
        }
    }

    POLYBASIC_INLINE static void add(IntPart& sum, WordPart codes, WordPart values) {
#if defined(POLYBASIC_QUAD_PRODUCTS)
        add_quad_products(sum, codes, values);
#elif defined(POLYBASIC_AVX512)
        const __m512i signed_values = _mm512_mask_sub_epi8(
            (__m512i)values, _mm512_movepi8_mask((__m512i)codes), _mm512_setzero_si512(), (__m512i)values);
        sum += whole_sum((IntPart)_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)codes), signed_values));
#elif defined(POLYBASIC_AVX2)
        const __m256i signed_values = _mm256_sign_epi8((__m256i)values, (__m256i)codes);
        sum += whole_sum((IntPart)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes), signed_values));
        asm("" : "+x"(sum));
#else
        for (int byte = 0; byte < 4; ++byte) {
            const IntPart code = (IntPart)(codes << (24 - 8 * byte)) >> 24;
            const IntPart value = (IntPart)(values << (24 - 8 * byte)) >> 24;
            sum += code * value;
        }
#endif
    }

    POLYBASIC_INLINE static IntPart whole(IntPart sum) { return sum; }
};

// Multiply<Codes, Scales>::run makes a tile. Scales(matrix, at).apply(sum, sum of the row's bytes) gives what
// a group of inputs adds to a part of outputs, before the row's own scale.
template <class Codes, class Scales>
struct MultiplyCodes {
    template <int ROWS, int BLOCKS>
    static void run(const Matrix& matrix, const Operand& x, int block, RowTile tile) {
        constexpr int kVectors = BLOCKS * kParts;
        const size_t num_words = matrix.num_inputs / 8, num_groups = matrix.num_groups();
        const size_t words_of_group = matrix.group_size / 8, rows = tile.rows_of_chunk;
        const size_t block_words = num_words * Codes::kVectors * kLanes;
        const uint32_t* codes = static_cast<const uint32_t*>(matrix.weights) + block * block_words;
        const uint32_t* quads = x.quads + tile.first;
        const Ahead ahead = tile.ahead(block, BLOCKS, num_words * Codes::kVectors);
        for (size_t group = 0; group < num_groups; ++group) {
            IntPart totals[ROWS][kVectors] = {};
            const size_t end_of_group = (group + 1) * words_of_group;
            for (size_t i = group * words_of_group; i < end_of_group; i += Codes::kMaxWords)
                add_words<ROWS, BLOCKS>(
                    codes, block_words, ahead, quads, rows, i,
                    i + Codes::kMaxWords < end_of_group ? i + Codes::kMaxWords : end_of_group, totals);
            add_group<ROWS, BLOCKS>(matrix, x, block, group, totals, tile);
        }
    }

    template <int ROWS, int BLOCKS>
    POLYBASIC_INLINE static void add_words(const uint32_t* codes, size_t block_words, const Ahead& ahead,
                                           const uint32_t* quads, size_t rows, size_t begin, size_t end,
                                           IntPart (&totals)[ROWS][BLOCKS * kParts]) {
        constexpr int kVectors = BLOCKS * kParts;
        IntPart sums[ROWS][kVectors] = {};
        for (size_t i = begin; i < end; ++i) {
            const size_t distance = ahead.of(i * Codes::kVectors);
            WordPart low[kVectors], high[kVectors];
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                const uint32_t* from = codes + v / kParts * block_words + i * Codes::kVectors * kLanes;
                Codes::read(from + v % kParts * kPartLanes, low[v], high[v]);
                if (v % kParts == 0)
                    for (size_t line = 0; line < Codes::kVectors; ++line)
                        __builtin_prefetch(from + line * kLanes + distance);
            }
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const WordPart value = all_lanes<WordPart>(quads[2 * i * rows + row]);
#pragma GCC unroll 16
                for (int v = 0; v < kVectors; ++v) Codes::add(sums[row][v], low[v], value);
            }
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const WordPart value = all_lanes<WordPart>(quads[(2 * i + 1) * rows + row]);
#pragma GCC unroll 16
                for (int v = 0; v < kVectors; ++v) Codes::add(sums[row][v], high[v], value);
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) totals[row][v] += Codes::whole(sums[row][v]);
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
            const Scales scales(matrix, Codes::kShift, at);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const size_t of_row = group * rows + tile.first + row;
                const FloatPart sum = __builtin_convertvector(totals[row][v], FloatPart);
                const FloatPart scaled = scales.apply(sum, all_lanes<FloatPart>(x.sums[of_row]));
                float* to = tile.row(v / kParts, row) + lane;
                const FloatPart before = group == 0 ? FloatPart{} : load_part<FloatPart>(to);
                const FloatPart after =
                    fused_multiply_add(scaled, all_lanes<FloatPart>(x.scales[of_row]), before);
                std::memcpy(to, &after, sizeof after);
            }
        }
    }
};

}  // namespace polybasic
