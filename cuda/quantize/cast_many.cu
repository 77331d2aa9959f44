// Casts of many tensors to FP8 in one launch, each in row layout, transposed layout or both.
//
//   cast_many        q = fp8(float(x) * scale)     scale_inv = 1 / scale     amax = max(amax, max |x|)
//   cast_block_many  blocks of 128 x 128, as cast_block.cu does it
//   cast_many_rounded, cast_block_many_rounded
//                    the same of round(x), x in FP32: master weights, as if they had been copied to a weight of 16 bits
//                    first
//
// Scales and maxima are each tensor's own.
//
// The numbers are those of cast.cu, cast_transpose.cu and cast_block.cu, of tensors one by one. Tensors whose scales
// follow from their own maxima are those of cast_current.cu.
//
// Launch: a block of 256 threads for each tile of 128 x 128 of each tensor; cast_many: one at least for each tensor.
// Needs:  contiguous x, any rows, cols and alignment of x and out; out_t [cols, rows rounded up to 16] 16-byte aligned.
// Moves:  sizeof(In) + 1 byte per element and per layout written, and the scales.

#include "quantize/many.cuh"

namespace te_fast::quantize {

template <bool kBlockScales, bool kVectors, Floating Stored, Floating In, Fp8 Out>
__device__ void cast_entry_tile(const ManyEntry& entry, const CastBlockParams& b, const TilePlace& place,
                                BlockShared<In>& shared) {
    const PatchPlace<false> patch(place, {b.cols, 0});
    Raw8<In> raw[kPatch];
    load_patch_as<kVectors, Stored>(b, patch, raw);
    if constexpr (kBlockScales) {
        cast_block_2d<kVectors, In, Out>(b, place, patch, raw, shared);
    } else {
        cast_tile<kVectors, In, Out>(b, place, patch, raw, *entry.scale, entry.other, shared);
    }
}

template <bool kBlockScales, Floating Stored, Floating In, Fp8 Out>
__device__ void cast_many(const CastManyParams& p) {
    __shared__ BlockShared<In> shared;
    // Of entries that begin at the same block, all but the last are empty.
    const uint32_t index = find_entry(p.entries, blockIdx.x, [&](uint32_t i) { return p.first[i]; });
    const ManyEntry& entry = p.entry[index];
    const CastBlockParams b = of_entry(entry, p.eps, p.pow2);
    const uint32_t tile = blockIdx.x - p.first[index];
    const TilePlace place = place_of(b, tile);
    if (!kBlockScales && tile == 0 && threadIdx.x == 0 && entry.scale_inv != nullptr) {
        *entry.scale_inv = __frcp_rn(*entry.scale);
    }
    rows_are_vectors<Stored>(static_cast<const Stored*>(b.x), b.out, b.cols)
        ? cast_entry_tile<kBlockScales, true, Stored, In, Out>(entry, b, place, shared)
        : cast_entry_tile<kBlockScales, false, Stored, In, Out>(entry, b, place, shared);
}

// As kBlocks, with fewer blocks because the search for the tensor takes registers; all loads of a patch are in flight
// before it is rounded.
template <Floating Stored, Floating In>
constexpr int kManyCastBlocks = !std::same_as<Stored, In> ? kBlocks<Stored>
                                : kBlocks<In> > 1         ? kBlocks<In> - 1
                                                          : 1;

#define INSTANCE(symbol, blocks, stored, in, out)                                           \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kManyCastBlocks<stored, in>) \
        symbol(const __grid_constant__ CastManyParams p) {                                  \
        ptx::wait_for_prior_grids();                                                        \
        cast_many<blocks, stored, in, out>(p);                                              \
    }

INSTANCE(cast_many_f32_e4m3, false, f32, f32, e4m3)
INSTANCE(cast_many_f32_e5m2, false, f32, f32, e5m2)
INSTANCE(cast_many_f16_e4m3, false, f16, f16, e4m3)
INSTANCE(cast_many_f16_e5m2, false, f16, f16, e5m2)
INSTANCE(cast_many_bf16_e4m3, false, bf16, bf16, e4m3)
INSTANCE(cast_many_bf16_e5m2, false, bf16, bf16, e5m2)
INSTANCE(cast_block_many_f32_e4m3, true, f32, f32, e4m3)
INSTANCE(cast_block_many_f32_e5m2, true, f32, f32, e5m2)
INSTANCE(cast_block_many_f16_e4m3, true, f16, f16, e4m3)
INSTANCE(cast_block_many_f16_e5m2, true, f16, f16, e5m2)
INSTANCE(cast_block_many_bf16_e4m3, true, bf16, bf16, e4m3)
INSTANCE(cast_block_many_bf16_e5m2, true, bf16, bf16, e5m2)
INSTANCE(cast_many_rounded_f16, false, f32, f16, e4m3)
INSTANCE(cast_many_rounded_bf16, false, f32, bf16, e4m3)
INSTANCE(cast_block_many_rounded_f16, true, f32, f16, e4m3)
INSTANCE(cast_block_many_rounded_bf16, true, f32, bf16, e4m3)

}  // namespace te_fast::quantize
