// Products of codes of four or eight bits with rows that are rounded to eight bits.
//
// Sums of codes times bytes are integers, hence the same in any order; each group's sum is scaled and
// added in float32.
#pragma once

#include "tiles.h"

namespace polybasic {

constexpr size_t kAnyNumber = size_t(1) << 20;  // more words than a group has

// The products of four inputs of each output are added at a time: a word of four codes with a word of
// four bytes (signed). Where there is no instruction for that, pairs of products of codes of four bits are
// added in 16 bits, of which those of kMaxPairs words fit: 16 * 15 * 127 < 2^15.
#if defined(POLYBASIC_QUAD_PRODUCTS) || !(defined(POLYBASIC_AVX512) || defined(POLYBASIC_AVX2))
constexpr size_t kMaxPairs = kAnyNumber;

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
    static constexpr size_t kMaxWords = kAnyNumber;
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

// A part's scale, and the code of a weight of zero. As any Scales::at, it makes of a group's sum, and the sum of
// the row's bytes, what the group adds before the row's own scale.
struct ScaleAndZero {
    FloatPart scale, minus_zero;

    POLYBASIC_INLINE FloatPart apply(FloatPart sum, FloatPart sum_of_bytes) const {
        return scale * fused_multiply_add(minus_zero, sum_of_bytes, sum);
    }
};

// MultiplyCodes<Codes, Scales>::run makes a tile. Scales(matrix, Codes::kShift, first).at(i) is what a part has
// for its group at first + i of [B][G][16]. Scales::kWords are the words of a group, each of eight inputs; 0
// where the matrix alone knows them.
template <class Codes, class Scales>
struct MultiplyCodes {
    // Where there are registers enough, they hold the sums of a group and those of all groups.
    static constexpr bool kHoldsFloats = kPartLanes == kLanes;
    static constexpr int kMostSums = kHoldsFloats ? kMaxSums / 2 : kMaxSums;
    // Scales lie elsewhere than codes: each would be waited for.
    static constexpr size_t kGroupsAhead = 8;

    template <int ROWS, int BLOCKS>
    static void run(const Matrix& matrix, const Operand& x, int block, RowTile tile) {
        constexpr int kVectors = BLOCKS * kParts;
        const size_t num_words = matrix.num_inputs / 8, num_groups = matrix.num_groups();
        const size_t words_of_group = Scales::kWords > 0 ? Scales::kWords : matrix.group_size / 8;
        const size_t block_words = num_words * Codes::kVectors * kLanes, rows = tile.rows_of_chunk;
        const uint32_t* codes = static_cast<const uint32_t*>(matrix.weights) + block * block_words;
        const uint32_t* quads = x.quads + tile.first;
        const float *row_scales = x.scales + tile.first, *row_sums = x.sums + tile.first;
        const Scales scales(matrix, Codes::kShift, size_t(block) * num_groups * kLanes);
        const Ahead ahead = tile.ahead(block, BLOCKS, num_words * Codes::kVectors, 8 * Ahead::kLines / BLOCKS);
        const Ahead scales_ahead = tile.ahead(block, BLOCKS, num_groups, kGroupsAhead);
        FloatPart floats[ROWS][kVectors] = {};
        for (size_t group = 0; group < num_groups; ++group) {
            IntPart totals[ROWS][kVectors] = {};
            const size_t begin = group * words_of_group, end = begin + words_of_group;
            if constexpr (Codes::kMaxWords >= kAnyNumber)
                add_words<ROWS, BLOCKS>(codes, block_words, ahead, quads, rows, begin, end, totals);
            else
                for (size_t i = begin; i < end; i += Codes::kMaxWords)
                    add_words<ROWS, BLOCKS>(codes, block_words, ahead, quads, rows, i,
                                            i + Codes::kMaxWords < end ? i + Codes::kMaxWords : end, totals);
            const size_t distance = scales_ahead.of(group);
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                const int lane = v % kParts * kPartLanes;
                const size_t at = (v / kParts * num_groups + group) * kLanes + lane;
                if (v % kParts == 0) scales.prefetch(at + distance);
                const auto scale = scales.at(at);
#pragma GCC unroll 12
                for (int row = 0; row < ROWS; ++row) {
                    const size_t of_row = group * rows + row;
                    const FloatPart sum = __builtin_convertvector(totals[row][v], FloatPart);
                    const FloatPart scaled = scale.apply(sum, all_lanes<FloatPart>(row_sums[of_row]));
                    const FloatPart of_group = all_lanes<FloatPart>(row_scales[of_row]);
                    if constexpr (kHoldsFloats) {
                        floats[row][v] = fused_multiply_add(scaled, of_group, floats[row][v]);
                    } else {
                        float* to = tile.row(v / kParts, row) + lane;
                        const FloatPart before = group == 0 ? FloatPart{} : load_part<FloatPart>(to);
                        const FloatPart after = fused_multiply_add(scaled, of_group, before);
                        std::memcpy(to, &after, sizeof after);
                    }
                }
            }
        }
        if constexpr (kHoldsFloats)
            for (int row = 0; row < ROWS; ++row)
                for (int v = 0; v < kVectors; ++v)
                    std::memcpy(tile.row(v / kParts, row) + v % kParts * kPartLanes, &floats[row][v],
                                sizeof(FloatPart));
    }

    template <int ROWS, int BLOCKS>
    POLYBASIC_INLINE static void add_words(const uint32_t* codes, size_t block_words, const Ahead& ahead,
                                           const uint32_t* quads, size_t rows, size_t begin, size_t end,
                                           IntPart (&totals)[ROWS][BLOCKS * kParts]) {
        constexpr int kVectors = BLOCKS * kParts;
        IntPart sums[ROWS][kVectors] = {};
#pragma GCC unroll 4
        for (size_t i = begin; i < end; ++i) {
            const size_t distance = ahead.of(i * Codes::kVectors);
            WordPart low[kVectors], high[kVectors];
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                const uint32_t* from = codes + v / kParts * block_words + i * Codes::kVectors * kLanes;
                Codes::read(from + v % kParts * kPartLanes, low[v], high[v]);
                if (v % kParts == 0)
                    for (size_t line = 0; line < Codes::kVectors; ++line)
                        __builtin_prefetch(from + line * kLanes + distance, 0, 2);
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
};

}  // namespace polybasic
