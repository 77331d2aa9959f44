// The places of the groups among a tensor's rows: from counts on the device, or with equal rows.
#pragma once

#include <cstdint>

#include "common/constants.cuh"
#include "common/scan.cuh"

namespace te_fast::quantize {

// The rows of one group.
struct GroupRows {
    uint32_t first;  // of the tensor, which has fewer than 2^31
    uint32_t rows;
    uint32_t padded;  // the first one where each group begins at a multiple of a tile's rows
    uint32_t index;
};

// A count limited to 0 and the number of rows.
__device__ inline uint64_t clamped(int64_t count, uint64_t rows) {
    return count < 0 ? 0 : min(static_cast<uint64_t>(count), rows);
}

// Finds the group that has tile `strip` along the rows, of those that begin at multiples of its rows; false where no
// group has it. For one warp, which reads 32 counts at a time, one in each lane. Sums stay below 2^32.
__device__ inline bool find_group_in_warp(const int64_t* splits, uint32_t groups, uint32_t rows, uint32_t strip,
                                          GroupRows& found) {
    using tile::kTile;
    const uint32_t lane = threadIdx.x % 32;
    uint32_t rows_before = 0, tiles_before = 0;
    for (uint32_t base = 0; base < groups; base += 32) {
        const int64_t given = base + lane < groups ? splits[base + lane] : 0;
        uint32_t end = static_cast<uint32_t>(clamped(given, rows));
#pragma unroll
        for (uint32_t distance = 1; distance < 32; distance *= 2) {
            const uint32_t other = __shfl_up_sync(kFullWarp, end, distance);
            if (lane >= distance) end = min(end + other, rows);
        }
        end = min(rows_before + end, rows);
        const uint32_t before = __shfl_up_sync(kFullWarp, end, 1);
        const uint32_t first = lane == 0 ? rows_before : before;
        const uint32_t tiles = (end - first + kTile - 1) / kTile;
        uint32_t tiles_end = tiles;
#pragma unroll
        for (uint32_t distance = 1; distance < 32; distance *= 2) {
            const uint32_t other = __shfl_up_sync(kFullWarp, tiles_end, distance);
            if (lane >= distance) tiles_end += other;
        }
        tiles_end += tiles_before;
        const uint32_t behind = __ballot_sync(kFullWarp, strip < tiles_end);
        if (behind != 0) {
            const int owner = __ffs(behind) - 1;
            found.first = __shfl_sync(kFullWarp, first, owner);
            found.rows = __shfl_sync(kFullWarp, end - first, owner);
            found.padded = __shfl_sync(kFullWarp, tiles_end - tiles, owner) * kTile;
            found.index = base + owner;
            return true;
        }
        rows_before = __shfl_sync(kFullWarp, end, 31);
        tiles_before = __shfl_sync(kFullWarp, tiles_end, 31);
    }
    found = {};
    return false;
}

// The same in every thread of a block. Contains a barrier.
__device__ inline bool find_group(const int64_t* splits, uint32_t groups, uint32_t rows, uint32_t strip,
                                  GroupRows& found) {
    __shared__ GroupRows shared;
    __shared__ bool exists;
    if (threadIdx.x < 32) {
        const bool here = find_group_in_warp(splits, groups, rows, strip, found);
        if (threadIdx.x == 0) {
            shared = found;
            exists = here;
        }
    }
    __syncthreads();
    found = shared;
    return exists;
}

// The rows of one group by its number. The same in every thread. Contains barriers.
template <int kThreads>
__device__ inline void rows_of_group(const int64_t* splits, uint32_t group, uint64_t rows, GroupRows& found) {
    __shared__ uint64_t scratch[kThreads / 32];
    uint64_t sum = 0, total;
    for (uint32_t other = threadIdx.x; other < group; other += kThreads) sum += clamped(splits[other], rows);
    block_scan<kThreads>(sum, Sum{}, scratch, total);
    found.first = static_cast<uint32_t>(min(total, rows));
    found.rows = static_cast<uint32_t>(min(clamped(splits[group], rows), rows - found.first));
    found.index = group;
}

}  // namespace te_fast::quantize
