// Block scales of permuted rows: gathered by the numbers of the rows' tokens, which the permutation leaves
// (moe/permute.cu).
//
//   out[b, j] = scales[b, numbers[j] - 1] for a row j of a token, and 0 for other rows and behind the rows
//
// A block gathers kScaleLines lines of many rows: experts among these rows read the same scales, which the first-level
// cache then has, and a number is read once for several lines. The rows of a thread are a block apart, so that those of
// a warp are neighbours. Their tokens ascend within an expert, so a load of the warp touches few lines of the cache
// (four rows of a thread side by side would make it four times as many); a store of the warp is 128 bytes.
//
// Launch: blocks = parts * ceil(lines / kScaleLines), parts = ceil(out_line / (kScaleRows * 512)); 512 threads.
// Needs:  contiguous scales [lines, in_line], numbers int32 [rows], out [lines, out_line]; tokens <= in_line,
//         rows <= out_line < 2^31. Any map may have made the numbers: those above the count of tokens give 0.
// Moves:  4 lines (T + out_line), and 4 rows for every kScaleLines lines.

#include <cstdint>

#include "common/constants.cuh"
#include "common/ptx.cuh"

namespace te_fast::moe {

struct PermuteScalesParams {
    const float* scales;
    const int32_t* numbers;
    float* out;
    uint64_t in_line;
    uint32_t out_line;
    uint32_t rows;
    uint32_t tokens;
    uint32_t lines;
    uint32_t parts;  // blocks that share a line
    uint32_t unused;
};
static_assert(sizeof(PermuteScalesParams) == kPermuteScalesParamsBytes);

__device__ inline void gather_scales(const PermuteScalesParams& p) {
    constexpr int kRows = kScaleRows, kLines = kScaleLines;
    const uint32_t line = blockIdx.x / p.parts * kLines;
    const uint32_t first = blockIdx.x % p.parts * (kRows * kScaleThreads) + threadIdx.x;
    uint32_t token[kRows];  // that of no token is above all others
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const uint32_t row = first + i * kScaleThreads;
        token[i] = (row < p.rows ? static_cast<uint32_t>(p.numbers[row]) : 0u) - 1;
    }
    float scale[kLines][kRows] = {};
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
        const float* from = p.scales + (line + l) * p.in_line;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (line + l < p.lines && token[i] < p.tokens) scale[l][i] = from[token[i]];
        }
    }
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
        float* to = p.out + static_cast<uint64_t>(line + l) * p.out_line;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const uint32_t row = first + i * kScaleThreads;
            if (line + l < p.lines && row < p.out_line) to[row] = scale[l][i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(kScaleThreads, 2)
    permute_scales(const __grid_constant__ PermuteScalesParams p) {
    ptx::wait_for_prior_grids();
    gather_scales(p);
}

}  // namespace te_fast::moe
