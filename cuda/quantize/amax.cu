// Largest magnitude of a tensor (NaN ignored) and the FP8 scale that follows from it, in one launch.
//
//   amax = max |x[i]|     scale = fp8_max / max(amax, eps)  (scale_from_amax)     scale_inv = 1 / scale
//
// Launch: amax_*: at most 4 blocks per multiprocessor, each strided over spans of 8192 elements, 256 threads.
//         scale_from_amax: 1 block of 32 threads, for an amax that was reduced over ranks in between.
// Needs:  contiguous x of any count and alignment; `workspace` zeroed once at allocation, it is zero again after
//         each launch; one launch at a time per workspace. With scale null the kernel stops after amax.
// Moves:  sizeof(In) bytes per element.

#include "common/constants.cuh"
#include "common/measure.cuh"
#include "quantize/absmax.cuh"

namespace te_fast::quantize {

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

template <Floating In>
__device__ void amax(const AmaxParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    __shared__ float scratch[kThreads / 32];
    const uint64_t begin = uint64_t{blockIdx.x} * kSpan, stride = uint64_t{gridDim.x} * kSpan;
    const float block = block_max<kThreads>(local_absmax<In>(p.x, begin, p.count, stride), scratch);
    if (threadIdx.x == 0) atomic_max_nonnegative(&p.workspace->amax, block);
    if (!is_last_block(&p.workspace->arrived, gridDim.x) || threadIdx.x != 0) return;
    const float total = atomicExch(&p.workspace->amax, 0.0f);
    if (p.amax != nullptr) *p.amax = total;
    if (p.scale != nullptr) write_scale(p, total);
}

#define INSTANCE(symbol, in)                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads) symbol(const __grid_constant__ AmaxParams p) { \
        ptx::wait_for_prior_grids();                                                                      \
        amax<in>(p);                                                                                      \
    }

INSTANCE(amax_f32, f32)
INSTANCE(amax_f16, f16)
INSTANCE(amax_bf16, bf16)

extern "C" __global__ void __launch_bounds__(kWarp) scale_from_amax(const __grid_constant__ ScaleFromAmaxParams p) {
    ptx::wait_for_prior_grids();
    if (threadIdx.x == 0) write_scale(p, *p.amax);
}

}  // namespace te_fast::quantize
