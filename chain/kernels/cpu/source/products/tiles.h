// How the rows of a chunk are divided into tiles, whose sums are in registers.
#pragma once

#include <utility>

#include "products/matrix.h"

namespace polybasic {

// The weights to prefetch while others are read: those of the same block that follow, and at its end
// those of the block that is read next in its place, after the others that are read side by side.
struct Ahead {
    static constexpr size_t kLines = 16;
    size_t end;             // vector of the block from which on
    size_t near, far;       // distances, in numbers of 32 bits

    POLYBASIC_INLINE size_t of(size_t i) const { return i < end ? near : far; }
};

// The tile of a few rows of a chunk.
struct RowTile {
    int first;          // row of the chunk
    int rows_of_chunk;
    float* out;         // [block][rows of the chunk][16]
    Range blocks;       // that are multiplied with all rows of the chunk,
    int index;          // in so many tiles, of which this is the one with this number
    int num_tiles;

    float* row(int block, int row) const {
        return out + (size_t(block) * rows_of_chunk + first + row) * kLanes;
    }

    // Where to prefetch while a block's weights are read, of which there are `num_lines` vectors. If there
    // are several tiles, the first alone would wait for the memory: then each fetches a part of the
    // weights that come after those of all tiles.
    Ahead ahead(int block, int at_once, size_t num_lines, size_t num_ahead = Ahead::kLines) const {
        if (num_tiles > 1 && (block - blocks.first) / at_once % num_tiles == index) {
            const size_t vectors = (blocks.end - blocks.first) * num_lines * kLanes;
            return {num_lines, vectors, vectors};
        }
        const size_t near = num_lines < num_ahead ? num_lines : num_ahead;
        return {num_lines - near, near * kLanes, (near + (at_once - 1) * num_lines) * kLanes};
    }
};

// Multiply::run<ROWS, BLOCKS>(matrix, x, block, tile) makes the tile of BLOCKS blocks from `block` on.
template <class Multiply, int ROWS>
void multiply_tile(const Matrix& matrix, const Operand& x, Range blocks, RowTile tile) {
    constexpr int kStep = blocks_at_once(ROWS, Multiply::kMostSums);
    const size_t step_of_out = size_t(tile.rows_of_chunk) * kLanes;
    int block = blocks.first;
    for (; block + kStep <= blocks.end; block += kStep, tile.out += kStep * step_of_out)
        Multiply::template run<ROWS, kStep>(matrix, x, block, tile);
    if constexpr (kStep > 1)
        for (; block < blocks.end; ++block, tile.out += step_of_out)
            Multiply::template run<ROWS, 1>(matrix, x, block, tile);
}

template <class Multiply, int... INDEX>
void multiply_tile_of(int rows, const Matrix& matrix, const Operand& x, Range blocks, RowTile tile,
                      std::integer_sequence<int, INDEX...>) {
    using MultiplyTile = void (*)(const Matrix&, const Operand&, Range, RowTile);
    static constexpr MultiplyTile kTable[] = {multiply_tile<Multiply, INDEX + 1>...};
    kTable[rows - 1](matrix, x, blocks, tile);
}

// All rows of a chunk, in nearly equal tiles.
template <class Multiply>
void multiply_tiles(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* out) {
    const int num_tiles = (rows + kTileRows - 1) / kTileRows;
    for (int index = 0; index < num_tiles; ++index) {
        const int first = rows * index / num_tiles, end = rows * (index + 1) / num_tiles;
        multiply_tile_of<Multiply>(end - first, matrix, x, blocks,
                                   {first, rows, out, blocks, index, num_tiles},
                                   std::make_integer_sequence<int, kTileRows>{});
    }
}

}  // namespace polybasic
