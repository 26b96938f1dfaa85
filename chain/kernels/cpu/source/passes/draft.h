// Drafts of one or more sequences: EAGLE-2's dynamic trees of candidates, level by level
// (polybasic.deploy.runtime.drafters.expansion). A level is one pass over the rows of all sequences that have it,
// and gives each of them the bits that it gets alone, with any number of threads.
//
//   K = children of each row, and rows of a beam; L = levels; V = tokens that can be drafted
#pragma once

#include "passes/scoring.h"

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
    float least_score;          // no level follows one whose candidates all score less
    const float* added;         // [L][V], to the scaled logits of each level, or null
    void* const* caches;
    const void* state;          // [D], which the first level follows; or [L][D], of all positions
    const int64_t* token_ids;   // [V], or null if outputs are token ids
    const uint8_t* list;        // of the units of outputs that can be drafted, or null: see `Lists`
    int64_t* tokens;            // [K + (L - 1) K K]
    float* scores;              // the same
    int64_t* beams;             // [L - 1][K]
    int32_t* num_levels;        // at first L, in the end those that were drafted

    int rows_of(int level) const { return level >= *num_levels ? 0 : level == 0 ? 1 : top_k; }
    size_t first_of(int level) const {
        return level == 0 ? 0 : top_k + size_t(level - 1) * top_k * top_k;
    }
};

// All sequences together have at most kMaxRows rows at a level.
template <class T>
class Drafts : Scoring<T> {
public:
    Drafts(const Model& model, const DraftShape* shapes, int num, Workspace& space, int num_threads)
        : Scoring<T>(model, space, most_rows_of(shapes, num)), sequences_(num) {
        for (int i = 0; i < num; ++i) {
            const DraftShape& shape = shapes[i];
            beams_.emplace_back(shape, num_threads);
            sequences_[i] = {{}, shape.caches, shape.capacity, shape.window_tokens, shape.window_sinks};
            depth_ = std::max(depth_, shape.depth);
        }
        tokens_.resize(most_rows_of(shapes, num));
    }

    void run(Thread& self) {
        for_each_beam(0, [&](int index, int row) {
            if (index % self.num_threads != self.number) return;
            beams_[index].first_row = row;
            this->place_state(beams_[index].shape.state, row);
        });
        self.wait();
        for (int level = 0; level < depth_; ++level) {
            int num_rows = 0;
            for (const Beam& beam : beams_) num_rows += beam.shape.rows_of(level);
            if (num_rows == 0) break;
            const int num_sequences = level == 0 ? 0 : int(sequences_.size());
            const Input input{tokens_.data(), sequences_.data(), num_sequences, num_rows};
            Forward<T> forward(model_, input, space_, self);
            if (level > 0) forward.run(nullptr, nullptr, 0);
            score_level(forward, self, num_rows, level);
            self.wait();
            for (int index = self.number; index < int(beams_.size()); index += self.num_threads)
                if (beams_[index].shape.rows_of(level) > 0) merge(beams_[index], level, self.num_threads);
            self.wait();
            int next_row = 0;
            for_each_beam(level, [&](int index, int row) {
                if (index % self.num_threads == self.number)
                    choose(beams_[index], sequences_[index], row, next_row, level + 1);
                next_row += beams_[index].shape.rows_of(level + 1);
            });
            self.wait();
        }
    }

private:
    using typename Scoring<T>::Row;
    using Scoring<T>::model_;
    using Scoring<T>::space_;

    static int most_rows_of(const DraftShape* shapes, int num) {
        int most_rows = 0;
        for (int i = 0; i < num; ++i) most_rows += shapes[i].top_k;
        return most_rows;
    }

    // Of one sequence.
    struct Beam {
        const DraftShape& shape;
        int first_row = 0;                          // among those of a level
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

    // This thread's share of the vocabulary, for all rows.
    void score_level(Forward<T>& forward, Thread& self, int num_rows, int level) {
        Row rows[kMaxRows];
        for_each_beam(level, [&](int index, int row) {
            Beam& beam = beams_[index];
            const DraftShape& shape = beam.shape;
            const float* added = shape.added;
            if (added != nullptr) added += size_t(level) * model_.lm_head.num_outputs;
            for (int own = 0; own < shape.rows_of(level); ++own, ++row)
                rows[row] = this->row_of(row, beam.best_of(self.number, own), added, shape.logit_scale,
                                         shape.list);
        });
        this->score(forward, self, rows, num_rows, level == 0 && model_.head_kind == kNoHead);
    }

    // The candidates of a level: the best K tokens after each of its rows. If none scores enough, the
    // level is the last.
    void merge(Beam& beam, int level, int num_threads) {
        const DraftShape& shape = beam.shape;
        const int K = shape.top_k;
        const Best best{beam.best.data(), K};
        size_t number = shape.first_of(level);
        bool goes_on = false;
        for (int row = 0; row < shape.rows_of(level); ++row) {
            best.clear();
            for (int thread = 0; thread < num_threads; ++thread)
                for (int i = 0; i < K; ++i) best.offer(beam.best_of(thread, row).kept[i]);
            const float normalizer = this->normalizer_of(beam.first_row + row);
            const float above = level == 0 ? 0.0f : beam.scores[row];
            for (int i = 0; i < K; ++i, ++number) {
                const int output = this->place_of(beam.best[i]);
                // a child never comes before its parent: neither by rounding nor as NaN
                const float exact = beam.best[i].score - normalizer;
                const float log_probability = std::isnan(exact) ? -INFINITY : std::min(exact, 0.0f);
                shape.scores[number] = above + log_probability;
                shape.tokens[number] = shape.token_ids == nullptr ? output : shape.token_ids[output];
                goes_on |= shape.scores[number] >= shape.least_score;
            }
        }
        if (!goes_on) *shape.num_levels = std::min(*shape.num_levels, level + 1);
    }

    // The beam of a level, if there is one: the best K candidates of the level above, best first.
    // `above` and `first` are the sequence's first rows there and here.
    void choose(Beam& beam, Sequence& sequence, int above, int first, int level) {
        const DraftShape& shape = beam.shape;
        const int K = shape.top_k, D = model_.hidden_size;
        sequence.rows = {shape.rows_of(level), shape.start + (level - 1) * K, shape.start,
                         beam.path_ends.data(), nullptr};
        if (shape.rows_of(level) == 0) return;
        beam.first_row = first;
        const size_t first_above = shape.first_of(level - 1);
        const int num = shape.rows_of(level - 1) * K;
        const Best best{beam.best.data(), K};
        best.clear();
        for (int place = 0; place < num; ++place) best.offer({shape.scores[first_above + place], place});
        beam.paths.swap(beam.paths_above);
        sequence.rows.paths = beam.paths.data();
        int64_t* places = shape.beams + size_t(level - 1) * K;
        for (int row = 0; row < K; ++row) {
            const int place = this->place_of(beam.best[row]), parent = place / K;
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

    int depth_ = 0;         // of the deepest draft
    std::vector<Beam> beams_;
    std::vector<Sequence> sequences_;
    std::vector<int64_t> tokens_;   // of a level's rows
};

}  // namespace polybasic
