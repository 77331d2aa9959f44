// MoE permutation of rows: every token's row is read once and written to each of its destinations.
//
//   out[row(t, k)] = x[t], or zeros where the slot's probability is exactly 0       out_probs[row(t, k)] = probs[t, k]
//   every row of out that no token fills (padding, the end of a larger buffer) is zero, its probability too
//
// Launch: zero_blocks + tokens blocks, 128 threads; the first zero_blocks clear rows, the others take one token each.
// Needs:  contiguous x [T, row_bytes] and out [rows, row_bytes], row_bytes even; row_bytes and rows < 2^31. Rows of a
//         multiple of 16 bytes at 16-byte aligned addresses take the vector path. Destinations outside out are skipped
//         and, in a map that the launch before has made, struck off.
// Moves:  row_bytes (T + rows), and the map.

#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/routing.cuh"
#include "common/vec.cuh"

namespace te_fast {

constexpr int kVectors = 8;  // 16-byte words of a row that a thread holds at once

struct PermuteParams {
    const uint8_t* x;
    uint8_t* out;
    const void* probs;  // null: none
    void* out_probs;
    RowMap map;
    uint64_t row_bytes;
    ProbType prob_type;
    // The launch before is the row map, which has waited for all before it: x is complete. The map is this call's own.
    uint32_t behind_map;
};
static_assert(sizeof(PermuteParams) == 104);

struct PermuteShared {
    union {
        Slots slots;
        Gaps gaps;
    };
    bool zero[kMaxExperts];
};

__device__ inline void clear_gaps(const PermuteParams& p, Gaps& gaps) {
    load_gaps(p.map, gaps);
    for (uint64_t i = blockIdx.x;; i += p.map.zero_blocks) {
        const uint64_t row = gap_row(p.map, gaps, i);
        if (row >= p.map.rows) return;
        zero_row<kRowThreads>(p.out + row * p.row_bytes, p.row_bytes);
        if (p.out_probs != nullptr && threadIdx.x == 0) store_prob(p.out_probs, row, p.prob_type, 0.0f);
    }
}

// Moves the probabilities and notes which slots are zero.
__device__ inline void permute_probs(const PermuteParams& p, uint64_t token, int count, PermuteShared& shared) {
    const uint64_t first = token * p.map.slots();
    for (int k = threadIdx.x; k < count; k += kRowThreads) {
        shared.zero[k] = false;
        if (p.probs == nullptr || shared.slots.row[k] < 0) continue;
        const uint64_t from = first + shared.slots.column[k];
        copy_prob(p.probs, from, p.out_probs, static_cast<uint64_t>(shared.slots.row[k]), p.prob_type);
        shared.zero[k] = is_zero_prob(p.probs, from, p.prob_type);
    }
}

// Writes the words of `row` that this thread holds to every destination.
template <int kWords, typename Word>
__device__ inline void scatter(const PermuteParams& p, const PermuteShared& shared, int count, uint32_t first,
                               uint32_t words, const Word (&row)[kWords]) {
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

__device__ inline uint4 load_word(const uint4* from) { return ptx::load_once(from); }
__device__ inline uint16_t load_word(const uint16_t* from) { return *from; }

template <typename Word>
__device__ void permute_token(const PermuteParams& p, PermuteShared& shared) {
    const uint64_t token = blockIdx.x - p.map.zero_blocks;
    const uint32_t words = static_cast<uint32_t>(p.row_bytes / sizeof(Word));
    const Word* x = reinterpret_cast<const Word*>(p.x + token * p.row_bytes);
    Word row[kVectors];
    int count = 0;
    for (uint32_t base = 0; base < words; base += kVectors * kRowThreads) {
        const uint32_t first = base + threadIdx.x;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
            const uint32_t at = first + j * kRowThreads;
            if (at < words) row[j] = load_word(x + at);
        }
        if (base == 0) {  // the slots arrive while the row does
            if (p.behind_map != 0) ptx::wait_for_prior_grids();
            count = load_slots<kRowThreads>(p.map, token, shared.slots);
            permute_probs(p, token, count, shared);
            __syncthreads();
        }
        scatter<kVectors>(p, shared, count, first, words, row);
    }
    if (p.behind_map != 0) strike_dropped<kRowThreads>(p.map, token, shared.slots, count);
}

__device__ inline void permute(const PermuteParams& p) {
    __shared__ PermuteShared shared;
    const bool clears = blockIdx.x < p.map.zero_blocks;
    if (clears || p.behind_map == 0) ptx::wait_for_prior_grids();
    if (clears) return clear_gaps(p, shared.gaps);
    const bool vectors = p.row_bytes % 16 == 0 && is_aligned(p.x, 16) && is_aligned(p.out, 16);
    vectors ? permute_token<uint4>(p, shared) : permute_token<uint16_t>(p, shared);
}

}  // namespace te_fast

extern "C" __global__ void __launch_bounds__(te_fast::kRowThreads, 7)
    permute_fwd(const __grid_constant__ te_fast::PermuteParams p) {
    te_fast::permute(p);
}
