// Sums of the columns of a tensor that blocks walk strip by strip, in an order that shape and plan fix: the rows of a
// strip that a thread has, 8 of each tile; two such; the 8 pairs; the strips s of each of 8 classes s % 8; the classes.
// No block waits for another: the last block to arrive does the rest, for any order of starts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/reduce.cuh"
#include "tile/strip.cuh"

namespace te_fast::tile {

constexpr int kTileWarps = kTileThreads / 32;

// A thread's sums of the eight columns of its patch.
template <int kHalves>
using ColumnTotals = float[kHalves][8];

template <int kHalves>
using WarpTotals = float[kHalves][kTileWarps][kTile];

// Sum of `count` partial results that lie `stride` apart, which other blocks wrote.
__device__ inline float sum_partials(const float* from, uint64_t count, size_t stride) {
    constexpr uint64_t kClasses = 8;
    float total[kClasses] = {};
#pragma unroll 2
    for (uint64_t tile = 0; tile < count; tile += kClasses) {
#pragma unroll
        for (uint64_t i = 0; i < kClasses; ++i) {
            if (tile + i < count) total[i] += __ldcg(from + (tile + i) * stride);
        }
    }
#pragma unroll
    for (uint64_t i = 1; i < kClasses; ++i) total[0] += total[i];
    return total[0];
}

// Sums the columns of the strip; the block that arrives last for its 128 columns adds the strips. `partial` is
// [strips][stride], `counters` [tiles_cols], zero between launches. Contains barriers.
template <bool kGated, Floating Out>
__device__ void sum_columns(const Strip& strip, ColumnTotals<Halves<kGated>::kCount>& totals,
                            WarpTotals<Halves<kGated>::kCount>& sums, uint32_t strips, const Halves<kGated>& halves,
                            float* partial, unsigned* counters, Out* dbias) {
    constexpr int kCount = Halves<kGated>::kCount;
    static_assert(kCount * kTile <= kTileThreads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ptx::wait_copies<0>();
    __syncthreads();  // the ring is free
#pragma unroll
    for (int half = 0; half < kCount; ++half) {
        float (&total)[8] = totals[half];
#pragma unroll
        for (int c = 0; c < 8; ++c) total[c] += __shfl_xor_sync(kFullWarp, total[c], kPatches);
        if (lane < kPatches) {
#pragma unroll
            for (int c = 0; c < 8; c += 4) {
                *reinterpret_cast<float4*>(&sums[half][warp][lane * kPatch + c]) =
                    make_float4(total[c], total[c + 1], total[c + 2], total[c + 3]);
            }
        }
    }
    __syncthreads();
    const int half = threadIdx.x / kTile;
    const size_t col = static_cast<size_t>(strip.tile_col) * kTile + threadIdx.x % kTile;
    const bool inside = half < kCount && col < halves.cols;
    float* from = partial + half * halves.cols + col;
    if (inside) {
        float sum = sums[half][0][threadIdx.x % kTile];
#pragma unroll
        for (int i = 1; i < kTileWarps; ++i) sum += sums[half][i][threadIdx.x % kTile];
        from[strip.index * halves.stride()] = sum;
    }
    if (!is_last_block(counters + strip.tile_col, strips) || !inside) return;
    const float sum = sum_partials(from, strips, halves.stride());
    dbias[halves.column(static_cast<uint32_t>(col), half)] = from_float<Out>(sum);
}

}  // namespace te_fast::tile
