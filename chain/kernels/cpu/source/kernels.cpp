// The functions that polybasic.chain.kernels.cpu.library and .passes call.

#include "draft.h"

namespace polybasic {
namespace {

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
        widen_features<T>(model, pass.features, pass.input.rows.num_rows, space);
    Team::run(num_threads, [&](Thread self) {
        Forward<T>(model, pass.input, space, self)
            .run(static_cast<T*>(pass.states), pass.feature_layers, pass.num_feature_layers);
    });
}

template <class T>
void run_draft(const Model& model, const DraftShape& shape, Workspace& space, int num_threads) {
    Draft<T> draft(model, shape, space, num_threads);
    Team::run(num_threads, [&](Thread self) { draft.run(self); });
}

// out [R][O] = x [R][I] times the matrix, both in T.
template <class T>
void run_product(const Matrix& matrix, const void* rows, void* out, int num_rows, float* memory,
                 int num_threads) {
    const T* x = static_cast<const T*>(rows);
    T* y = static_cast<T*>(out);
    const size_t width = matrix.num_inputs, size = size_t(num_rows) * width;
    Operand operand{};
    operand.floats = memory;
    operand.pairs = operand.quads = reinterpret_cast<uint32_t*>(memory);
    operand.scales = memory + size;
    operand.sums = operand.scales + size / kLanes + kLanes;
    Team::run(num_threads, [&](Thread self) {
        const int step = matrix.format == kInt4 ? matrix.group_size : kLanes;
        fill_operand(matrix, operand, num_rows,
                     share(matrix.num_inputs, self.number, self.num_threads, step),
                     [=](int row, int column) { return load(x + row * width + column); });
        self.wait();
        alignas(64) float tile[4 * kRowsAtOnce * kLanes];
        const int unit = matrix.num_blocks() >= 8 * self.num_threads ? 4 : 1;
        const Range mine = share(matrix.num_blocks(), self.number, self.num_threads, unit);
        const Chunks chunks{num_rows};
        for (int block = mine.first; block < mine.end; block += unit) {
            const Range blocks{block, block + unit < mine.end ? block + unit : mine.end};
            for (int chunk = 0; chunk < chunks.num_chunks(); ++chunk) {
                const int rows_of_chunk = chunks.size(chunk);
                multiply_chunk(matrix, operand, chunks, chunk, blocks, tile);
                const float* from = tile;
                for (int at = blocks.first; at < blocks.end; ++at)
                    for (int row = 0; row < rows_of_chunk; ++row, from += kLanes) {
                        T* to = y + size_t(chunks.first(chunk) + row) * matrix.num_outputs +
                                at * kLanes;
                        if ((at + 1) * kLanes <= matrix.num_outputs) {
                            store(to, load(from));
                        } else {
                            for (int lane = 0; at * kLanes + lane < matrix.num_outputs; ++lane)
                                round_to(to + lane, from[lane]);
                        }
                    }
            }
        }
    });
}

}  // namespace
}  // namespace polybasic

using namespace polybasic;

extern "C" {

// To be raised with every change of a structure or signature below.
int polybasic_version() { return 1; }

void polybasic_use_openmp(void* parallel, void* thread_number, void* num_threads) {
    open_mp().parallel =
        reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(parallel);
    open_mp().thread_number = reinterpret_cast<int (*)()>(thread_number);
    open_mp().num_threads = reinterpret_cast<int (*)()>(num_threads);
}

void* polybasic_new_workspace(const Model* model, int max_context) {
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

void polybasic_draft(const Model* model, const DraftShape* shape, void* space, int num_threads) {
    Workspace& workspace = *static_cast<Workspace*>(space);
    if (model->element == kBfloat16)
        run_draft<Bfloat16>(*model, *shape, workspace, num_threads);
    else
        run_draft<float>(*model, *shape, workspace, num_threads);
}

// `memory`: R * I * 9 / 8 + 32 floats.
void polybasic_product(const Matrix* matrix, int element, const void* rows, void* out, int num_rows,
                       float* memory, int num_threads) {
    if (element == kBfloat16)
        run_product<Bfloat16>(*matrix, rows, out, num_rows, memory, num_threads);
    else
        run_product<float>(*matrix, rows, out, num_rows, memory, num_threads);
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
