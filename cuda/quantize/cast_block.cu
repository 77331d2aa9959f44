// Block-scaled cast to FP8 in row layout, transposed layout or both.
//
//   1D: a block is 128 consecutive elements along the contraction: of a row for `out`, of a column for `out_t`.
//   2D: a block is 128 x 128; both layouts hold the same bytes.
//   scale = scale_from_amax(max |x| over the block)     q = fp8(float(x) * scale)     scale_inv = 1 / scale
//
// Scale shapes for x [M, K], up4 rounding up to a multiple of 4, the padding written zero:
//   1D scale_inv (ceil(K/128), up4(M))            scale_inv_t (ceil(M/128), up4(K))
//   2D scale_inv (ceil(M/128), up4(ceil(K/128)))  scale_inv_t (ceil(K/128), up4(ceil(M/128)))
//
// Power-of-two scales of a 1D out_t can be written as bytes, E8M0 with 255 for the padding's zero: which takes a
// quarter of the memory. Another cast converts them back to the format that cuBLAS reads.
//
// Launch: blocks = tiles_cols * tiles_rows, ceil(cols / 128) by ceil(rows / 128); 256 threads.
// Needs:  contiguous x; any rows, cols, alignment of x and out; ld_t the multiple of 16 next to rows, out_t
//         16-byte aligned. out (with scale_inv) or out_t (with scale_inv_t) may be null.
// Moves:  sizeof(In) + 1 byte per element and per layout written, and the scales.

#include "quantize/block.cuh"

namespace te_fast::quantize {

// 2^(byte - 127); byte 0 is a subnormal.
__device__ inline float unpack_inverse(uint8_t byte) {
    const uint32_t bits = byte == 0 ? 0x00400000u : static_cast<uint32_t>(byte) << 23;
    return byte == kZeroScaleByte ? 0.0f : __uint_as_float(bits);
}

// Each block turns its share of the packed scales into floats.
__device__ inline void unpack_scales(const uint8_t* packed, float* unpacked, uint64_t count) {
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * kTileThreads;
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * kTileThreads + threadIdx.x; i < count; i += stride) {
        unpacked[i] = unpack_inverse(packed[i]);
    }
}

// For calls without such a cast, because the gradient is quantised already.
struct UnpackScalesParams {
    const uint8_t* packed;
    float* unpacked;
    uint64_t count;
};
static_assert(sizeof(UnpackScalesParams) == kUnpackScalesParamsBytes);

template <bool kTwoDimensional, Floating In, Fp8 Out>
__device__ void cast_block(const CastBlockParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    if (p.packed != nullptr) unpack_scales(p.packed, p.unpacked, p.packed_count);
    __shared__ BlockShared<In> shared;
    const size_t tile_row = blockIdx.x / p.tiles_cols, tile_col = blockIdx.x % p.tiles_cols;
    const TilePlace place(min(p.rows, (tile_row + 1) * kTile), p.cols, tile_row, tile_col);
    const bool vectors = rows_are_vectors<In>(static_cast<const In*>(p.x), p.out, p.cols);
    if constexpr (kTwoDimensional) {
        vectors ? cast_block_2d<true, In, Out>(p, place, shared) : cast_block_2d<false, In, Out>(p, place, shared);
    } else {
        vectors ? cast_block_1d<true, In, Out>(p, place, p.scale_ld, shared)
                : cast_block_1d<false, In, Out>(p, place, p.scale_ld, shared);
    }
}

#define INSTANCE(symbol, two_dimensional, in, out)                          \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kBlocks<in>) \
        symbol(const __grid_constant__ CastBlockParams p) {                 \
        ptx::wait_for_prior_grids();                                        \
        cast_block<two_dimensional, in, out>(p);                            \
    }

INSTANCE(cast_block_1d_f32_e4m3, false, f32, e4m3)
INSTANCE(cast_block_1d_f32_e5m2, false, f32, e5m2)
INSTANCE(cast_block_1d_f16_e4m3, false, f16, e4m3)
INSTANCE(cast_block_1d_f16_e5m2, false, f16, e5m2)
INSTANCE(cast_block_1d_bf16_e4m3, false, bf16, e4m3)
INSTANCE(cast_block_1d_bf16_e5m2, false, bf16, e5m2)
INSTANCE(cast_block_2d_f32_e4m3, true, f32, e4m3)
INSTANCE(cast_block_2d_f32_e5m2, true, f32, e5m2)
INSTANCE(cast_block_2d_f16_e4m3, true, f16, e4m3)
INSTANCE(cast_block_2d_f16_e5m2, true, f16, e5m2)
INSTANCE(cast_block_2d_bf16_e4m3, true, bf16, e4m3)
INSTANCE(cast_block_2d_bf16_e5m2, true, bf16, e5m2)

extern "C" __global__ void __launch_bounds__(kTileThreads)
    unpack_block_scales(const __grid_constant__ UnpackScalesParams p) {
    ptx::wait_for_prior_grids();
    unpack_scales(p.packed, p.unpacked, p.count);
}

}  // namespace te_fast::quantize
