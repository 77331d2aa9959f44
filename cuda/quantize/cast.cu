// Scaled cast to FP8 in row layout: out[i] = fp8(float(x[i]) * scale), saturating, round to nearest even.
// With amax: *amax = max(*amax, max |x[i]|), NaN ignored. With scale_inv: *scale_inv = 1 / scale.
//
// Launch: blocks = max(1, ceil(count / 8192)), 256 threads.
// Needs:  contiguous x and out; any count and alignment (16-byte x and 8-byte out take the vector path).
// Moves:  sizeof(In) + 1 bytes per element.

#include "common/constants.cuh"
#include "common/fp8.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace te_fast::quantize {

constexpr int kSteps = kSpan / (kThreads * 8);  // loads in flight per thread

struct CastParams {
    const void* x;
    uint8_t* out;
    const float* scale;
    float* scale_inv;   // null: none
    float* amax;        // null: none
    const float* noop;  // null: none; *noop == 1 leaves every output as it is
    uint64_t count;
    uint32_t reverse;  // walk the tensor from its end, where a preceding amax pass left it in L2
    uint32_t unused;
};
static_assert(sizeof(CastParams) == kCastParamsBytes);

template <bool kVectors, Floating In, Fp8 Out>
__device__ void cast_span(const CastParams& p, uint64_t base) {
    const In* x = static_cast<const In*>(p.x);
    Raw8<In> raw[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint64_t i = base + (static_cast<uint64_t>(step) * kThreads + threadIdx.x) * 8;
        raw[step] = zero8<In>();
        if (kVectors && i + 8 <= p.count) {
            raw[step] = load8<In>(x + i);
        } else if (i < p.count) {
            raw[step] = load8_partial<In>(x + i, static_cast<int>(min(p.count - i, uint64_t{8})));
        }
    }
    const float scale = *p.scale;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint64_t i = base + (static_cast<uint64_t>(step) * kThreads + threadIdx.x) * 8;
        const uint2 bytes = cast8<Out, In>(raw[step], scale);
        if (kVectors && i + 8 <= p.count) {
            *reinterpret_cast<uint2*>(p.out + i) = bytes;
        } else if (i < p.count) {
            store_bytes_partial(p.out + i, bytes, static_cast<int>(min(p.count - i, uint64_t{8})));
        }
    }
    if (p.amax != nullptr) {
        __shared__ float scratch[kThreads / 32];
        Raw8<In> acc = zero8<In>();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) absmax_into<In>(acc, raw[step]);
        const float amax = block_max<kThreads>(absmax8<In>(acc), scratch);
        if (threadIdx.x == 0) atomic_max_nonnegative(p.amax, amax);
    }
}

template <Floating In, Fp8 Out>
__device__ void cast(const CastParams& p) {
    if (p.noop != nullptr && *p.noop == 1.0f) return;
    const uint32_t block = p.reverse != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    if (block == 0 && threadIdx.x == 0 && p.scale_inv != nullptr) *p.scale_inv = __frcp_rn(*p.scale);
    if (is_aligned(p.x, 16) && is_aligned(p.out, 8)) {
        cast_span<true, In, Out>(p, static_cast<uint64_t>(block) * kSpan);
    } else {
        cast_span<false, In, Out>(p, static_cast<uint64_t>(block) * kSpan);
    }
}

#define INSTANCE(symbol, in, out)                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads) symbol(const __grid_constant__ CastParams p) { \
        ptx::wait_for_prior_grids();                                                                      \
        cast<in, out>(p);                                                                                 \
    }

INSTANCE(cast_f32_e4m3, f32, e4m3)
INSTANCE(cast_f32_e5m2, f32, e5m2)
INSTANCE(cast_f16_e4m3, f16, e4m3)
INSTANCE(cast_f16_e5m2, f16, e5m2)
INSTANCE(cast_bf16_e4m3, bf16, e4m3)
INSTANCE(cast_bf16_e5m2, bf16, e5m2)

}  // namespace te_fast::quantize
