// What the library does, for one element type of a model: each unit of them is compiled by itself.
#pragma once

#include "passes/positions.h"

namespace polybasic {

struct Pass {
    Input input;
    const void* features;           // [R][D] in the model's element type, of a head; else null
    const int32_t* feature_layers;
    int32_t num_feature_layers;
    void* states;                   // [R][W]
};

template <class T>
void widen_features(const Model& model, const void* features, int num_rows, Workspace& space) {
    const T* from = static_cast<const T*>(features);
    const size_t size = size_t(num_rows) * model.hidden_size;
    for (size_t i = 0; i < size; i += kLanes) store(space.features + i, load(from + i));
}

template <class T>
void run_pass(const Model& model, const Pass& pass, Workspace& space, int num_threads) {
    if (pass.features != nullptr)
        widen_features<T>(model, pass.features, pass.input.num_rows, space);
    Team::run(num_threads, [&](Thread self) {
        Forward<T>(model, pass.input, space, self)
            .run(static_cast<T*>(pass.states), pass.feature_layers, pass.num_feature_layers);
    });
}

template <class T>
void run_drafts(const Model& model, const DraftShape* shapes, int num, Workspace& space,
                int num_threads) {
    const auto run = [&](auto&& drafts) {
        Team::run(num_threads, [&](Thread self) { drafts.run(self); });
    };
    if (model.num_corrected > 0)
        run(PositionDrafts<T>(model, shapes, num, space, num_threads));
    else
        run(Drafts<T>(model, shapes, num, space, num_threads));
}

// out [R][O] = x [R][I] times the matrix, both in T; `of_rows` as `Lists` has them.
template <class T>
void run_product(const Matrix& matrix, const void* rows, void* out, int num_rows, float* memory,
                 const uint8_t* const* of_rows, int num_threads) {
    const T* x = static_cast<const T*>(rows);
    T* y = static_cast<T*>(out);
    const size_t width = matrix.num_inputs, size = size_t(num_rows) * width;
    Operand operand{};
    operand.floats = memory;
    operand.pairs = operand.quads = reinterpret_cast<uint32_t*>(memory);
    operand.scales = memory + size;
    operand.sums = operand.scales + size / kLanes + kLanes;
    operand.half_sums = operand.sums + size / kLanes + kLanes;
    const Lists lists(of_rows, num_rows, matrix.num_blocks());
    Team::run(num_threads, [&](Thread self) {
        fill_operand(matrix, operand, num_rows,
                     share(matrix.num_inputs, self.number, self.num_threads, matrix.step()),
                     [=](int row, int column) { return load(x + row * width + column); });
        self.wait();
        alignas(64) float tile[4 * kRowsAtOnce * kLanes];
        const int unit = matrix.num_blocks() >= 8 * self.num_threads ? 4 : 1;
        const Chunks chunks{num_rows};
        lists.for_each_part(self, unit, 1, [&](Range blocks) {
            for (int chunk = 0; chunk < chunks.num_chunks(); ++chunk) {
                multiply_chunk(matrix, operand, chunks, chunk, blocks, tile);
                const float* from = tile;
                for (int at = blocks.first; at < blocks.end; ++at)
                    for (int i = 0; i < chunks.size(chunk); ++i, from += kLanes) {
                        const int row = chunks.first(chunk) + i, column = at * kLanes;
                        if (!lists.has(row, at)) continue;
                        T* to = y + size_t(row) * matrix.num_outputs + column;
                        if (column + kLanes <= matrix.num_outputs)
                            store(to, load(from));
                        else
                            for (int lane = 0; column + lane < matrix.num_outputs; ++lane)
                                round_to(to + lane, from[lane]);
                    }
            }
        });
        T none;
        round_to(&none, -INFINITY);
        lists.for_each_other(num_rows, self, [&](int row, int unit) {
            constexpr int kSize = Lists::kUnit * kLanes;
            T* to = y + size_t(row) * matrix.num_outputs + unit * kSize;
            std::fill_n(to, std::min(kSize, matrix.num_outputs - unit * kSize), none);
        });
    });
}

#define POLYBASIC_INSTANTIATE(EXTERN, T)                                                           \
    EXTERN template void run_pass<T>(const Model&, const Pass&, Workspace&, int);                  \
    EXTERN template void run_drafts<T>(const Model&, const DraftShape*, int, Workspace&, int);     \
    EXTERN template void run_product<T>(const Matrix&, const void*, void*, int, float*,            \
                                         const uint8_t* const*, int);

}  // namespace polybasic
