// Gumbel noise by position, as polybasic.chain.kernels.noise defines it, to the last bit.
#pragma once

#include <algorithm>

#include "matrix.h"
#include "team.h"

namespace polybasic {

// Tokens that share four rows of words.
constexpr int kNoiseGroup = 4 * kLanes;

struct NoiseKey {
    uint32_t first, second, choice;
};

// Philox4x32-10 over the counters (block + lane, position, choice, 0): four words a lane.
POLYBASIC_INLINE void philox(const NoiseKey& key, uint32_t block, uint32_t position,
                             uint32_t (&words)[4][kLanes]) {
    uint32_t first = key.first, second = key.second;
    for (int lane = 0; lane < kLanes; ++lane) {
        words[0][lane] = block + uint32_t(lane);
        words[1][lane] = position;
        words[2][lane] = key.choice;
        words[3][lane] = 0;
    }
    for (int round = 0; round < 10; ++round) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint64_t one = uint64_t(words[0][lane]) * 0xD2511F53u;
            const uint64_t other = uint64_t(words[2][lane]) * 0xCD9E8D57u;
            words[0][lane] = uint32_t(other >> 32) ^ words[1][lane] ^ first;
            words[1][lane] = uint32_t(other);
            words[2][lane] = uint32_t(one >> 32) ^ words[3][lane] ^ second;
            words[3][lane] = uint32_t(one);
        }
        first += 0x9E3779B9u;
        second += 0xBB67AE85u;
    }
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

POLYBASIC_INLINE Floats gumbel(const uint32_t (&words)[kLanes]) {
    Ints given;
    std::memcpy(&given, words, sizeof given);
    const Floats x = half_open(given);
    Floats exponent;
    const Floats rest = split(half_open(-given - 1), exponent);
    const Ints is_far = x > 0.29289323f;
    const Floats wait =
        -(select(is_far, exponent, Floats{}) * 0.6931472f + log_of_one_plus(select(is_far, rest, -x)));
    const Floats mantissa = split(wait, exponent);
    return -(exponent * 0.6931472f + log_of_one_plus(mantissa));
}

// out: [num_positions][num_tokens].
inline void fill_noise(const NoiseKey& key, const int64_t* positions, int num_positions,
                       int num_tokens, float* out, const Thread& self) {
    const int num_groups = (num_tokens + kNoiseGroup - 1) / kNoiseGroup;
    const Range mine = share(num_positions * num_groups, self.number, self.num_threads, 1);
    for (int item = mine.first; item < mine.end; ++item) {
        const int place = item / num_groups, group = item % num_groups;
        uint32_t words[4][kLanes];
        philox(key, uint32_t(group) * kLanes, uint32_t(positions[place]), words);
        float noise[kNoiseGroup];
        for (int row = 0; row < 4; ++row) store(noise + row * kLanes, gumbel(words[row]));
        const int first = group * kNoiseGroup, num = std::min(kNoiseGroup, num_tokens - first);
        std::memcpy(out + size_t(place) * num_tokens + first, noise, num * sizeof(float));
    }
}

}  // namespace polybasic
