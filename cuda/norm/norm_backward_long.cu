// Gradient of LayerNorm and RMSNorm for rows too long for a block to hold; the formulas are those of norm_backward.cu.
//
//   norm_backward_sums:  a[r] and b[r]
//   norm_backward_tiles: dx, dgamma and dbeta from these
//
// All of it is FP32, in a fixed order. a, b: every 4096th group of 8 columns; the threads of a warp; the 16 warps.
// dgamma, dbeta: every 16th row of a tile; the 16 classes; every 8th tile; the 8 classes.
//
// Launch: norm_backward_sums: any number of blocks of 512 threads.
//         norm_backward_tiles: tiles_cols * ceil(rows / chunk) blocks, tiles_cols = ceil(cols / 128); 256 threads.
// Needs:  contiguous tensors, any alignment; cols >= 1; sums 8 bytes per row.
//         dgamma, dbeta: partial f32 [2][ceil(rows / chunk)][cols], tiles_cols counters; at least one block.
// Moves:  per element sizeof(In) for each of dy and x twice, add and dx.

#include "common/constants.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "norm/backward.cuh"

namespace te_fast::norm {

constexpr uint32_t kLanes = kTileCols / 8;  // threads along the columns
static_assert(kTileThreads / kLanes == kTileStep);
constexpr uint32_t kWarps = kTileThreads / 32;

// The same on both sides of a barrier.
__device__ inline RowSums* row_sums(const NormBackwardParams& p) { return reinterpret_cast<RowSums*>(p.sums); }

template <bool kVectors, Floating In>
__device__ void sum_rows(const NormBackwardParams& p) {
    __shared__ RowSums of_warps[2][kBackwardThreads / 32];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t turn = 0;
    for (uint32_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const RowStats stats = load_stats(p, row);
        RowSums sums{0.0f, 0.0f};
#pragma unroll 2
        for (uint32_t col = 8 * threadIdx.x; col < p.cols; col += 8 * kBackwardThreads) {
            const size_t index = static_cast<size_t>(row) * p.cols + col;
            const int width = width_at(col, p.cols);
            Columns8 part(load_part<kVectors, In>(p.dy, index, width), load_part<kVectors, In>(p.x, index, width));
            float factor[8];
            load_factor<kVectors>(p, col, width, factor);
            part.normalise<In>(stats);
            part.weigh(factor);
            part.add_to(sums);
        }
        sums = {warp_sum(sums.plain), warp_sum(sums.normed)};
        turn ^= 1;
        if (lane == 0) of_warps[turn][warp] = sums;
        __syncthreads();
        if (warp != 0) continue;
        sums = lane < kBackwardThreads / 32 ? of_warps[turn][lane] : RowSums{0.0f, 0.0f};
        sums = {warp_sum(sums.plain), warp_sum(sums.normed)};
        sums.finish(p, 1.0f / static_cast<float>(p.cols));
        if (lane == 0) row_sums(p)[row] = sums;
    }
}

struct TileSums {
    float dgamma[8] = {}, dbeta[8] = {};
};

// The rows of a tile, every 16th per thread.
template <bool kVectors, Floating In>
__device__ TileSums differentiate_tile(const NormBackwardParams& p, uint32_t first, uint32_t end, uint32_t col) {
    TileSums total;
    const int width = width_at(col, p.cols);
    if (width == 0) return total;
    float factor[8];
    load_factor<kVectors>(p, col, width, factor);
#pragma unroll 2
    for (uint32_t row = first + threadIdx.x / kLanes; row < end; row += kTileStep) {
        const size_t index = static_cast<size_t>(row) * p.cols + col;
        const RowStats stats = load_stats(p, row);
        Columns8 part(load_part<kVectors, In>(p.dy, index, width), load_part<kVectors, In>(p.x, index, width));
        part.normalise<In>(stats);
        part.add_to(total.dgamma, total.dbeta);
        if (p.dx == nullptr) continue;
        float dx[8];
        part.weigh(factor);
        part.gradient(stats, row_sums(p)[row], dx);
        if (p.add != nullptr) {
            float add[8];
            unpack8<In>(load_part<kVectors, In>(p.add, index, width), add);
#pragma unroll
            for (int c = 0; c < 8; ++c) dx[c] += add[c];
        }
        store_part<kVectors, In, true>(p.dx, index, width, pack8<In>(dx));
    }
    return total;
}

// Leaves the sums of the tile's columns of its first threads' warp in `to`. Contains barriers.
__device__ inline void publish(const NormBackwardParams& p, float (&total)[8], uint32_t col0, float* to) {
    __shared__ float of_warps[kWarps][kTileCols];
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        total[c] += __shfl_xor_sync(kFullWarp, total[c], kLanes);
        if (threadIdx.x % 32 < kLanes) of_warps[threadIdx.x / 32][8 * (threadIdx.x % kLanes) + c] = total[c];
    }
    __syncthreads();
    if (threadIdx.x >= kTileCols || col0 + threadIdx.x >= p.cols) return;
    float sum = 0.0f;
#pragma unroll
    for (uint32_t warp = 0; warp < kWarps; ++warp) sum += of_warps[warp][threadIdx.x];
    to[col0 + threadIdx.x] = sum;
}

// Adds the sums that `count` tiles have published for a column.
__device__ inline void finish_column(const NormBackwardParams& p, const float* from, uint32_t count, void* to,
                                     uint32_t col) {
    constexpr uint32_t kClasses = 8;
    float total[kClasses] = {};
    for (uint32_t tile = 0; tile < count; tile += kClasses) {
#pragma unroll
        for (uint32_t i = 0; i < kClasses; ++i) {
            if (tile + i < count) total[i] += __ldcg(from + static_cast<size_t>(tile + i) * p.cols + col);
        }
    }
#pragma unroll
    for (uint32_t i = 1; i < kClasses; ++i) total[0] += total[i];
    store_float(to, col, p.weight_kind, total[0]);
}

template <Floating In>
__device__ void norm_backward_sums(const NormBackwardParams& p) {
    if (rows_are_vectors<In>(p) && is_aligned(p.gamma, 16)) {
        sum_rows<true, In>(p);
    } else {
        sum_rows<false, In>(p);
    }
}

template <Floating In>
__device__ void norm_backward_tiles(const NormBackwardParams& p) {
    const uint32_t tile = blockIdx.x % p.tiles_cols, part = blockIdx.x / p.tiles_cols;
    const uint32_t tiles_rows = gridDim.x / p.tiles_cols;
    const uint32_t col0 = tile * kTileCols, col = col0 + 8 * (threadIdx.x % kLanes);
    const uint32_t first = part * p.chunk, end = min(first + p.chunk, p.rows);
    const bool vectors = rows_are_vectors<In>(p) && is_aligned(p.gamma, 16);
    TileSums total =
        vectors ? differentiate_tile<true, In>(p, first, end, col) : differentiate_tile<false, In>(p, first, end, col);
    if (p.dgamma == nullptr && p.dbeta == nullptr) return;
    const size_t size = static_cast<size_t>(tiles_rows) * p.cols, own = static_cast<size_t>(part) * p.cols;
    float* const dbeta_partial = p.partial + (p.dgamma == nullptr ? 0 : size);
    if (p.dgamma != nullptr) publish(p, total.dgamma, col0, p.partial + own);
    if (p.dbeta != nullptr) publish(p, total.dbeta, col0, dbeta_partial + own);
    if (!is_last_block(p.counters + tile, tiles_rows)) return;
    const uint32_t mine = col0 + threadIdx.x % kTileCols;
    if (mine >= p.cols) return;
    const bool is_dgamma = threadIdx.x < kTileCols;
    if (is_dgamma && p.dgamma != nullptr) finish_column(p, p.partial, tiles_rows, p.dgamma, mine);
    if (!is_dgamma && p.dbeta != nullptr) finish_column(p, dbeta_partial, tiles_rows, p.dbeta, mine);
}

#define INSTANCE(symbol, kernel, threads, blocks, in)             \
    extern "C" __global__ void __launch_bounds__(threads, blocks) \
        symbol(const __grid_constant__ NormBackwardParams p) {    \
        ptx::wait_for_prior_grids();                              \
        kernel<in>(p);                                            \
    }

INSTANCE(norm_backward_sums_f32, norm_backward_sums, kBackwardThreads, 2, f32)
INSTANCE(norm_backward_sums_f16, norm_backward_sums, kBackwardThreads, 2, f16)
INSTANCE(norm_backward_sums_bf16, norm_backward_sums, kBackwardThreads, 2, bf16)
INSTANCE(norm_backward_tiles_f32, norm_backward_tiles, kTileThreads, 3, f32)
INSTANCE(norm_backward_tiles_f16, norm_backward_tiles, kTileThreads, 3, f16)
INSTANCE(norm_backward_tiles_bf16, norm_backward_tiles, kTileThreads, 3, bf16)

}  // namespace te_fast::norm
