// One thread's part of the attention of a pass: the partial results of its queries, segment by segment.
#pragma once

#include <limits>
#include <type_traits>

#include "attention/plan.h"
#include "attention/tiles.h"

namespace polybasic {
namespace attention {

// The partial result of a query: weighted values [head], then the largest score and the sum of the
// weights, which is zero as long as nothing was seen.
struct Partial {
    float* values;
    int head;

    float& largest() const { return values[head]; }
    float& sum() const { return values[head + 1]; }
    bool is_empty() const { return sum() == 0.0f; }
    void clear() const { sum() = 0.0f; }

    // Combine with the partial result of a later segment.
    void fold(const Partial& later) const {
        if (later.is_empty()) return;
        if (is_empty()) {
            std::memcpy(values, later.values, (head + kLanes) * sizeof(float));
            return;
        }
        const float most = std::max(largest(), later.largest());
        float factors[kLanes] = {largest() - most, later.largest() - most};
        store(factors, exponential(load(factors)));
        const Floats mine = broadcast(factors[0]), its = broadcast(factors[1]);
        for (int i = 0; i < head; i += kLanes)
            store(values + i,
                  fused_multiply_add(load(later.values + i), its, load(values + i) * mine));
        largest() = most;
        sum() = sum() * factors[0] + later.sum() * factors[1];
    }
};

// The weighted mean of the values, in the order of the head.
template <class T, class Out>
void write_mean(const Partial& whole, int head_dim, Out* out) {
    constexpr int kVectors = ValuePart<T>::kVectors;
    const Floats factor = broadcast(1.0f / whole.sum());
    for (int i = 0; i < head_dim; i += kVectors * kLanes) {
        Floats vectors[kVectors];
        for (int v = 0; v < kVectors; ++v) vectors[v] = load(whole.values + i + v * kLanes);
        if constexpr (kVectors == 2) ValuePart<T>::put_in_order(vectors[0], vectors[1]);
        for (int v = 0; v < kVectors && i + v * kLanes < head_dim; ++v)
            store(out + i + v * kLanes, vectors[v] * factor);
    }
}

// Scores of positions that are not seen.
inline void hide(float* scores, int begin, int end) {
    constexpr int32_t kNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints lanes = each_part<IntPart>(
        POLYBASIC_EACH { return load_part<IntPart>(kNumbers + i * kPartLanes); });
    const Floats hidden = broadcast(-std::numeric_limits<float>::infinity());
    for (int at = begin - begin % kLanes; at < end; at += kLanes) {
        const Ints is_hidden = (lanes >= begin - at) & (lanes < end - at);
        store(scores + at, select(is_hidden, hidden, load(scores + at)));
    }
}

// Turn the scores of the positions first..end, a whole number of vectors, into weights relative to
// the largest, in place: float, or pairs of bfloat16 numbers if values are read in pairs.
template <class T>
void weigh(float* scores, int first, int end, float scale, const Partial& partial) {
    Floats most = load(scores + first), total{};
    for (int i = first + kLanes; i < end; i += kLanes) most = maximum(most, load(scores + i));
    const float reference = largest(most);
    partial.largest() = reference * scale;
    for (int i = first; i < end; i += kLanes) {
        // the difference first: for huge scores, products with the scale would be rounded
        Floats weights = exponential((load(scores + i) - reference) * scale);
        if constexpr (ValuePart<T>::kPositions == 2) {
            // the sum is that of the rounded weights, so that the result is a mean of the values
            Bfloat16* pairs = reinterpret_cast<Bfloat16*>(scores) + i;
            store(pairs, weights);
            weights = load(pairs);
        } else {
            store(scores + i, weights);
        }
        total = total + weights;
    }
    partial.sum() = sum(total);
}

// A query in one segment.
template <class T>
struct Viewer {
    SegmentView view;
    const QueryElement<T>* query;   // [head]
    Partial whole;      // of the earlier segments
    Partial partial;    // of this segment: `whole` itself if that is empty

    // Rows of the cache of the positions from `from` on, and the last one repeated.
    void list_rows(int first, int from, int32_t* rows) const {
        for (int i = from; i < view.end; ++i)
            *rows++ = i < view.plain_end ? first + i : view.path[i - view.plain_end];
        std::fill_n(rows, kLanes, rows[-1]);
    }
};

// One thread's work on a sequence. kHead: the size of a head if the compiler knows it, else 0.
template <class T, int kHead>
class Worker {
public:
    virtual ~Worker() = default;

    Worker(const AttentionPart& part, const Work& work, const float* queries, float* workspace)
        : shape_(part.shape), rows_(*part.rows), work_(work), queries_(queries),
          cache_(static_cast<const T*>(part.cache)), partials_(workspace + work.first_partial),
          head_(padded(shape_.head_dim)), first_row_(part.first_row),
          plain_end_(rows_.path_ends == nullptr ? rows_.start + rows_.num_rows : rows_.prefix) {}

    template <class Out>
    void attend(const Item& item, Out* out) {
        const size_t floats_of_head = size_t(shape_.capacity) * shape_.head_dim;
        keys_ = cache_ + item.head * floats_of_head;
        values_ = keys_ + shape_.num_kv_heads * floats_of_head;
        copy_queries(item);
        for (int i = item.first_query; i < item.end_query; ++i) whole(item, i).clear();
        for (int segment = item.first_segment; segment < item.end_segment; ++segment)
            attend_segment(item, segment);
        if (work_.is_split) return;
        for (int i = item.first_query; i < item.end_query; ++i)
            write_mean<T>(whole(item, i), shape_.head_dim, out + offset(item.head, i));
    }

    // Combine the partial results of one query over all segments.
    template <class Out>
    void combine(int head, int query, Out* out) {
        const Partial result = slot(head, query, 0);
        for (int segment = 1; segment < work_.num_segments; ++segment)
            result.fold(slot(head, query, segment));
        write_mean<T>(result, shape_.head_dim, out + offset(head, query));
    }

protected:
    static constexpr int kScoresStride = kSegment + kLanes;
    static constexpr int kFetchedAhead = 8 * kLanes;
    static constexpr int kMaxPadded = kMaxHead + kLanes;
    // Queries whose scores have room, with some behind the last that are read and not used.
    static constexpr int kRoom = 2 * kLanes;
    static_assert(kRoom >= kBatch);

    size_t offset(int head, int query) const {
        const int G = shape_.query_groups, row = first_row_ + query / G;
        return (size_t(row * shape_.num_kv_heads + head) * G + query % G) * shape_.head_dim;
    }

    Partial slot(int head, int query, int segment) const {
        const size_t row = size_t(head) * work_.num_queries + query;
        return {partials_ + (row * work_.num_segments + segment) * (head_ + kLanes), head_};
    }

    // Where the results of the item's segments are gathered.
    Partial whole(const Item& item, int query) {
        if (work_.is_split) return slot(item.head, query, item.first_segment);
        return {wholes_ + (query - item.first_query) * (head_ + kLanes), head_};
    }

    int head_dim() const { return kHead > 0 ? kHead : shape_.head_dim; }

    float* scores_of(int place) { return scores_ + place * kScoresStride; }

    void copy_queries(const Item& item) {
        for (int i = item.first_query; i < item.end_query; ++i) {
            const float* from = queries_ + offset(item.head, i);
            QueryElement<T>* to = block_queries_ + (i - item.first_query) * head_;
            for (int at = 0; at < head_; at += kLanes)
                store_query<T>(to + at, at < head_dim() ? load(from + at) : Floats{});
        }
    }

    // A query in the segment.
    Viewer<T> viewer_of(const Item& item, int query) {
        return {SegmentView(shape_, RowView(rows_, query / shape_.query_groups), first_),
                block_queries_ + (query - item.first_query) * head_, whole(item, query), {}};
    }

    virtual void attend_segment(const Item& item, int segment) {
        first_ = segment * kSegment;
        int num = 0;
        for (int i = item.first_query; i < item.end_query; ++i) {
            viewers_[num] = viewer_of(item, i);
            if (!viewers_[num].view.is_empty()) ++num;
        }
        const int num_batches = ceil_divide(num, kBatch);
        for (int batch = 0; batch < num_batches; ++batch) {
            const int begin = num * batch / num_batches, end = num * (batch + 1) / num_batches;
            attend_batch(viewers_ + begin, end - begin, batch == 0);
        }
    }

    void attend_batch(Viewer<T>* viewers, int num, bool is_first) {
        int begin = kSegment;
        for (int q = 0; q < num; ++q) begin = std::min(begin, viewers[q].view.begin);
        begin -= begin % kLanes;
        score_plain(viewers, num, begin, is_first);
        for (int q = 0; q < num; ++q) {
            Viewer<T>& viewer = viewers[q];
            viewer.partial = viewer.whole;
            if (!viewer.whole.is_empty()) viewer.partial.values = spares_ + q * (head_ + kLanes);
            if (viewer.view.plain_end < viewer.view.end) score_path(viewer, scores_of(q));
            weigh_scores(viewer, begin, scores_of(q));
        }
        int q = 0;
        for (; q + 6 <= num; q += 6) add_values<6>(viewers, q, begin);
        for (; q + 4 <= num; q += 4) add_values<4>(viewers, q, begin);
        for (; q + 2 <= num; q += 2) add_values<2>(viewers, q, begin);
        if (q < num) add_values<1>(viewers, q, begin);
        for (q = 0; q < num; ++q)
            if (viewers[q].partial.values != viewers[q].whole.values)
                viewers[q].whole.fold(viewers[q].partial);
    }

    // Scores of the positions that are consecutive in the cache, for all queries of the batch.
    void score_plain(const Viewer<T>* viewers, int num, int begin, bool is_first) {
        const QueryElement<T>* queries[kBatch];
        int end = 0;
        for (int q = 0; q < num; ++q) {
            queries[q] = viewers[q].query;
            end = std::max(end, viewers[q].view.plain_end);
        }
        for (int at = begin; at < end; at += kLanes) {
            if (is_first) {
                fetch(keys_, at + kFetchedAhead);
                fetch(values_, at);  // for the sums, which follow
            }
            const ConsecutiveRows<T> keys{row_of(keys_, at), head_dim()};
            if (first_ + at + kLanes > shape_.capacity) {
                score_last(queries, num, at, end);
                break;
            }
            int q = 0;
            for (; q + 4 <= num; q += 4) score_vector<4>(queries + q, keys, q, at);
            for (; q + 2 <= num; q += 2) score_vector<2>(queries + q, keys, q, at);
            if (q < num) score_vector<1>(queries + q, keys, q, at);
        }
    }

    // Prefetch the keys or values of sixteen positions: the processor's own prefetching stops at the end of each
    // page of memory.
    void fetch(const T* head, int at) const {
        if (first_ + at + kLanes > plain_end_) return;
        const char* bytes = reinterpret_cast<const char*>(row_of(head, at));
        const int num_bytes = kLanes * head_dim() * int(sizeof(T));
        for (int i = 0; i < num_bytes; i += 64) __builtin_prefetch(bytes + i, 0, 2);
    }

    // Scores of sixteen positions from `at` on, for a few queries.
    template <int kQueries>
    void score_vector(const QueryElement<T>* const* queries, const ConsecutiveRows<T>& keys, int place, int at) {
        constexpr int kKeys = kLanes / kQueries;
#pragma GCC unroll 4
        for (int key = 0; key < kLanes; key += kKeys) {
            float tile[kLanes];
            store(tile, score_tile<T, kQueries>(queries, keys, key, head_dim()));
            for (int q = 0; q < kQueries; ++q)
                std::memcpy(scores_of(place + q) + at + key, tile + q * kKeys, kKeys * sizeof(float));
        }
    }

    // The same where the cache ends before the sixteenth.
    void score_last(const QueryElement<T>* const* queries, int num, int at, int end) {
        int32_t rows[kLanes];
        for (int i = 0; i < kLanes; ++i) rows[i] = first_ + std::min(at + i, end - 1);
        for (int q = 0; q < num; ++q) score_listed(queries[q], rows, scores_of(q) + at);
    }

    void score_path(const Viewer<T>& viewer, float* scores) {
        int32_t rows[kSegment + kLanes];
        const int begin = viewer.view.plain_end;
        viewer.list_rows(first_, begin, rows);
        for (int at = begin; at < viewer.view.end; at += kLanes)
            score_listed(viewer.query, rows + (at - begin), scores + at);
    }

    void score_listed(const QueryElement<T>* query, const int32_t* rows, float* scores) {
        const ListedRows<T> keys{keys_, head_dim(), rows};
        store(scores, score_tile<T, 1>(&query, keys, 0, head_dim()));
    }

    void weigh_scores(const Viewer<T>& viewer, int begin, float* scores) const {
        const SegmentView& view = viewer.view;
        const int end = ceil_divide(view.end, kLanes) * kLanes;
        const float cap = shape_.softcap;
        if (cap != 0.0f)
            for (int i = begin; i < end; i += kLanes)
                store(scores + i, softcapped(load(scores + i) * shape_.scale, cap));
        hide(scores, begin, view.begin);
        hide(scores, view.gap_begin, view.gap_end);
        hide(scores, view.end, end);
        weigh<T>(scores, begin, end, cap != 0.0f ? 1.0f : shape_.scale, viewer.partial);
    }

    // Weighted values: for positions that are consecutive for all kQueries, together; for the others,
    // one query after the other.
    template <int kQueries>
    void add_values(const Viewer<T>* viewers, int place, int begin) {
        constexpr int kPositions = ValuePart<T>::kPositions;
        const float* weights[kQueries];
        float* sums[kQueries];
        int end = kSegment;
        for (int q = 0; q < kQueries; ++q) {
            const Viewer<T>& viewer = viewers[place + q];
            weights[q] = scores_of(place + q);
            sums[q] = viewer.partial.values;
            end = std::min(end, viewer.view.plain_end);
        }
        end = std::max(end - end % kPositions, begin);
        const ConsecutiveRows<T> together{row_of(values_, 0), head_dim()};
        weighted_sums<T, kQueries, false>(together, begin / kPositions, end / kPositions, weights, sums);
        for (int q = 0; q < kQueries; ++q)
            if (end < viewers[place + q].view.end) add_values_alone(viewers[place + q], end, weights[q]);
    }

    // Those of one query at the positions from `begin` on, added to its sums.
    void add_values_alone(const Viewer<T>& viewer, int begin, const float* weights) {
        constexpr int kPositions = ValuePart<T>::kPositions;
        int32_t rows[kSegment + kLanes];
        viewer.list_rows(first_, begin, rows);
        weights += begin / kPositions;
        float* sums = viewer.partial.values;
        const ListedRows<T> values{values_, head_dim(), rows};
        const int num_steps = ceil_divide(viewer.view.end - begin, kPositions);
        weighted_sums<T, 1, true>(values, 0, num_steps, &weights, &sums);
    }

    const T* row_of(const T* head, int at) const {
        return head + size_t(first_ + at) * head_dim();
    }

    const AttentionShape& shape_;
    const Rows& rows_;
    const Work& work_;
    const float* queries_;
    const T* cache_;
    float* partials_;
    const int head_;        // size of a head in the buffers
    const int first_row_;
    const int plain_end_;   // rows of the cache from here on are seen only by paths
    const T* keys_;         // of the item's head
    const T* values_;
    int first_;             // position at which the segment begins
    Viewer<T> viewers_[kBlock];
    alignas(64) QueryElement<T> block_queries_[(kBlock + kLanes) * kMaxHead];
    alignas(64) float wholes_[kBlock * kMaxPadded];
    alignas(64) float spares_[kRoom * kMaxPadded];
    alignas(64) float scores_[kRoom * kScoresStride];
};

}  // namespace attention
}  // namespace polybasic
