// The threads of a row in norm_backward.cu: of one block, or of the blocks of a cluster, and how they add up.
#pragma once

#include "common/constants.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "norm/backward.cuh"

namespace te_fast::norm {

constexpr uint32_t kWarps = kBackwardThreads / 32;

struct BackwardShared {
    uint64_t full[kMaxStages], empty[kMaxStages];  // barriers of the ring
    uint64_t sent[2];                              // of sums that other blocks have sent, by turn
    union {
        float sums[2][2][kWarps * kMaxBlocks];  // of a row, by turn and kind
        float4 columns[kWarps][32];             // after all rows
    };
};

// The columns of a row that a block has: all of them, or its share in a cluster.
template <bool kCluster>
struct Span {
    __device__ explicit Span(const NormBackwardParams&) {}
    // That of another block of the cluster.
    __device__ Span of_block(const NormBackwardParams&, uint32_t) const { return *this; }

    __device__ static uint32_t blocks() { return 1; }  // of the cluster
    __device__ static uint32_t block() { return 0; }   // in it
    __device__ static uint32_t first() { return 0; }
    __device__ static uint32_t width(const NormBackwardParams& p) { return p.cols; }
    __device__ static uint32_t most(const NormBackwardParams& p) { return p.cols; }  // of any block
};

template <>
struct Span<true> {
#if __CUDA_ARCH__ >= 900
    __device__ explicit Span(const NormBackwardParams& p) : Span(p, ptx::cluster_blocks(), ptx::cluster_rank()) {}
#else
    __device__ explicit Span(const NormBackwardParams& p) : Span(p, 1, 0) {}
#endif
    __device__ Span of_block(const NormBackwardParams& p, uint32_t block) const { return {p, blocks_, block}; }

    __device__ uint32_t blocks() const { return blocks_; }
    __device__ uint32_t block() const { return block_; }
    __device__ uint32_t first() const { return first_; }
    __device__ uint32_t width(const NormBackwardParams&) const { return width_; }
    __device__ static uint32_t most(const NormBackwardParams& p) { return p.chunk; }

  private:
    uint32_t blocks_, block_, first_, width_;
    __device__ Span(const NormBackwardParams& p, uint32_t blocks, uint32_t block)
        : blocks_(blocks), block_(block), first_(min(block * p.chunk, p.cols)), width_(min(p.chunk, p.cols - first_)) {}
};

// The threads of one row.
struct BackwardTeam {
    uint32_t threads, id, rank;
    uint32_t turn = 0;

    __device__ explicit BackwardTeam(uint32_t threads)
        : threads(threads), id(threadIdx.x / threads), rank(threadIdx.x % threads) {}

    // First of the eight columns of slot `i`.
    __device__ uint32_t col(int i) const { return 8 * (rank + i * threads); }

    // Before the first sum of a cluster. Contains a barrier of all its blocks.
    template <bool kCluster>
    __device__ static void join(BackwardShared& shared) {
#if __CUDA_ARCH__ >= 900
        if constexpr (kCluster) {
            if (threadIdx.x < 2) ptx::init_barrier(shared.sent[threadIdx.x], 1);
            ptx::init_barriers_done();
            ptx::cluster_arrive();
            ptx::cluster_wait();
        }
#endif
    }

    // Sums over the team, the same bits in each of its threads. With two buffers, a thread that writes to one again has
    // passed a barrier that every thread reaches after reading it.
    template <bool kCluster>
    __device__ void add(RowSums& sums, BackwardShared& shared, const Span<kCluster>& span) {
        if (!kCluster && threads < 32) return add_narrow(sums);
        // One half of the warp goes on with one sum, the other half with the other one.
        const uint32_t lane = threadIdx.x % 32;
        const bool upper = lane >= 16;
        float sum =
            (upper ? sums.normed : sums.plain) + __shfl_xor_sync(kFullWarp, upper ? sums.plain : sums.normed, 16);
#pragma unroll
        for (int other = 8; other > 0; other /= 2) sum += __shfl_xor_sync(kFullWarp, sum, other);
        if constexpr (kCluster) {
            sum = add_blocks(sum, shared.sums[turn % 2][upper], shared.sent[turn % 2], span);
        } else if (threads > 32) {
            const uint32_t warps = threads / 32;
            float* of_warps = shared.sums[turn ^= 1][upper];
            if (lane % 16 == 0) of_warps[threadIdx.x / 32] = sum;
            ptx::forget(id);  // not the sum, which would stay in a register
            ptx::sync_threads(id + 1, threads);
            sum = of_warps[id * warps + lane % warps];
#pragma unroll
            for (int other = 8; other > 0; other /= 2) {
                if (other < static_cast<int>(warps)) sum += __shfl_xor_sync(kFullWarp, sum, other);
            }
        }
        sums = {__shfl_sync(kFullWarp, sum, 0), __shfl_sync(kFullWarp, sum, 16)};
    }

  private:
    // Sums a warp's value over all warps of the cluster; every warp sends its value to all blocks.
    __device__ float add_blocks(float sum, float* of_warps, uint64_t& sent, const Span<true>& span) {
#if __CUDA_ARCH__ >= 900
        const uint32_t first = threadIdx.x % 16, count = kWarps * span.blocks();
        if (threadIdx.x == 0) ptx::arrive_expecting(sent, 2 * sizeof(float) * count);
        float* to = of_warps + span.block() * kWarps + threadIdx.x / 32;
        if (first < span.blocks()) ptx::send(to, sum, sent, first);
        __syncwarp();
        ptx::wait_sent(sent, turn / 2 % 2);
        ++turn;
        sum = 0.0f;
        for (uint32_t from = first; from < count; from += 16) sum += of_warps[from];
#pragma unroll
        for (int other = 8; other > 0; other /= 2) sum += __shfl_xor_sync(kFullWarp, sum, other);
#endif
        return sum;
    }

    __device__ void add_narrow(RowSums& sums) const {
        for (uint32_t other = threads / 2; other > 0; other /= 2) {
            sums.plain += __shfl_xor_sync(kFullWarp, sums.plain, other);
            sums.normed += __shfl_xor_sync(kFullWarp, sums.normed, other);
        }
    }
};

}  // namespace te_fast::norm
