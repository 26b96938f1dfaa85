// Rows of GGML's types as a file has them, laid out as products read them.
#pragma once

#include "products/matrix.h"
#include "threads/team.h"

namespace polybasic {

// A block of one row: 32 inputs, or 256 of nested types.
struct FileBlock {
    uint8_t codes[kNested];     // those below eight bits unsigned
    uint16_t scale, offset;     // float16
    int8_t factors[2 * kNested / kGroup];   // [group][2]
};

template <class Number>
Number take(const uint8_t*& from) {
    Number number;
    std::memcpy(&number, from, sizeof number);
    from += sizeof number;
    return number;
}

// Codes of a few bits: of each run of bytes first the lowest bits, then those above; they are added to what
// there is from bit `to` on.
inline const uint8_t* take_codes(FileBlock& block, int size, const uint8_t* from, int run, int bits, int to) {
    for (int code = 0; code < size; from += run)
        for (int shift = 0; shift < 8; shift += bits)
            for (int i = 0; i < run; ++i, ++code)
                block.codes[code] |= uint8_t((from[i] >> shift & ((1 << bits) - 1)) << to);
    return from;
}

inline void take_simple_block(const Matrix& matrix, const uint8_t* from, FileBlock& block) {
    block.scale = take<uint16_t>(from);
    if (matrix.offsets != nullptr) block.offset = take<uint16_t>(from);
    if (matrix.format == kBlocks8) {
        std::memcpy(block.codes, from, kGroup);
        return;
    }
    if (matrix.format == kBlocks5) {
        const uint32_t fifth = take<uint32_t>(from);
        for (int i = 0; i < kGroup; ++i) block.codes[i] = uint8_t((fifth >> i & 1) << 4);
    }
    take_codes(block, kGroup, from, kGroup / 2, 4, 0);
}

inline void take_nested_block(const Matrix& matrix, const uint8_t* from, FileBlock& block) {
    if (matrix.offsets == nullptr) {
        from = take_codes(block, kNested, from, 64, 4, 0);
        from = take_codes(block, kNested, from, 32, 2, 4);
        std::memcpy(block.factors, from, sizeof block.factors);
        from += sizeof block.factors;
        block.scale = take<uint16_t>(from);
        return;
    }
    block.scale = take<uint16_t>(from);
    block.offset = take<uint16_t>(from) ^ 0x8000;   // it is subtracted
    // six bits each: of the first four groups, of their offsets, and of the last four groups the low halves,
    // whose high bits lie above those of the others
    for (int group = 0; group < 4; ++group) {
        const uint8_t scale = from[group], offset = from[4 + group], low = from[8 + group];
        int8_t *first = block.factors + 2 * group, *last = first + 8;
        first[0] = scale & 63;
        first[1] = offset & 63;
        last[0] = int8_t((low & 15) | scale >> 6 << 4);
        last[1] = int8_t(low >> 4 | offset >> 6 << 4);
    }
    from += 12;
    if (matrix.format == kBlocks5) from = take_codes(block, kNested, from, 32, 1, 4);
    take_codes(block, kNested, from, 32, 4, 0);
}

// A group's codes as the words of one output, which are kLanes words apart.
inline void place_codes(int format, const uint8_t* codes, uint32_t* to) {
    const auto four = [=](int i) {
        uint32_t bytes;
        std::memcpy(&bytes, codes + i, sizeof bytes);
        return bytes;
    };
    if (format == kBlocks8) {
        for (int line = 0; line < 8; ++line) to[line * kLanes] = four(4 * line);
        return;
    }
    for (int line = 0; line < 4; ++line)
        to[line * kLanes] = (four(8 * line) & 0x0f0f0f0fu) | (four(8 * line + 4) & 0x0f0f0f0fu) << 4;
    const int bits = format == kBlocks5 ? 1 : 2, num = format == kBlocks4 ? 0 : bits;
    for (int line = 0; line < num; ++line) {
        uint32_t above = 0;
        for (int k = 0; k < 8 / bits; ++k)
            above |= (four(kGroup / num * line + 4 * k) >> 4 & (bits == 1 ? 0x01010101u : 0x03030303u)) << k * bits;
        to[(4 + line) * kLanes] = above;
    }
}

// Fill a matrix, but for its rest: `rows` [own outputs][row_bytes].
inline void lay_out_blocks(const Matrix& matrix, const uint8_t* rows, size_t row_bytes, Thread& self) {
    const bool is_nested = matrix.factors != nullptr;
    const int groups_of_block = is_nested ? kNested / kGroup : 1;
    const int num_groups = matrix.num_groups(), num_file_blocks = num_groups / groups_of_block;
    const size_t block_bytes = row_bytes / num_file_blocks;
    const size_t words = matrix.weight_bytes() / 4 / (size_t(matrix.own_blocks()) * num_groups);
    auto* weights = static_cast<uint32_t*>(const_cast<void*>(matrix.weights));
    auto* scales = static_cast<uint16_t*>(const_cast<void*>(matrix.scales));
    auto* offsets = static_cast<uint16_t*>(const_cast<void*>(matrix.offsets));
    auto* factors = const_cast<int8_t*>(matrix.factors);
    const Range mine = share(matrix.own_blocks(), self.number, self.num_threads);
    for (int block = mine.first; block < mine.end; ++block)
        for (int index = 0; index < num_file_blocks; ++index)
            for (int lane = 0; lane < kLanes; ++lane) {
                const int output = block * kLanes + lane;
                FileBlock read{};
                if (output < matrix.own_outputs()) {
                    const uint8_t* from = rows + output * row_bytes + index * block_bytes;
                    is_nested ? take_nested_block(matrix, from, read) : take_simple_block(matrix, from, read);
                }
                const size_t at = (size_t(block) * num_file_blocks + index) * kLanes + lane;
                scales[at] = read.scale;
                if (offsets != nullptr) offsets[at] = read.offset;
                for (int i = 0; i < groups_of_block; ++i) {
                    const size_t group = size_t(block) * num_groups + index * groups_of_block + i;
                    place_codes(matrix.format, read.codes + i * kGroup, weights + group * words + lane);
                    for (int kind = 0; is_nested && kind < 2; ++kind)
                        factors[(2 * group + kind) * kLanes + lane] = read.factors[2 * i + kind];
                }
            }
}

}  // namespace polybasic
