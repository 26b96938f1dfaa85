// What the rows of a pass see of the cache, and how the work is divided among threads.
//
//   R = rows, K = key/value heads, G = query heads that read one of them, H = head size
#pragma once

#include <algorithm>
#include <cstddef>

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

// A pass divided into items: heads, blocks of queries and, if these are too few to keep all threads
// busy, segments. The results do not depend on the division.
struct Work {
    int num_heads, num_blocks, num_segments;
    int num_queries;    // of a head: R * G
    bool is_split;      // by segments, whose results must be combined

    Work(const AttentionShape& shape, const Rows& rows, int num_threads)
        : num_heads(shape.num_kv_heads),
          num_segments(ceil_divide(context_of(rows), kSegment)),
          num_queries(rows.num_rows * shape.query_groups),
          is_split(false) {
        num_blocks = ceil_divide(num_queries, kBlock);
        const int most_blocks = ceil_divide(num_queries, kBatch);
        while (!is_balanced(num_threads) && num_blocks < most_blocks)
            num_blocks = std::min(2 * num_blocks, most_blocks);
        if (is_balanced(num_threads) || num_segments == 1) return;
        is_split = num_partials() * partial_size(shape.head_dim) <= kMaxPartialFloats;
        if (is_split) num_blocks = ceil_divide(num_queries, kBlock);
    }

    // Whether unsplit items give no thread much more work than the mean.
    bool is_balanced(int num_threads) const {
        const int items = num_heads * num_blocks;
        return 8 * ceil_divide(items, num_threads) * num_threads <= 9 * items;
    }

    size_t num_partials() const { return size_t(num_heads) * num_queries * num_segments; }
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
    int64_t cost(const AttentionShape& shape, const Rows& rows) const {
        const RowView last(rows, (end_query - 1) / shape.query_groups);
        const int begin = std::max(last.window_begin(shape), first_segment * kSegment);
        const int end = std::min(last.end, end_segment * kSegment);
        return int64_t(std::max(end - begin, kLanes)) * (end_query - first_query + 8);
    }
};

// Pass the items of one thread to `work_on`: consecutive ones, with about equal cost a thread.
template <class WorkOn>
void for_each_item(const AttentionShape& shape, const Rows& rows, const Work& work, int thread,
                   int num_threads, WorkOn work_on) {
    const int num_items = work.num_items();
    int64_t total = 0, before = 0;
    if (num_threads > 1)
        for (int i = 0; i < num_items; ++i) total += Item(work, i).cost(shape, rows);
    for (int i = 0; i < num_items; ++i) {
        const Item item(work, i);
        if (num_threads > 1) {
            const int64_t cost = item.cost(shape, rows);
            const int64_t owner = (before + cost / 2) * num_threads / total;
            before += cost;
            if (owner != thread) continue;
        }
        work_on(item);
    }
}

}  // namespace attention
}  // namespace polybasic
