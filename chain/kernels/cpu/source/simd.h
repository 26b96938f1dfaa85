// Sixteen floats at a time, in as many of the processor's vectors as that takes: one with AVX-512, two
// with AVX2, four elsewhere. Everything is batch-invariant: nothing depends on the number of rows of a
// pass, and the compiler never contracts products (-ffp-contract=off), so a row's result has the same
// bits whatever is computed beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if !defined(POLYBASIC_PORTABLE)
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define POLYBASIC_AVX512 1
#if defined(__AVX512BF16__)
#define POLYBASIC_PAIR_PRODUCTS 1
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define POLYBASIC_AMX 1
#endif
#endif
#if defined(__AVX512VNNI__)
#define POLYBASIC_QUAD_PRODUCTS 1
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define POLYBASIC_AVX2 1
#if defined(__AVXVNNI__)
#define POLYBASIC_QUAD_PRODUCTS 1
#endif
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#define POLYBASIC_NEON 1
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define POLYBASIC_PAIR_PRODUCTS 1
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#define POLYBASIC_QUAD_PRODUCTS 1
#endif
#endif
#endif

// Two vectors as one list: the lanes with the given numbers.
#if defined(__clang__)
#define POLYBASIC_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define POLYBASIC_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, IntPart{__VA_ARGS__})
#endif

// For functions that must be inlined, so that their values stay in registers.
#define POLYBASIC_INLINE inline __attribute__((always_inline))

namespace polybasic {

constexpr int kLanes = 16;
#if defined(POLYBASIC_AVX512)
constexpr int kPartLanes = 16, kRegisters = 32;
#elif defined(POLYBASIC_AVX2)
constexpr int kPartLanes = 8, kRegisters = 16;
#elif defined(POLYBASIC_NEON)
constexpr int kPartLanes = 4, kRegisters = 32;
#else
constexpr int kPartLanes = 4, kRegisters = 16;
#endif
constexpr int kParts = kLanes / kPartLanes;

// Sums that are kept in registers together; the others hold what is multiplied.
constexpr int kMaxSums = kRegisters == 32 ? 24 : 12;

// Whether the processor multiplies pairs of bfloat16 numbers; elsewhere they are widened to floats.
#if defined(POLYBASIC_PAIR_PRODUCTS)
constexpr bool kHasPairProducts = true;
#else
constexpr bool kHasPairProducts = false;
#endif

// What the processor has in one register.
typedef float FloatPart __attribute__((vector_size(kPartLanes * 4)));
typedef int32_t IntPart __attribute__((vector_size(kPartLanes * 4)));
typedef uint32_t WordPart __attribute__((vector_size(kPartLanes * 4)));
typedef uint64_t LongPart __attribute__((vector_size(kPartLanes * 4)));
typedef uint16_t HalfPart __attribute__((vector_size(kPartLanes * 2)));
typedef int8_t BytePart __attribute__((vector_size(kPartLanes)));

template <class Part>
struct Lanes {
    Part parts[kParts];
};
using Floats = Lanes<FloatPart>;
using Ints = Lanes<IntPart>;
using Words = Lanes<WordPart>;

// A bfloat16 number: the upper half of a float's bits.
struct Bfloat16 {
    uint16_t bits;
};

template <class To, class From>
POLYBASIC_INLINE To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class Part, class From>
POLYBASIC_INLINE Part load_part(const From* from) {
    Part part;
    std::memcpy(&part, from, sizeof part);
    return part;
}

// One number in all lanes. As bits, since 0 + x is not x for the compiler if x is a float.
template <class Part, class Number>
POLYBASIC_INLINE Part all_lanes(Number value) {
    return same_bits<Part>(WordPart{} + same_bits<uint32_t>(value));
}

// From each part's number, that part.
template <class Part, class Of>
POLYBASIC_INLINE Lanes<Part> each_part(Of of) {
    if constexpr (kParts == 1)
        return {{of(0)}};
    else if constexpr (kParts == 2)
        return {{of(0), of(1)}};
    else
        return {{of(0), of(1), of(2), of(3)}};
}

#define POLYBASIC_EACH [&](int i) __attribute__((always_inline))

template <class Part>
using Lane = std::decay_t<decltype(std::declval<Part>()[0])>;

#define POLYBASIC_OPERATOR(OP, RESULT)                                                     \
    template <class Part>                                                                  \
    POLYBASIC_INLINE Lanes<RESULT> operator OP(Lanes<Part> x, Lanes<Part> y) {             \
        return each_part<RESULT>(POLYBASIC_EACH { return RESULT(x.parts[i] OP y.parts[i]); }); \
    }                                                                                      \
    template <class Part>                                                                  \
    POLYBASIC_INLINE Lanes<RESULT> operator OP(Lanes<Part> x, Lane<Part> y) {              \
        return x OP broadcast_to<Part>(y);                                                 \
    }                                                                                      \
    template <class Part>                                                                  \
    POLYBASIC_INLINE Lanes<RESULT> operator OP(Lane<Part> x, Lanes<Part> y) {              \
        return broadcast_to<Part>(x) OP y;                                                 \
    }

template <class Part>
POLYBASIC_INLINE Lanes<Part> broadcast_to(Lane<Part> value) {
    return each_part<Part>([=](int) __attribute__((always_inline)) { return all_lanes<Part>(value); });
}

POLYBASIC_OPERATOR(+, Part)
POLYBASIC_OPERATOR(-, Part)
POLYBASIC_OPERATOR(*, Part)
POLYBASIC_OPERATOR(/, Part)
POLYBASIC_OPERATOR(&, Part)
POLYBASIC_OPERATOR(>, IntPart)
POLYBASIC_OPERATOR(>=, IntPart)
POLYBASIC_OPERATOR(<, IntPart)

template <class Part>
POLYBASIC_INLINE Lanes<Part> operator-(Lanes<Part> x) {
    return each_part<Part>(POLYBASIC_EACH { return -x.parts[i]; });
}

template <class Part>
POLYBASIC_INLINE Lanes<Part> operator<<(Lanes<Part> x, int bits) {
    return each_part<Part>(POLYBASIC_EACH { return x.parts[i] << bits; });
}

template <class Part>
POLYBASIC_INLINE Lanes<Part> operator>>(Lanes<Part> x, int bits) {
    return each_part<Part>(POLYBASIC_EACH { return x.parts[i] >> bits; });
}

POLYBASIC_INLINE Floats broadcast(float value) { return broadcast_to<FloatPart>(value); }

// Lane by lane: `x` where the mask is set, else `y`.
template <class Part>
POLYBASIC_INLINE Lanes<Part> select(Ints mask, Lanes<Part> x, Lanes<Part> y) {
    return each_part<Part>(POLYBASIC_EACH { return Part(mask.parts[i] ? x.parts[i] : y.parts[i]); });
}

POLYBASIC_INLINE Floats to_floats(Ints x) {
    return each_part<FloatPart>(POLYBASIC_EACH { return __builtin_convertvector(x.parts[i], FloatPart); });
}

POLYBASIC_INLINE Floats load(const float* from) {
    return each_part<FloatPart>(POLYBASIC_EACH { return load_part<FloatPart>(from + i * kPartLanes); });
}

POLYBASIC_INLINE void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// x * y + added, rounded once where the processor can.
POLYBASIC_INLINE FloatPart fused_multiply_add(FloatPart x, FloatPart y, FloatPart added) {
#if defined(POLYBASIC_AVX512)
    return (FloatPart)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)added);
#elif defined(POLYBASIC_AVX2)
    return (FloatPart)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)added);
#elif defined(POLYBASIC_NEON)
    return (FloatPart)vfmaq_f32((float32x4_t)added, (float32x4_t)x, (float32x4_t)y);
#else
    return x * y + added;
#endif
}

// Add x * y to a sum that stays in its register: with sixteen of them, compilers that reorder products
// move sums to memory.
POLYBASIC_INLINE void add_product(FloatPart& sum, FloatPart x, FloatPart y) {
    sum = fused_multiply_add(x, y, sum);
#if defined(POLYBASIC_AVX2)
    asm("" : "+x"(sum));
#endif
}

POLYBASIC_INLINE void add_product(Floats& sum, Floats x, Floats y) {
    add_product(sum.parts[0], x.parts[0], y.parts[0]);
    if constexpr (kParts > 1) add_product(sum.parts[1 % kParts], x.parts[1 % kParts], y.parts[1 % kParts]);
    if constexpr (kParts > 2) {
        add_product(sum.parts[2 % kParts], x.parts[2 % kParts], y.parts[2 % kParts]);
        add_product(sum.parts[3 % kParts], x.parts[3 % kParts], y.parts[3 % kParts]);
    }
}

POLYBASIC_INLINE Floats fused_multiply_add(Floats x, Floats y, Floats added) {
    return each_part<FloatPart>(
        POLYBASIC_EACH { return fused_multiply_add(x.parts[i], y.parts[i], added.parts[i]); });
}

POLYBASIC_INLINE FloatPart maximum(FloatPart x, FloatPart y) {
#if defined(POLYBASIC_AVX512)
    return (FloatPart)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(POLYBASIC_AVX2)
    return (FloatPart)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return x > y ? x : y;
#endif
}

POLYBASIC_INLINE Floats maximum(Floats x, Floats y) {
    return each_part<FloatPart>(POLYBASIC_EACH { return maximum(x.parts[i], y.parts[i]); });
}

// A part's float16 numbers as floats.
POLYBASIC_INLINE FloatPart load_halves(const uint16_t* from) {
#if defined(POLYBASIC_AVX512)
    return (FloatPart)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(POLYBASIC_AVX2)
    return (FloatPart)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(POLYBASIC_NEON)
    return (FloatPart)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    // as `widen` does it
    const WordPart words = __builtin_convertvector(load_part<HalfPart>(from), WordPart);
    const FloatPart magnitude = same_bits<FloatPart>((words & 0x7fff) << 13) * 0x1p112f;
    return same_bits<FloatPart>(same_bits<WordPart>(magnitude) | (words & 0x8000) << 16);
#endif
}

// A part's signed bytes as integers.
POLYBASIC_INLINE IntPart load_bytes(const int8_t* from) {
#if defined(POLYBASIC_AVX512)
    return (IntPart)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(POLYBASIC_AVX2)
    return (IntPart)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    return __builtin_convertvector(load_part<BytePart>(from), IntPart);
#endif
}

// Sixteen bfloat16 numbers as floats.
POLYBASIC_INLINE Floats load(const Bfloat16* from) {
    return each_part<FloatPart>(POLYBASIC_EACH {
        const HalfPart halves = load_part<HalfPart>(from + i * kPartLanes);
#if defined(POLYBASIC_AVX2)
        const WordPart words = (WordPart)_mm256_cvtepu16_epi32((__m128i)halves);
#else
        const WordPart words = __builtin_convertvector(halves, WordPart);
#endif
        return same_bits<FloatPart>(words << 16);
    });
}

// Round to the nearest bfloat16, ties to even.
POLYBASIC_INLINE void store(Bfloat16* to, Floats values) {
#if defined(POLYBASIC_AVX512) && defined(POLYBASIC_PAIR_PRODUCTS)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values.parts[0]);
    std::memcpy(to, &rounded, sizeof rounded);
#else
    for (int i = 0; i < kParts; ++i) {
        WordPart words = same_bits<WordPart>(values.parts[i]);
        words = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
        const HalfPart halves = __builtin_convertvector(words, HalfPart);
        std::memcpy(to + i * kPartLanes, &halves, sizeof halves);
    }
#endif
}

POLYBASIC_INLINE Floats rounded_to_bfloat16(Floats values) {
    Bfloat16 rounded[kLanes];
    store(rounded, values);
    return load(rounded);
}

inline float widen(Bfloat16 value) { return same_bits<float>(uint32_t(value.bits) << 16); }

inline float widen(float value) { return value; }

// A float16 number.
struct Half {
    uint16_t bits;
};

// 2^112 moves the exponent's bias from 15 to 127, and subnormal numbers to their place.
inline float widen(Half value) {
    const float magnitude = same_bits<float>(uint32_t(value.bits & 0x7fff) << 13) * 0x1p112f;
    return value.bits & 0x8000 ? -magnitude : magnitude;
}

inline void round_to(Bfloat16* to, float value) {
    const uint32_t word = same_bits<uint32_t>(value);
    to->bits = uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline void round_to(float* to, float value) { *to = value; }

// The steps of a sum: two vectors become one, whose lanes hold sums of lanes that were eight, four, two
// or one apart. Where it can be, half of the terms stay in place, since selecting lanes is cheaper than
// moving them.
#if defined(POLYBASIC_AVX512)
#define POLYBASIC_EIGHT_APART_1 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31
#define POLYBASIC_EIGHT_APART_2 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23
#define POLYBASIC_FOUR_APART_1 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31
#define POLYBASIC_FOUR_APART_2 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27
#define POLYBASIC_TWO_APART_1 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31
#define POLYBASIC_TWO_APART_2 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29
#define POLYBASIC_ONE_APART_1 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define POLYBASIC_ONE_APART_2 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#elif defined(POLYBASIC_AVX2)
#define POLYBASIC_FOUR_APART_1 0, 1, 2, 3, 12, 13, 14, 15
#define POLYBASIC_FOUR_APART_2 4, 5, 6, 7, 8, 9, 10, 11
#define POLYBASIC_TWO_APART_1 0, 1, 10, 11, 4, 5, 14, 15
#define POLYBASIC_TWO_APART_2 2, 3, 8, 9, 6, 7, 12, 13
#define POLYBASIC_ONE_APART_1 0, 2, 8, 10, 4, 6, 12, 14
#define POLYBASIC_ONE_APART_2 1, 3, 9, 11, 5, 7, 13, 15
#else
#define POLYBASIC_TWO_APART_1 0, 1, 6, 7
#define POLYBASIC_TWO_APART_2 2, 3, 4, 5
#define POLYBASIC_ONE_APART_1 0, 2, 4, 6
#define POLYBASIC_ONE_APART_2 1, 3, 5, 7
#endif
#define POLYBASIC_JOIN(STEP, combine, x, y)                                                         \
    combine(POLYBASIC_SHUFFLE(x, y, POLYBASIC_##STEP##_1), POLYBASIC_SHUFFLE(x, y, POLYBASIC_##STEP##_2))

// Lanes that are eight apart where a part has fewer than sixteen, and four apart where it has four.
template <class Combine>
POLYBASIC_INLINE FloatPart join_parts(Floats x, Combine combine) {
    if constexpr (kParts == 2)
        return combine(x.parts[0], x.parts[1]);
    else if constexpr (kParts == 4)
        return combine(combine(x.parts[0], x.parts[2]), combine(x.parts[1], x.parts[3]));
    else
        return x.parts[0];
}

POLYBASIC_INLINE FloatPart plus(FloatPart x, FloatPart y) { return x + y; }

// From sixteen vectors, one: lane i holds the sum of the lanes of vector i. Every sum is the same
// tree: lanes eight apart, then four, two and one apart.
POLYBASIC_INLINE Floats sum_each(const Floats (&of)[kLanes]) {
    FloatPart sums[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = join_parts(of[i], plus);
#if defined(POLYBASIC_EIGHT_APART_1)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sums[i] = POLYBASIC_JOIN(EIGHT_APART, plus, sums[i], sums[i + 8]);
#endif
#if defined(POLYBASIC_FOUR_APART_1)
#pragma GCC unroll 16
    for (int i = 0; i < 8 * kParts; ++i)
        if (i % 8 < 4) sums[i] = POLYBASIC_JOIN(FOUR_APART, plus, sums[i], sums[i + 4]);
#endif
    return each_part<FloatPart>(POLYBASIC_EACH {
        const FloatPart* four = sums + i * kPartLanes;
        const FloatPart x = POLYBASIC_JOIN(TWO_APART, plus, four[0], four[1]);
        const FloatPart y = POLYBASIC_JOIN(TWO_APART, plus, four[2], four[3]);
        return POLYBASIC_JOIN(ONE_APART, plus, x, y);
    });
}

// All lanes combined, by the same tree.
template <class Combine>
POLYBASIC_INLINE float combine_lanes(Floats of, Combine combine) {
    FloatPart x = join_parts(of, combine);
#if defined(POLYBASIC_EIGHT_APART_1)
    x = POLYBASIC_JOIN(EIGHT_APART, combine, x, x);
#endif
#if defined(POLYBASIC_FOUR_APART_1)
    x = POLYBASIC_JOIN(FOUR_APART, combine, x, x);
#endif
    x = POLYBASIC_JOIN(TWO_APART, combine, x, x);
    return POLYBASIC_JOIN(ONE_APART, combine, x, x)[0];
}

POLYBASIC_INLINE float sum(Floats x) { return combine_lanes(x, plus); }

POLYBASIC_INLINE float largest(Floats x) {
    return combine_lanes(x, [](FloatPart one, FloatPart other) { return maximum(one, other); });
}

// Per lane: added + low(weights) * low(values) + high(weights) * high(values), where each 32-bit
// lane holds a pair of bfloat16 numbers.
#if defined(POLYBASIC_PAIR_PRODUCTS)
POLYBASIC_INLINE FloatPart add_pair_products(FloatPart added, WordPart weights, WordPart values) {
#if defined(POLYBASIC_NEON)
    return (FloatPart)vbfdotq_f32((float32x4_t)added, same_bits<bfloat16x8_t>(weights),
                                  same_bits<bfloat16x8_t>(values));
#else
    return (FloatPart)_mm512_dpbf16_ps((__m512)added, (__m512bh)weights, (__m512bh)values);
#endif
}

POLYBASIC_INLINE Floats add_pair_products(Floats added, Words weights, Words values) {
    return each_part<FloatPart>(POLYBASIC_EACH {
        return add_pair_products(added.parts[i], weights.parts[i], values.parts[i]);
    });
}
#endif

// e to the power of each lane; 0 below -87, its value at 88 above 88, and NaN for NaN.
// Relative error under 2e-7.
POLYBASIC_INLINE Floats exponential(Floats x) {
    // comparisons with NaN are false, hence the order
    const Floats bounded = select(x > 88.0f, broadcast(88.0f), x);
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
    const __m512 wide = (__m512)x.parts[0];
    const __mmask16 is_kept = _mm512_cmp_ps_mask(wide, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return {{(FloatPart)_mm512_maskz_scalef_ps(is_kept, (__m512)power.parts[0], (__m512)n.parts[0])}};
#else
    const Ints exponents = same_bits<Ints>(shifted) - (0x4b400000 - 127);
    const Floats result = power * same_bits<Floats>(exponents << 23);
    return select(x < -87.0f, Floats{}, result);
#endif
}

// cap * tanh(x / cap)
POLYBASIC_INLINE Floats softcapped(Floats x, float cap) {
    const Floats magnitude = maximum(x, -x);
    const Floats power = exponential(magnitude * (-2.0f / cap));
    const Floats capped = (1.0f - power) / (1.0f + power) * cap;
    return select(x < 0.0f, -capped, capped);
}

}  // namespace polybasic
