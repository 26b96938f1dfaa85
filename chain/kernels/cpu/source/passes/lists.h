// Which outputs the rows of a product ask for: of the output projection those of a row's shortlist
// (polybasic.chain.kernels.shortlist).
#pragma once

#include <algorithm>
#include <vector>

#include "products/matrix.h"
#include "threads/team.h"

namespace polybasic {

// `lists`: of each row a byte for each kUnit blocks, zero for those that it does not ask for, or null if it asks for
// all; null where all rows do.
class Lists {
public:
    static constexpr int kUnit = 4;

    Lists(const uint8_t* const* lists, int num_rows, int num_blocks)
        : lists_(lists), num_units_((num_blocks + kUnit - 1) / kUnit) {
        std::vector<const uint8_t*> different;
        for (int row = 0; lists != nullptr && row < num_rows; ++row)
            if (row == 0 || lists[row] != lists[row - 1]) different.push_back(lists[row]);
        if (different.size() == 1 && different[0] == nullptr) lists_ = nullptr;
        if (lists_ == nullptr || std::count(different.begin(), different.end(), nullptr) > 0) {
            spans_ = {{0, num_blocks}};
            total_ = num_blocks;
            return;
        }
        for (int unit = 0; unit < num_units_; ++unit) {
            bool is_asked = false;
            for (const uint8_t* list : different) is_asked |= list[unit] != 0;
            if (!is_asked) continue;
            const int first = unit * kUnit, end = std::min(first + kUnit, num_blocks);
            if (!spans_.empty() && spans_.back().end == first)
                spans_.back().end = end;
            else
                spans_.push_back({first, end});
            total_ += end - first;
        }
    }

    bool has(int row, int block) const {
        return lists_ == nullptr || lists_[row] == nullptr || lists_[row][block / kUnit] != 0;
    }

    // One thread's part of the blocks that some row asks for, at most `size` of consecutive ones at a time, from a
    // multiple of `step` on.
    template <class Work>
    void for_each_part(const Thread& self, int size, int step, Work work) const {
        const Range mine = share(total_, self.number, self.num_threads, step);
        int before = 0;
        for (const Range& span : spans_) {
            const int first = span.first + std::max(mine.first - before, 0);
            const int end = std::min(span.end, span.first + mine.end - before);
            before += span.end - span.first;
            for (int block = first; block < end; block += size) work(Range{block, std::min(block + size, end)});
        }
    }

    // One thread's part of what rows do not ask for: `work(row, unit)`.
    template <class Work>
    void for_each_other(int num_rows, const Thread& self, Work work) const {
        const Range units = share(num_units_, self.number, self.num_threads);
        if (lists_ == nullptr) return;
        for (int row = 0; row < num_rows; ++row)
            for (int unit = units.first; unit < units.end; ++unit)
                if (!has(row, unit * kUnit)) work(row, unit);
    }

private:
    const uint8_t* const* lists_;
    int num_units_;
    std::vector<Range> spans_;  // of blocks that some row asks for,
    int total_ = 0;             // of so many
};

}  // namespace polybasic
