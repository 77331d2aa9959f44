// The walk over groups of rows, tile by tile, and the scales of the groups: for casts of tensors (cast_groups.cu) and
// of activations (activation/activation_groups*.cu).
#pragma once

#include "quantize/block.cuh"
#include "quantize/groups.cuh"

namespace te_fast::quantize {

struct CastGroupsParams {
    const void* x;
    uint8_t* out;        // null: none
    uint8_t* out_t;      // null: none
    const float* scale;  // null where it follows from `partial`
    float* scale_inv;
    float* scale_inv_t;     // of blocks alone
    float* amax;            // null: none
    const float* noop;      // null: none; *noop == 1 leaves every output as it is
    const int64_t* splits;  // null for equal groups
    float* partial;
    float* token_max;        // of gathered rows whose scales follow from maxima
    const int32_t* numbers;  // null: rows lie as the groups do
    uint64_t rows, cols, ld_t;
    uint64_t scale_ld, scale_ld_t;
    uint64_t tokens;  // rows of x, where these are gathered
    uint32_t groups;
    uint32_t equal;
    uint32_t tiles_cols;
    uint32_t stride;  // from one group's scale to the next
    uint32_t parts;   // maxima of a group; 0 where scales are given
    uint32_t pow2;
    float eps;
    float fp8_max;
    uint32_t gathers_all;  // rows whose number is negative, too
    uint32_t unused;
};
static_assert(sizeof(CastGroupsParams) == kCastGroupsParamsBytes);

__device__ inline bool is_noop(const CastGroupsParams& p) { return p.noop != nullptr && *p.noop == 1.0f; }

// The block's strip of 128 rows, of all groups together, and its tile along the columns.
__device__ inline uint32_t strip_of(const CastGroupsParams& p, uint32_t& tile_col) {
    if (p.numbers == nullptr) {
        tile_col = blockIdx.x % p.tiles_cols;
        return blockIdx.x / p.tiles_cols;
    }
    const uint32_t strips = max(gridDim.x / p.tiles_cols, 1u);
    tile_col = blockIdx.x / strips;
    return blockIdx.x % strips;
}

// The block's group, and its tile along the group's rows; false for a block without one.
__device__ inline bool find_tile(const CastGroupsParams& p, GroupRows& group, uint32_t& tile_row, uint32_t& tile_col) {
    const uint32_t strip = strip_of(p, tile_col);
    const auto rows = static_cast<uint32_t>(p.rows);
    if (p.equal != 0) {
        const uint32_t strips = (rows + kTile - 1) / kTile;
        if (strips == 0) return false;
        group.index = strip / strips;
        group.first = group.index * rows;
        group.rows = rows;
        group.padded = 0;
        tile_row = strip % strips;
        return group.index < p.groups;
    }
    if (!find_group(p.splits, p.groups, rows, strip, group)) return false;
    tile_row = strip - group.padded / kTile;
    return true;
}

// The parameters of a block cast of the group alone.
__device__ inline CastBlockParams of_group(const CastGroupsParams& p, const GroupRows& group, size_t element) {
    CastBlockParams b{};
    b.x = static_cast<const uint8_t*>(p.x) + group.first * p.cols * element;
    b.out = p.out == nullptr ? nullptr : p.out + group.first * p.cols;
    b.out_t = p.out_t;
    if (p.out_t != nullptr) b.out_t += p.equal != 0 ? group.index * p.cols * p.ld_t : group.padded;
    b.rows = group.rows;
    b.cols = p.cols;
    b.ld_t = p.ld_t;
    b.scale_ld = p.scale_ld;
    b.scale_ld_t = p.scale_ld_t;
    b.tiles_rows = static_cast<uint32_t>((group.rows + kTile - 1) / kTile);
    b.tiles_cols = p.tiles_cols;
    b.eps = p.eps;
    b.pow2 = p.pow2;
    if (p.equal != 0) {
        b.scale_inv = p.scale_inv + group.index * b.tiles_rows * p.scale_ld;
        b.scale_inv_t = p.scale_inv_t + group.index * p.tiles_cols * p.scale_ld_t;
    } else {
        b.scale_inv = p.scale_inv + group.first;
        b.scale_inv_t = p.scale_inv_t + group.padded / kTile * p.scale_ld_t;
    }
    return b;
}

// The scale of a group, in the calling threads.
__device__ inline float scale_of(const CastGroupsParams& p, uint32_t group) {
    if (p.parts == 0) return p.scale[static_cast<size_t>(group) * p.stride];
    const float* partial = p.partial + static_cast<size_t>(group) * p.parts;
    float amax = 0.0f;
#pragma unroll 4
    for (uint32_t part = 0; part < p.parts; ++part) amax = fmaxf(amax, partial[part]);
    return scale_from_amax(amax, p.fp8_max, p.eps, kF32Max, p.pow2 != 0);
}

}  // namespace te_fast::quantize
