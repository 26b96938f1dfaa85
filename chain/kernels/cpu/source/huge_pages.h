// Weights in pages of 2 MB. Each pass reads all of them once, more than the processor can keep the
// addresses of in pages of 4 KB: looking these up takes a tenth of a pass's time.
#pragma once

#include "passes/decoder.h"

#if defined(__linux__)
#include <cerrno>

#include <sys/mman.h>
#endif

namespace polybasic {

// Let the system move what lies around `bytes` from `begin` on into huge pages, in place. Where it
// cannot, everything stays as it was. False if it has no more of them.
inline bool use_huge_pages(const void* begin, size_t bytes) {
#if defined(__linux__)
    constexpr int kCollapse = 25;   // MADV_COLLAPSE, since Linux 6.1
    constexpr uintptr_t kPage = uintptr_t(1) << 21;
    const uintptr_t first = reinterpret_cast<uintptr_t>(begin), end = first + bytes;
    for (uintptr_t page = first / kPage * kPage; page < end; page += kPage)
        if (madvise(reinterpret_cast<void*>(page), kPage, kCollapse) != 0 && errno == ENOMEM)
            return false;
#endif
    return true;
}

inline void use_huge_pages(const Model& model) {
    std::vector<const Matrix*> matrices{&model.fc, &model.lm_head};
    for (int index = 0; index < model.num_layers; ++index) {
        const Layer& layer = model.layers[index];
        matrices.insert(matrices.end(), {&layer.qkv, &layer.out, &layer.gate_up, &layer.down});
    }
    for (const Matrix* matrix : matrices)
        for (; matrix != nullptr && matrix->weights != nullptr; matrix = matrix->rest)
            if (!use_huge_pages(matrix->weights, matrix->weight_bytes())) return;
}

}  // namespace polybasic
