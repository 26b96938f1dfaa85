// Products of a few rows with a matrix: float32, bfloat16 and 4-bit weights.
//
// Outputs come in blocks of sixteen, one lane each, so that every sum runs over the inputs in the
// same order, however many rows are multiplied at a time (batch-invariant).
#pragma once

#include "simd.h"

namespace polybasic {

enum Format : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt4 = 2 };

// Weights of a linear, laid out by polybasic.chain.kernels.cpu.matrices. B blocks of 16 outputs, the last
// one padded with zeros; I inputs; G groups of inputs.
struct Matrix {
    int32_t format;
    int32_t num_outputs;
    int32_t num_inputs;
    int32_t group_size;     // of 4-bit weights: inputs that share a scale, a multiple of 8
    const void* weights;    // float [B][I][16]; bfloat16 [B][I / 2][16][2]; codes [B][I / 8][16][4],
                            // inputs 8 i + j in the low and 8 i + 4 + j in the high half of byte j
    const float* scales;    // [B][G][16]
    const uint8_t* zeros;   // [B][G][16]
    const float* bias;      // [B][16] or null

    int num_blocks() const { return (num_outputs + kLanes - 1) / kLanes; }
    int num_groups() const { return num_inputs / group_size; }
    size_t weight_bytes() const {
        const size_t num_weights = size_t(num_blocks()) * kLanes * num_inputs;
        return format == kFloat32 ? 4 * num_weights
                                  : format == kBfloat16 ? 2 * num_weights : num_weights / 2;
    }
};

constexpr int kRowsAtOnce = 24;

// Rows are multiplied in nearly equal chunks of at most kRowsAtOnce.
struct Chunks {
    int num_rows;
    int num_chunks() const { return (num_rows + kRowsAtOnce - 1) / kRowsAtOnce; }
    int first(int chunk) const { return int(int64_t(num_rows) * chunk / num_chunks()); }
    int size(int chunk) const { return first(chunk + 1) - first(chunk); }
};

// Rows as a matrix of some format reads them: chunk after chunk, in each input by input and the
// rows side by side. For 4-bit weights rows are rounded to eight bits, group by group.
struct Operand {
    float* floats;      // [I][rows of the chunk]; for bfloat16 weights rounded to bfloat16
    uint32_t* pairs;    // two bfloat16 numbers each: [I / 2][rows]; if the processor multiplies pairs
    uint32_t* quads;    // four signed bytes each: [I / 4][rows]
    float* scales;      // [I / group size][rows]
    float* sums;        // the same: sums of the bytes of a group
};

struct Range {
    int first, end;
};

// One thread's part of `size` items, in whole multiples of `step`.
inline Range share(int size, int thread, int num_threads, int step = 1) {
    const int64_t steps = (size + step - 1) / step;
    const int first = int(steps * thread / num_threads) * step;
    const int end = int(steps * (thread + 1) / num_threads) * step;
    return {first, end < size ? end : size};
}

// Sixteen values in the order of an operand of floats: row after row of the same input.
inline void place_floats(float* to, int rows, Floats values) {
    float lanes[kLanes];
    store(lanes, values);
    for (int lane = 0; lane < kLanes; ++lane) to[size_t(lane) * rows] = lanes[lane];
}

inline void place_pairs(uint32_t* to, int rows, Floats values) {
    uint32_t pairs[kLanes / 2];
    store(reinterpret_cast<Bfloat16*>(pairs), values);
    for (int pair = 0; pair < kLanes / 2; ++pair) to[size_t(pair) * rows] = pairs[pair];
}

inline void place_quads(uint32_t* to, int rows, Ints values) {
    int32_t lanes[kLanes];
    std::memcpy(lanes, &values, sizeof values);
    int8_t bytes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) bytes[lane] = int8_t(lanes[lane]);
    uint32_t quads[kLanes / 4];
    std::memcpy(quads, bytes, sizeof quads);
    for (int quad = 0; quad < kLanes / 4; ++quad) to[size_t(quad) * rows] = quads[quad];
}

// The nearest integers of values between -2^22 and 2^22: adding 1.5 * 2^23 rounds to one.
inline Ints nearest(Floats values) { return same_bits<Ints>(values + 12582912.0f) - 0x4b400000; }

// Round a group of inputs of one row to bytes; `read(i)` gives its values i..i + 16.
template <class Read>
void place_group(uint32_t* to, float* scale, float* sum_of_bytes, int size, int rows, Read read) {
    Floats greatest{};
    for (int i = 0; i < size; i += kLanes) {
        const Floats values = read(i);
        greatest = maximum(greatest, maximum(values, -values));
    }
    const float limit = largest(greatest);
    const float factor = limit > 0 ? 127.0f / limit : 0.0f;
    Ints total{};
    for (int i = 0; i < size; i += kLanes) {
        const Ints values = nearest(read(i) * factor);
        total = total + values;
        place_quads(to + size_t(i / 4) * rows, rows, values);
    }
    *scale = limit / 127.0f;
    *sum_of_bytes = sum(to_floats(total));
}

// Fill an operand with the columns first..end of all rows; both are multiples of the group size for
// 4-bit weights, else of sixteen. `read(row, column)` gives sixteen values. Rows are the inner loop
// because they are adjacent.
template <class Read>
void fill_operand(const Matrix& matrix, const Operand& operand, int num_rows, Range columns, Read read) {
    const Chunks chunks{num_rows};
    const int step = matrix.format == kInt4 ? matrix.group_size : kLanes;
    for (int chunk = 0; chunk < chunks.num_chunks(); ++chunk) {
        const int first = chunks.first(chunk), rows = chunks.size(chunk);
        const size_t offset = size_t(first) * matrix.num_inputs;
        for (int column = columns.first; column < columns.end; column += step)
            for (int row = 0; row < rows; ++row) {
                if (matrix.format == kFloat32) {
                    place_floats(operand.floats + offset + size_t(column) * rows + row, rows,
                                 read(first + row, column));
                } else if (matrix.format == kBfloat16 && !kHasPairProducts) {
                    place_floats(operand.floats + offset + size_t(column) * rows + row, rows,
                                 rounded_to_bfloat16(read(first + row, column)));
                } else if (matrix.format == kBfloat16) {
                    place_pairs(operand.pairs + offset / 2 + size_t(column / 2) * rows + row, rows,
                                read(first + row, column));
                } else {
                    const size_t at = size_t(first) * matrix.num_groups() +
                                      size_t(column / step) * rows + row;
                    place_group(operand.quads + offset / 4 + size_t(column / 4) * rows + row,
                                operand.scales + at, operand.sums + at, step, rows,
                                [&](int i) { return read(first + row, column + i); });
                }
            }
    }
}

// The most rows whose sums are in registers together, for 16-lane outputs of a block or two.
constexpr int kTileRows = kMaxSums / kParts < 12 ? kMaxSums / kParts : 12;

// Few rows need several blocks to hide latencies.
constexpr int blocks_at_once(int rows) {
    return 4 * rows * kParts <= kMaxSums ? 4 : 2 * rows * kParts <= kMaxSums ? 2 : 1;
}

// Tiles [block][rows of the chunk][16] of a chunk's products, for each kind of weight.
void multiply_float32(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile);
void multiply_bfloat16(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile);
void multiply_int4(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile);

// The product of one chunk of rows with some blocks, bias included: a tile [block][row][16].
inline void multiply_chunk(const Matrix& matrix, const Operand& operand, const Chunks& chunks, int chunk,
                           Range blocks, float* tile) {
    const int rows = chunks.size(chunk);
    const size_t offset = size_t(chunks.first(chunk)) * matrix.num_inputs;
    Operand x = operand;
    if (matrix.format == kFloat32) {
        x.floats += offset;
        multiply_float32(matrix, x, rows, blocks, tile);
    } else if (matrix.format == kBfloat16) {
        x.floats += offset;
        x.pairs += offset / 2;
        multiply_bfloat16(matrix, x, rows, blocks, tile);
    } else {
        x.quads += offset / 4;
        x.scales += size_t(chunks.first(chunk)) * matrix.num_groups();
        x.sums += size_t(chunks.first(chunk)) * matrix.num_groups();
        multiply_int4(matrix, x, rows, blocks, tile);
    }
    if (matrix.bias == nullptr) return;
    for (int block = blocks.first; block < blocks.end; ++block)
        for (int row = 0; row < rows; ++row) {
            float* at = tile + ((block - blocks.first) * rows + row) * kLanes;
            store(at, load(at) + load(matrix.bias + block * kLanes));
        }
}

}  // namespace polybasic
