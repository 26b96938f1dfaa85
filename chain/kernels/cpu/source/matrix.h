// Products of a few rows with a matrix: float32, bfloat16 and 4-bit weights.
//
// Outputs come in blocks of sixteen, one lane each, so that every sum runs over the inputs in the
// same order, however many rows are multiplied at a time (batch-invariant).
#pragma once

#include <utility>

#include "simd.h"

#if defined(POLYBASIC_AVX512) && defined(__AVX512VNNI__)
#define POLYBASIC_VNNI 1
#endif

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
    float* floats;      // [I][rows of the chunk]
    uint32_t* pairs;    // two bfloat16 numbers each: [I / 2][rows]
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
    const Bytes bytes = __builtin_convertvector(values, Bytes);
    uint32_t quads[kLanes / 4];
    std::memcpy(quads, &bytes, sizeof quads);
    for (int quad = 0; quad < kLanes / 4; ++quad) to[size_t(quad) * rows] = quads[quad];
}

// The nearest integers of values between -2^22 and 2^22: adding 1.5 * 2^23 rounds to one.
inline Ints nearest(Floats values) {
    const Floats shifted = values + 12582912.0f;
    Ints bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    return bits - 0x4b400000;
}

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
        total += values;
        place_quads(to + size_t(i / 4) * rows, rows, values);
    }
    *scale = limit / 127.0f;
    *sum_of_bytes = sum(__builtin_convertvector(total, Floats));
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

inline Words load_words(const uint32_t* from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

// Per lane: added + the sum over four bytes of code (unsigned) * value (signed).
inline Ints add_quad_products(Ints added, Words codes, Words values) {
#if defined(POLYBASIC_VNNI)
    return (Ints)_mm512_dpbusd_epi32((__m512i)added, (__m512i)codes, (__m512i)values);
#else
    for (int byte = 0; byte < 4; ++byte) {
        const Ints code = (Ints)((codes >> (8 * byte)) & 0xff);
        const Ints value = (Ints)(values << (24 - 8 * byte)) >> 24;
        added += code * value;
    }
    return added;
#endif
}

// The products below write a tile [block][row][16] of the blocks from `block` on.

template <int ROWS, int BLOCKS>
inline void multiply_float32(const Matrix& matrix, const float* x, int block, float* tile) {
    const size_t num_inputs = matrix.num_inputs;
    const float* weights = static_cast<const float*>(matrix.weights) + block * num_inputs * kLanes;
    Floats sums[ROWS][BLOCKS] = {};
    for (size_t i = 0; i < num_inputs; ++i) {
        Floats read[BLOCKS];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) read[b] = load(weights + (b * num_inputs + i) * kLanes);
#pragma GCC unroll 32
        for (int row = 0; row < ROWS; ++row) {
            const Floats value = broadcast(x[i * ROWS + row]);
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b)
                sums[row][b] = fused_multiply_add(read[b], value, sums[row][b]);
        }
    }
#pragma GCC unroll 32
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) store(tile + (b * ROWS + row) * kLanes, sums[row][b]);
}

template <int ROWS, int BLOCKS>
inline void multiply_bfloat16(const Matrix& matrix, const uint32_t* x, int block, float* tile) {
    const size_t num_pairs = matrix.num_inputs / 2;
    const uint32_t* weights =
        static_cast<const uint32_t*>(matrix.weights) + block * num_pairs * kLanes;
    Floats sums[ROWS][BLOCKS] = {};
    for (size_t i = 0; i < num_pairs; ++i) {
        Words read[BLOCKS];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
            const uint32_t* from = weights + (b * num_pairs + i) * kLanes;
            read[b] = load_words(from);
            __builtin_prefetch(from + 16 * kLanes);
        }
#pragma GCC unroll 32
        for (int row = 0; row < ROWS; ++row) {
            const Words value = Words{} + x[i * ROWS + row];
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b)
                sums[row][b] = add_pair_products(sums[row][b], read[b], value);
        }
    }
#pragma GCC unroll 32
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) store(tile + (b * ROWS + row) * kLanes, sums[row][b]);
}

// Sums of codes times bytes are integers, hence the same in any order; each group's sum is scaled
// and added in float32.
template <int ROWS, int BLOCKS>
inline void multiply_int4(const Matrix& matrix, const Operand& x, int block, float* tile) {
    const size_t num_words = matrix.num_inputs / 8, num_groups = matrix.num_groups();
    const size_t words_of_group = matrix.group_size / 8;
    const uint32_t* codes = static_cast<const uint32_t*>(matrix.weights) + block * num_words * kLanes;
    for (int i = 0; i < ROWS * BLOCKS; ++i) store(tile + i * kLanes, Floats{});
    for (size_t group = 0; group < num_groups; ++group) {
        Ints sums[ROWS][BLOCKS] = {};
        const size_t end = (group + 1) * words_of_group;
        for (size_t i = group * words_of_group; i < end; ++i) {
            Words low[BLOCKS], high[BLOCKS];
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b) {
                const uint32_t* from = codes + (b * num_words + i) * kLanes;
                const Words read = load_words(from);
                __builtin_prefetch(from + 16 * kLanes);
                low[b] = read & 0x0f0f0f0fu;
                high[b] = (read >> 4) & 0x0f0f0f0fu;
            }
#pragma GCC unroll 32
            for (int row = 0; row < ROWS; ++row) {
                const Words first = Words{} + x.quads[2 * i * ROWS + row];
                const Words second = Words{} + x.quads[(2 * i + 1) * ROWS + row];
#pragma GCC unroll 8
                for (int b = 0; b < BLOCKS; ++b) {
                    sums[row][b] = add_quad_products(sums[row][b], low[b], first);
                    sums[row][b] = add_quad_products(sums[row][b], high[b], second);
                }
            }
        }
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
            const size_t at = ((block + b) * num_groups + group) * kLanes;
            const Floats scale = load(matrix.scales + at);
            Bytes zeros;
            std::memcpy(&zeros, matrix.zeros + at, sizeof zeros);
            const Floats minus_zero = -__builtin_convertvector(zeros, Floats);
#pragma GCC unroll 32
            for (int row = 0; row < ROWS; ++row) {
                float* to = tile + (b * ROWS + row) * kLanes;
                const Floats sum = __builtin_convertvector(sums[row][b], Floats);
                const Floats centred =
                    fused_multiply_add(minus_zero, broadcast(x.sums[group * ROWS + row]), sum);
                const Floats factor = scale * x.scales[group * ROWS + row];
                store(to, fused_multiply_add(centred, factor, load(to)));
            }
        }
    }
}

template <int ROWS, int BLOCKS>
inline void multiply_blocks(const Matrix& matrix, const Operand& x, int block, float* tile) {
    if (matrix.format == kBfloat16)
        multiply_bfloat16<ROWS, BLOCKS>(matrix, x.pairs, block, tile);
    else if (matrix.format == kInt4)
        multiply_int4<ROWS, BLOCKS>(matrix, x, block, tile);
    else
        multiply_float32<ROWS, BLOCKS>(matrix, x.floats, block, tile);
}

// Sums in registers: ROWS * BLOCKS of 32. Few rows need several blocks to hide latencies.
constexpr int blocks_at_once(int rows) { return rows <= 4 ? 4 : rows <= 12 ? 2 : 1; }

template <int ROWS>
void multiply_rows(const Matrix& matrix, const Operand& x, Range blocks, float* tile) {
    constexpr int kStep = blocks_at_once(ROWS);
    int block = blocks.first;
    for (; block + kStep <= blocks.end; block += kStep, tile += kStep * ROWS * kLanes)
        multiply_blocks<ROWS, kStep>(matrix, x, block, tile);
    for (; block < blocks.end; ++block, tile += ROWS * kLanes)
        multiply_blocks<ROWS, 1>(matrix, x, block, tile);
}

using MultiplyRows = void (*)(const Matrix&, const Operand&, Range, float*);

template <int... INDEX>
inline MultiplyRows multiply_rows_of(int rows, std::integer_sequence<int, INDEX...>) {
    static constexpr MultiplyRows kTable[] = {multiply_rows<INDEX + 1>...};
    return kTable[rows - 1];
}

// The product of one chunk of rows with some blocks, bias included: a tile [block][row][16].
inline void multiply_chunk(const Matrix& matrix, const Operand& operand, const Chunks& chunks, int chunk,
                           Range blocks, float* tile) {
    const int rows = chunks.size(chunk);
    const size_t offset = size_t(chunks.first(chunk)) * matrix.num_inputs;
    Operand x = operand;
    if (matrix.format == kFloat32) {
        x.floats += offset;
    } else if (matrix.format == kBfloat16) {
        x.pairs += offset / 2;
    } else {
        x.quads += offset / 4;
        x.scales += size_t(chunks.first(chunk)) * matrix.num_groups();
        x.sums += size_t(chunks.first(chunk)) * matrix.num_groups();
    }
    multiply_rows_of(rows, std::make_integer_sequence<int, kRowsAtOnce>{})(matrix, x, blocks, tile);
    if (matrix.bias == nullptr) return;
    for (int block = blocks.first; block < blocks.end; ++block)
        for (int row = 0; row < rows; ++row) {
            float* at = tile + ((block - blocks.first) * rows + row) * kLanes;
            store(at, load(at) + load(matrix.bias + block * kLanes));
        }
}

}  // namespace polybasic
