// Around GEMMs that store FP8 under delayed scaling, for many values in one launch: *inverse = 1 / *scale, which the
// next GEMM multiplies by, and *amax = max(*amax, *found), NaN ignored. cuBLAS overwrites *found with the maximum of a
// result, and delayed scaling needs the maximum over all calls of a step. An entry without `inverse` or without `amax`
// leaves that part out.
//
// Launch: blocks = 1, 32 threads, one entry each.
// Needs:  count <= 32.
// Moves:  at most four floats per entry.

#include <cstdint>

#include "common/constants.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"

namespace te_fast::quantize {

struct HandoverEntry {
    const float* scale;
    float* amax;
    float* inverse;
    const float* found;
};

struct HandoverParams {
    HandoverEntry entries[kHandoverEntries];
    uint32_t count;
    uint32_t unused;
};
static_assert(sizeof(HandoverParams) == kHandoverParamsBytes);

__device__ void handover_entry(const HandoverParams& p) {
    if (threadIdx.x >= p.count) return;
    const HandoverEntry entry = p.entries[threadIdx.x];
    if (entry.inverse != nullptr) *entry.inverse = __frcp_rn(*entry.scale);
    if (entry.amax == nullptr || entry.found == nullptr) return;
    const float found = *entry.found;
    if (found > 0.0f) atomic_max_nonnegative(entry.amax, found);  // cuBLASLt finds NaN where there is one: no maximum
}

extern "C" __global__ void __launch_bounds__(kHandoverEntries) handover(const __grid_constant__ HandoverParams p) {
    ptx::wait_for_prior_grids();
    handover_entry(p);
}

}  // namespace te_fast::quantize
