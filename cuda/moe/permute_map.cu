// The row map of an MoE permutation by itself, in one launch; moe/make_map.cuh has the formula and the method. Also the
// count of rows that permutations of this device have dropped: *out = rows, and rows = 0 on request.
//
// Launch: permute_map: `blocks` blocks of 256 threads. permute_dropped: 1 block of 32 threads.
// Needs:  permute_map: as moe/make_map.cuh.
// Moves:  permute_map: as moe/make_map.cuh. permute_dropped: 16 bytes.

#include "moe/make_map.cuh"

namespace te_fast::moe {

using Map = MapShape<kMapThreads, kMapGroups, true>;

struct PermuteDroppedParams {
    unsigned long long* rows;
    int64_t* out;
    uint64_t clear;
};
static_assert(sizeof(PermuteDroppedParams) == kPermuteDroppedParamsBytes);

// Rows that permutations of this device have dropped, those of other images too.
extern "C" __device__ unsigned long long permute_dropped_rows = 0;

extern "C" __global__ void __launch_bounds__(Map::kThreads, 2) permute_map(const __grid_constant__ MakeMapParams p) {
    __shared__ MapShared<Map> shared;
    ptx::wait_for_prior_grids();
    make_map(p, shared, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(kWarp) permute_dropped(const __grid_constant__ PermuteDroppedParams p) {
    ptx::wait_for_prior_grids();
    if (threadIdx.x != 0) return;
    *p.out = static_cast<int64_t>(p.clear != 0 ? atomicExch(p.rows, 0ull) : atomicAdd(p.rows, 0ull));
}

}  // namespace te_fast::moe
