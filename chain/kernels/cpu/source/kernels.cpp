// The functions that polybasic.chain.kernels.cpu.library and .passes call.

#include "products/block_rows.h"
#include "huge_pages.h"
#include "noise.h"
#include "passes/passes.h"
#include "sampling.h"

namespace polybasic {

POLYBASIC_INSTANTIATE(extern, float)
POLYBASIC_INSTANTIATE(extern, Bfloat16)

namespace {

// Of the low and the high word of a seed, and the choice; null where nothing is random.
NoiseKey key_of(const int64_t* words) {
    return words ? NoiseKey{uint32_t(words[0]), uint32_t(words[1]), uint32_t(words[2])} : NoiseKey{};
}

// run(logits, thread) on threads that share so many rows, the logits of their own type.
template <class Run>
void share_rows(const void* logits, int element, int num_rows, int num_threads, Run run) {
    Team::run(std::min(num_threads, num_rows), [&](Thread self) {
        if (element == kBfloat16)
            run(static_cast<const Bfloat16*>(logits), self);
        else
            run(static_cast<const float*>(logits), self);
    });
}

}  // namespace
}  // namespace polybasic

using namespace polybasic;

extern "C" {

// To be raised with every change of a structure or signature below.
int polybasic_version() { return 12; }

void polybasic_use_openmp(void* parallel, void* thread_number, void* num_threads) {
    open_mp().parallel =
        reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(parallel);
    open_mp().thread_number = reinterpret_cast<int (*)()>(thread_number);
    open_mp().num_threads = reinterpret_cast<int (*)()>(num_threads);
}

void* polybasic_new_workspace(const Model* model, int max_context) {
    use_huge_pages(*model);
    return new Workspace(*model, kMaxRows, max_context);
}

void polybasic_delete_workspace(void* space) { delete static_cast<Workspace*>(space); }

void polybasic_pass(const Model* model, const Pass* pass, void* space, int num_threads) {
    Workspace& workspace = *static_cast<Workspace*>(space);
    if (model->element == kBfloat16)
        run_pass<Bfloat16>(*model, *pass, workspace, num_threads);
    else
        run_pass<float>(*model, *pass, workspace, num_threads);
}

void polybasic_drafts(const Model* model, const DraftShape* shapes, int num, void* space,
                      int num_threads) {
    Workspace& workspace = *static_cast<Workspace*>(space);
    if (model->element == kBfloat16)
        run_drafts<Bfloat16>(*model, shapes, num, workspace, num_threads);
    else
        run_drafts<float>(*model, shapes, num, workspace, num_threads);
}

// `memory`: R * I * 19 / 16 + 48 floats. `lists`: see `Lists`.
void polybasic_product(const Matrix* matrix, int element, const void* rows, void* out, int num_rows,
                       float* memory, const uint8_t* const* lists, int num_threads) {
    if (element == kBfloat16)
        run_product<Bfloat16>(*matrix, rows, out, num_rows, memory, lists, num_threads);
    else
        run_product<float>(*matrix, rows, out, num_rows, memory, lists, num_threads);
}

// `rows`: of a file, [own outputs][row_bytes].
void polybasic_lay_out_blocks(const Matrix* matrix, const uint8_t* rows, int64_t row_bytes, int num_threads) {
    Team::run(num_threads, [&](Thread self) { lay_out_blocks(*matrix, rows, row_bytes, self); });
}

// Rows of a matrix in blocks as floats: [num_rows][I].
void polybasic_decode_rows(const Matrix* matrix, const int64_t* outputs, int num_rows, float* to) {
    for (int row = 0; row < num_rows; ++row)
        for (int first = 0; first < matrix->num_inputs; first += kLanes, to += kLanes)
            store(to, decoded(*matrix, outputs[row], first));
}

// `key`: see `key_of`. `out`: [num_positions][num_tokens].
void polybasic_noise(const int64_t* key, const int64_t* positions, int num_positions, int num_tokens,
                     float* out, int num_threads) {
    const NoiseKey words = key_of(key);
    Team::run(num_threads, [&](Thread self) {
        fill_noise(words, positions, num_positions, num_tokens, out, self);
    });
}

// `key`: see `key_of`; like `positions` null at temperature 0. `tokens`: [num_rows], see `Sampler`.
void polybasic_draw(const void* logits, int element, int num_rows, int num_tokens, const Warping* warping,
                    const int64_t* key, const int64_t* positions, int64_t* tokens, int num_threads) {
    const NoiseKey words = key_of(key);
    share_rows(logits, element, num_rows, num_threads, [&](auto values, Thread self) {
        draw_rows(values, num_rows, num_tokens, *warping, words, positions, tokens, self);
    });
}

// `shares`: [num_rows], of `tokens` in `rows` by the softmax; see `Sampler`. The others as above.
void polybasic_shares(const void* logits, int element, int num_rows, int num_tokens, const Warping* warping,
                      const int64_t* key, const int64_t* positions, const int64_t* rows, const int64_t* tokens,
                      float* shares, int num_threads) {
    const NoiseKey words = key_of(key);
    share_rows(logits, element, num_rows, num_threads, [&](auto values, Thread self) {
        find_shares(values, num_rows, num_tokens, *warping, words, positions, rows, tokens, shares, self);
    });
}

// Minus infinity for tokens whose bit is 0, in `logits` [num_rows][num_tokens]. Bits of a row fill
// 32-bit words, the lowest first: `masks` [num_rows][(num_tokens + 31) / 32].
void polybasic_mask(float* logits, const uint32_t* masks, int num_rows, int num_tokens) {
    constexpr int kBits = 32;
    for (int row = 0; row < num_rows; ++row, logits += num_tokens)
        for (int first = 0; first < num_tokens; first += kBits) {
            const uint32_t word = *masks++;
            if (word == ~0u) continue;
            const int num = std::min(kBits, num_tokens - first);
            for (int bit = 0; bit < num; ++bit)  // without a branch, for vectors
                logits[first + bit] = word >> bit & 1 ? logits[first + bit] : -INFINITY;
        }
}

// In each of `num_tensors` tensors [heads][capacity][row_bytes]: copy the rows `sources`, ascending,
// to consecutive places from `first` on.
void polybasic_move_rows(void* const* tensors, int num_tensors, int heads, int64_t capacity,
                         int64_t row_bytes, const int32_t* sources, int num_rows, int first) {
    for (int index = 0; index < num_tensors; ++index)
        for (int head = 0; head < heads; ++head) {
            char* rows = static_cast<char*>(tensors[index]) + head * capacity * row_bytes;
            for (int row = 0; row < num_rows; ++row)
                std::memmove(rows + (first + row) * row_bytes, rows + sources[row] * row_bytes,
                             row_bytes);
        }
}

}  // extern "C"
