// Casts of many tensors to FP8 in one launch, each in row layout, transposed layout or both.
//
//   cast_many        q = fp8(float(x) * scale)     scale_inv = 1 / scale     amax = max(amax, max |x|)
//   cast_block_many  blocks of 128 x 128, as cast_block.cu does it
//
// Scales and maxima are each tensor's own.
//
// The numbers are those of cast.cu, cast_transpose.cu and cast_block.cu, of tensors one by one. Under current scaling
// amax_many (amax.cu) runs before it and leaves every tensor's scale.
//
// Launch: a block of 256 threads for each tile of 128 x 128 of each tensor; cast_many: one at least for each tensor.
// Needs:  contiguous x, any rows, cols and alignment of x and out; out_t [cols, rows rounded up to 16] 16-byte aligned.
// Moves:  sizeof(In) + 1 byte per element and per layout written, and the scales.

#include "quantize/many.cuh"
#include "quantize/tensor.cuh"

namespace te_fast::quantize {

// The parameters of a block cast of the entry alone.
__device__ inline CastBlockParams of_entry(const CastManyParams& p, const ManyEntry& entry) {
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
    b.eps = p.eps;
    b.pow2 = p.pow2;
    return b;
}

template <bool kVectors, Floating In, Fp8 Out>
__device__ void cast_entry_tile(const CastBlockParams& b, const TilePlace& place, float scale, float* amax,
                                BlockShared<In>& shared) {
    const PatchPlace<false> patch(place, {b.cols, 0});
    Raw8<In> raw[kPatch];
    load_patch<kVectors>(b, patch, raw);
    cast_tile<kVectors, In, Out>(b, place, patch, raw, scale, amax, shared);
}

template <bool kBlockScales, Floating In, Fp8 Out>
__device__ void cast_many(const CastManyParams& p) {
    __shared__ BlockShared<In> shared;
    const uint32_t index = find_entry(p, blockIdx.x);
    const ManyEntry& entry = p.entry[index];
    const CastBlockParams b = of_entry(p, entry);
    const uint32_t tile = blockIdx.x - p.first[index], tiles_cols = max(b.tiles_cols, 1u);
    const uint32_t tile_row = tile / tiles_cols;
    const TilePlace place(min(b.rows, (uint64_t{tile_row} + 1) * kTile), b.cols, tile_row, tile % tiles_cols);
    const bool vectors = rows_are_vectors<In>(static_cast<const In*>(b.x), b.out, b.cols);
    if constexpr (kBlockScales) {
        vectors ? cast_block_2d<true, In, Out>(b, place, shared) : cast_block_2d<false, In, Out>(b, place, shared);
    } else {
        const float scale = *entry.scale;
        if (tile == 0 && threadIdx.x == 0 && entry.scale_inv != nullptr) *entry.scale_inv = __frcp_rn(scale);
        vectors ? cast_entry_tile<true, In, Out>(b, place, scale, entry.other, shared)
                : cast_entry_tile<false, In, Out>(b, place, scale, entry.other, shared);
    }
}

// As kBlocks, less the registers that finding the tensor takes.
template <Floating In>
constexpr int kManyCastBlocks = kBlocks<In> > 1 ? kBlocks<In> - 1 : 1;

#define INSTANCE(symbol, blocks, in, out)                                           \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kManyCastBlocks<in>) \
        symbol(const __grid_constant__ CastManyParams p) {                          \
        ptx::wait_for_prior_grids();                                                \
        cast_many<blocks, in, out>(p);                                              \
    }

INSTANCE(cast_many_f32_e4m3, false, f32, e4m3)
INSTANCE(cast_many_f32_e5m2, false, f32, e5m2)
INSTANCE(cast_many_f16_e4m3, false, f16, e4m3)
INSTANCE(cast_many_f16_e5m2, false, f16, e5m2)
INSTANCE(cast_many_bf16_e4m3, false, bf16, e4m3)
INSTANCE(cast_many_bf16_e5m2, false, bf16, e5m2)
INSTANCE(cast_block_many_f32_e4m3, true, f32, e4m3)
INSTANCE(cast_block_many_f32_e5m2, true, f32, e5m2)
INSTANCE(cast_block_many_f16_e4m3, true, f16, e4m3)
INSTANCE(cast_block_many_f16_e5m2, true, f16, e5m2)
INSTANCE(cast_block_many_bf16_e4m3, true, bf16, e4m3)
INSTANCE(cast_block_many_bf16_e5m2, true, bf16, e5m2)

}  // namespace te_fast::quantize
