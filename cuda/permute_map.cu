// Row map of an MoE permutation in one launch: where every routed (token, expert) pair goes.
//
// Rows are ordered by expert, then by token (mask), or by expert, then by slot t * K + k (index):
//   row(t, e) = sum over e' < e of count(e') + number of tokens t' < t routed to e
//   padded_counts[e] = ceil(count(e) / align) * align     pad_offsets[e] = sum over e' < e of padded - count
//   ends[e] = sum over e' <= e of count(e')                totals = {padded rows, routed rows}
// The map is Transformer Engine's, written in its defined entries only (common/routing.cuh). Routed rows whose padded
// place is at or past `capacity` are counted as dropped; the index map holds -1 for them, and the permutation behind
// takes them off a mask map.
//
// How: a block owns 32 experts (a slice) of a chunk of tokens. A lane packs its token's 32 experts into one word, and
// a transpose of 32 words gives each lane an expert's 32 tokens. The block publishes how many tokens each of its
// experts has and how many of its experts each token has, waits for all blocks, adds up what comes before it and
// writes its tokens' entries. One more block describes the whole. A block never waits on one that may not have
// started: after kPolls looks it counts the missing tiles itself, so the launch ends with any number of resident
// blocks. `state` is zero again at the end, so nothing has to be cleared between launches.
//
// On its way it fills memory of the launch behind it with ones (`fill`, 16-byte words).
//
// Launch: permute_map_*: slices * chunks + 1 blocks of 256 threads, at most kMaxTiles + 1; `chunk_tokens` is a
//         multiple of 32.
//         permute_dropped: 1 block of 32 threads: reads the count of dropped rows and clears it on request.
// Needs:  routing contiguous, experts <= 1024; counts [chunks][slices * 32] of uint32 and behind them one sum per
//         tile, shares [slices][tokens] of uint8 (mask alone); a `slot` that no launch running at the same time uses.
// Moves:  the routing map once (index: once per slice, from L2), 4 (2n + 1) bytes per token with n experts.

#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/routing.cuh"
#include "common/vec.cuh"

namespace te_fast {

constexpr int kMapThreads = 256;
constexpr int kMapWarps = kMapThreads / 32;
constexpr int kMaxTiles = 512;
constexpr int kGroups = 64;  // of 32 tokens, whose bits a block keeps in shared memory
constexpr int kPolls = 128;  // looks at `arrived`, about 0.7 us each
constexpr int kSlots = 16384;

struct PermuteMapParams {
    const void* routing;
    int32_t* row_id_map;
    uint32_t* counts;
    uint8_t* shares;
    int32_t* ends;
    int64_t* pad_offsets;    // null: none
    int64_t* padded_counts;  // null: none
    int64_t* totals;         // null: none
    uint64_t tokens;         // index map: tokens * top_k
    uint64_t capacity;       // rows of the permuted tensor
    uint32_t experts;
    uint32_t top_k;  // index map, else 0
    uint32_t align;
    uint32_t chunk_tokens;
    uint32_t slot;
    uint32_t fill_words;
    uint4* fill;  // null: none
};
static_assert(sizeof(PermuteMapParams) == 112);

struct PermuteDroppedParams {
    int64_t* out;
    uint64_t clear;
};
static_assert(sizeof(PermuteDroppedParams) == 16);

// Zero when the module is loaded, and zero again after each launch.
struct MapState {
    uint32_t arrived[kMaxTiles / 32];
    uint32_t done;
};
__device__ MapState map_states[kSlots];
__device__ unsigned long long dropped_rows;

struct MapShared {
    uint32_t by_expert[kGroups][32];  // [group of 32 tokens][expert]: bit per token
    uint32_t by_token[kGroups][32];   // [group][token]: bit per expert
    uint32_t before[kGroups][32];     // tokens of the span's earlier groups, per expert
    uint32_t base[32];                // first row of the span
    uint32_t count[32];
    uint32_t lower[kMapWarps];
    uint32_t total[kMapWarps][32];    // of this slice's experts, by warp
    uint32_t earlier[kMapWarps][32];  // of them, in earlier chunks
    int missing;
};

// Where a block works: 32 experts of a chunk of tokens.
struct Tile {
    uint32_t slices, slice, chunk;
    uint64_t first;
    uint32_t tokens;

    __device__ Tile(const PermuteMapParams& p, uint32_t at)
        : slices(ceil_div(p.experts, 32u)), slice(at % slices), chunk(at / slices) {
        first = static_cast<uint64_t>(chunk) * p.chunk_tokens;
        tokens = static_cast<uint32_t>(min(static_cast<uint64_t>(p.chunk_tokens), p.tokens - first));
    }
    __device__ uint32_t groups() const { return ceil_div(tokens, 32u); }
};

// Four bits: which bytes of `word` are not zero.
__device__ inline uint32_t nonzero_bytes(uint32_t word) {
    return ((__vcmpne4(word, 0) & 0x01010101u) * 0x01020408u) >> 24;
}

// Transposes the 32 x 32 bit matrix whose row l lane l holds.
__device__ inline uint32_t transpose_bits(uint32_t row) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t mask = 0xffffu;
#pragma unroll
    for (uint32_t side = 16; side > 0; side /= 2, mask ^= mask << side) {
        const uint32_t other = __shfl_xor_sync(kFullWarp, row, side);
        row = (lane & side) == 0 ? (row & mask) | ((other & mask) << side) : (row & ~mask) | ((other >> side) & mask);
    }
    return row;
}

// A routing mask; anything but zero routes.
template <typename Word>
struct Mask {
    static constexpr bool kIndex = false;
    static constexpr uint32_t kPerVector = 16 / sizeof(Word);

    __device__ static uint32_t vector_bits(const uint4& v) {
        if constexpr (sizeof(Word) == 1) {
            return nonzero_bytes(v.x) | nonzero_bytes(v.y) << 4 | nonzero_bytes(v.z) << 8 | nonzero_bytes(v.w) << 12;
        } else if constexpr (sizeof(Word) == 4) {
            return (v.x != 0) | (v.y != 0) << 1 | (v.z != 0) << 2 | (v.w != 0) << 3;
        } else {
            return ((v.x | v.y) != 0) | ((v.z | v.w) != 0) << 1;
        }
    }

    // Bits of 32 tokens from `first` on: of this lane's expert, and of this lane's token.
    __device__ static void pack(const PermuteMapParams& p, const Tile& tile, uint64_t first, uint32_t& by_expert,
                                uint32_t& by_token) {
        const uint64_t token = first + threadIdx.x % 32;
        const uint32_t experts = token < p.tokens ? min(p.experts - tile.slice * 32, 32u) : 0;
        const Word* from = static_cast<const Word*>(p.routing) + token * p.experts + tile.slice * 32;
        by_token = 0;
        if (p.experts % kPerVector == 0 && is_aligned(p.routing, 16)) {
            constexpr uint32_t kVectors = 32 / kPerVector;
            uint4 value[kVectors];
#pragma unroll
            for (uint32_t i = 0; i < kVectors; ++i) {
                value[i] = i * kPerVector < experts ? ptx::load_once(reinterpret_cast<const uint4*>(from) + i)
                                                    : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (uint32_t i = 0; i < kVectors; ++i) by_token |= vector_bits(value[i]) << (i * kPerVector);
        } else {
#pragma unroll 8
            for (uint32_t e = 0; e < experts; ++e) by_token |= static_cast<uint32_t>(from[e] != 0) << e;
        }
        by_expert = transpose_bits(by_token);
    }
};

// Expert ids [T, K]; ids outside [0, experts) are not routed. "Tokens" are the slots t * K + k.
struct Index {
    static constexpr bool kIndex = true;

    __device__ static void pack(const PermuteMapParams& p, const Tile& tile, uint64_t first, uint32_t& by_expert,
                                uint32_t& by_token) {
        const uint32_t lane = threadIdx.x % 32;
        const int32_t id = first + lane < p.tokens ? static_cast<const int32_t*>(p.routing)[first + lane] : -1;
        const uint32_t local = static_cast<uint32_t>(id) - tile.slice * 32;
        const bool mine = id >= 0 && static_cast<uint32_t>(id) < p.experts && local < 32;
        by_token = mine ? 1u << local : 0;
        by_expert = 0;
        for (unsigned open = __ballot_sync(kFullWarp, mine); open != 0;) {
            const uint32_t expert = __shfl_sync(kFullWarp, local, __ffs(open) - 1);
            const unsigned who = __ballot_sync(kFullWarp, mine && local == expert);
            if (lane == expert) by_expert = who;
            open &= ~who;
        }
    }
};

// Packs the groups [begin, end) of a tile into shared memory and counts them per expert (shared.count, and
// shared.before group by group). Starts and ends with a barrier. Not inlined, as count_tile: after a pause the code
// comes from memory, and one copy comes sooner than three.
template <typename Routing>
__device__ __noinline__ void pack_span(const PermuteMapParams& p, MapShared& shared, const Tile& tile, uint32_t begin,
                                       uint32_t end) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    for (uint32_t group = begin + warp; group < end; group += kMapWarps) {
        uint32_t by_expert, by_token;
        Routing::pack(p, tile, tile.first + group * 32, by_expert, by_token);
        shared.by_expert[group - begin][lane] = by_expert;
        shared.by_token[group - begin][lane] = by_token;
    }
    __syncthreads();
    if (warp == 0) {
        uint32_t running = 0;
#pragma unroll 8
        for (uint32_t group = 0; group < end - begin; ++group) {
            shared.before[group][lane] = running;
            running += __popc(shared.by_expert[group][lane]);
        }
        shared.count[lane] = running;
    }
    __syncthreads();
}

// One sum per tile, behind the counts of all tiles.
__device__ inline uint32_t* tile_sums(const PermuteMapParams& p) {
    return p.counts + static_cast<size_t>(gridDim.x - 1) * 32;
}

// Counts a tile and publishes it; several blocks may do so for one tile, with the same numbers.
template <typename Routing>
__device__ __noinline__ void count_tile(const PermuteMapParams& p, MapShared& shared, uint32_t at) {
    const Tile tile(p, at);
    const uint32_t lane = threadIdx.x % 32;
    uint32_t count = 0;
    for (uint32_t begin = 0; begin < tile.groups(); begin += kGroups) {
        const uint32_t end = min(begin + kGroups, tile.groups());
        pack_span<Routing>(p, shared, tile, begin, end);
        count += shared.count[lane];
        if constexpr (!Routing::kIndex) {
            uint8_t* shares = p.shares + tile.slice * p.tokens + tile.first + begin * 32;
            for (uint32_t i = threadIdx.x; i < min((end - begin) * 32, tile.tokens - begin * 32); i += kMapThreads) {
                shares[i] = static_cast<uint8_t>(__popc(shared.by_token[i / 32][i % 32]));
            }
        }
    }
    if (threadIdx.x < 32) {
        p.counts[at * 32 + lane] = count;
        const uint32_t all = __reduce_add_sync(kFullWarp, count);
        if (lane == 0) tile_sums(p)[at] = all;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // covers what the barrier ordered before it: all that the block published
        atomicOr(&map_states[p.slot].arrived[at / 32], 1u << (at % 32));
    }
}

// First tile that has not arrived after at most kPolls looks, -1 for none; warp 0 alone.
__device__ inline int first_missing(const PermuteMapParams& p) {
    const uint32_t lane = threadIdx.x, tiles = gridDim.x - 1;
    const bool looks = lane * 32 < tiles;
    const uint32_t rest = tiles - lane * 32;
    const uint32_t all = !looks ? 0 : rest >= 32 ? kFullWarp : (1u << rest) - 1;
    const volatile uint32_t* arrived = map_states[p.slot].arrived;
    unsigned open = 0;
    uint32_t seen = 0;
    for (int poll = 0; poll < kPolls; ++poll) {
        seen = looks ? arrived[lane] & all : 0;
        open = __ballot_sync(kFullWarp, seen != all);
        if (open == 0) return -1;
    }
    const int word = __ffs(open) - 1;
    const uint32_t absent = __shfl_sync(kFullWarp, ~seen & all, word);
    return word * 32 + __ffs(absent) - 1;
}

// Waits until every tile is published. True when it had to count for others, which overwrites the bits.
template <typename Routing>
__device__ bool wait_for_all(const PermuteMapParams& p, MapShared& shared) {
    for (bool helped = false;; helped = true) {
        if (threadIdx.x < 32) {
            const int missing = first_missing(p);
            __threadfence();
            if (threadIdx.x == 0) shared.missing = missing;
        }
        __syncthreads();
        const int missing = shared.missing;
        if (missing < 0) return helped;
        count_tile<Routing>(p, shared, static_cast<uint32_t>(missing));
    }
}

// shared.base[e] = rows before this tile's first one of expert e: all of lower slices, lower experts of this slice,
// earlier chunks. Starts and ends with a barrier.
__device__ inline void place_tile(const PermuteMapParams& p, MapShared& shared, const Tile& tile) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t chunks = (gridDim.x - 1) / tile.slices;
    const uint32_t tiles = gridDim.x - 1;
    uint32_t sum[kMaxTiles / kMapThreads];  // of the lower slices; under way together with the first counts
#pragma unroll
    for (int j = 0; j < kMaxTiles / kMapThreads; ++j) {
        const uint32_t at = threadIdx.x + j * kMapThreads;
        sum[j] = at < tiles && at % tile.slices < tile.slice ? __ldcg(tile_sums(p) + at) : 0;
    }
    uint32_t total = 0, earlier = 0;
    for (uint32_t chunk = warp; chunk < chunks; chunk += 8 * kMapWarps) {
        uint32_t count[8];
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) {
            const uint32_t at = chunk + j * kMapWarps;
            count[j] = at < chunks ? __ldcg(p.counts + (at * tile.slices + tile.slice) * 32 + lane) : 0;
        }
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) {
            total += count[j];
            earlier += chunk + j * kMapWarps < tile.chunk ? count[j] : 0;
        }
    }
    uint32_t lower = 0;
#pragma unroll
    for (const uint32_t part : sum) lower += part;
    lower = __reduce_add_sync(kFullWarp, lower);
    if (lane == 0) shared.lower[warp] = lower;
    shared.total[warp][lane] = total;
    shared.earlier[warp][lane] = earlier;
    __syncthreads();
    if (warp == 0) {
        total = earlier = 0;
#pragma unroll
        for (int from = 0; from < kMapWarps; ++from) {
            total += shared.total[from][lane];
            earlier += shared.earlier[from][lane];
        }
        uint32_t through = total;
        for (uint32_t distance = 1; distance < 32; distance *= 2) {
            const uint32_t other = __shfl_up_sync(kFullWarp, through, distance);
            if (lane >= distance) through += other;
        }
        uint32_t start = through - total + earlier;
        for (const uint32_t part : shared.lower) start += part;
        shared.base[lane] = start;
    }
    __syncthreads();
}

// Rows that expert e loses to the capacity, given where its padded rows start.
__device__ inline uint64_t rows_past(uint64_t start, uint64_t count, uint64_t capacity) {
    return start + count <= capacity ? 0 : min(count, start + count - capacity);
}

// The last block: what describes the whole permutation, per expert.
__device__ inline void describe(const PermuteMapParams& p) {
    __shared__ uint64_t scratch[kMapWarps];
    constexpr int kEach = kMaxExperts / kMapThreads;
    const uint32_t width = round_up(p.experts, 32u);
    const uint32_t chunks = (gridDim.x - 1) / (width / 32);
    __shared__ uint32_t counts[kMaxExperts];
    for (uint32_t e = threadIdx.x; e < width; e += kMapThreads) counts[e] = 0;
    __syncthreads();
    // Experts side by side, as many chunks at once as there are threads for.
    const uint32_t together = max(kMapThreads / width, 1u);
    for (uint32_t i = threadIdx.x; i < together * width; i += kMapThreads) {
        const uint32_t e = i % width;
        const uint32_t count = sum_loads(i / width, chunks, together,
                                         [&](uint32_t chunk) { return __ldcg(p.counts + chunk * width + e); });
        atomicAdd(&counts[e], count);
    }
    __syncthreads();
    const uint32_t first = threadIdx.x * kEach;
    uint32_t count[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) count[j] = first + j < width ? counts[first + j] : 0;
    uint64_t sum = 0;  // padded rows above, routed rows below
#pragma unroll
    for (int j = 0; j < kEach; ++j) sum += static_cast<uint64_t>(round_up(count[j], p.align)) << 32 | count[j];
    uint64_t total;
    uint64_t running = block_scan<kMapThreads>(sum, Sum{}, scratch, total) - sum;
    uint64_t dropped = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const uint32_t e = first + j, padded = round_up(count[j], p.align);
        const uint32_t start = static_cast<uint32_t>(running), padded_start = static_cast<uint32_t>(running >> 32);
        running += static_cast<uint64_t>(padded) << 32 | count[j];
        if (e >= p.experts) continue;
        p.ends[e] = static_cast<int32_t>(start + count[j]);
        if (p.pad_offsets != nullptr) p.pad_offsets[e] = padded_start - start;
        if (p.padded_counts != nullptr) p.padded_counts[e] = padded;
        dropped += rows_past(padded_start, count[j], p.capacity);
    }
    if (dropped != 0) atomicAdd(&dropped_rows, static_cast<unsigned long long>(dropped));
    if (threadIdx.x == 0 && p.totals != nullptr) {
        p.totals[0] = static_cast<int64_t>(total >> 32);
        p.totals[1] = static_cast<int64_t>(total & 0xffffffffu);
    }
}

// Experts that a token has in higher slices.
__device__ inline uint32_t higher_experts(const PermuteMapParams& p, const Tile& tile, uint64_t token) {
    if (token >= p.tokens) return 0;
    return sum_loads(tile.slice + 1, tile.slices, 1,
                     [&](uint32_t slice) -> uint32_t { return __ldcg(p.shares + slice * p.tokens + token); });
}

// Entries of a span's tokens in this slice, a lane per token, experts in descending order: those of higher slices
// come first. Slice 0 knows the token's number of experts. `first_higher` is that of this thread's first token.
__device__ inline void write_mask_entries(const PermuteMapParams& p, const MapShared& shared, const Tile& tile,
                                          uint32_t begin, uint32_t end, uint32_t first_higher) {
    const uint64_t width = 2 * static_cast<uint64_t>(p.experts) + 1;
    for (uint32_t i = threadIdx.x; i < (end - begin) * 32; i += kMapThreads) {
        const uint32_t group = i / 32, lane = i % 32;
        const uint64_t token = tile.first + begin * 32 + i;
        if (token >= p.tokens) continue;
        uint32_t word = shared.by_token[group][lane];
        if (word == 0 && tile.slice != 0) continue;
        uint32_t at = begin == 0 && i == threadIdx.x ? first_higher : higher_experts(p, tile, token);
        int32_t* entry = p.row_id_map + token * width;
        for (; word != 0; ++at) {
            const uint32_t expert = 31 - __clz(word);
            word ^= 1u << expert;
            const uint32_t own = shared.by_expert[group][expert] & ((1u << lane) - 1);
            entry[at] = static_cast<int32_t>(shared.base[expert] + shared.before[group][expert] + __popc(own));
            entry[p.experts + at] = static_cast<int32_t>(tile.slice * 32 + expert);
        }
        if (tile.slice == 0) entry[2 * p.experts] = static_cast<int32_t>(at);
    }
}

// Entries of a span's slots in this slice, a lane per slot; slice 0 marks those of no expert.
__device__ inline void write_index_entries(const PermuteMapParams& p, const MapShared& shared, const Tile& tile,
                                           uint32_t begin, uint32_t end) {
    const uint64_t tokens = p.tokens / p.top_k;
    for (uint32_t i = threadIdx.x; i < (end - begin) * 32; i += kMapThreads) {
        const uint32_t group = i / 32, lane = i % 32;
        const uint64_t slot = tile.first + begin * 32 + i;
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
        const uint64_t token = slot / p.top_k;
        p.row_id_map[(slot - token * p.top_k) * tokens + token] = row < p.capacity ? static_cast<int32_t>(row) : -1;
    }
}

template <typename Routing>
__device__ void write_tile(const PermuteMapParams& p, MapShared& shared, const Tile& tile, bool helped,
                           uint32_t first_higher) {
    const bool packed = !helped && tile.groups() <= kGroups;
    for (uint32_t begin = 0; begin < tile.groups(); begin += kGroups) {
        const uint32_t end = min(begin + kGroups, tile.groups());
        if (!packed) pack_span<Routing>(p, shared, tile, begin, end);
        if constexpr (Routing::kIndex) {
            write_index_entries(p, shared, tile, begin, end);
        } else {
            write_mask_entries(p, shared, tile, begin, end, first_higher);
        }
        if (end == tile.groups()) break;
        __syncthreads();
        if (threadIdx.x < 32) shared.base[threadIdx.x] += shared.count[threadIdx.x];
    }
}

template <typename Routing>
__device__ void permute_map(const PermuteMapParams& p) {
    __shared__ MapShared shared;
    ptx::wait_for_prior_grids();
    const bool describes = blockIdx.x == gridDim.x - 1;
    if (!describes) count_tile<Routing>(p, shared, blockIdx.x);
    ptx::launch_dependents();  // a permutation may start to read its rows
    for (uint32_t i = blockIdx.x * kMapThreads + threadIdx.x; i < p.fill_words; i += gridDim.x * kMapThreads) {
        p.fill[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    const bool helped = wait_for_all<Routing>(p, shared);
    // Nobody looks at `arrived` once all blocks have come here; the last one leaves the state as it was found.
    MapState& state = map_states[p.slot];
    const uint32_t earlier = threadIdx.x == 0 ? atomicAdd(&state.done, 1u) : 0;
    if (describes) {
        describe(p);
    } else {
        const Tile tile(p, blockIdx.x);
        // Under way while the tile is placed.
        const uint32_t first_higher = Routing::kIndex ? 0 : higher_experts(p, tile, tile.first + threadIdx.x);
        place_tile(p, shared, tile);
        write_tile<Routing>(p, shared, tile, helped, first_higher);
    }
    if (threadIdx.x != 0 || earlier != gridDim.x - 1) return;
    for (uint32_t& word : state.arrived) word = 0;
    state.done = 0;
}

}  // namespace te_fast

#define INSTANCE(symbol, routing)                                         \
    extern "C" __global__ void __launch_bounds__(te_fast::kMapThreads, 2) \
        symbol(const __grid_constant__ te_fast::PermuteMapParams p) {     \
        te_fast::permute_map<te_fast::routing>(p);                        \
    }

INSTANCE(permute_map_mask_u8, Mask<uint8_t>)
INSTANCE(permute_map_mask_i32, Mask<uint32_t>)
INSTANCE(permute_map_mask_i64, Mask<unsigned long long>)
INSTANCE(permute_map_index_i32, Index)

extern "C" __global__ void __launch_bounds__(32)
    permute_dropped(const __grid_constant__ te_fast::PermuteDroppedParams p) {
    te_fast::ptx::wait_for_prior_grids();
    if (threadIdx.x != 0) return;
    *p.out = static_cast<int64_t>(p.clear != 0 ? atomicExch(&te_fast::dropped_rows, 0ull)
                                               : atomicAdd(&te_fast::dropped_rows, 0ull));
}
