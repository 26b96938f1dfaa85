// The best tokens of rows of logits, and the sums of their exponentials: every thread looks through its
// share of the vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "passes/decoder.h"
#include "passes/lists.h"

namespace polybasic {

struct Candidate {
    float score;
    int32_t place;
};

// The better score first; of equal ones, the earlier place.
inline bool operator<(const Candidate& one, const Candidate& other) {
    return one.score > other.score || (one.score == other.score && one.place < other.place);
}

// The best few of the offered scores, best first.
struct Best {
    Candidate* kept;
    int num;

    void clear() const { std::fill_n(kept, num, Candidate{-INFINITY, INT32_MAX}); }
    float least() const { return kept[num - 1].score; }
    void offer(Candidate candidate) const {
        if (!(candidate < kept[num - 1])) return;
        int place = num - 1;
        for (; place > 0 && candidate < kept[place - 1]; --place) kept[place] = kept[place - 1];
        kept[place] = candidate;
    }
};

// The first `num` numbers, and zeros where there are fewer than lanes.
POLYBASIC_INLINE Floats load_at_most(const float* from, int num) {
    if (num >= kLanes) return load(from);
    Floats values{};
    std::memcpy(&values, from, num * sizeof(float));
    return values;
}

// Base of what drafts: logits of at most kMaxRows rows.
template <class T>
class Scoring {
protected:
    // Blocks of sixteen outputs that have a sum of their own: what is added up in which order does not
    // depend on the threads.
    static constexpr int kUnit = Lists::kUnit;

    // A row whose candidates are looked for.
    struct Row {
        Best best;          // of this thread
        const float* added;
        float scale;
        float* greatest;    // of each unit: the greatest logit,
        float* sums;        // and the sum of exponentials relative to it
        const uint8_t* list;    // of the units that have logits, or null: see `Lists`
    };

    Scoring(const Model& model, Workspace& space, int most_rows) : model_(model), space_(space) {
        const int num_units = (model.lm_head.num_blocks() + kUnit - 1) / kUnit;
        sums_stride_ = (num_units + kLanes - 1) / kLanes * kLanes;
        const size_t size = 2 * size_t(most_rows) * sums_stride_;
        if (space.draft_sums.size() < size) space.draft_sums.resize(size);
    }

    float* greatest_of(int row) const {
        return space_.draft_sums.data() + 2 * size_t(row) * sums_stride_;
    }

    // A state that logits follow, as a row of the residual stream.
    void place_state(const void* state, int row) const {
        const T* from = static_cast<const T*>(state);
        float* to = space_.residual + size_t(row) * model_.hidden_size;
        for (int column = 0; column < model_.hidden_size; column += kLanes)
            store(to + column, load(from + column));
    }

    // This thread's share of the vocabulary, for rows of the residual stream. `are_normed`: the state
    // that a decoder's draft starts from is.
    void score(Forward<T>& forward, const Thread& self, const Row* rows, int num_rows, bool are_normed) const {
        const uint8_t* of_rows[kMaxRows];
        for (int row = 0; row < num_rows; ++row) of_rows[row] = rows[row].list;
        const Lists lists(of_rows, num_rows, model_.lm_head.num_blocks());
        forward.fill_final(num_rows, are_normed);
        lists.for_each_part(self, kUnit, kUnit, [&](Range unit) {
            forward.multiply_blocks(model_.lm_head, unit, num_rows,
                                    [&](Range blocks, int first, int num, const float* tile) {
                                        for (int row = 0; row < num; ++row, tile += kLanes)
                                            if (lists.has(first + row, blocks.first))
                                                scan(rows[first + row], blocks, tile, num * kLanes);
                                    });
        });
        lists.for_each_other(num_rows, self, [&](int row, int unit) {
            rows[row].greatest[unit] = -INFINITY;
            rows[row].sums[unit] = 0.0f;
        });
    }

    Row row_of(int row, Best best, const float* added, float scale, const uint8_t* list) const {
        best.clear();
        float* greatest = greatest_of(row);
        return {best, added, scale, greatest, greatest + sums_stride_, list};
    }

    // A row's logits in a unit of blocks; `tile` + i * stride are its values of block i.
    void scan(const Row& row, Range blocks, const float* tile, int stride) const {
        const int num_blocks = blocks.end - blocks.first;
        alignas(64) float logits[kUnit * kLanes];
        Floats most = broadcast(-INFINITY);
        for (int i = 0; i < num_blocks; ++i) {
            const int column = (blocks.first + i) * kLanes, left = model_.lm_head.num_outputs - column;
            Floats values = load(tile + i * stride);
            if (model_.logit_softcap > 0) values = softcapped(values, model_.logit_softcap);
            if (row.added != nullptr)
                values = values * row.scale + load_at_most(row.added + column, left);
            store(logits + i * kLanes, values);
            if (left < kLanes) attention::hide(logits + i * kLanes, left, kLanes);
            most = maximum(most, load(logits + i * kLanes));
        }
        const float greatest = largest(most);
        Floats total{};
        for (int i = 0; i < num_blocks; ++i)
            total = total + exponential(load(logits + i * kLanes) - greatest);
        row.greatest[blocks.first / kUnit] = greatest;
        row.sums[blocks.first / kUnit] = sum(total);
        if (!(greatest > row.best.least())) return;
        for (int i = 0; i < num_blocks; ++i) {
            const float* block = logits + i * kLanes;
            if (!(largest(load(block)) > row.best.least())) continue;
            const int place = (blocks.first + i) * kLanes;
            const int num = std::min(kLanes, model_.lm_head.num_outputs - place);
            for (int lane = 0; lane < num; ++lane) row.best.offer({block[lane], place + lane});
        }
    }

    // The logarithm of the sum of a row's exponentials.
    float normalizer_of(int row) const {
        const int num_units = (model_.lm_head.num_blocks() + kUnit - 1) / kUnit;
        float *greatest = greatest_of(row), *sums = greatest + sums_stride_;
        std::fill(greatest + num_units, greatest + sums_stride_, -INFINITY);
        std::fill(sums + num_units, sums + sums_stride_, 0.0f);
        Floats most = load(greatest), total{};
        for (int i = kLanes; i < sums_stride_; i += kLanes) most = maximum(most, load(greatest + i));
        const float reference = largest(most);
        for (int i = 0; i < sums_stride_; i += kLanes)
            total = total + load(sums + i) * exponential(load(greatest + i) - reference);
        return reference + std::log(sum(total));
    }

    // NaN scores are never among the best.
    static int place_of(const Candidate& candidate) {
        return candidate.place == INT32_MAX ? 0 : candidate.place;
    }

    const Model& model_;
    Workspace& space_;
    int sums_stride_;
};

}  // namespace polybasic
