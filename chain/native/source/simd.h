// Sixteen floats at a time. One implementation for processors with AVX-512 and its bfloat16
// instructions, one in the compiler's own vectors for all others. Nothing here depends on how many
// rows a pass has, and products are never contracted by the compiler (-ffp-contract=off): what is
// computed for a row is the same to the bit whatever is computed beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && \
    !defined(POLYBASIC_PORTABLE)
#define POLYBASIC_AVX512 1
#include <immintrin.h>
#endif

namespace polybasic {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

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

inline Floats fused_multiply_add(Floats x, Floats y, Floats added) {
#if defined(POLYBASIC_AVX512)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)added);
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

// A sum of sixteen lanes, in one fixed order.
inline float sum(Floats values) {
    float lanes[kLanes];
    store(lanes, values);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

inline float largest(Floats values) {
    float lanes[kLanes];
    store(lanes, values);
    float found = lanes[0];
    for (int lane = 1; lane < kLanes; ++lane) found = lanes[lane] > found ? lanes[lane] : found;
    return found;
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

// e to the power of each lane, for lanes from -87 to 88; below, 0. Relative error under 2e-7.
inline Floats exponential(Floats x) {
    const Floats clamped = maximum(x, broadcast(-87.0f));
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
    Ints bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000 + 127) << 23;
    Floats scale;
    std::memcpy(&scale, &bits, sizeof scale);
    const Floats result = power * scale;
    return x < -87.0f ? Floats{} : result;
}

}  // namespace polybasic
