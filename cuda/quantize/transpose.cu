// The column layout of FP8 bytes that exist already: out_t[c][r] = q[r][c]; rows from `rows` to `ld_t` are zero.
// Of 128 x 128 scales too: scale_t[j][i] = scale[i][j], padded with zeros to a multiple of four.
//
// Launch: ceil(rows / 128) * ceil(cols / 128) blocks of 256 threads, a tile each; threads of the whole grid do the
// scales. Needs:  contiguous q [rows, cols], out_t [cols, ld_t] with ld_t >= rows; any alignment. Moves:  2 bytes per
// element.

#include "common/constants.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/vec.cuh"
#include "tile/patch.cuh"
#include "tile/transpose.cuh"

namespace te_fast::quantize {

using tile::kPatch;
using tile::kPatches;
using tile::kTile;
using tile::kTileThreads;

struct TransposeParams {
    const uint8_t* q;
    uint8_t* out_t;
    const float* scale;  // null: one scale, which both layouts share
    float* scale_t;
    uint64_t rows, cols;
    uint64_t ld_t;
    uint64_t scale_ld, scale_ld_t;  // last dimensions of the scales
};
static_assert(sizeof(TransposeParams) == kTransposeParamsBytes);

// Eight bytes of a row, zeros from `count` on.
__device__ inline uint2 load_bytes(const uint8_t* from, int count) {
    if (count == kPatch && is_aligned(from, kPatch)) return *reinterpret_cast<const uint2*>(from);
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        if (i < count) word[i / 4] |= static_cast<uint32_t>(from[i]) << (8 * (i % 4));
    }
    return make_uint2(word[0], word[1]);
}

// Writes columns of the tile where 16 bytes at a time do not fit.
__device__ inline void store_column_bytes(const TransposeParams& p, uint64_t row0, uint64_t col0,
                                          const tile::TransposeBuffer& buffer) {
    const uint32_t chunk = threadIdx.x % 8;
    const uint64_t row = row0 + chunk * 16;
    for (uint32_t local = threadIdx.x / 8; local < kTile && col0 + local < p.cols; local += kTileThreads / 8) {
        const uint4 value = tile::column_rows(buffer, local, chunk);
        const uint32_t words[4] = {value.x, value.y, value.z, value.w};
        uint8_t* to = p.out_t + (col0 + local) * p.ld_t + row;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (row + i < p.ld_t) to[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
        }
    }
}

__device__ inline void transpose_scales(const TransposeParams& p) {
    const uint64_t scale_rows = ceil_div<uint64_t>(p.rows, kTile), scale_cols = ceil_div<uint64_t>(p.cols, kTile);
    const uint64_t count = scale_cols * p.scale_ld_t, step = static_cast<uint64_t>(gridDim.x) * kTileThreads;
    for (uint64_t at = static_cast<uint64_t>(blockIdx.x) * kTileThreads + threadIdx.x; at < count; at += step) {
        const uint64_t col = at / p.scale_ld_t, row = at % p.scale_ld_t;
        p.scale_t[at] = row < scale_rows ? p.scale[row * p.scale_ld + col] : 0.0f;
    }
}

}  // namespace te_fast::quantize

extern "C" __global__ void __launch_bounds__(te_fast::tile::kTileThreads)
    transpose_fp8(const __grid_constant__ te_fast::quantize::TransposeParams p) {
    using namespace te_fast;
    using namespace te_fast::quantize;
    ptx::wait_for_prior_grids();
    __shared__ tile::TransposeBuffer buffer;
    const uint64_t tiles = ceil_div<uint64_t>(p.cols, kTile);
    const tile::TilePlace place(p.rows, p.cols, blockIdx.x / tiles, blockIdx.x % tiles);
    uint2 patch[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        const bool inside = place.row(i) < p.rows && place.width() > 0;
        patch[i] = inside ? load_bytes(p.q + place.row(i) * p.cols + place.col(), place.width()) : make_uint2(0, 0);
    }
    tile::put_patch(buffer, patch);
    if (p.scale != nullptr) transpose_scales(p);
    __syncthreads();
    if (p.ld_t % tile::kTransposedAlign == 0 && is_aligned(p.out_t, 16)) {
        const tile::Halves<false> whole{p.cols, 0};
        tile::store_columns<false>(p.out_t, p.ld_t, place.row0, static_cast<uint32_t>(place.col0), whole, 0, buffer);
    } else {
        store_column_bytes(p, place.row0, place.col0, buffer);
    }
}
