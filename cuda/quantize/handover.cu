// Scales of FP8 values that one GEMM writes and the next one reads, many in one launch; cuBLAS needs each one aligned
// to 16 bytes. Row i of the table is {1 / scale, -, -, -, scale, -, -, -, found, -, -, -}. Before: the row from *scale,
// and found = 0. After: *amax = max(*amax, found), NaN ignored. cuBLAS overwrites found with the maximum of its result,
// and delayed scaling needs the maximum over all calls of a step; nothing is raised if amax is null.
//
// Launch: blocks = 1, 32 threads, one entry each.
// Needs:  count <= 32; a table of `first + count` rows of 12 floats.
// Moves:  four floats per entry.

#include <cstdint>

#include "common/constants.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"

namespace te_fast::quantize {

// Places in the table, in floats.
constexpr int kRow = kHandoverRowBytes / sizeof(float);
constexpr int kScale = kHandoverScaleAt / sizeof(float);
constexpr int kFound = kHandoverFoundAt / sizeof(float);

struct HandoverEntry {
    const float* scale;
    float* amax;
};

struct HandoverParams {
    HandoverEntry entries[kHandoverEntries];
    float* table;
    uint32_t first;
    uint32_t count;
    uint32_t after;
    uint32_t unused;
};
static_assert(sizeof(HandoverParams) == kHandoverParamsBytes);

__device__ void handover_entry(const HandoverParams& p) {
    if (threadIdx.x >= p.count) return;
    const HandoverEntry entry = p.entries[threadIdx.x];
    float* row = p.table + static_cast<uint64_t>(p.first + threadIdx.x) * kRow;
    if (p.after == 0) {
        const float scale = *entry.scale;
        row[0] = __frcp_rn(scale);
        row[kScale] = scale;
        row[kFound] = 0.0f;
    } else if (entry.amax != nullptr && row[kFound] > 0.0f) {  // cuBLASLt finds NaN where there is one: no maximum
        atomic_max_nonnegative(entry.amax, row[kFound]);
    }
}

extern "C" __global__ void __launch_bounds__(kHandoverEntries) handover(const __grid_constant__ HandoverParams p) {
    ptx::wait_for_prior_grids();
    handover_entry(p);
}

}  // namespace te_fast::quantize
