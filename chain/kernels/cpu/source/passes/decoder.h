// A pass of a decoder, or of a draft head's layer, over a few rows: every thread of a team runs
// `forward`, does its share of each step and waits for the others before the next.
//
//   R = rows, D = hidden size, I = intermediate size, H = head size
//   N = query heads, K = key/value heads
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "products/matrix.h"
#include "threads/team.h"

namespace polybasic {

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };
enum HeadKind : int32_t { kNoHead = 0, kEagle2 = 2, kEagle3 = 3 };

constexpr int kMaxRows = 256;        // of one pass
constexpr int kMaxHeadBlocks = 16;   // head sizes up to 256
constexpr size_t kMostOwn = 1024;    // numbers of an operand that each thread fills for itself

// Norms are float32, with the offset of the families that have one; null where there is none.
struct Layer {
    Matrix qkv;         // to (N + 2 K) heads of H: queries, keys, values
    Matrix out;
    Matrix gate_up;     // to 2 I: gate, then up
    Matrix down;
    const float* input_norm;
    const float* mlp_norm;
    const float* query_norm;            // [H]
    const float* key_norm;              // [H]
    const float* attention_post_norm;
    const float* mlp_post_norm;
    const void* cosines;                // [positions][H], in the element type of the model
    const void* sines;                  // the same, the first half negative
    int32_t window;                     // positions that a row sees, itself included; 0 for all
};

struct Model {
    int32_t element;            // kFloat32 or kBfloat16: embedding, caches, states, rotary tables
    int32_t num_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t activation;
    int32_t head_kind;
    int32_t num_corrected;      // of a head that gives all positions at once, best tokens of each; or 0
    int32_t markov_rank;        // of its bigrams, a multiple of 16; 0 where there are none
    float norm_eps;
    float attention_scale;
    float attention_softcap;    // 0: none
    float embedding_scale;      // 1: none
    float logit_softcap;        // 0: none
    const Layer* layers;
    const void* embedding;      // [vocabulary][D], or null where it is
    Matrix embedding_codes;     // D -> vocabulary, in blocks
    const float* final_norm;    // [D], or null: an EAGLE-2 head has none
    const float* embedding_norm;    // of an EAGLE-3 head
    const float* feature_norm;      // of an EAGLE-3 head
    const void* markov_in;          // [vocabulary][rank], in the element type of the model
    const void* markov_out;         // [tokens that can be drafted][rank]
    Matrix fc;                  // of an EAGLE-2 head: 2 D -> D
    Matrix lm_head;
    Matrix adapter_down;        // of an early exit: D -> rank; without outputs where there is none
    Matrix adapter_up;          // rank -> D

    int attended_width() const { return num_heads * head_dim; }
};

// Rows of one sequence in a pass, where they are written, and what they attend to.
struct Sequence {
    Rows rows;
    void* const* caches;        // one [2 K][capacity][H] a layer
    int32_t capacity;
    int32_t window_tokens;      // 0: the layers' own windows alone
    int32_t window_sinks;
};

// One sequence's rows after the other's.
struct Input {
    const int64_t* tokens;      // [R]
    const Sequence* sequences;
    int32_t num_sequences;
    int32_t num_rows;
};

inline int position_of(const Rows& rows, int row) {
    if (rows.path_ends == nullptr) return rows.start + row;
    const int begin = row == 0 ? 0 : rows.path_ends[row - 1];
    return rows.prefix + (rows.path_ends[row] - begin) - 1;
}

// Buffers of a model's passes, allocated once.
struct Workspace {
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<float, Free> memory;    // pages that no pass touches stay unused
    std::vector<float> draft_sums;  // of rows that are drafted from, as many as were needed so far
    float* residual;    // [R][D]
    float* features;    // [R][D], of a head
    float* added;       // [R][D]
    float* queries;     // [R][N][H]
    float* attended;    // [R][N * H]
    float* activated;   // [R][I], or [R][rank] of an adapter
    float* attention;
    Operand operand;

    Workspace(const Model& model, int max_rows, int max_context) {
        const size_t rows = max_rows, D = model.hidden_size;
        size_t widest = 2 * D;
        if (size_t(model.intermediate_size) > widest) widest = model.intermediate_size;
        if (size_t(model.attended_width()) > widest) widest = model.attended_width();
        const size_t inner = std::max(model.intermediate_size, model.adapter_down.num_outputs);
        const size_t sizes[] = {
            rows * D,
            model.head_kind == kNoHead ? 0 : rows * D,
            rows * D,
            rows * model.attended_width(),
            rows * model.attended_width(),
            rows * inner,
            attention_workspace_floats(shape_of(model), max_rows, max_context),
            rows * widest,
            rows * (widest / kLanes + 1),
            rows * (widest / kLanes + 1),
            rows * (widest / kLanes + 1),
        };
        float** places[] = {&residual,  &features,  &added,     &queries,
                            &attended,  &activated, &attention, &operand.floats,
                            &operand.scales, &operand.sums, &operand.half_sums};
        size_t num_floats = 0;
        for (size_t size : sizes) num_floats += (size + kLanes - 1) / kLanes * kLanes;
        memory.reset(static_cast<float*>(std::aligned_alloc(64, num_floats * sizeof(float))));
        if (memory == nullptr) throw std::bad_alloc();
        float* at = memory.get();
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            *places[i] = at;
            at += (sizes[i] + kLanes - 1) / kLanes * kLanes;
        }
        operand.pairs = operand.quads = reinterpret_cast<uint32_t*>(operand.floats);
    }

    static AttentionShape shape_of(const Model& model) {
        AttentionShape shape{};
        shape.num_kv_heads = model.num_kv_heads;
        shape.query_groups = model.num_heads / model.num_kv_heads;
        shape.head_dim = model.head_dim;
        shape.scale = model.attention_scale;
        shape.softcap = model.attention_softcap;
        return shape;
    }
};

template <class T>
class Forward {
public:
    Forward(const Model& model, const Input& input, Workspace& space, Thread& self)
        : model_(model), input_(input), space_(space), self_(self), num_rows_(input.num_rows),
          parts_(input.num_sequences) {
        int row = 0;
        for (int index = 0; index < input.num_sequences; ++index) {
            const Sequence& one = input.sequences[index];
            parts_[index] = {Workspace::shape_of(model), &one.rows, row, nullptr};
            parts_[index].shape.capacity = one.capacity;
            for (int i = 0; i < one.rows.num_rows; ++i) places_[row++] = {int16_t(index), int16_t(i)};
        }
    }

    // Embed the tokens and run all layers: `space.residual` is the output of the last one, once all
    // threads have finished. `space.features` must be set for a head. States [R][W] may be null.
    void run(T* states, const int32_t* feature_layers, int num_feature_layers) {
        enter();
        const int width = (1 + num_feature_layers) * model_.hidden_size;
        for (int index = 0; index < model_.num_layers; ++index) {
            for (int i = 0; i < num_feature_layers; ++i)
                if (feature_layers[i] == index) copy_out(states + (1 + i) * model_.hidden_size, width);
            attention(index);
            mlp(model_.layers[index]);
        }
        if (model_.adapter_down.num_outputs > 0) adapt();
        if (states != nullptr) write_final(states, width);
    }

    // The output projection's input: the rows, normed if the model has a final norm, unless they are
    // already.
    void fill_final(int num_rows, bool are_normed) {
        const float* rows = space_.residual;
        if (model_.final_norm != nullptr && !are_normed)
            fill_normed(model_.lm_head, rows, model_.final_norm, num_rows);
        else
            fill(model_.lm_head, rows, model_.hidden_size, num_rows);
    }

    // A product whose tiles [block][row][16] are passed to `emit(blocks, first row, rows, tile)`: `unit`
    // blocks at a time, those of a thread from a multiple of `step` on.
    template <class Emit>
    void multiply(const Matrix& matrix, int unit, int num_rows, Emit emit, int step = 1) {
        const Range mine = share(matrix.num_blocks(), self_.number, self_.num_threads, step);
        for (int block = mine.first; block < mine.end; block += unit)
            multiply_blocks(matrix, {block, block + unit < mine.end ? block + unit : mine.end}, num_rows, emit);
    }

    // At most kMaxHeadBlocks of its blocks.
    template <class Emit>
    void multiply_blocks(const Matrix& matrix, Range blocks, int num_rows, Emit emit) const {
        alignas(64) float tile[kMaxHeadBlocks * kRowsAtOnce * kLanes];
        const Chunks chunks{num_rows};
        for (int chunk = 0; chunk < chunks.num_chunks(); ++chunk) {
            multiply_chunk(matrix, operand_, chunks, chunk, blocks, tile);
            emit(blocks, chunks.first(chunk), chunks.size(chunk), tile);
        }
    }

    int unit_of(const Matrix& matrix) const {
        return matrix.num_blocks() >= 8 * self_.num_threads ? 4 : 2;
    }

private:
    Range my_columns() const {
        return share(model_.hidden_size, self_.number, self_.num_threads, kLanes);
    }

    // The operand of the next product. A small one is filled by each thread for itself, which takes less
    // time than to wait for the others' parts. What was multiplied before has been waited for.
    template <class Read>
    void fill_with(const Matrix& matrix, int width, int num_rows, Read read) {
        const size_t size = size_t(num_rows) * width;
        const bool is_own = size <= kMostOwn && num_rows * self_.num_threads <= kMaxRows;
        const size_t first = is_own ? self_.number * size : 0;
        operand_ = space_.operand;
        operand_.floats += first;
        operand_.pairs += first;
        operand_.quads += first;
        operand_.scales += first / kLanes;
        operand_.sums += first / kLanes;
        operand_.half_sums += first / kLanes;
        fill_operand(matrix, operand_, num_rows,
                     is_own ? Range{0, width}
                            : share(width, self_.number, self_.num_threads, matrix.step()),
                     read);
        if (!is_own) self_.wait();
    }

    void fill(const Matrix& matrix, const float* rows, int width, int num_rows) {
        fill_with(matrix, width, num_rows,
                  [=](int row, int column) { return load(rows + size_t(row) * width + column); });
    }

    float norm_factor(const float* row) const {
        Floats squares{};
        for (int column = 0; column < model_.hidden_size; column += kLanes) {
            const Floats values = load(row + column);
            squares = fused_multiply_add(values, values, squares);
        }
        return 1.0f / std::sqrt(sum(squares) / float(model_.hidden_size) + model_.norm_eps);
    }

    // Every thread needs the factors of all rows, so each computes them itself instead of waiting.
    void compute_factors(const float* rows, int num_rows) {
        for (int row = 0; row < num_rows; ++row)
            factors_[row] = norm_factor(rows + size_t(row) * model_.hidden_size);
    }

    void fill_normed(const Matrix& matrix, const float* rows, const float* norm, int num_rows) {
        compute_factors(rows, num_rows);
        const int D = model_.hidden_size;
        const float* factors = factors_;
        fill_with(matrix, D, num_rows, [=](int row, int column) {
            return load(rows + size_t(row) * D + column) * factors[row] * load(norm + column);
        });
    }

    // Sixteen columns of a token's row.
    Floats embedded(int64_t token, int column) const {
        if (model_.embedding == nullptr) return decoded(model_.embedding_codes, token, column);
        return load(static_cast<const T*>(model_.embedding) + token * model_.hidden_size + column);
    }

    void enter() {
        const int D = model_.hidden_size;
        const int64_t* tokens = input_.tokens;
        if (model_.head_kind == kEagle2) {
            const float* features = space_.features;
            fill_with(model_.fc, 2 * D, num_rows_, [=](int row, int column) {
                return column < D ? embedded(tokens[row], column)
                                  : load(features + size_t(row) * D + column - D);
            });
            multiply(model_.fc, unit_of(model_.fc), num_rows_, store_rows(space_.residual, D));
        } else {
            const Range columns = my_columns();
            for (int row = 0; row < num_rows_; ++row)
                for (int column = columns.first; column < columns.end; column += kLanes) {
                    const size_t at = size_t(row) * D + column;
                    store(space_.residual + at,
                          model_.head_kind == kEagle3
                              ? load(space_.features + at)
                              : embedded(tokens[row], column) * model_.embedding_scale);
                }
        }
        self_.wait();
    }

    // The input of an EAGLE-3 head's attention: embedding and feature, each normed, side by side.
    void fill_side_by_side(const Matrix& matrix) {
        const int D = model_.hidden_size;
        const int64_t* tokens = input_.tokens;
        float embedding_factors[kMaxRows];
        std::vector<float> token_row(D);
        for (int row = 0; row < num_rows_; ++row) {
            for (int column = 0; column < D; column += kLanes)
                store(token_row.data() + column, embedded(tokens[row], column));
            embedding_factors[row] = norm_factor(token_row.data());
        }
        compute_factors(space_.features, num_rows_);
        const float *factors = factors_, *by_token = embedding_factors;
        fill_with(matrix, 2 * D, num_rows_, [=](int row, int column) {
            if (column < D)
                return embedded(tokens[row], column) * by_token[row] *
                       load(model_.embedding_norm + column);
            column -= D;
            return load(space_.features + size_t(row) * D + column) * factors[row] *
                   load(model_.feature_norm + column);
        });
    }

    void attention(int index) {
        const Layer& layer = model_.layers[index];
        if (index == 0 && model_.head_kind == kEagle3)
            fill_side_by_side(layer.qkv);
        else if (layer.input_norm != nullptr)
            fill_normed(layer.qkv, space_.residual, layer.input_norm, num_rows_);
        else
            fill(layer.qkv, space_.residual, model_.hidden_size, num_rows_);
        const int blocks_of_head = model_.head_dim / kLanes;
        multiply(layer.qkv, blocks_of_head, num_rows_,
                 [&](Range blocks, int first, int rows, const float* tile) {
                     for (int row = 0; row < rows; ++row)
                         place_head(index, blocks.first / blocks_of_head, first + row,
                                    tile + row * kLanes, rows * kLanes);
                 },
                 blocks_of_head);
        self_.wait();
        for (int i = 0; i < input_.num_sequences; ++i) {
            const Sequence& one = input_.sequences[i];
            AttentionShape& shape = parts_[i].shape;
            const bool is_narrower =
                one.window_tokens > 0 && (layer.window == 0 || one.window_tokens < layer.window);
            shape.window = is_narrower ? one.window_tokens : layer.window;
            shape.sinks = is_narrower ? one.window_sinks : 0;
            parts_[i].cache = one.caches[index];
        }
        attend<T>(parts_.data(), input_.num_sequences, space_.queries, space_.attended,
                  space_.attention, self_);
        self_.wait();
        fill(layer.out, space_.attended, model_.attended_width(), num_rows_);
        add(layer.out, layer.attention_post_norm);
    }

    // Norm and rotate one head of a row; `values` + i * stride are its values 16 i..16 i + 16.
    void place_head(int index, int head, int row, const float* values, int stride) {
        const Layer& layer = model_.layers[index];
        const Sequence& sequence = input_.sequences[places_[row].sequence];
        const int own_row = places_[row].row, capacity = sequence.capacity;
        T* cache = static_cast<T*>(sequence.caches[index]);
        const int H = model_.head_dim, N = model_.num_heads, K = model_.num_kv_heads;
        const int cache_row = sequence.rows.start + own_row;
        alignas(64) float placed[kMaxHeadBlocks * kLanes];
        for (int i = 0; i < H / kLanes; ++i) store(placed + i * kLanes, load(values + i * stride));
        if (head >= N + K) {
            T* to = cache + (size_t(head - N) * capacity + cache_row) * H;
            for (int i = 0; i < H; i += kLanes) store(to + i, load(placed + i));
            return;
        }
        const float* norm = head < N ? layer.query_norm : layer.key_norm;
        if (norm != nullptr) norm_head(placed, norm);
        rotate(layer, position_of(sequence.rows, own_row), placed);
        if (head < N) {
            float* to = space_.queries + (size_t(row) * N + head) * H;
            for (int i = 0; i < H; i += kLanes) store(to + i, load(placed + i));
        } else {
            T* to = cache + (size_t(head - N) * capacity + cache_row) * H;
            for (int i = 0; i < H; i += kLanes) store(to + i, load(placed + i));
        }
    }

    void norm_head(float* values, const float* norm) const {
        const int H = model_.head_dim;
        Floats squares{};
        for (int i = 0; i < H; i += kLanes)
            squares = fused_multiply_add(load(values + i), load(values + i), squares);
        const float factor = 1.0f / std::sqrt(sum(squares) / float(H) + model_.norm_eps);
        for (int i = 0; i < H; i += kLanes)
            store(values + i, load(values + i) * factor * load(norm + i));
    }

    void rotate(const Layer& layer, int position, float* values) const {
        const int H = model_.head_dim, half = H / 2;
        const T* cosines = static_cast<const T*>(layer.cosines) + size_t(position) * H;
        const T* sines = static_cast<const T*>(layer.sines) + size_t(position) * H;
        alignas(64) float rotated[kMaxHeadBlocks * kLanes];
        if (half % kLanes == 0) {
            for (int i = 0; i < H; i += kLanes) {
                const int other = i < half ? i + half : i - half;
                store(rotated + i, fused_multiply_add(load(values + other), load(sines + i),
                                                      load(values + i) * load(cosines + i)));
            }
        } else {
            for (int i = 0; i < H; ++i)
                rotated[i] = values[i] * widen(cosines[i]) + values[(i + half) % H] * widen(sines[i]);
        }
        std::memcpy(values, rotated, H * sizeof(float));
    }

    void mlp(const Layer& layer) {
        fill_normed(layer.gate_up, space_.residual, layer.mlp_norm, num_rows_);
        gate(layer.gate_up);
        self_.wait();
        fill(layer.down, space_.activated, model_.intermediate_size, num_rows_);
        add(layer.down, layer.mlp_post_norm);
    }

    // One thread computes both gate and up of its neurons and multiplies them.
    void gate(const Matrix& matrix) {
        constexpr int kUnit = 4;
        alignas(64) float gates[kUnit * kRowsAtOnce * kLanes], ups[kUnit * kRowsAtOnce * kLanes];
        const int I = model_.intermediate_size, num_blocks = I / kLanes;
        const Chunks chunks{num_rows_};
        const Range mine = share(num_blocks, self_.number, self_.num_threads);
        for (int block = mine.first; block < mine.end; block += kUnit) {
            const int end = block + kUnit < mine.end ? block + kUnit : mine.end;
            for (int chunk = 0; chunk < chunks.num_chunks(); ++chunk) {
                const int first = chunks.first(chunk), rows = chunks.size(chunk);
                multiply_chunk(matrix, operand_, chunks, chunk, {block, end}, gates);
                multiply_chunk(matrix, operand_, chunks, chunk,
                               {num_blocks + block, num_blocks + end}, ups);
                const float *gate = gates, *up = ups;
                for (int at = block; at < end; ++at)
                    for (int row = 0; row < rows; ++row, gate += kLanes, up += kLanes)
                        store(space_.activated + size_t(first + row) * I + at * kLanes,
                              activate(load(gate)) * load(up));
            }
        }
    }

    Floats activate(Floats x) const {
        if (model_.activation == kSilu) return x / (exponential(-x) + 1.0f);
        // gelu: x times the logistic function of 2 u, for u = sqrt(2 / pi) (x + 0.044715 x^3)
        const Floats cubed = x * x * x;
        const Floats u = fused_multiply_add(cubed, broadcast(0.044715f), x) * 0.7978845608f;
        return x / (exponential(u * -2.0f) + 1.0f);
    }

    auto store_rows(float* to, int width) {
        return [=](Range blocks, int first, int rows, const float* tile) {
            for (int block = blocks.first; block < blocks.end; ++block)
                for (int row = 0; row < rows; ++row, tile += kLanes)
                    store(to + size_t(first + row) * width + block * kLanes, load(tile));
        };
    }

    // Add to the rows what the adapter makes of them.
    void adapt() {
        const Matrix& down = model_.adapter_down;
        const int rank = down.num_outputs;
        fill(down, space_.residual, model_.hidden_size, num_rows_);
        multiply(down, unit_of(down), num_rows_, store_rows(space_.activated, rank));
        self_.wait();
        fill(model_.adapter_up, space_.activated, rank, num_rows_);
        add(model_.adapter_up, nullptr);
    }

    // Add a product to the residual, normed if the family requires it.
    void add(const Matrix& matrix, const float* norm) {
        const int D = model_.hidden_size;
        if (norm == nullptr) {
            multiply(matrix, unit_of(matrix), num_rows_,
                     [&](Range blocks, int first, int rows, const float* tile) {
                         for (int block = blocks.first; block < blocks.end; ++block)
                             for (int row = 0; row < rows; ++row, tile += kLanes) {
                                 float* to =
                                     space_.residual + size_t(first + row) * D + block * kLanes;
                                 store(to, load(to) + load(tile));
                             }
                     });
            self_.wait();
            return;
        }
        multiply(matrix, unit_of(matrix), num_rows_, store_rows(space_.added, D));
        self_.wait();
        compute_factors(space_.added, num_rows_);
        const Range columns = my_columns();
        for (int row = 0; row < num_rows_; ++row)
            for (int column = columns.first; column < columns.end; column += kLanes) {
                const size_t at = size_t(row) * D + column;
                const Floats normed = load(space_.added + at) * factors_[row] * load(norm + column);
                store(space_.residual + at, load(space_.residual + at) + normed);
            }
        self_.wait();
    }

    void copy_out(T* to, int width) const {
        const Range columns = my_columns();
        for (int row = 0; row < num_rows_; ++row)
            for (int column = columns.first; column < columns.end; column += kLanes)
                store(to + size_t(row) * width + column,
                      load(space_.residual + size_t(row) * model_.hidden_size + column));
    }

    void write_final(T* states, int width) {
        if (model_.final_norm == nullptr || model_.head_kind == kEagle3) return copy_out(states, width);
        compute_factors(space_.residual, num_rows_);
        const Range columns = my_columns();
        for (int row = 0; row < num_rows_; ++row)
            for (int column = columns.first; column < columns.end; column += kLanes)
                store(states + size_t(row) * width + column,
                      load(space_.residual + size_t(row) * model_.hidden_size + column) *
                          factors_[row] * load(model_.final_norm + column));
    }

    const Model& model_;
    const Input& input_;
    Workspace& space_;
    Thread& self_;
    const int num_rows_;
    std::vector<AttentionPart> parts_;      // of the layer at hand
    Operand operand_;           // of the product at hand
    float factors_[kMaxRows];
    struct Place {
        int16_t sequence, row;
    } places_[kMaxRows];
};

}  // namespace polybasic
