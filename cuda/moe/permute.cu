// MoE permutation of rows: every token's row is read once and written to each of its destinations.
//
//   out[row(t, k)] = x[t], or zeros where the slot's probability is exactly 0       out_probs[row(t, k)] = probs[t, k]
//   every row of out that no token fills (padding, the end of a larger buffer) is zero, its probability too
//   with numbers, numbers[row(t, k)] = t + 1, and 0 for a row of no token; block scales are gathered by these
//   (moe/permute_scales.cu), since a scale that is written from here is a transaction of its own
//   without x, out is int32 [rows] with the number of each row's token: t + 1, -(t + 1) where the slot's probability is
//   exactly 0, and 0 for a row of no token; a cast gathers the rows by these (quantize/cast_groups.cu)
//
// Launch: map blocks + zero_blocks + tokens blocks, 128 threads; the first ones to start make the map, if it is not
//         made already (moe/make_map.cuh), the next clear rows, the others take one token each.
// Needs:  contiguous x [T, row_bytes] and out [rows, row_bytes], row_bytes even; row_bytes and rows < 2^31. Rows of a
//         multiple of 16 bytes at 16-byte aligned addresses take the vector path. Destinations outside out are skipped
//         and, in a map that this launch has made, removed.
// Moves:  row_bytes (T + rows), 4 rows of numbers, and the map.

#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/vec.cuh"
#include "moe/follow_map.cuh"
#include "moe/make_map.cuh"
#include "moe/routing.cuh"

namespace te_fast::moe {

constexpr int kVectors = 8;  // 16-byte words of a row that a thread holds at once
using Map = MapShape<kRowThreads, kLeadingMapGroups, false>;

struct PermuteParams {
    const uint8_t* x;  // null: numbers
    uint8_t* out;
    const void* probs;  // null: none
    void* out_probs;
    int32_t* numbers;  // null: none, as without x
    RowMap map;
    uint64_t row_bytes;
    ProbType prob_type;
    uint32_t behind_map;  // the launch before is the map, which has waited for all before it: x is complete
    MakeMapParams making;
};
static_assert(sizeof(PermuteParams) == kPermuteParamsBytes);

union PermuteShared {
    struct {
        Slots slots;
        bool zero[kMaxExperts];
    };
    Gaps gaps;
    MapShared<Map> map;
};

__device__ inline void clear_gaps(const PermuteParams& p, uint32_t block, Gaps& gaps) {
    load_gaps(p.map, gaps);
    for (uint64_t i = block;; i += p.map.zero_blocks) {
        const uint64_t row = gap_row(p.map, gaps, i);
        if (row >= p.map.rows) return;
        zero_row<kRowThreads>(p.out + row * p.row_bytes, p.row_bytes);
        if (threadIdx.x != 0) continue;
        if (p.numbers != nullptr) p.numbers[row] = 0;
        if (p.out_probs != nullptr) store_prob(p.out_probs, row, p.prob_type, 0.0f);
    }
}

// Moves the probabilities of a token and notes which slots are zero.
struct MoveProb {
    const PermuteParams& p;
    uint64_t first;  // the token's first probability
    bool* zero;

    __device__ uint64_t load(uint32_t column) const {
        return p.probs == nullptr ? 1 : prob_bits(p.probs, first + column, p.prob_type);
    }
    __device__ void store(int k, int32_t row, uint64_t bits) const {
        zero[k] = is_zero_prob(bits, p.prob_type);
        if (p.probs != nullptr && row >= 0) store_prob_bits(p.out_probs, row, p.prob_type, bits);
    }
};

// Writes the words of `row` that this thread holds to every destination.
template <int kWords, typename Word>
__device__ inline void scatter(const PermuteParams& p, const PermuteShared& shared, int count, uint32_t first,
                               uint32_t words, const Word (&row)[kWords]) {
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
        if (shared.slots.row[k] < 0) continue;
        Word* to = reinterpret_cast<Word*>(p.out + static_cast<uint64_t>(shared.slots.row[k]) * p.row_bytes);
        const bool zero = shared.zero[k];
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            const uint32_t at = first + j * kRowThreads;
            if (at < words) to[at] = zero ? Word{} : row[j];
        }
    }
}

// This thread's words of a part of a row that begins at word `base`.
__device__ inline void load_words(const PermuteParams& p, uint64_t token, uint32_t base, uint4 (&row)[kVectors]) {
    const uint4* x = reinterpret_cast<const uint4*>(p.x + token * p.row_bytes);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
        const uint32_t at = base + threadIdx.x + j * kRowThreads;
        if (at < p.row_bytes / 16) row[j] = ptx::load_once(x + at);
    }
}

// The token's number in each of its rows: with a sign instead of rows, without one beside them.
__device__ inline void number_rows(const PermuteParams& p, const PermuteShared& shared, uint64_t token, int count) {
    const bool beside = p.x != nullptr;
    int32_t* numbers = beside ? p.numbers : reinterpret_cast<int32_t*>(p.out);
    const int32_t number = static_cast<int32_t>(token) + 1;
#pragma unroll 1
    for (int k = threadIdx.x; k < count; k += kRowThreads) {
        const int32_t row = shared.slots.row[k];
        if (row >= 0) numbers[row] = !beside && shared.zero[k] ? -number : number;
    }
}

// Rows that do not consist of whole vectors.
__device__ inline void move_elements(const PermuteParams& p, const PermuteShared& shared, uint64_t token, int count) {
    const uint32_t words = static_cast<uint32_t>(p.row_bytes / 2);
    for (uint32_t base = 0; base < words; base += kVectors * kRowThreads) {
        uint16_t row[kVectors];
        const uint32_t first = base + threadIdx.x;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
            const uint32_t at = first + j * kRowThreads;
            if (at < words) row[j] = reinterpret_cast<const uint16_t*>(p.x + token * p.row_bytes)[at];
        }
        scatter<kVectors>(p, shared, count, first, words, row);
    }
}

__device__ inline void permute_token(const PermuteParams& p, uint32_t block, PermuteShared& shared) {
    const uint64_t token = block - p.making.blocks - p.map.zero_blocks;
    const bool vectors = p.row_bytes % 16 == 0 && p.x != nullptr && is_aligned(p.x, 16) && is_aligned(p.out, 16);
    uint4 row[kVectors];
    if (vectors) load_words(p, token, 0, row);  // the slots arrive while the row does
    if (p.behind_map != 0) ptx::wait_for_prior_grids();
    const MoveProb move{p, token * p.map.slots(), shared.zero};
    const int count = find_slots<kRowThreads>(p.making, p.map, token, shared.slots, move);
    __syncthreads();
    if (vectors) {
        const uint32_t words = static_cast<uint32_t>(p.row_bytes / 16);
        for (uint32_t base = 0;;) {
            scatter<kVectors>(p, shared, count, base + threadIdx.x, words, row);
            base += kVectors * kRowThreads;
            if (base >= words) break;
            load_words(p, token, base, row);
        }
    } else if (p.x != nullptr) {
        move_elements(p, shared, token, count);
    }
    if (p.x == nullptr || p.numbers != nullptr) number_rows(p, shared, token, count);
    if (p.making.blocks == 0) return;
    strike_dropped<kRowThreads>(p.map, token, shared.slots, count);
    leave_map<kRowThreads>(p.making, block);
}

__device__ inline void permute(const PermuteParams& p) {
    __shared__ PermuteShared shared;
    if (p.behind_map == 0) ptx::wait_for_prior_grids();
    const uint32_t block = take_number(p.making);
    if (block < p.making.blocks) return make_map(p.making, shared.map, block);
    if (block - p.making.blocks >= p.map.zero_blocks) return permute_token(p, block, shared);
    if (p.behind_map != 0) ptx::wait_for_prior_grids();
    await_map<kRowThreads>(p.making);
    __syncthreads();
    clear_gaps(p, block - p.making.blocks, shared.gaps);
    leave_map<kRowThreads>(p.making, block);
}

extern "C" __global__ void __launch_bounds__(kRowThreads, 7) permute_fwd(const __grid_constant__ PermuteParams p) {
    permute(p);
}

}  // namespace te_fast::moe
