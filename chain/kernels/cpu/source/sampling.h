// Tokens drawn from rows of logits: temperature, top-k, top-p and min-p as polybasic.deploy.runtime.rounds.warping
// defines them, then the largest logit with noise added; at temperature 0 the largest logit. A thread takes
// whole rows, of floats or bfloat16 numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "noise.h"
#include "simd.h"

namespace polybasic {

// Of a row; 0 where a step is off.
struct Warping {
    float temperature, top_k, top_p, min_p;
};

// All bits of a lane where a number is NaN, in which all bits of the exponent and others are set.
POLYBASIC_INLINE Ints is_nan(Floats values) { return (same_bits<Ints>(values) & 0x7fffffff) > 0x7f800000; }

inline bool is_set_anywhere(Ints mask) {
    int32_t lanes[kLanes];
    std::memcpy(lanes, &mask, sizeof mask);
    return std::any_of(lanes, lanes + kLanes, [](int32_t lane) { return lane != 0; });
}

// The first token with the largest logit; -1 where a logit is NaN or infinity, or none is a number.
template <typename Element>
int64_t most_probable(const Element* logits, int num_tokens) {
    Floats most = broadcast(-INFINITY);
    Ints block{}, is_bad{};
    for (int first = 0; first < num_tokens; first += kLanes) {
        const int left = num_tokens - first;
        float last[kLanes];
        if (left < kLanes) {
            std::fill_n(last, kLanes, -INFINITY);
            for (int lane = 0; lane < left; ++lane) last[lane] = widen(logits[first + lane]);
        }
        const Floats values = left < kLanes ? load(last) : load(logits + first);
        is_bad = is_bad + is_nan(values);
        const Ints is_more = values > most;
        most = select(is_more, values, most);
        block = select(is_more, broadcast_to<IntPart>(first), block);
    }
    const float greatest = largest(most);
    if (is_set_anywhere(is_bad) || !std::isfinite(greatest)) return -1;
    int32_t firsts[kLanes];
    float values[kLanes];
    std::memcpy(firsts, &block, sizeof block);
    store(values, most);
    int token = num_tokens;
    for (int lane = 0; lane < kLanes; ++lane)
        if (values[lane] == greatest) token = std::min(token, firsts[lane] + lane);
    return token;
}

class Sampler {
public:
    // The token with the largest sum of warped logit and noise, the first of equal ones; -1 where a logit
    // is NaN or infinity, or no logit is a number.
    template <typename Element>
    int64_t draw(const Element* logits, int num_tokens, const Warping& warping, const NoiseKey& key,
                 uint32_t position) {
        if (!warp(logits, num_tokens, warping)) return -1;
        return draw_of_warped(key, position);
    }

    // The share of a token in the softmax of what the others take: logits at temperature 0, else the sums that
    // `draw` takes the largest of. Together, those left out would add a hundredth at most.
    template <typename Element>
    float probability(const Element* logits, int num_tokens, const Warping& warping, const NoiseKey& key,
                      uint32_t position, int64_t token) {
        const bool is_noisy = warping.temperature > 0;
        if (!warp(logits, num_tokens, is_noisy ? warping : Warping{1, 0, 0, 0})) return NAN;
        if (is_noisy) draw_of_warped(key, position);
        if (is_cut_) drop_others();
        const float most = is_noisy ? best_.score : greatest_;
        Floats total{};
        float own = 0;
        for (int group = 0; group < num_groups_; ++group) {
            const bool has_token = group == token / kNoiseGroup;
            if (largest_[group] - most < -20.0f && !has_token) continue;
            alignas(64) float scores[kNoiseGroup] = {};
            if (is_noisy) fill_group(key, position, group, scores);
            for (int i = 0; i < kNoiseGroup; i += kLanes) {
                const Floats powers = exponential(load(scores + i) + load(group_of(group) + i) - most);
                total = total + powers;
                store(scores + i, powers);
            }
            if (has_token) own = scores[token % kNoiseGroup];
        }
        return own / sum(total);
    }

private:
    // Logits over the temperature, and which tokens are kept; false where none or not all are numbers.
    template <typename Element>
    bool warp(const Element* logits, int num_tokens, const Warping& warping) {
        num_tokens_ = num_tokens;
        num_groups_ = (num_tokens + kNoiseGroup - 1) / kNoiseGroup;
        if (!scale(logits, warping.temperature)) return false;
        const bool has_top_k = warping.top_k > 0 && warping.top_k < float(num_tokens);
        const bool has_top_p = warping.top_p > 0 && warping.top_p < 1, has_min_p = warping.min_p > 0;
        is_cut_ = has_top_k || has_top_p || has_min_p;
        if (has_top_k) keep_best(int64_t(warping.top_k));
        if (has_top_p || has_min_p) {
            if (has_top_k)
                weigh_kept();
            else
                keep_likely(has_top_p ? units(warping.top_p) : 0, warping.min_p);
            const float least = warping.min_p * *std::max_element(weights_.begin(), weights_.end());
            if (has_top_p) cut_tail(units(warping.top_p));
            if (has_min_p) drop_below(least);
        }
        return true;
    }

    struct Drawn {
        float score;
        int token;
    };

    // No noise is greater.
    static constexpr float kMostNoise = 23.0f;
    // Shares of probability are whole units, so that equal ones add up alike in any order.
    static constexpr float kUnits = 0x1p60f;

    static int64_t units(float share) { return std::max<int64_t>(1, int64_t(share * kUnits)); }

    const float* group_of(int group) const { return scaled_.data() + size_t(group) * kNoiseGroup; }

    // Logits over the temperature, and the largest of each group; false where none or not all are numbers.
    template <typename Element>
    bool scale(const Element* logits, float temperature) {
        scaled_.resize(size_t(num_groups_) * kNoiseGroup);
        largest_.resize(num_groups_);
        Ints is_bad{};
        greatest_ = -INFINITY;
        for (int group = 0; group < num_groups_; ++group) {
            const int first = group * kNoiseGroup;
            float* to = scaled_.data() + first;
            Floats most = broadcast(-INFINITY);
            for (int i = 0; i < kNoiseGroup; i += kLanes) {
                const int left = num_tokens_ - first - i;
                float last[kLanes];
                if (left < kLanes) {
                    std::fill_n(last, kLanes, -INFINITY);
                    for (int lane = 0; lane < left; ++lane) last[lane] = widen(logits[first + i + lane]);
                }
                const Floats values = (left < kLanes ? load(last) : load(logits + first + i)) / temperature;
                is_bad = is_bad + is_nan(values);
                store(to + i, values);
                most = maximum(values, most);
            }
            largest_[group] = largest(most);
            greatest_ = std::max(greatest_, largest_[group]);
        }
        return !is_set_anywhere(is_bad) && std::isfinite(greatest_);
    }

    // Keep the tokens of at least the k-th largest logit, in their order.
    void keep_best(int64_t k) {
        float least = -INFINITY;
        if (k <= num_groups_) {
            // as many groups hold one that is as large
            values_.assign(largest_.begin(), largest_.end());
            std::nth_element(values_.begin(), values_.begin() + (k - 1), values_.end(), std::greater<float>());
            least = values_[k - 1];
        }
        keep_from(least);
        values_.clear();
        for (const int token : kept_) values_.push_back(scaled_[token]);
        std::nth_element(values_.begin(), values_.begin() + (k - 1), values_.end(), std::greater<float>());
        least = values_[k - 1];
        kept_.erase(std::remove_if(kept_.begin(), kept_.end(),
                                   [&](int token) { return scaled_[token] < least; }),
                    kept_.end());
    }

    // Keep the tokens of at least a logit, in their order.
    void keep_from(float least) {
        kept_.clear();
        for (int group = 0; group < num_groups_; ++group) {
            if (!(largest_[group] >= least)) continue;
            const int first = group * kNoiseGroup, end = std::min(first + kNoiseGroup, num_tokens_);
            for (int token = first; token < end; ++token)
                if (scaled_[token] >= least) kept_.push_back(token);
        }
    }

    // Probabilities of the kept tokens among themselves.
    void weigh_kept() {
        const size_t num = kept_.size(), padded = (num + kLanes - 1) / kLanes * kLanes;
        weights_.assign(padded, -INFINITY);
        for (size_t i = 0; i < num; ++i) weights_[i] = scaled_[kept_[i]];
        Floats total{};
        for (size_t i = 0; i < padded; i += kLanes) {
            const Floats powers = exponential(load(weights_.data() + i) - greatest_);
            total = total + powers;
            store(weights_.data() + i, powers);
        }
        const float all = sum(total);
        weights_.resize(num);
        for (float& weight : weights_) weight /= all;
    }

    // Keep the likeliest tokens whose probabilities reach `enough` units, and those of at least `least`
    // times the largest, with some less likely ones.
    void keep_likely(int64_t enough, float least) {
        Floats total{};
        for (int group = 0; group < num_groups_; ++group) {
            if (largest_[group] - greatest_ < -87.0f) continue;  // whose powers are 0
            const float* values = group_of(group);
            for (int i = 0; i < kNoiseGroup; i += kLanes)
                total = total + exponential(load(values + i) - greatest_);
        }
        const float all = sum(total);
        for (const float bound : {0x1p-9f, 0x1p-13f, 0x1p-17f, 0x1p-21f, 0.0f}) {
            if (enough == 0 && bound > 0 && bound * all > 0.5f * least) continue;
            // a little lower than the logarithm, by which none of them is missed
            keep_from(bound > 0 ? greatest_ + std::log(bound * all) - 0.01f : -INFINITY);
            weights_.clear();
            int64_t reached = 0;
            for (size_t i = 0; i < kept_.size(); i += kLanes) {
                float values[kLanes];
                const size_t num = std::min(kept_.size() - i, size_t(kLanes));
                std::fill_n(values, kLanes, -INFINITY);
                for (size_t lane = 0; lane < num; ++lane) values[lane] = scaled_[kept_[i + lane]];
                store(values, exponential(load(values) - greatest_) / all);
                weights_.insert(weights_.end(), values, values + num);
                for (size_t lane = 0; lane < num; ++lane) reached += int64_t(values[lane] * kUnits);
            }
            if (reached >= enough) return;
        }
    }

    // Of the kept tokens, those before which fewer than `enough` units have been reached, the likeliest
    // first and of equal ones the earlier.
    void cut_tail(int64_t enough) {
        order_.resize(kept_.size());
        for (size_t i = 0; i < order_.size(); ++i) order_[i] = int(i);
        std::sort(order_.begin(), order_.end(), [&](int one, int other) {
            return weights_[one] > weights_[other] || (weights_[one] == weights_[other] && one < other);
        });
        int64_t reached = 0;
        size_t num = 0;
        while (num < order_.size() && reached < enough) reached += int64_t(weights_[order_[num++]] * kUnits);
        order_.resize(num);
        std::sort(order_.begin(), order_.end());
        for (size_t i = 0; i < num; ++i) {
            kept_[i] = kept_[order_[i]];
            weights_[i] = weights_[order_[i]];
        }
        kept_.resize(num);
        weights_.resize(num);
    }

    void drop_below(float least) {
        size_t num = 0;
        for (size_t i = 0; i < kept_.size(); ++i)
            if (!(weights_[i] < least)) kept_[num++] = kept_[i];
        kept_.resize(num);
    }

    // Leave minus infinity for all but the kept tokens.
    void drop_others() {
        values_.clear();
        for (const int token : kept_) values_.push_back(scaled_[token]);
        std::fill(scaled_.begin(), scaled_.end(), -INFINITY);
        std::fill(largest_.begin(), largest_.end(), -INFINITY);
        for (size_t i = 0; i < kept_.size(); ++i) {
            scaled_[kept_[i]] = values_[i];
            float& most = largest_[kept_[i] / kNoiseGroup];
            most = std::max(most, values_[i]);
        }
    }

    int64_t draw_of_warped(const NoiseKey& key, uint32_t position) {
        best_ = {-INFINITY, -1};
        if (is_cut_)
            draw_of_kept(key, position);
        else
            draw_of_all(key, position);
        return best_.token;
    }

    void draw_of_all(const NoiseKey& key, uint32_t position) {
        const auto group = std::find(largest_.begin(), largest_.end(), greatest_) - largest_.begin();
        draw_of_group(key, position, int(group));
        for (int one = 0; one < num_groups_; ++one)
            if (one != group && largest_[one] + kMostNoise >= best_.score) draw_of_group(key, position, one);
    }

    void draw_of_group(const NoiseKey& key, uint32_t position, int group) {
        alignas(64) float scores[kNoiseGroup];
        fill_group(key, position, group, scores);
        const float* values = group_of(group);
        Floats most = broadcast(-INFINITY);
        for (int i = 0; i < kNoiseGroup; i += kLanes) {
            const Floats noisy = load(scores + i) + load(values + i);
            store(scores + i, noisy);
            most = maximum(noisy, most);
        }
        if (largest(most) < best_.score) return;
        for (int i = 0; i < kNoiseGroup; ++i) offer({scores[i], group * kNoiseGroup + i});
    }

    void draw_of_kept(const NoiseKey& key, uint32_t position) {
        float noise[kNoiseGroup];
        int filled = -1;
        for (const int token : kept_) {
            if (scaled_[token] + kMostNoise < best_.score) continue;
            if (token / kNoiseGroup != filled) {
                filled = token / kNoiseGroup;
                fill_group(key, position, filled, noise);
            }
            offer({noise[token % kNoiseGroup] + scaled_[token], token});
        }
    }

    void offer(Drawn one) {
        if (one.score > best_.score || (one.score == best_.score && one.token < best_.token)) best_ = one;
    }

    bool is_cut_ = false;  // whether fewer than all tokens are kept
    int num_tokens_ = 0, num_groups_ = 0;
    float greatest_ = 0;
    std::vector<float> scaled_;   // of each token, and -infinity behind the last
    std::vector<float> largest_;  // of each group
    std::vector<int> kept_;       // tokens, ascending
    std::vector<float> weights_;  // probabilities of those
    std::vector<float> values_;
    std::vector<int> order_;
    Drawn best_{};
};

inline Sampler& sampler_of_thread() {
    static thread_local Sampler sampler;
    return sampler;
}

// tokens: [num_rows], drawn from logits [num_rows][num_tokens] of the tokens at `positions`; at temperature 0
// these and the key are not read.
template <typename Element>
void draw_rows(const Element* logits, int num_rows, int num_tokens, const Warping& warping, const NoiseKey& key,
               const int64_t* positions, int64_t* tokens, const Thread& self) {
    Sampler& sampler = sampler_of_thread();
    const Range mine = share(num_rows, self.number, self.num_threads, 1);
    for (int row = mine.first; row < mine.end; ++row) {
        const Element* values = logits + size_t(row) * num_tokens;
        tokens[row] = warping.temperature == 0
                          ? most_probable(values, num_tokens)
                          : sampler.draw(values, num_tokens, warping, key, uint32_t(positions[row]));
    }
}

// shares: [num_rows], of a token in each of the rows; see `Sampler::probability`.
template <typename Element>
void find_shares(const Element* logits, int num_rows, int num_tokens, const Warping& warping, const NoiseKey& key,
                 const int64_t* positions, const int64_t* rows, const int64_t* tokens, float* shares,
                 const Thread& self) {
    Sampler& sampler = sampler_of_thread();
    const Range mine = share(num_rows, self.number, self.num_threads, 1);
    for (int place = mine.first; place < mine.end; ++place)
        shares[place] = sampler.probability(logits + size_t(rows[place]) * num_tokens, num_tokens, warping, key,
                                            uint32_t(positions[place]), tokens[place]);
}

}  // namespace polybasic
