// What the rows of a pass see of the cache, and how the work is divided among threads.
//
//   R = rows, K = key/value heads, G = query heads that read one of them, H = head size
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "simd.h"

namespace polybasic {

// How the rows of a pass attend to the cache.
struct Rows {
    int num_rows;
    int start;                  // first row of the cache that the pass wrote
    int prefix;                 // rows of the cache that all see, each at the position of its index
    const int32_t* path_ends;   // [R] end of each row's path in `paths`; null: the rows are
                                // consecutive tokens, and `prefix` is `start`
    const int32_t* paths;       // rows of the cache seen after the prefix, by position, itself last
};

struct AttentionShape {
    int num_kv_heads;
    int query_groups;
    int head_dim;
    int capacity;       // rows of the cache
    float scale;        // of the scores
    float softcap;      // scores are kept between -softcap and softcap; 0: they are not
    int window;         // positions that a row sees, itself included; 0: all
    int sinks;          // first positions, seen in addition to the window
};

// One sequence of a pass.
struct AttentionPart {
    AttentionShape shape;
    const Rows* rows;
    int first_row;      // of its queries and results among those of the pass
    const void* cache;  // [2 K][capacity][H], keys, then values; those of the pass are written
};

namespace attention {

constexpr int kMaxHead = 256;
constexpr int kSegment = 256;       // positions that make one partial result
constexpr int kBlock = 96;          // queries that share what is read of the cache, at most
constexpr int kBatch = 24;          // queries whose scores of a segment stay in the nearest cache
constexpr size_t kMaxPartialFloats = size_t(8) << 20;  // 32 MiB

inline int ceil_divide(int x, int by) { return (x + by - 1) / by; }

// A head in scratch memory: padded with zeros to pairs of vectors.
inline int padded(int head_dim) { return ceil_divide(head_dim, 2 * kLanes) * 2 * kLanes; }

// Floats of a partial result: weighted values, the largest score, the sum of the weights.
inline int partial_size(int head_dim) { return padded(head_dim) + kLanes; }

// What one row of the pass sees.
struct RowView {
    int end;                // its position + 1
    int plain_end;          // positions below it are in the cache's row of the same index
    const int32_t* path;    // rows of the others

    RowView(const Rows& rows, int row) {
        if (rows.path_ends == nullptr) {
            end = plain_end = rows.start + row + 1;
            path = nullptr;
            return;
        }
        const int begin = row == 0 ? 0 : rows.path_ends[row - 1];
        end = rows.prefix + rows.path_ends[row] - begin;
        plain_end = rows.prefix;
        path = rows.paths + begin;
    }

    int window_begin(const AttentionShape& shape) const {
        return shape.window > 0 ? std::max(0, end - shape.window) : 0;
    }
};

// Positions that some row of the pass sees.
inline int context_of(const Rows& rows) {
    if (rows.path_ends == nullptr) return rows.start + rows.num_rows;
    int context = 0;
    for (int row = 0; row < rows.num_rows; ++row)
        context = std::max(context, RowView(rows, row).end);
    return context;
}

// A row in one segment; positions are counted from the segment's first.
struct SegmentView {
    int begin, end;         // positions seen,
    int gap_begin, gap_end; // but for those between sinks and window
    int plain_end;          // positions below it are consecutive in the cache
    const int32_t* path;    // rows of the cache of the positions from there on

    SegmentView() = default;

    // `first`: position of the segment's first.
    SegmentView(const AttentionShape& shape, const RowView& row, int first) {
        const int window_begin = row.window_begin(shape) - first;
        const int sinks = std::max(shape.sinks - first, 0);
        end = std::min(row.end - first, kSegment);
        if (window_begin >= end) end = std::min(end, sinks);
        begin = sinks > 0 ? 0 : std::max(window_begin, 0);
        gap_begin = std::min(sinks, end);
        gap_end = std::min(std::max(window_begin, gap_begin), end);
        plain_end = std::max(std::min(row.plain_end - first, end), 0);
        path = row.path == nullptr ? nullptr : row.path + std::max(first - row.plain_end, 0);
    }

    bool is_empty() const { return begin >= end; }
};

// One sequence divided into items: heads, blocks of queries and, if these are too few to keep
// `num_threads` threads busy, segments. The results do not depend on the division.
struct Work {
    int num_heads, num_blocks, num_segments;
    int num_queries;        // of a head: R * G
    bool is_split;          // by segments, whose results must be combined,
    size_t first_partial;   // from here on in the workspace

    Work(const AttentionPart& part, int num_threads, size_t first_partial)
        : num_heads(part.shape.num_kv_heads),
          num_segments(ceil_divide(context_of(*part.rows), kSegment)),
          num_queries(part.rows->num_rows * part.shape.query_groups),
          is_split(false),
          first_partial(first_partial) {
        num_blocks = ceil_divide(num_queries, kBlock);
        const int most_blocks = ceil_divide(num_queries, kBatch);
        while (!is_balanced(num_threads) && num_blocks < most_blocks)
            num_blocks = std::min(2 * num_blocks, most_blocks);
        if (is_balanced(num_threads) || num_segments == 1) return;
        is_split = first_partial + partial_floats(part.shape) <= kMaxPartialFloats;
        if (is_split) num_blocks = ceil_divide(num_queries, kBlock);
    }

    // Whether unsplit items give no thread much more work than the mean.
    bool is_balanced(int num_threads) const {
        const int items = num_heads * num_blocks;
        return 8 * ceil_divide(items, num_threads) * num_threads <= 9 * items;
    }

    size_t partial_floats(const AttentionShape& shape) const {
        return size_t(num_heads) * num_queries * num_segments * partial_size(shape.head_dim);
    }
    int first_query(int block) const { return int(int64_t(num_queries) * block / num_blocks); }
    int num_items() const { return num_heads * num_blocks * (is_split ? num_segments : 1); }
};

struct Item {
    int head, first_query, end_query, first_segment, end_segment;

    Item(const Work& work, int index) {
        first_segment = work.is_split ? index % work.num_segments : 0;
        end_segment = work.is_split ? first_segment + 1 : work.num_segments;
        if (work.is_split) index /= work.num_segments;
        const int block = index % work.num_blocks;
        head = index / work.num_blocks;
        first_query = work.first_query(block);
        end_query = work.first_query(block + 1);
    }

    // Time, roughly: reading a position takes as long as eight queries attending to it.
    int64_t cost(const AttentionPart& part) const {
        const RowView last(*part.rows, (end_query - 1) / part.shape.query_groups);
        const int begin = std::max(last.window_begin(part.shape), first_segment * kSegment);
        const int end = std::min(last.end, end_segment * kSegment);
        return int64_t(std::max(end - begin, kLanes)) * (end_query - first_query + 8);
    }
};

inline int64_t cost_of(const Work& work, const AttentionPart& part) {
    int64_t total = 0;
    for (int i = 0; i < work.num_items(); ++i) total += Item(work, i).cost(part);
    return total;
}

// The sequences of a pass, each divided among as many threads as its part of the work takes.
class Division {
public:
    Division(const AttentionPart* parts, int num, int num_threads)
        : parts_(parts), num_threads_(num_threads) {
        works.reserve(num);
        for (int i = 0; i < num; ++i) {
            works.emplace_back(parts[i], num == 1 ? num_threads : 1, 0);
            if (num_threads > 1) total_ += cost_of(works[i], parts[i]);
        }
        if (num == 1 || num_threads == 1) return;
        size_t first_partial = 0;
        for (int i = 0; i < num; ++i) {
            const int64_t cost = cost_of(works[i], parts[i]) * num_threads;
            if (cost <= total_) continue;
            works[i] = Work(parts[i], int((cost + total_ - 1) / total_), first_partial);
            if (works[i].is_split) first_partial += works[i].partial_floats(parts[i].shape);
        }
        total_ = 0;
        for (int i = 0; i < num; ++i) total_ += cost_of(works[i], parts[i]);
    }

    // Whether partial results must be combined, once all threads have finished their items.
    bool is_split() const {
        return std::any_of(works.begin(), works.end(), [](const Work& work) { return work.is_split; });
    }

    // Pass the items of one thread to `work_on`, with their sequence's number: consecutive ones, with
    // about equal cost a thread.
    template <class WorkOn>
    void for_each_item(int thread, WorkOn work_on) const {
        int64_t before = 0;
        for (int index = 0; index < int(works.size()); ++index)
            for (int i = 0; i < works[index].num_items(); ++i) {
                const Item item(works[index], i);
                if (num_threads_ > 1) {
                    const int64_t cost = item.cost(parts_[index]);
                    const int64_t owner = (before + cost / 2) * num_threads_ / total_;
                    before += cost;
                    if (owner != thread) continue;
                }
                work_on(index, item);
            }
    }

    std::vector<Work> works;

private:
    const AttentionPart* parts_;
    int num_threads_;
    int64_t total_ = 0;     // cost of all items, if there are several threads
};

}  // namespace attention
}  // namespace polybasic
