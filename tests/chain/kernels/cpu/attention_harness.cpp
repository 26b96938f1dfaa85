// What tests/chain/kernels/cpu/test_attention.py calls in chain/kernels/cpu/source/attention/attention.h.
#include "attention/attention.h"

#include <cstdlib>
#include <limits>

using namespace polybasic;

namespace {

// The threads of a team, one after the other. Returns whether the pass was split by segments, or -1
// if something was written beyond the workspace.
template <class T, class Out>
int attend_in_parts(const AttentionShape& shape, const Rows& rows, const float* queries,
                    const T* cache, Out* out, int num_threads) {
    constexpr float kGuard = 12345.0f;
    constexpr size_t kNumGuards = 1024;
    const size_t size = attention_workspace_floats(shape, rows.num_rows, shape.capacity);
    float* workspace = static_cast<float*>(std::malloc((size + kNumGuards) * sizeof(float)));
    for (size_t i = 0; i < size; ++i) workspace[i] = std::numeric_limits<float>::quiet_NaN();
    for (size_t i = size; i < size + kNumGuards; ++i) workspace[i] = kGuard;
    const AttentionPart part{shape, &rows, 0, cache};
    const attention::Division division(&part, 1, num_threads);
    for (int thread = 0; thread < num_threads; ++thread)
        attend_share<T>(&part, division, queries, out, workspace, thread);
    for (int thread = 0; thread < num_threads; ++thread)
        combine_share<T>(&part, division, out, workspace, thread, num_threads);
    bool is_intact = true;
    for (size_t i = size; i < size + kNumGuards; ++i) is_intact &= workspace[i] == kGuard;
    std::free(workspace);
    return is_intact ? division.is_split() : -1;
}

}  // namespace

extern "C" {

int test_attend(int is_bfloat16, const AttentionShape* shape, const Rows* rows, const float* queries,
                const void* cache, float* out, int num_threads) {
    if (is_bfloat16)
        return attend_in_parts(*shape, *rows, queries, static_cast<const Bfloat16*>(cache), out,
                               num_threads);
    return attend_in_parts(*shape, *rows, queries, static_cast<const float*>(cache), out, num_threads);
}

// The same with results rounded to bfloat16.
int test_attend_rounded(const AttentionShape* shape, const Rows* rows, const float* queries,
                        const void* cache, void* out, int num_threads) {
    return attend_in_parts(*shape, *rows, queries, static_cast<const Bfloat16*>(cache),
                           static_cast<Bfloat16*>(out), num_threads);
}

int test_supports(const AttentionShape* shape) { return supports(*shape); }

void test_exponential(const float* x, float* out) { store(out, exponential(load(x))); }

void test_softcapped(const float* x, float cap, float* out) { store(out, softcapped(load(x), cap)); }

// Of sixteen vectors: `sum_each` of all, and `sum` and `largest` of each.
void test_sums(const float* vectors, float* sums, float* each, float* largest_each) {
    Floats read[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        read[i] = load(vectors + i * kLanes);
        each[i] = sum(read[i]);
        largest_each[i] = largest(read[i]);
    }
    store(sums, sum_each(read));
}
}
