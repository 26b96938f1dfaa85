// Gumbel noise by position, as polybasic.chain.kernels.noise defines it, to the last bit.
#pragma once

#include <algorithm>

#include "products/matrix.h"
#include "threads/team.h"

namespace polybasic {

// Tokens that share four rows of words.
constexpr int kNoiseGroup = 4 * kLanes;

struct NoiseKey {
    uint32_t first, second, choice;
};

// The products of 32-bit words, which 64-bit lanes hold in their lower halves, with one of them.
POLYBASIC_INLINE LongPart multiply_words(LongPart words, uint32_t by) {
#if defined(POLYBASIC_AVX512)
    return (LongPart)_mm512_mul_epu32((__m512i)words, _mm512_set1_epi64(by));
#elif defined(POLYBASIC_AVX2)
    return (LongPart)_mm256_mul_epu32((__m256i)words, _mm256_set1_epi64x(by));
#elif defined(POLYBASIC_NEON)
    return (LongPart)vmull_n_u32(vmovn_u64((uint64x2_t)words), by);
#else
    return (words & 0xFFFFFFFF) * by;
#endif
}

// Philox4x32-10 over the counters (block + lane, position, choice, 0) of a part: four words a lane.
POLYBASIC_INLINE void philox(const NoiseKey& key, uint32_t block, uint32_t position, IntPart (&words)[4]) {
    constexpr uint64_t kNumbers[] = {0, 2, 4, 6, 8, 10, 12, 14};
    LongPart counters[4][2];  // even lanes and odd ones, whose upper halves mean nothing
    for (int odd = 0; odd < 2; ++odd) {
        counters[0][odd] = load_part<LongPart>(kNumbers) + (block + odd);
        counters[1][odd] = LongPart{} + position;
        counters[2][odd] = LongPart{} + key.choice;
        counters[3][odd] = LongPart{};
    }
    uint32_t first = key.first, second = key.second;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        for (auto odd : {0, 1}) {
            const LongPart one = multiply_words(counters[0][odd], 0xD2511F53u);
            const LongPart other = multiply_words(counters[2][odd], 0xCD9E8D57u);
            counters[0][odd] = (other >> 32) ^ counters[1][odd] ^ first;
            counters[1][odd] = other;
            counters[2][odd] = (one >> 32) ^ counters[3][odd] ^ second;
            counters[3][odd] = one;
        }
        first += 0x9E3779B9u;
        second += 0xBB67AE85u;
    }
    for (int word = 0; word < 4; ++word)
        words[word] = same_bits<IntPart>((counters[word][0] & 0xFFFFFFFF) | counters[word][1] << 32);
}

// log(1 + f) for 1 + f between sqrt(1/2) and sqrt(2). No step may be fused.
POLYBASIC_INLINE Floats log_of_one_plus(Floats f) {
    Floats total = f * -0.07859607f + 0.12881644f;
    total = total * f + -0.13128755f;
    total = total * f + 0.14181193f;
    total = total * f + -0.16624554f;
    total = total * f + 0.20002286f;
    total = total * f + -0.2500081f;
    total = total * f + 0.33333317f;
    return f + f * f * (f * total - 0.5f);
}

// Exponent, and mantissa - 1, of positive numbers.
POLYBASIC_INLINE Floats split(Floats y, Floats& exponent) {
    const Ints bits = same_bits<Ints>(y);
    const Ints whole = (bits - 0x3F3504F3) >> 23;
    exponent = to_floats(whole);
    return same_bits<Floats>(bits - (whole << 23)) - 1.0f;
}

// (word + 1/2) / 2**32, rounded once.
POLYBASIC_INLINE Floats half_open(Ints words) {
    const Floats high = to_floats((words >> 16) & 0xFFFF), low = to_floats(words & 0xFFFF);
    return (high * 65536.0f + (low + 0.5f)) * 0x1p-32f;
}

POLYBASIC_INLINE Floats gumbel(Ints words) {
    const Floats x = half_open(words);
    Floats exponent;
    const Floats rest = split(half_open(-words - 1), exponent);
    const Ints is_far = x > 0.29289323f;
    const Floats wait =
        -(select(is_far, exponent, Floats{}) * 0.6931472f + log_of_one_plus(select(is_far, rest, -x)));
    const Floats mantissa = split(wait, exponent);
    return -(exponent * 0.6931472f + log_of_one_plus(mantissa));
}

// Noise of the kNoiseGroup tokens of a group.
inline void fill_group(const NoiseKey& key, uint32_t position, int group, float* noise) {
    Ints words[4];
    for (int part = 0; part < kParts; ++part) {
        IntPart drawn[4];
        philox(key, uint32_t(group * kLanes + part * kPartLanes), position, drawn);
        for (int word = 0; word < 4; ++word) words[word].parts[part] = drawn[word];
    }
    for (int word = 0; word < 4; ++word) store(noise + word * kLanes, gumbel(words[word]));
}

// out: [num_positions][num_tokens].
inline void fill_noise(const NoiseKey& key, const int64_t* positions, int num_positions,
                       int num_tokens, float* out, const Thread& self) {
    const int num_groups = (num_tokens + kNoiseGroup - 1) / kNoiseGroup;
    const Range mine = share(num_positions * num_groups, self.number, self.num_threads, 1);
    for (int item = mine.first; item < mine.end; ++item) {
        const int place = item / num_groups, group = item % num_groups;
        float noise[kNoiseGroup];
        fill_group(key, uint32_t(positions[place]), group, noise);
        const int first = group * kNoiseGroup, num = std::min(kNoiseGroup, num_tokens - first);
        std::memcpy(out + size_t(place) * num_tokens + first, noise, num * sizeof(float));
    }
}

}  // namespace polybasic
