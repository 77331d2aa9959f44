// All inline assembly of te_fast: one function per instruction.
#pragma once

#include <cstdint>

namespace te_fast::ptx {

// ld.global.L1::no_allocate.v4.u32: data that this block reads once.
__device__ inline uint4 load_once(const uint4* address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

// bar.sync: until `threads` threads of the block, whole warps, have come to barrier `id` (0 is that of __syncthreads).
__device__ inline void sync_threads(unsigned id, unsigned threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// No instruction: the compiler takes the words for new ones. What it made of them before (eight floats where four
// words are enough) need not be kept in registers until they are used again.
__device__ inline void forget(uint4& words) {
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

// griddepcontrol.wait: until every grid before this one in the stream has finished and its writes are visible.
// First statement of each kernel that is launched with programmatic stream serialisation, which saves the host 0.5 us.
__device__ inline void wait_for_prior_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents: the grid after this one may start once every block has come here; what it reads
// of this grid still waits for wait_for_prior_grids.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ex2.approx.ftz.f32: 2^x within 2 ulp; a result below 2^-126 is 0.
__device__ inline float exp2_fast(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// rcp.approx.ftz.f32: 1 / x within 1 ulp; a result below 2^-126 is 0.
__device__ inline float reciprocal_fast(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

}  // namespace te_fast::ptx
