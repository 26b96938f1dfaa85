// Products with bfloat16 weights by AMX, sixteen rows with sixteen outputs in one instruction: the rows of a
// tree cost little more than one. What a row gets does not depend on the rows beside it.
#pragma once

#include "products/matrix.h"

#if defined(POLYBASIC_AMX)

namespace polybasic {

constexpr int kAmxRows = 16;    // of a tile of rows and of sums
constexpr int kAmxInputs = 32;  // of a tile of rows and of weights
constexpr size_t kAmxTile = kAmxInputs * kLanes;

// The shapes of the eight tiles.
struct alignas(64) AmxShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    explicit AmxShapes(const int (&of_tiles)[8]) {
        for (int tile = 0; tile < 8; ++tile) {
            rows[tile] = uint8_t(of_tiles[tile]);
            row_bytes[tile] = 64;
        }
    }

    void use() const {
        asm volatile("" ::: "memory");  // they are written before they are read
        _tile_loadconfig(this);
    }
};

// Prefetch what is read some tiles later: at a block's end, of the block that is read next in its place.
template <int BLOCKS>
POLYBASIC_INLINE void prefetch_amx(const Bfloat16* weights, size_t input, size_t of_block) {
    constexpr size_t kAhead = 16 / BLOCKS * kAmxTile;
    const size_t at = input * kLanes;
    weights += at + kAhead + (at + kAhead < of_block ? 0 : (BLOCKS - 1) * of_block);
    for (int block = 0; block < BLOCKS; ++block, weights += of_block)
        for (size_t line = 0; line < kAmxTile; line += kAmxInputs) __builtin_prefetch(weights + line);
}

// Sums [block][row][16] of at most sixteen rows with the blocks from `weights` on. Tiles 0 to 3 are sums, 4 rows,
// 5 to 7 weights.
template <int BLOCKS>
void multiply_few(const Bfloat16* weights, const Operand& x, size_t num_inputs, int rows, float* sums) {
    const size_t of_block = num_inputs * kLanes, step = size_t(rows) * kLanes;
    _tile_zero(0);
    if constexpr (BLOCKS == 4) {
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (size_t i = 0; i < num_inputs; i += kAmxInputs) {
        prefetch_amx<BLOCKS>(weights, i, of_block);
        const Bfloat16* from = weights + i * kLanes;
        _tile_loadd(4, x.pairs + i / 2 * rows, 64);
        _tile_loadd(5, from, 64);
        if constexpr (BLOCKS == 4) {
            _tile_loadd(6, from + of_block, 64);
            _tile_loadd(7, from + 2 * of_block, 64);
        }
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (BLOCKS == 4) {
            _tile_loadd(5, from + 3 * of_block, 64);
            _tile_dpbf16ps(1, 4, 6);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, sums, 64);
    if constexpr (BLOCKS == 4) {
        _tile_stored(1, sums + step, 64);
        _tile_stored(2, sums + 2 * step, 64);
        _tile_stored(3, sums + 3 * step, 64);
    }
}

// The same of 17 to 32 rows. Tiles 0 and 1 are sums of the first sixteen, 2 and 3 of the others, 4 and 5 rows, 6
// and 7 weights.
template <int BLOCKS>
void multiply_many(const Bfloat16* weights, const Operand& x, size_t num_inputs, int rows, float* sums) {
    const size_t of_block = num_inputs * kLanes, step = size_t(rows) * kLanes;
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (BLOCKS == 2) {
        _tile_zero(1);
        _tile_zero(3);
    }
    for (size_t i = 0; i < num_inputs; i += kAmxInputs) {
        prefetch_amx<BLOCKS>(weights, i, of_block);
        const uint32_t* values = x.pairs + i / 2 * rows;
        _tile_loadd(4, values, 64);
        _tile_loadd(5, values + kAmxRows * kAmxInputs / 2, 64);
        _tile_loadd(6, weights + i * kLanes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (BLOCKS == 2) {
            _tile_loadd(7, weights + of_block + i * kLanes, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    float* others = sums + kAmxRows * kLanes;
    _tile_stored(0, sums, 64);
    _tile_stored(2, others, 64);
    if constexpr (BLOCKS == 2) {
        _tile_stored(1, sums + step, 64);
        _tile_stored(3, others + step, 64);
    }
}

// A product as `multiply_bfloat16` makes it, of a matrix that `uses_amx`.
inline void multiply_amx(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* sums) {
    const bool are_few = rows <= kAmxRows;
    const int others = rows - kAmxRows, weights = kAmxInputs / 2;
    if (are_few)
        AmxShapes({rows, rows, rows, rows, rows, weights, weights, weights}).use();
    else
        AmxShapes({kAmxRows, kAmxRows, others, others, kAmxRows, others, weights, weights}).use();
    const size_t num_inputs = matrix.num_inputs;
    const int at_once = are_few ? 4 : 2;
    for (int block = blocks.first; block < blocks.end;) {
        const bool are_several = block + at_once <= blocks.end;
        const auto multiply = are_several ? (are_few ? multiply_few<4> : multiply_many<2>)
                                          : (are_few ? multiply_few<1> : multiply_many<1>);
        multiply(static_cast<const Bfloat16*>(matrix.weights) + block * num_inputs * kLanes, x, num_inputs, rows,
                 sums);
        const int done = are_several ? at_once : 1;
        block += done;
        sums += size_t(done) * rows * kLanes;
    }
    _tile_release();
}

}  // namespace polybasic

#endif
