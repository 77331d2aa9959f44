// The cast of one tile under one scale that is known, for groups of rows (cast_groups.cu), many tensors (cast_many.cu)
// and tensors whose scale the same launch finds (cast_current.cu), each of which reads the tile differently.
#pragma once

#include "quantize/block.cuh"

namespace te_fast::quantize {

template <bool kVectors, Floating In, Fp8 Out, Read kRead = Read::kSoon>
__device__ void cast_tile(const CastBlockParams& b, const TilePlace& place, const PatchPlace<false>& patch,
                          const Raw8<In> (&raw)[kPatch], float scale, float* amax, BlockShared<In>& shared) {
    if (amax != nullptr) {
        Raw8<In> acc = zero8<In>();
#pragma unroll
        for (int i = 0; i < kPatch; ++i) absmax_into<In>(acc, raw[i]);
        const float tile = block_max<kTileThreads>(absmax8<In>(acc), shared.warp_max);
        if (threadIdx.x == 0) atomic_max_nonnegative(amax, tile);
        __syncthreads();  // the maxima have been read
    }
    uint2 bytes[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        bytes[i] = cast8<Out, In>(raw[i], scale);
        if (b.out != nullptr) store_bytes8<kVectors, kRead>(b.out, patch, i, 0, bytes[i]);
    }
    if (b.out_t != nullptr) store_transposed<kRead>(b, place, patch, bytes, shared.transpose);
}

}  // namespace te_fast::quantize
