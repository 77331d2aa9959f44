// Makes the row map of an MoE permutation: the row of every routed (token, expert) pair.
//
// Rows are ordered by expert, then by token (mask), or by expert, then by slot t * K + k (index):
//   row(t, e) = sum over e' < e of count(e') + number of tokens t' < t routed to e
//   padded_counts[e] = ceil(count(e) / align) * align     pad_offsets[e] = sum over e' < e of padded - count
//   ends[e] = sum over e' <= e of count(e')                totals = {padded rows, routed rows}
// The map is Transformer Engine's, written in its defined entries only (moe/routing.cuh). Routed rows whose padded
// place is at or past `capacity` are counted as dropped; the index map holds -1 for them, and a permutation
// removes them from its mask map.
//
// How: a block owns 32 experts (a slice) of a chunk of tokens. A lane packs its token's 32 experts into one word, and
// a transpose of 32 words gives each lane an expert's 32 tokens. The block publishes how many tokens each of its
// experts has and how many of its experts each token has, waits for all blocks, adds up the counts before its own
// and writes its tokens' entries. One more block computes the totals. No block waits on a block that may not have
// started: after kPolls polls it counts the missing tiles itself. So the blocks end even if few run at a time, and for
// any order of starts; without other blocks in the launch they use the grid's numbers.
//
// The map's blocks are the first of their launch; others may follow, which move rows by the map (follow_map.cuh). The
// map's blocks also fill memory of the others with ones (`fill`, 16-byte words). The state is zero again at the end of
// the launch, so nothing has to be cleared between launches of a stream.
//
// After a pause the code comes from memory, and each line that is not prefetched costs a microsecond, which is more
// than all the work. So the code of every launch is short and contiguous, and rare code is in separate functions.
// Pragmas keep the compiler from useless unrolling.
//
// Needs:  routing contiguous, experts <= 1024; counts [chunks][slices * 32] of uint32 and behind them one sum per
//         tile, shares [tokens][slices rounded up to 4] of uint8 (mask alone); a state that no launch running at the
//         same time uses.
// Moves:  the routing map once (index: once per slice, from L2), 4 (2n + 1) bytes per token with n experts.
#pragma once

#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/scan.cuh"
#include "moe/routing.cuh"
#include "moe/routing_bits.cuh"

namespace te_fast::moe {

// One sum per tile, after the counts of all tiles; the sums of a slice are adjacent.
__device__ inline uint32_t* tile_sums(const MakeMapParams& p) { return p.counts + static_cast<size_t>(p.tiles()) * 32; }

// Counts a tile and publishes it; several blocks may do so for one tile, with the same numbers.
template <typename S>
__device__ inline void count_tile(const MakeMapParams& p, MapShared<S>& shared, uint32_t at) {
    const MapTile tile(p, at);
    const uint32_t lane = threadIdx.x % 32;
    uint32_t count = 0;
    for (uint32_t begin = 0; begin < tile.groups(); begin += S::kGroups) {
        const uint32_t end = min(begin + S::kGroups, tile.groups());
        pack_span(p, shared, tile, begin, end);
        count += shared.count[lane];
        if (S::is_index(p)) continue;
        const uint32_t stride = round_up(tile.slices, 4u), first = tile.first + begin * 32;
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < min((end - begin) * 32, tile.tokens - begin * 32); i += S::kThreads) {
            uint8_t* share = p.shares + static_cast<size_t>(first + i) * stride + tile.slice;
            *share = static_cast<uint8_t>(__popc(shared.by_token[i / 32][i % 32]));
            if (tile.slice + 1 != tile.slices) continue;
#pragma unroll 1
            for (uint32_t behind = tile.slices; behind < stride; ++behind) *++share = 0;
        }
    }
    if (threadIdx.x < 32) {
        p.counts[at * 32 + lane] = count;
        const uint32_t all = __reduce_add_sync(kFullWarp, count);
        if (lane == 0) tile_sums(p)[tile.slice * (p.tiles() / tile.slices) + tile.chunk] = all;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // covers what the barrier ordered before it: all that the block published
        atomicOr(&p.state->arrived[at / 32], 1u << (at % 32));
    }
}

// First tile that has not arrived after at most kPolls looks, -1 for none; warp 0 alone.
__device__ inline int first_missing(const MakeMapParams& p) {
    const uint32_t lane = threadIdx.x, tiles = p.tiles();
    const bool looks = lane * 32 < tiles;
    const uint32_t rest = tiles - lane * 32;
    const uint32_t all = !looks ? 0 : rest >= 32 ? kFullWarp : (1u << rest) - 1;
    const volatile uint32_t* arrived = p.state->arrived;
    unsigned open = 0;
    uint32_t seen = 0;
#pragma unroll 1
    for (int poll = 0; poll < kPolls; ++poll) {
        seen = looks ? arrived[lane] & all : 0;
        open = __ballot_sync(kFullWarp, seen != all);
        if (open == 0) return -1;
    }
    const int word = __ffs(open) - 1;
    const uint32_t absent = __shfl_sync(kFullWarp, ~seen & all, word);
    return word * 32 + __ffs(absent) - 1;
}

// Counts the tile of block `at`, if it has one, and waits until every tile is published. True if it had to count for
// other blocks, which overwrites the bits.
template <typename S>
__device__ inline bool count_tiles(const MakeMapParams& p, MapShared<S>& shared, uint32_t at) {
    for (bool helped = false;; helped = true) {
        if (at != p.tiles()) count_tile(p, shared, at);
        if (S::kAlone) ptx::launch_dependents();  // a permutation may start to read its rows
        if (threadIdx.x < 32) {
            const int missing = first_missing(p);
            __threadfence();
            if (threadIdx.x == 0) shared.missing = missing;
        }
        __syncthreads();
        if (shared.missing < 0) return helped;
        at = static_cast<uint32_t>(shared.missing);
    }
}

__device__ inline uint4& operator+=(uint4& a, const uint4& b) {
    a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w;
    return a;
}

__device__ inline uint32_t* words_of(uint4& v) { return &v.x; }

// Adds up the counts of four experts side by side, of chunks `step` apart from `chunk` on, kLoads of them under way at
// a time: all of them (total) and those in front of chunk `own` (earlier).
template <uint32_t kLoads>
__device__ inline void sum_counts(const MakeMapParams& p, uint32_t expert, uint32_t chunk, uint32_t chunks,
                                  uint32_t step, uint32_t own, uint4& total, uint4& earlier) {
    const uint32_t width = round_up(p.experts, 32u);
    total = earlier = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (; chunk < chunks; chunk += kLoads * step) {
        uint4 count[kLoads];
#pragma unroll
        for (uint32_t j = 0; j < kLoads; ++j) {
            const uint32_t at = chunk + j * step;
            count[j] = at < chunks ? __ldcg(reinterpret_cast<const uint4*>(p.counts + at * width + expert))
                                   : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t j = 0; j < kLoads; ++j) {
            total += count[j];
            if (chunk + j * step < own) earlier += count[j];
        }
    }
}

// shared.base[e] = rows before this tile's first one of expert e: all of lower slices, lower experts of this slice,
// earlier chunks. Ends with a barrier. Eight lanes have the 32 experts of a chunk.
template <typename S>
__device__ inline void place_tile(const MakeMapParams& p, MapShared<S>& shared, const MapTile& tile) {
    constexpr uint32_t kWarps = S::kThreads / 32;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t chunks = p.tiles() / tile.slices;
    uint32_t sum[kMaxTiles / S::kThreads];  // of the lower slices; under way together with the first counts
#pragma unroll
    for (int j = 0; j < kMaxTiles / S::kThreads; ++j) {
        const uint32_t at = threadIdx.x + j * S::kThreads;
        sum[j] = at < tile.slice * chunks ? __ldcg(tile_sums(p) + at) : 0;
    }
    uint4 total, earlier;
    const uint32_t expert = tile.slice * 32 + lane % 8 * 4;
    sum_counts<4>(p, expert, threadIdx.x / 8, chunks, S::kThreads / 8, tile.chunk, total, earlier);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        uint32_t &all = words_of(total)[i], &some = words_of(earlier)[i];
#pragma unroll
        for (uint32_t distance = 8; distance < 32; distance *= 2) {
            all += __shfl_xor_sync(kFullWarp, all, distance);
            some += __shfl_xor_sync(kFullWarp, some, distance);
        }
    }
    if (lane < 8) {
        *reinterpret_cast<uint4*>(&shared.total[warp][lane * 4]) = total;
        *reinterpret_cast<uint4*>(&shared.earlier[warp][lane * 4]) = earlier;
    }
    uint32_t lower = 0;
#pragma unroll
    for (const uint32_t part : sum) lower += part;
    lower = __reduce_add_sync(kFullWarp, lower);
    if (lane == 0) shared.lower[warp] = lower;
    __syncthreads();
    if (warp == 0) {
        uint32_t own = 0, start = 0;
#pragma unroll
        for (uint32_t from = 0; from < kWarps; ++from) {
            own += shared.total[from][lane];
            start += shared.earlier[from][lane] + shared.lower[from];
        }
        uint32_t through = own;
#pragma unroll
        for (uint32_t distance = 1; distance < 32; distance *= 2) {
            const uint32_t other = __shfl_up_sync(kFullWarp, through, distance);
            if (lane >= distance) through += other;
        }
        shared.base[lane] = start + through - own;
    }
    __syncthreads();
}

// Rows that expert e loses to the capacity, given where its padded rows start.
__device__ inline uint64_t rows_past(uint64_t start, uint64_t count, uint64_t capacity) {
    return start + count <= capacity ? 0 : min(count, start + count - capacity);
}

// The last of the map's blocks: the totals of the permutation, per expert.
template <typename S>
__device__ inline void describe(const MakeMapParams& p, MapShared<S>& shared) {
    constexpr uint32_t kEach = kMaxExperts / S::kThreads;
    const uint32_t width = round_up(p.experts, 32u), chunks = p.tiles() / (width / 32);
#pragma unroll 1
    for (uint32_t e = threadIdx.x; e < kMaxExperts; e += S::kThreads) shared.counts[e] = 0;
    __syncthreads();
    // Experts side by side, as many chunks at once as there are threads for.
    const uint32_t quads = width / 4, together = max(S::kThreads / quads, 1u);
    for (uint32_t i = threadIdx.x; i < together * quads; i += S::kThreads) {
        uint4 total, none;
        sum_counts<8>(p, i % quads * 4, i / quads, chunks, together, 0, total, none);
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) atomicAdd(&shared.counts[i % quads * 4 + j], words_of(total)[j]);
    }
    __syncthreads();
    const uint32_t first = threadIdx.x * kEach;
    uint64_t sum = 0;  // padded rows above, routed rows below
#pragma unroll 2
    for (uint32_t e = first; e < first + kEach; ++e) {
        const uint32_t count = shared.counts[e];
        sum += static_cast<uint64_t>(round_up(count, p.align)) << 32 | count;
    }
    uint64_t total;
    uint64_t running = block_scan<S::kThreads>(sum, Sum{}, shared.scratch, total) - sum;
    uint64_t dropped = 0;
#pragma unroll 1
    for (uint32_t e = first; e < min(first + kEach, p.experts); ++e) {
        const uint32_t count = shared.counts[e], padded = round_up(count, p.align);
        const uint32_t start = static_cast<uint32_t>(running), padded_start = static_cast<uint32_t>(running >> 32);
        running += static_cast<uint64_t>(padded) << 32 | count;
        p.ends[e] = static_cast<int32_t>(start + count);
        if (p.pad_offsets != nullptr) p.pad_offsets[e] = padded_start - start;
        if (p.padded_counts != nullptr) p.padded_counts[e] = padded;
        dropped += rows_past(padded_start, count, p.capacity);
    }
    if (dropped != 0) atomicAdd(p.dropped_rows, static_cast<unsigned long long>(dropped));
    if (threadIdx.x == 0 && p.totals != nullptr) {
        p.totals[0] = static_cast<int64_t>(total >> 32);
        p.totals[1] = static_cast<int64_t>(total & 0xffffffffu);
    }
}

// Experts that a token has in higher slices: a sum of bytes.
template <typename S>
__device__ inline uint32_t higher_experts(const MakeMapParams& p, const MapTile& tile, uint32_t token) {
    if (S::is_index(p) || token >= p.tokens) return 0;
    const uint32_t stride = round_up(tile.slices, 4u), next = tile.slice + 1;
    const uint32_t* shares = reinterpret_cast<const uint32_t*>(p.shares + static_cast<size_t>(token) * stride);
    uint32_t sum = 0, mask = ~0u << (next % 4 * 8);
#pragma unroll 2
    for (uint32_t at = next / 4; at * 4 < tile.slices; ++at, mask = ~0u) {
        sum = __dp4a(__ldcg(shares + at) & mask, 0x01010101u, sum);
    }
    return sum;
}

// Entries of a span's tokens in this slice, a lane per token, experts in descending order: those of higher slices
// come first. Slice 0 knows the token's number of experts. `first_higher` is that of this thread's first token.
template <typename S>
__device__ inline void write_mask_entries(const MakeMapParams& p, const MapShared<S>& shared, const MapTile& tile,
                                          uint32_t begin, uint32_t end, uint32_t first_higher) {
    const uint32_t tokens = min((end - begin) * 32, tile.tokens - begin * 32);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < tokens; i += S::kThreads) {
        const uint32_t token = tile.first + begin * 32 + i;
        uint32_t word = shared.by_token[i / 32][i % 32];
        if (word == 0 && tile.slice != 0) continue;
        uint32_t at = begin == 0 && i == threadIdx.x ? first_higher : higher_experts<S>(p, tile, token);
        int32_t* entry = p.row_id_map + token * (2 * static_cast<size_t>(p.experts) + 1);
#pragma unroll 1
        for (; word != 0; ++at) {
            const uint32_t expert = 31 - __clz(word);
            word ^= 1u << expert;
            const uint32_t own = __popc(shared.by_expert[i / 32][expert] & ((1u << i % 32) - 1));
            entry[at] = static_cast<int32_t>(shared.base[expert] + shared.before[i / 32][expert] + own);
            entry[p.experts + at] = static_cast<int32_t>(tile.slice * 32 + expert);
        }
        if (tile.slice == 0) entry[2 * p.experts] = static_cast<int32_t>(at);
    }
}

// Entries of a span's slots in this slice, a lane per slot; slice 0 marks those of no expert.
template <typename S>
__device__ __noinline__ void write_index_entries(const MakeMapParams& p, const MapShared<S>& shared,
                                                 const MapTile& tile, uint32_t begin, uint32_t end) {
    const uint32_t tokens = p.tokens / p.top_k;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < (end - begin) * 32; i += S::kThreads) {
        const uint32_t group = i / 32, lane = i % 32;
        const uint32_t slot = tile.first + begin * 32 + i;
        if (slot >= p.tokens) continue;
        const uint32_t word = shared.by_token[group][lane];
        const uint32_t id = static_cast<uint32_t>(static_cast<const int32_t*>(p.routing)[slot]);
        if (word == 0 && (tile.slice != 0 || id < p.experts)) continue;
        uint64_t row = p.capacity;
        if (word != 0) {
            const uint32_t expert = 31 - __clz(word);
            const uint32_t own = shared.by_expert[group][expert] & ((1u << lane) - 1);
            row = shared.base[expert] + shared.before[group][expert] + __popc(own);
        }
        const uint32_t token = slot / p.top_k;
        p.row_id_map[static_cast<size_t>(slot - token * p.top_k) * tokens + token] =
            row < p.capacity ? static_cast<int32_t>(row) : -1;
    }
}

template <typename S>
__device__ inline void write_tile(const MakeMapParams& p, MapShared<S>& shared, const MapTile& tile, bool helped,
                                  uint32_t first_higher) {
    const bool packed = !helped && tile.groups() <= S::kGroups;
#pragma unroll 1
    for (uint32_t begin = 0; begin < tile.groups(); begin += S::kGroups) {
        const uint32_t end = min(begin + S::kGroups, tile.groups());
        if (!packed) pack_span_again(p, shared, tile, begin, end);
        if (S::is_index(p)) {
            write_index_entries(p, shared, tile, begin, end);
        } else {
            write_mask_entries(p, shared, tile, begin, end, first_higher);
        }
        if (end == tile.groups()) break;
        __syncthreads();
        if (threadIdx.x < 32) shared.base[threadIdx.x] += shared.count[threadIdx.x];
    }
}

// The part of the map's block number `block`; these are the first of the launch, or all.
template <typename S>
__device__ inline void make_map(const MakeMapParams& p, MapShared<S>& shared, uint32_t block) {
#pragma unroll 1
    for (uint32_t i = block * S::kThreads + threadIdx.x; i < p.fill_words; i += p.blocks * S::kThreads) {
        p.fill[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    const bool helped = count_tiles(p, shared, block);
    MapState& state = *p.state;
    uint32_t earlier = 0;  // blocks that no longer poll `arrived`; in a map alone, the answer arrives meanwhile
    if (S::kAlone && threadIdx.x == 0) earlier = atomicAdd(&state.ready, 1u);
    if (block != p.tiles()) {
        const MapTile tile(p, block);
        // In flight while the tile is placed.
        const uint32_t first_higher = higher_experts<S>(p, tile, tile.first + threadIdx.x);
        place_tile(p, shared, tile);
        write_tile(p, shared, tile, helped, first_higher);
    } else {
        describe(p, shared);
    }
    if (!S::kAlone) __syncthreads();
    if (threadIdx.x != 0) return;
    if (!S::kAlone) {
        __threadfence();
        earlier = atomicAdd(&state.ready, 1u);
    }
    if (earlier != p.blocks - 1) return;
    // The last block clears the state.
#pragma unroll 1
    for (uint32_t& word : state.arrived) word = 0;
    if (S::kAlone) state.ready = 0;
}

}  // namespace te_fast::moe
