// Products of groups of rows, all groups in one launch: the common part of this folder's kernels.
//
//   by rows:          D[r, n] = sum_k A[r, k] B[e(r), n, k] (+ bias[e(r), n])
//   weight gradient:  D[e, n, k] (+)= sum_{r in e} A[n, r] B[k, r]        (16-bit operands: A[r, n], B[r, k])
//
// A block of three warpgroups has a tile of D. One warp of the first loads tiles of A and B through a ring in shared
// memory, another one moves tiles of D; the other two warpgroups multiply, 64 rows each. Blocks stay and take tile
// after tile. The two blocks of a cluster have tiles side by side and the same rows of A, of which each loads one half
// for both.
//
// The sums of FP8 products on Hopper have 13 bits behind the point. `fast` leaves them in the tensor core; `split` and
// `block` add those of every 128 k in FP32, `block` after scaling. An output's sum has the same order for all tile
// sizes, so that its bits do not depend on the choice of tiles.
#pragma once

#include "gemm/grouped_store.cuh"

namespace te_fast::gemm {

// One thread: every tile of every step of every place.
template <typename K>
__device__ void load_all(const GroupedParams& p, const Block<K>& block, Schedule<K::kByRows>& schedule, bool leader) {
    const uint32_t cluster = block.cluster;
    Turn<K> turn;
    Place place;
    const uint32_t clusters = gridDim.x / cluster;
    for (uint32_t tile = blockIdx.x / cluster; schedule.find(tile, place); tile += clusters) {
        if (!leader) continue;
        const Corner corner = corner_of<K>(p, place, block);
        const int steps = steps_of<K>(p, place);
#pragma unroll 1
        for (int step = 0; step < steps; ++step, turn.next()) {
            ptx::wait(block.empty(turn.stage), turn.parity ^ 1);
            const uint32_t barrier = block.full(turn.stage);
            ptx::arrive_expecting(barrier, K::kStageBytes);
            // Along k for products of rows; along the rows for weight gradients, which sum these.
            const int depth = step * K::kDepth + (K::kByRows ? 0 : place.start);
            const auto load_half = [&](int half) {
                const int row = corner.row + 64 * half;
                const int x = K::kAcrossA ? row : depth, y = K::kAcrossA ? depth : row;
                const uint32_t to = block.a(turn.stage) + half * (K::kABytes / 2);
                if (cluster == 1) {
                    load_tile(to, p.a, barrier, x, y);
                } else {
                    load_tile_to(0b11, to, p.a, barrier, x, y);
                }
            };
            if (cluster == 1) {
                load_half(0);
                load_half(1);
            } else {
                load_half(block.rank);
            }
            const int matrix = K::kByRows ? place.group : 0;
            if constexpr (K::kAcrossB) {
#pragma unroll
                for (int part = 0; part < K::kColumns / 64; ++part) {
                    load_tile(block.b(turn.stage) + part * 64 * kLine, p.b, barrier, corner.column + 64 * part, depth,
                              matrix);
                }
            } else {
                load_tile(block.b(turn.stage), p.b, barrier, depth, corner.column, matrix);
            }
            if constexpr (K::kScaled) {
                const int strip = depth / 128;
                load_tile(block.a_scale(turn.stage), p.a_scale, barrier, corner.row & ~3, strip);
                if constexpr (!K::kByRows) {
                    load_tile(block.b_scale(turn.stage), p.b_scale, barrier, corner.column, strip);
                }
            }
        }
    }
}

// One thread: D's tiles between memory and the chunks in shared memory, some at a time. It signals that chunks are
// free, or hold the summands, and waits for the sums.
template <typename K>
__device__ void move_all(const GroupedParams& p, const Block<K>& block, Schedule<K::kByRows>& schedule, bool leader) {
    const int per_chunk = p.d_type == kFloatF32 ? 32 : 64;
    const uint32_t clusters = gridDim.x / block.cluster;
    uint32_t parity = 0;
    Place place;
    for (uint32_t tile = blockIdx.x / block.cluster; schedule.find(tile, place); tile += clusters) {
        if (!leader) continue;
        const Corner corner = corner_of<K>(p, place, block);
        const int chunks = chunks_of<K>(p, corner);
#pragma unroll 1
        for (int first = 0; first < chunks; first += K::kChunks) {
            const int count = min(K::kChunks, chunks - first);
            const auto each = [&](auto&& move) {
#pragma unroll 1
                for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
                    // By rows, a tile whose last rows are another group's is stored by the warpgroup.
                    if (corner.rows_left - 64 * warpgroup < (K::kByRows ? 64 : 1)) continue;
#pragma unroll 1
                    for (int i = 0; i < count; ++i) {
                        move(block.chunk(warpgroup, i), corner.column + (first + i) * per_chunk,
                             corner.row + 64 * warpgroup, K::kByRows ? 0 : place.group);
                    }
                }
            };
            if (K::kAdds && p.accumulate != 0) {
                ptx::arrive_expecting(block.free(), count * K::kChunkBytes * (corner.rows_left > 64 ? 2 : 1));
                each([&](uint32_t chunk, int x, int y, int z) { load_tile(chunk, p.d, block.free(), x, y, z); });
            } else {
                ptx::arrive(block.free());
            }
            ptx::wait(block.ready(), parity);
            parity ^= 1;
            each([&](uint32_t chunk, int x, int y, int z) { store_tile(p.d, chunk, x, y, z); });
            commit_stores();
            wait_stores_read<0>();
        }
    }
}

// Two warpgroups: compute the sums of every place, and store them. The next place is known before the sums are stored,
// so that its scales are there when its products are.
template <typename K>
__device__ void work_all(const GroupedParams& p, const Block<K>& block, Schedule<K::kByRows>& schedule) {
    Worker<K> worker{block};
    ScalesOfB<K> b_scales;
    Place place;
    const uint32_t clusters = gridDim.x / block.cluster;
    uint32_t tile = blockIdx.x / block.cluster;
    bool is_there = schedule.find(tile, place);
    if (is_there) b_scales.start(p, place, corner_of<K>(p, place, block));
    while (is_there) {
        const Corner corner = corner_of<K>(p, place, block);
        TileSums<K> sums;
        sum<K>(p, worker, b_scales, place, corner, sums);
        Place next;
        is_there = schedule.find(tile += clusters, next);
        if (is_there) b_scales.start(p, next, corner_of<K>(p, next, block));
        store<K>(p, worker, sums, place, corner);
        place = next;
    }
}

template <typename K>
__device__ void grouped(const GroupedParams& p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    Block<K> block{ptx::shared_address(shared), ptx::cluster_blocks(), ptx::cluster_rank()};
    ptx::forget(block.base);  // otherwise the compiler would recompute it slowly at each use
    if (threadIdx.x == 0) {
        prefetch(p.a);
        prefetch(p.b);
        prefetch(p.d);
        for (int stage = 0; stage < K::kStages; ++stage) {
            ptx::init_barrier(block.full(stage), 1);
            ptx::init_barrier(block.empty(stage), block.cluster * (kMathThreads / 32));
        }
        ptx::init_barrier(block.free(), 1);
        ptx::init_barrier(block.ready(), kMathThreads / 32);
        ptx::init_barriers_done();
    }
    __syncthreads();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::wait_for_prior_grids();

    const uint32_t width = static_cast<uint32_t>(K::kByRows ? p.n : p.k), wide = block.cluster * K::kColumns;
    Schedule<K::kByRows> schedule(p.splits, p.groups, p.rows, p.counted, p.align, kRows,
                                  static_cast<int>((p.n + kRows - 1) / kRows),
                                  static_cast<int>((width + wide - 1) / wide), K::kAdds && p.accumulate != 0);
    if (threadIdx.x < 128) {
        give_registers<40>();
        const bool leader = threadIdx.x % 32 == 0;
        if (threadIdx.x < 32) {
            load_all<K>(p, block, schedule, leader);
        } else if (threadIdx.x < 64) {
            move_all<K>(p, block, schedule, leader);
        }
    } else {
        take_registers<232>();
        work_all<K>(p, block, schedule);
    }
    // No block leaves while the other block may still write into its shared memory.
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

}  // namespace te_fast::gemm
