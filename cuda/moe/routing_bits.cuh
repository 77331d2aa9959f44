// Routing maps as bits, and the data that the blocks of a row map share (make_map.cuh).
#pragma once

#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/scan.cuh"
#include "common/vec.cuh"
#include "moe/routing.cuh"

namespace te_fast::moe {

constexpr int kPolls = 128;  // looks at `arrived`, about 0.7 us each

// Words by which the blocks of one launch synchronise; they are zero before and after the launch. Words that blocks of
// the map poll and words that other blocks poll lie in separate sectors.
struct alignas(128) MapState {
    uint32_t arrived[kMaxTiles / 32];  // a bit per tile that is counted
    uint32_t ready;                    // blocks whose part is written
    uint32_t seen;                     // blocks that have waited for that
    alignas(32) uint32_t next;         // number of the next block to start (follow_map.cuh)
};
static_assert(sizeof(MapState) == kStateBytes);

enum class RoutingType : uint32_t {
    kMask8 = kRoutingMask8,
    kMask32 = kRoutingMask32,
    kMask64 = kRoutingMask64,
    kIndex = kRoutingIndex,
};

static_assert(sizeof(uint4) == kFillWord);
struct MakeMapParams {
    const void* routing;
    int32_t* row_id_map;
    uint32_t* counts;
    uint8_t* shares;
    int32_t* ends;
    int64_t* pad_offsets;              // null: none
    int64_t* padded_counts;            // null: none
    int64_t* totals;                   // null: none
    MapState* state;                   // of this launch alone
    unsigned long long* dropped_rows;  // of the device
    uint4* fill;                       // null: none
    uint64_t capacity;                 // rows of the permuted tensor
    uint32_t tokens;                   // below 2^31; index map: tokens * top_k
    uint32_t experts;
    uint32_t top_k;  // index map, else 0
    uint32_t align;
    uint32_t chunk_tokens;
    uint32_t fill_words;
    uint32_t blocks;  // of the map: tiles and one more; 0: it is made already
    RoutingType routing_type;

    __device__ uint32_t tiles() const { return blocks - 1; }
};
static_assert(sizeof(MakeMapParams) == kMakeMapParamsBytes);

// Of a map's blocks: their threads, the groups of 32 tokens whose bits they keep in shared memory, and whether the
// launch is theirs alone. Rows follow maps of masks only.
template <int threads, int groups, bool alone>
struct MapShape {
    static constexpr int kThreads = threads;
    static constexpr int kGroups = groups;
    static constexpr bool kAlone = alone;

    __device__ static bool is_index(const MakeMapParams& p) { return alone && p.routing_type == RoutingType::kIndex; }
};

template <typename S>
struct alignas(16) MapShared {
    static constexpr int kWarps = S::kThreads / 32;
    static constexpr int kGroups = S::kGroups;
    union {
        struct {
            uint32_t by_expert[kGroups][32];  // [group of 32 tokens][expert]: bit per token
            uint32_t by_token[kGroups][32];   // [group][token]: bit per expert
            uint32_t before[kGroups][32];     // tokens of the span's earlier groups, per expert
            uint32_t base[32];                // first row of the span
            uint32_t count[32];
            uint32_t total[kWarps][32];    // of this slice's experts, by warp
            uint32_t earlier[kWarps][32];  // of them, in earlier chunks
            uint32_t lower[kWarps];        // of lower slices, by warp
        };
        struct {  // the describing block
            uint64_t scratch[kWarps];
            uint32_t counts[kMaxExperts];
        };
    };
    int missing;
};

// The tile of a block: 32 experts of a chunk of tokens.
struct MapTile {
    uint32_t slices, slice, chunk;
    uint32_t first, tokens;

    __device__ MapTile(const MakeMapParams& p, uint32_t at)
        : slices(ceil_div(p.experts, 32u)), slice(at % slices), chunk(at / slices) {
        first = chunk * p.chunk_tokens;
        tokens = min(p.chunk_tokens, p.tokens - first);
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

// Which elements of a vector are not zero; anything but zero routes.
template <typename Word>
__device__ inline uint32_t vector_bits(const uint4& v) {
    if constexpr (sizeof(Word) == 1) {
        return nonzero_bytes(v.x) | nonzero_bytes(v.y) << 4 | nonzero_bytes(v.z) << 8 | nonzero_bytes(v.w) << 12;
    } else if constexpr (sizeof(Word) == 4) {
        return (v.x != 0) | (v.y != 0) << 1 | (v.z != 0) << 2 | (v.w != 0) << 3;
    } else {
        return ((v.x | v.y) != 0) | ((v.z | v.w) != 0) << 1;
    }
}

// A bit for each of the tile's experts that the mask routes this lane's token of the group to.
template <typename Word>
__device__ inline uint32_t mask_bits(const MakeMapParams& p, const MapTile& tile, uint32_t first) {
    constexpr uint32_t kPerVector = 16 / sizeof(Word), kVectors = 32 / kPerVector,
                       kTogether = kVectors < 4 ? kVectors : 4;
    const uint32_t token = first + threadIdx.x % 32;
    const uint32_t experts = token < p.tokens ? min(p.experts - tile.slice * 32, 32u) : 0;
    const Word* from = static_cast<const Word*>(p.routing) + static_cast<size_t>(token) * p.experts + tile.slice * 32;
    uint32_t bits = 0;
    if (p.experts % kPerVector == 0 && is_aligned(p.routing, 16)) {
#pragma unroll 1
        for (uint32_t i = 0; i < kVectors; i += kTogether) {
            uint4 value[kTogether];
#pragma unroll
            for (uint32_t j = 0; j < kTogether; ++j) {
                value[j] = (i + j) * kPerVector < experts ? ptx::load_once(reinterpret_cast<const uint4*>(from) + i + j)
                                                          : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (uint32_t j = 0; j < kTogether; ++j) bits |= vector_bits<Word>(value[j]) << ((i + j) * kPerVector);
        }
    } else if (sizeof(Word) == 1 && p.experts % 4 == 0 && is_aligned(p.routing, 4)) {
        uint32_t value[8];
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) value[i] = i * 4 < experts ? reinterpret_cast<const uint32_t*>(from)[i] : 0;
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) bits |= nonzero_bytes(value[i]) << (i * 4);
    } else {
#pragma unroll 1
        for (uint32_t e = 0; e < experts; ++e) bits |= static_cast<uint32_t>(from[e] != 0) << e;
    }
    return bits;
}

// Masks of wide integers are rare, so their code is out of line: after a pause, code comes from memory.
__device__ __noinline__ uint32_t wide_mask_bits(const MakeMapParams& p, const MapTile& tile, uint32_t first) {
    return p.routing_type == RoutingType::kMask32 ? mask_bits<uint32_t>(p, tile, first)
                                                  : mask_bits<uint64_t>(p, tile, first);
}

// Packs the groups [begin, end) of a tile into shared memory.
template <typename S>
__device__ inline void pack_mask(const MakeMapParams& p, MapShared<S>& shared, const MapTile& tile, uint32_t begin,
                                 uint32_t end) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint32_t group = begin + threadIdx.x / 32; group < end; group += S::kThreads / 32) {
        const uint32_t first = tile.first + group * 32;
        const uint32_t bits =
            p.routing_type == RoutingType::kMask8 ? mask_bits<uint8_t>(p, tile, first) : wide_mask_bits(p, tile, first);
        shared.by_token[group - begin][lane] = bits;
        shared.by_expert[group - begin][lane] = transpose_bits(bits);
    }
}

// The same of slots [T, K] with expert ids; ids outside [0, experts) are not routed. "Tokens" are the slots t * K + k.
template <typename S>
__device__ __noinline__ void pack_ids(const MakeMapParams& p, MapShared<S>& shared, const MapTile& tile, uint32_t begin,
                                      uint32_t end) {
    constexpr uint32_t kWarps = S::kThreads / 32, kAhead = 4;
    const uint32_t lane = threadIdx.x % 32;
    const int32_t* ids = static_cast<const int32_t*>(p.routing);
#pragma unroll 1
    for (uint32_t group = begin + threadIdx.x / 32; group < end; group += kAhead * kWarps) {
        int32_t id[kAhead];
#pragma unroll
        for (uint32_t j = 0; j < kAhead; ++j) {
            const uint32_t slot = tile.first + (group + j * kWarps) * 32 + lane;
            id[j] = group + j * kWarps < end && slot < p.tokens ? ids[slot] : -1;
        }
#pragma unroll
        for (uint32_t j = 0; j < kAhead; ++j) {
            const uint32_t at = group + j * kWarps - begin, local = static_cast<uint32_t>(id[j]) - tile.slice * 32;
            if (begin + at >= end) break;
            const bool mine = id[j] >= 0 && static_cast<uint32_t>(id[j]) < p.experts && local < 32;
            uint32_t by_expert = 0;
#pragma unroll 1
            for (unsigned open = __ballot_sync(kFullWarp, mine); open != 0;) {
                const uint32_t expert = __shfl_sync(kFullWarp, local, __ffs(open) - 1);
                const unsigned who = __ballot_sync(kFullWarp, mine && local == expert);
                if (lane == expert) by_expert = who;
                open &= ~who;
            }
            shared.by_token[at][lane] = mine ? 1u << local : 0;
            shared.by_expert[at][lane] = by_expert;
        }
    }
}

// Packs the groups [begin, end) of a tile into shared memory and counts them per expert (shared.count, and
// shared.before group by group). Starts and ends with a barrier.
template <typename S>
__device__ inline void pack_span(const MakeMapParams& p, MapShared<S>& shared, const MapTile& tile, uint32_t begin,
                                 uint32_t end) {
    const uint32_t lane = threadIdx.x % 32;
    __syncthreads();
    S::is_index(p) ? pack_ids(p, shared, tile, begin, end) : pack_mask(p, shared, tile, begin, end);
    __syncthreads();
    if (threadIdx.x < 32) {
        uint32_t running = 0;
#pragma unroll 4
        for (uint32_t group = 0; group < end - begin; ++group) {
            shared.before[group][lane] = running;
            running += __popc(shared.by_expert[group][lane]);
        }
        shared.count[lane] = running;
    }
    __syncthreads();
}

// The same, out of line for rare cases.
template <typename S>
__device__ __noinline__ void pack_span_again(const MakeMapParams& p, MapShared<S>& shared, const MapTile& tile,
                                             uint32_t begin, uint32_t end) {
    pack_span(p, shared, tile, begin, end);
}

}  // namespace te_fast::moe
