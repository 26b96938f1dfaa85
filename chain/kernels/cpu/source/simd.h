// Sixteen floats at a time. One implementation for processors with AVX-512 and its bfloat16
// instructions, one in the compiler's own vectors for all others. Everything is batch-invariant:
// nothing depends on the number of rows of a pass, and the compiler never contracts products
// (-ffp-contract=off), so a row's result has the same bits whatever is computed beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(POLYBASIC_PORTABLE)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define POLYBASIC_AVX512 1
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#endif

// Two vectors of sixteen 32-bit lanes as one list of 32: the lanes with the given numbers.
#if defined(__clang__)
#define POLYBASIC_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define POLYBASIC_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, Ints{__VA_ARGS__})
#endif

// For functions that must be inlined, so that their constants are known in the caller.
#define POLYBASIC_INLINE inline __attribute__((always_inline))

namespace polybasic {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

// A bfloat16 number: the upper half of a float's bits.
struct Bfloat16 {
    uint16_t bits;
};

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline Floats broadcast(float value) { return Floats{} + value; }

#if defined(__AVX512F__) || defined(POLYBASIC_PORTABLE)
#elif defined(__FMA__)
#define POLYBASIC_FMA(x, y, added) _mm256_fmadd_ps(x, y, added)
typedef __m256 FusedPart;
#elif defined(__aarch64__)
#define POLYBASIC_FMA(x, y, added) vfmaq_f32(added, x, y)
typedef float32x4_t FusedPart;
#endif

// x * y + added, rounded once where the processor can.
inline Floats fused_multiply_add(Floats x, Floats y, Floats added) {
#if defined(__AVX512F__) && !defined(POLYBASIC_PORTABLE)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)added);
#elif defined(POLYBASIC_FMA)
    constexpr int kParts = sizeof(Floats) / sizeof(FusedPart);
    FusedPart parts_x[kParts], parts_y[kParts], sums[kParts];
    std::memcpy(parts_x, &x, sizeof x);
    std::memcpy(parts_y, &y, sizeof y);
    std::memcpy(sums, &added, sizeof added);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) sums[i] = POLYBASIC_FMA(parts_x[i], parts_y[i], sums[i]);
    std::memcpy(&added, sums, sizeof added);
    return added;
#else
    return x * y + added;
#endif
}

inline Floats maximum(Floats x, Floats y) {
#if defined(POLYBASIC_AVX512)
    return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return x > y ? x : y;
#endif
}

// Sixteen bfloat16 numbers as floats.
inline Floats load(const Bfloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    Floats values;
    std::memcpy(&values, &words, sizeof values);
    return values;
}

// Round to the nearest bfloat16, ties to even.
inline void store(Bfloat16* to, Floats values) {
#if defined(POLYBASIC_AVX512)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
    std::memcpy(to, &rounded, sizeof rounded);
#else
    Words words;
    std::memcpy(&words, &values, sizeof words);
    words = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    const Halves halves = __builtin_convertvector(words, Halves);
    std::memcpy(to, &halves, sizeof halves);
#endif
}

inline float widen(Bfloat16 value) {
    const uint32_t word = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
}

inline float widen(float value) { return value; }

inline void round_to(Bfloat16* to, float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    to->bits = uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline void round_to(float* to, float value) { *to = value; }

// From sixteen vectors, one: lane i holds the sum of the lanes of vector i. Every sum is the same
// tree: lanes eight apart, then four, two and one apart.
inline Floats sum_each(const Floats (&of)[kLanes]) {
    Floats eights[8], fours[4], twos[2];
    // Two vectors become one: half of the terms stay in place, since selecting lanes is cheaper than
    // moving them.
    const Ints eighth = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1};
    const Ints fourth = {0, 0, 0, 0, -1, -1, -1, -1, 0, 0, 0, 0, -1, -1, -1, -1};
    const Ints second = {0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const Floats x = of[i], y = of[i + 8];
        eights[i] = (eighth ? y : x) +
                    POLYBASIC_SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const Floats x = eights[i], y = eights[i + 4];
        fours[i] = (fourth ? y : x) +
                   POLYBASIC_SHUFFLE(x, y, 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const Floats x = fours[2 * i], y = fours[2 * i + 1];
        twos[i] = (second ? y : x) +
                  POLYBASIC_SHUFFLE(x, y, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
    }
    const Floats x = twos[0], y = twos[1];
    return POLYBASIC_SHUFFLE(x, y, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           POLYBASIC_SHUFFLE(x, y, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// A sum of sixteen lanes, by the same tree.
inline float sum(Floats x) {
    x = x + POLYBASIC_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x = x + POLYBASIC_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
    x = x + POLYBASIC_SHUFFLE(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1);
    return x[0] + x[1];
}

inline float largest(Floats x) {
    x = maximum(x, POLYBASIC_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = maximum(x, POLYBASIC_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
    x = maximum(x, POLYBASIC_SHUFFLE(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
    return x[0] > x[1] ? x[0] : x[1];
}

// Per lane: added + low(weights) * low(values) + high(weights) * high(values), where each 32-bit
// lane holds a pair of bfloat16 numbers.
inline Floats add_pair_products(Floats added, Words weights, Words values) {
#if defined(POLYBASIC_AVX512)
    return (Floats)_mm512_dpbf16_ps((__m512)added, (__m512bh)weights, (__m512bh)values);
#else
    Floats low_weights, high_weights, low_values, high_values;
    Words words = weights << 16;
    std::memcpy(&low_weights, &words, sizeof words);
    words = weights & 0xffff0000u;
    std::memcpy(&high_weights, &words, sizeof words);
    words = values << 16;
    std::memcpy(&low_values, &words, sizeof words);
    words = values & 0xffff0000u;
    std::memcpy(&high_values, &words, sizeof words);
    added = fused_multiply_add(high_weights, high_values, added);
    return fused_multiply_add(low_weights, low_values, added);
#endif
}

// e to the power of each lane; 0 below -87, its value at 88 above 88, and NaN for NaN.
// Relative error under 2e-7.
inline Floats exponential(Floats x) {
    // comparisons with NaN are false, hence the order
    const Floats bounded = x > 88.0f ? broadcast(88.0f) : x;
    const Floats clamped = maximum(broadcast(-87.0f), bounded);
    // x = n ln 2 + rest, |rest| <= ln 2 / 2; adding 1.5 * 2^23 rounds to an integer
    const Floats shifted = fused_multiply_add(clamped, broadcast(1.44269504f), broadcast(12582912.0f));
    const Floats n = shifted - 12582912.0f;
    Floats rest = fused_multiply_add(n, broadcast(-0.693359375f), clamped);
    rest = fused_multiply_add(n, broadcast(2.12194440e-4f), rest);
    // Taylor terms up to the sixth
    Floats power = broadcast(1.0f / 720);
    power = fused_multiply_add(power, rest, broadcast(1.0f / 120));
    power = fused_multiply_add(power, rest, broadcast(1.0f / 24));
    power = fused_multiply_add(power, rest, broadcast(1.0f / 6));
    power = fused_multiply_add(power, rest, broadcast(0.5f));
    power = fused_multiply_add(power, rest, broadcast(1.0f));
    power = fused_multiply_add(power, rest, broadcast(1.0f));
#if defined(POLYBASIC_AVX512)
    const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(is_kept, (__m512)power, (__m512)n);
#else
    Ints bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000 + 127) << 23;
    Floats scale;
    std::memcpy(&scale, &bits, sizeof scale);
    const Floats result = power * scale;
    return x < -87.0f ? Floats{} : result;
#endif
}

// cap * tanh(x / cap)
inline Floats softcapped(Floats x, float cap) {
    const Floats magnitude = maximum(x, -x);
    const Floats power = exponential(magnitude * (-2.0f / cap));
    const Floats capped = (1.0f - power) / (1.0f + power) * cap;
    return x < 0.0f ? -capped : capped;
}

}  // namespace polybasic
