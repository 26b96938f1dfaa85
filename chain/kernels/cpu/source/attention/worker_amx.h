// Attention over a cache of bfloat16 numbers by AMX: sixteen queries at a time, which read the values of a segment
// as they were laid out once for all that share them. So they do the keys if they are many; for a few it is the
// queries that are laid out, and the keys are read where they lie.
//
// A score is summed over the head in order, a weighted sum over the positions, thirty-two at a time from the
// segment's first on. Neither depends on the queries of the tile, nor on where positions are in the cache.
#pragma once

#include "amx.h"
#include "attention/worker.h"

#if defined(POLYBASIC_AMX)

namespace polybasic {
namespace attention {

// Transpose sixteen rows of sixteen words.
POLYBASIC_INLINE void transpose(__m512i (&rows)[16]) {
    __m512i pairs[16], fours[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    // a quarter of `fours[i + j]` holds a column of four rows: j, j + 4, j + 8 or j + 12
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i even = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
        const __m512i later_even = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
        const __m512i later_odd = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
        rows[j] = _mm512_shuffle_i32x4(even, later_even, 0x88);
        rows[4 + j] = _mm512_shuffle_i32x4(odd, later_odd, 0x88);
        rows[8 + j] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
        rows[12 + j] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
    }
}

// Thirty-two elements of a head, or the sixteen that are left of it and zeros.
POLYBASIC_INLINE __m512i read_part(const Bfloat16* row, int at, int head_dim) {
    if (at + kAmxInputs <= head_dim) return _mm512_loadu_si512(row + at);
    return ValuePart<Bfloat16>::read_half(row + at);
}

// Keys and values side by side, to be prefetched a few lines at a time while others are worked on. Only some
// sixteen lines can be on their way to a core: more at once make it wait, and without any memory is idle.
class LinesAhead {
public:
    LinesAhead() = default;
    LinesAhead(const Bfloat16* keys, const Bfloat16* values, size_t num_elements)
        : keys_(keys), values_(values), left_(num_elements / kAmxInputs) {}

    POLYBASIC_INLINE void fetch(size_t num) {
        for (; num > 0 && left_ > 0; --num, --left_, keys_ += kAmxInputs, values_ += kAmxInputs) {
            __builtin_prefetch(keys_, 0, 2);
            __builtin_prefetch(values_, 0, 2);
        }
    }

private:
    const Bfloat16 *keys_ = nullptr, *values_ = nullptr;
    size_t left_ = 0;
};

// The keys of sixteen positions as tiles, one for each part of the head.
template <class Keys>
void lay_out_keys(const Keys& keys, int head_dim, Bfloat16* tiles) {
    for (int at = 0; at < head_dim; at += kAmxInputs, tiles += kAmxTile) {
        __m512i rows[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) rows[i] = read_part(keys[i], at, head_dim);
        transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(tiles + i * kAmxInputs, rows[i]);
    }
}

// The values of thirty-two positions as tiles, two for each part of the head, in the order of `ValuePart`; zeros
// from the position `num` on. False if NaN or infinity is among them.
template <class Values>
bool lay_out_values(const Values& values, int num, int head_dim, Bfloat16* tiles, LinesAhead& ahead) {
    const __m512i zeros = _mm512_setzero_si512(), exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 are_bad = 0;
    const auto read = [&](int i, int at) {
        const __m512i part = i < num ? read_part(values[i], at, head_dim) : zeros;
        are_bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(part, exponent), exponent);
        return part;
    };
    for (int i = 0; i < kAmxInputs; i += 2) {
        Bfloat16* to = tiles + i / 2 * kAmxInputs;
        for (int at = 0; at < head_dim; at += kAmxInputs, to += 2 * kAmxTile) {
            ahead.fetch(1);
            const __m512i first = read(i, at), second = read(i + 1, at);
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(first, second));
            _mm512_storeu_si512(to + kAmxTile, _mm512_unpackhi_epi16(first, second));
        }
    }
    return are_bad == 0;
}

template <int kHead>
class AmxWorker : public Worker<Bfloat16, kHead> {
    using Base = Worker<Bfloat16, kHead>;
    using Base::block_queries_;
    using Base::first_;
    using Base::head_;
    using Base::head_dim;
    using Base::keys_;
    using Base::plain_end_;
    using Base::row_of;
    using Base::rows_;
    using Base::scores_;
    using Base::scores_of;
    using Base::shape_;
    using Base::spares_;
    using Base::values_;
    using Base::viewers_;

public:
    using Base::Base;

private:
    void attend_segment(const Item& item, int segment) override {
        first_ = segment * kSegment;
        const int num = item.end_query - item.first_query;
        int begin = kSegment, end = 0;
        for (int q = 0; q < num; ++q) {
            const SegmentView& view = (viewers_[q] = this->viewer_of(item, item.first_query + q)).view;
            if (view.is_empty()) continue;
            begin = std::min(begin, view.begin);
            end = std::max(end, view.plain_end);
        }
        if (begin == kSegment) return;
        begin -= begin % kAmxInputs;
        ahead_ = following(item);
        are_finite_ = true;
        // a few queries are laid out sooner than the keys, which must be whole parts then
        reads_keys_ = 2 * num <= head_ && head_dim() == head_;
        if (reads_keys_)
            lay_out_queries(num);
        else
            lay_out(begin, end);
        constexpr int kRows = kAmxRows;
        AmxShapes({kRows, kRows, kRows, kRows, kRows, kRows, kRows, kRows}).use();
        for (int q = 0; q < num; q += kAmxRows)
            attend_tile(item, q, std::min(num - q, kAmxRows), begin, end);
        _tile_release();
    }

    // The segment behind this one, of this head or the next, where that is not hidden by a window.
    LinesAhead following(const Item& item) const {
        const size_t of_head = size_t(shape_.capacity) * head_dim();
        if (const int left = plain_end_ - first_ - kSegment; left > 0)
            return {row_of(keys_, kSegment), row_of(values_, kSegment),
                    size_t(std::min(left, kSegment)) * head_dim()};
        if (item.head + 1 == shape_.num_kv_heads || shape_.window > 0) return {};
        return {keys_ + of_head, values_ + of_head, size_t(std::min(plain_end_, kSegment)) * head_dim()};
    }

    // Once for all segments; in the place of keys.
    void lay_out_queries(int num) {
        for (; num_laid_ < num; num_laid_ += kAmxRows)
            lay_out_keys(ConsecutiveRows<Bfloat16>{block_queries_ + num_laid_ * head_, head_}, head_,
                         keys_at(num_laid_));
    }

    // Keys and values of the positions that are consecutive in the cache.
    void lay_out(int begin, int end) {
        const int last = plain_end_ - first_ - 1;
        for (int at = begin; at < end; at += kLanes) {
            ahead_.fetch(2);
            if (at + kLanes <= last + 1) {
                lay_out_keys(ConsecutiveRows<Bfloat16>{row_of(keys_, at), head_dim()}, head_dim(), keys_at(at));
                continue;
            }
            int32_t listed[kLanes];
            for (int i = 0; i < kLanes; ++i) listed[i] = first_ + std::min(at + i, last);
            lay_out_keys(ListedRows<Bfloat16>{keys_, head_dim(), listed}, head_dim(), keys_at(at));
        }
        for (int at = begin; at < end; at += kAmxInputs) lay_out_values_at(at);
    }

    void lay_out_values_at(int at) {
        const ConsecutiveRows<Bfloat16> values{row_of(values_, at), head_dim()};
        const int num = std::min(plain_end_ - first_ - at, kAmxInputs);
        are_finite_ &= lay_out_values(values, num, head_dim(), values_at(at), ahead_);
    }

    Bfloat16* keys_at(int position) { return laid_keys_ + position * head_; }
    Bfloat16* values_at(int position) { return laid_values_ + position * head_; }

    // Sixteen queries of the item from `place` on, `num` of them real, over the positions begin..end that are
    // consecutive in the cache, and those of their paths.
    void attend_tile(const Item& item, int place, int num, int begin, int end) {
        const Bfloat16* queries = block_queries_ + place * head_;
        if (reads_keys_)
            score_cached(place, num, begin, end);
        else
            for (int at = begin; at < end; at += 4 * kLanes)
                score(queries, keys_at(at), ceil_divide(std::min(end - at, 4 * kLanes), kLanes), scores_ + at,
                      Base::kScoresStride);
        // The values are weighed together as far as all queries read the cache alike; by zero what some do not
        // see, which is nothing only of numbers.
        const bool are_all = rows_.path_ends == nullptr && are_finite_;
        int together = are_all ? 0 : kSegment;
        for (int q = 0; q < num; ++q) {
            Viewer<Bfloat16>& viewer = viewers_[place + q];
            const SegmentView& view = viewer.view;
            if (view.is_empty()) continue;
            if (are_all)
                together = std::max(together, ceil_divide(view.end, kAmxInputs) * kAmxInputs);
            else
                together = std::min(together, view.plain_end - view.plain_end % kAmxInputs);
            viewer.partial = {spares_ + q * (head_ + kLanes), head_};
        }
        together = std::max(together, begin);
        if (rows_.path_ends != nullptr)
            for_each_row(item, place, num, [&](int q, int end_q) { score_path(place + q, q, end_q); });
        for (int q = 0; q < num; ++q) {
            const Viewer<Bfloat16>& viewer = viewers_[place + q];
            if (viewer.view.is_empty()) continue;
            ahead_.fetch(16);
            this->weigh_scores(viewer, begin, scores_of(q));
            // what lies behind is hidden from it, and weighs nothing
            const int seen = ceil_divide(viewer.view.end, kLanes) * kLanes;
            const int read = std::max(ceil_divide(viewer.view.end, kAmxInputs) * kAmxInputs, together);
            std::fill(weights_of(q) + seen, weights_of(q) + read, Bfloat16{});
        }
        add_values(values_at(begin), weights_of(0) + begin, (together - begin) / kAmxInputs, nullptr, spares_);
        if (!are_all)
            for_each_row(item, place, num, [&](int q, int end_q) { add_path(place + q, q, end_q, together); });
        for (int q = 0; q < num; ++q) {
            const Viewer<Bfloat16>& viewer = viewers_[place + q];
            if (!viewer.view.is_empty()) viewer.whole.fold(viewer.partial);
        }
    }

    Bfloat16* weights_of(int place) { return reinterpret_cast<Bfloat16*>(scores_of(place)); }

    // Pass the queries first..end of the tile that belong to one row of the pass, which see the same.
    template <class Visit>
    void for_each_row(const Item& item, int place, int num, Visit visit) {
        const int groups = shape_.query_groups;
        for (int q = 0, end_q; q < num; q = end_q) {
            const int next = ((item.first_query + place + q) / groups + 1) * groups;
            end_q = std::min(next - item.first_query - place, num);
            if (!viewers_[place + q].view.is_empty()) visit(q, end_q);
        }
    }

    // Scores of up to sixteen queries with the keys where they lie. For the first ones, values are laid out on the
    // way: reading both at a time keeps memory busier.
    void score_cached(int place, int num, int begin, int end) {
        const int last = plain_end_ - first_ - 1;
        for (int at = begin, num_blocks; at < end; at += num_blocks * kLanes) {
            const Bfloat16* keys = row_of(keys_, at);
            num_blocks = std::min({4, ceil_divide(end - at, kLanes), (last + 1 - at) / kLanes});
            if (num_blocks <= 0) {  // the cache may end before the sixteenth
                num_blocks = 1;
                keys = path_;
                for (int i = 0; i < kLanes; ++i)
                    std::memcpy(path_ + i * head_, row_of(keys_, std::min(at + i, last)), head_ * sizeof(Bfloat16));
            }
            if (place == 0)
                for (int i = at + at % kAmxInputs; i < at + num_blocks * kLanes; i += kAmxInputs)
                    lay_out_values_at(i);
            score_positions(keys_at(place), keys, num_blocks);
            for (int block = 0; block < num_blocks; ++block) {
                ahead_.fetch(2);
                __m512i rows[16];
#pragma GCC unroll 16
                for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_si512(sums_ + (block * kLanes + i) * kLanes);
                transpose(rows);
                for (int q = 0; q < num; ++q) _mm512_storeu_si512(scores_of(q) + at + block * kLanes, rows[q]);
            }
        }
    }

    // Scores of up to four times sixteen positions, in rows, with sixteen queries that were laid out: into sums_.
    // They have the bits of `score`.
    void score_positions(const Bfloat16* queries, const Bfloat16* keys, int num_blocks) {
        const int of_block = kLanes * head_, stride = head_ * int(sizeof(Bfloat16));
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int at = 0; at < head_; at += kAmxInputs, keys += kAmxInputs, queries += kAmxTile) {
            _tile_loadd(4, queries, 64);
            _tile_loadd(5, keys, stride);
            _tile_dpbf16ps(0, 5, 4);
            if (num_blocks > 1) {
                _tile_loadd(6, keys + of_block, stride);
                _tile_dpbf16ps(1, 6, 4);
            }
            if (num_blocks > 2) {
                _tile_loadd(7, keys + 2 * of_block, stride);
                _tile_dpbf16ps(2, 7, 4);
            }
            if (num_blocks > 3) {
                _tile_loadd(5, keys + 3 * of_block, stride);
                _tile_dpbf16ps(3, 5, 4);
            }
        }
        store_scores(sums_, num_blocks, kLanes, kAmxRows * kLanes);
    }

    // Scores of sixteen queries with up to four times sixteen positions.
    void score(const Bfloat16* queries, const Bfloat16* keys, int num_blocks, float* scores, int stride) {
        const int of_block = kLanes * head_, queries_stride = head_ * int(sizeof(Bfloat16));
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int at = 0; at < head_; at += kAmxInputs, keys += kAmxTile) {
            _tile_loadd(4, queries + at, queries_stride);
            _tile_loadd(5, keys, 64);
            _tile_dpbf16ps(0, 4, 5);
            if (num_blocks > 1) {
                _tile_loadd(6, keys + of_block, 64);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (num_blocks > 2) {
                _tile_loadd(7, keys + 2 * of_block, 64);
                _tile_dpbf16ps(2, 4, 7);
            }
            if (num_blocks > 3) {
                _tile_loadd(5, keys + 3 * of_block, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        store_scores(scores, num_blocks, stride, kLanes);
    }

    // The first tiles, `distance` apart.
    void store_scores(float* scores, int num_tiles, int stride, int distance) {
        const int bytes = stride * int(sizeof(float));
        _tile_stored(0, scores, bytes);
        if (num_tiles > 1) _tile_stored(1, scores + distance, bytes);
        if (num_tiles > 2) _tile_stored(2, scores + 2 * distance, bytes);
        if (num_tiles > 3) _tile_stored(3, scores + 3 * distance, bytes);
    }

    // Scores of the queries of one row with the positions of its path.
    void score_path(int place, int q, int end_q) {
        const Viewer<Bfloat16>& viewer = viewers_[place];
        const int begin = viewer.view.plain_end;
        if (begin >= viewer.view.end) return;
        int32_t rows[kSegment + kLanes];
        viewer.list_rows(first_, begin, rows);
        for (int at = begin; at < viewer.view.end; at += kLanes) {
            lay_out_keys(ListedRows<Bfloat16>{keys_, head_dim(), rows + (at - begin)}, head_dim(), path_);
            score(block_queries_ + place * head_, path_, 1, sums_, kLanes);
            for (int i = q; i < end_q; ++i)
                std::memcpy(scores_of(i) + at, sums_ + (i - q) * kLanes, kLanes * sizeof(float));
        }
    }

    // Values that sixteen queries weigh, over `num_steps` times 32 positions: on top of `before`, or of zero.
    void add_values(const Bfloat16* values, const Bfloat16* weights, int num_steps, const float* before,
                    float* sums) {
        int at = 0;
        for (; at + 4 * kLanes <= head_; at += 4 * kLanes)
            add_values_at<4>(values + at / kLanes * kAmxTile, weights, num_steps, at_head(before, at), sums + at);
        if (at < head_)
            add_values_at<2>(values + at / kLanes * kAmxTile, weights, num_steps, at_head(before, at), sums + at);
    }

    static const float* at_head(const float* sums, int at) { return sums == nullptr ? nullptr : sums + at; }

    // A few tiles of them.
    template <int TILES>
    void add_values_at(const Bfloat16* values, const Bfloat16* weights, int num_steps, const float* before,
                       float* sums) {
        const int stride = (head_ + kLanes) * int(sizeof(float));
        if (before == nullptr) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, before, stride);
            _tile_loadd(1, before + kLanes, stride);
            if constexpr (TILES == 4) {
                _tile_loadd(2, before + 2 * kLanes, stride);
                _tile_loadd(3, before + 3 * kLanes, stride);
            }
        }
        for (int step = 0; step < num_steps; ++step, values += kAmxInputs * head_) {
            ahead_.fetch(8);
            _tile_loadd(4, weights + step * kAmxInputs, Base::kScoresStride * int(sizeof(float)));
            _tile_loadd(5, values, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, values + kAmxTile, 64);
            _tile_dpbf16ps(1, 4, 6);
            if constexpr (TILES == 4) {
                _tile_loadd(7, values + 2 * kAmxTile, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, values + 3 * kAmxTile, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, sums, stride);
        _tile_stored(1, sums + kLanes, stride);
        if constexpr (TILES == 4) {
            _tile_stored(2, sums + 2 * kLanes, stride);
            _tile_stored(3, sums + 3 * kLanes, stride);
        }
    }

    // Those of one row's queries from the position `begin` on, added to their sums.
    void add_path(int place, int q, int end_q, int begin) {
        const Viewer<Bfloat16>& viewer = viewers_[place];
        if (begin >= viewer.view.end) return;
        int32_t rows[kSegment + kLanes];
        viewer.list_rows(first_, begin, rows);
        float* sums = spares_ + q * (head_ + kLanes);
        for (int at = begin; at < viewer.view.end; at += kAmxInputs) {
            const ListedRows<Bfloat16> values{values_, head_dim(), rows + (at - begin)};
            lay_out_values(values, std::min(viewer.view.end - at, kAmxInputs), head_dim(), path_, ahead_);
            add_values(path_, weights_of(q) + at, 1, sums, sums_);
            for (int i = 0; i < end_q - q; ++i)
                std::memcpy(sums + i * (head_ + kLanes), sums_ + i * (head_ + kLanes), head_ * sizeof(float));
        }
    }

    LinesAhead ahead_;
    int num_laid_ = 0;  // queries
    bool reads_keys_;   // from the cache
    bool are_finite_;   // the values that are laid out
    alignas(64) Bfloat16 laid_keys_[kSegment * kMaxHead];
    alignas(64) Bfloat16 laid_values_[kSegment * kMaxHead];
    alignas(64) Bfloat16 path_[kAmxInputs * kMaxHead];
    alignas(64) float sums_[kAmxRows * (kMaxHead + kLanes)];     // or scores
};

}  // namespace attention
}  // namespace polybasic

#endif
