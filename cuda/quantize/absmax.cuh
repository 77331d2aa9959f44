// The largest magnitude of a part of a tensor, NaN aside.
#pragma once

#include "common/constants.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace te_fast::quantize {

constexpr int kSteps = kSpan / (kThreads * 8);  // loads in flight per thread

template <bool kVectors, Floating In>
__device__ inline float local_absmax(const In* x, uint64_t begin, uint64_t end, uint64_t stride) {
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

// Of the spans from `begin` to `end`, at every `stride` elements, that the block has: the thread's part.
template <Floating In>
__device__ inline float local_absmax(const void* tensor, uint64_t begin, uint64_t end, uint64_t stride) {
    const In* x = static_cast<const In*>(tensor);
    return is_aligned(x, 16) ? local_absmax<true, In>(x, begin, end, stride)
                             : local_absmax<false, In>(x, begin, end, stride);
}

}  // namespace te_fast::quantize
