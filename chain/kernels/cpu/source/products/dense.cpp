// Products with float32 and bfloat16 weights.

#include "amx.h"
#include "products/tiles.h"

namespace polybasic {
namespace {

// Sums of a tile, kept in registers from the first input to the last.
template <int ROWS, int BLOCKS>
struct Sums {
    static constexpr int kVectors = BLOCKS * kParts;    // of a row
    FloatPart sums[ROWS][kVectors] = {};

    // Add the products of each row's value of one input with weights of that input.
    POLYBASIC_INLINE void add(const FloatPart (&weights)[kVectors], const float* values) {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const FloatPart value = all_lanes<FloatPart>(values[row]);
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) add_product(sums[row][v], weights[v], value);
        }
    }

    POLYBASIC_INLINE void write(const RowTile& tile) const {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v)
                std::memcpy(tile.row(v / kParts, row) + v % kParts * kPartLanes, &sums[row][v],
                            sizeof(FloatPart));
    }
};

struct MultiplyFloat32 {
    static constexpr int kMostSums = kMaxSums;

    template <int ROWS, int BLOCKS>
    static void run(const Matrix& matrix, const Operand& x, int block, RowTile tile) {
        const size_t num_inputs = matrix.num_inputs;
        const float* weights = static_cast<const float*>(matrix.weights) + block * num_inputs * kLanes;
        const float* values = x.floats + tile.first;
        const Ahead ahead = tile.ahead(block, BLOCKS, num_inputs);
        Sums<ROWS, BLOCKS> sums;
        for (size_t i = 0; i < num_inputs; ++i) {
            const size_t distance = ahead.of(i);
            FloatPart read[BLOCKS * kParts];
#pragma GCC unroll 16
            for (int v = 0; v < BLOCKS * kParts; ++v) {
                const float* from = weights + (v / kParts * num_inputs + i) * kLanes;
                read[v] = load_part<FloatPart>(from + v % kParts * kPartLanes);
                if (v % kParts == 0) __builtin_prefetch(from + distance);
            }
            sums.add(read, values + i * tile.rows_of_chunk);
        }
        sums.write(tile);
    }
};

// Whether weights are prefetched into the second cache, which takes more lines at a time than the first:
// with products this fast, few rows wait for the memory.
constexpr bool kIntoSecondCache = kHasPairProducts && kParts == 1;

// Pairs of inputs at a time: each word of the weights holds those of two.
struct MultiplyBfloat16 {
    static constexpr int kMostSums = kMaxSums;

    template <int ROWS, int BLOCKS>
    static void run(const Matrix& matrix, const Operand& x, int block, RowTile tile) {
        constexpr size_t kAhead = kIntoSecondCache ? 8 * Ahead::kLines / BLOCKS : Ahead::kLines;
        constexpr int kVectors = BLOCKS * kParts;
        const size_t num_pairs = matrix.num_inputs / 2;
        const uint32_t* weights =
            static_cast<const uint32_t*>(matrix.weights) + block * num_pairs * kLanes;
        const Ahead ahead = tile.ahead(block, BLOCKS, num_pairs, kAhead);
        Sums<ROWS, BLOCKS> sums;
        for (size_t i = 0; i < num_pairs; ++i) {
            const size_t distance = ahead.of(i);
            WordPart read[kVectors];
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                const uint32_t* from = weights + (v / kParts * num_pairs + i) * kLanes;
                read[v] = load_part<WordPart>(from + v % kParts * kPartLanes);
                if (v % kParts == 0) __builtin_prefetch(from + distance, 0, kIntoSecondCache ? 2 : 3);
            }
#if defined(POLYBASIC_PAIR_PRODUCTS)
            const uint32_t* values = x.pairs + tile.first + i * tile.rows_of_chunk;
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const WordPart value = all_lanes<WordPart>(values[row]);
#pragma GCC unroll 16
                for (int v = 0; v < kVectors; ++v)
                    sums.sums[row][v] = add_pair_products(sums.sums[row][v], read[v], value);
            }
#else
            const float* values = x.floats + tile.first + 2 * i * tile.rows_of_chunk;
            FloatPart wide[kVectors];
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) wide[v] = same_bits<FloatPart>(read[v] << 16);
            sums.add(wide, values);
            // where sums take nearly all registers, words are read a second time instead of kept
            if constexpr (ROWS > 2 && (ROWS + 2) * kVectors + 2 >= kRegisters) asm("" : "+r"(weights));
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                const uint32_t* from = weights + (v / kParts * num_pairs + i) * kLanes;
                const WordPart word = load_part<WordPart>(from + v % kParts * kPartLanes);
                wide[v] = same_bits<FloatPart>(word & 0xffff0000u);
            }
            sums.add(wide, values + tile.rows_of_chunk);
#endif
        }
        sums.write(tile);
    }
};

}  // namespace

void multiply_float32(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
    multiply_tiles<MultiplyFloat32>(matrix, x, rows, blocks, tile);
}

void multiply_bfloat16(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* tile) {
#if defined(POLYBASIC_AMX)
    if (matrix.uses_amx()) return multiply_amx(matrix, x, rows, blocks, tile);
#endif
    multiply_tiles<MultiplyBfloat16>(matrix, x, rows, blocks, tile);
}

}  // namespace polybasic
