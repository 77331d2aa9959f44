// Sums of values in memory, prefix sums and running maxima over a block.
#pragma once

#include <cstdint>

#include "common/reduce.cuh"

namespace te_fast {

struct Sum {
    template <typename T>
    __device__ T operator()(T a, T b) const {
        return a + b;
    }
};

struct Maximum {
    template <typename T>
    __device__ T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};

// Sum of load(i) for i in [begin, end) in steps of `step`, with eight loads in flight. The compiler by itself would
// load the last elements one after the other, each with the latency of L2.
template <typename Load>
__device__ inline uint32_t sum_loads(uint32_t begin, uint32_t end, uint32_t step, Load load) {
    uint32_t sum = 0;
    for (uint32_t i = begin; i < end; i += 8 * step) {
        uint32_t value[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) value[j] = i + j * step < end ? load(i + j * step) : 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += value[j];
    }
    return sum;
}

// Inclusive scan over the threads of a block whose identity element is zero; `scratch` holds one T per warp and may
// be reused after the next barrier. `total` is the scan of the whole block. Contains barriers.
template <int kThreads, typename T, typename Op>
__device__ inline T block_scan(T x, Op op, T* scratch, T& total) {
    constexpr int kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const T other = __shfl_up_sync(kFullWarp, x, distance);
        if (lane >= distance) x = op(x, other);
    }
    __syncthreads();  // a previous scan may still be reading `scratch`
    if (lane == 31) scratch[warp] = x;
    __syncthreads();
    T before{};
    total = T{};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
        if (i == warp) before = total;
        total = op(total, scratch[i]);
    }
    return op(x, before);
}

}  // namespace te_fast
