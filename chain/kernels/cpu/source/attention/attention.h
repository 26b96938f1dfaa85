// Attention of the rows of a pass over a cache of keys and values.
//
// The positions are cut into segments. In each segment a query has a partial result: the largest
// score, the sum of the weights relative to it, and the weighted values. These are combined in the
// order of the segments. The order of all sums depends on positions alone, so attention is
// batch-invariant: a row's result has the same bits however many rows are beside it, wherever the
// rows of its path are in the cache, and however many threads share the work.
#pragma once

#include "attention/worker_amx.h"
#include "attention/worker.h"

namespace polybasic {

// Whether the kernels serve the shape: heads of 16, 32, ... 256.
inline bool supports(const AttentionShape& shape) {
    return shape.head_dim > 0 && shape.head_dim % kLanes == 0 &&
           shape.head_dim <= attention::kMaxHead;
}

// Size of the workspace of passes of at most `max_rows` rows that see at most `max_context`
// positions, for any number of threads.
inline size_t attention_workspace_floats(const AttentionShape& shape, int max_rows, int max_context) {
    const size_t num_partials = size_t(shape.num_kv_heads) * shape.query_groups * max_rows *
                                attention::ceil_divide(max_context, attention::kSegment);
    return std::min(num_partials * attention::partial_size(shape.head_dim),
                    attention::kMaxPartialFloats);
}

// One thread's share of a pass; all threads of the team call it.
//
//   queries     [R][K * G][H] of all sequences, rotated, not scaled
//   out         [R][K * G][H], float or T
//   workspace   attention_workspace_floats(...)
template <class T, class Out>
void attend_share(const AttentionPart* parts, const attention::Division& division, const float* queries,
                  Out* out, float* workspace, int thread) {
    const auto run = [&](auto head) {
        division.for_each_item(thread, [&](int index, const attention::Item& item) {
#if defined(POLYBASIC_AMX)
            if constexpr (std::is_same_v<T, Bfloat16>)
                if (may_use_amx())
                    return attention::AmxWorker<head.value>(parts[index], division.works[index], queries, workspace)
                        .attend(item, out);
#endif
            attention::Worker<T, head.value>(parts[index], division.works[index], queries, workspace)
                .attend(item, out);
        });
    };
    switch (division.works.empty() ? 0 : parts[0].shape.head_dim) {
        case 64: return run(std::integral_constant<int, 64>{});
        case 128: return run(std::integral_constant<int, 128>{});
        default: return run(std::integral_constant<int, 0>{});
    }
}

// One thread's share of the rest, if the division is split, once all threads have finished theirs.
template <class T, class Out>
void combine_share(const AttentionPart* parts, const attention::Division& division, Out* out,
                   float* workspace, int thread, int num_threads) {
    for (size_t index = 0; index < division.works.size(); ++index) {
        const attention::Work& work = division.works[index];
        if (!work.is_split) continue;
        attention::Worker<T, 0> worker(parts[index], work, nullptr, workspace);
        const int64_t num = int64_t(work.num_heads) * work.num_queries;
        for (int i = int(num * thread / num_threads); i < num * (thread + 1) / num_threads; ++i)
            worker.combine(i / work.num_queries, i % work.num_queries, out);
    }
}

// Both by one thread of a team, with `number`, `num_threads` and `wait()`, which waits for all.
template <class T, class Out, class Thread>
void attend(const AttentionPart* parts, int num, const float* queries, Out* out, float* workspace,
            Thread& self) {
    const attention::Division division(parts, num, self.num_threads);
    attend_share<T>(parts, division, queries, out, workspace, self.number);
    if (!division.is_split()) return;
    self.wait();
    combine_share<T>(parts, division, out, workspace, self.number, self.num_threads);
}

}  // namespace polybasic
