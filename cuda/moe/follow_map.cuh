// Blocks that move rows by a map, which the first blocks of the same launch make from a mask (make_map.cuh).
//
// They wait for the map in memory. The wait ends because blocks take their numbers as they start: when one of these
// blocks runs, all of the map's blocks have started, in any order in which the device starts the blocks of a grid.
#pragma once

#include "common/ptx.cuh"
#include "moe/routing.cuh"
#include "moe/routing_bits.cuh"

namespace te_fast::moe {

constexpr uint32_t kMapPause = 40;         // nanoseconds between looks at `ready`
constexpr uint32_t kMapRounds = 1u << 26;  // at least half a minute

// This block's number in the launch; blocks that started earlier have lower numbers. If there is no map to make, no
// block waits, and the grid's number is used. Contains a barrier.
__device__ inline uint32_t take_number(const MakeMapParams& p) {
    __shared__ uint32_t number;
    if (p.blocks == 0) return blockIdx.x;
    if (threadIdx.x == 0) number = atomicAdd(&p.state->next, 1u);
    __syncthreads();
    return number;
}

// Waits until the map is written, in the first thread of the last warp; no thread waits if there is no map to make.
template <int kThreads>
__device__ inline void await_map(const MakeMapParams& p) {
    if (p.blocks == 0 || threadIdx.x != kThreads - 32) return;
    MapState& state = *p.state;
    for (uint32_t round = 0; ptx::load_acquire(&state.ready) != p.blocks; ++round) {
        if (round == kMapRounds) __trap();  // a block of the map has never started
        __nanosleep(kMapPause);
    }
    atomicAdd(&state.seen, 1u);
}

// The last call in each of these blocks: the block that started last, number `block` of the launch, clears the state
// once all have seen it.
template <int kThreads>
__device__ inline void leave_map(const MakeMapParams& p, uint32_t block) {
    if (p.blocks == 0 || block != gridDim.x - 1 || threadIdx.x != kThreads - 32) return;
    MapState& state = *p.state;
    while (ptx::load_relaxed(&state.seen) != gridDim.x - p.blocks) __nanosleep(kMapPause);
    state.ready = 0;
    state.seen = 0;
    state.next = 0;
}

// Whether the mask routes `at`, an element of it.
__device__ inline bool is_routed(const MakeMapParams& p, size_t at) {
    if (p.routing_type == RoutingType::kMask8) return static_cast<const uint8_t*>(p.routing)[at] != 0;
    const uint32_t* words = static_cast<const uint32_t*>(p.routing);
    if (p.routing_type == RoutingType::kMask32) return words[at] != 0;
    return (words[2 * at] | words[2 * at + 1]) != 0;
}

// load_slots, also in a launch that makes the map. In such a launch, the mask gives a token's experts while the map is
// still being made, and only the rows come from the map: one memory latency after the map instead of three. Contains a
// barrier.
template <int kThreads, typename Move>
__device__ inline int find_slots(const MakeMapParams& p, const RowMap& m, uint64_t token, Slots& slots,
                                 const Move& move) {
    constexpr uint32_t kReaders = kThreads / 32 - 1, kTogether = 3;  // the last warp waits
    __shared__ uint32_t words[kMaxExperts / 32];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t slices = p.blocks == 0 ? 0 : ceil_div(p.experts, 32u);
    await_map<kThreads>(p);
    if (warp < kReaders) {
#pragma unroll 1
        for (uint32_t word = warp; word < slices; word += kTogether * kReaders) {
            bool routed[kTogether];
#pragma unroll
            for (uint32_t j = 0; j < kTogether; ++j) {
                const uint32_t e = (word + j * kReaders) * 32 + lane;
                routed[j] = e < p.experts && is_routed(p, token * p.experts + e);
            }
#pragma unroll
            for (uint32_t j = 0; j < kTogether; ++j) {
                const uint32_t bits = __ballot_sync(kFullWarp, routed[j]);
                if (lane == 0 && word + j * kReaders < slices) words[word + j * kReaders] = bits;
            }
        }
    }
    __syncthreads();
    if (slices == 0) return load_slots<kThreads>(m, token, slots, move);
    const int32_t* entry = m.map + token * (2 * static_cast<uint64_t>(m.experts) + 1);
    int count = 0;
#pragma unroll 1
    for (uint32_t at = 0; at < slices; ++at) count += __popc(words[at]);
#pragma unroll 1
    for (int k = threadIdx.x; k < count; k += kThreads) {
        uint32_t at = slices - 1;
        int left = k;  // the k-th highest bit
#pragma unroll 1
        for (int found; left >= (found = __popc(words[at])); --at) left -= found;
        uint32_t word = words[at];
#pragma unroll 1
        for (; left != 0; --left) word ^= 1u << (31 - __clz(word));
        const uint32_t expert = at * 32 + 31 - __clz(word);
        const auto held = move.load(expert);
        int64_t row = entry[k];
        if (m.pad_offsets != nullptr) row += m.pad_offsets[expert];
        slots.row[k] = row < static_cast<int64_t>(m.rows) ? static_cast<int32_t>(row) : -1;
        slots.column[k] = static_cast<uint16_t>(expert);
        move.store(k, slots.row[k], held);
    }
    return count;
}

}  // namespace te_fast::moe
