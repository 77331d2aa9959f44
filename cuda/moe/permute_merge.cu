// The inverse of an MoE permutation: gathers and sums a token's rows, with or without probabilities.
//
//   fwd: out[t] = sum over k of p[t, k] * x[row(t, k)], float32, one multiplication and one addition per term, in the
//        order of the map (descending rows), no fused rounding: the host kernel gives the same bits
//        out_probs[t, e] = in_probs[row(t, k)] for the expert e of slot k, else 0: the gradient of their permutation
//   bwd: dx[row(t, k)] = p[t, k] * dout[t]       dprobs[t, k] = sum over columns of dout[t] * x[row(t, k)]
//        rows of dx that no token fills are zero, dprobs of slots that no expert takes are zero
//
//   ends[part][e]: over the tokens of a part, the row after expert e's last one; bwd finds the gaps from it
//
// Launch: permute_ends: any number of blocks (that is `partials`), 512 threads.
//         fwd: one block per token. bwd: zero_blocks + tokens blocks, the first zero_blocks clear rows. 128 threads.
// Needs:  contiguous tensors; any cols (a multiple of 8 at 16-byte aligned addresses takes the vector path).
//         dprobs is summed in a fixed order: per thread, per warp, then over warps and column chunks.
// Moves:  fwd: sizeof(T) cols (T + rows). bwd: sizeof(T) cols (T + 2 rows). And the map.

#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/vec.cuh"
#include "moe/routing.cuh"

namespace te_fast::moe {

constexpr int kWarps = kRowThreads / 32;
constexpr int kFew = 4;    // rows of a token that threads find together
constexpr int kDots = 32;  // dot products of a token that are in shared memory at once

struct UnpermuteParams {
    const void* x;
    void* out;
    const void* probs;     // null: ones
    const void* in_probs;  // [rows], null: none
    void* out_probs;       // [T, E]
    RowMap map;            // no ends, no zero blocks
    uint64_t cols;
    ProbType prob_type;
    ProbType out_prob_type;
};
static_assert(sizeof(UnpermuteParams) == kUnpermuteParamsBytes);

struct UnpermuteBwdParams {
    const void* dout;
    const void* x;
    void* dx;
    const void* probs;
    void* dprobs;  // type of probs
    RowMap map;
    uint64_t cols;
    ProbType prob_type;
    uint32_t unused;
};
static_assert(sizeof(UnpermuteBwdParams) == kUnpermuteBwdParamsBytes);

struct PermuteEndsParams {
    const int32_t* row_id_map;
    int32_t* ends;
    uint64_t tokens;
    uint32_t experts;
    uint32_t top_k;
};
static_assert(sizeof(PermuteEndsParams) == kPermuteEndsParamsBytes);

struct MergeShared {
    Slots slots;
    float prob[kMaxExperts];
};

// acc + p * x, rounded twice.
__device__ inline float add_scaled(float acc, float p, float x) { return __fadd_rn(acc, __fmul_rn(p, x)); }

__device__ inline float slot_prob(const RowMap& m, const void* probs, ProbType type, uint64_t token, const Slots& slots,
                                  int k) {
    const bool read = probs != nullptr && slots.row[k] >= 0;
    return read ? load_prob(probs, token * m.slots() + slots.column[k], type) : 1.0f;
}

// Reads slots and, if there are more than `few`, their probabilities. Ends with a barrier.
__device__ inline int load_merge(const RowMap& m, const void* probs, ProbType type, uint64_t token, MergeShared& shared,
                                 int few = 0) {
    const int count = load_slots<kRowThreads>(m, token, shared.slots);
    for (int k = threadIdx.x; k < count && count > few; k += kRowThreads) {
        shared.prob[k] = slot_prob(m, probs, type, token, shared.slots, k);
    }
    __syncthreads();
    return count;
}

// At most kRows rows: every thread reads the probabilities, which come beside the rows; kCols vectors of eight columns
// of each row are in flight per thread.
template <int kRows, int kCols, Floating T>
__device__ void merge_few(const UnpermuteParams& p, const Slots& slots, uint64_t token, int count) {
    const T* x = static_cast<const T*>(p.x);
    T* out = static_cast<T*>(p.out) + token * p.cols;
    int64_t row[kRows];
    float prob[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
        row[j] = j < count ? slots.row[j] : -1;
        prob[j] = j < count ? slot_prob(p.map, p.probs, p.prob_type, token, slots, j) : 0.0f;
    }
    for (uint64_t base = threadIdx.x * 8ull; base < p.cols; base += kRowThreads * 8 * kCols) {
        Raw8<T> raw[kCols][kRows];
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
            const uint64_t col = base + c * kRowThreads * 8;
#pragma unroll
            for (int j = 0; j < kRows; ++j) {
                const bool read = row[j] >= 0 && col < p.cols;
                raw[c][j] = read ? load8<T>(x + static_cast<uint64_t>(row[j]) * p.cols + col) : zero8<T>();
            }
        }
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
            const uint64_t col = base + c * kRowThreads * 8;
            if (col >= p.cols) break;
            float acc[8] = {};
#pragma unroll
            for (int j = 0; j < kRows; ++j) {
                if (row[j] < 0) continue;
                float value[8];
                unpack8<T>(raw[c][j], value);
#pragma unroll
                for (int i = 0; i < 8; ++i) acc[i] = add_scaled(acc[i], prob[j], value[i]);
            }
            store8<T, true>(out + col, pack8<T>(acc));
        }
    }
}

// Any number of rows, kRows of them in flight per thread.
template <int kRows, Floating T>
__device__ void merge_vectors(const UnpermuteParams& p, const MergeShared& shared, uint64_t token, int count) {
    const T* x = static_cast<const T*>(p.x);
    T* out = static_cast<T*>(p.out) + token * p.cols;
    for (uint64_t col = threadIdx.x * 8ull; col < p.cols; col += kRowThreads * 8) {
        float acc[8] = {};
        for (int first = 0; first < count; first += kRows) {
            Raw8<T> raw[kRows];
#pragma unroll
            for (int j = 0; j < kRows; ++j) {
                const int64_t row = first + j < count ? shared.slots.row[first + j] : -1;
                raw[j] = row >= 0 ? load8<T>(x + static_cast<uint64_t>(row) * p.cols + col) : zero8<T>();
            }
#pragma unroll
            for (int j = 0; j < kRows; ++j) {
                if (first + j >= count || shared.slots.row[first + j] < 0) continue;
                const float prob = shared.prob[first + j];
                float value[8];
                unpack8<T>(raw[j], value);
#pragma unroll
                for (int i = 0; i < 8; ++i) acc[i] = add_scaled(acc[i], prob, value[i]);
            }
        }
        store8<T, true>(out + col, pack8<T>(acc));
    }
}

template <Floating T>
__device__ void merge_elements(const UnpermuteParams& p, const MergeShared& shared, uint64_t token, int count) {
    const T* x = static_cast<const T*>(p.x);
    for (uint64_t col = threadIdx.x; col < p.cols; col += kRowThreads) {
        float acc = 0.0f;
        for (int k = 0; k < count; ++k) {
            if (shared.slots.row[k] < 0) continue;
            acc =
                add_scaled(acc, shared.prob[k], to_float(x[static_cast<uint64_t>(shared.slots.row[k]) * p.cols + col]));
        }
        static_cast<T*>(p.out)[token * p.cols + col] = from_float<T>(acc);
    }
}

template <Floating T>
__device__ void unpermute(const UnpermuteParams& p) {
    __shared__ MergeShared shared;
    ptx::wait_for_prior_grids();
    const uint64_t token = blockIdx.x;
    const uint64_t width = p.map.slots();
    if (p.out_probs != nullptr) {
        for (uint64_t e = threadIdx.x; e < width; e += kRowThreads)
            store_prob(p.out_probs, token * width + e, p.out_prob_type, 0.0f);
    }
    const bool vectors = p.cols % 8 == 0 && is_aligned(p.x, 16) && is_aligned(p.out, 16);
    const int count = load_merge(p.map, p.probs, p.prob_type, token, shared, vectors ? kFew : 0);
    if (p.out_probs != nullptr) {  // the zeros above are ordered before by the barrier in load_merge
        for (int k = threadIdx.x; k < count; k += kRowThreads) {
            if (shared.slots.row[k] < 0) continue;
            const uint64_t to = token * width + shared.slots.column[k];
            const uint64_t bits = prob_bits(p.in_probs, static_cast<uint64_t>(shared.slots.row[k]), p.out_prob_type);
            store_prob_bits(p.out_probs, to, p.out_prob_type, bits);
        }
    }
    if (!vectors) return merge_elements<T>(p, shared, token, count);
    if (count <= 2) return merge_few<2, 2, T>(p, shared.slots, token, count);
    if (count <= kFew) return merge_few<kFew, sizeof(T) == 4 ? 1 : 2, T>(p, shared.slots, token, count);
    merge_vectors<sizeof(T) == 4 ? 4 : 8, T>(p, shared, token, count);
}

struct BwdShared {
    union {
        MergeShared merge;
        Gaps gaps;
    };
    float dot[kDots][kWarps];
};

// Adds this thread's dot product of slot k to its warp's sum.
__device__ inline void add_dot(BwdShared& shared, int k, float dot) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) dot += __shfl_xor_sync(kFullWarp, dot, lane);
    if (threadIdx.x % 32 == 0) shared.dot[k % kDots][threadIdx.x / 32] += dot;
}

// One chunk of columns: dout stays in registers while the rows of slots [begin, end) pass, the next row loading
// while one is worked on.
template <Floating T>
struct VectorChunk {
    static constexpr int kHeld = sizeof(T) == 4 ? 2 : 4;  // vectors of eight elements per thread
    static constexpr uint64_t kCols = static_cast<uint64_t>(kHeld) * kRowThreads * 8;

    __device__ static void load(const T* row, uint64_t col0, uint64_t cols, Raw8<T> (&to)[kHeld]) {
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
            const uint64_t col = col0 + j * kRowThreads * 8;
            to[j] = col < cols ? load8<T>(row + col) : zero8<T>();
        }
    }

    // First slot from k on that has a row.
    __device__ static int next(const BwdShared& shared, int k, int end) {
        while (k < end && shared.merge.slots.row[k] < 0) ++k;
        return k;
    }

    // dx = prob * grad; returns the dot product of grad and x.
    __device__ static float step(T* dx, uint64_t col0, uint64_t cols, float prob, const Raw8<T> (&grad)[kHeld],
                                 const Raw8<T> (&x)[kHeld]) {
        float dot = 0.0f;
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
            const uint64_t col = col0 + j * kRowThreads * 8;
            float g[8], v[8];
            unpack8<T>(grad[j], g);
            unpack8<T>(x[j], v);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                dot += g[i] * v[i];
                g[i] = __fmul_rn(prob, g[i]);
            }
            if (col < cols) store8<T, true>(dx + col, pack8<T>(g));
        }
        return dot;
    }

    __device__ static void run(const UnpermuteBwdParams& p, BwdShared& shared, uint64_t token, uint64_t base, int begin,
                               int end) {
        const uint64_t col0 = base + threadIdx.x * 8ull;
        const auto row = [&](int k) { return static_cast<uint64_t>(shared.merge.slots.row[k]) * p.cols; };
        const T* x = static_cast<const T*>(p.x);
        Raw8<T> grad[kHeld], now[kHeld], later[kHeld];
        load(static_cast<const T*>(p.dout) + token * p.cols, col0, p.cols, grad);
        int k = next(shared, begin, end);
        if (k < end) load(x + row(k), col0, p.cols, now);
        while (k < end) {
            const int after = next(shared, k + 1, end);
            if (after < end) load(x + row(after), col0, p.cols, later);
            add_dot(shared, k, step(static_cast<T*>(p.dx) + row(k), col0, p.cols, shared.merge.prob[k], grad, now));
#pragma unroll
            for (int j = 0; j < kHeld; ++j) now[j] = later[j];
            k = after;
        }
    }
};

template <Floating T>
struct ElementChunk {
    static constexpr uint64_t kCols = UINT64_MAX;

    __device__ static void run(const UnpermuteBwdParams& p, BwdShared& shared, uint64_t token, uint64_t, int begin,
                               int end) {
        const T* dout = static_cast<const T*>(p.dout) + token * p.cols;
        for (int k = begin; k < end; ++k) {
            const int64_t row = shared.merge.slots.row[k];
            if (row < 0) continue;
            const T* x = static_cast<const T*>(p.x) + static_cast<uint64_t>(row) * p.cols;
            T* dx = static_cast<T*>(p.dx) + static_cast<uint64_t>(row) * p.cols;
            float dot = 0.0f;
            for (uint64_t col = threadIdx.x; col < p.cols; col += kRowThreads) {
                const float grad = to_float(dout[col]);
                dot += grad * to_float(x[col]);
                dx[col] = from_float<T>(__fmul_rn(shared.merge.prob[k], grad));
            }
            add_dot(shared, k, dot);
        }
    }
};

template <typename Chunk>
__device__ void unpermute_token(const UnpermuteBwdParams& p, BwdShared& shared) {
    const uint64_t token = blockIdx.x - p.map.zero_blocks;
    const uint64_t width = p.map.slots();
    for (uint64_t e = threadIdx.x; e < width; e += kRowThreads)
        store_prob(p.dprobs, token * width + e, p.prob_type, 0.0f);
    const int count = load_merge(p.map, p.probs, p.prob_type, token, shared.merge);
    for (int begin = 0; begin < count; begin += kDots) {
        const int end = min(begin + kDots, count);
        for (int i = threadIdx.x; i < kDots * kWarps; i += kRowThreads) shared.dot[i / kWarps][i % kWarps] = 0.0f;
        __syncthreads();
        for (uint64_t base = 0; base < p.cols; base += min(Chunk::kCols, p.cols - base)) {
            Chunk::run(p, shared, token, base, begin, end);
        }
        __syncthreads();
        for (int k = begin + static_cast<int>(threadIdx.x); k < end; k += kRowThreads) {
            if (shared.merge.slots.row[k] < 0) continue;
            float dot = 0.0f;
            for (int warp = 0; warp < kWarps; ++warp) dot += shared.dot[k - begin][warp];
            store_prob(p.dprobs, token * width + shared.merge.slots.column[k], p.prob_type, dot);
        }
        __syncthreads();
    }
}

template <Floating T>
__device__ void unpermute_bwd(const UnpermuteBwdParams& p) {
    __shared__ BwdShared shared;
    ptx::wait_for_prior_grids();
    if (blockIdx.x < p.map.zero_blocks) {
        load_gaps(p.map, shared.gaps);
        for (uint64_t i = blockIdx.x;; i += p.map.zero_blocks) {
            const uint64_t row = gap_row(p.map, shared.gaps, i);
            if (row >= p.map.rows) return;
            zero_row<kRowThreads>(static_cast<uint8_t*>(p.dx) + row * p.cols * sizeof(T), p.cols * sizeof(T));
        }
    }
    const bool vectors = p.cols % 8 == 0 && is_aligned(p.dout, 16) && is_aligned(p.x, 16) && is_aligned(p.dx, 16);
    vectors ? unpermute_token<VectorChunk<T>>(p, shared) : unpermute_token<ElementChunk<T>>(p, shared);
}

// Eight lanes per token (mask), or every entry alike (index, one group).
__device__ inline void find_ends(const PermuteEndsParams& p) {
    __shared__ int32_t ends[kMaxExperts];
    ptx::wait_for_prior_grids();
    const uint32_t groups = p.experts != 0 ? p.experts : 1;
    for (uint32_t e = threadIdx.x; e < groups; e += kEndsThreads) ends[e] = 0;
    __syncthreads();
    const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * kEndsThreads + threadIdx.x;
    const uint64_t threads = static_cast<uint64_t>(gridDim.x) * kEndsThreads;
    if (p.experts == 0) {
        for (uint64_t i = thread; i < p.tokens * p.top_k; i += threads) atomicMax(&ends[0], p.row_id_map[i] + 1);
    } else {
        const int experts = static_cast<int>(p.experts);
        for (uint64_t token = thread / 8; token < p.tokens; token += threads / 8) {
            const int32_t* entry = p.row_id_map + token * (2 * static_cast<uint64_t>(p.experts) + 1);
            const int count = min(max(entry[2 * experts], 0), experts);
            for (int k = static_cast<int>(thread % 8); k < count; k += 8) {
                const int expert = entry[experts + k];
                if (expert >= 0 && expert < experts) atomicMax(&ends[expert], entry[k] + 1);
            }
        }
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < groups; e += kEndsThreads) p.ends[blockIdx.x * groups + e] = ends[e];
}

// `blocks` per multiprocessor: a block of fwd mostly waits for the map and for its rows, so many blocks are better than
// many loads in flight in each; bwd holds two rows and the gradient in registers.
#define INSTANCE(symbol, kernel, params, type, blocks)                                                           \
    extern "C" __global__ void __launch_bounds__(kRowThreads, blocks) symbol(const __grid_constant__ params p) { \
        kernel<type>(p);                                                                                         \
    }

INSTANCE(unpermute_fwd_f32, unpermute, UnpermuteParams, f32, 8)
INSTANCE(unpermute_fwd_f16, unpermute, UnpermuteParams, f16, 8)
INSTANCE(unpermute_fwd_bf16, unpermute, UnpermuteParams, bf16, 8)
INSTANCE(unpermute_bwd_f32, unpermute_bwd, UnpermuteBwdParams, f32, 5)
INSTANCE(unpermute_bwd_f16, unpermute_bwd, UnpermuteBwdParams, f16, 5)
INSTANCE(unpermute_bwd_bf16, unpermute_bwd, UnpermuteBwdParams, bf16, 5)

extern "C" __global__ void __launch_bounds__(kEndsThreads) permute_ends(const __grid_constant__ PermuteEndsParams p) {
    find_ends(p);
}

}  // namespace te_fast::moe
