// Products of a few rows with a matrix: float32 and bfloat16 weights, and codes of four to eight bits.
//
// Outputs come in blocks of sixteen, one lane each, so that every sum runs over the inputs in the
// same order, however many rows are multiplied at a time (batch-invariant).
#pragma once

#include "simd.h"

#if defined(POLYBASIC_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace polybasic {

#if defined(POLYBASIC_AMX)
// Ask the system once for the tiles' state; without it products go by AVX-512.
inline bool may_use_amx() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return is_granted;
}
#endif

// Codes of AutoAWQ's 4-bit format, and of GGML's types by the bits of a code.
enum Format : int32_t {
    kFloat32 = 0,
    kBfloat16 = 1,
    kInt4 = 2,
    kBlocks4 = 3,
    kBlocks5 = 4,
    kBlocks6 = 5,
    kBlocks8 = 6,
};

constexpr int kGroup = 32;      // inputs of a group of kBlocks
constexpr int kLeastAmxRows = 10;   // from so many on products of codes are faster by AMX
constexpr int kNested = 256;    // inputs of a block whose scales have two levels

// Weights of a linear, laid out by polybasic.chain.kernels.cpu.matrices. B blocks of 16 outputs, the last
// one padded with zeros; I inputs; G groups of inputs.
//
// Codes of four bits: [B][I / 8][16][4] bytes, inputs 8 i + j in the low and 8 i + 4 + j in the high half of
// byte j. Those of eight, signed: [B][I / 4][16][4]. Of five and six bits each group of 32 inputs has its
// lowest four as [4][16][4], then the bits above these: of five [16][4], that of input 4 k + j as bit k of
// byte j; of six [2][16][4], those of input 16 h + 4 k + j as bits 2 k and 2 k + 1 of byte j of [h].
struct Matrix {
    int32_t format;
    int32_t num_outputs;    // those of `rest` included
    int32_t num_inputs;
    int32_t group_size;     // of codes: inputs of a row that share a scale, a multiple of 8
    int32_t zero;           // of kBlocks without offsets: the code of a weight of zero
    const void* weights;    // float [B][I][16]; bfloat16 [B][I / 2][16][2]; codes
    const void* scales;     // float16 [B][G][16]; [B][I / 256][16] if there are factors
    const void* offsets;    // as the scales, added to the weights, or null; of kInt4 bytes, the codes of
                            // weights of zero
    const int8_t* factors;  // [B][G][2][16] of nested types, else null: what a group's scale, and its offset,
                            // is multiplied by; without offsets, what its halves' scales are
    const float* bias;      // [B][16] or null
    const Matrix* rest;     // further outputs in other codes of kBlocks, or null; those before are full blocks

    int own_outputs() const { return num_outputs - (rest == nullptr ? 0 : rest->num_outputs); }
    int own_blocks() const { return (own_outputs() + kLanes - 1) / kLanes; }
    int num_blocks() const { return (num_outputs + kLanes - 1) / kLanes; }
    bool has_codes() const { return format >= kInt4; }
    int num_groups() const { return num_inputs / group_size; }
    // Inputs of a row that are prepared together.
    int step() const { return has_codes() ? group_size : kLanes; }
    // Whether products go by AMX.
    bool uses_amx() const {
#if defined(POLYBASIC_AMX)
        return format == kBfloat16 && num_inputs % 32 == 0 && may_use_amx();
#else
        return false;
#endif
    }
    // Whether products of codes with so many rows go by AMX; the sums are the same.
    bool uses_amx_for(int rows) const {
#if defined(POLYBASIC_AMX)
        return has_codes() && rows >= kLeastAmxRows && !reads_halves() && may_use_amx();
#else
        return false;
#endif
    }
    bool reads_halves() const { return format == kBlocks6 || (rest != nullptr && rest->reads_halves()); }
    // Without those of the rest.
    size_t weight_bytes() const {
        constexpr size_t kBits[] = {32, 16, 4, 4, 5, 6, 8};
        return size_t(own_blocks()) * kLanes * num_inputs * kBits[format] / 8;
    }
};

// A group's codes of one output, less the code of a weight of zero. `from`: its first four bytes.
inline void read_codes(const Matrix& matrix, const uint8_t* from, int8_t (&codes)[kGroup]) {
    const auto byte_of = [=](int line, int byte) { return from[size_t(line) * kLanes * 4 + byte]; };
    for (int i = 0; i < kGroup; ++i) {
        const int byte = i % 4, k = i / 4;
        if (matrix.format == kBlocks8) {
            codes[i] = int8_t(byte_of(k, byte));
            continue;
        }
        int code = byte_of(k / 2, byte) >> (k % 2 * 4) & 15;
        if (matrix.format == kBlocks5) code |= (byte_of(4, byte) >> k & 1) << 4;
        if (matrix.format == kBlocks6) code |= (byte_of(4 + k / 4, byte) >> (k % 4 * 2) & 3) << 4;
        codes[i] = int8_t(code - matrix.zero);
    }
}

// Sixteen weights of one output of a matrix in blocks, from a multiple of sixteen on.
inline Floats decoded(const Matrix& matrix, int64_t output, int first) {
    const size_t block = output / kLanes, lane = output % kLanes, num_groups = matrix.num_groups();
    const size_t group = block * num_groups + first / kGroup;
    const size_t group_bytes = matrix.weight_bytes() / (matrix.own_blocks() * num_groups);
    int8_t codes[kGroup];
    read_codes(matrix, static_cast<const uint8_t*>(matrix.weights) + group * group_bytes + lane * 4, codes);
    const bool is_nested = matrix.factors != nullptr;
    const size_t at = (is_nested ? group / (kNested / kGroup) : group) * kLanes + lane;
    const auto constant = [at](const void* of) {
        return of == nullptr ? 0.0f : widen(Half{static_cast<const uint16_t*>(of)[at]});
    };
    float scale = constant(matrix.scales), offset = constant(matrix.offsets);
    if (is_nested) {
        const int8_t* factors = matrix.factors + group * 2 * kLanes + lane;
        scale *= matrix.offsets == nullptr ? factors[first % kGroup / kLanes * kLanes] : factors[0];
        offset *= factors[kLanes];
    }
    float values[kLanes];
    for (int i = 0; i < kLanes; ++i) values[i] = codes[first % kGroup + i] * scale;
    return load(values) + offset;
}

#if defined(POLYBASIC_AMX)
constexpr int kRowsAtOnce = 32;
#else
constexpr int kRowsAtOnce = 24;
#endif

// Rows are multiplied in nearly equal chunks of at most kRowsAtOnce.
struct Chunks {
    int num_rows;
    int num_chunks() const { return (num_rows + kRowsAtOnce - 1) / kRowsAtOnce; }
    int first(int chunk) const { return int(int64_t(num_rows) * chunk / num_chunks()); }
    int size(int chunk) const { return first(chunk + 1) - first(chunk); }
};

// Rows as a matrix of some format reads them: chunk after chunk, in each input by input and the
// rows side by side. For codes rows are rounded to eight bits, group by group.
struct Operand {
    float* floats;      // [I][rows of the chunk]; for bfloat16 weights rounded to bfloat16
    uint32_t* pairs;    // two bfloat16 numbers each: [I / 2][rows]; if the processor multiplies pairs. By AMX
                        // [I / 32][rows][16]
    uint32_t* quads;    // four signed bytes each: [I / 4][rows]; if `is_by_row`, for products of codes by AMX,
                        // [I / group size][rows][group size / 4]
    float* scales;      // [I / group size][rows]
    float* sums;        // the same: sums of the bytes of a group
    float* half_sums;   // [I / 16][rows]: of kBlocks6, those of each half of a group
    bool is_by_row;     // of a chunk that is multiplied
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

// Sixteen values in the order of an operand for AMX.
inline void place_amx(uint32_t* to, int rows, int column, int row, Floats values) {
    const size_t at = size_t(column / 32) * rows + row;
    store(reinterpret_cast<Bfloat16*>(to + at * kLanes) + column % 32, values);
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

// Round a group of inputs of one row to bytes, four of them `stride` words apart; `read(i)` gives its values
// i..i + 16. The sums of all bytes and, unless null, of each sixteen.
template <class Read>
void place_group(uint32_t* to, int stride, float* scale, float* sum_of_bytes, float* half_sums, int size,
                 int rows, Read read) {
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
        if (half_sums != nullptr) half_sums[size_t(i / kLanes) * rows] = sum(to_floats(values));
        place_quads(to + size_t(i / 4) * stride, stride, values);
    }
    *scale = limit / 127.0f;
    *sum_of_bytes = sum(to_floats(total));
}

// Fill an operand with the columns first..end of all rows, multiples of `matrix.step()`.
// `read(row, column)` gives sixteen values. Rows are the inner loop because they are adjacent.
template <class Read>
void fill_operand(const Matrix& matrix, const Operand& operand, int num_rows, Range columns, Read read) {
    const Chunks chunks{num_rows};
    const int step = matrix.step();
    const bool needs_halves = matrix.reads_halves();
    for (int chunk = 0; chunk < chunks.num_chunks(); ++chunk) {
        const int first = chunks.first(chunk), rows = chunks.size(chunk);
        const size_t offset = size_t(first) * matrix.num_inputs;
        const bool is_by_row = matrix.uses_amx_for(rows);
        for (int column = columns.first; column < columns.end; column += step)
            for (int row = 0; row < rows; ++row) {
                if (matrix.format == kFloat32) {
                    place_floats(operand.floats + offset + size_t(column) * rows + row, rows,
                                 read(first + row, column));
                } else if (matrix.format == kBfloat16 && !kHasPairProducts) {
                    place_floats(operand.floats + offset + size_t(column) * rows + row, rows,
                                 rounded_to_bfloat16(read(first + row, column)));
                } else if (matrix.uses_amx()) {
                    place_amx(operand.pairs + offset / 2, rows, column, row, read(first + row, column));
                } else if (matrix.format == kBfloat16) {
                    place_pairs(operand.pairs + offset / 2 + size_t(column / 2) * rows + row, rows,
                                read(first + row, column));
                } else {
                    const size_t at = size_t(first) * matrix.num_groups() +
                                      size_t(column / step) * rows + row;
                    float* half_sums = operand.half_sums + offset / kLanes +
                                       size_t(column / kLanes) * rows + row;
                    const size_t quad = size_t(column / 4) * rows + size_t(row) * (is_by_row ? step / 4 : 1);
                    place_group(operand.quads + offset / 4 + quad, is_by_row ? 1 : rows,
                                operand.scales + at, operand.sums + at,
                                needs_halves ? half_sums : nullptr, step, rows,
                                [&](int i) { return read(first + row, column + i); });
                }
            }
    }
}

// The most rows whose sums are in registers together, for 16-lane outputs of a block or two.
constexpr int kTileRows = kMaxSums / kParts < 12 ? kMaxSums / kParts : 12;

// Few rows need several blocks to hide latencies.
constexpr int blocks_at_once(int rows, int most_sums) {
    return 4 * rows * kParts <= most_sums ? 4 : 2 * rows * kParts <= most_sums ? 2 : 1;
}

// Tiles [block][rows of the chunk][16] of a chunk's products, for each kind of weight.
void multiply_float32(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile);
void multiply_bfloat16(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile);
void multiply_int4(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile);
void multiply_blocks4(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile);
void multiply_blocks5(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile);
void multiply_blocks6(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile);
void multiply_blocks8(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile);

using MultiplyTiles = void(const Matrix&, const Operand&, int, Range, float*);
constexpr MultiplyTiles* kMultiply[] = {multiply_float32, multiply_bfloat16, multiply_int4,   multiply_blocks4,
                                        multiply_blocks5, multiply_blocks6,  multiply_blocks8};

// The product of one chunk of rows with some blocks, bias included: a tile [block][row][16].
inline void multiply_chunk(const Matrix& matrix, const Operand& operand, const Chunks& chunks, int chunk,
                           Range blocks, float* tile, bool is_by_row) {
    const int rows = chunks.size(chunk);
    if (const int own = matrix.own_blocks(); blocks.end > own) {
        const int first = blocks.first > own ? blocks.first - own : 0;
        const size_t before = blocks.first < own ? own - blocks.first : 0;
        multiply_chunk(*matrix.rest, operand, chunks, chunk, {first, blocks.end - own},
                       tile + before * rows * kLanes, is_by_row);
        blocks.end = own;
        if (before == 0) return;
    }
    const size_t offset = size_t(chunks.first(chunk)) * matrix.num_inputs;
    Operand x = operand;
    x.is_by_row = is_by_row;
    if (matrix.has_codes()) {
        x.quads += offset / 4;
        x.scales += offset / matrix.group_size;
        x.sums += offset / matrix.group_size;
        x.half_sums += offset / kLanes;
    } else {
        x.floats += offset;
        x.pairs += offset / 2;
    }
    kMultiply[matrix.format](matrix, x, rows, blocks, tile);
    if (matrix.bias == nullptr) return;
    for (int block = blocks.first; block < blocks.end; ++block)
        for (int row = 0; row < rows; ++row) {
            float* at = tile + ((block - blocks.first) * rows + row) * kLanes;
            store(at, load(at) + load(matrix.bias + block * kLanes));
        }
}

inline void multiply_chunk(const Matrix& matrix, const Operand& operand, const Chunks& chunks, int chunk,
                           Range blocks, float* tile) {
    multiply_chunk(matrix, operand, chunks, chunk, blocks, tile, matrix.uses_amx_for(chunks.size(chunk)));
}

}  // namespace polybasic
