// The sums of a tile: products of the tensor cores, step by step along the summed dimension.
#pragma once

#include "gemm/grouped_tile.cuh"

namespace te_fast::gemm {

template <typename K>
using TileSums = float[K::kColumns / 2];

// A warpgroup that multiplies, and where it is in the ring.
template <typename K>
struct Worker {
    const Block<K>& block;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);  // known to be the warp's
    const uint32_t a_tiles = tile_word(block.a(0) + warpgroup * (K::kABytes / 2));
    const uint32_t b_tiles = tile_word<K::kAcrossB ? 64 * kLine : 16>(block.b(0));
    Turn<K> turn;
    uint32_t parity = 0;  // of the chunks

    __device__ void wait() const { ptx::wait(block.full(turn.stage), turn.parity); }
    // `add` says whether the first product adds.
    __device__ void multiply(TileSums<K>& sums, bool add) const;
};

// The products of one stage: 64 rows of A by all of B.
template <typename K>
__device__ inline void Worker<K>::multiply(TileSums<K>& sums, bool add) const {
    constexpr uint32_t kNextAcross = 16 * kLine / 16;  // 16 lines on, in words of 16 bytes
    constexpr uint32_t kNextAlong = 32 / 16;           // 32 bytes on
    const uint32_t a = a_tiles + turn.stage * (K::kABytes / 16), b = b_tiles + turn.stage * (K::kBBytes / 16);
#pragma unroll
    for (int product = 0; product < K::kDepth / K::kDepthOfProduct; ++product) {
        const uint64_t a_tile = tile_descriptor(a + product * (K::kAcrossA ? kNextAcross : kNextAlong));
        const uint64_t b_tile = tile_descriptor(b + product * (K::kAcrossB ? kNextAcross : kNextAlong));
        wgmma<K::kA, K::kB, K::kColumns, K::kAcrossA, K::kAcrossB>(sums, a_tile, b_tile, add || product > 0);
    }
    wgmma_commit();
}

// Zeros in the lines of a stage that are other groups' rows.
template <typename K>
__device__ void clear_lines(const Block<K>& block, int stage, int lines) {
    const int thread = threadIdx.x - 128;
    constexpr int kTiles = 2 + K::kColumns / 64;
    for (int i = thread; i < kTiles * (64 - lines) * 8; i += kMathThreads) {
        const int tile = i / ((64 - lines) * 8), word = i % ((64 - lines) * 8);
        const uint32_t at = tile < 2 ? block.a(stage) + tile * 64 * kLine : block.b(stage) + (tile - 2) * 64 * kLine;
        store_shared(at + lines * kLine + word * 16, make_uint4(0, 0, 0, 0));
    }
    publish_shared();
    ptx::sync_threads(1, kMathThreads);
}

// Returns the stage to the loading warp.
template <typename K>
__device__ inline void release(const Block<K>& block, int stage) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < block.cluster) arrive_at(block.empty(stage), lane);
}

// 128 x 128 scales of B. A tile's columns have one or two of them at a time; a warp's lanes hold those of 32 steps.
template <typename K>
struct ScalesOfB {
    static constexpr bool kTwo = K::kColumns % 128 != 0;
    const float* from;
    uint32_t second_from;  // elements from the first one's; 0 where there is none
    int steps;
    int boundary;  // first column, divided by 8, of the second one
    float held, held_second, scale, second;

    __device__ void start(const GroupedParams& p, int group, int column) {
        const int strips = static_cast<int>((p.n + 127) / 128), strip = min(column / 128, strips - 1);
        from = p.b_scale_inv + (static_cast<uint64_t>(group) * strips + strip) * p.b_scale_pitch;
        second_from = strip + 1 < strips ? p.b_scale_pitch : 0;
        boundary = (128 - column % 128) / 8;
        steps = static_cast<int>((p.k + 127) / 128);
    }
    __device__ void take(int step) {
        const int lane = threadIdx.x % 32;
        if (step % 32 == 0) {
            const float* mine = from + min(step + lane, steps - 1);
            held = __ldg(mine);
            if constexpr (kTwo) held_second = __ldg(mine + second_from);
        }
        scale = __shfl_sync(~0u, held, step % 32);
        if constexpr (kTwo) second = __shfl_sync(~0u, held_second, step % 32);
    }
    template <int kBoundary>
    __device__ void add_from(float (&sums)[K::kColumns / 2], const float (&products)[K::kColumns / 2], float low,
                             float high) const {
        const float scales[2][2] = {{low * scale, high * scale}, {low * second, high * second}};
#pragma unroll
        for (int i = 0; i < K::kColumns / 2; ++i) {
            sums[i] = fmaf(products[i], scales[i / 4 >= kBoundary][i % 4 / 2], sums[i]);
        }
    }
    __device__ void add(float (&sums)[K::kColumns / 2], const float (&products)[K::kColumns / 2], float low,
                        float high) const {
        if constexpr (!kTwo) {
            add_from<K::kColumns / 8>(sums, products, low, high);
        } else if (boundary == 16) {
            add_from<16>(sums, products, low, high);
        } else {
            add_from<8>(sums, products, low, high);
        }
    }
};

// Sums that stay in the tensor cores, which are never idle: a stage is given back while the next one is multiplied.
template <typename K>
__device__ void sum_in_place(Worker<K>& worker, const Place& place, int steps, bool idle, TileSums<K>& sums) {
    const Block<K>& block = worker.block;
    Turn<K>& turn = worker.turn;
    if (steps == 0) {
#pragma unroll
        for (int i = 0; i < K::kColumns / 2; ++i) sums[i] = 0.0f;
    }
    int last_stage = 0;
    for (int step = 0; step < steps; ++step, turn.next()) {
        worker.wait();
        if constexpr (K::kAcrossA) {
            const int lines = place.rows - step * K::kDepth;
            if (lines < K::kDepth) {
                if (step > 0) wgmma_wait<0>();
                clear_lines<K>(block, turn.stage, lines);
            }
        }
        if (!idle) {
            hold(sums);
            wgmma_fence();
            worker.multiply(sums, step > 0);
            hold(sums);
        }
        if (step > 0) {
            wgmma_wait<1>();
            release(block, last_stage);
        }
        last_stage = turn.stage;
    }
    wgmma_wait<0>();
    hold(sums);
    if (steps > 0) release(block, last_stage);
}

// Sums that are added outside of the tensor cores, step by step, under the step's scales.
template <typename K>
struct Adder {
    Worker<K>& worker;
    TileSums<K>& sums;
    uint32_t scale_row;  // bytes to the scale of this thread's first row of A
    ScalesOfB<K> b_scales;

    // The products of one step, which the tensor cores may still be making.
    struct Products {
        float values[K::kColumns / 2];
        float low, high;                                                 // scales of the thread's two rows of A
        float2 across[K::kScaled && !K::kByRows ? K::kColumns / 8 : 1];  // those of its columns (weight gradients)
        int stage;
    };

    __device__ Adder(const GroupedParams& p, Worker<K>& worker, const Place& place, const Corner& corner,
                     TileSums<K>& sums)
        : worker(worker), sums(sums) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        scale_row = 4 * ((K::kByRows ? corner.row & 3 : 0) + worker.warpgroup * 64 + warp * 16 + lane / 4);
        if constexpr (K::kScaled && K::kByRows) b_scales.start(p, place.group, corner.column);
#pragma unroll
        for (int i = 0; i < K::kColumns / 2; ++i) sums[i] = 0.0f;
    }

    __device__ void begin(Products& products) {
        const int stage = products.stage = worker.turn.stage;
        worker.wait();
        if constexpr (K::kScaled) {
            const uint32_t at = worker.block.a_scale(stage) + scale_row;
            products.low = load_shared_float(at);
            products.high = load_shared_float(at + 32);
        }
        if constexpr (K::kScaled && !K::kByRows) {
            const uint32_t at = worker.block.b_scale(stage) + threadIdx.x % 4 * 8;
#pragma unroll
            for (int j = 0; j < K::kColumns / 8; ++j) products.across[j] = load_shared_float2(at + 32 * j);
        }
        hold(products.values);
        wgmma_fence();
        worker.multiply(products.values, false);
        worker.turn.next();
    }

    __device__ void finish(Products& products, int step) {
        hold(products.values);
        release(worker.block, products.stage);
        if constexpr (K::kScaled && K::kByRows) {
            b_scales.take(step);
            b_scales.add(sums, products.values, products.low, products.high);
        } else if constexpr (K::kScaled) {
#pragma unroll
            for (int i = 0; i < K::kColumns / 2; ++i) {
                const float2 across = products.across[i / 4];
                const float scale = (i % 4 < 2 ? products.low : products.high) * (i % 2 == 0 ? across.x : across.y);
                sums[i] = fmaf(products.values[i], scale, sums[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < K::kColumns / 2; ++i) sums[i] += products.values[i];
        }
    }
};

template <typename K>
__device__ void sum_outside(Adder<K>& adder, int steps) {
    typename Adder<K>::Products even, odd;
    int step = 0;
    if constexpr (K::kAhead) {
        // Products of every second step are added while those of the next step are running. If products were still
        // running at the end of the loop's body, the compiler would copy them there, and so wait for them.
        for (; step + 1 < steps; step += 2) {
            adder.begin(even);
            adder.begin(odd);
            wgmma_wait<1>();
            adder.finish(even, step);
            wgmma_wait<0>();
            adder.finish(odd, step + 1);
        }
    }
    for (; step < steps; ++step) {
        adder.begin(even);
        wgmma_wait<0>();
        adder.finish(even, step);
    }
}

// The sums of a place. A warpgroup whose rows are all another group's gives the stages back as they are.
template <typename K>
__device__ inline void sum(const GroupedParams& p, Worker<K>& worker, const Place& place, const Corner& corner,
                           TileSums<K>& sums) {
    const int steps = steps_of<K>(p, place);
    const bool idle = corner.rows_left <= 64 * worker.warpgroup;
    if constexpr (K::kSums == Sums::kFast) {
        sum_in_place<K>(worker, place, steps, idle, sums);
    } else if (idle) {
        for (int step = 0; step < steps; ++step, worker.turn.next()) {
            worker.wait();
            release(worker.block, worker.turn.stage);
        }
    } else {
        Adder<K> adder(p, worker, place, corner, sums);
        sum_outside<K>(adder, steps);
    }
}

}  // namespace te_fast::gemm
