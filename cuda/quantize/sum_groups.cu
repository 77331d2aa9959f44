// Sums of the rows of groups: the gradients of the experts' biases.
//
//   sums[e][c] = sum over the rows r of group e of x[r][c] (* row_scale[r])
//
// A lane of eight adds each eighth row, in order; the lanes' sums are added in order. Groups without rows have zeros.
//
// Launch: blocks = strips * groups, strips = ceil(cols / 256); 256 threads, eight lanes of 32 threads with eight
//         columns each.
// Needs:  contiguous x of any alignment; counts as cast_groups.cu takes them.
// Moves:  sizeof(In) bytes per element, and the sums.

#include "common/constants.cuh"
#include "common/vec.cuh"
#include "quantize/groups.cuh"

namespace te_fast::quantize {

struct SumGroupsParams {
    const void* x;
    void* sums;
    const void* row_scale;  // null: none
    const int64_t* splits;
    uint64_t rows, cols;
    uint32_t groups;
    uint32_t row_scale_type;
    uint32_t strips;
    uint32_t unused;
};
static_assert(sizeof(SumGroupsParams) == kSumGroupsParamsBytes);
static_assert(kSumGroupsLanes * kWarp == kThreads && kSumGroupsCols == kWarp * kVector);

template <Floating In>
__device__ void sum_groups(const SumGroupsParams& p) {
    __shared__ float lanes[kSumGroupsLanes][kSumGroupsCols];
    GroupRows group;
    rows_of_group<kThreads>(p.splits, blockIdx.x / p.strips, p.rows, group);
    const uint32_t lane = threadIdx.x / kWarp;
    const uint64_t col = uint64_t{blockIdx.x % p.strips} * kSumGroupsCols + threadIdx.x % kWarp * kVector;
    const int width = col >= p.cols ? 0 : static_cast<int>(min(p.cols - col, uint64_t{kVector}));
    const In* x = static_cast<const In*>(p.x) + group.first * p.cols + col;
    const bool vectors = width == kVector && p.cols % kVector == 0 && is_aligned(p.x, 16);
    float sum[kVector] = {};
    constexpr int kUnroll = 4;
    for (uint64_t base = lane; width > 0 && base < group.rows; base += kUnroll * kSumGroupsLanes) {
        Raw8<In> raw[kUnroll];
#pragma unroll
        for (int step = 0; step < kUnroll; ++step) {
            const uint64_t row = base + static_cast<uint64_t>(step) * kSumGroupsLanes;
            raw[step] = zero8<In>();
            if (row >= group.rows) continue;
            raw[step] = vectors ? load8<In>(x + row * p.cols) : load8_partial<In>(x + row * p.cols, width);
        }
#pragma unroll
        for (int step = 0; step < kUnroll; ++step) {
            const uint64_t row = base + static_cast<uint64_t>(step) * kSumGroupsLanes;
            if (row >= group.rows) continue;
            const float scale =
                p.row_scale == nullptr ? 1.0f : load_float(p.row_scale, group.first + row, p.row_scale_type);
            float values[kVector];
            unpack8<In>(raw[step], values);
#pragma unroll
            for (int c = 0; c < static_cast<int>(kVector); ++c) sum[c] = fmaf(values[c], scale, sum[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < static_cast<int>(kVector); ++c) lanes[lane][threadIdx.x % kWarp * kVector + c] = sum[c];
    __syncthreads();
    const uint64_t own = uint64_t{blockIdx.x % p.strips} * kSumGroupsCols + threadIdx.x;
    if (own >= p.cols) return;
    float total = lanes[0][threadIdx.x];
#pragma unroll
    for (int other = 1; other < static_cast<int>(kSumGroupsLanes); ++other) total += lanes[other][threadIdx.x];
    static_cast<In*>(p.sums)[group.index * p.cols + own] = from_float<In>(total);
}

#define INSTANCE(symbol, in)                                                                                   \
    extern "C" __global__ void __launch_bounds__(kThreads) symbol(const __grid_constant__ SumGroupsParams p) { \
        ptx::wait_for_prior_grids();                                                                           \
        sum_groups<in>(p);                                                                                     \
    }

INSTANCE(sum_groups_f32, f32)
INSTANCE(sum_groups_f16, f16)
INSTANCE(sum_groups_bf16, bf16)

}  // namespace te_fast::quantize
