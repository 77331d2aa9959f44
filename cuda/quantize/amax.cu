// Largest magnitude of a tensor (NaN ignored) and the FP8 scale that follows from it, in one launch.
//
//   amax = max |x[i]|     scale = fp8_max / max(amax, eps)  (scale_from_amax)     scale_inv = 1 / scale
//
// Launch: amax_*: at most 4 blocks per multiprocessor, each strided over spans of 8192 elements, 256 threads.
//         amax_many_*: the scales of many tensors, of chunks of 32768 elements a block (cast_many.cu casts them).
//         scale_from_amax: 1 block of 32 threads, for an amax that was reduced over ranks in between.
// Needs:  contiguous x of any count and alignment; `workspace` zeroed once at allocation, it is zero again after
//         each launch; one launch at a time per workspace. With scale null the kernel stops after amax.
// Moves:  sizeof(In) bytes per element.

#include "common/constants.cuh"
#include "common/measure.cuh"
#include "common/vec.cuh"
#include "quantize/many.cuh"

namespace te_fast::quantize {

constexpr int kSteps = kSpan / (kThreads * 8);  // loads in flight per thread

struct AmaxParams {
    const void* x;
    AmaxWorkspace* workspace;
    float* amax;        // null: none; overwritten
    float* scale;       // null: none, nor scale_inv
    float* scale_inv;   // null: none
    const float* noop;  // null: none; *noop == 1 leaves every output as it is
    uint64_t count;
    float fp8_max;
    float eps;
    uint32_t pow2;
    uint32_t unused;
};
static_assert(sizeof(AmaxParams) == kAmaxParamsBytes);

struct ScaleFromAmaxParams {
    const float* amax;
    float* scale;
    float* scale_inv;  // null: none
    float fp8_max;
    float eps;
    uint32_t pow2;
    uint32_t unused;
};
static_assert(sizeof(ScaleFromAmaxParams) == kScaleFromAmaxParamsBytes);

template <typename Params>
__device__ void write_scale(const Params& p, float amax) {
    const float scale = scale_from_amax(amax, p.fp8_max, p.eps, kF32Max, p.pow2 != 0);
    *p.scale = scale;
    if (p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(scale);
}

template <bool kVectors, Floating In>
__device__ float local_absmax(const In* x, uint64_t begin, uint64_t end, uint64_t stride) {
    Raw8<In> acc = zero8<In>();
    for (uint64_t base = begin; base < end; base += stride) {
        Raw8<In> raw[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint64_t i = base + (static_cast<uint64_t>(step) * kThreads + threadIdx.x) * 8;
            raw[step] = zero8<In>();
            if (kVectors && i + 8 <= end) {
                raw[step] = load8<In>(x + i);
            } else if (i < end) {
                raw[step] = load8_partial<In>(x + i, static_cast<int>(min(end - i, uint64_t{8})));
            }
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) absmax_into<In>(acc, raw[step]);
    }
    return absmax8<In>(acc);
}

// The block's part of the maximum, spans from `begin` to `end` at every `stride` elements. True in the thread that has
// the whole of all `blocks` blocks.
template <Floating In>
__device__ bool finish_amax(const void* tensor, uint64_t begin, uint64_t end, uint64_t stride, AmaxWorkspace* workspace,
                            uint32_t blocks, float& total) {
    __shared__ float scratch[kThreads / 32];
    const In* x = static_cast<const In*>(tensor);
    const float local = is_aligned(x, 16) ? local_absmax<true, In>(x, begin, end, stride)
                                          : local_absmax<false, In>(x, begin, end, stride);
    const float block = block_max<kThreads>(local, scratch);
    if (threadIdx.x == 0) atomic_max_nonnegative(&workspace->amax, block);
    if (!is_last_block(&workspace->arrived, blocks) || threadIdx.x != 0) return false;
    total = atomicExch(&workspace->amax, 0.0f);
    return true;
}

template <Floating In>
__device__ void amax(const AmaxParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    float total;
    if (!finish_amax<In>(p.x, uint64_t{blockIdx.x} * kSpan, p.count, uint64_t{gridDim.x} * kSpan, p.workspace,
                         gridDim.x, total)) {
        return;
    }
    if (p.amax != nullptr) *p.amax = total;
    if (p.scale != nullptr) write_scale(p, total);
}

// Of tensors of Stored as they are when rounded to In: the largest one is the rounded largest one.
template <Floating Stored, Floating In>
__device__ void amax_many(const CastManyParams& p) {
    const uint32_t index = find_entry(p, blockIdx.x);
    const ManyEntry& entry = p.entry[index];
    const uint64_t count = uint64_t{entry.rows} * entry.cols;
    const uint64_t begin = uint64_t{blockIdx.x - p.first[index]} * kManyChunk;
    const uint64_t end = min(begin + kManyChunk, count);
    float total;
    if (!finish_amax<Stored>(entry.x, begin, end, kSpan, static_cast<AmaxWorkspace*>(p.workspace) + index, entry.chunks,
                             total)) {
        return;
    }
    total = to_float(from_float<In>(total));
    *entry.scale = scale_from_amax(total, p.fp8_max, p.eps, kF32Max, p.pow2 != 0);
}

#define INSTANCE(symbol, in)                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads) symbol(const __grid_constant__ AmaxParams p) { \
        ptx::wait_for_prior_grids();                                                                      \
        amax<in>(p);                                                                                      \
    }

INSTANCE(amax_f32, f32)
INSTANCE(amax_f16, f16)
INSTANCE(amax_bf16, bf16)

#define MANY_INSTANCE(symbol, stored, in)                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads) symbol(const __grid_constant__ CastManyParams p) { \
        ptx::wait_for_prior_grids();                                                                          \
        amax_many<stored, in>(p);                                                                             \
    }

MANY_INSTANCE(amax_many_f32, f32, f32)
MANY_INSTANCE(amax_many_f16, f16, f16)
MANY_INSTANCE(amax_many_bf16, bf16, bf16)
MANY_INSTANCE(amax_many_rounded_f16, f32, f16)
MANY_INSTANCE(amax_many_rounded_bf16, f32, bf16)

extern "C" __global__ void __launch_bounds__(kWarp) scale_from_amax(const __grid_constant__ ScaleFromAmaxParams p) {
    ptx::wait_for_prior_grids();
    if (threadIdx.x == 0) write_scale(p, *p.amax);
}

}  // namespace te_fast::quantize
