// Readers of a row map for MoE kernels: the rows of the permuted tensor for a token, and the rows without a token.
//
// Two layouts, both int32 and both Transformer Engine's:
//   mask   [T, 2E + 1]: n destination rows, descending, from entry 0; their experts from entry E; n in entry 2E.
//          The rows do not count padding; pad_offsets [E] adds it. Slots that were dropped are not among the n.
//   index  [K, T]: the destination of slot k of token t, -1 where it was dropped.
// A map may come from anywhere, so every entry is checked against the tensor that it points into.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/constants.cuh"
#include "common/math.cuh"
#include "common/scan.cuh"
#include "common/types.cuh"

namespace te_fast::moe {

enum class ProbType : uint32_t { kF32 = kProbF32, kF16 = kProbF16, kBf16 = kProbBf16, kF64 = kProbF64 };

__device__ inline float load_prob(const void* probs, size_t i, ProbType type) {
    if (type == ProbType::kF32) return static_cast<const float*>(probs)[i];
    if (type == ProbType::kF16) return to_float(static_cast<const f16*>(probs)[i]);
    if (type == ProbType::kBf16) return to_float(static_cast<const bf16*>(probs)[i]);
    return static_cast<float>(static_cast<const double*>(probs)[i]);
}

__device__ inline void store_prob(void* probs, size_t i, ProbType type, float value) {
    if (type == ProbType::kF32) {
        static_cast<float*>(probs)[i] = value;
    } else if (type == ProbType::kF16) {
        static_cast<f16*>(probs)[i] = from_float<f16>(value);
    } else if (type == ProbType::kBf16) {
        static_cast<bf16*>(probs)[i] = from_float<bf16>(value);
    } else {
        static_cast<double*>(probs)[i] = value;
    }
}

// The bits of a probability, so that a NaN keeps its payload when it moves.
__device__ inline uint64_t prob_bits(const void* probs, size_t i, ProbType type) {
    if (type == ProbType::kF32) return static_cast<const uint32_t*>(probs)[i];
    if (type == ProbType::kF64) return static_cast<const uint64_t*>(probs)[i];
    return static_cast<const uint16_t*>(probs)[i];
}

__device__ inline void store_prob_bits(void* probs, size_t i, ProbType type, uint64_t bits) {
    if (type == ProbType::kF32) {
        static_cast<uint32_t*>(probs)[i] = static_cast<uint32_t>(bits);
    } else if (type == ProbType::kF64) {
        static_cast<uint64_t*>(probs)[i] = bits;
    } else {
        static_cast<uint16_t*>(probs)[i] = static_cast<uint16_t>(bits);
    }
}

// Exactly 0 of either sign. A small double may be nonzero although its float is 0.
__device__ inline bool is_zero_prob(uint64_t bits, ProbType type) {
    const int unused = type == ProbType::kF32 ? 32 : type == ProbType::kF64 ? 0 : 48;
    return bits << unused << 1 == 0;
}

struct RowMap {
    int32_t* map;                // written by strike_dropped alone
    const int64_t* pad_offsets;  // [E], null: none
    const int32_t* ends;         // [partials][E]: per part of the tokens, the row behind the last of each expert
    uint64_t tokens;
    uint64_t rows;     // of the permuted tensor, below 2^31
    uint32_t experts;  // mask map, else 0
    uint32_t top_k;    // index map, else 0
    uint32_t partials;
    uint32_t zero_blocks;  // leading blocks that clear the rows no token fills

    // Columns of the probabilities.
    __device__ uint32_t slots() const { return experts != 0 ? experts : top_k; }
    __device__ uint32_t groups() const { return experts != 0 ? experts : 1; }
};
static_assert(sizeof(RowMap) == kRowMapBytes);

// One token's slots. `row` is -1 for a slot that has no row in the permuted tensor; `column` is its place among the
// token's probabilities.
struct Slots {
    int32_t row[kMaxExperts];
    uint16_t column[kMaxExperts];
};

// No data that moves with a slot.
struct MoveNothing {
    __device__ uint32_t load(uint32_t) const { return 0; }
    __device__ void store(int, int32_t, uint32_t) const {}
};

// Reads the slots of `token`, all threads together; the caller places the barrier. Returns their number. `move` loads
// what belongs to a column while the row is on its way, and stores it once the row is known (-1: none).
template <int kThreads, typename Move = MoveNothing>
__device__ inline int load_slots(const RowMap& m, uint64_t token, Slots& slots, const Move& move = {}) {
    if (m.experts == 0) {
#pragma unroll 1
        for (uint32_t k = threadIdx.x; k < m.top_k; k += kThreads) {
            const auto held = move.load(k);
            const int32_t row = m.map[k * m.tokens + token];
            slots.row[k] = row >= 0 && static_cast<uint64_t>(row) < m.rows ? row : -1;
            slots.column[k] = static_cast<uint16_t>(k);
            move.store(k, slots.row[k], held);
        }
        return static_cast<int>(m.top_k);
    }
    const int experts = static_cast<int>(m.experts);
    const int32_t* entry = m.map + token * (2 * static_cast<uint64_t>(m.experts) + 1);
    const int count = min(max(entry[2 * experts], 0), experts);
#pragma unroll 1
    for (int k = threadIdx.x; k < count; k += kThreads) {
        int64_t row = entry[k];
        const int expert = entry[experts + k];
        const bool known = expert >= 0 && expert < experts;
        const auto held = move.load(known ? expert : 0);
        if (row >= 0 && known && m.pad_offsets != nullptr) row += m.pad_offsets[expert];
        slots.row[k] = known && row >= 0 && row < static_cast<int64_t>(m.rows) ? static_cast<int32_t>(row) : -1;
        slots.column[k] = static_cast<uint16_t>(known ? expert : 0);
        move.store(k, slots.row[k], held);
    }
    return count;
}

// Removes the slots without a row from the token's list, in a mask map that was made for this tensor: rows descend, so
// they are its first ones. All threads, behind the barrier that follows load_slots.
template <int kThreads>
__device__ inline void strike_dropped(const RowMap& m, uint64_t token, const Slots& slots, int count) {
    if (m.experts == 0 || count == 0 || slots.row[0] >= 0) return;
    int dropped = 1;
#pragma unroll 1
    while (dropped < count && slots.row[dropped] < 0) ++dropped;
    int32_t* entry = m.map + token * (2 * static_cast<uint64_t>(m.experts) + 1);
#pragma unroll 1
    for (int k = threadIdx.x; k < count - dropped; k += kThreads) {
        const int expert = slots.column[dropped + k];
        const int32_t pad = m.pad_offsets == nullptr ? 0 : static_cast<int32_t>(m.pad_offsets[expert]);
        entry[k] = slots.row[dropped + k] - pad;
        entry[m.experts + k] = expert;
    }
    if (threadIdx.x == 0) entry[2 * m.experts] = count - dropped;
}

// Rows without a token: the padding after each expert and the rest of the tensor.
struct Gaps {
    int32_t end[kMaxExperts];  // first unpadded row behind expert e
    int32_t pad_offset[kMaxExperts];
    int32_t scratch[kRowThreads / 32];
};

// All threads of the block; ends with a barrier.
__device__ inline void load_gaps(const RowMap& m, Gaps& gaps) {
    const int groups = static_cast<int>(m.groups());
    const int each = ceil_div(groups, kRowThreads);
    const int first = static_cast<int>(threadIdx.x) * each, last = min(first + each, groups);
    int32_t running = 0, total;
#pragma unroll 1
    for (int e = first; e < last; ++e) {
#pragma unroll 1
        for (uint32_t part = 0; part < m.partials; ++part) {
            running = max(running, m.ends[static_cast<size_t>(part) * groups + e]);
        }
        gaps.end[e] = running;
        gaps.pad_offset[e] = m.pad_offsets == nullptr ? 0 : static_cast<int32_t>(m.pad_offsets[e]);
    }
    const int32_t through = block_scan<kRowThreads>(running, Maximum{}, gaps.scratch, total);
    const int32_t before = __shfl_up_sync(kFullWarp, through, 1);
    __shared__ int32_t warp_last[kRowThreads / 32];
    if (threadIdx.x % 32 == 31) warp_last[threadIdx.x / 32] = through;
    __syncthreads();
    int32_t carried = before;
    if (threadIdx.x % 32 == 0) carried = threadIdx.x == 0 ? 0 : warp_last[threadIdx.x / 32 - 1];
#pragma unroll 1
    for (int e = first; e < last; ++e) gaps.end[e] = max(gaps.end[e], carried);
    __syncthreads();
}

// The p-th of those rows, ascending; at or past m.rows when there are no more. pad_offsets is ascending, so the
// padding that p lies in belongs to the last expert whose offset is not above p.
__device__ inline uint64_t gap_row(const RowMap& m, const Gaps& gaps, uint64_t p) {
    int low = 0, high = static_cast<int>(m.groups()) - 1;
    if (m.pad_offsets == nullptr) low = high;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (static_cast<uint64_t>(gaps.pad_offset[middle]) <= p) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return static_cast<uint64_t>(gaps.end[low]) + p;
}

// Writes `bytes` zero bytes at `to`, all threads of the block; bytes is even.
template <int kThreads>
__device__ inline void zero_row(uint8_t* to, uint64_t bytes) {
    if ((reinterpret_cast<uintptr_t>(to) | bytes) % 16 == 0) {
#pragma unroll 2
        for (uint64_t i = threadIdx.x; i < bytes / 16; i += kThreads) {
            reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
        }
    } else {
#pragma unroll 1
        for (uint64_t i = threadIdx.x; i < bytes / 2; i += kThreads) reinterpret_cast<uint16_t*>(to)[i] = 0;
    }
}

}  // namespace te_fast::moe
