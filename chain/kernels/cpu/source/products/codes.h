// Products of codes of four to eight bits with rows that are rounded to eight bits.
//
// Sums of codes times bytes are integers, hence the same in any order; each group's sum is scaled and
// added in float32.
#pragma once

#include "products/tiles.h"

namespace polybasic {

// The products of four inputs of each output are added at a time: a word of four codes with a word of
// four bytes (signed). Where there is no instruction for that, AVX2 and AVX-512 add pairs of products in 16
// bits, as many as fit there, and these sums then: kSumsInPairs.
#if defined(POLYBASIC_QUAD_PRODUCTS) || !(defined(POLYBASIC_AVX512) || defined(POLYBASIC_AVX2))
constexpr bool kSumsInPairs = false;

POLYBASIC_INLINE void add_quad_products(IntPart& sum, WordPart codes, WordPart values) {
#if defined(POLYBASIC_AVX512)
    sum = (IntPart)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)values);
#elif defined(POLYBASIC_AVX2)
    sum = (IntPart)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)values);
    asm("" : "+x"(sum));
#elif defined(POLYBASIC_NEON)
    const int8x16_t x = same_bits<int8x16_t>(codes), y = same_bits<int8x16_t>(values);
#if defined(POLYBASIC_QUAD_PRODUCTS)
    sum = (IntPart)vdotq_s32((int32x4_t)sum, x, y);
#else
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)));
    sum += (IntPart)vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(x, y)));
#endif
#else
    for (int byte = 0; byte < 4; ++byte) {
        const IntPart code = (IntPart)(codes << (24 - 8 * byte)) >> 24;
        const IntPart value = (IntPart)(values << (24 - 8 * byte)) >> 24;
        sum += code * value;
    }
#endif
}

// A sum times a factor, of as many lanes each.
POLYBASIC_INLINE IntPart whole_product(IntPart sum, IntPart factor) { return sum * factor; }
POLYBASIC_INLINE IntPart whole_sum(IntPart sum) { return sum; }
#else
constexpr bool kSumsInPairs = true;

// Each 32 bits hold the sums of two pairs.
#if defined(POLYBASIC_AVX512)
POLYBASIC_INLINE void add_quad_products(IntPart& sum, WordPart codes, WordPart values) {
    sum = (IntPart)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)codes, (__m512i)values));
}

POLYBASIC_INLINE IntPart whole_product(IntPart sum, IntPart factor) {
    const IntPart twice = (factor & 0xffff) | (factor << 16);
    return (IntPart)_mm512_madd_epi16((__m512i)sum, (__m512i)twice);
}

POLYBASIC_INLINE IntPart whole_sum(IntPart sum) {
    return (IntPart)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
}
#else
POLYBASIC_INLINE void add_quad_products(IntPart& sum, WordPart codes, WordPart values) {
    sum = (IntPart)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, (__m256i)values));
    asm("" : "+x"(sum));
}

POLYBASIC_INLINE IntPart whole_product(IntPart sum, IntPart factor) {
    const IntPart twice = (factor & 0xffff) | (factor << 16);
    return (IntPart)_mm256_madd_epi16((__m256i)sum, (__m256i)twice);
}

POLYBASIC_INLINE IntPart whole_sum(IntPart sum) {
    return (IntPart)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
}
#endif
#endif

constexpr int kUnit = kGroup;

// How codes lie: in kLines vectors of 16 words for a unit of 32 inputs, as products/matrix.h has them. `read` gives
// those of a word of eight inputs: of its first four, and of its last. Products of kWords words are added
// together, in pairs or not.

// Codes of four bits, unsigned.
struct FourBits {
    static constexpr size_t kLines = 4;
    static constexpr int kWords = 4;    // 16 * 15 * 127 < 2^15
    static constexpr bool kInPairs = kSumsInPairs;
    static constexpr int kShift = 0;

    POLYBASIC_INLINE static void read(const uint32_t* unit, int word, WordPart& low, WordPart& high) {
        const WordPart words = load_part<WordPart>(unit + word * kLanes);
        low = words & 0x0f0f0f0fu;
        high = (words >> 4) & 0x0f0f0f0fu;
    }

    POLYBASIC_INLINE static void add(IntPart& sum, WordPart codes, WordPart values) {
        add_quad_products(sum, codes, values);
    }
};

// Bits of each byte from `bit` on, moved to begin at the fifth.
POLYBASIC_INLINE WordPart above_four(WordPart words, int bit, uint32_t mask) {
    return (bit < 4 ? words << (4 - bit) : words >> (bit - 4)) & mask;
}

struct FiveBits : FourBits {
    static constexpr size_t kLines = 5;
    static constexpr int kWords = kSumsInPairs ? 2 : 4;     // 8 * 31 * 127 < 2^15

    POLYBASIC_INLINE static void read(const uint32_t* unit, int word, WordPart& low, WordPart& high) {
        const WordPart bits = load_part<WordPart>(unit + 4 * kLanes);
        FourBits::read(unit, word, low, high);
        low |= above_four(bits, 2 * word, 0x10101010u);
        high |= above_four(bits, 2 * word + 1, 0x10101010u);
    }
};

struct SixBits : FourBits {
    static constexpr size_t kLines = 6;
    static constexpr int kWords = kSumsInPairs ? 1 : 2;     // 4 * 63 * 127 < 2^15

    POLYBASIC_INLINE static void read(const uint32_t* unit, int word, WordPart& low, WordPart& high) {
        const WordPart bits = load_part<WordPart>(unit + (4 + word / 2) * kLanes);
        FourBits::read(unit, word, low, high);
        low |= above_four(bits, word % 2 * 4, 0x30303030u);
        high |= above_four(bits, word % 2 * 4 + 2, 0x30303030u);
    }
};

// Codes of eight bits, signed. x86 processors multiply unsigned bytes with signed ones: those with an
// instruction for four products take codes that are kShift larger, others the codes' magnitudes with rows
// that have the codes' signs. All others multiply signed bytes.
struct EightBits {
    static constexpr size_t kLines = 8;
    static constexpr int kWords = 4;
    static constexpr bool kInPairs = false;
#if defined(POLYBASIC_QUAD_PRODUCTS) && !defined(POLYBASIC_NEON)
    static constexpr int kShift = 128;
#else
    static constexpr int kShift = 0;
#endif

    POLYBASIC_INLINE static void read(const uint32_t* unit, int word, WordPart& low, WordPart& high) {
        low = load_part<WordPart>(unit + 2 * word * kLanes);
        high = load_part<WordPart>(unit + (2 * word + 1) * kLanes);
        if constexpr (kShift != 0) {
            low ^= 0x80808080u;
            high ^= 0x80808080u;
        }
    }

    POLYBASIC_INLINE static void add(IntPart& sum, WordPart codes, WordPart values) {
        if constexpr (!kSumsInPairs) return add_quad_products(sum, codes, values);
#if defined(POLYBASIC_AVX512)
        const __m512i signed_values = _mm512_mask_sub_epi8(
            (__m512i)values, _mm512_movepi8_mask((__m512i)codes), _mm512_setzero_si512(), (__m512i)values);
        sum += whole_sum((IntPart)_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)codes), signed_values));
#elif defined(POLYBASIC_AVX2)
        const __m256i signed_values = _mm256_sign_epi8((__m256i)values, (__m256i)codes);
        sum += whole_sum((IntPart)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes), signed_values));
        asm("" : "+x"(sum));
#endif
    }
};

// A part's scale, and the code of a weight of zero. As any Scales::at, it makes of a group's sum, and the sum of
// the row's bytes, what the group adds before the row's own scale.
struct ScaleAndZero {
    FloatPart scale, minus_zero;

    POLYBASIC_INLINE FloatPart apply(FloatPart sum, FloatPart sum_of_bytes) const {
        return scale * fused_multiply_add(minus_zero, sum_of_bytes, sum);
    }
};

// MultiplyCodes<Codes, Scales>::run makes a tile. Scales(matrix, Codes::kShift, block).at(block, group, lane) is
// what a part has for its group in a block of those from `block` on. Scales::kUnits are the units of a group; 0
// where the matrix alone knows them. If the halves of a unit have factors (kHasFactors), these are
// `factor(block, group, half, lane)`.
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
        const size_t num_units = matrix.num_inputs / kUnit, num_groups = matrix.num_groups();
        const size_t units_of_group = Scales::kUnits > 0 ? Scales::kUnits : matrix.group_size / kUnit;
        const size_t block_words = num_units * Codes::kLines * kLanes, rows = tile.rows_of_chunk;
        const uint32_t* codes = static_cast<const uint32_t*>(matrix.weights) + block * block_words;
        const uint32_t* quads = x.quads + tile.first;
        const float *row_scales = x.scales + tile.first, *row_sums = x.sums + tile.first;
        const float* half_sums = x.half_sums + tile.first;
        const Scales scales(matrix, Codes::kShift, block);
        const Ahead ahead = tile.ahead(block, BLOCKS, num_units * Codes::kLines, 8 * Ahead::kLines / BLOCKS);
        const Ahead scales_ahead = tile.ahead(block, BLOCKS, num_groups, kGroupsAhead);
        FloatPart floats[ROWS][kVectors] = {};
        for (size_t group = 0; group < num_groups; ++group) {
            IntPart totals[ROWS][kVectors] = {};
            for (size_t i = 0; i < units_of_group; ++i)
                add_unit<ROWS, BLOCKS>(codes, block_words, ahead, quads, rows, group * units_of_group + i, scales,
                                       totals);
            const size_t distance = scales_ahead.of(group);
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                const int lane = v % kParts * kPartLanes;
                if (v % kParts == 0) scales.prefetch(v / kParts, group, distance);
                const auto scale = scales.at(v / kParts, group, lane);
#pragma GCC unroll 12
                for (int row = 0; row < ROWS; ++row) {
                    const size_t of_row = group * rows + row;
                    const FloatPart sum = __builtin_convertvector(totals[row][v], FloatPart);
                    FloatPart scaled;
                    if constexpr (Scales::kHasFactors)
                        scaled = scale.apply(sum, all_lanes<FloatPart>(half_sums[2 * group * rows + row]),
                                             all_lanes<FloatPart>(half_sums[(2 * group + 1) * rows + row]));
                    else
                        scaled = scale.apply(sum, all_lanes<FloatPart>(row_sums[of_row]));
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
    POLYBASIC_INLINE static void add_unit(const uint32_t* codes, size_t block_words, const Ahead& ahead,
                                          const uint32_t* quads, size_t rows, size_t unit, const Scales& scales,
                                          IntPart (&totals)[ROWS][BLOCKS * kParts]) {
        constexpr int kVectors = BLOCKS * kParts;
        const size_t distance = ahead.of(unit * Codes::kLines);
        codes += unit * Codes::kLines * kLanes;
        quads += unit * (kUnit / 4) * rows;
        for (int block = 0; block < BLOCKS; ++block)
            for (size_t line = 0; line < Codes::kLines; ++line)
                __builtin_prefetch(codes + block * block_words + line * kLanes + distance, 0, 2);
#pragma GCC unroll 4
        for (int begin = 0; begin < kUnit / 8; begin += Codes::kWords) {
            IntPart sums[ROWS][kVectors] = {};
            constexpr bool kAreWhole = !Codes::kInPairs && !Scales::kHasFactors;
#pragma GCC unroll 4
            for (int word = begin; word < begin + Codes::kWords; ++word) {
                WordPart low[kVectors], high[kVectors];
#pragma GCC unroll 16
                for (int v = 0; v < kVectors; ++v)
                    Codes::read(codes + v / kParts * block_words + v % kParts * kPartLanes, word, low[v], high[v]);
                add_words(kAreWhole ? totals : sums, low, quads + 2 * word * rows);
                add_words(kAreWhole ? totals : sums, high, quads + (2 * word + 1) * rows);
            }
            if constexpr (kAreWhole) continue;
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                IntPart factor;
                if constexpr (Scales::kHasFactors)
                    factor = scales.factor(v / kParts, unit, begin / (kUnit / 16), v % kParts * kPartLanes);
#pragma GCC unroll 12
                for (int row = 0; row < ROWS; ++row)
                    if constexpr (Scales::kHasFactors)
                        totals[row][v] += whole_product(sums[row][v], factor);
                    else
                        totals[row][v] += whole_sum(sums[row][v]);
            }
        }
    }

    template <int ROWS, int VECTORS>
    POLYBASIC_INLINE static void add_words(IntPart (&sums)[ROWS][VECTORS], const WordPart (&codes)[VECTORS],
                                           const uint32_t* values) {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const WordPart value = all_lanes<WordPart>(values[row]);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) Codes::add(sums[row][v], codes[v], value);
        }
    }
};

}  // namespace polybasic
