// Drafts of one or more sequences: EAGLE-2's dynamic trees of candidates, level by level
// (polybasic.deploy.drafters.expansion). A level is one pass over the rows of all sequences that have it,
// and gives each of them the bits that it gets alone, with any number of threads.
//
//   K = children of each row, and rows of a beam; L = levels; V = tokens that can be drafted
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "decoder.h"

namespace polybasic {

// The draft of one sequence.
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

    int rows_of(int level) const { return level >= depth ? 0 : level == 0 ? 1 : top_k; }
    size_t first_of(int level) const {
        return level == 0 ? 0 : top_k + size_t(level - 1) * top_k * top_k;
    }
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

// All sequences together have at most kMaxRows rows at a level.
template <class T>
class Drafts {
public:
    Drafts(const Model& model, const DraftShape* shapes, int num, Workspace& space, int num_threads)
        : model_(model), space_(space), sequences_(num) {
        int most_rows = 0;
        for (int i = 0; i < num; ++i) {
            const DraftShape& shape = shapes[i];
            beams_.emplace_back(shape, num_threads);
            sequences_[i] = {{}, shape.caches, shape.capacity, shape.window_tokens, shape.window_sinks};
            most_rows += shape.top_k;
            depth_ = std::max(depth_, shape.depth);
        }
        tokens_.resize(most_rows);
        const int num_units = (model.lm_head.num_blocks() + kUnit - 1) / kUnit;
        sums_stride_ = (num_units + kLanes - 1) / kLanes * kLanes;
        const size_t size = 2 * size_t(most_rows) * sums_stride_;
        if (space.draft_sums.size() < size) space.draft_sums.resize(size);
    }

    void run(Thread& self) {
        for_each_beam(0, [&](int index, int row) {
            if (index % self.num_threads == self.number) begin(beams_[index], row);
        });
        self.wait();
        for (int level = 0; level < depth_; ++level) {
            int num_rows = 0;
            for (const Beam& beam : beams_) num_rows += beam.shape.rows_of(level);
            const int num_sequences = level == 0 ? 0 : int(sequences_.size());
            const Input input{tokens_.data(), sequences_.data(), num_sequences, num_rows};
            Forward<T> forward(model_, input, space_, self);
            if (level > 0) forward.run(nullptr, nullptr, 0);
            score(forward, self, num_rows, level);
            self.wait();
            int next_row = 0;
            for_each_beam(level, [&](int index, int row) {
                if (index % self.num_threads == self.number) {
                    merge(beams_[index], row, level, self.num_threads);
                    choose(beams_[index], sequences_[index], row, next_row, level + 1);
                }
                next_row += beams_[index].shape.rows_of(level + 1);
            });
            self.wait();
        }
    }

private:
    // Blocks of sixteen outputs that have a sum of their own: what is added up in which order does not
    // depend on the threads.
    static constexpr int kUnit = 4;

    // Of one sequence.
    struct Beam {
        const DraftShape& shape;
        std::vector<float> scores;                  // [K]
        std::vector<int32_t> paths, paths_above;    // [K][level], of this level and the one above
        std::vector<int32_t> path_ends;             // [K]
        std::vector<Candidate> kept;                // [threads][K][K], the best of each row
        std::vector<Candidate> best;                // [K]

        Beam(const DraftShape& shape, int num_threads)
            : shape(shape), scores(shape.top_k), paths(size_t(shape.top_k) * shape.depth),
              paths_above(paths.size()), path_ends(shape.top_k),
              kept(size_t(num_threads) * shape.top_k * shape.top_k), best(shape.top_k) {}

        Best best_of(int thread, int row) {
            const int K = shape.top_k;
            return {kept.data() + (size_t(thread) * K + row) * K, K};
        }
    };

    // A row whose candidates are looked for.
    struct Row {
        Best best;          // of this thread
        const float* added;
        float scale;
        float* greatest;    // of each unit: the greatest logit,
        float* sums;        // and the sum of exponentials relative to it
    };

    // Pass on each sequence that has the level, and its first row there.
    template <class Visit>
    void for_each_beam(int level, Visit visit) {
        int row = 0;
        for (int index = 0; index < int(beams_.size()); ++index) {
            const int num_rows = beams_[index].shape.rows_of(level);
            if (num_rows > 0) visit(index, row);
            row += num_rows;
        }
    }

    float* greatest_of(int row) const {
        return space_.draft_sums.data() + 2 * size_t(row) * sums_stride_;
    }

    void begin(const Beam& beam, int row) {
        const T* state = static_cast<const T*>(beam.shape.state);
        float* to = space_.residual + size_t(row) * model_.hidden_size;
        for (int column = 0; column < model_.hidden_size; column += kLanes)
            store(to + column, load(state + column));
    }

    // This thread's share of the vocabulary, for all rows.
    void score(Forward<T>& forward, Thread& self, int num_rows, int level) {
        Row rows[kMaxRows];
        for_each_beam(level, [&](int index, int row) {
            Beam& beam = beams_[index];
            const DraftShape& shape = beam.shape;
            const float* added = shape.added;
            if (added != nullptr) added += size_t(level) * model_.lm_head.num_outputs;
            for (int own = 0; own < shape.rows_of(level); ++own, ++row) {
                float* greatest = greatest_of(row);
                rows[row] = {beam.best_of(self.number, own), added, shape.logit_scale, greatest,
                             greatest + sums_stride_};
                rows[row].best.clear();
            }
        });
        // the state that a decoder's draft starts from is normed already
        forward.fill_final(num_rows, level == 0 && model_.head_kind == kNoHead);
        forward.multiply(model_.lm_head, kUnit, num_rows,
                         [&](Range blocks, int first, int num, const float* tile) {
                             for (int row = 0; row < num; ++row)
                                 scan(rows[first + row], blocks, tile + row * kLanes, num * kLanes);
                         });
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

    // The candidates of a level: the best K tokens after each of its rows.
    void merge(Beam& beam, int first_row, int level, int num_threads) {
        const DraftShape& shape = beam.shape;
        const int K = shape.top_k;
        const Best best{beam.best.data(), K};
        size_t number = shape.first_of(level);
        for (int row = 0; row < shape.rows_of(level); ++row) {
            best.clear();
            for (int thread = 0; thread < num_threads; ++thread)
                for (int i = 0; i < K; ++i) best.offer(beam.best_of(thread, row).kept[i]);
            const float normalizer = normalizer_of(first_row + row);
            const float above = level == 0 ? 0.0f : beam.scores[row];
            for (int i = 0; i < K; ++i, ++number) {
                const int output = place_of(beam.best[i]);
                // a child never comes before its parent: neither by rounding nor as NaN
                const float exact = beam.best[i].score - normalizer;
                const float log_probability = std::isnan(exact) ? -INFINITY : std::min(exact, 0.0f);
                shape.scores[number] = above + log_probability;
                shape.tokens[number] = shape.token_ids == nullptr ? output : shape.token_ids[output];
            }
        }
    }

    // NaN scores are never among the best.
    static int place_of(const Candidate& candidate) {
        return candidate.place == INT32_MAX ? 0 : candidate.place;
    }

    // The beam of a level, if there is one: the best K candidates of the level above, best first.
    // `above` and `first` are the sequence's first rows there and here.
    void choose(Beam& beam, Sequence& sequence, int above, int first, int level) {
        const DraftShape& shape = beam.shape;
        const int K = shape.top_k, D = model_.hidden_size;
        sequence.rows = {shape.rows_of(level), shape.start + (level - 1) * K, shape.start,
                         beam.path_ends.data(), nullptr};
        if (level == shape.depth) return;
        const size_t first_above = shape.first_of(level - 1);
        const int num = shape.rows_of(level - 1) * K;
        const Best best{beam.best.data(), K};
        best.clear();
        for (int place = 0; place < num; ++place) best.offer({shape.scores[first_above + place], place});
        beam.paths.swap(beam.paths_above);
        sequence.rows.paths = beam.paths.data();
        int64_t* places = shape.beams + size_t(level - 1) * K;
        for (int row = 0; row < K; ++row) {
            const int place = place_of(beam.best[row]), parent = place / K;
            places[row] = place;
            beam.scores[row] = beam.best[row].score;
            tokens_[first + row] = shape.tokens[first_above + place];
            // a path of `level` rows: the parent's and the row itself
            int32_t* path = beam.paths.data() + size_t(row) * level;
            std::copy_n(beam.paths_above.data() + size_t(parent) * (level - 1), level - 1, path);
            path[level - 1] = sequence.rows.start + row;
            beam.path_ends[row] = (row + 1) * level;
            if (model_.head_kind != kNoHead)
                std::memcpy(space_.features + size_t(first + row) * D,
                            space_.residual + size_t(above + parent) * D, D * sizeof(float));
        }
    }

    const Model& model_;
    Workspace& space_;
    int depth_ = 0;         // of the deepest draft
    int sums_stride_;
    std::vector<Beam> beams_;
    std::vector<Sequence> sequences_;
    std::vector<int64_t> tokens_;   // of a level's rows
};

}  // namespace polybasic
