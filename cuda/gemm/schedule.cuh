// Finds the next tile of a cluster. The counts of rows per group are on the device, so every warp walks them itself.
#pragma once

#include <cstdint>

#include "common/types.cuh"
#include "gemm/walk.cuh"

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
        : walk_(splits, groups, rows, counted, align),
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
                place.group = walk_.first() + lane;
                place.start = __shfl_sync(~0u, walk_.start(), lane);
                place.rows = __shfl_sync(~0u, walk_.rows(), lane);
                arrange(static_cast<int>(tile - (end - tiles)), row_tiles_of(place.rows), place);
                return true;
            }
            if (!walk_.next()) return false;
            tiles_before_ = __shfl_sync(~0u, tiles_end_, 31);
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

    __device__ void load() {
        const int lane = threadIdx.x % 32;
        tiles_ = walk_.is_group() && !(skip_empty_ && walk_.rows() == 0) ? row_tiles_of(walk_.rows()) * columns_ : 0;
        uint32_t tiles = tiles_;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, tiles, step);
            if (lane >= step) tiles += other;
        }
        tiles_end_ = tiles_before_ + tiles;
    }

    Walk<kByRows> walk_;
    int tile_rows_, row_tiles_, columns_;
    bool skip_empty_;
    uint32_t tiles_before_ = 0, tiles_, tiles_end_;
};

}  // namespace te_fast::gemm
