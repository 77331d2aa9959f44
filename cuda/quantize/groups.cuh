// The places of the groups among a tensor's rows: from counts on the device, or with equal rows.
#pragma once

#include <cstdint>

#include "common/constants.cuh"
#include "common/scan.cuh"

namespace te_fast::quantize {

// The rows of one group.
struct GroupRows {
    uint64_t first;  // of the tensor
    uint64_t rows;
    uint64_t padded;  // the first one where each group begins at a multiple of kTile
    uint32_t index;
};

// A count limited to 0 and the number of rows.
__device__ inline uint64_t clamped(int64_t count, uint64_t rows) {
    return count < 0 ? 0 : min(static_cast<uint64_t>(count), rows);
}

// Counts of groups `begin` to `end`, within `rows` rows.
__device__ inline uint64_t count_rows(const int64_t* splits, uint32_t begin, uint32_t end, uint64_t rows) {
    uint64_t sum = 0;
    for (uint32_t group = begin; group < end; ++group) sum += clamped(splits[group], rows);
    return sum;
}

// Finds the group that has tile `strip` along the rows, of those that begin at multiples of kTile; false where no
// group has it. The same in every thread. Contains barriers.
template <int kThreads>
__device__ inline bool find_group(const int64_t* splits, uint32_t groups, uint64_t rows, uint64_t strip,
                                  GroupRows& found) {
    __shared__ uint64_t scratch[kThreads / 32];
    __shared__ GroupRows shared;
    __shared__ bool exists;
    const uint32_t each = (groups + kThreads - 1) / kThreads;
    const uint32_t begin = min(threadIdx.x * each, groups), end = min(begin + each, groups);
    if (threadIdx.x == 0) exists = false;
    uint64_t total;
    const uint64_t counted = count_rows(splits, begin, end, rows);
    uint64_t first = block_scan<kThreads>(counted, Sum{}, scratch, total) - counted;
    const auto visit = [&](auto take) {
        uint64_t at = min(first, rows);
        for (uint32_t group = begin; group < end; ++group) {
            const uint64_t here = min(clamped(splits[group], rows), rows - at);
            take(group, at, here);
            at += here;
        }
    };
    uint64_t tiles = 0;
    visit([&](uint32_t, uint64_t, uint64_t here) { tiles += (here + kTile - 1) / kTile; });
    uint64_t before = block_scan<kThreads>(tiles, Sum{}, scratch, total) - tiles;
    visit([&](uint32_t group, uint64_t at, uint64_t here) {
        const uint64_t own = (here + kTile - 1) / kTile;
        if (strip >= before && strip < before + own) {
            shared = GroupRows{at, here, before * kTile, group};
            exists = true;
        }
        before += own;
    });
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
    found.first = min(total, rows);
    found.rows = min(clamped(splits[group], rows), rows - found.first);
    found.index = group;
}

}  // namespace te_fast::quantize
