// A whole draft: EAGLE-2's dynamic tree of candidates, level by level (polybasic.deploy.drafters.expansion).
//
//   K = children of each row, and rows of a beam; L = levels; V = tokens that can be drafted
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "decoder.h"

namespace polybasic {

struct DraftShape {
    int32_t depth;              // L
    int32_t top_k;              // K
    int32_t start;              // committed rows of the cache; position of the first level
    int32_t capacity;
    int32_t window_tokens;
    int32_t window_sinks;
    float logit_scale;
    const float* added;         // [L][V], to the scaled logits of each level, or null
    void* const* caches;
    const void* state;          // [D], which the first level follows
    const int64_t* token_ids;   // [V], or null if outputs are token ids
    int64_t* tokens;            // [K + (L - 1) K K]
    float* scores;              // the same
    int64_t* beams;             // [L - 1][K]
};

struct Candidate {
    float score;
    int32_t place;
};

// The better score first; of equal ones, the earlier place.
inline bool operator<(const Candidate& one, const Candidate& other) {
    return one.score > other.score || (one.score == other.score && one.place < other.place);
}

// The best few of the offered scores, best first.
class Best {
public:
    Best(Candidate* kept, int num) : kept_(kept), num_(num) {
        for (int i = 0; i < num; ++i) kept_[i] = {-INFINITY, INT32_MAX};
    }
    float least() const { return kept_[num_ - 1].score; }
    void offer(Candidate candidate) {
        if (!(candidate < kept_[num_ - 1])) return;
        int place = num_ - 1;
        for (; place > 0 && candidate < kept_[place - 1]; --place) kept_[place] = kept_[place - 1];
        kept_[place] = candidate;
    }

private:
    Candidate* kept_;
    int num_;
};

// The first `num` numbers, and zeros where there are fewer than lanes.
POLYBASIC_INLINE Floats load_at_most(const float* from, int num) {
    if (num >= kLanes) return load(from);
    Floats values{};
    std::memcpy(&values, from, num * sizeof(float));
    return values;
}

template <class T>
class Draft {
public:
    Draft(const Model& model, const DraftShape& shape, Workspace& space, int num_threads)
        : model_(model), shape_(shape), space_(space) {
        const int K = shape.top_k;
        parts_.resize(size_t(num_threads) * K * K);
        sums_.resize(size_t(num_threads) * K * 2);
        beam_tokens_.resize(K);
        beam_scores_.resize(K);
        paths_.resize(size_t(K) * shape.depth);
        path_ends_.resize(K);
        best_.resize(K);
        const size_t width = size_t(model.lm_head.num_blocks()) * kLanes;
        if (space.logits.size() < K * width) space.logits.resize(K * width);
        logits_ = space.logits.data();
    }

    void run(Thread& self) {
        const int K = shape_.top_k;
        if (self.number == 0) begin();
        self.wait();
        score(self, 1, 0);
        for (int level = 1; level < shape_.depth; ++level) {
            if (self.number == 0) select(level);
            self.wait();
            const Sequence sequence{{K, shape_.start + (level - 1) * K, shape_.start,
                                     path_ends_.data(), paths_.data()},
                                    shape_.caches,
                                    shape_.capacity,
                                    shape_.window_tokens,
                                    shape_.window_sinks};
            const Input input{beam_tokens_.data(), &sequence, 1, K};
            Forward<T>(model_, input, space_, self).run(nullptr, nullptr, 0);
            self.wait();
            score(self, K, level);
        }
    }

private:
    void begin() {
        const T* state = static_cast<const T*>(shape_.state);
        for (int column = 0; column < model_.hidden_size; column += kLanes)
            store(space_.residual + column, load(state + column));
    }

    // The best K tokens after each of the beam's rows, with their cumulative log-probabilities.
    void score(Thread& self, int num_rows, int level) {
        Input none{};
        none.num_rows = num_rows;
        Forward<T> forward(model_, none, space_, self);
        // the state that a decoder's draft starts from is normed already
        forward.fill_final(num_rows, level == 0 && model_.head_kind == kNoHead);
        scan(forward, self, num_rows, level);
        self.wait();
        if (self.number == 0) merge(num_rows, level, self.num_threads);
    }

    // This thread's share of the vocabulary: its largest logit, the sum of exponentials relative to
    // it, and the best K of each row.
    void scan(Forward<T>& forward, Thread& self, int num_rows, int level) {
        const int K = shape_.top_k, V = model_.lm_head.num_outputs;
        const size_t width = size_t(model_.lm_head.num_blocks()) * kLanes;
        const int unit = forward.unit_of(model_.lm_head);
        const float softcap = model_.logit_softcap, scale = shape_.logit_scale;
        const float* added = shape_.added == nullptr ? nullptr : shape_.added + size_t(level) * V;
        forward.multiply(model_.lm_head, unit, num_rows,
                         [&](Range blocks, int first, int rows, const float* tile) {
                             for (int block = blocks.first; block < blocks.end; ++block)
                                 for (int row = 0; row < rows; ++row, tile += kLanes) {
                                     Floats logits = load(tile);
                                     if (softcap > 0) {
                                         const Floats e = exponential(logits * (2.0f / softcap));
                                         logits = (1.0f - 2.0f / (e + 1.0f)) * softcap;
                                     }
                                     const int column = block * kLanes;
                                     if (added != nullptr)
                                         logits = logits * scale + load_at_most(added + column, V - column);
                                     store(logits_ + (first + row) * width + column, logits);
                                 }
                         });
        const Range mine = share(model_.lm_head.num_blocks(), self.number, self.num_threads, unit);
        const int first = mine.first * kLanes;
        const int end = std::min(mine.end * kLanes, V);
        for (int row = 0; row < num_rows; ++row) {
            const float* logits = logits_ + row * width;
            Best best(parts_.data() + (size_t(self.number) * K + row) * K, K);
            int i = first;
            for (; i + kLanes <= end; i += kLanes)
                if (largest(load(logits + i)) > best.least())
                    for (int lane = 0; lane < kLanes; ++lane) best.offer({logits[i + lane], i + lane});
            for (; i < end; ++i) best.offer({logits[i], i});
            const float greatest = parts_[(size_t(self.number) * K + row) * K].score;
            Floats total{};
            for (i = first; i + kLanes <= end; i += kLanes)
                total = total + exponential(load(logits + i) - greatest);
            float rest = 0;
            for (; i < end; ++i) rest += std::exp(logits[i] - greatest);
            sums_[(size_t(self.number) * K + row) * 2] = greatest;
            sums_[(size_t(self.number) * K + row) * 2 + 1] = sum(total) + rest;
        }
    }

    void merge(int num_rows, int level, int num_threads) {
        const int K = shape_.top_k;
        const size_t first = level == 0 ? 0 : K + size_t(level - 1) * K * K;
        for (int row = 0; row < num_rows; ++row) {
            Best best(best_.data(), K);
            float greatest = -INFINITY;
            for (int thread = 0; thread < num_threads; ++thread)
                greatest = std::max(greatest, sums_[(size_t(thread) * K + row) * 2]);
            float total = 0;
            for (int thread = 0; thread < num_threads; ++thread) {
                const float* own = &sums_[(size_t(thread) * K + row) * 2];
                if (own[1] > 0) total += own[1] * std::exp(own[0] - greatest);
                const Candidate* offered = &parts_[(size_t(thread) * K + row) * K];
                for (int i = 0; i < K; ++i) best.offer(offered[i]);
            }
            const float normalizer = greatest + std::log(total);
            const float above = level == 0 ? 0.0f : beam_scores_[row];
            for (int i = 0; i < K; ++i) {
                const int output = place_of(best_[i]);
                // a child never comes before its parent: neither by rounding nor as NaN
                const float exact = best_[i].score - normalizer;
                const float log_probability = std::isnan(exact) ? -INFINITY : std::min(exact, 0.0f);
                shape_.scores[first + row * K + i] = above + log_probability;
                shape_.tokens[first + row * K + i] =
                    shape_.token_ids == nullptr ? output : shape_.token_ids[output];
            }
        }
    }

    // NaN scores are never among the best.
    static int place_of(const Candidate& candidate) {
        return candidate.place == INT32_MAX ? 0 : candidate.place;
    }

    // The beam of a level: the best K candidates of the level above, best first.
    void select(int level) {
        const int K = shape_.top_k, D = model_.hidden_size;
        const size_t first = level == 1 ? 0 : K + size_t(level - 2) * K * K;
        const int num = level == 1 ? K : K * K;
        Best best(best_.data(), K);
        for (int place = 0; place < num; ++place) best.offer({shape_.scores[first + place], place});
        const std::vector<int32_t> paths = paths_;
        int64_t* beam = shape_.beams + size_t(level - 1) * K;
        for (int row = 0; row < K; ++row) {
            const int place = place_of(best_[row]), parent = level == 1 ? 0 : place / K;
            beam[row] = place;
            beam_scores_[row] = best_[row].score;
            beam_tokens_[row] = shape_.tokens[first + place];
            // a path of `level` rows: the parent's and the row itself
            for (int i = 0; i + 1 < level; ++i)
                paths_[size_t(row) * level + i] = paths[size_t(parent) * (level - 1) + i];
            paths_[size_t(row) * level + level - 1] = shape_.start + (level - 1) * K + row;
            path_ends_[row] = (row + 1) * level;
            if (model_.head_kind != kNoHead)
                std::memcpy(space_.features + size_t(row) * D,
                            space_.residual + size_t(level == 1 ? 0 : parent) * D,
                            D * sizeof(float));
        }
    }

    const Model& model_;
    const DraftShape& shape_;
    Workspace& space_;
    float* logits_;     // [K][V]
    std::vector<Candidate> parts_, best_;
    std::vector<float> sums_, beam_scores_;
    std::vector<int64_t> beam_tokens_;
    std::vector<int32_t> paths_, path_ends_;
};

}  // namespace polybasic
