// Products with weights of GGML's types: codes of a few bits, with scales and offsets of one level or of two.
#pragma once

#include "products/codes.h"

namespace polybasic {

// Of a block whose scales have two levels: float16 numbers times integers of a group.
constexpr size_t kNestedGroups = kNested / kGroup;

// Scales alone, of one level.
struct Scales {
    static constexpr size_t kUnits = 1;
    static constexpr bool kHasFactors = false;
    const uint16_t* scales;
    size_t num_groups;
    FloatPart minus_zero;

    Scales(const Matrix& matrix, int shift, int block)
        : num_groups(matrix.num_groups()), minus_zero(all_lanes<FloatPart>(-float(matrix.zero + shift))) {
        scales = static_cast<const uint16_t*>(matrix.scales) + block * num_groups * kLanes;
    }

    POLYBASIC_INLINE void prefetch(int block, size_t group, size_t distance) const {
        __builtin_prefetch(scales + (block * num_groups + group) * kLanes + distance);
    }

    POLYBASIC_INLINE ScaleAndZero at(int block, size_t group, int lane) const {
        return {load_halves(scales + (block * num_groups + group) * kLanes + lane), minus_zero};
    }
};

struct ScaleAndOffset {
    FloatPart scale, offset;

    POLYBASIC_INLINE FloatPart apply(FloatPart sum, FloatPart sum_of_bytes) const {
        return fused_multiply_add(scale, sum, offset * sum_of_bytes);
    }
};

// Scales and offsets of one level or of two, or a code of zero in place of offsets. Which of these is asked
// for each group: a branch that is always the same costs less than kernels of their own.
struct ScalesAndOffsets {
    static constexpr size_t kUnits = 1;
    static constexpr bool kHasFactors = false;
    const uint16_t *scales, *offsets = nullptr;
    const int8_t* factors = nullptr;
    size_t num_groups;
    FloatPart minus_zero;

    ScalesAndOffsets(const Matrix& matrix, int, int block)
        : num_groups(matrix.num_groups()), minus_zero(all_lanes<FloatPart>(-float(matrix.zero))) {
        const size_t group = block * num_groups;
        if (matrix.factors != nullptr) factors = matrix.factors + group * 2 * kLanes;
        const size_t first = (factors == nullptr ? group : group / kNestedGroups) * kLanes;
        scales = static_cast<const uint16_t*>(matrix.scales) + first;
        if (matrix.offsets != nullptr) offsets = static_cast<const uint16_t*>(matrix.offsets) + first;
    }

    POLYBASIC_INLINE void prefetch(int block, size_t group, size_t distance) const {
        const size_t at = (block * num_groups + group) * kLanes + distance;
        if (factors != nullptr) {
            __builtin_prefetch(factors + 2 * at);
            if (group % kNestedGroups != 0) return;
        }
        const size_t first = factors == nullptr ? at : at / kNestedGroups;
        __builtin_prefetch(scales + first);
        if (offsets != nullptr) __builtin_prefetch(offsets + first);
    }

    POLYBASIC_INLINE ScaleAndOffset at(int block, size_t group, int lane) const {
        group += block * num_groups;
        if (factors != nullptr) {
            const size_t at = group / kNestedGroups * kLanes + lane;
            const int8_t* own = factors + group * 2 * kLanes + lane;
            return {load_halves(scales + at) * __builtin_convertvector(load_bytes(own), FloatPart),
                    load_halves(offsets + at) * __builtin_convertvector(load_bytes(own + kLanes), FloatPart)};
        }
        const size_t at = group * kLanes + lane;
        const FloatPart scale = load_halves(scales + at);
        return {scale, offsets == nullptr ? scale * minus_zero : load_halves(offsets + at)};
    }
};

// A part's scale, and what the halves of a group have for a code of zero before it.
struct ScaleAndZeros {
    FloatPart scale, first, second;

    POLYBASIC_INLINE FloatPart apply(FloatPart sum, FloatPart first_bytes, FloatPart second_bytes) const {
        return scale * fused_multiply_add(first, first_bytes, fused_multiply_add(second, second_bytes, sum));
    }
};

// Scales of two levels, the second with an integer for each half of a group.
struct ScalesOfHalves {
    static constexpr size_t kUnits = 1;
    static constexpr bool kHasFactors = true;
    const uint16_t* scales;
    const int8_t* factors;
    size_t num_groups;
    FloatPart minus_zero;

    ScalesOfHalves(const Matrix& matrix, int, int block)
        : num_groups(matrix.num_groups()), minus_zero(all_lanes<FloatPart>(-float(matrix.zero))) {
        const size_t group = block * num_groups;
        scales = static_cast<const uint16_t*>(matrix.scales) + group / kNestedGroups * kLanes;
        factors = matrix.factors + group * 2 * kLanes;
    }

    POLYBASIC_INLINE void prefetch(int block, size_t group, size_t distance) const {
        const size_t at = (block * num_groups + group) * kLanes + distance;
        __builtin_prefetch(factors + 2 * at);
        if (group % kNestedGroups == 0) __builtin_prefetch(scales + at / kNestedGroups);
    }

    POLYBASIC_INLINE IntPart factor(int block, size_t group, int half, int lane) const {
        return load_bytes(factors + ((block * num_groups + group) * 2 + half) * kLanes + lane);
    }

    POLYBASIC_INLINE ScaleAndZeros at(int block, size_t group, int lane) const {
        const auto zero_of = [&](int half) __attribute__((always_inline)) {
            return minus_zero * __builtin_convertvector(factor(block, group, half, lane), FloatPart);
        };
        const size_t at = (block * num_groups + group) / kNestedGroups * kLanes + lane;
        return {load_halves(scales + at), zero_of(0), zero_of(1)};
    }
};

}  // namespace polybasic
