// Drafts of heads that give all positions at once (polybasic.chain.kernels.torch.positions): the best
// tokens of every position are found in one product, then the tree grows level by level from these.
//
//   K = children of each row, and rows of a beam; L = levels; V = tokens that can be drafted
//   N = best tokens of a position, which a table of bigrams corrects by the token before
#pragma once

#include "passes/draft.h"

namespace polybasic {

// All sequences together have at most kMaxRows levels.
template <class T>
class PositionDrafts : Scoring<T> {
public:
    PositionDrafts(const Model& model, const DraftShape* shapes, int num, Workspace& space,
                   int num_threads)
        : Scoring<T>(model, space, num_rows_of(shapes, num)), num_rows_(num_rows_of(shapes, num)) {
        int first_row = 0;
        for (int i = 0; i < num; ++i) {
            growing_.emplace_back(shapes[i], first_row, num_best_of(shapes[i]), num_threads);
            first_row += shapes[i].depth;
        }
    }

    void run(Thread& self) {
        Row rows[kMaxRows];
        const size_t width = size_t(model_.hidden_size) * sizeof(T);
        for (Growing& one : growing_) {
            const DraftShape& shape = one.shape;
            for (int level = 0; level < shape.depth; ++level) {
                const int row = one.first_row + level;
                const float* added = shape.added;
                if (added != nullptr) added += size_t(level) * model_.lm_head.num_outputs;
                if (row % self.num_threads == self.number)
                    this->place_state(static_cast<const char*>(shape.state) + level * width, row);
                rows[row] = this->row_of(row, one.best_of(self.number, level), added,
                                         shape.logit_scale, shape.list);
            }
        }
        self.wait();
        const Input input{nullptr, nullptr, 0, num_rows_};
        Forward<T> forward(model_, input, space_, self);
        this->score(forward, self, rows, num_rows_, false);
        self.wait();
        for (size_t i = 0; i < growing_.size(); ++i)
            if (int(i) % self.num_threads == self.number) grow(growing_[i], self.num_threads);
        self.wait();
    }

private:
    using typename Scoring<T>::Row;
    using Scoring<T>::model_;
    using Scoring<T>::space_;

    // The draft of one sequence.
    struct Growing {
        const DraftShape& shape;
        int first_row, num_best;
        std::vector<Candidate> kept;    // [threads][L][N]
        std::vector<Candidate> best;    // [N] of a position
        std::vector<float> corrected;   // [N]

        Growing(const DraftShape& shape, int first_row, int num_best, int num_threads)
            : shape(shape), first_row(first_row), num_best(num_best),
              kept(size_t(num_threads) * shape.depth * num_best), best(num_best),
              corrected(num_best) {}

        Best best_of(int thread, int level) {
            return {kept.data() + (size_t(thread) * shape.depth + level) * num_best, num_best};
        }
    };

    static int num_rows_of(const DraftShape* shapes, int num) {
        int num_rows = 0;
        for (int i = 0; i < num; ++i) num_rows += shapes[i].depth;
        return num_rows;
    }

    int num_best_of(const DraftShape& shape) const {
        return std::min(std::max(model_.num_corrected, shape.top_k), model_.lm_head.num_outputs);
    }

    void grow(Growing& one, int num_threads) {
        const DraftShape& shape = one.shape;
        const int K = shape.top_k;
        std::vector<Candidate> beam(K), children(K);
        const Best best_places{beam.data(), K};
        bool goes_on = true;
        for (int level = 0; level < shape.depth && goes_on; ++level) {
            *shape.num_levels = level + 1;
            const Best best{one.best.data(), one.num_best};
            best.clear();
            for (int thread = 0; thread < num_threads; ++thread)
                for (int i = 0; i < one.num_best; ++i) best.offer(one.best_of(thread, level).kept[i]);
            const float normalizer = this->normalizer_of(one.first_row + level);
            if (level == 0) {
                goes_on = write(one, best.kept, normalizer, 0.0f, 0);
                continue;
            }
            goes_on = false;
            const size_t above = shape.first_of(level - 1);
            const int num_above = level == 1 ? K : K * K;
            best_places.clear();
            for (int place = 0; place < num_above; ++place)
                best_places.offer({shape.scores[above + place], place});
            for (int row = 0; row < K; ++row) {
                const int place = this->place_of(beam[row]);
                shape.beams[size_t(level - 1) * K + row] = place;
                const float moved = correct(one, shape.tokens[above + place], normalizer);
                const Best chosen{children.data(), K};
                chosen.clear();
                for (int i = 0; i < one.num_best; ++i)
                    chosen.offer({one.corrected[i], one.best[i].place});
                goes_on |= write(one, chosen.kept, moved, beam[row].score,
                                 shape.first_of(level) + size_t(row) * K);
            }
        }
    }

    // Candidates from `number` on: K tokens with their logits, below a parent with score `above`.
    // Returns whether one scores enough for a further level.
    bool write(const Growing& one, const Candidate* chosen, float normalizer, float above,
               size_t number) const {
        const DraftShape& shape = one.shape;
        bool goes_on = false;
        for (int i = 0; i < shape.top_k; ++i, ++number) {
            const int output = this->place_of(chosen[i]);
            const float exact = chosen[i].score - normalizer;
            const float log_probability = std::isnan(exact) ? -INFINITY : std::min(exact, 0.0f);
            shape.scores[number] = above + log_probability;
            shape.tokens[number] = shape.token_ids == nullptr ? output : shape.token_ids[output];
            goes_on |= shape.scores[number] >= shape.least_score;
        }
        return goes_on;
    }

    // The best tokens' logits after `token`, and the logarithm of the sum of all exponentials.
    float correct(Growing& one, int64_t token, float normalizer) const {
        const int rank = model_.markov_rank;
        const T* into = static_cast<const T*>(model_.markov_in) + size_t(token) * rank;
        const T* from = static_cast<const T*>(model_.markov_out);
        float most = normalizer, before = 0.0f, after = 0.0f;
        for (int i = 0; i < one.num_best; ++i) {
            const Candidate& candidate = one.best[i];
            float bigram = 0.0f;
            if (rank > 0) {
                const T* row = from + size_t(this->place_of(candidate)) * rank;
                Floats total{};
                for (int column = 0; column < rank; column += kLanes)
                    total = total + load(into + column) * load(row + column);
                bigram = sum(total);
            }
            one.corrected[i] = candidate.score + one.shape.logit_scale * bigram;
            most = std::max(most, one.corrected[i]);
        }
        for (int i = 0; i < one.num_best; ++i) {
            before += std::exp(one.best[i].score - normalizer);
            after += std::exp(one.corrected[i] - most);
        }
        const float rest = std::max(0.0f, 1.0f - before);
        return most + std::log(rest * std::exp(normalizer - most) + after);
    }

    int num_rows_;
    std::vector<Growing> growing_;
};

}  // namespace polybasic
