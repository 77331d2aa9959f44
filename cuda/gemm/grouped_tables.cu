// The sizes and addresses of a grouped product's matrices, one entry per group, as cuBLASLt's product of groups reads
// them: for GPUs that grouped_fp8.cu and grouped_16bit.cu are not made for.
//
// Launch: blocks = 1, 32 threads.
// Needs:  a table of 56 bytes per group and 8 more, at a multiple of 8 bytes.
// Moves:  the splits once, the table once.

#include <cstdint>

#include "common/constants.cuh"
#include "common/ptx.cuh"
#include "gemm/walk.cuh"

namespace te_fast::gemm {

struct GroupedTablesParams {
    const int64_t* splits;
    uint64_t a, b, d;           // addresses of the whole tensors
    uint64_t a_scale, b_scale;  // one FP32 per group each; 0 in high precision
    uint8_t* table;
    uint64_t a_row, b_row, b_group, d_row, d_group;  // bytes from row to row, or from group to group
    uint64_t rows, counted;
    uint32_t groups, align;
    uint32_t n, k;
    uint32_t pitch;       // elements of a line of operands that have the rows innermost
    uint32_t padded;      // 1 if the zeros behind a group's rows count as its rows
    uint32_t accumulate;  // 1 to add to D
    uint32_t unused;
};
static_assert(sizeof(GroupedTablesParams) == kGroupedTablesParamsBytes);

extern "C" __global__ void __launch_bounds__(32) grouped_tables(const __grid_constant__ GroupedTablesParams p) {
    ptx::wait_for_prior_grids();
    const size_t groups = p.groups;
    auto* const addresses = reinterpret_cast<uint64_t*>(p.table);
    auto* const sizes = reinterpret_cast<int32_t*>(addresses + kGroupedAddresses * groups);
    // Where groups cut the rows of the result, `counted` is all rows, and the cut that a padded walk makes changes
    // nothing.
    Walk<false> walk(p.splits, p.groups, p.rows, p.counted, p.align);
    do {
        if (!walk.is_group()) continue;
        const size_t group = walk.first() + threadIdx.x;
        const uint64_t start = walk.start();
        int rows = walk.rows();
        if (p.padded != 0) {
            const int align = p.align;
            rows = min((rows + align - 1) / align * align, static_cast<int>(p.rows) - walk.start());
        }
        addresses[group] = p.a + start * p.a_row;
        addresses[groups + group] = p.b + start * p.b_row + group * p.b_group;
        addresses[2 * groups + group] = p.d + start * p.d_row + group * p.d_group;
        addresses[3 * groups + group] = p.a_scale + group * sizeof(float);
        addresses[4 * groups + group] = p.b_scale + group * sizeof(float);
        sizes[group] = rows;
        sizes[groups + group] = p.n;
        sizes[2 * groups + group] = p.k;
        sizes[3 * groups + group] = p.pitch;
    } while (walk.next());
    if (threadIdx.x == 0) {
        auto* const factors = reinterpret_cast<float*>(sizes + kGroupedSizes * groups);
        factors[0] = 1.0f;
        factors[1] = p.accumulate != 0 ? 1.0f : 0.0f;
    }
}

}  // namespace te_fast::gemm
