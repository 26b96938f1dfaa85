// Products of codes with many rows by AMX: sums of bytes are integers, the same in whatever way, so that a row
// gets the bits that it gets alone by `MultiplyCodes`.
#pragma once

#include "amx.h"
#include "products/codes.h"

namespace polybasic {

#if defined(POLYBASIC_AMX)

// Rows are bytes [I / group size][rows][group size]. Several blocks are multiplied side by side, and of every
// block three groups are under way: codes of one are laid out, those of the one before are multiplied, and
// the sums of the one before that are scaled, so that none waits for what was just stored.
template <class Codes, class Scales>
class AmxCodes {
    static constexpr int kQuads = kUnit / 4;
    static constexpr size_t kLinesAhead = 48, kGroupsAhead = 8;
    static constexpr int kMostUnits = 4;    // of a group: 128 inputs

public:
    static void multiply(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* out) {
        const int few = rows < kAmxRows ? rows : kAmxRows, others = rows - few;
        AmxShapes shapes = others == 0 ? AmxShapes({rows, rows, rows, rows, rows, kQuads, kQuads, kQuads})
                                       : AmxShapes({few, few, others, others, few, others, kQuads, kQuads});
        shapes.row_bytes[4] = kUnit;
        if (others > 0) shapes.row_bytes[5] = kUnit;
        shapes.use();
        const int at_once = others == 0 ? 3 : 2;
        for (int block = blocks.first; block < blocks.end;) {
            const bool are_several = block + at_once <= blocks.end;
            const auto multiply = are_several ? (others == 0 ? multiply_blocks<3, false> : multiply_blocks<2, true>)
                                              : (others == 0 ? multiply_blocks<1, false> : multiply_blocks<1, true>);
            multiply(matrix, x, rows, block, out);
            const int done = are_several ? at_once : 1;
            block += done;
            out += size_t(done) * rows * kLanes;
        }
        _tile_release();
    }

private:
    template <int BLOCKS, bool ARE_MANY>
    static void multiply_blocks(const Matrix& matrix, const Operand& x, int rows, int block, float* out) {
        constexpr size_t kSums = (ARE_MANY ? 2 : 1) * kAmxRows * kLanes;
        const size_t num_groups = matrix.num_groups(), units = matrix.group_size / kUnit;
        const size_t of_group = units * Codes::kLines * kLanes, of_block = num_groups * of_group;
        const size_t of_row = units * kQuads;
        const uint32_t* codes = static_cast<const uint32_t*>(matrix.weights) + block * of_block;
        const Scales scales(matrix, Codes::kShift, block);
        alignas(64) uint32_t laid[2][BLOCKS][kMostUnits * kQuads * kLanes];
        alignas(64) int32_t sums[2][BLOCKS][kSums];
        std::fill_n(out, size_t(BLOCKS) * rows * kLanes, 0.0f);
        for (size_t step = 0; step < num_groups + 2; ++step) {
            if (step < num_groups) {
                const size_t at = step * of_group;
                // at a block's end, of the block that is read next in its place
                const size_t ahead = kLinesAhead * kLanes +
                                     (at + kLinesAhead * kLanes < of_block ? 0 : (BLOCKS - 1) * of_block);
                for (int i = 0; i < BLOCKS; ++i)
                    for (size_t unit = 0; unit < units; ++unit)
                        lay_out(codes + i * of_block + at + unit * Codes::kLines * kLanes, ahead,
                                laid[step % 2][i] + unit * kQuads * kLanes);
            }
            if (step > 0 && step <= num_groups)
                multiply_group<BLOCKS, ARE_MANY>(laid[(step - 1) % 2], x.quads + (step - 1) * rows * of_row, units,
                                                 of_row, sums[(step - 1) % 2]);
            if (step > 1)
                for (int i = 0; i < BLOCKS; ++i)
                    add_scaled(scales, x, rows, i, step - 2, sums[step % 2][i], out + size_t(i) * rows * kLanes);
        }
    }

    // Of few rows: tiles 0 to 2 are sums, 4 is rows, 5 to 7 codes. Of many: 0 and 1 sums of the first sixteen, 2
    // and 3 of the others, 4 and 5 rows, 6 and 7 codes.
    template <int BLOCKS, bool ARE_MANY, size_t WORDS, size_t SUMS>
    POLYBASIC_INLINE static void multiply_group(const uint32_t (&laid)[BLOCKS][WORDS], const uint32_t* quads,
                                                size_t units, size_t of_row, int32_t (&sums)[BLOCKS][SUMS]) {
        _tile_zero(0);
        if constexpr (BLOCKS > 1) _tile_zero(1);
        if constexpr (BLOCKS > 2 || ARE_MANY) _tile_zero(2);
        if constexpr (BLOCKS > 1 && ARE_MANY) _tile_zero(3);
        for (size_t unit = 0; unit < units; ++unit, quads += kQuads) {
            const size_t at = unit * kQuads * kLanes;
            _tile_loadd(4, quads, of_row * 4);
            if constexpr (ARE_MANY) {
                _tile_loadd(5, quads + kAmxRows * of_row, of_row * 4);
                _tile_loadd(6, laid[0] + at, 64);
                _tile_dpbsud(0, 4, 6);
                _tile_dpbsud(2, 5, 6);
                if constexpr (BLOCKS > 1) {
                    _tile_loadd(7, laid[1] + at, 64);
                    _tile_dpbsud(1, 4, 7);
                    _tile_dpbsud(3, 5, 7);
                }
            } else {
                _tile_loadd(5, laid[0] + at, 64);
                _tile_dpbsud(0, 4, 5);
                if constexpr (BLOCKS > 1) {
                    _tile_loadd(6, laid[1] + at, 64);
                    _tile_dpbsud(1, 4, 6);
                }
                if constexpr (BLOCKS > 2) {
                    _tile_loadd(7, laid[2] + at, 64);
                    _tile_dpbsud(2, 4, 7);
                }
            }
        }
        constexpr size_t kOthers = kAmxRows * kLanes;
        _tile_stored(0, sums[0], 64);
        if constexpr (ARE_MANY) _tile_stored(2, sums[0] + kOthers, 64);
        if constexpr (BLOCKS > 1) _tile_stored(1, sums[1], 64);
        if constexpr (BLOCKS > 1 && ARE_MANY) _tile_stored(3, sums[1] + kOthers, 64);
        if constexpr (BLOCKS > 2) _tile_stored(2, sums[2], 64);
    }

    // The codes of a unit as a tile, four inputs a row.
    POLYBASIC_INLINE static void lay_out(const uint32_t* codes, size_t ahead, uint32_t* to) {
#pragma GCC unroll 8
        for (size_t line = 0; line < Codes::kLines; ++line) __builtin_prefetch(codes + line * kLanes + ahead, 0, 2);
#pragma GCC unroll 4
        for (int word = 0; word < kQuads / 2; ++word) {
            WordPart low, high;
            Codes::read(codes, word, low, high);
            std::memcpy(to + 2 * word * kLanes, &low, sizeof low);
            std::memcpy(to + (2 * word + 1) * kLanes, &high, sizeof high);
        }
    }

    // Add a group's sums, scaled as `MultiplyCodes` does it.
    POLYBASIC_INLINE static void add_scaled(const Scales& scales, const Operand& x, int rows, int block, size_t group,
                                            const int32_t* sums, float* out) {
        scales.prefetch(block, group, kGroupsAhead * kLanes);
        const auto scale = scales.at(block, group, 0);
        const float *row_scales = x.scales + group * rows, *row_sums = x.sums + group * rows;
        for (int row = 0; row < rows; ++row, sums += kLanes, out += kLanes) {
            const FloatPart sum = __builtin_convertvector(load_part<IntPart>(sums), FloatPart);
            const FloatPart scaled = scale.apply(sum, all_lanes<FloatPart>(row_sums[row]));
            const FloatPart after =
                fused_multiply_add(scaled, all_lanes<FloatPart>(row_scales[row]), load_part<FloatPart>(out));
            std::memcpy(out, &after, sizeof after);
        }
    }
};

#endif

template <class Codes, class Scales>
void multiply_codes(const Matrix& matrix, const Operand& x, int rows, Range blocks, float* out) {
#if defined(POLYBASIC_AMX)
    if constexpr (!Scales::kHasFactors)
        if (x.is_by_row) return AmxCodes<Codes, Scales>::multiply(matrix, x, rows, blocks, out);
#endif
    multiply_tiles<MultiplyCodes<Codes, Scales>>(matrix, x, rows, blocks, out);
}

}  // namespace polybasic
