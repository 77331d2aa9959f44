// Gated activations of rows that belong to groups, and their gradients, into FP8: what both directions share. A block
// has one tile of 128 x 128 of one group, as casts of groups have (quantize/cast_groups.cuh).
//
// Copies of both halves of x fill shared memory before the first row is computed, so that all of a tile's loads are in
// flight together. Each row of results takes the place of the row that it was computed from, in the type that the two
// launches would store it in. What follows is the cast of a tile.
#pragma once

#include "activation/row.cuh"
#include "quantize/cast_groups.cuh"
#include "quantize/tensor.cuh"

namespace te_fast::activation {

using quantize::GroupRows;

struct ActivationGroupsParams {
    quantize::CastGroupsParams cast;  // of the result; `x` is the activation's input
    const void* dy;                   // of the gradient
    const void* row_scale;            // null: none
    void* drow_scale;                 // null: none
    float* sums;                      // of the row scale's gradient: [tiles_cols][rows]
    unsigned* counters;               // of the same: one for each strip of 128 rows
    CurveConstants constants;
    uint32_t curve, row_scale_kind, interleave;
};
static_assert(sizeof(ActivationGroupsParams) == kActivationGroupsParamsBytes);

// Blocks per multiprocessor: shared memory has room for them.
constexpr int kGroupsBlocks = 3;

// Rows of the two halves, and the results in their places; then the cast's own memory over the first half.
union GroupsShared {
    uint4 half[2][kPatch][kTileThreads];
    uint4 slot[2 * kPatch * kTileThreads];  // the same
    quantize::BlockShared<bf16> cast;
};
static_assert(sizeof(GroupsShared) == kGroupsShared);

// The block's tile: its group, and its place in the activation's result.
struct GroupTile {
    GroupRows group;
    uint32_t row, col;

    __device__ bool find(const quantize::CastGroupsParams& p) { return quantize::find_tile(p, group, row, col); }
    __device__ TilePlace place(size_t cols) const { return at(cols, col); }
    __device__ TilePlace at(size_t cols, size_t tile_col) const {
        return {min(group.rows, (row + 1) * kTile), cols, row, tile_col};
    }
};

// Asks for the thread's patch of both halves; zeros outside.
__device__ inline void ask_halves(const bf16* x, const PatchPlace<true>& patch, GroupsShared& shared) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            ptx::copy_async16(&shared.half[half][i][threadIdx.x], x + patch.at(i, half), i < patch.rows);
        }
        if (i == kPatch / 2 - 1 || i == kPatch - 1) ptx::commit_copies();
    }
}

// Before row `i` is read.
__device__ inline void await_halves(int i) {
    if (i == 0) ptx::wait_copies<1>();
    if (i == kPatch / 2) ptx::wait_copies<0>();
}

// Every group's inverse scale is written by the first block, which may have no tile.
__device__ inline void write_inverse_scales(const quantize::CastGroupsParams& p) {
    if (blockIdx.x != 0 || p.scale_inv == nullptr) return;
    for (uint32_t group = threadIdx.x; group < p.groups; group += kTileThreads) {
        p.scale_inv[group] = __frcp_rn(quantize::scale_of(p, group));
    }
}

// The scale of the block's group, for cast_results. Read before the copies have arrived.
__device__ inline float& group_scale() {
    __shared__ float scale;
    return scale;
}

__device__ inline void find_scale(const quantize::CastGroupsParams& p, uint32_t group) {
    if (threadIdx.x == 0) group_scale() = quantize::scale_of(p, group);
}

// Casts the results in `half`, which become tile `tile_col` of a tensor. Contains barriers.
template <bool kBlocks, Fp8 Out>
__device__ inline void cast_results(const quantize::CastGroupsParams& p, const GroupTile& tile, uint32_t tile_col,
                                    int half, GroupsShared& shared) {
    const quantize::CastBlockParams b = quantize::of_group(p, tile.group, sizeof(bf16));
    const TilePlace place = tile.at(p.cols, tile_col);
    const PatchPlace<false> patch(place, {p.cols, 0});
    Raw8<bf16> raw[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) raw[i].word[0] = shared.half[half][i][threadIdx.x];
    __syncthreads();  // the first half, and the tile before, have been read
    if constexpr (kBlocks) {
        quantize::cast_block_1d<true, bf16, Out>(b, place, patch, raw, b.rows, shared.cast);
    } else {
        float* amax = p.amax == nullptr ? nullptr : p.amax + static_cast<size_t>(tile.group.index) * p.stride;
        quantize::cast_tile<true, bf16, Out>(b, place, patch, raw, group_scale(), amax, shared.cast);
    }
}

}  // namespace te_fast::activation
