// Block-scaled casts of one tile, 1 x 128 or 128 x 128, for tensors (cast_block.cu) and groups of rows
// (cast_groups.cu).
#pragma once

#include "common/constants.cuh"
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "tile/transpose.cuh"

namespace te_fast::quantize {

using namespace tile;

struct CastBlockParams {
    const void* x;
    uint8_t* out;    // null: none
    uint8_t* out_t;  // null: none
    float* scale_inv;
    float* scale_inv_t;
    const float* noop;  // null: none; *noop == 1 leaves every output as it is
    uint64_t rows, cols, ld_t;
    uint64_t scale_ld, scale_ld_t;  // last dimensions of the scales
    const uint8_t* packed;          // null: none; scales as bytes, to be unpacked
    float* unpacked;                // [packed_count]
    uint64_t packed_count;
    uint32_t tiles_rows, tiles_cols;
    float eps;
    uint32_t pow2;
    uint32_t byte_scales_t;  // scale_inv_t is bytes; 1D with pow2 alone
    uint32_t padding;
};
static_assert(sizeof(CastBlockParams) == kCastBlockParamsBytes);

// Blocks per multiprocessor that the registers are capped for: the most without a spill, architecture by architecture.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kNarrowBlocks = kBlocksHopper;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kNarrowBlocks = kBlocksEarly;  // conversion in software needs more
#else
constexpr int kNarrowBlocks = kBlocksElsewhere;
#endif
template <Floating In>
constexpr int kBlocks = sizeof(In) == 4 ? kBlocksF32 : kNarrowBlocks;

// 1 / scale of a power of two, as its biased exponent. Scales are 2^-120 to 2^127: the inverses 2^-127 to 2^120.
__device__ inline uint8_t pack_inverse(float scale) {
    return static_cast<uint8_t>(254 - (__float_as_uint(scale) >> 23));
}

template <Floating In>
union BlockShared {
    TransposeBuffer transpose;
    Raw8<In> column_max[kTileThreads / 32][kPatches];
    float warp_max[kTileThreads / 32];
};

template <Floating In, Fp8 Out>
__device__ inline float block_scale(const CastBlockParams& p, float amax) {
    return scale_from_amax(amax, Out::kMax, p.eps, kMaxFinite<In>, p.pow2 != 0);
}

// One halving step of `row_maxima`: exchanges with the lane `distance` away and keeps half of the rows.
template <int kKept>
__device__ inline void exchange_half(float (&maximum)[kPatch], int distance) {
    const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const float mine = upper ? maximum[i + kKept] : maximum[i];
        const float other = upper ? maximum[i] : maximum[i + kKept];
        maximum[i] = fmaxf(mine, __shfl_xor_sync(kFullWarp, other, distance));
    }
}

// The 16 lanes that share 8 rows reduce all 8 together: each ends with the maximum of row (lane % 16) / 2.
template <Floating In>
__device__ inline float row_maxima(const Raw8<In> (&raw)[kPatch]) {
    float maximum[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) maximum[i] = absmax8<In>(raw[i]);
    exchange_half<4>(maximum, 8);
    exchange_half<2>(maximum, 4);
    exchange_half<1>(maximum, 2);
    return fmaxf(maximum[0], __shfl_xor_sync(kFullWarp, maximum[0], 1));
}

// The thread's patch; zeros outside the tensor.
template <bool kVectors, Floating In>
__device__ inline void load_patch(const CastBlockParams& p, const PatchPlace<false>& patch, Raw8<In> (&row)[kPatch]) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) row[i] = load_row8<kVectors>(static_cast<const In*>(p.x), patch, i, 0);
}

// Stores the bytes of the patch transposed. Contains a barrier, before which `tile` must not be in use.
template <Read kRead = Read::kSoon>
__device__ inline void store_transposed(const CastBlockParams& p, const TilePlace& place,
                                        const PatchPlace<false>& patch, const uint2 (&bytes)[kPatch],
                                        TransposeBuffer& tile) {
    put_patch(tile, bytes);
    clear_rows(tile, patch.rows);
    __syncthreads();
    const auto col0 = static_cast<uint32_t>(place.col0);
    store_columns<false, kTile * kTile / 16 / kTileThreads, kRead>(p.out_t, p.ld_t, place.row0, col0, {p.cols, 0}, 0,
                                                                   tile);
}

// Scales are written for the rows before `row_end`, zeros for those of them that the tensor does not have.
template <bool kVectors, Floating In, Fp8 Out>
__device__ void cast_rows_1d(const CastBlockParams& p, const TilePlace& place, const PatchPlace<false>& patch,
                             const Raw8<In> (&raw)[kPatch], uint64_t row_end) {
    const float scale = block_scale<In, Out>(p, row_maxima<In>(raw));
    const int lane = threadIdx.x % 32;
    const size_t row = place.row((lane % 16) / 2);
    if (lane % 2 == 0 && row < row_end) {
        p.scale_inv[(place.col0 / kTile) * p.scale_ld + row] = row < p.rows ? __frcp_rn(scale) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        const float row_scale = __shfl_sync(kFullWarp, scale, (lane & 16) | (2 * i));
        store_bytes8<kVectors>(p.out, patch, i, 0, cast8<Out, In>(raw[i], row_scale));
    }
}

template <Floating In, Fp8 Out>
__device__ void cast_columns_1d(const CastBlockParams& p, const TilePlace& place, const PatchPlace<false>& patch,
                                const Raw8<In> (&raw)[kPatch], BlockShared<In>& shared) {
    __shared__ float column_scale[kTile];
    Raw8<In> acc = zero8<In>();
#pragma unroll
    for (int i = 0; i < kPatch; ++i) absmax_into<In>(acc, raw[i]);
    Raw8<In> other;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(In) / 2); ++i) {
        other.word[i].x = __shfl_xor_sync(kFullWarp, acc.word[i].x, 16);
        other.word[i].y = __shfl_xor_sync(kFullWarp, acc.word[i].y, 16);
        other.word[i].z = __shfl_xor_sync(kFullWarp, acc.word[i].z, 16);
        other.word[i].w = __shfl_xor_sync(kFullWarp, acc.word[i].w, 16);
    }
    absmax_into<In>(acc, other);
    if (threadIdx.x % 32 < kPatches) shared.column_max[threadIdx.x / 32][place.patch_col] = acc;
    __syncthreads();
    if (threadIdx.x < kTile) {
        float amax = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kTileThreads / 32; ++warp) {
            amax = fmaxf(amax, to_float(reinterpret_cast<const In*>(shared.column_max[warp])[threadIdx.x]));
        }
        const float scale = block_scale<In, Out>(p, amax);
        column_scale[threadIdx.x] = scale;
        const size_t col = place.col0 + threadIdx.x;
        const size_t at = (place.row0 / kTile) * p.scale_ld_t + col;
        if (col < p.scale_ld_t && p.byte_scales_t != 0) {
            reinterpret_cast<uint8_t*>(p.scale_inv_t)[at] = col < p.cols ? pack_inverse(scale) : kZeroScaleByte;
        } else if (col < p.scale_ld_t) {
            p.scale_inv_t[at] = col < p.cols ? __frcp_rn(scale) : 0.0f;
        }
    }
    __syncthreads();
    float scale[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) scale[i] = column_scale[place.patch_col * kPatch + i];
    uint2 bytes[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) bytes[i] = cast8<Out, In>(raw[i], scale);
    store_transposed(p, place, patch, bytes, shared.transpose);
}

template <bool kVectors, Floating In, Fp8 Out>
__device__ void cast_block_1d(const CastBlockParams& p, const TilePlace& place, const PatchPlace<false>& patch,
                              const Raw8<In> (&raw)[kPatch], uint64_t row_end, BlockShared<In>& shared) {
    if (p.out != nullptr) cast_rows_1d<kVectors, In, Out>(p, place, patch, raw, row_end);
    if (p.out_t != nullptr) cast_columns_1d<In, Out>(p, place, patch, raw, shared);
}

template <bool kVectors, Floating In, Fp8 Out>
__device__ void cast_block_1d(const CastBlockParams& p, const TilePlace& place, uint64_t row_end,
                              BlockShared<In>& shared) {
    const PatchPlace<false> patch(place, {p.cols, 0});
    Raw8<In> raw[kPatch];
    load_patch<kVectors>(p, patch, raw);
    cast_block_1d<kVectors, In, Out>(p, place, patch, raw, row_end, shared);
}

// Writes one scale of a [.., ld] array; the tile at the end of a line also zeroes the padding behind it.
__device__ inline void write_padded(float* scale_inv, uint64_t line, uint64_t at, uint64_t last, uint64_t ld,
                                    float value) {
    scale_inv[line * ld + at] = value;
    if (at != last) return;
    for (uint64_t i = last + 1; i < ld; ++i) scale_inv[line * ld + i] = 0.0f;
}

template <bool kVectors, Floating In, Fp8 Out>
__device__ void cast_block_2d(const CastBlockParams& p, const TilePlace& place, const PatchPlace<false>& patch,
                              const Raw8<In> (&raw)[kPatch], BlockShared<In>& shared) {
    Raw8<In> acc = zero8<In>();
#pragma unroll
    for (int i = 0; i < kPatch; ++i) absmax_into<In>(acc, raw[i]);
    const float scale = block_scale<In, Out>(p, block_max<kTileThreads>(absmax8<In>(acc), shared.warp_max));
    if (threadIdx.x == 0) {
        const uint64_t tile_row = place.row0 / kTile, tile_col = place.col0 / kTile;
        const float inverse = __frcp_rn(scale);
        if (p.out != nullptr) write_padded(p.scale_inv, tile_row, tile_col, p.tiles_cols - 1, p.scale_ld, inverse);
        if (p.out_t != nullptr)
            write_padded(p.scale_inv_t, tile_col, tile_row, p.tiles_rows - 1, p.scale_ld_t, inverse);
    }
    uint2 bytes[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        bytes[i] = cast8<Out, In>(raw[i], scale);
        if (p.out != nullptr) store_bytes8<kVectors>(p.out, patch, i, 0, bytes[i]);
    }
    if (p.out_t == nullptr) return;
    __syncthreads();  // the maxima have been read
    store_transposed(p, place, patch, bytes, shared.transpose);
}

template <bool kVectors, Floating In, Fp8 Out>
__device__ void cast_block_2d(const CastBlockParams& p, const TilePlace& place, BlockShared<In>& shared) {
    const PatchPlace<false> patch(place, {p.cols, 0});
    Raw8<In> raw[kPatch];
    load_patch<kVectors>(p, patch, raw);
    cast_block_2d<kVectors, In, Out>(p, place, patch, raw, shared);
}

}  // namespace te_fast::quantize
