// Current scaling in one launch: the largest magnitude of a tensor, the scale that follows, and the cast to FP8 in row
// layout, transposed layout or both. The second reading of the tensor finds in L2 whatever fits there.
//
//   amax = max |x|     scale = fp8_max / max(amax, eps)  (scale_from_amax)     scale_inv = 1 / scale
//   q    = fp8(float(x) * scale)
//
//   cast_current               one tensor
//   cast_current_many          many, each with a scale of its own
//   cast_current_many_rounded  the same of round(x), x in FP32: master weights, as if they had been copied to a weight
//                              of 16 bits first
//
// The work is numbered: chunks of a tensor, of which maxima are taken, then its tiles, of which casts are made. Blocks
// take their numbers from a counter. All that a tile waits for has lower numbers, so that running blocks have it: a
// grid of any size ends, on a device with any other load. Of many tensors, the host numbers as many together as L2 can
// hold (rust/core/src/ops/cast_many.rs): chunks of all of them, then tiles of all of them.
//
// Launch: a block of 256 threads for each chunk and each tile of 128 x 128; a tensor has one of each at least.
// Needs:  contiguous x, any rows, cols and alignment of x and out; out_t [cols, rows rounded up to 16] 16-byte aligned;
//         workspace zeroed once at allocation, it is zero again after each launch; one launch at a time may use it.
//         cast_current_many streams its stores: few of the tensors are read soon.
// Moves:  sizeof(In) bytes per element, as many again from L2, and 1 byte per element and layout written.

#include "common/measure.cuh"
#include "quantize/absmax.cuh"
#include "quantize/many.cuh"

namespace te_fast::quantize {

// What the blocks of a tensor exchange. `number` is of the first tensor alone.
struct CurrentWorkspace {
    float amax;
    unsigned arrived;  // chunks that have raised it
    unsigned left;     // tiles that have read it
    unsigned number;   // that the next block takes
};
static_assert(sizeof(CurrentWorkspace) == kCurrentWorkspaceBytes);

struct CastCurrentParams {
    CurrentWorkspace* workspace;
    const float* noop;  // null: none; *noop == 1 leaves every output as it is
    ScaleRule rule;
    uint64_t chunk;  // elements
    ManyEntry entry;
};
static_assert(sizeof(CastCurrentParams) == kCastCurrentParamsBytes);

// The same in all threads. Contains a barrier.
__device__ inline uint32_t take_number(CurrentWorkspace& workspace) {
    __shared__ uint32_t number;
    if (threadIdx.x == 0) number = atomicInc(&workspace.number, gridDim.x - 1);
    __syncthreads();
    return number;
}

template <Floating Stored>
__device__ inline void raise_amax(const ManyEntry& entry, uint64_t chunk, uint32_t number,
                                  CurrentWorkspace& workspace) {
    __shared__ float scratch[kThreads / 32];
    const uint64_t count = uint64_t{entry.rows} * entry.cols, begin = number * chunk;
    const float amax =
        block_max<kThreads>(local_absmax<Stored>(entry.x, begin, min(begin + chunk, count), kSpan), scratch);
    if (threadIdx.x != 0) return;
    atomic_max_nonnegative(&workspace.amax, amax);
    __threadfence();
    atomicAdd(&workspace.arrived, 1);
}

// The scale of the tensor, in all threads, once all chunks have raised the maximum. The last of `tiles` blocks to come
// here leaves the workspace as it was. Contains a barrier.
template <Floating Stored, Floating In>
__device__ inline float wait_for_scale(const ManyEntry& entry, const ScaleRule& rule, uint32_t tiles,
                                       CurrentWorkspace& workspace) {
    __shared__ float scale;
    if (threadIdx.x == 0) {
        volatile CurrentWorkspace& seen = workspace;
        while (seen.arrived != entry.chunks) {
        }
        __threadfence();
        // Rounding keeps the order of magnitudes: the largest rounded element is the rounded largest one.
        const float amax = seen.amax;
        scale = rule.scale(std::same_as<Stored, In> ? amax : to_float(from_float<In>(amax)));
        if (atomicInc(&workspace.left, tiles - 1) == tiles - 1) {
            seen.amax = 0.0f;
            seen.arrived = 0;
        }
    }
    __syncthreads();
    return scale;
}

template <bool kVectors, Floating Stored, Floating In, Fp8 Out, Read kRead>
__device__ inline void cast_tile_of(const ManyEntry& entry, const ScaleRule& rule, const CastBlockParams& b,
                                    uint32_t number, CurrentWorkspace& workspace, BlockShared<In>& shared) {
    const uint32_t tiles = max(b.tiles_rows * b.tiles_cols, 1u);
    const TilePlace place = place_of(b, tiles - 1 - number);  // what was read last is in L2 for certain
    const PatchPlace<false> patch(place, {b.cols, 0});
    Raw8<In> raw[kPatch];
    load_patch_as<kVectors, Stored>(b, patch, raw);
    const float scale = wait_for_scale<Stored, In>(entry, rule, tiles, workspace);
    if (number == 0 && threadIdx.x == 0 && b.scale_inv != nullptr) *b.scale_inv = __frcp_rn(scale);
    cast_tile<kVectors, In, Out, kRead>(b, place, patch, raw, scale, nullptr, shared);
}

template <Floating Stored, Floating In, Fp8 Out, Read kRead>
__device__ inline void cast_tile_of(const ManyEntry& entry, const ScaleRule& rule, uint32_t number,
                                    CurrentWorkspace& workspace) {
    __shared__ BlockShared<In> shared;
    const CastBlockParams b = of_entry(entry, rule.eps, rule.pow2);
    rows_are_vectors<Stored>(static_cast<const Stored*>(b.x), b.out, b.cols)
        ? cast_tile_of<true, Stored, In, Out, kRead>(entry, rule, b, number, workspace, shared)
        : cast_tile_of<false, Stored, In, Out, kRead>(entry, rule, b, number, workspace, shared);
}

template <Floating In, Fp8 Out>
__device__ void cast_current(const CastCurrentParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    const uint32_t number = take_number(*p.workspace);
    if (number < p.entry.chunks) {
        raise_amax<In>(p.entry, p.chunk, number, *p.workspace);
    } else {
        cast_tile_of<In, In, Out, Read::kSoon>(p.entry, p.rule, number - p.entry.chunks, *p.workspace);
    }
}

template <Floating Stored, Floating In, Fp8 Out>
__device__ void cast_current_many(const CastManyParams& p) {
    auto* const workspaces = static_cast<CurrentWorkspace*>(p.workspace);
    const uint32_t number = take_number(*workspaces);
    const uint32_t chunks_of = find_entry(p.entries, number, [&](uint32_t i) { return p.first[i]; });
    const uint32_t chunk = number - p.first[chunks_of];
    if (chunk < p.entry[chunks_of].chunks) {
        return raise_amax<Stored>(p.entry[chunks_of], kManyChunk, chunk, workspaces[chunks_of]);
    }
    const uint32_t index = find_entry(p.entries, number, [&](uint32_t i) { return p.entry[i].first_tile; });
    const ManyEntry& entry = p.entry[index];
    cast_tile_of<Stored, In, Out, Read::kLate>(entry, {p.fp8_max, p.eps, p.pow2, 0}, number - entry.first_tile,
                                               workspaces[index]);
}

#define INSTANCE(symbol, in, out)                                           \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kBlocks<in>) \
        symbol(const __grid_constant__ CastCurrentParams p) {               \
        ptx::wait_for_prior_grids();                                        \
        cast_current<in, out>(p);                                           \
    }

INSTANCE(cast_current_f32_e4m3, f32, e4m3)
INSTANCE(cast_current_f32_e5m2, f32, e5m2)
INSTANCE(cast_current_f16_e4m3, f16, e4m3)
INSTANCE(cast_current_f16_e5m2, f16, e5m2)
INSTANCE(cast_current_bf16_e4m3, bf16, e4m3)
INSTANCE(cast_current_bf16_e5m2, bf16, e5m2)

#define MANY_INSTANCE(symbol, stored, in, out)                                  \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kBlocks<stored>) \
        symbol(const __grid_constant__ CastManyParams p) {                      \
        ptx::wait_for_prior_grids();                                            \
        cast_current_many<stored, in, out>(p);                                  \
    }

MANY_INSTANCE(cast_current_many_f32_e4m3, f32, f32, e4m3)
MANY_INSTANCE(cast_current_many_f32_e5m2, f32, f32, e5m2)
MANY_INSTANCE(cast_current_many_f16_e4m3, f16, f16, e4m3)
MANY_INSTANCE(cast_current_many_f16_e5m2, f16, f16, e5m2)
MANY_INSTANCE(cast_current_many_bf16_e4m3, bf16, bf16, e4m3)
MANY_INSTANCE(cast_current_many_bf16_e5m2, bf16, bf16, e5m2)
MANY_INSTANCE(cast_current_many_rounded_f16, f32, f16, e4m3)
MANY_INSTANCE(cast_current_many_rounded_bf16, f32, bf16, e4m3)

}  // namespace te_fast::quantize
