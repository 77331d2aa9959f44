// Many tensors in one launch: their addresses are kernel parameters, so that no table on the device has to be kept
// alive.
#pragma once

#include <cstdint>

#include "quantize/tensor.cuh"

namespace te_fast::quantize {

struct ManyEntry {
    const void* x;       // contiguous [rows, cols]
    uint8_t* out;        // null: none
    uint8_t* out_t;      // null: none
    const float* scale;  // the tensor's, read by cast_many; else none
    float* scale_inv;    // the tensor's, null: none; or those of the row layout's blocks
    float* other;        // *other is raised to max |x|, null: none; or the scales of the transposed layout's blocks
    uint32_t rows, cols;
};

struct CastManyParams {
    void* workspace;  // cast_current: a CurrentWorkspace for each entry
    uint32_t entries;
    uint32_t pow2;
    float eps;
    float fp8_max;
    uint32_t slots;  // cast_current: of a block
    uint32_t unused;
    uint32_t first[kManyTensors];  // first block of each entry; cast_current: modulo the grid, else ascending
    ManyEntry entry[kManyTensors];
};
static_assert(sizeof(CastManyParams) == kCastManyParamsBytes, "kernel parameters end at 32764 bytes");

// The last of the entries, in ascending order of `first(entry)`, that begins at `number` or before.
template <typename First>
__device__ inline uint32_t find_entry(uint32_t entries, uint32_t number, First first) {
    uint32_t low = 0, high = entries;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (first(middle) <= number) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// The parameters of a block cast of the entry alone.
__device__ inline CastBlockParams of_entry(const ManyEntry& entry, float eps, uint32_t pow2) {
    CastBlockParams b{};
    b.x = entry.x;
    b.out = entry.out;
    b.out_t = entry.out_t;
    b.scale_inv = entry.scale_inv;
    b.scale_inv_t = entry.other;
    b.rows = entry.rows;
    b.cols = entry.cols;
    b.ld_t = round_up<uint64_t>(entry.rows, kTransposedAlign);
    b.tiles_rows = (entry.rows + kTile - 1) / kTile;
    b.tiles_cols = (entry.cols + kTile - 1) / kTile;
    b.scale_ld = round_up<uint64_t>(b.tiles_cols, kScaleAlign);
    b.scale_ld_t = round_up<uint64_t>(b.tiles_rows, kScaleAlign);
    b.eps = eps;
    b.pow2 = pow2;
    return b;
}

// The place of tile `tile` of the entry, row by row.
__device__ inline TilePlace place_of(const CastBlockParams& b, uint32_t tile) {
    const uint32_t tiles_cols = max(b.tiles_cols, 1u), tile_row = tile / tiles_cols;
    return {min(b.rows, (uint64_t{tile_row} + 1) * kTile), b.cols, tile_row, tile % tiles_cols};
}

// The thread's patch of a tensor of Stored, rounded to In; zeros outside the tensor.
template <bool kVectors, Floating Stored, Floating In>
__device__ inline void load_patch_as(const CastBlockParams& b, const PatchPlace<false>& patch,
                                     Raw8<In> (&raw)[kPatch]) {
    if constexpr (std::same_as<Stored, In>) {
        load_patch<kVectors>(b, patch, raw);
    } else {
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            float values[8];
            unpack8<Stored>(load_row8<kVectors>(static_cast<const Stored*>(b.x), patch, i, 0), values);
            raw[i] = pack8<In>(values);
        }
    }
}

}  // namespace te_fast::quantize
