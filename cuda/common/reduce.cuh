// Maxima of magnitudes and the hand-over to the last block of a launch. NaN never counts towards a maximum.
#pragma once

#include <cstdint>

#include "common/types.cuh"

namespace te_fast {

constexpr unsigned kFullWarp = 0xffffffffu;

// Elementwise max(|a|, b) of two packed elements (or one float); NaN in `a` is ignored.
template <Floating T>
__device__ inline uint32_t absmax_word(uint32_t a, uint32_t b) {
    if constexpr (std::same_as<T, f32>) {
        return __float_as_uint(fmaxf(fabsf(__uint_as_float(a)), __uint_as_float(b)));
    } else {
        using Pair = std::conditional_t<std::same_as<T, f16>, __half2, __nv_bfloat162>;
        const Pair result = __hmax2(__habs2(*reinterpret_cast<const Pair*>(&a)), *reinterpret_cast<const Pair*>(&b));
        return *reinterpret_cast<const uint32_t*>(&result);
    }
}

// acc = max(acc, |x|), element by element.
template <Floating T>
__device__ inline void absmax_into(Raw8<T>& acc, const Raw8<T>& x) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
        acc.word[i].x = absmax_word<T>(x.word[i].x, acc.word[i].x);
        acc.word[i].y = absmax_word<T>(x.word[i].y, acc.word[i].y);
        acc.word[i].z = absmax_word<T>(x.word[i].z, acc.word[i].z);
        acc.word[i].w = absmax_word<T>(x.word[i].w, acc.word[i].w);
    }
}

// max |x| of eight elements.
template <Floating T>
__device__ inline float absmax8(const Raw8<T>& x) {
    uint32_t acc = 0;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
        acc = absmax_word<T>(x.word[i].x, acc);
        acc = absmax_word<T>(x.word[i].y, acc);
        acc = absmax_word<T>(x.word[i].z, acc);
        acc = absmax_word<T>(x.word[i].w, acc);
    }
    if constexpr (std::same_as<T, f32>) {
        return __uint_as_float(acc);
    } else {
        const float2 two = unpack2<T>(acc);
        return fmaxf(two.x, two.y);
    }
}

// Raises `amax` to the largest of eight magnitudes, NaN aside.
__device__ inline void absmax_into(float& amax, const float (&x)[8]) {
#pragma unroll
    for (int c = 0; c < 8; ++c) amax = fmaxf(amax, fabsf(x[c]));
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, lane));
    return x;
}

// The same bits in every lane.
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(kFullWarp, x, lane);
    return x;
}

// Maximum over the block, in every thread; `scratch` holds one float per warp. Starts and ends with a barrier
// between uses of `scratch` only if the caller places one.
template <int kThreads>
__device__ inline float block_max(float x, float* scratch) {
    constexpr int kWarps = kThreads / 32;
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) x = fmaxf(x, scratch[warp]);
    return x;
}

// *amax = max(*amax, x) for x >= 0, whose bits order like integers. The plain read first spares most atomics.
__device__ inline void atomic_max_nonnegative(float* amax, float x) {
    auto* bits = reinterpret_cast<unsigned*>(amax);
    if (__float_as_uint(x) > *reinterpret_cast<volatile unsigned*>(bits)) atomicMax(bits, __float_as_uint(x));
}

// True in every thread of the last of `blocks` blocks to arrive at `counter`, which is zero again afterwards.
// Everything that the other blocks wrote before is visible to that block. Contains barriers.
__device__ inline bool is_last_block(unsigned* counter, unsigned blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // also covers writes that the barrier has made visible
        last = atomicInc(counter, blocks - 1) == blocks - 1;
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

}  // namespace te_fast
