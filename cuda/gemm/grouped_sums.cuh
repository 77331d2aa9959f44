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
    // The first of this thread's two rows of the tile; the second one is 8 rows on.
    __device__ int first_row() const { return warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }
    // `add` says whether the first product adds.
    template <int kColumns>
    __device__ void multiply(float (&sums)[kColumns / 2], bool add, int first_column = 0) const;
};

// The products of one stage: 64 rows of A by all of B, or by some columns' rows of B.
template <typename K>
template <int kColumns>
__device__ inline void Worker<K>::multiply(float (&sums)[kColumns / 2], bool add, int first_column) const {
    constexpr uint32_t kNextAcross = 16 * kLine / 16;  // 16 lines on, in words of 16 bytes
    constexpr uint32_t kNextAlong = 32 / 16;           // 32 bytes on
    const uint32_t a = a_tiles + turn.stage * (K::kABytes / 16);
    const uint32_t b = b_tiles + turn.stage * (K::kBBytes / 16) + first_column * (kLine / 16);
#pragma unroll
    for (int product = 0; product < K::kDepth / K::kDepthOfProduct; ++product) {
        const uint64_t a_tile = tile_descriptor(a + product * (K::kAcrossA ? kNextAcross : kNextAlong));
        const uint64_t b_tile = tile_descriptor(b + product * (K::kAcrossB ? kNextAcross : kNextAlong));
        wgmma<K::kA, K::kB, kColumns, K::kAcrossA, K::kAcrossB>(sums, a_tile, b_tile, add || product > 0);
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

// 128 x 128 scales of B: one for each half of a tile's columns and each step. A warp's lanes hold those of kHeld steps,
// while those of the next steps are read.
template <typename K>
struct ScalesOfB {
    static constexpr int kHeld = 32;
    const float* from;     // of the first half
    uint32_t second_from;  // elements from there to those of the second half; 0 where this half lies past the columns
    int steps;
    float2 held, next;

    __device__ void start(const GroupedParams& p, const Place& place, const Corner& corner) {
        if constexpr (K::kScaled && K::kByRows) {
            const int strips = static_cast<int>((p.n + 127) / 128), strip = min(corner.column / 128, strips - 1);
            from = p.b_scale_inv + (static_cast<uint64_t>(place.group) * strips + strip) * p.b_scale_pitch;
            second_from = strip + 1 < strips ? p.b_scale_pitch : 0;
            steps = steps_of<K>(p, place);
            read(next, threadIdx.x % 32);
        }
    }
    // Before `step`, a multiple of kHeld.
    __device__ void advance(int step) {
        held = next;
        read(next, threadIdx.x % 32 + step + kHeld);
    }
    __device__ float2 take(int step) const {
        const int lane = step & kHeld - 1;
        return make_float2(__shfl_sync(~0u, held.x, lane), __shfl_sync(~0u, held.y, lane));
    }

  private:
    // Without a branch, behind which the registers would be copied, and so waited for.
    __device__ void read(float2& scales, int step) {
        ptx::load_where(step < steps, scales.x, from + step);
        ptx::load_where(step < steps, scales.y, from + second_from + step);
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
            worker.template multiply<K::kColumns>(sums, step > 0);
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

// Sums of a weight gradient that are added outside of the tensor cores, step by step, under the step's scales.
template <typename K>
struct Adder {
    Worker<K>& worker;
    TileSums<K>& sums;
    uint32_t scale_row;  // bytes to the scale of this thread's first row of A

    // The products of one step, which the tensor cores may still be making.
    struct Products {
        float values[K::kColumns / 2];
        float low, high;                                  // scales of the thread's two rows of A
        float2 across[K::kScaled ? K::kColumns / 8 : 1];  // those of its columns
        int stage;
    };

    __device__ Adder(Worker<K>& worker, TileSums<K>& sums)
        : worker(worker), sums(sums), scale_row(4 * worker.first_row()) {
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
            const uint32_t across = worker.block.b_scale(stage) + threadIdx.x % 4 * 8;
#pragma unroll
            for (int j = 0; j < K::kColumns / 8; ++j) products.across[j] = load_shared_float2(across + 32 * j);
        }
        hold(products.values);
        wgmma_fence();
        worker.template multiply<K::kColumns>(products.values, false);
        worker.turn.next();
    }

    __device__ void finish(Products& products) {
        hold(products.values);
        release(worker.block, products.stage);
        if constexpr (K::kScaled) {
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
            adder.finish(even);
            wgmma_wait<0>();
            adder.finish(odd);
        }
    }
    for (; step < steps; ++step) {
        adder.begin(even);
        wgmma_wait<0>();
        adder.finish(even);
    }
}

// The scales of the columns of a weight gradient's half, read some columns ahead of their use: all at once, they would
// not fit into the registers.
template <typename K>
struct ScalesOfColumns {
    static constexpr int kCount = K::kColumns / 2 / 8, kAhead = 4;
    uint32_t from;
    float2 pairs[kCount];

    __device__ ScalesOfColumns(const Block<K>& block, int stage, int first_column)
        : from(block.b_scale(stage) + 4 * (first_column + threadIdx.x % 4 * 2)) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) read(j);
    }
    // The j-th pair, in ascending order.
    __device__ float2 take(int j) {
        read(j + kAhead);
        return pairs[j];
    }

  private:
    __device__ void read(int j) {
        if (j < kCount) pairs[j] = load_shared_float2(from + 32 * j);
    }
};

// Adds a half's products to its sums, under the scales of the thread's two rows, and of its columns.
template <typename K>
__device__ inline void add_half(float* sums, const float (&products)[K::kColumns / 4], float low, float high,
                                ScalesOfColumns<K>& columns) {
#pragma unroll
    for (int j = 0; j < K::kColumns / 16; ++j) {
        const float2 scale = columns.take(j);
        sums[4 * j] = fmaf(products[4 * j], low * scale.x, sums[4 * j]);
        sums[4 * j + 1] = fmaf(products[4 * j + 1], low * scale.y, sums[4 * j + 1]);
        sums[4 * j + 2] = fmaf(products[4 * j + 2], high * scale.x, sums[4 * j + 2]);
        sums[4 * j + 3] = fmaf(products[4 * j + 3], high * scale.y, sums[4 * j + 3]);
    }
}

// The same under scales of the rows, or without.
template <typename K>
__device__ inline void add_half(float* sums, const float (&products)[K::kColumns / 4], float low, float high) {
#pragma unroll
    for (int i = 0; i < K::kColumns / 4; ++i) {
        sums[i] = K::kScaled ? fmaf(products[i], i % 4 < 2 ? low : high, sums[i]) : sums[i] + products[i];
    }
}

// Sums that are added outside of the tensor cores, one half of the columns after the other: the registers hold all
// sums, and the products of one half. While a warpgroup adds, the other one multiplies. A warpgroup waits for its next
// stage while its last products are running, so that the next ones begin at once. `both` says that the tile has columns
// in its second half.
template <typename K>
__device__ void sum_halves(Worker<K>& worker, ScalesOfB<K>& b_scales, const Corner& corner, int steps, bool both,
                           TileSums<K>& sums) {
    constexpr int kHalf = K::kColumns / 2;
    const Block<K>& block = worker.block;
    const uint32_t scale_row = 4 * ((K::kByRows ? corner.row & 3 : 0) + worker.first_row());
#pragma unroll
    for (int i = 0; i < K::kColumns / 2; ++i) sums[i] = 0.0f;
    float products[kHalf / 2];
    float low = 1.0f, high = 1.0f;               // scales of the thread's two rows of A
    float2 of_halves = make_float2(1.0f, 1.0f);  // those of B's two 128 x 128 blocks
    const auto half = [&]<int kFirst>(int stage, bool is_last, bool more) {
        hold(products);
        wgmma_fence();
        worker.template multiply<kHalf>(products, false, kFirst);
        const auto wait_for_products = [&] {
            if (is_last) worker.turn.next();
            if (is_last && more) worker.wait();
            wgmma_wait<0>();
            hold(products);
        };
        if constexpr (K::kScaled && !K::kByRows) {
            ScalesOfColumns<K> columns(block, stage, kFirst);
            wait_for_products();
            add_half<K>(sums + kFirst / 2, products, low, high, columns);
            if (is_last) release(block, stage);
        } else {
            wait_for_products();
            if (is_last) release(block, stage);
            const float scale = kFirst == 0 ? of_halves.x : of_halves.y;
            add_half<K>(sums + kFirst / 2, products, low * scale, high * scale);
        }
    };
    const auto sum_step = [&](int step) {
        const int stage = worker.turn.stage;
        const bool more = step + 1 < steps;
        if constexpr (K::kScaled) {
            const uint32_t at = block.a_scale(stage) + scale_row;
            low = load_shared_float(at);
            high = load_shared_float(at + 32);
            if constexpr (K::kByRows) of_halves = b_scales.take(step);
        }
        half.template operator()<0>(stage, !both, more);
        if (both) half.template operator()<kHalf>(stage, true, more);
    };
    if (steps > 0) worker.wait();
    if constexpr (K::kScaled && K::kByRows) {
        for (int step = 0; step < steps;) {
            const int end = min(step + ScalesOfB<K>::kHeld, steps);
            b_scales.advance(step);
            for (; step < end; ++step) sum_step(step);
        }
    } else {
        for (int step = 0; step < steps; ++step) sum_step(step);
    }
}

// The sums of a place. A warpgroup whose rows are all another group's gives the stages back as they are.
template <typename K>
__device__ inline void sum(const GroupedParams& p, Worker<K>& worker, ScalesOfB<K>& b_scales, const Place& place,
                           const Corner& corner, TileSums<K>& sums) {
    const int steps = steps_of<K>(p, place);
    const bool idle = corner.rows_left <= 64 * worker.warpgroup;
    if constexpr (K::kSums == Sums::kFast) {
        sum_in_place<K>(worker, place, steps, idle, sums);
    } else if (idle) {
        for (int step = 0; step < steps; ++step, worker.turn.next()) {
            worker.wait();
            release(worker.block, worker.turn.stage);
        }
    } else if constexpr (K::kHalves) {
        const bool both = corner.column + K::kColumns / 2 < static_cast<int>(K::kByRows ? p.n : p.k);
        sum_halves<K>(worker, b_scales, corner, steps, both, sums);
    } else {
        Adder<K> adder(worker, sums);
        sum_outside<K>(adder, steps);
    }
}

}  // namespace te_fast::gemm
