// Finds the next tile of a cluster. The counts of rows per group are on the device, so every warp walks them itself, 32
// groups at a time, one per lane.
#pragma once

#include <cstdint>

#include "common/types.cuh"

namespace te_fast::gemm {

// The rows of a group, and where a tile lies in its result.
struct Place {
    int group;
    int start;   // first row of the group
    int rows;    // rows of the group
    int row;     // tile number along the result's rows
    int column;  // tile number along its columns, in units of clusters
};

// Tiles of adjacent rows come one after the other, so that they share the second operand while it is in L2.
constexpr int kRowsTogether = 8;

template <bool kByRows>
class Schedule {
  public:
    // `row_tiles` is that of every group unless groups cut the rows (kByRows); then tiles are `tile_rows` high. Splits
    // count `counted` rows at most: those that casts have padded to `rows`. Null: one group has them all.
    __device__ Schedule(const int64_t* splits, int groups, int rows, int counted, int align, int tile_rows,
                        int row_tiles, int columns, bool skip_empty)
        : splits_(splits),
          groups_(groups),
          rows_(rows),
          counted_(counted),
          align_(align),
          tile_rows_(tile_rows),
          row_tiles_(row_tiles),
          columns_(columns),
          skip_empty_(skip_empty) {
        load();
    }

    // The place of `tile`, which never falls from call to call; false past the last one.
    __device__ bool find(uint32_t tile, Place& place) {
        for (;;) {
            const uint32_t behind = __ballot_sync(~0u, tiles_end_ > tile);
            if (behind != 0) {
                const int lane = __ffs(behind) - 1;
                const uint32_t end = __shfl_sync(~0u, tiles_end_, lane);
                const uint32_t tiles = __shfl_sync(~0u, tiles_, lane);
                place.group = first_ + lane;
                place.start = __shfl_sync(~0u, start_, lane);
                place.rows = __shfl_sync(~0u, count_, lane);
                arrange(static_cast<int>(tile - (end - tiles)), row_tiles_of(place.rows), place);
                return true;
            }
            first_ += 32;
            if (first_ >= groups_) return false;
            tiles_before_ = __shfl_sync(~0u, tiles_end_, 31);
            rows_before_ = __shfl_sync(~0u, rows_end_, 31);
            if constexpr (!kByRows) counted_before_ = __shfl_sync(~0u, counted_end_, 31);
            load();
        }
    }

  private:
    __device__ int row_tiles_of(int rows) const {
        if constexpr (kByRows) return (rows + tile_rows_ - 1) / tile_rows_;
        return row_tiles_;
    }

    __device__ void arrange(int tile, int row_tiles, Place& place) const {
        const int band = tile / (kRowsTogether * columns_);
        const int in_band = tile - band * kRowsTogether * columns_;
        const int height = min(kRowsTogether, row_tiles - band * kRowsTogether);
        place.column = in_band / height;
        place.row = band * kRowsTogether + in_band - place.column * height;
    }

    // A split, cut off at the end of the memory. Sums stay below 2^32, since each of two terms is at most the number of
    // rows.
    __device__ void load() {
        const int lane = threadIdx.x % 32;
        int64_t given = 0;
        if (first_ + lane < groups_) given = splits_ == nullptr ? counted_ : splits_[first_ + lane];
        const auto all = static_cast<uint32_t>(rows_), counted = static_cast<uint32_t>(counted_);
        auto rows = static_cast<uint32_t>(min(max(given, int64_t{0}), static_cast<int64_t>(counted_)));
        if constexpr (!kByRows) {
            // Splits beyond the rows were cut off before the groups were padded.
            uint32_t sum = rows;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const uint32_t other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum = min(sum + other, counted);
            }
            counted_end_ = min(counted_before_ + sum, counted);
            const uint32_t before = __shfl_up_sync(~0u, counted_end_, 1);
            rows = counted_end_ - (lane == 0 ? counted_before_ : before);
        }
        const uint32_t taken = min((rows + align_ - 1) / align_ * align_, all);
        uint32_t sum = taken;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum = min(sum + other, all);
        }
        rows_end_ = min(rows_before_ + sum, all);
        const uint32_t before = __shfl_up_sync(~0u, rows_end_, 1);
        start_ = static_cast<int>(lane == 0 ? rows_before_ : before);
        count_ = min(static_cast<int>(rows), rows_ - start_);
        tiles_ = first_ + lane < groups_ && !(skip_empty_ && count_ == 0) ? row_tiles_of(count_) * columns_ : 0;
        uint32_t tiles = tiles_;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, tiles, step);
            if (lane >= step) tiles += other;
        }
        tiles_end_ = tiles_before_ + tiles;
    }

    const int64_t* splits_;
    int groups_, rows_, counted_, align_, tile_rows_, row_tiles_, columns_;
    bool skip_empty_;
    int first_ = 0;
    uint32_t rows_before_ = 0, rows_end_;
    uint32_t counted_before_ = 0, counted_end_ = 0;
    uint32_t tiles_before_ = 0, tiles_, tiles_end_;
    int start_, count_;
};

}  // namespace te_fast::gemm
