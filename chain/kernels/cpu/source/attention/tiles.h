// The two products of attention in tiles of registers: queries with keys, weights with values.
//
// A score is summed in sixteen lanes, each over the head in order, which are then added by one tree.
// A weighted sum of values runs over the positions in order. Neither depends on the tile in which it
// is computed.
#pragma once

#include <cstddef>

#include "simd.h"

namespace polybasic {
namespace attention {

// Consecutive rows of one head in the cache.
template <class T>
struct ConsecutiveRows {
    const T* first;
    int head_dim;
    const T* operator[](int i) const { return first + ptrdiff_t(i) * head_dim; }
};

// Rows of one head in the cache, by their numbers.
template <class T>
struct ListedRows {
    const T* head;
    int head_dim;
    const int32_t* rows;
    const T* operator[](int i) const { return head + ptrdiff_t(rows[i]) * head_dim; }
};

// What queries are copied to: rounded like the keys that they are multiplied with.
template <class T>
using QueryElement = std::conditional_t<kHasPairProducts, T, float>;

template <class T>
POLYBASIC_INLINE void store_query(QueryElement<T>* to, Floats values) {
    if constexpr (std::is_same_v<T, QueryElement<T>>)
        store(to, values);
    else
        store(to, rounded_to_bfloat16(values));
}

// Elements of a query or a key that are multiplied at a time.
template <class T>
struct ScorePart {
    static constexpr int kElements = kLanes;
    template <class Element>
    static Floats read(const Element* from) {
        return load(from);
    }
    POLYBASIC_INLINE static void add(Floats& sum, Floats x, Floats y) { add_product(sum, x, y); }
};

#if defined(POLYBASIC_PAIR_PRODUCTS)
template <>
struct ScorePart<Bfloat16> {
    static constexpr int kElements = 2 * kLanes;
    static Words read(const Bfloat16* from) {
        Words pairs;
        std::memcpy(&pairs, from, sizeof pairs);
        return pairs;
    }
    // Where a head ends in the middle of a part.
    static Words read_half(const Bfloat16* from) {
#if defined(POLYBASIC_AVX512)
        return {{(WordPart)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)from))}};
#else
        Words pairs{};
        std::memcpy(&pairs, from, sizeof pairs / 2);
        return pairs;
#endif
    }
    static void add(Floats& sum, Words x, Words y) { sum = add_pair_products(sum, x, y); }
};
#endif

// Scores whose sums are in registers together.
constexpr int kScoresAtOnce = kParts == 1 ? kLanes : kRegisters / (2 * kParts);

// The products of kQueries queries, padded with zeros to whole parts, with 16 / kQueries keys from
// `first` on; that of query q and key k is in lane q * 16 / kQueries + k.
template <class T, int kQueries, class Keys>
POLYBASIC_INLINE Floats score_tile(const QueryElement<T>* const* queries, const Keys& keys, int first,
                                   int head_dim) {
    using Part = ScorePart<T>;
    constexpr int kKeys = kLanes / kQueries;
    constexpr int kQueryStep = kQueries < kScoresAtOnce ? kQueries : kScoresAtOnce;
    constexpr int kKeyStep = kScoresAtOnce / kQueryStep;
    Floats sums[kLanes];
#pragma GCC unroll 16
    for (int index = 0; index < kLanes / kScoresAtOnce; ++index) {
        const int q0 = index % (kQueries / kQueryStep) * kQueryStep;
        const int k0 = index / (kQueries / kQueryStep) * kKeyStep;
        const T* key_rows[kKeyStep];
#pragma GCC unroll 16
        for (int k = 0; k < kKeyStep; ++k) key_rows[k] = keys[first + k0 + k];
        Floats own[kQueryStep][kKeyStep] = {};
        int at = 0;
#pragma GCC unroll 1
        for (; at + Part::kElements <= head_dim; at += Part::kElements) {
            decltype(Part::read(queries[0])) read[kQueryStep];
#pragma GCC unroll 4
            for (int q = 0; q < kQueryStep; ++q) read[q] = Part::read(queries[q0 + q] + at);
#pragma GCC unroll 16
            for (int k = 0; k < kKeyStep; ++k) {
                const auto key = Part::read(key_rows[k] + at);
#pragma GCC unroll 4
                for (int q = 0; q < kQueryStep; ++q)
                    Part::add(own[q][k], read[q], key);
            }
        }
        if constexpr (Part::kElements > kLanes) {
            if (at < head_dim) {
#pragma GCC unroll 16
                for (int k = 0; k < kKeyStep; ++k) {
                    const auto key = Part::read_half(key_rows[k] + at);
#pragma GCC unroll 4
                    for (int q = 0; q < kQueryStep; ++q)
                        Part::add(own[q][k], Part::read(queries[q0 + q] + at), key);
                }
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < kQueryStep; ++q)
#pragma GCC unroll 16
            for (int k = 0; k < kKeyStep; ++k) sums[(q0 + q) * kKeys + k0 + k] = own[q][k];
    }
    return sum_each(sums);
}

// A few elements of the values of `kPositions` positions side by side, to be weighted and added.
template <class T>
struct ValuePart {
    static constexpr int kPositions = 1, kVectors = 1, kElements = kLanes;
    using Factor = FloatPart;

    template <class Values>
    POLYBASIC_INLINE static void read(const Values& rows, int step, int at, Factor* values) {
        const Floats read = load(rows[step] + at);
        std::memcpy(values, &read, sizeof read);
    }
    static Factor read_weight(const float* weights, int step) { return all_lanes<Factor>(weights[step]); }
    POLYBASIC_INLINE static void add(FloatPart& sum, Factor value, Factor weight) {
        add_product(sum, value, weight);
    }
};

#if defined(POLYBASIC_AVX512) && defined(POLYBASIC_PAIR_PRODUCTS)
// Two positions in one product; their weights are a pair of bfloat16 numbers in the place of one
// float. The elements come in the order in which neighbours are interleaved.
template <>
struct ValuePart<Bfloat16> {
    static constexpr int kPositions = 2, kVectors = 2, kElements = 2 * kLanes;
    using Factor = WordPart;

    template <class Values>
    static void read(const Values& rows, int step, int at, Factor* values) {
        interleave(_mm512_loadu_si512(rows[2 * step] + at), _mm512_loadu_si512(rows[2 * step + 1] + at),
                   values);
    }
    template <class Values>
    static void read_half(const Values& rows, int step, int at, Factor* values) {
        interleave(read_half(rows[2 * step] + at), read_half(rows[2 * step + 1] + at), values);
    }
    static __m512i read_half(const Bfloat16* from) {
        return (__m512i)ScorePart<Bfloat16>::read_half(from).parts[0];
    }
    static void interleave(__m512i first, __m512i second, Factor* values) {
        values[0] = (Factor)_mm512_unpacklo_epi16(first, second);
        values[1] = (Factor)_mm512_unpackhi_epi16(first, second);
    }
    static Factor read_weight(const float* weights, int step) {
        Factor weight = all_lanes<Factor>(weights[step]);
        // read once, not again for each product
        asm("" : "+v"(weight));
        return weight;
    }
    static void add(FloatPart& sum, Factor value, Factor weight) {
        sum = add_pair_products(sum, weight, value);
    }
    // The two vectors of sums in the order of the head.
    static void put_in_order(Floats& first, Floats& second) {
        const FloatPart low = first.parts[0], high = second.parts[0];
        first = {{POLYBASIC_SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23)}};
        second = {{POLYBASIC_SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29,
                                     30, 31)}};
    }
};
#endif

// A single query takes more of the head at a time, so that there are enough sums to hide the latency
// of one.
template <class T>
constexpr int parts_at_once(int num_queries) {
    const int most = kMaxSums / (kParts * ValuePart<T>::kVectors * num_queries);
    return most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// The values of the steps first..end, weighted, from element `at` of the head on: into sums [queries]
// [padded head], or added to them. kIsHalf: the head ends in the middle of the only part.
template <class T, int kQueries, bool kAdds, int kValueParts, bool kIsHalf, class Values>
__attribute__((noinline)) void weighted_tile(const Values& rows, int first, int end,
                                    const float* const* weights, float* const* sums, int at) {
    using Part = ValuePart<T>;
    constexpr int kVectors = kValueParts * Part::kVectors * kParts;
    FloatPart tile[kQueries][kVectors] = {};
    if constexpr (kAdds) {
#pragma GCC unroll 6
        for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v)
                tile[q][v] = load_part<FloatPart>(sums[q] + at + v * kPartLanes);
    }
    for (int step = first; step < end; ++step) {
        typename Part::Factor values[kVectors];
#pragma GCC unroll 8
        for (int p = 0; p < kValueParts; ++p) {
            auto* part = values + p * Part::kVectors * kParts;
            if constexpr (kIsHalf)
                Part::read_half(rows, step, at, part);
            else
                Part::read(rows, step, at + p * Part::kElements, part);
        }
#pragma GCC unroll 6
        for (int q = 0; q < kQueries; ++q) {
            const auto weight = Part::read_weight(weights[q], step);
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) Part::add(tile[q][v], values[v], weight);
        }
    }
#pragma GCC unroll 6
    for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v)
            std::memcpy(sums[q] + at + v * kPartLanes, &tile[q][v], sizeof(FloatPart));
}

// The same over the whole head from `at` on, in tiles of kValueParts parts, then of fewer.
template <class T, int kQueries, bool kAdds, int kValueParts = parts_at_once<T>(kQueries), class Values>
POLYBASIC_INLINE void weighted_sums(const Values& values, int first, int end,
                                    const float* const* weights, float* const* sums, int at = 0) {
    constexpr int kElements = ValuePart<T>::kElements;
    for (; at + kValueParts * kElements <= values.head_dim; at += kValueParts * kElements)
        weighted_tile<T, kQueries, kAdds, kValueParts, false>(values, first, end, weights, sums, at);
    if (at >= values.head_dim) return;
    if constexpr (kValueParts > 1)
        weighted_sums<T, kQueries, kAdds, kValueParts / 2>(values, first, end, weights, sums, at);
    else if constexpr (kElements > kLanes)
        weighted_tile<T, kQueries, kAdds, 1, true>(values, first, end, weights, sums, at);
}

}  // namespace attention
}  // namespace polybasic
