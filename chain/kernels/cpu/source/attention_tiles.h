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

// A register full of elements of a query or a key.
template <class T>
struct ScorePart;

template <>
struct ScorePart<float> {
    using Type = Floats;
    static constexpr int kElements = kLanes;
    static Type read(const float* from) { return load(from); }
    static Floats add_product(Floats sum, Type x, Type y) { return fused_multiply_add(x, y, sum); }
};

template <>
struct ScorePart<Bfloat16> {
    using Type = Words;
    static constexpr int kElements = 2 * kLanes;
    static Type read(const Bfloat16* from) {
        Words pairs;
        std::memcpy(&pairs, from, sizeof pairs);
        return pairs;
    }
    // Where a head ends in the middle of a part.
    static Type read_half(const Bfloat16* from) {
#if defined(POLYBASIC_AVX512)
        return (Words)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)from));
#else
        Words pairs{};
        std::memcpy(&pairs, from, sizeof pairs / 2);
        return pairs;
#endif
    }
    static Floats add_product(Floats sum, Type x, Type y) { return add_pair_products(sum, x, y); }
};

// The products of kQueries queries, padded with zeros to whole parts, with 16 / kQueries keys from
// `first` on; that of query q and key k is in lane q * 16 / kQueries + k.
template <class T, int kQueries, class Keys>
POLYBASIC_INLINE Floats score_tile(const T* const* queries, const Keys& keys, int first, int head_dim) {
    using Part = ScorePart<T>;
    constexpr int kKeys = kLanes / kQueries;
    const T* key_rows[kKeys];
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) key_rows[k] = keys[first + k];
    Floats sums[kLanes] = {};
    int at = 0;
    for (; at + Part::kElements <= head_dim; at += Part::kElements) {
        typename Part::Type read[kQueries];
#pragma GCC unroll 4
        for (int q = 0; q < kQueries; ++q) read[q] = Part::read(queries[q] + at);
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) {
            const auto key = Part::read(key_rows[k] + at);
#pragma GCC unroll 4
            for (int q = 0; q < kQueries; ++q)
                sums[q * kKeys + k] = Part::add_product(sums[q * kKeys + k], read[q], key);
        }
    }
    if constexpr (Part::kElements > kLanes) {
        if (at < head_dim) {
#pragma GCC unroll 16
            for (int k = 0; k < kKeys; ++k) {
                const auto key = Part::read_half(key_rows[k] + at);
#pragma GCC unroll 4
                for (int q = 0; q < kQueries; ++q)
                    sums[q * kKeys + k] =
                        Part::add_product(sums[q * kKeys + k], Part::read(queries[q] + at), key);
            }
        }
    }
    return sum_each(sums);
}

// A few elements of the values of `kPositions` positions side by side, to be weighted and added.
template <class T>
struct ValuePart {
    static constexpr int kPositions = 1, kVectors = 1, kElements = kLanes;
    Floats values;

    template <class Values>
    void read(const Values& rows, int step, int at) {
        values = load(rows[step] + at);
    }
    static Floats read_weight(const float* weights, int step) { return broadcast(weights[step]); }
    void add_to(Floats* sums, Floats weight) const {
        sums[0] = fused_multiply_add(values, weight, sums[0]);
    }
};

#if defined(POLYBASIC_AVX512)
// Two positions in one product; their weights are a pair of bfloat16 numbers in the place of one
// float. The elements come in the order in which neighbours are interleaved.
template <>
struct ValuePart<Bfloat16> {
    static constexpr int kPositions = 2, kVectors = 2, kElements = 2 * kLanes;
    __m512i low, high;

    template <class Values>
    void read(const Values& rows, int step, int at) {
        interleave(_mm512_loadu_si512(rows[2 * step] + at), _mm512_loadu_si512(rows[2 * step + 1] + at));
    }
    template <class Values>
    void read_half(const Values& rows, int step, int at) {
        interleave((__m512i)ScorePart<Bfloat16>::read_half(rows[2 * step] + at),
                   (__m512i)ScorePart<Bfloat16>::read_half(rows[2 * step + 1] + at));
    }
    void interleave(__m512i first, __m512i second) {
        low = _mm512_unpacklo_epi16(first, second);
        high = _mm512_unpackhi_epi16(first, second);
    }
    static Words read_weight(const float* weights, int step) {
        int32_t pair;
        std::memcpy(&pair, weights + step, sizeof pair);
        Words weight = (Words)_mm512_set1_epi32(pair);
        // read once, not again for each product
        asm("" : "+v"(weight));
        return weight;
    }
    void add_to(Floats* sums, Words weight) const {
        sums[0] = add_pair_products(sums[0], weight, (Words)low);
        sums[1] = add_pair_products(sums[1], weight, (Words)high);
    }
    // The two vectors of sums in the order of the head.
    static void put_in_order(Floats& first, Floats& second) {
        const Floats low = first, high = second;
        first = POLYBASIC_SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        second =
            POLYBASIC_SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }
};
#endif

// Sums in registers: at most 24 of 32. A single query takes more of the head at a time, so that
// there are enough sums to hide the latency of one.
template <class T>
constexpr int parts_at_once(int num_queries) {
    return (num_queries <= 2 ? 8 : 4) / ValuePart<T>::kVectors;
}

// The values of the steps first..end, weighted, from element `at` of the head on: into sums [queries]
// [padded head], or added to them. kIsHalf: the head ends in the middle of the only part.
template <class T, int kQueries, bool kAdds, int kParts, bool kIsHalf, class Values>
POLYBASIC_INLINE void weighted_tile(const Values& values, int first, int end,
                                    const float* const* weights, float* const* sums, int at) {
    using Part = ValuePart<T>;
    constexpr int kVectors = kParts * Part::kVectors;
    Floats tile[kQueries][kVectors] = {};
    if constexpr (kAdds) {
#pragma GCC unroll 6
        for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) tile[q][v] = load(sums[q] + at + v * kLanes);
    }
    for (int step = first; step < end; ++step) {
        Part parts[kParts];
#pragma GCC unroll 8
        for (int p = 0; p < kParts; ++p) {
            if constexpr (kIsHalf)
                parts[p].read_half(values, step, at);
            else
                parts[p].read(values, step, at + p * Part::kElements);
        }
#pragma GCC unroll 6
        for (int q = 0; q < kQueries; ++q) {
            const auto weight = Part::read_weight(weights[q], step);
#pragma GCC unroll 8
            for (int p = 0; p < kParts; ++p) parts[p].add_to(&tile[q][p * Part::kVectors], weight);
        }
    }
#pragma GCC unroll 6
    for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) store(sums[q] + at + v * kLanes, tile[q][v]);
}

// The same over the whole head from `at` on, in tiles of kParts parts, then of fewer.
template <class T, int kQueries, bool kAdds, int kParts = parts_at_once<T>(kQueries), class Values>
POLYBASIC_INLINE void weighted_sums(const Values& values, int first, int end,
                                    const float* const* weights, float* const* sums, int at = 0) {
    constexpr int kElements = ValuePart<T>::kElements;
    for (; at + kParts * kElements <= values.head_dim; at += kParts * kElements)
        weighted_tile<T, kQueries, kAdds, kParts, false>(values, first, end, weights, sums, at);
    if (at >= values.head_dim) return;
    if constexpr (kParts > 1)
        weighted_sums<T, kQueries, kAdds, kParts / 2>(values, first, end, weights, sums, at);
    else if constexpr (kElements > kLanes)
        weighted_tile<T, kQueries, kAdds, 1, true>(values, first, end, weights, sums, at);
}

}  // namespace attention
}  // namespace polybasic
