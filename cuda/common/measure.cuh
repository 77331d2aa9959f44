// The scale of a result under current scaling, computed by the kernel that computes the result.
#pragma once

#include "common/constants.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

namespace te_fast {

// Memory by which the blocks of a launch communicate. Zeroed once at allocation, zero again after each launch; one
// launch at a time may use it.
struct AmaxWorkspace {
    float amax;
    unsigned arrived;
};
static_assert(sizeof(AmaxWorkspace) == quantize::kAmaxWorkspaceBytes);

// How a scale follows from an amax.
struct ScaleRule {
    float fp8_max;
    float eps;
    uint32_t pow2;
    uint32_t unused;

    __device__ float scale(float amax) const { return scale_from_amax(amax, fp8_max, eps, kF32Max, pow2 != 0); }
};

// Writes the scale of a tensor that was stored as T: rounding keeps the order of magnitudes, so the largest rounded
// value is the rounding of the largest `amax` of all threads. Called by all threads of the grid. Contains barriers.
template <Floating T>
__device__ inline void write_measured(float* scale, AmaxWorkspace* workspace, const ScaleRule& rule, float amax) {
    amax = warp_max(amax);
    if (threadIdx.x % 32 == 0) atomic_max_nonnegative(&workspace->amax, amax);
    if (is_last_block(&workspace->arrived, gridDim.x) && threadIdx.x == 0) {
        *scale = rule.scale(to_float(from_float<T>(atomicExch(&workspace->amax, 0.0f))));
    }
}

}  // namespace te_fast
